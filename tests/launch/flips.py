"""Single bits flipped in one worker's numbers: found, the right worker named, the losses right?"""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from everstep.errors import UserError
from everstep.job.job import CheckpointSpec, DataSpec, Job, ModelSpec, VerifySpec
from everstep.launch.local.run import LocalTask
from everstep.layout.box import Box
from everstep.node.fork_server import ForkServer
from everstep.protocol.ops import Worker
from everstep.store import memory
from everstep.store.folder import commit, newest_valid, write_part
from harness.planted import Planted, planted_in

STEPS, FIRST = 12, 7  # earlier steps may be broken by the first schedule that knows how long ops take
SHORT = DataSpec(kind="synthetic", rows=1, sequence=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    what: str
    worker: Worker
    step: int
    replicas: int
    stages: int
    bit: int
    element: int
    microbatch: int

    def fault(self) -> Planted:
        return Planted(
            what=self.what,
            replica=self.worker.replica,
            stage=self.worker.stage,
            step=self.step,
            microbatch=self.microbatch,
            bit=self.bit,
            element=self.element,
        )


def job_for(replicas: int, stages: int, *, votes: str = "every", cost: float = 0.01, **changes: Any) -> Job:
    job = Job(
        model=ModelSpec(preset="gpt-tiny", options={"depth": 2}),
        data=SHORT,
        steps=STEPS,
        replicas=replicas,
        stages=stages,
        microbatches=2,
        verify=VerifySpec(votes=votes, cost=cost),  # type: ignore[arg-type]
    )
    return replace(job, **changes)


def draw(rng: random.Random, what: str, *, microbatches: int) -> Trial:
    """A flip somewhere: any worker, step, element and bit. The first stage has no boundary tensor before it;
    in the first step an optimizer has no state.
    """
    replicas, stages = rng.choice([(2, 2), (3, 2), (2, 1), (3, 1)])
    if what == "boundary":
        stages = 2
    return Trial(
        what=what,
        worker=Worker(rng.randrange(replicas), 1 if what == "boundary" else rng.randrange(stages)),
        step=rng.randint(FIRST, STEPS - 1),
        replicas=replicas,
        stages=stages,
        bit=rng.randrange(32),
        element=rng.randrange(1 << 20),
        microbatch=rng.randrange(microbatches),
    )


class Flips:
    """Runs trials in one fork server; a clean run is made once per shape."""

    def __init__(
        self, server: ForkServer, *, votes: str = "every", cost: float = 0.01, device: str = "cpu"
    ) -> None:
        self._server, self._votes, self._cost, self._device = server, votes, cost, device
        self._clean: dict[tuple[int, int], dict[int, float]] = {}

    def clean(self, replicas: int, stages: int) -> dict[int, float]:
        if (replicas, stages) not in self._clean:
            job = job_for(replicas, stages, votes="off", device=self._device)
            self._clean[replicas, stages] = LocalTask(job, fork_server=self._server).run().all_losses()
        return self._clean[replicas, stages]

    def run(self, trial: Trial) -> dict[str, Any]:
        clean = self.clean(trial.replicas, trial.stages)
        with tempfile.TemporaryDirectory() as folder:
            job = job_for(
                trial.replicas,
                trial.stages,
                votes=self._votes,
                cost=self._cost,
                checkpoint=CheckpointSpec(folder=folder, interval=2),
                device=self._device,
            )
            job = planted_in(job, Path(folder), trial.fault())
            outcome = LocalTask(job, fork_server=self._server).run()
        incidents = [i for i in outcome.incidents if any(e.source == "votes" for e in i.evidence)]
        named = [worker for i in incidents if len(i.workers) == 1 for worker in i.workers]
        found_at = min((i.step for i in incidents), default=None)
        losses = outcome.all_losses()
        return {
            "what": trial.what,
            "shape": f"{trial.replicas}x{trial.stages}",
            "fault": str(trial),
            "found": found_at is not None,
            "after_steps": None if found_at is None else found_at - trial.step,
            "named": [str(worker) for worker in named],
            "right": bool(named) and set(named) == {trial.worker},
            "innocent": any(worker != trial.worker for worker in named),
            "losses_equal": losses == clean,
            "incidents": [i.what for i in incidents],
            "failure": outcome.failure,
        }


def flip_in_checkpoint(rng: random.Random) -> dict[str, Any]:
    """A bit of a file of the newest checkpoint: a start must take an older one."""
    with tempfile.TemporaryDirectory() as folder:
        for step in (2, 4):
            part = write_part(folder, step, "stage-0", {"model/w": torch.arange(4096.0) * step})
            commit(folder, step, [part], {})
        _flip_a_bit(next(Path(folder).glob("*4/*.safetensors")), rng)
        found, refused = newest_valid(folder)
        step = None if found is None else found.step
        return {"what": "checkpoint part", "found": step == 2, "right": bool(refused), "losses_equal": True}


def flip_in_memory_copy(rng: random.Random) -> dict[str, Any]:
    """A bit of a state in the memory of a node: it must not be loaded."""
    with tempfile.TemporaryDirectory() as folder:
        values = torch.arange(4096.0)
        box = Box((0,), (4096,))
        label = memory.put(Path(folder), "t", 4, "stage-0-0", [("model/w", (4096,), box, values)])
        _flip_a_bit(next(Path(folder).rglob("*.safetensors")), rng)
        try:
            loaded = memory.open_copies("t", 4, [(Path(folder), label)]).read_box("model/w")
        except UserError:
            return {"what": "memory copy", "found": True, "right": True, "losses_equal": True}
        return {
            "what": "memory copy",
            "found": False,
            "right": False,
            "losses_equal": torch.equal(loaded, values),
        }


def _flip_a_bit(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[-1 - rng.randrange(4 * 4096)] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
