"""The worker of the benches, alone and without processes."""

from bench.memory import job_of
from harness.one_worker import OneWorker


def test_it_trains() -> None:
    given = {"preset": "gpt-tiny", "rows": 1, "sequence": 16, "precision": "fp32", "device": "cpu"}
    given |= {"replicas": 1, "stages": 1, "microbatches": 1, "accumulate": "strict", "eager": False}
    worker = OneWorker(job_of(given), 0)
    weights = worker.stage.masters.clone()
    assert all(worker.step(step) > 0 for step in (1, 2))
    assert not worker.stage.masters.equal(weights)
