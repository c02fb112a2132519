"""The trial under Everstep: 2 replicas x 1 stage, one microbatch each; writes the same diary.

python everstep_train.py DIARY FOLDER STEPS DEVICE
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from trial import CHECKPOINT_EVERY, WORKERS, Diary

from everstep.job.job import CheckpointSpec, DataSpec, Job, ModelSpec, OptimizerSpec
from everstep.launch.local.run import LocalTask
from everstep.node.fork_server import ForkServer
from everstep.protocol.ops import Worker


def job(folder: str, steps: int, device: str) -> Job:
    return Job(
        device=device,
        transport="nccl" if device == "cuda" else "auto",
        model=ModelSpec(build="trial:layers"),
        data=DataSpec(build="trial:Data"),
        steps=steps,
        optimizer=OptimizerSpec(build="trial:optimizer", decay="constant", clip=None),
        checkpoint=CheckpointSpec(folder=folder, interval=CHECKPOINT_EVERY),
        replicas=WORKERS,
        stages=1,
        microbatches=1,
        threads=1,
        base=str(Path(__file__).parent),
    )


def main() -> None:
    path, folder, steps, device = sys.argv[1:5]
    diary = Diary(path)

    def watch(kind: str, what: Any) -> None:
        if kind != "step":
            return
        for rank in range(WORKERS):
            process = task.processes.get(Worker(rank, 0))
            if process is not None:
                diary.write(
                    rank=rank,
                    step=what.step,
                    life=f"epoch {what.epoch}",
                    world=len(task.processes),
                    pid=process.child.pid,
                    at=what.at,
                )

    fork_server = ForkServer(threads=1).start()
    try:
        task = LocalTask(job(folder, int(steps), device), fork_server=fork_server, watch=watch)
        outcome = task.run()
    finally:
        fork_server.close()
    if outcome.failure:
        raise SystemExit(outcome.failure)


if __name__ == "__main__":
    main()
