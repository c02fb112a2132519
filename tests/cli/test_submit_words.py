"""What `everstep submit` says besides that a task is on record."""

from __future__ import annotations

import pytest

from everstep.cli.cluster import copies_told
from everstep.job.job import Job, ModelSpec


@pytest.mark.parametrize(
    ("interval", "nodes", "told"),
    [
        (0, 2, "copies in memory are off: memory_interval is 0"),
        (None, 1, "are off: they need a second node, and there is only one; memory_interval = 10 keeps them"),
        (None, 0, "are off: they need a second node, and none is connected yet"),
        (
            None,
            2,
            "are on: every 10 steps the state of each stage is copied to the memory of its own node and",
        ),
        (
            5,
            2,
            "are on: every 5 steps the state of each stage is copied to the memory of its own node and of",
        ),
        (5, 1, "are on: every 5 steps the state of each stage is copied to the memory of its own node"),
    ],
)
def test_it_says_whether_copies_in_memory_are_on_and_where_they_go(
    interval: int | None, nodes: int, told: str
) -> None:
    job = Job(model=ModelSpec(preset="gpt-tiny"), memory_interval=interval)
    assert told in copies_told(job, nodes)
