"""A worker that turns slow in real training: known within three steps, given less work, no bit changed."""

from __future__ import annotations

import pytest

from harness import slow_workers as slow

JOB = {"replicas": 2, "stages": 1, "microbatches": 4, "steps": 21}
FROM = slow.SLOW_FROM
FAULT = f"replica=1,stage=0,step={FROM},how=slow,factor=3"


@pytest.mark.slow  # a machine that is slow all over can hide one worker's slowness for these few steps
def test_a_slow_worker_is_told_and_balanced_and_the_losses_stay() -> None:
    clean = slow.train(slow.job_of(**JOB, rest_ms=[0.0, 0.0]))  # rests change no number
    told = slow.train(slow.job_of(**JOB, rest_ms=[18.0, 18.0]), (FAULT,))
    assert slow.of_slowness(clean) == []
    (incident,) = slow.of_slowness(told)
    assert [str(worker) for worker in incident.workers] == ["1:0"]
    found_in = next(row.step for row in told.rows if row.at >= incident.evidence_at)
    assert found_in <= FROM + 2
    assert "it runs 2 microbatches of each step" in incident.remedies[0].outcome
    assert [row.loss for row in told.rows] == [row.loss for row in clean.rows]
    assert told.outcome.issued == told.outcome.committed


@pytest.mark.slow  # as above
def test_the_slow_shard_of_a_worker_is_named() -> None:
    told = slow.train(slow.job_of(**JOB, shards=2, rest_ms=[18.0, 18.0]), (f"{FAULT},shard=1",))
    (incident,) = slow.of_slowness(told)
    assert [str(worker) for worker in incident.workers] == ["1:0"]
    assert "its shard 1 is the slow one" in incident.verdict.because
