"""The worker of the benches, alone and without processes."""

from everstep.job.job import Job
from harness.one_worker import OneWorker


def test_it_trains() -> None:
    data = {"kind": "synthetic", "rows": 1, "sequence": 16}
    worker = OneWorker(Job.from_dict({"model": {"preset": "gpt-tiny"}, "data": data, "microbatches": 1}), 0)
    weights = worker.stage.masters.clone()
    assert all(worker.step(step) > 0 for step in (1, 2))
    assert not worker.stage.masters.equal(weights)
