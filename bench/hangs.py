"""Hangs in a torchrun-style script: is the right rank suspected, before anything is ended?

    python bench/hangs.py                          20 hangs in 4, 8 and 16 ranks of gloo
    python bench/hangs.py --number 6 --ranks 4     fewer
    python bench/hangs.py --device cuda --ranks 4 --number 18 --side-by-side 6     NCCL; ranks may share a GPU

One rank, drawn by the seed, does one of these in the middle of training, and the others wait for it in a
collective: it sleeps, spins, is stopped (SIGSTOP), waits for a lock, for a message that nobody sends or a
data loader whose worker sleeps, skips a collective, enters another one, or leaves with code 0.
`everstep run --nproc N --hang-after 6` runs the script unchanged.

right    the incident names this rank
ras      what NCCL's RAS says, where there is NCCL and stacks were taken; ras_right: it names this rank
early    it was reported in words before the first signal was sent
crashed  the ranks failed before the hang began, of another cause (NCCL's start with many ranks on one GPU):
         not counted, and tried again up to twice
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

KINDS = ("sleep", "spin", "lock", "receive", "skip", "leave", "stop", "other", "loader")
STEPS, AT = 40, 12
HANG_AFTER_S = 6.0
BEGINS, TRIES = "the hang begins", 3


def be_a_rank(kind: str, victim: int, device: str) -> None:
    import torch
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        # Ranks of one GPU: NCCL allows that only between hosts, so each is one, over sockets.
        own = {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1"}
        os.environ.update(own | {"NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"})
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    half = dist.new_group(range(world // 2))
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    for step in range(STEPS):
        is_struck = is_first and step == AT and rank == victim
        if is_struck:
            print(BEGINS, flush=True)
        if is_struck and hang(kind, device) == "leave":
            os._exit(0)
        if is_struck and kind == "other":
            dist.broadcast(torch.ones(1000, device=device), src=(rank + 1) % world)
        elif not (is_struck and kind == "skip"):
            reduce_gradients(torch.ones(1000, device=device))
        if rank < world // 2 and step % 3 == 0:
            dist.all_reduce(torch.ones(10, device=device), group=half)
        if device == "cuda":
            torch.cuda.synchronize()
        time.sleep(0.02)
    dist.destroy_process_group()


def reduce_gradients(gradients: Any) -> None:
    import torch.distributed as dist

    dist.all_reduce(gradients)


def hang(kind: str, device: str) -> str:
    import torch
    import torch.distributed as dist

    if kind == "sleep":
        time.sleep(10_000)
    elif kind == "spin":
        turns = 0
        while True:
            turns += 1
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "loader":
        next(iter(torch.utils.data.DataLoader(SleepingRows(), num_workers=1)))
    elif kind == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif kind == "receive":
        dist.recv(torch.ones(10, device=device), src=(dist.get_rank() + 1) % dist.get_world_size())
        if device == "cuda":
            torch.cuda.synchronize()
    return kind


class SleepingRows:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        time.sleep(10_000)


def one(kind: str, ranks: int, victim: int, device: str, limit_s: float) -> dict[str, Any]:
    crashed: list[str] = []
    while True:
        row = run(kind, ranks, victim, device, limit_s)
        if "crashed" not in row or len(crashed) == TRIES - 1:
            return row | ({"crashed_before": crashed} if crashed else {})
        crashed.append(row["crashed"])


def run(kind: str, ranks: int, victim: int, device: str, limit_s: float) -> dict[str, Any]:
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory(prefix="hangs-") as folder:
        command = [sys.executable, "-m", "everstep.cli.main", "run", "--nproc", str(ranks), "--json"]
        command += ["--hang-after", str(HANG_AFTER_S), "--grace", "1", str(Path(__file__).resolve())]
        command += ["--rank", kind, "--victim", str(victim), "--device", device]
        path = os.pathsep.join([str(root / "src"), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path}
        began = time.monotonic()
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            output, said = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, said = process.communicate()
    found: dict[str, Any] = {"kind": kind, "ranks": ranks, "victim": victim}
    lines = [line for line in said.splitlines() if line.startswith("everstep:")]
    try:
        incidents = json.loads(output)["incidents"]
    except ValueError:
        return found | {"error": "\n".join(said.splitlines()[-5:])}
    if BEGINS not in said:
        because = [incident["because"] for incident in incidents]
        return found | {"crashed": because[0] if because else "it ended without an incident"}
    signalled = next((n for n, line in enumerate(lines) if "SIGTERM to" in line), len(lines))
    # What a line begins with: a suspicion, or the incident itself.
    told = [re.sub(r"^.*? s  (no rank has made progress for .*? s: )?", "", line) for line in lines]
    early = [line for line in told[:signalled] if re.match(rf"(hang at )?ranks? (\d+, )*{victim}\b", line)]
    first = (
        incidents[0] if incidents else {"rank": None, "what": "no incident", "because": "", "evidence": []}
    )
    ras = [line for line in first["evidence"] if "by NCCL's RAS" in line]
    return found | {
        "named": first["rank"],
        "right": first["rank"] == victim,
        "early": bool(early),
        "ras": ras,
        "ras_right": any(re.match(rf"rank {victim}\b(?!,)", line) for line in ras),
        "noticed_s": round(first.get("noticed_ms", 0) / 1e3, 1),
        "restarts": len(incidents),
        "seconds": round(time.monotonic() - began, 1),
        "what": first["what"],
        "because": first["because"],
    }


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--number", type=int, default=20)
    parser.add_argument("--ranks", type=int, action="append", help="may be repeated; else 4, 8 and 16")
    parser.add_argument("--kind", action="append", choices=KINDS, help="may be repeated")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--side-by-side", type=int, default=1, help="groups of ranks at a time")
    parser.add_argument("--limit-s", type=float, default=180)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--victim", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        be_a_rank(args.rank, args.victim, args.device)
        return
    draw = random.Random(args.seed)
    kinds, sizes = args.kind or KINDS, args.ranks or (4, 8, 16)
    began = time.monotonic()
    with ThreadPoolExecutor(args.side_by_side) as groups:
        asked = []
        for number in range(args.number):
            kind, ranks = kinds[number % len(kinds)], sizes[number // len(kinds) % len(sizes)]
            asked.append(groups.submit(one, kind, ranks, draw.randrange(ranks), args.device, args.limit_s))
        rows = []
        for each in asked:
            rows.append(each.result())
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    keys = ("right", "early", "ras", "ras_right")
    right, early, ras, ras_right = (sum(bool(row.get(key)) for row in rows) for key in keys)
    crashed = sum("crashed" in row for row in rows)
    summary = {
        "hangs": len(rows) - crashed,
        "crashed": crashed,
        "right": right,
        "early": early,
        "ras_answered": ras,
        "ras_right": ras_right,
        "device": args.device,
    }
    summary["seconds"] = round(time.monotonic() - began)
    print(json.dumps(summary | {"rows": rows} if args.json else summary, indent=1))


if __name__ == "__main__":
    main()
