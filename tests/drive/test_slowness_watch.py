"""Who has become slow, told step by step: found at once, never flapping, and nobody accused for nothing."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from everstep.drive.slowness_watch import CALM_LOOKS, Watch
from everstep.protocol.messages import SlownessEnded, SlownessFound, TimesReported
from everstep.protocol.ops import Worker

Speed = Callable[[Worker, int], float]  # how many times as long a worker takes in a step
SLOW = Worker(1, 0)
FORWARD_S, INPUT_S, WEIGHT_S, UPDATE_S = 0.010, 0.012, 0.008, 0.002


def story(
    speed: Speed,
    *,
    steps: int,
    replicas: int = 2,
    stages: int = 2,
    microbatches: int = 4,
    noise: float = 0.03,
    seed: int = 1,
    watch: Watch | None = None,
    silent: Callable[[Worker, int], bool] = lambda worker, step: False,
    hosted: Callable[[Worker, int], int] | None = None,
) -> list[tuple[int, SlownessFound | SlownessEnded]]:
    """What a watch says, and after which step, of workers that take `speed` times as long."""
    draw, found = random.Random(seed), []
    watch = watch or Watch("t")
    for step in range(1, steps + 1):
        for replica in range(replicas):
            for stage in range(stages):
                worker = Worker(replica, stage)
                if silent(worker, step):
                    continue
                runs = microbatches if hosted is None else hosted(worker, step)
                times = speed(worker, step) * (1 + stage) * draw.gauss(1, noise)
                ops = {
                    kind: (count, count * each * times)
                    for kind, count, each in (
                        ("F", runs, FORWARD_S),
                        ("I", runs, INPUT_S),
                        ("W", runs, WEIGHT_S),
                        ("U", 1, UPDATE_S),
                    )
                }
                told = TimesReported(
                    task="t", worker=worker, times={}, incarnation=1, step=step, ops=ops, seconds=0.3
                )
                found += [(step, verdict) for verdict in watch.reported(told)]
    return found


def slow_between(first: int, last: int, factor: float) -> Speed:
    return lambda worker, step: factor if worker == SLOW and first <= step <= last else 1.0


@pytest.mark.parametrize("factor", [1.5, 2.0, 3.0, 10.0])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_worker_that_becomes_slow_is_named_within_three_steps(factor: float, replicas: int) -> None:
    slow = Worker(replicas - 1, 0)
    ((step, verdict),) = story(
        lambda worker, step: factor if worker == slow and step >= 20 else 1.0, steps=40, replicas=replicas
    )
    assert isinstance(verdict, SlownessFound)
    assert verdict.worker == slow
    assert step <= 22
    assert verdict.since_step == 20
    assert verdict.factor == pytest.approx(factor, rel=0.1)
    assert any("link" in text for text in verdict.ruled_out)


def test_a_worker_as_fast_as_before_is_told_so_and_once() -> None:
    (_, found), (step, ended) = story(slow_between(20, 40, 2.0), steps=120)
    assert isinstance(found, SlownessFound)
    assert isinstance(ended, SlownessEnded)
    assert step == 40 + CALM_LOOKS


def test_less_work_is_not_mistaken_for_speed() -> None:
    """A schedule that gives it half the microbatches halves its seconds, and it is as slow as before."""
    found = story(
        slow_between(20, 60, 2.0),
        steps=60,
        hosted=lambda worker, step: 4 if step < 23 else 2 if worker == SLOW else 6,
    )
    assert [type(verdict) for _, verdict in found] == [SlownessFound]


def test_a_worker_that_is_given_no_microbatch_is_seen_by_its_updates() -> None:
    found = story(
        slow_between(20, 40, 8.0),
        steps=60,
        hosted=lambda worker, step: 4 if step < 23 else 0 if worker == SLOW else 8,
    )
    assert [type(verdict) for _, verdict in found] == [SlownessFound, SlownessEnded]


def test_a_worker_that_is_slow_every_other_moment_does_not_make_schedules_flap() -> None:
    found = story(
        lambda worker, step: 2.0 if worker == SLOW and step >= 20 and step % 6 < 3 else 1.0, steps=400
    )
    assert [type(verdict) for _, verdict in found] == [SlownessFound]


def test_relapses_make_it_harder_to_be_called_fast() -> None:
    found = story(
        lambda worker, step: 2.0 if worker == SLOW and step >= 20 and step % 20 < 10 else 1.0, steps=1000
    )
    assert len(found) <= 5


def test_a_factor_that_changes_is_told_again_but_not_its_noise() -> None:
    found = story(
        lambda worker, step: (2.0 if step < 60 else 4.0) if worker == SLOW and step >= 20 else 1.0,
        steps=120,
        noise=0.06,
    )
    told = [verdict for _, verdict in found if isinstance(verdict, SlownessFound)]
    assert len(told) == len(found) == 2
    assert told[1].factor == pytest.approx(4.0, rel=0.1)


def test_whoever_was_slow_before_anybody_looked_is_found_beside_its_peers() -> None:
    ((step, verdict),) = story(slow_between(1, 100, 1.6), steps=100)
    assert verdict.worker == SLOW
    assert step <= 20


def test_after_a_restart_of_the_watch_a_slow_worker_is_still_slow_and_can_recover() -> None:
    watch = Watch("t", {SLOW: 2.0})
    ((step, ended),) = story(slow_between(1, 30, 2.0), steps=60, watch=watch)
    assert isinstance(ended, SlownessEnded)
    assert step == 30 + CALM_LOOKS


def test_a_new_process_starts_even() -> None:
    watch = Watch("t")
    story(slow_between(20, 40, 2.0), steps=30, watch=watch)
    assert watch.factors() == {SLOW: pytest.approx(2.0, rel=0.1)}
    watch.reported(TimesReported(task="t", worker=SLOW, times={}, incarnation=2, step=31))
    assert watch.factors() == {}


def test_somebody_gone_does_not_keep_the_others_from_being_judged() -> None:
    ((step, verdict),) = story(
        slow_between(20, 60, 2.0),
        steps=60,
        replicas=3,
        silent=lambda worker, step: worker == Worker(2, 1) and step >= 15,
    )
    assert verdict.worker == SLOW
    assert step <= 22


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("name", "speed", "noise"),
    [
        ("noise", lambda worker, step: 1.0, 0.10),
        ("a stage with three times the work", lambda worker, step: 3.0 if worker.stage else 1.0, 0.05),
        ("longer sequences for all", lambda worker, step: 1.8 if step >= 50 else 1.0, 0.05),
        (
            "longer sequences at one stage",
            lambda worker, step: 1.8 if step >= 50 and worker.stage else 1.0,
            0.05,
        ),
        ("a pause of one step", lambda worker, step: 9.0 if worker == SLOW and step % 37 == 0 else 1.0, 0.05),
        ("slow first steps", lambda worker, step: 4.0 if step <= 2 else 1.0, 0.05),
        (
            "everybody faster but one",
            lambda worker, step: 0.6 if step >= 50 and worker != SLOW else 1.0,
            0.02,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nobody_is_accused_for(name: str, speed: Speed, noise: float, seed: int) -> None:
    found = story(speed, steps=300, noise=noise, seed=seed)
    if name == "everybody faster but one":  # then it is slow beside its peers, and only that is said
        assert "its peers" in found[0][1].because
    else:
        assert found == []


def test_times_that_make_no_sense_accuse_nobody_and_break_nothing() -> None:
    assert story(lambda worker, step: 0.0 if step % 3 else 1.0, steps=60) == []
    assert story(lambda worker, step: 1.0, steps=60, hosted=lambda worker, step: 0) == []


@pytest.mark.parametrize("seed", range(8))
def test_sequence_lengths_that_scatter_accuse_nobody(seed: int) -> None:
    """Each worker's step is longer or shorter by chance, often by half."""
    draw = random.Random(seed)
    lengths: dict[tuple[int, int], float] = {}

    def speed(worker: Worker, step: int) -> float:  # a replica's data is the same at all its stages
        return lengths.setdefault((worker.replica, step), draw.lognormvariate(0, 0.35))

    assert story(speed, steps=500, seed=seed) == []
