"""A fast kernel is used where it gives what its reference gives, and what was found is said to peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from everstep.engine.layers import linear
from everstep.engine.layers import trusted as trust
from everstep.engine.layers.trusted import rounds_without, trusted
from everstep.engine.sums import kernels
from everstep.errors import DeviceError
from everstep.node.worker import refuse_other_kernels

NO = RuntimeError("no")
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_found", {})


def answers(*given: bool | Exception) -> Callable[[], bool]:
    left: Iterator[bool | Exception] = iter(given)

    def answer() -> bool:
        found = next(left)
        if isinstance(found, Exception):
            raise found
        return found

    return answer


def test_an_error_that_passes_does_not_turn_a_kernel_off() -> None:
    """Any error, at any moment, turned it off for as long as the process lived, and no peer heard of it."""
    assert trusted("kernels", GPU, answers(RuntimeError("no handle"), True), rounds=True)
    assert rounds_without(GPU) == ()


@pytest.mark.parametrize("given", [(False,), (NO, NO), (NO, False)])
def test_what_is_rounds_without_is_known_for_peers(given: tuple[bool | Exception, ...]) -> None:
    for _ in range(2):  # asked once
        assert not trusted("kernels", GPU, answers(*given), rounds=True)
    assert rounds_without(GPU) == ("kernels",)
    assert rounds_without(torch.device("cpu")) == ()


def test_memory_that_is_lacking_says_nothing_of_a_kernel() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        trusted("kernels", GPU, answers(torch.OutOfMemoryError("CUDA out of memory.")), rounds=True)
    assert trusted("kernels", GPU, answers(True), rounds=True)


def test_all_fast_kernels_are_tried_in_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    fails = [0, 0]

    def no_groups(device: torch.device) -> bool:
        fails[0] += 1
        raise RuntimeError("not for this GPU")

    def no_sums(*given: object) -> bool:
        fails[1] += 1
        raise ImportError("no Triton")

    monkeypatch.setattr(linear, "_groups_agree", no_groups)
    monkeypatch.setattr(kernels, "agree", no_sums)
    for _ in range(3):
        assert not linear.groups_trusted(GPU)
        assert not kernels.usable(GPU, torch.int64)
    assert fails == [trust.ATTEMPTS] * 2
    assert rounds_without(GPU) == (linear.GROUPS,), "strict sums have the same bits without their kernels"


class Shards:
    """This shard and another one."""

    index, count = 0, 2

    def __init__(self, other: tuple[str, ...]) -> None:
        self._other = other

    def gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        said: list[torch.Tensor] = []
        other = cast(Any, SimpleNamespace(index=1, gather=lambda theirs: said.append(theirs) or [theirs]))
        refuse_other_kernels(self._other, other, torch.device("cpu"))
        return [mine, *said]


def test_the_shards_of_a_worker_use_the_same_kernels() -> None:
    """Only the first of them says to the coordinator what it uses."""
    cpu = torch.device("cpu")
    for same in ((), ("a",)):
        refuse_other_kernels(same, cast(Any, Shards(same)), cpu)
    with pytest.raises(DeviceError, match="shard 0 uses all"):
        refuse_other_kernels((), cast(Any, Shards(("a",))), cpu)
    with pytest.raises(DeviceError, match="shard 0 does not use a"):
        refuse_other_kernels(("a",), cast(Any, Shards(())), cpu)
