"""Which matrices are split over the shards, and how: a table of patterns, in the form of transformers' own.

    "blocks.*.attention.q": "column"      the outputs are split; every shard has some of them
    "blocks.*.attention.out": "row"       the inputs are split; the shards' outputs are added up
    "embed.tokens": "vocab"               a table's rows are split; the shards' lookups are added up
    "head.logits": "logits"               the outputs are split, and the loss is computed on the parts
    "lm_head": "column_gather"            the outputs are split, and put together again
    "*.q_norm": "whole_summed"            not split, but used on split values: its gradients are added up
    "*.mlp.experts": "experts"            each shard has some of the stacked experts: rows of every parameter

What no pattern names is whole on every shard, and every shard computes the same with it.

A tensor's name is the same for any number of shards, and so are its first values: the whole of a layer is
drawn from (seed, layer) and each shard keeps its slice. So checkpoints, copies in memory and live reshape
know a shard's tensors as boxes of the logical ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor

from everstep.errors import UserError
from everstep.layout.box import Box

PlanOfShards = Mapping[str, str]  # pattern of modules -> style

# style -> the dimension of the weight and of the bias that is split; None: whole
STYLES: Mapping[str, tuple[int | None, int | None]] = {
    "column": (0, 0),
    "column_gather": (0, 0),
    "logits": (0, 0),
    "row": (1, None),
    "vocab": (0, None),
    "whole": (None, None),
    "whole_summed": (None, None),
    "experts": (None, None),  # by what lies below the module, see `Cut`
}
# What transformers calls them.
THEIRS: Mapping[str, str] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_rep": "column_gather",
    "colwise_gather_output": "column_gather",
    "embedding_rowwise": "vocab",
    "replicate": "whole",
    "replicated": "whole",
    "replicated_with_grad_allreduce": "whole_summed",
}


@dataclass(frozen=True, slots=True)
class Split:
    """One parameter of one shard as a box of the logical tensor."""

    whole: tuple[int, ...]
    dim: int
    index: int
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(n // self.count if d == self.dim else n for d, n in enumerate(self.whole))

    @property
    def box(self) -> Box:
        size = self.shape
        start = tuple(self.index * n if d == self.dim else 0 for d, n in enumerate(size))
        return Box(start, size)

    def of(self, tensor: Tensor) -> Tensor:
        """This shard's part of the whole tensor."""
        size = self.shape[self.dim]
        return tensor.narrow(self.dim, self.index * size, size)


@dataclass(frozen=True, slots=True)
class Cut:
    """The plan for one shard: its number among `count`."""

    plan: PlanOfShards
    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.count == 1:
            return
        if not self.plan:
            raise UserError(
                f"shards is {self.count}, and the model does not say what of it can be split; give "
                'Model(..., shard_plan={"*.q_proj": "column", ...}), or shards = 1.'
            )
        for pattern, style in self.plan.items():
            if style not in STYLES:
                known = ", ".join(STYLES)
                raise UserError(f"shard_plan[{pattern!r}] is {style!r}; the styles are {known}.")

    def style(self, module: str) -> str:
        """Of a module by its logical name; the first pattern that fits."""
        if self.count == 1:
            return "whole"
        return next((style for pattern, style in self.plan.items() if fnmatchcase(module, pattern)), "whole")

    def expert(self, name: str) -> str | None:
        """Of a parameter of experts its path inside them, such as "gate_up_proj"."""
        if self.count == 1 or "experts" not in self.plan.values():
            return None
        ends = [at for at, letter in enumerate(name) if letter == "."]
        return next((name[at + 1 :] for at in ends if self.style(name[:at]) == "experts"), None)

    def split(self, name: str, shape: tuple[int, ...]) -> Split | None:
        """How a parameter of this whole shape is split; None: it is whole."""
        dim = self._dim(name)
        if dim is None:
            return None
        if dim >= len(shape) or shape[dim] % self.count:
            raise UserError(
                f"shards is {self.count}, which does not divide dimension {dim} of {name} {list(shape)}; "
                "choose a number of shards that does, or change the model."
            )
        return Split(shape, dim, self.index, self.count)

    def split_of_part(self, name: str, shape: tuple[int, ...]) -> Split | None:
        """As `split`, from the shape of this shard's part."""
        dim = self._dim(name)
        if dim is None:
            return None
        whole = tuple(n * self.count if d == dim else n for d, n in enumerate(shape))
        return Split(whole, dim, self.index, self.count)

    def local_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        found = self.split(name, shape)
        return shape if found is None else found.shape

    def is_split(self, name: str) -> bool:
        """Has each shard something else of it?"""
        return self._dim(name) is not None

    def _dim(self, name: str) -> int | None:
        """The dimension in which a parameter is split."""
        if (inside := self.expert(name)) is not None:
            return None if "." in inside else 0
        module, _, parameter = name.rpartition(".")
        style = self.style(module)
        of_weight, of_bias = STYLES[style]
        return {"weight": of_weight, "bias": of_bias}.get(parameter)


def from_theirs(plan: Mapping[str, str]) -> dict[str, str]:
    """A `tp_plan` of transformers in our words. A style that we do not know stays: it is refused when the
    model is to be split.
    """
    return {pattern: THEIRS.get(style, style) for pattern, style in plan.items()}
