"""Training whose layers rest some milliseconds instead of computing, with a worker that turns slow.

Rests stand for a device's time: four workers then do not need four cores.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SLOW_FROM, SLOW_UNTIL, STEPS, SETTLED = 16, 36, 56, 6
REST_MS = 12.0  # a block's forward; its backward takes as long again
BLOCKS = 4


# ------------------------------------------------------------------ the model, as workers build it


def layers(
    rest_ms: list[float], lengthy: bool = False, build_s: float = 0.0, weight_ms: float = 0.0
) -> dict[str, Any]:
    """An embedding, a block a rest, a head; `lengthy`: a rest is as long as its row. `build_s`: how long a
    worker takes to make it. `weight_ms`: how long weight gradients of a microbatch rest.
    """
    time.sleep(build_s)
    if weight_ms:
        rest_in_weight_gradients(weight_ms / 1e3)
    import torch
    from torch import nn

    class Rest(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, seconds: float) -> Any:
            ctx.seconds = seconds
            time.sleep(seconds if x.device.type != "meta" else 0)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            time.sleep(ctx.seconds)
            return grads[0], None

    class Block(nn.Module):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.seconds = seconds
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Any) -> Any:
            seconds = self.seconds * (x.shape[1] / 16 if lengthy else 1.0)
            return Rest.apply(torch.relu(self.linear(x)) + x, seconds)

    named: dict[str, Any] = {"embed": lambda: nn.Embedding(16, 64)}
    named |= {f"block{i}": (lambda ms=ms: Block(ms / 1e3)) for i, ms in enumerate(rest_ms)}
    return named | {"head": lambda: nn.Linear(64, 16)}


def rest_in_weight_gradients(seconds: float) -> None:
    """They are the engine's own work, not the model's."""
    from everstep.engine.stage.stage import Stage

    whole = Stage.weight_grad

    def rests(stage: Stage, step: int, microbatch: int, *more: Any) -> None:
        if stage.trains(step, microbatch):  # not while the stage is tried before the first step
            time.sleep(seconds)
        whole(stage, step, microbatch, *more)

    Stage.weight_grad = rests  # type: ignore[method-assign]


def split_layers(rest_ms: list[float], lengthy: bool = False) -> Any:
    """The same; shards split the Linears of the blocks."""
    from everstep.engine.layers.model import Model

    return Model(layers=layers(rest_ms, lengthy), shard_plan={"block*.linear": "column_gather"})


class Texts:
    """Two rows of 16 tokens; `lengthy`: of 8 to 48, another length for every microbatch."""

    def __init__(self, lengthy: bool) -> None:
        self.lengthy = lengthy

    def batch(self, step: int, microbatch: int) -> Any:
        import torch

        chance = random.Random(step * 1_000 + microbatch)
        length = min(48, max(8, int(8 + chance.expovariate(1 / 10)))) if self.lengthy else 16
        tokens = torch.tensor([[chance.randrange(16) for _ in range(length + 1)] for _ in range(2)])
        return tokens[:, :-1], tokens[:, 1:]


def texts(lengthy: bool = False) -> Texts:
    return Texts(lengthy)


# ------------------------------------------------------------------ one run


def job_of(**more: Any) -> dict[str, Any]:
    rest_ms = more.pop("rest_ms", [REST_MS] * BLOCKS)
    lengthy = more.pop("lengthy", False)
    build = "slow_workers:split_layers" if more.get("shards", 1) > 1 else "slow_workers:layers"
    built = {key: more.pop(key) for key in ("build_s", "weight_ms") if key in more}
    return {
        "base": str(Path(__file__).parent),
        "replicas": 2,
        "stages": 2,
        "microbatches": 8,
        "steps": STEPS,
        "model": {"build": build, "options": {"rest_ms": rest_ms, "lengthy": lengthy, **built}},
        "data": {"build": "slow_workers:texts", "options": {"lengthy": lengthy}},
        "optimizer": {"clip": None, "lr": 1e-3},
        **more,
    }


@dataclass
class SlowRun:
    """What a run run: steps with their moments, verdicts, and the op times before the slowness."""

    rows: list[Any] = field(default_factory=list)
    outcome: Any = None
    instance: Any = None
    seconds: float = 0.0


def train(table: dict[str, Any], faults: tuple[str, ...] = ()) -> SlowRun:
    from everstep.engine.telemetry.faults import parse_fault
    from everstep.job.job import Job
    from everstep.launch.local.run import LocalTask
    from everstep.node.fork_server import ForkServer

    run = SlowRun()

    def watch(kind: str, what: Any) -> None:
        if kind == "step":
            run.rows.append(what)
            if what.step == SLOW_FROM - 2:
                run.instance = task.scheduler.profile.instance()

    fork_server = ForkServer().start()
    began = time.monotonic()
    try:
        task = LocalTask(
            Job.from_dict(table),
            fork_server=fork_server,
            watch=watch,
            faults=tuple(parse_fault(f) for f in faults),
        )
        run.outcome = task.run()
    finally:
        fork_server.close()
    run.seconds = time.monotonic() - began
    if run.outcome.failure is not None:
        raise RuntimeError(run.outcome.failure)
    return run


def of_slowness(run: SlowRun, kind: str = "slow worker") -> list[Any]:
    return [i for i in run.outcome.incidents if i.verdict is not None and i.verdict.kind == kind]


def step_s(run: SlowRun, first: int, last: int) -> float:
    found = [row.seconds for row in run.rows if first <= row.step <= last]
    return statistics.median(found) if found else float("nan")
