"""What a task costs its coordinator as it grows, with virtual agents. Bytes and orders, not seconds: they are
the same on every machine.
"""

from __future__ import annotations

import pytest

from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from harness.fleet import Busy, Fleet

STAGES = 8
MOST_BYTES = 3 << 10  # of orders per worker, for one death and the return of the worker


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


@pytest.mark.slow
def test_a_death_in_a_task_of_4096_workers_stays_within_its_budget() -> None:
    found = death(4096)
    assert found.order_bytes < MOST_BYTES * 4096
    assert found.largest_order < 1 << 20
    assert found.largest_entry < 64 << 10
