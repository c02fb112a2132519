"""W of a microbatch: its gradients are added to the sums, tensor by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn

from everstep.engine.layers.linear import contributions_of
from everstep.engine.stage.stash import Stash
from everstep.engine.sums.sums import GradientSums

CHECKED = 1 << 30  # bytes that are held for additions which a GPU has not confirmed, as one group
Seen = Callable[[int, Tensor], None]  # a slot, and what is added to it


def add_gradients(
    sums: GradientSums,
    index: Mapping[Tensor, int],
    stash: Stash,
    seen: Seen | None = None,
) -> None:
    """`index`: the slot of each parameter. `seen`: of one who wants to see what is added."""
    if sums.is_strict:
        _add_strict(sums, index, stash, seen)
        return
    assert seen is None  # plain sums add a product while it is computed, and nobody compares their bits
    for queued in stash.queue:
        queued.run(lambda parameter: sums.shaped[index[parameter]])
    for parameter, gradient in stash.others:
        sums.shaped[index[parameter]].add_(gradient)


def _add_strict(sums: GradientSums, index: Mapping[Tensor, int], stash: Stash, seen: Seen | None) -> None:
    """What is added is let go on the way: of a large microbatch little is left for the next W to check.
    Tensors of recorded ops stay where they are: for them the host would wait, and nothing become free.
    """
    if not sums.is_late and not stash.queue and seen is None:
        others, stash.others = stash.others, []
        for parameter, gradient in others:
            sums.hold(index[parameter], gradient)
        sums.added()
        return
    products = [(index[parameter], made) for parameter, made in contributions_of(stash.queue, stash.others)]
    products.reverse()
    is_checked = sums.is_late and not stash.recorded
    held, unchecked = _held(index, stash) if is_checked else Counter[int](), 0
    stash.queue, stash.others = [], []
    while products:
        slot, product = products.pop()
        if seen is not None:
            product = partial(_seen, made := product())
            seen(slot, made)
        sums.add(slot, product)
        unchecked += held[slot]
        if unchecked >= CHECKED:
            sums.check()
            unchecked = 0
    sums.added()


def _held(index: Mapping[Tensor, int], stash: Stash) -> Counter[int]:
    """Bytes that are held for the contribution to each slot."""
    held = Counter({index[parameter]: gradient.nbytes for parameter, gradient in stash.others})
    for entry in stash.queue:
        of_layer = sum(
            tensor.nbytes
            for tensor in entry
            if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter)
        )
        held.update(dict.fromkeys((index[parameter] for parameter in entry.trained), of_layer))
    return held


def _seen(made: Tensor) -> Tensor:
    return made
