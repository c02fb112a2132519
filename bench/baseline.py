"""What Everstep is compared with: the same training written with torch alone, as fast as we know how.

Run by `overhead.py`, one process a rank, with a JSON specification as the only argument; prints one JSON
line: when each step ended (CLOCK_MONOTONIC), its loss, and the CPU seconds spent until then.

`pipeline`  torch.distributed.pipelining's Schedule1F1B over the stages, gradients averaged over the replicas
            with gloo: `flat`, one all-reduce of one buffer that the gradients live in, or `ddp`,
            DistributedDataParallel around the stage.
`loop`      one process, one device, gradients of the microbatches summed in fp32, fp32 masters for bf16.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from everstep.engine import device as devices
from everstep.engine import keys
from everstep.engine.datasets.data import Synthetic
from everstep.engine.layers.gpt import gpt
from everstep.engine.layers.model import Model, partition
from everstep.engine.state.optimizer import adamw
from everstep.job.presets import shape
from everstep.net import host_memory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Diary:
    """Told after every step."""

    at: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)

    def write(self, loss: float | None) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.at.append(time.monotonic())
        self.cpu.append(used.ru_utime + used.ru_stime)
        if loss is not None:
            self.loss.append(loss)


def flat_gradients(parameters: Iterable[nn.Parameter]) -> Tensor:
    """One buffer that all gradients live in: nothing to copy before or after it is reduced."""
    parameters = list(parameters)
    flat = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
    at = 0
    for p in parameters:
        p.grad = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()
    return flat


# ------------------------------------------------------------------ pipeline and data parallel


class Pipeline:
    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.replicas, self.stages = spec["replicas"], spec["stages"]
        self.replica, self.stage = divmod(spec["rank"], self.stages)
        self.total = spec["microbatches"]
        self.model = gpt(spec["preset"])
        form = shape(spec["preset"])
        self.data = Synthetic(vocab=form.vocab, sequence=form.context, rows=spec["rows"], seed=spec["seed"])
        self.pipe_group, self.data_group = self._groups()
        self.module = stage_module(self.model, partition(self.model, self.stages)[self.stage], spec["seed"])
        self.optimizer = adamw(lr=spec["lr"])(list(self.module.named_parameters()))
        self.flat = flat_gradients(self.module.parameters()) if spec["reduce"] == "flat" else None
        wrapped: nn.Module = (
            self.module
            if self.flat is not None
            else DistributedDataParallel(
                self.module, process_group=self.data_group, gradient_as_bucket_view=True
            )
        )
        stage = PipelineStage(wrapped, self.stage, self.stages, torch.device("cpu"), group=self.pipe_group)
        self.schedule = Schedule1F1B(stage, self.total, loss_fn=self.model.loss)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def _groups(self) -> tuple[Any, Any]:
        ranks = torch.arange(self.replicas * self.stages).view(self.replicas, self.stages)
        pipes = [dist.new_group(row.tolist()) for row in ranks]
        peers = [dist.new_group(column.tolist()) for column in ranks.t()]
        return pipes[self.replica], peers[self.stage]

    def train(self, diary: Diary) -> None:
        for step in range(1, self.spec["steps"] + 1):
            loss = self._forward_and_backward(step)
            self._reduce()
            self._clip()
            self.optimizer.step()
            diary.write(loss)

    def _forward_and_backward(self, step: int) -> float | None:
        """The mean loss, on the last stage."""
        if self.flat is not None:
            self.flat.zero_()
        else:
            self.optimizer.zero_grad()
        first = self.replica * self.total
        if self.is_first or self.is_last:
            batches = [self.data.batch(step, first + m) for m in range(self.total)]
        losses: list[Tensor] = []
        inputs = (torch.cat([x for x, _ in batches]),) if self.is_first else ()
        target = torch.cat([y for _, y in batches]) if self.is_last else None
        self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        return float(torch.stack(losses).detach().mean()) if losses else None

    def _reduce(self) -> None:
        if self.flat is not None:
            dist.all_reduce(self.flat, group=self.data_group)
            self.flat.div_(self.replicas)

    def _clip(self) -> None:
        gradients = [self.flat] if self.flat is not None else [p.grad for p in self.module.parameters()]
        squares = torch.nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(squares, group=self.pipe_group)
        norm = float(squares.sqrt())
        if norm > self.spec["clip"]:
            torch._foreach_mul_(gradients, self.spec["clip"] / norm)


def stage_module(model: Model, layers: range, seed: int) -> nn.Sequential:
    """Some layers of the model, with the weights that Everstep draws: equal losses show equal work."""
    modules = []
    for index in layers:
        torch.default_generator.manual_seed(keys.key(seed, keys.INIT, index))
        modules.append(model.layers[model.names[index]]())
    return nn.Sequential(*modules).train()


def pipeline(spec: dict[str, Any], diary: Diary) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{spec['meet']}",
        rank=spec["rank"],
        world_size=spec["replicas"] * spec["stages"],
    )
    Pipeline(spec).train(diary)
    dist.barrier()
    dist.destroy_process_group()


# ------------------------------------------------------------------ one process


class Loop:
    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.device = devices.pick(spec["device"])
        self.model, form = gpt(spec["preset"]), shape(spec["preset"])
        self.data = Synthetic(vocab=form.vocab, sequence=form.context, rows=spec["rows"], seed=spec["seed"])
        module = stage_module(self.model, range(len(self.model.layers)), spec["seed"]).to(self.device)
        self.masters = [nn.Parameter(p.detach().clone()) for p in module.parameters()]
        self.module = module.to(DTYPES[spec["precision"]])
        self.working = list(self.module.parameters())
        if spec["precision"] == "fp32":
            self.masters = self.working
        names = [name for name, _ in module.named_parameters()]
        self.optimizer = adamw(lr=spec["lr"])(list(zip(names, self.masters, strict=True)))
        self.flat = flat_gradients(self.masters)

    def train(self, diary: Diary) -> None:
        for step in range(1, self.spec["steps"] + 1):
            self.flat.zero_()
            losses = [self._microbatch(step, m) for m in range(self.spec["microbatches"])]
            self.flat.div_(self.spec["microbatches"])
            torch.nn.utils.clip_grad_norm_(self.masters, self.spec["clip"])
            self.optimizer.step()
            if self.masters is not self.working:
                torch._foreach_copy_([p.detach() for p in self.working], [p.detach() for p in self.masters])
            devices.synchronize(self.device)
            diary.write(float(torch.stack(losses).mean()))

    def _microbatch(self, step: int, number: int) -> Tensor:
        x, y = (host_memory.to_device(t, self.device) for t in self.data.batch(step, number))
        loss = self.model.loss(self.module(x).float(), y)
        loss.backward()
        if self.masters is not self.working:
            torch._foreach_add_([p.grad for p in self.masters], [p.grad for p in self.working])
            for p in self.working:
                p.grad = None
        return loss.detach()


def loop(spec: dict[str, Any], diary: Diary) -> None:
    Loop(spec).train(diary)


MODES: dict[str, Callable[[dict[str, Any], Diary], None]] = {"pipeline": pipeline, "loop": loop}


def main() -> None:
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    diary = Diary()
    MODES[spec["mode"]](spec, diary)
    print(json.dumps({"at": diary.at, "cpu": diary.cpu, "loss": diary.loss}))


if __name__ == "__main__":
    main()
