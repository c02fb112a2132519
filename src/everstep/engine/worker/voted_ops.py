"""The ops of voted microbatches, with hashes of what they are given and what they make.

The host hashes beside its usual ops; the checker runs F, I and W of the same microbatch by itself and adds
nothing to its sums. The hash of a gradient is that of the contribution of this one microbatch, before it is
added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from everstep.engine.fingerprint import Partial, partial_hash, settled
from everstep.engine.layers.boundary import Boundary, Gradients
from everstep.engine.stage.stage import Stage
from everstep.net import host_memory

Hashes = dict[str, str]


class VotedOps:
    """Of one worker, in the step it is in."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], dict[str, Partial]] = {}  # by step and microbatch

    def forward(
        self, stage: Stage, step: int, microbatch: int, given: Boundary | None, made: Boundary | None
    ) -> str:
        """F has run here. The hash of its output, for who receives it."""
        self._open = {key: found for key, found in self._open.items() if key[0] == step}
        found = self._open[step, microbatch] = {}
        if given is not None:
            found |= _received(stage, "input", given)
        if made is None:
            found["loss"] = partial_hash([stage.loss(step, microbatch)])
            return ""
        found["output"] = _hash(stage, made.tensors)
        return settled({"output": found["output"]})["output"]

    def input_grad(
        self, stage: Stage, step: int, microbatch: int, given: Gradients | None, made: Gradients | None
    ) -> str:
        found = self._open[step, microbatch]
        if given is not None:
            found |= _received(stage, "gradient in", given)
        if made is None:
            return ""
        found["gradient out"] = _hash(stage, made.tensors)
        return settled({"gradient out": found["gradient out"]})["gradient out"]

    def contributes(self, step: int, microbatch: int) -> Callable[[str, Tensor], None]:
        """W runs: it says what it adds to which parameter."""
        found = self._open[step, microbatch]

        def seen(parameter: str, contribution: Tensor) -> None:
            found[parameter] = partial_hash([contribution])

        return seen

    def finish(self, step: int, microbatch: int) -> Hashes:
        return settled(self._open.pop((step, microbatch)))

    def again(
        self, stage: Stage, step: int, microbatch: int, given: Boundary | None, gradient: Gradients | None
    ) -> Hashes:
        """All three ops, for the hashes alone."""
        made = stage.forward(step, microbatch, given)
        self.forward(stage, step, microbatch, given, made)
        back = stage.input_grad(step, microbatch, gradient)
        self.input_grad(stage, step, microbatch, gradient, back)
        stage.contributions(step, microbatch, self.contributes(step, microbatch))
        stage.drop(step, microbatch)
        return self.finish(step, microbatch)


def _received(stage: Stage, name: str, given: Boundary | Gradients) -> dict[str, Partial]:
    as_sent = {f"{name} as sent": given.hash} if given.hash else {}
    return {name: _hash(stage, given.tensors), **as_sent}


def _hash(stage: Stage, tensors: Iterable[Tensor]) -> Partial:
    return partial_hash([host_memory.to_device(tensor, stage.device) for tensor in tensors])
