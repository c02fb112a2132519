"""What a microbatch holds between its ops, in bytes: measured once, on the first one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves


class HeldBytes:
    """`weights`: the flat buffer of the stage's weights, which are held anyway."""

    def __init__(self, weights: Callable[[], Tensor]) -> None:
        self._weights = weights
        self._kept: list[Tensor] = []
        self.forward = self.weight = -1  # from F to I, from I to W; not measured yet

    def measured(self) -> AbstractContextManager[Any]:
        """For a forward: what it keeps for its backward is counted, if it has not been yet."""
        return nullcontext() if self.forward >= 0 else _Counted(self)

    def keep(self, *values: Any) -> None:
        """A recomputed layer keeps these, and nothing else."""
        if self.forward < 0:
            self._kept.extend(leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))

    def counted(self) -> None:
        self.forward = self.of(self._kept)
        self._kept.clear()

    def of(self, tensors: Iterable[Tensor]) -> int:
        """Memory of the storages behind some tensors, the weights' own left out."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        storages.pop(self._weights().untyped_storage().data_ptr(), None)
        return sum(storages.values())


class _Counted(saved_tensors_hooks):
    def __init__(self, held: HeldBytes) -> None:
        self._held = held
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._held.keep(tensor := tensor.detach())
        return tensor

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self._held.counted()
