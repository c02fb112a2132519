"""What sums on a GPU first need in a later step, done once before training.

CUDA loads a kernel when it is first launched, and that can wait for the device: beside transfers from other
workers it took up to a second, and two workers that waited so for each other stood still (`net/nccl.py`).
Promoted sums and sums of more than 32 bits come when gradients grow: in the second step, for many tensors, in
all workers at once, while their parts are on their way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial

import torch

from everstep.engine.layers.model import Slot
from everstep.engine.sums.grids import MOST_SHORT, NO_LIMIT
from everstep.engine.sums.sum_units import Accumulate
from everstep.engine.sums.sums import HIGH, MOST_PROMOTED, GradientSums
from everstep.log import warn

_SIZES = (1 << 16, 777, 1)  # whole blocks, a part of one, one number
_LARGE, _LOW = 3.0, -40  # more than 32 bits where no limit is known; promoted where the limit is low
_MIXED = ((_LOW, NO_LIMIT, _LOW), (NO_LIMIT, _LOW, NO_LIMIT), (NO_LIMIT, _LOW, _LOW))
_KINDS = (torch.float32, torch.bfloat16, torch.float16)  # of contributions
_LIE_AT = (1, 2, 4, 8, 16)  # numbers; 16 bytes and less, whatever their type


@cache
def rehearse(kind: Accumulate, device: torch.device) -> None:
    """Training does not depend on it."""
    try:
        launch_all(kind, device)
    except Exception as error:
        warn(f"kernels of strict sums are loaded when they are first needed: {error}")


def launch_all(kind: Accumulate, device: torch.device, *, late: bool | None = None) -> None:
    """All of `GradientSums` that a step may need, with numbers that nobody reads."""
    slots, size = {}, 0
    for number, count in enumerate(_SIZES):
        slots[str(number)] = Slot(size, (count,))
        size += -(-count // 16) * 16
    sums = GradientSums(slots, size, kind=kind, contributions=8, device=device, late=late)
    _pack(sums)
    _go_through(sums, (NO_LIMIT,) * 3, 1e-3, kinds=_KINDS)
    for limits in _MIXED:
        _go_through(sums, limits, _LARGE, kinds=_KINDS)
    _go_through(sums, (_LOW,) * 3, math.inf, kinds=_KINDS)
    for _ in range(MOST_SHORT):  # from then on kept in more bytes
        sums.added()
    for limits in _MIXED:
        _go_through(sums, limits, _LARGE, kinds=_KINDS[:1])


def _pack(sums: GradientSums) -> None:
    """Torch has several kernels for this, by the size of a number and by where tensors begin and end."""
    kinds = [*((dtype, dtype) for dtype in (*HIGH, torch.int64)), (torch.int64, torch.int32)]
    for given, dtype in kinds:
        for at in _LIE_AT:
            sizes = [at, 4096, at]
            whole = torch.zeros(at + sum(sizes), dtype=given, device=sums.device)
            sums.packed([torch.zeros(size, dtype=given, device=sums.device) for size in sizes], dtype)
            sums.packed(list(torch.split(whole[at:], sizes)), dtype)


def _go_through(
    sums: GradientSums, limits: Sequence[int], value: float, kinds: Sequence[torch.dtype]
) -> None:
    """A step: contributions, the parts of two stretches, those of a peer, and their means."""
    sums.begin(1, limits)
    for dtype in kinds:
        for index, slot in enumerate(sums.slots):
            made = torch.full((slot.size,), value, dtype=dtype, device=sums.device)
            sums.add(index, partial(made.view, slot.shape))
        sums.added()
    for where in (slice(0, sums.size), slice(64, sums.size - 3)):
        part = sums.part(where)
        peers = []
        for most in (0, MOST_PROMOTED):  # promoted sums in one tensor, and one by one
            sent, told = sums.sent(where, part, most)
            peers.append(sums.arrived(where, sent, part.peaks, told))
        every, facts = sums.sent_all([where], [part], part.peaks)
        peers += sums.arrived_all({0: where}, every, facts, lambda tensor: tensor)
        parts = [part, *peers]
        for origin in (0, where.start):
            together = ([sums.together(where, those)] for those in (peers, parts))
            for those in ([part], peers, parts, *together):
                out = torch.empty(where.stop - origin, dtype=torch.float32, device=sums.device)
                sums.means(where, [where], those, 2.0, out, origin=origin)
