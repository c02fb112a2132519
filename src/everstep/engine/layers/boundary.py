"""What passes from a layer to the next: a tensor, or tuples, lists and dicts of tensors and plain values.

Between two layers of one stage it is passed as it is. Over the edge of a stage it travels as a flat list of
tensors and a tree, in JSON's terms, that says where each of them belongs:

    {"hidden": h, "mask": m, "router": (r0, r1)}
    tensors   h, m, r0, r1
    tree      {"d": {"hidden": {"t": 0}, "mask": {"t": 1}, "router": {"u": [{"t": 2}, {"t": 3}]}}}
    graded    0, 2, 3        a gradient comes back for these; a mask or a position has none

With the gradients comes the weight of the microbatch, known where its loss is: every stage divides the sum of
its gradients by the sum of the weights, once, after the reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from everstep.errors import UserError

Shapes = tuple[tuple[int, ...] | None, ...]
Value = Any  # a Tensor, None, bool, int, float or str; or a tuple, list or dict of values


@dataclass(frozen=True, slots=True)
class Boundary:
    """A value on its way to the next stage."""

    tensors: tuple[Tensor, ...]
    tree: Any
    graded: tuple[int, ...]
    shapes: Shapes = ()  # of tensors of which only a shard's slice is here
    hash: str = ""  # of the tensors, as its sender has made them; for votes

    @staticmethod
    def of(value: Value) -> Boundary:
        tensors, tree = take_apart(value)
        graded = tuple(i for i, tensor in enumerate(tensors) if tensor.requires_grad)
        return Boundary(tuple(tensor.detach() for tensor in tensors), tree, graded)

    @staticmethod
    def arrived(tensors: tuple[Tensor, ...], facts: Any) -> Boundary:
        hash = str(facts.get("hash", ""))
        return Boundary(tensors, facts["tree"], tuple(facts["graded"]), _shapes(facts), hash)

    @property
    def facts(self) -> Any:
        return {"tree": self.tree, "graded": self.graded, **_told(self.shapes, self.hash)}

    def moved(self, keep: Callable[[Tensor], Tensor]) -> Boundary:
        return replace(self, tensors=tuple(map(keep, self.tensors)))


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of a boundary on their way back, and the weight of the microbatch they are of."""

    tensors: tuple[Tensor, ...]
    of: tuple[int, ...]  # which tensors of the boundary; one that was not used has none
    weight: float
    shapes: Shapes = ()
    hash: str = ""

    @staticmethod
    def arrived(tensors: tuple[Tensor, ...], facts: Any) -> Gradients:
        hash = str(facts.get("hash", ""))
        return Gradients(tensors, tuple(facts["of"]), float(facts["weight"]), _shapes(facts), hash)

    @property
    def facts(self) -> Any:
        return {"of": self.of, "weight": self.weight, **_told(self.shapes, self.hash)}

    def moved(self, keep: Callable[[Tensor], Tensor]) -> Gradients:
        return replace(self, tensors=tuple(map(keep, self.tensors)))


def _told(shapes: Shapes, hash: str) -> dict[str, Any]:
    return ({"shapes": shapes} if shapes else {}) | ({"hash": hash} if hash else {})


def _shapes(facts: Any) -> Shapes:
    return tuple(None if shape is None else tuple(shape) for shape in facts.get("shapes", ()))


def take_apart(value: Value) -> tuple[list[Tensor], Any]:
    """The tensors of a value, each once, and the tree that puts them together again."""
    tensors: list[Tensor] = []
    return tensors, _tree_of(value, tensors, {})


def _tree_of(part: Value, tensors: list[Tensor], places: dict[int, int]) -> Any:
    """Not a closure that calls itself: that is a cycle, and would keep the tensors until the next collection
    of garbage, gigabytes of a GPU among them.
    """
    if isinstance(part, Tensor):
        if id(part) not in places:
            places[id(part)] = len(tensors)
            tensors.append(part)
        return {"t": places[id(part)]}
    if part is None or isinstance(part, bool | int | float | str):
        return part
    if isinstance(part, Mapping):
        if wrong := [key for key in part if not isinstance(key, str)]:
            raise UserError(f"a dict between layers has the key {wrong[0]!r}; use text as keys.")
        return {"d": {key: _tree_of(item, tensors, places) for key, item in part.items()}}
    if isinstance(part, list):
        return {"l": [_tree_of(item, tensors, places) for item in part]}
    if isinstance(part, tuple):
        return {"u": [_tree_of(item, tensors, places) for item in part]}
    raise UserError(f"{_article(part)} is between layers; {advice(part)}.")


def put_together(tree: Any, tensors: list[Tensor]) -> Value:
    """The inverse of `take_apart`."""
    match tree:
        case {"t": index}:
            return tensors[index]
        case {"d": items}:
            return {key: put_together(item, tensors) for key, item in items.items()}
        case {"l": items}:
            return [put_together(item, tensors) for item in items]
        case {"u": items}:
            return tuple(put_together(item, tensors) for item in items)
        case _:
            return tree


def tensors_in(value: Value) -> list[Tensor]:
    return take_apart(value)[0]


def mapped(function: Callable[[Tensor], Tensor], value: Value) -> Value:
    """The same value with every tensor replaced."""
    tensors, tree = take_apart(value)
    return put_together(tree, [function(tensor) for tensor in tensors])


def described(value: Value) -> str:
    """A value in a few words, for the middle of a sentence."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict with the keys {', '.join(map(str, value)) or '(none)'}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}: {', '.join(_kinds(value))}"
    return _article(value)


def advice(value: Any) -> str:
    """What to write instead of something that is no tensor."""
    if type(value).__module__.partition(".")[0] == "numpy":
        return "turn arrays into tensors with torch.from_numpy"
    return "give tensors, or tuples, lists and dicts of tensors"


def _kinds(values: tuple[Any, ...] | list[Any]) -> Iterator[str]:
    for value in values[:4]:
        yield f"Tensor{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    if len(values) > 4:
        yield "..."


def _article(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
