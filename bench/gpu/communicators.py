"""What the lanes of a worker take over NCCL: memory of the GPU and the host, threads and open files.

    python bench/gpu/communicators.py                  2 to 32 replicas: 2 to 62 communicators per worker
    python bench/gpu/communicators.py --replicas 2,8 --json

Two processes on one GPU open as many communicators as a worker with so many replicas has, one per peer and
direction, and send a tensor through each. Each process has an NCCL_HOSTID of its own, so bytes go through
sockets, as between nodes. Below it, one communicator of torch's own with as many ranks as two processes can
have: two, after an all-reduce.

GPU, host       MB of one of the two processes; host: memory that it shares with no other
threads, files  of one process, beyond those it had before
opened          seconds until the last communicator is open
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from bench.reduce import facts_of  # noqa: E402

NUMBERS = 4 << 20  # bytes through each communicator
OPEN_WITHIN_S = 120.0


def facts() -> dict[str, float]:
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    found = facts_of(os.getpid())
    files = len(list(Path("/proc/self/fd").iterdir()))
    return {
        "gpu_mb": -free / 1e6,
        "host_mb": found["private_mb"],
        "threads": found["threads"],
        "files": files,
    }


def lanes(me: int, peer: Connection, told: Connection, counts: list[int]) -> None:
    """One of the two processes. Every second communicator sends from here."""
    import torch

    from everstep.net.nccl import NcclWire, prepare

    prepare("127.0.0.1", alone=True)
    device = torch.device("cuda", 0)
    tensor = torch.zeros(NUMBERS, dtype=torch.uint8, device=device)
    wires: list[NcclWire] = []
    meet(peer)
    told.send(facts())
    for count in counts:
        began = time.monotonic()
        while len(wires) < count:
            wires.append(opened(NcclWire(device), peer, sends=len(wires) % 2 == me))
            wires[-1].begin((tensor,))
            until(wires[-1].is_done)
        took = time.monotonic() - began
        meet(peer)
        told.send(facts() | {"opened_s": took})
        meet(peer)  # nobody allocates while the other one looks
    for wire in wires:
        wire.close()


def opened(wire: Any, peer: Connection, *, sends: bool) -> Any:
    if sends:
        peer.send_bytes(name := wire.name())
    else:
        name = peer.recv_bytes(4096)
    wire.begin_open(name, sends=sends)
    until(wire.is_open)
    return wire


def until(done: Any) -> None:
    limit = time.monotonic() + OPEN_WITHIN_S
    while not done():
        if time.monotonic() > limit:
            raise SystemExit("a communicator took too long")
        time.sleep(1e-3)


def meet(peer: Connection) -> None:
    peer.send_bytes(b"here")
    if not peer.poll(OPEN_WITHIN_S):
        raise SystemExit("the other process is gone")
    peer.recv_bytes(16)


def torchs_own(me: int, peer: Connection, told: Connection, folder: str) -> None:
    import torch
    import torch.distributed as dist

    os.environ["NCCL_HOSTID"] = f"rank-{me}"
    os.environ["NCCL_SOCKET_IFNAME"] = "=lo"
    tensor = torch.zeros(NUMBERS, dtype=torch.uint8, device="cuda:0")
    dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=me, world_size=2)
    meet(peer)
    told.send(facts())
    meet(peer)
    began = time.monotonic()
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    took = time.monotonic() - began
    meet(peer)
    told.send(facts() | {"opened_s": took})
    meet(peer)
    dist.destroy_process_group()


def measured(work: Any, rows: int, *more: Any) -> list[dict[str, float]]:
    """What both processes told, beyond what they had before; memory of the GPU is that of both."""
    context = multiprocessing.get_context("spawn")
    ends = context.Pipe()
    pipes = [context.Pipe(duplex=False) for _ in ends]
    processes = [context.Process(target=work, args=(me, ends[me], pipes[me][1], *more)) for me in (0, 1)]
    for process in processes:
        process.start()
    told: list[list[dict[str, float]]] = []
    try:
        for reader, _ in pipes:
            told.append([])
            for _ in range(rows + 1):
                if not reader.poll(OPEN_WITHIN_S):
                    raise SystemExit("a process said nothing for two minutes")
                told[-1].append(reader.recv())
    finally:
        for process in processes:
            process.join(20)
            process.kill()
    first, second = told
    results = []
    for mine, other in zip(first[1:], second[1:], strict=True):
        grown = {name: mine[name] - first[0][name] for name in first[0]}
        gpu = max(mine["gpu_mb"], other["gpu_mb"]) - max(first[0]["gpu_mb"], second[0]["gpu_mb"])
        results.append(grown | {"gpu_mb": gpu / 2, "opened_s": mine["opened_s"]})
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", default="2,4,8,16,32", help="their numbers, rising, with commas")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    try:
        replicas = sorted(int(word) for word in given.replicas.split(","))
    except ValueError:
        parser.error(f"--replicas has numbers with commas between them, such as 2,8; not {given.replicas!r}")
    import torch

    if not torch.cuda.is_available():
        print("this bench needs a GPU", file=sys.stderr)
        return 2
    counts = [2 * (number - 1) for number in replicas]
    rows: dict[str, dict[str, float]] = {}
    for number, row in zip(replicas, measured(lanes, len(counts), counts), strict=True):
        rows[f"{number} replicas, {2 * (number - 1)} communicators"] = row
    with tempfile.TemporaryDirectory() as folder:
        rows["torch, 1 communicator of 2 ranks"] = measured(torchs_own, 1, folder)[0]
    if given.json:
        print(json.dumps(rows))
        return 0
    print(f"{'':36} {'GPU MB':>9} {'host MB':>9} {'threads':>8} {'files':>7} {'opened s':>9}")
    for name, row in rows.items():
        print(
            f"{name:36} {row['gpu_mb']:9.1f} {row['host_mb']:9.1f} {row['threads']:8.0f} "
            f"{row['files']:7.0f} {row['opened_s']:9.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
