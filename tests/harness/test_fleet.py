"""What a task costs its coordinator as it grows, with virtual agents. Bytes and orders, not seconds: they are
the same on every machine.
"""

from __future__ import annotations

import pytest

from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from harness.fleet import MOST_BYTES, Busy, Fleet, measure

STAGES = 8
MOST_MS = 500.0  # CPU of one event


def death(workers: int) -> Busy:
    fleet = Fleet()
    fleet.join(workers // 8 + 1)
    fleet.submit(Shape(workers // STAGES, STAGES, 4))
    fleet.seal()
    return fleet.exits(Worker(workers // STAGES // 2, 3))


def test_a_death_costs_orders_in_proportion_to_the_workers() -> None:
    """Every worker was told everything: 2.9 MB at 256 workers, 10.7 MB at 512, 42 MB at 1,024."""
    small, large = death(128), death(256)
    assert large.order_bytes < MOST_BYTES * 256
    assert large.order_bytes < 2.3 * small.order_bytes
    assert large.num_orders < 2.3 * small.num_orders
    assert large.largest_entry < 64 << 10


def test_a_task_of_512_workers_is_within_budgets_that_no_machine_misses() -> None:
    """Seating was cubic: 3.6 s in the one event of its submit. Goals are in `bench/size.py`; a scan of all
    workers inside a loop over them would miss these, which are several times as large.
    """
    rows = {row["scene"]: row for row in measure(512, ("submit", "seat", "death", "node"))}
    assert {scene: row for scene, row in rows.items() if row["max_ms"] > MOST_MS} == {}
    assert sum(row["total_s"] + row["encode_s"] + row["schedule_s"] for row in rows.values()) < 5.0
    assert rows["death"]["order_bytes_per_worker"] < MOST_BYTES


@pytest.mark.slow
def test_a_death_in_a_task_of_4096_workers_stays_within_its_budget() -> None:
    found = death(4096)
    assert found.order_bytes < MOST_BYTES * 4096
    assert found.largest_order < 1 << 20
    assert found.largest_entry < 64 << 10
