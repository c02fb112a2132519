"""What a worker tells of its ops: own time, without the wait for a core, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.engine.telemetry.stopwatch import Stopwatch, WaitForCore
from everstep.protocol.ops import Kind

MS = 1_000_000


class World:
    """A clock, and the time in line for a core."""

    clock_ns = waited_ns = 0

    def watch(self) -> Stopwatch:
        return Stopwatch(clock_ns=lambda: self.clock_ns, waited_ns=lambda: self.waited_ns)

    def run(
        self, watch: Stopwatch, kind: Kind, *, on_core: int = 0, in_line: int = 0, asleep: int = 0
    ) -> None:
        began = watch.moment()
        self.waited_ns += in_line * MS
        self.clock_ns += (on_core + in_line + asleep) * MS
        watch.op(kind, began)


def told_steps(step_ms: int, steps: int) -> list[dict[str, Any]]:
    world = World()
    watch, told = world.watch(), []
    world.clock_ns = MS
    for step in range(1, steps + 1):
        world.run(watch, Kind.F, on_core=step_ms)
        told.append(watch.step(step))
    return [each for each in told if each is not None]


def test_waiting_for_a_core_is_not_own_time_and_sleeping_is() -> None:
    world = World()
    watch = world.watch()
    world.run(watch, Kind.F, on_core=10, in_line=30, asleep=5)
    world.run(watch, Kind.F, on_core=10)
    told = watch.step(1)
    assert told is not None
    assert told["ops"] == {"F": (2, pytest.approx(0.025))}


def test_ops_are_told_once() -> None:
    first, second, *_ = told_steps(400, 5)
    assert first["ops"]["F"][0] == second["ops"]["F"][0] == 1


def test_long_steps_are_told_one_by_one_and_short_ones_together() -> None:
    assert [t["step"] for t in told_steps(400, 6)] == [1, 2, 3, 4, 5, 6]
    short = told_steps(2, 64)
    assert [t["step"] for t in short] == [1, 2, 3, 16, 32, 48, 64]
    assert short[-1]["ops"]["F"][0] == 16


def test_the_kernel_counts_the_line_for_a_core() -> None:
    assert WaitForCore()() >= 0


def test_a_report_says_which_updates_were_eager_and_how_large_a_boundary_tensor_is() -> None:
    world = World()
    watch = world.watch()
    shares = []
    for step, eagerly in enumerate([False, True, True], 1):
        watch.sent_boundary(4096)
        watch.updated(eagerly=eagerly)
        report = watch.step(step)
        assert report is not None
        assert report["times"]["boundary"] == 4096
        shares.append(report["times"]["eager"])
    assert shares == [0.0, 1.0, 1.0]
