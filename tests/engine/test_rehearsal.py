"""What sums do in a step was done before training, by the rehearsal: else a GPU would load kernels then."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from everstep.engine.layers.model import Slot
from everstep.engine.sums.grids import MOST_SHORT, NO_LIMIT
from everstep.engine.sums.rehearsal import launch_all, rehearse
from everstep.engine.sums.sum_units import Accumulate
from everstep.engine.sums.sums import GradientSums

KINDS: list[Accumulate] = ["strict", "strict40"]
SIZES = (70_000, 4096, 2048, 777, 300, 16, 1)
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def a_training(kind: Accumulate, device: torch.device, *, late: bool | None, steps: int) -> set[str]:
    """Gradients that jump by 2^16 from step to step; the sums of two workers. What of sums it had."""
    slots, size = {}, 0
    for count in SIZES:
        slots[str(count)] = Slot(size, (count,))
        size += -(-count // 16) * 16
    draw = np.random.default_rng(len(kind))
    workers = [
        GradientSums(slots, size, kind=kind, contributions=2 * 80, device=device, late=late) for _ in range(2)
    ]
    had: set[str] = set()
    limits = [NO_LIMIT] * len(SIZES)
    for step in range(1, steps + 1):
        scales = 2.0 ** draw.integers(-12, 5, len(SIZES))
        microbatches = MOST_SHORT + 2 if step == steps else 3
        for sums in workers:
            sums.begin(step, limits)
            for _ in range(microbatches):
                for index, count in enumerate(SIZES):
                    drawn = draw.standard_normal(count, dtype=np.float32) * np.float32(scales[index])
                    x = torch.from_numpy(drawn).to(TYPES[step % 3]).to(device)
                    sums.add(index, lambda x=x: x)
                sums.added()
        edges = sorted({0, size, *(64 * int(at) for at in draw.integers(1, size // 64, 3))})
        for where in map(slice, edges, edges[1:]):
            parts = [sums.part(where) for sums in workers]
            one, other = workers
            sent, told = other.sent(where, parts[1], most=int(draw.integers(0, 9)))
            peer = one.arrived(where, sent, parts[1].peaks, told)
            both = one.together(where, [parts[0], peer])
            for those in ([parts[0], peer], [both]):
                one.means(where, [where], those, 3.0, torch.empty(size, device=device))
            had |= {"promoted"} if any(part.promoted for part in parts) else set()
            had |= {"wide"} if any(part.wide for part in parts) else set()
        peaks = [max(pair) for pair in zip(*(sums.peaks for sums in workers), strict=True)]
        pairs = zip(limits, peaks, strict=True)
        limits = [workers[0].grid.following(limit, peak) for limit, peak in pairs]
    return had


class Ops(TorchDispatchMode):
    """Those that compute something, with the types of what they are given and where it lies: for what is at
    16 bytes a GPU has kernels of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[object, ...]] = set()

    def __torch_dispatch__(
        self, op: Any, types: Any, given: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        if not op.is_view and "empty" not in op.name() and not _moves_bytes(op, given):
            tensors = [
                one for one in tree_leaves((given, named)) if isinstance(one, torch.Tensor) and one.dim()
            ]
            at = [tensor.data_ptr() for tensor in tensors]
            if op.name().startswith("aten::cat"):
                at += [tensor.nbytes for tensor in tensors]
            lies = min((math.gcd(16, one) for one in at), default=16), all(map(_is_contiguous, tensors))
            self.seen.add((op.name(), str([_type(one) for one in given]), *lies))
        return op(*given, **(named or {}))


def _moves_bytes(op: Any, given: tuple[Any, ...]) -> bool:
    """A GPU has no kernel for it."""
    if op.name() != "aten::copy_":
        return False
    to, of, *_ = given
    return to.dtype == of.dtype and to.is_contiguous() and of.is_contiguous()


def _is_contiguous(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous()


def _type(given: object) -> object:
    if isinstance(given, torch.Tensor):
        return given.dtype
    return [_type(one) for one in given[:1]] if isinstance(given, list | tuple) else None


@pytest.mark.parametrize("kind", KINDS)
def test_every_op_of_a_training_was_rehearsed(kind: Accumulate) -> None:
    here = torch.device("cpu")
    with Ops() as rehearsed:
        launch_all(kind, here, late=True)
    with Ops() as trained:
        had = a_training(kind, here, late=True, steps=9)
    assert had == ({"promoted", "wide"} if kind == "strict40" else {"promoted"})
    assert trained.seen - rehearsed.seen == set()


def test_a_rehearsal_draws_nothing() -> None:
    before = torch.get_rng_state()
    launch_all("strict40", torch.device("cpu"), late=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_training_does_not_depend_on_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*given: object, **named: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr("everstep.engine.sums.rehearsal.GradientSums", fails)
    rehearse.cache_clear()
    rehearse("strict40", torch.device("cpu"))
    said = capsys.readouterr()
    assert "loaded when they are first needed: no room" in said.out + said.err
    rehearse.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kernel_of_a_training_was_rehearsed(kind: Accumulate) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    cuda = torch.device("cuda", 0)
    a_training(kind, cuda, late=None, steps=2)  # what the data needs, and Triton's compiler
    rehearsed = kernels(lambda: launch_all(kind, cuda))
    trained = kernels(lambda: a_training(kind, cuda, late=None, steps=9))
    assert trained - rehearsed == set()


def kernels(run: Any) -> set[str]:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    return {one.name for one in profile.events() if not one.name.startswith(("Mem", "cuda", "cu"))}
