"""W of a microbatch: its gradients are added to the sums, tensor by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from everstep.engine.layers.linear import contributions_of
from everstep.engine.shards.collectives import Collectives
from everstep.engine.stage.stash import Stash
from everstep.engine.sums.sums import GradientSums
from everstep.schedule import footprint

Finished = Callable[[int], None]  # a slot gets nothing more of this microbatch
Begins = Callable[[set[int]], Finished]  # is given the slots that get something
Seen = Callable[[int, Tensor], None]  # a slot, and what is added to it


def add_gradients(
    sums: GradientSums,
    index: Mapping[Tensor, int],
    stash: Stash,
    begins: Begins | None = None,
    seen: Seen | None = None,
    among: Collectives | None = None,
) -> None:
    """`index`: the slot of each parameter. `begins`: of one who wants to know when each slot is done. `seen`:
    of one who wants to see what is added. `among`: shards whose contributions are added up before.
    """
    if among is not None:
        done = _nothing if begins is None else begins(set(index.values()))
        _add_of_shards(sums, index, stash, done, seen, among)
        return
    if seen is not None and not sums.is_strict:  # sums that add a product while it is computed
        for parameter, product in contributions_of(stash.queue, stash.others):
            seen(index[parameter], product())
    done = _nothing if begins is None else _counted(index, stash, begins, once=sums.is_strict)
    if sums.is_strict:
        _add_strict(sums, index, stash, done, seen)
        return
    for queued in stash.queue:
        queued.run(lambda parameter: sums.shaped[index[parameter]])
        for parameter in queued.trained:
            done(index[parameter])
    for parameter, gradient in stash.others:
        sums.shaped[index[parameter]].add_(gradient)
        done(index[parameter])


def _add_of_shards(
    sums: GradientSums,
    index: Mapping[Tensor, int],
    stash: Stash,
    done: Finished,
    seen: Seen | None,
    among: Collectives,
) -> None:
    """Every shard takes part in the sum of every parameter, in the order of the slots, also if none of its
    tokens went through it. A sum is made once: a shard that made it again would do so alone.
    """
    products = dict(contributions_of(stash.queue, stash.others))
    stash.queue, stash.others = [], []
    unchecked = 0
    for parameter, slot in index.items():
        product = products.pop(parameter, None)
        made = torch.zeros(parameter.shape, device=parameter.device) if product is None else product().float()
        made = among.sum(made.contiguous())
        if seen is not None:
            seen(slot, made)
        if sums.is_strict:
            sums.add(slot, partial(_seen, made))
            unchecked += made.nbytes
        else:
            sums.shaped[slot].add_(made)
        done(slot)
        if unchecked >= footprint.CHECKED:
            sums.check()
            unchecked = 0
    if sums.is_strict:
        sums.added()


def _add_strict(
    sums: GradientSums, index: Mapping[Tensor, int], stash: Stash, done: Finished, seen: Seen | None
) -> None:
    """What is added is let go on the way: of a large microbatch little is left for the next W to check.
    Tensors of recorded ops stay where they are: for them the host would wait, and nothing become free.
    """
    if not sums.is_late and not stash.queue and seen is None and done is _nothing:
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
        done(slot)
        unchecked += held[slot]
        if unchecked >= footprint.CHECKED:
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


def _nothing(slot: int) -> None:
    pass


def _counted(index: Mapping[Tensor, int], stash: Stash, begins: Begins, *, once: bool) -> Finished:
    """A layer that is used twice adds to its slot twice, unless its contributions are added up before."""
    left = Counter(index[parameter] for queued in stash.queue for parameter in queued.trained)
    left.update(index[parameter] for parameter, _ in stash.others)
    finished = begins(set(left))

    def done(slot: int) -> None:
        left[slot] -= 1
        if once or not left[slot]:
            finished(slot)

    return done
