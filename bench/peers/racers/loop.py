"""The training that every system of the race runs: trial.py's GPT on the text of Python's own reference.

A step has 8 microbatches, whatever the number of workers: a worker takes every n-th of them, and gradients
and losses are summed in one all-reduce. So a step means the same to all, and losses compare.
"""

from __future__ import annotations

import json
import os
import pydoc_data.topics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parents[1]))
from trial import layers as builds
from trial import loss, optimizer

from harness.race_models import MODEL

LENGTH, MICROBATCHES, CHECKPOINT_EVERY = MODEL.length, MODEL.microbatches, MODEL.checkpoint_every
STEPS = 1_000_000
PAUSE_S = float(os.environ.get("RACE_PAUSE_S", "0"))  # per step, for a trial on a machine that is shared
TIMEOUT_S = float(os.environ.get("RACE_TIMEOUT_S", "10"))  # of a collective
MEET_S = 120.0  # of the rendezvous: workers of a new round import torch at their own pace


@cache
def text() -> Tensor:
    topics = pydoc_data.topics.topics
    return torch.tensor(list("".join(topics[key] for key in sorted(topics)).encode("ascii", "replace")))


def layers() -> list[Callable[[], nn.Module]]:
    """Each with weights of its own seed, so that every system begins with the same ones."""
    return [partial(_seeded, number, build) for number, build in enumerate(builds())]


def _seeded(number: int, build: Callable[[], nn.Module]) -> nn.Module:
    torch.default_generator.manual_seed(number)
    return build()


class Data:
    def batch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(1_000_003 * step + microbatch)
        starts = torch.randint(len(text()) - LENGTH - 1, (MODEL.rows,), generator=draw)
        rows = torch.stack([text()[start : start + LENGTH + 1] for start in starts.tolist()])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Diary:
    """One file for all workers of a system; a line is written at once."""

    def __init__(self, *, order: int | None = None) -> None:
        """`order` among the workers of its node: the rank, where that is known at birth."""
        given = os.environ.get("RACE_SLOT", os.environ.get("RANK", "0"))
        self.node = int(os.environ["RACE_NODE"])
        self._file = os.open(os.environ["RACE_DIARY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._write(kind="born", order=int(given) if order is None else order)

    def step(self, *, rank: int, world: int, step: int, loss: float) -> None:
        self._write(kind="step", rank=rank, world=world, step=step, loss=loss)

    def _write(self, **line: Any) -> None:
        line |= {"node": self.node, "pid": os.getpid(), "at": time.monotonic()}
        os.write(self._file, (json.dumps(line) + "\n").encode())


class Training:
    """Model and optimizer of one worker; the same weights everywhere."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = nn.Sequential(*(build() for build in layers()))
        self.optim, self.data = optimizer(list(self.model.named_parameters())), Data()

    def gradients(self, step: int, rank: int, world: int) -> Tensor:
        """This worker's part of the step: its sum of gradients, then its sum of losses."""
        self.optim.zero_grad()
        total = 0.0
        for microbatch in range(rank, MICROBATCHES, world):
            x, y = self.data.batch(step, microbatch)
            part = loss(self.model(x), y) / MICROBATCHES
            part.backward()
            total += part.item()
        return torch.cat([*(p.grad.reshape(-1) for p in self.model.parameters()), torch.tensor([total])])

    def update(self, summed: Tensor) -> float:
        """The step's loss."""
        at = 0
        for p in self.model.parameters():
            p.grad.copy_(summed[at : at + p.numel()].view_as(p))
            at += p.numel()
        self.optim.step()
        return float(summed[-1])

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optim.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optim.load_state_dict(state["optimizer"])


class Disk:
    """Checkpoints as a script usually has them: rank 0 writes, everyone reads the newest."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def load(self, training: Training) -> int:
        path = self.folder / "newest.pt"
        if not path.exists():
            return 0
        state = torch.load(path, weights_only=True)
        training.load(state)
        return int(state["step"])

    def save(self, training: Training, step: int, rank: int) -> None:
        if rank == 0 and step % CHECKPOINT_EVERY == 0:
            torch.save({"step": step, **training.state()}, self.folder / "new.pt")
            (self.folder / "new.pt").rename(self.folder / "newest.pt")


def run(
    diary: Diary,
    training: Training,
    checkpoints: Any,
    rank: int,
    world: int,
    beat: Callable[[], None] = lambda: None,
) -> None:
    """From the newest checkpoint to the end of the race; gloo's default group is ready."""
    import torch.distributed as dist

    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S))
    for step in range(checkpoints.load(training) + 1, STEPS + 1):
        summed = training.gradients(step, rank, world)
        dist.all_reduce(summed)
        reached = training.update(summed)
        diary.step(rank=rank, world=world, step=step, loss=reached)
        checkpoints.save(training, step, rank)
        beat()
        time.sleep(PAUSE_S)
