"""The race's pure parts: the trace that a seed gives, and what diaries come to."""

from __future__ import annotations

import math

import pytest

from harness.race_score import apart, rates, score
from harness.race_trace import KINDS, NODES, PER_NODE, trace


def lines(*steps: tuple[float, int], rank: int = 0, loss: float = 1.0) -> list[dict[str, object]]:
    return [{"kind": "step", "rank": rank, "step": step, "loss": loss + step, "at": at} for at, step in steps]


def steady(first: int, last: int, begin: float, pace: float = 0.5) -> list[tuple[float, int]]:
    return [(begin + pace * k, step) for k, step in enumerate(range(first, last + 1))]


@pytest.mark.parametrize("seed", range(20))
def test_a_seed_gives_every_kind_of_fault_once_training_is_warm_and_spares_worker_0(seed: int) -> None:
    faults = trace(seed, 340)
    assert faults == trace(seed, 340)
    assert sorted(fault.kind for fault in faults) == sorted(KINDS)
    times = [fault.at_s for fault in faults]
    assert times == sorted(times)
    assert times[0] >= 40
    assert times[-1] < 300
    assert all(0 < fault.slot < NODES * PER_NODE for fault in faults)


def test_seeds_give_different_traces() -> None:
    assert len({trace(seed, 200) for seed in range(10)}) == 10


def test_without_faults_every_step_is_useful() -> None:
    found = score(lines(*steady(1, 41, begin=100.0)), [], 20.0)
    assert found is not None
    assert (found.useful_steps, found.redone_steps) == (41, 0)
    assert found.healthy_step_s == pytest.approx(0.5)
    assert found.lost_s == ()


def test_steps_after_a_rollback_are_redone_and_their_time_is_lost() -> None:
    # Steps 1 to 21 until 10 s; a fault at 10.1 s; from 15 s on again from step 17.
    diary = lines(*steady(1, 21, 100.0), *steady(17, 27, 115.0))
    found = score(diary, [10.1], 20.0)
    assert found is not None
    assert (found.useful_steps, found.redone_steps) == (27, 5)
    assert found.lost_s[0] == pytest.approx(20.0 - 10.1 - 6 * 0.5)
    assert found.stalled_s[0] == pytest.approx(17.5 - 10.1)


def test_a_step_is_counted_once_however_many_ranks_write_it() -> None:
    diary = lines(*steady(1, 11, 0.0)) + lines(*steady(1, 11, 0.01), rank=1)
    found = score(diary, [], 10.0)
    assert found is not None
    assert (found.useful_steps, found.redone_steps) == (11, 0)


def test_what_happens_after_the_end_does_not_count() -> None:
    found = score(lines(*steady(1, 100, 0.0)), [], 10.0)
    assert found is not None
    assert found.useful_steps == 21


def test_what_was_done_before_all_systems_were_up_is_not_counted() -> None:
    found = score(lines(*steady(1, 100, 0.0)), [], 10.0, began=20.1)
    assert found is not None
    assert (found.useful_steps, found.redone_steps) == (20, 0)
    assert found.losses[1] == 2.0, "the curve is whole"


def test_the_pace_is_that_of_the_time_before_the_first_fault() -> None:
    diary = lines(*steady(1, 41, 0.0), *steady(42, 61, 20.9, pace=1.0))
    found = score(diary, [20.0], 40.0)
    assert found is not None
    assert found.healthy_step_s == pytest.approx(0.5)
    assert found.lost_s == (pytest.approx(20.0 - 20 * 0.5),)


def test_a_fault_from_which_a_system_never_comes_back_costs_the_rest() -> None:
    found = score(lines(*steady(1, 21, 0.0)), [10.0], 60.0)
    assert found is not None
    assert found.lost_s == (pytest.approx(50.0),)
    assert found.stalled_s == (pytest.approx(50.0),)


def test_a_diary_without_a_step_has_no_score() -> None:
    assert score([{"kind": "born", "slot": 0, "pid": 1, "at": 0.0}], [], 10.0) is None


def test_too_few_steps_give_no_pace() -> None:
    found = score(lines((0.0, 1), (1.0, 2)), [1.5], 10.0)
    assert found is not None
    assert math.isnan(found.healthy_step_s)
    assert math.isnan(found.lost_s[0]), "not 0: it is not known"


def test_rates_sum_to_the_useful_steps() -> None:
    at = [0.5 * k for k in range(1, 41)]
    assert rates(at, 20.0, 2.5) == [2.0] * 8


def test_losses_are_compared_at_the_steps_that_both_have() -> None:
    assert apart({1: 5.0, 2: 4.0, 3: 3.5}, {1: 5.5, 2: 4.25}) == (2, 0.25, 0.5)
    assert apart({3: 1.0}, {1: 1.0}) is None
