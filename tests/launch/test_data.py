"""Real processes: every row is trained on exactly once per epoch, and a stream is read once, whoever dies."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everstep.engine.prepare.resolve import data_of
from everstep.job.job import DataSpec, Job, ModelSpec, OptimizerSpec
from everstep.launch.local.run import LocalNode, LocalTask
from everstep.node.fork_server import ForkServer
from everstep.protocol.messages import Patience
from everstep.protocol.ops import Worker
from tests.launch.counted_rows import ROWS, elements

JOB = Job(
    model=ModelSpec(build="counted_rows:model"),
    data=DataSpec(build="counted_rows:Data"),
    optimizer=OptimizerSpec(lr=1e-3),
    steps=24,
    replicas=2,
    stages=2,
    microbatches=3,
    base=str(Path(__file__).parent),
)


def run(fork_server: ForkServer, job: Job, at_step: dict[int, Any]) -> LocalTask:
    left = dict(at_step)

    def watch(kind: str, what: Any) -> None:
        if kind == "step" and what.step in left:
            left.pop(what.step)(task)

    task = LocalTask(
        job,
        fork_server=fork_server,
        watch=watch,
        node=LocalNode(slots=6),
        patience=Patience(restarts_per_node=99),
    )
    task.run()
    assert task.outcome.failure is None
    return task


def seen(folder: Path) -> dict[tuple[int, int], list[Any]]:
    """What each (step, microbatch) got; every worker that asked for it got the same."""
    found: dict[tuple[int, int], list[Any]] = {}
    for line in (folder / "seen.jsonl").read_text().splitlines():
        told = json.loads(line)
        key = told["step"], told["microbatch"]
        assert found.setdefault(key, told["rows"]) == told["rows"], f"{key} differs between workers"
    return found


def counting(job: Job, folder: Path, **more: Any) -> Job:
    folder.mkdir(exist_ok=True)
    return replace(job, data=replace(job.data, options={"folder": str(folder), **more}))


def test_every_row_is_trained_on_once_per_epoch_under_kills_and_reshapes(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    calm = run(fork_server, counting(JOB, tmp_path / "calm"), {})
    rough = run(
        fork_server,
        counting(JOB, tmp_path / "rough"),
        {
            4: lambda task: task.kill(Worker(0, 1)),
            9: lambda task: task.reshape(3, 2),
            15: lambda task: task.kill(Worker(1, 0)),
            19: lambda task: task.reshape(2, 1),
        },
    )
    assert rough.outcome.all_losses() == calm.outcome.all_losses()
    total = JOB.microbatches_in_step * JOB.steps
    assert rough.outcome.committed == total
    keys = [(step, m) for step in range(1, JOB.steps + 1) for m in range(JOB.microbatches_in_step)]
    given = seen(tmp_path / "rough")
    assert given == seen(tmp_path / "calm")
    taken = [row for key in keys for row in given[key]]
    assert len(taken) == 3 * total
    for epoch in range(len(taken) // ROWS):
        counts = Counter(taken[epoch * ROWS : (epoch + 1) * ROWS])
        assert set(counts.values()) == {1}
        assert len(counts) == ROWS
    assert taken[:ROWS] != taken[ROWS : 2 * ROWS]


def test_a_stream_is_read_once_whichever_worker_dies(fork_server: ForkServer, tmp_path: Path) -> None:
    draw = random.Random(20)
    job = replace(JOB, data=DataSpec(build="counted_rows:StreamData"), steps=16)

    def prepared(name: str) -> Job:
        made = counting(job, tmp_path / name, where=str(tmp_path / f"{name}-stream"))
        data: Any = data_of(made)
        data.prepare(fresh=True)
        return made

    calm = run(fork_server, prepared("calm"), {})
    kills = {step: Worker(draw.randrange(2), draw.randrange(2)) for step in (2, 5, 8, 11, 13)}

    def killed(worker: Worker) -> Any:
        return lambda task: task.kill(worker) if worker in task.processes else None

    rough = run(fork_server, prepared("rough"), {step: killed(worker) for step, worker in kills.items()})
    assert rough.outcome.all_losses() == calm.outcome.all_losses()
    given = seen(tmp_path / "rough")
    numbers = [(step - 1) * job.microbatches_in_step + m for step, m in sorted(given)]
    assert numbers == list(range(job.steps * job.microbatches_in_step))
    source = elements()
    expected = [next(source)[0][0].tolist() for _ in numbers]
    assert [given[key][0] for key in sorted(given)] == expected


# What a row of several documents is, is in `tests/engine/test_documents.py`; that rows survive deaths, above.
@pytest.mark.slow
def test_rows_of_several_documents_heal_to_the_bit(fork_server: ForkServer, tmp_path: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, 60, 4000).astype(np.uint16)
    tokens.tofile(tmp_path / "train.bin")
    path = str(tmp_path / "train.bin")
    job = Job(
        model=ModelSpec(preset="gpt-1m", options={"vocab": 64, "width": 32, "heads": 4, "depth": 2}),
        data=DataSpec(kind="tokens", path=path, token="uint16", document_end=0, sequence=32, rows=2),
        steps=10,
        replicas=2,
        stages=2,
        microbatches=2,
    )
    calm = run(fork_server, job, {})
    deaths = {
        3: lambda task: task.kill(Worker(0, 1)),
        6: lambda task: task.kill(Worker(1, 0)),
        8: lambda task: task.reshape(2, 1),
    }
    assert run(fork_server, job, deaths).outcome.all_losses() == calm.outcome.all_losses()
