"""Exact sums of gradients in a DDP script, on one GPU that all ranks share: seconds per step beside plain DDP
and beside NCCL held to one ring, and whose bits stay when ranks change places.

    python -m bench.gpu.exact_sums                 # 350M, 2 ranks; then 3 ranks in three orders
    python -m bench.gpu.exact_sums --cpu --small   # the same logic with gloo

NCCL talks through sockets here, as between machines. Under MPS, for without it the ranks' kernels take
turns, and each small collective waits for two of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # where nothing can be installed

from harness.mps import mps  # noqa: E402

NCCL = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
}
SHAPES = {"350m": (24, 1024, 16384), "98m": (12, 768, 16384), "small": (2, 64, 512)}  # layers, width, words


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--cpu", action="store_true", help="gloo on CPUs")
    options.add_argument("--small", action="store_true", help="a tiny model")
    options.add_argument("--steps", type=int, default=24)
    options.add_argument("--turns", type=int, default=2, help="of each kind, one after the other")
    options.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    if given.rank is not None:
        one_rank(**given.rank)
        return
    with mps(not given.cpu):
        document = measured(given)
    print(json.dumps(document, indent=None if given.json else 1))
    sys.exit(0 if document["same_bits"] == {"plain": False, "exact": True} else 1)


def measured(given: argparse.Namespace) -> dict[str, Any]:
    shape = "small" if given.small else "350m"
    times: dict[str, list[float]] = {}
    for _ in range(given.turns):
        for kind, sums, extra in (
            ("plain", "plain", {}),
            ("exact", "exact", {}),
            ("plain, NCCL_ALGO=Ring", "plain", {"NCCL_ALGO": "Ring"}),
        ):
            found = ranks(2, (0, 1), sums, shape, given.steps, given.cpu, extra)
            times.setdefault(kind, []).append(found["step_s"])
            print(f"{kind}: {1e3 * found['step_s']:.1f} ms per step", file=sys.stderr)
    bits: dict[str, list[str]] = {}
    small = "small" if given.small else "98m"
    for order in ((0, 1, 2), (2, 0, 1)):
        for sums in ("plain", "exact"):
            bits.setdefault(sums, []).append(ranks(3, order, sums, small, 6, given.cpu, {})["weights"])
            print(f"{sums}, ranks {order}: {bits[sums][-1][:12]}", file=sys.stderr)
    tree = {"NCCL_ALGO": "ring;allreduce:tree"}
    for sums in ("plain", "exact"):
        bits[sums].append(ranks(3, (0, 1, 2), sums, small, 6, given.cpu, tree)["weights"])
        print(f"{sums}, by a tree: {bits[sums][-1][:12]}", file=sys.stderr)
    medians = {kind: median(found) for kind, found in times.items()}
    return {
        "step_s": medians,
        "turns": times,
        "exact_over_plain": medians["exact"] / medians["plain"],
        "same_bits": {sums: len(set(found)) == 1 for sums, found in bits.items()},
    }


def ranks(
    count: int,
    order: tuple[int, ...],
    sums: str,
    shape: str,
    steps: int,
    is_cpu: bool,
    extra: dict[str, str],
) -> dict[str, Any]:
    """`order`: which share of the batch each rank has."""
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(count):
            told = {
                "rank": rank,
                "count": count,
                "share": order[rank],
                "sums": sums,
                "shape": shape,
                "steps": steps,
                "is_cpu": is_cpu,
                "folder": folder,
            }
            command = [sys.executable, "-m", "bench.gpu.exact_sums", "--rank", json.dumps(told)]
            path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
            own = {"NCCL_HOSTID": f"host{rank}", "PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
            processes.append(subprocess.Popen(command, env={**os.environ, **NCCL, **own, **extra}))
        try:
            codes = [process.wait(timeout=240) for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert not any(codes), f"ranks ended with {codes}"
        found: dict[str, Any] = json.loads(Path(folder, "found").read_text())
        return found


def one_rank(
    *, rank: int, count: int, share: int, sums: str, shape: str, steps: int, is_cpu: bool, folder: str
) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from everstep import exact

    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cpu" if is_cpu else "cuda:0")
    if is_cpu:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    backend = "gloo" if is_cpu else "nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/ranks", rank=rank, world_size=count)
    layers, width, words = SHAPES[shape]
    torch.manual_seed(0)
    block = {"nhead": width // 64, "dim_feedforward": 4 * width, "dropout": 0.0}
    body = [
        torch.nn.TransformerEncoderLayer(width, **block, activation="gelu", batch_first=True, norm_first=True)
        for _ in range(layers)
    ]
    model = torch.nn.Sequential(torch.nn.Embedding(words, width), *body, torch.nn.Linear(width, words))
    model = DistributedDataParallel(model.to(device), device_ids=None if is_cpu else [0])
    if sums == "exact":
        exact.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    times = []
    for step in range(steps):
        began = time.perf_counter()
        draw = torch.Generator().manual_seed(1000 * step + share)
        tokens = torch.randint(0, words, (2 if is_cpu else 8, 65 if is_cpu else 513), generator=draw)
        tokens = tokens.to(device)
        with torch.autocast(device.type, torch.bfloat16):
            scores = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if not is_cpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    seen = hashlib.sha256()
    for each in model.parameters():
        seen.update(each.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    if rank == 0:
        document = {"step_s": median(times[steps // 3 :]), "weights": seen.hexdigest()}
        Path(folder, "found").write_text(json.dumps(document))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
