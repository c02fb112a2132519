"""Step times over NCCL, in turns on the same GPU: Everstep, torch DDP, a flat all-reduce, torch pipelining.

    python bench/gpu/beside_torch.py                 gpt-350m, 2 x 1 and 2 x 2
    python bench/gpu/beside_torch.py --mps --turns 2 --json
    python bench/gpu/beside_torch.py --mps --shapes 4x1,8x1 --preset gpt-125m --rows 4 --microbatches 16

Every process shares the one GPU and has its own NCCL_HOSTID, so NCCL talks through sockets for both. All
train the same number of microbatches per step on the same data, with fp32 sums of gradients; Everstep's
default sums (strict) are in a row of their own.

    ddp          DistributedDataParallel, fp32 weights, bf16 autocast, no_sync but for the last microbatch
    flat         bf16 weights with fp32 masters, one all-reduce of a flat fp32 buffer after the last backward
    pipelining   torch.distributed.pipelining, 1F1B, then a flat all-reduce per stage
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [
    str(HERE.parents[2] / "src"),
    str(HERE.parents[2]),
    str(HERE.parent),
]  # where nothing can be installed

from steps import everstep_run  # noqa: E402

from everstep.node.fork_server import ForkServer  # noqa: E402
from harness.mps import mps  # noqa: E402


def torch_rank(spec: dict[str, Any], rank: int) -> list[float]:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn

    from everstep.engine.datasets.data import Synthetic
    from everstep.engine.layers.gpt import gpt
    from everstep.engine.layers.model import built
    from everstep.engine.state.optimizer import adamw
    from everstep.job.presets import shape

    torch.set_float32_matmul_precision("high")
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    dist.init_process_group("nccl", rank=rank, world_size=spec["world"], device_id=torch.device("cuda", 0))
    form, model = shape(spec["preset"]), gpt(spec["preset"])
    replicas, stages = spec["replicas"], spec["stages"]
    replica, stage = rank % replicas, rank // replicas
    per_replica = spec["microbatches"] // replicas
    data = Synthetic(vocab=form.vocab, sequence=form.context, rows=spec["rows"])
    names = list(model.layers)
    cut = [names[i * len(names) // stages : (i + 1) * len(names) // stages] for i in range(stages)]
    with torch.device("cuda"):
        layers = nn.Sequential(*(built(model, name) for name in cut[stage]))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(x.float().flatten(0, -2), y.flatten())

    def batches(step: int) -> list[tuple[Tensor, Tensor]]:
        first = replica * per_replica
        found = (data.batch(step, first + m) for m in range(per_replica))
        return [(x.cuda(non_blocking=True), y.cuda(non_blocking=True)) for x, y in found]

    def clipped(parameters: list[Tensor]) -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0)

    if spec["what"] == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(layers, gradient_as_bucket_view=True)
        optimizer = adamw(lr=3e-4)(list(layers.named_parameters()))

        def one(step: int) -> Any:
            total = []
            for number, (x, y) in enumerate(batches(step)):
                wrapped.require_backward_grad_sync = number == per_replica - 1
                with torch.autocast("cuda", torch.bfloat16):
                    out = wrapped(x)
                loss = loss_of(out, y)
                (loss / per_replica).backward()
                total.append(loss.detach())
            clipped(list(layers.parameters()))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return torch.stack(total).mean().item()

    elif spec["what"] == "flat":
        working = list(layers.bfloat16().parameters())
        masters = [nn.Parameter(p.detach().float()) for p in working]
        optimizer = adamw(lr=3e-4)([(str(i), p) for i, p in enumerate(masters)])
        sizes = [p.numel() for p in masters]
        flat = torch.zeros(sum(sizes), device="cuda")
        sums = [part.view(p.shape) for part, p in zip(flat.split(sizes), masters, strict=True)]

        def one(step: int) -> Any:
            total = []
            for x, y in batches(step):
                loss = loss_of(layers(x), y)
                loss.backward()
                with torch.no_grad():
                    torch._foreach_add_(sums, [p.grad for p in working])
                for p in working:
                    p.grad = None
                total.append(loss.detach())
            dist.all_reduce(flat)
            flat.div_(spec["microbatches"])
            for p, g in zip(masters, sums, strict=True):
                p.grad = g
            clipped(masters)
            optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(working, [p.detach() for p in masters])
            flat.zero_()
            return torch.stack(total).mean().item()

    else:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        class Part(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = layers

            def forward(self, x: Tensor) -> Tensor:
                with torch.autocast("cuda", torch.bfloat16):
                    y = self.layers(x)
                return y if stage == stages - 1 else y.bfloat16()

        pipes = [dist.new_group([s * replicas + k for s in range(stages)]) for k in range(replicas)]
        peers = [dist.new_group([s * replicas + k for k in range(replicas)]) for s in range(stages)]
        part = Part()
        pipe = PipelineStage(part, stage, stages, torch.device("cuda", 0), group=pipes[replica])
        schedule = Schedule1F1B(pipe, n_microbatches=per_replica, loss_fn=loss_of)
        optimizer = adamw(lr=3e-4)(list(part.named_parameters()))
        flat = torch.zeros(sum(p.numel() for p in part.parameters()), device="cuda")
        sizes = [p.numel() for p in part.parameters()]
        for p, view in zip(part.parameters(), flat.split(sizes), strict=True):
            p.grad = view.view(p.shape)

        def one(step: int) -> Any:
            found = batches(step)
            losses: list[Tensor] = []
            if stage == 0:
                schedule.step(torch.cat([x for x, _ in found]))
            elif stage == stages - 1:
                schedule.step(target=torch.cat([y for _, y in found]), losses=losses)
            else:
                schedule.step()
            dist.all_reduce(flat, group=peers[stage])
            flat.div_(replicas)
            norm = flat.norm().square()
            dist.all_reduce(norm, group=pipes[replica])
            flat.mul_(torch.clamp(1.0 / norm.sqrt(), max=1.0))
            optimizer.step()
            flat.zero_()
            torch.cuda.synchronize()
            return float(torch.stack(losses).detach().mean()) if losses else None

    times = []
    for step in range(1, spec["steps"] + 1):
        began = time.monotonic()
        loss = one(step)
        times.append(time.monotonic() - began)
        if rank == 0 or step in (1, spec["steps"]):
            print(f"rank {rank} step {step} {times[-1]:.3f} s, loss {loss}", file=sys.stderr, flush=True)
    return times


class TorchRanks:
    """Processes that have loaded torch and wait for their spec: all are started before the first run, so that
    no run waits for its imports.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        world = spec["replicas"] * spec["stages"]
        self._spec = {**spec, "world": world}
        port = str(20000 + (os.getpid() + spec["number"]) % 20000)
        same = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self._ranks = []
        for rank in range(world):
            environment = {**os.environ, **same, "NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
            environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")
            command = [sys.executable, __file__, "--rank", str(rank)]
            pipe = subprocess.PIPE
            self._ranks.append(subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True))

    def run(self) -> list[float]:
        for one in self._ranks:
            assert one.stdin is not None
            one.stdin.write(json.dumps(self._spec) + "\n")
            one.stdin.flush()
        try:
            said = [one.communicate(timeout=100)[0] for one in self._ranks]
        finally:
            self.end()
        if any(one.returncode for one in self._ranks):
            raise RuntimeError(f"a rank of {self._spec['what']} failed")
        return [max(row) for row in zip(*(json.loads(text.splitlines()[-1]) for text in said), strict=True)]

    def end(self) -> None:
        for one in self._ranks:
            one.kill()


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--preset", default="gpt-350m")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8, help="of the whole step")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--shapes", default="2x1,2x2", help="replicas x stages, separated by commas")
    parser.add_argument("--sums", default="fp32,strict", help="of Everstep's rows; strict32 too")
    parser.add_argument("--only", default="", help="names of rows, separated by commas")
    parser.add_argument("--graphs", default="auto", help="the job's graphs: auto, never")
    parser.add_argument("--mps", action="store_true", help="start MPS, and stop it at the end")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        import torch._dynamo
        import torch.distributed.pipelining  # noqa: F401  loaded while this rank waits

        print(json.dumps(torch_rank(json.loads(sys.stdin.readline()), given.rank)), flush=True)
        os._exit(0)
    same = {name: getattr(given, name) for name in ("preset", "rows", "microbatches", "steps", "warmup")}
    nccl = {"transport": "nccl", "graphs": given.graphs}
    sums = [one for one in given.sums.split(",") if one]
    rows: dict[str, Any] = {}
    for shape in given.shapes.split(","):
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape):
            parser.error(f"--shapes: {shape!r} is no shape such as 2x1.")
        replicas, stages = map(int, shape.split("x"))
        sizes = {"replicas": replicas, "stages": stages}
        for kind in sums:
            rows[f"everstep {shape} {kind}"] = {"shape": shape, "job": {**nccl, "accumulate": kind}}
        for what in ("pipelining",) if stages > 1 else ("ddp", "flat"):
            rows[f"{what} {shape}"] = {"what": what, **sizes}
    wanted = [name for name in given.only.split(",") if name]
    if unknown := set(wanted) - set(rows):
        parser.error(f"--only: {', '.join(sorted(unknown))}: not one of {', '.join(rows)}")
    rows = {name: row for name, row in rows.items() if not wanted or name in wanted}
    found: dict[str, list[float]] = {name: [] for name in rows}
    waiting: list[tuple[str, dict[str, Any], TorchRanks | None]] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that all ranks are ended
    with mps(given.mps):
        try:
            waiting = [
                (name, spec, TorchRanks({**same, **spec, "number": number}) if "what" in spec else None)
                for number, (name, spec) in enumerate(list(rows.items()) * given.turns)
            ]
            with closing(ForkServer().start()) as server:
                for name, spec, ranks in waiting:
                    try:
                        times = ranks.run() if ranks else everstep_run({**same, **spec}, server)["times"]
                    except (subprocess.SubprocessError, RuntimeError, ValueError) as error:
                        print(f"{name} failed: {str(error)[-300:]}", file=sys.stderr, flush=True)
                        continue
                    found[name].append(round(statistics.median(times[given.warmup :]), 4))
                    print(name, found[name][-1], [round(t, 3) for t in times], file=sys.stderr, flush=True)
        finally:
            for _, _, ranks in waiting:
                if ranks is not None:
                    ranks.end()
    medians = {name: statistics.median(values) for name, values in found.items() if values}
    if given.json:
        print(json.dumps({**same, "mps": given.mps, "step_s": medians, "turns": found}))
    else:
        for name, value in medians.items():
            print(f"{name:24} {value:.3f} s")


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    main()
