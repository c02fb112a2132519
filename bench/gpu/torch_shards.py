"""torch's own tensor parallel (`parallelize_module`) on our GPT: the time of a step.

    python bench/gpu/torch_shards.py --shards 2 --json
    python bench/gpu/torch_shards.py --device cpu --preset gpt-tiny --shards 2 --sequence 32

Every rank shares the one GPU and has its own NCCL_HOSTID, so NCCL talks through sockets, as Everstep's shards
do there. bf16 weights with fp32 masters, fp32 sums of gradients, clipped norm, vocabulary parallel loss.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # where nothing can be installed


def rank_main(given: argparse.Namespace) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    from everstep.engine.datasets.data import Synthetic
    from everstep.engine.layers.gpt import gpt
    from everstep.engine.layers.model import drawn
    from everstep.job.presets import shape

    on_gpu = given.device == "cuda"
    device = torch.device(given.device, 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
    form = shape(given.preset, tied=False)
    model = gpt(form)
    data = Synthetic(vocab=form.vocab, sequence=given.sequence, rows=given.rows)
    layers = nn.Sequential(*(drawn(model, index, 0) for index in range(len(model.layers)))).to(device)
    layers = layers.bfloat16() if on_gpu else layers
    if given.shards > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo", rank=given.rank, world_size=given.shards)
        mesh = init_device_mesh(given.device, (given.shards,))
        parallelize_module(
            layers[0],
            mesh,
            {"tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())},
        )
        block = {f"attention.{key}": ColwiseParallel() for key in "qkv"}
        block |= {"attention.out": RowwiseParallel(), "mlp.down": RowwiseParallel()}
        block |= {"mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel()}
        for layer in layers[1:-1]:
            parallelize_module(layer, mesh, block)
        head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(layers[-1], mesh, {"logits": head})
    working = list(layers.parameters())
    is_split = [hasattr(p, "to_local") for p in working]
    masters = [nn.Parameter(local(p.detach()).float()) for p in working]
    sums: list[Any] = [torch.zeros_like(p) for p in masters]
    optimizer = torch.optim.AdamW(masters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        logits = layers(x)
        return nn.functional.cross_entropy(logits.float().flatten(0, -2), y.flatten())

    def one(step: int) -> float:
        total = []
        torch._foreach_zero_(sums)
        for number in range(given.microbatches):
            x, y = (part.to(device) for part in data.batch(step, number))
            if given.shards > 1:
                with loss_parallel():
                    loss = loss_of(x, y)
                    loss.backward()
            else:
                loss = loss_of(x, y)
                loss.backward()
            for held, p in zip(sums, working, strict=True):
                grad: Any = p.grad
                same = grad.redistribute(placements=p.placements) if hasattr(p, "placements") else grad
                held.add_(local(same))
                p.grad = None
            total.append(local(loss.detach()))
        for p, held in zip(masters, sums, strict=True):
            p.grad = held.div_(given.microbatches)
        squares = torch.zeros(2, device=device)
        for held, split in zip(sums, is_split, strict=True):
            squares[int(split)] += held.square().sum()
        if given.shards > 1:
            dist.all_reduce(squares[1:])
        torch._foreach_mul_(sums, torch.clamp(squares.sum().rsqrt(), max=1.0))
        optimizer.step()
        with torch.no_grad():
            for w, p in zip(working, masters, strict=True):
                local(w).copy_(p)
        return float(torch.stack(total).mean())

    times, losses = [], []
    for step in range(1, given.steps + 1):
        began = time.monotonic()
        losses.append(one(step))
        times.append(time.monotonic() - began)
        if given.rank == 0:
            print(f"torch, {given.shards} shards: step {step} {times[-1]:.3f} s", file=sys.stderr, flush=True)
    return {"times": times, "losses": losses}


def local(tensor: Any) -> Any:
    """This rank's part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def run(arguments: list[str], shards: int) -> list[dict[str, Any]]:
    same = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
    ranks = []
    for rank in range(shards):
        environment = {**os.environ, **same, "NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
        command = [sys.executable, __file__, *arguments, "--rank", str(rank)]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        said = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for one in ranks:
            one.kill()
    return [json.loads(text.splitlines()[-1]) for text in said]


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--preset", default="gpt-125m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        print(json.dumps(rank_main(given)), flush=True)
        os._exit(0)
    found = run(sys.argv[1:], given.shards)
    times = [max(row) for row in zip(*(one["times"] for one in found), strict=True)]
    answer = {
        "shards": given.shards,
        "step_ms": round(statistics.median(times[given.steps // 3 :]) * 1e3, 1),
        "first_loss": found[0]["losses"][0],
        "last_loss": found[0]["losses"][-1],
    }
    print(json.dumps(answer, indent=None if given.json else 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
