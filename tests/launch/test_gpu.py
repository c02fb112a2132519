"""On a GPU, where there is one: NCCL between workers, and failures of the GPU itself."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from everstep.core.faults.kinds import ErrorKind
from everstep.protocol.incidents import Incident
from harness.planted import Planted, planted_in
from harness.sweep import Sweep, compare, points

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")

CHOSEN = ("op stage=0,replica=0,step=3,op=F3", "reduce stage=1,replica=0,step=3,op=R,when=sending")


@pytest.fixture(scope="module")
def sweep() -> Iterator[Sweep]:
    running = Sweep(device="cuda", precision="bf16")
    yield running
    running.close()


@pytest.mark.parametrize("start", CHOSEN)
def test_a_death_over_nccl_leaves_the_losses_of_a_clean_run(sweep: Sweep, start: str) -> None:
    sweep.transport = "nccl"
    result = sweep.try_point(next(p for p in points() if p.name.startswith(start)))
    assert result["ok"], result


def kinds(incidents: list[Incident]) -> list[str]:
    return [incident.verdict.kind for incident in incidents if incident.verdict is not None]


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("illegal", ErrorKind.ILLEGAL_MEMORY_ACCESS),
        ("oom", ErrorKind.GPU_OUT_OF_MEMORY),
        ("spin", ErrorKind.TASK_HANG),
    ],
)
def test_a_failure_of_the_gpu_ends_its_worker_and_a_replacement_joins(
    sweep: Sweep, tmp_path: Path, how: str, kind: ErrorKind
) -> None:
    job = replace(sweep.job, replicas=2, stages=1, steps=12)
    clean = sweep.run(job, ())
    fault = Planted(what=how, replica=1, stage=0, step=6, microbatch=1)
    outcome = sweep.run(planted_in(job, tmp_path, fault), ())
    assert kinds(outcome.incidents) == [kind]
    assert compare(clean, outcome, job)["ok"]
