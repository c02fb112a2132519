"""What NCCL's RAS answers while ranks wait for one another, and what is read from it. About 45 s.

    python bench/gpu/ras.py --out DIR            4 ranks, which may share a GPU; raw answers are kept in DIR
    python bench/gpu/ras.py --device cpu         gloo: no RAS, which must cost nothing

One group of ranks goes through these moments, and RAS is asked in each of them:

    running    all ranks step
    late       rank 2 comes to an all-reduce 4 s after the others
    subgroup   rank 1 comes to an all-reduce of ranks 0 and 1 4 s late; 2 and 3 wait in one of all ranks
    stopped    rank 1 has had a SIGSTOP
    killed     rank 3 has had a SIGKILL

One JSON line per question. `named`: ranks that a hang is blamed on by these counts alone; `right` compares
them with what was done. The question of the product is asked with its own bounds; the others show what a
longer wait would bring, and the text that older versions answer.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src")]  # also when run by path

from everstep.ranks import nccl_records  # noqa: E402

RANKS, STEPS, LATE_S, LIMIT_S = 4, 30, 4.0, 58.0
RIGHT = {"running": (), "late": (2,), "subgroup": (1,), "stopped": (1,), "killed": (3,)}


def be_a_rank(device: str) -> None:
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    half = dist.new_group([0, 1])
    for step in range(10**6):
        if step == 1 and rank == 0:
            say("running")
        if step in (STEPS, 2 * STEPS) and rank == {STEPS: 2, 2 * STEPS: 1}[step]:
            say("late" if step == STEPS else "subgroup")
            time.sleep(LATE_S)
        if rank < 2:
            dist.all_reduce(torch.ones(1000, device=device), group=half)
        dist.all_reduce(torch.ones(1000, device=device))
        if device == "cuda":
            torch.cuda.synchronize()
        if step == 2 * STEPS + 5 and rank == 0:
            say("over")
        time.sleep(0.03)


def say(word: str) -> None:
    print(word, flush=True)


def start(rank: int, port: int, device: str) -> subprocess.Popen[str]:
    env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(port), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
    # Ranks of one GPU: NCCL allows that only between hosts, so each is one, over sockets.
    env |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1"}
    env |= {"NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "WARN"}
    command = [sys.executable, str(Path(__file__).resolve()), "--rank", str(rank), "--device", device]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def ask(text: bytes, wait_s: float) -> tuple[bytes, float]:
    """As `ncclras` does: one word at a time."""
    began, said = time.monotonic(), bytearray()
    try:
        address = nccl_records.ras_address(os.environ)
        assert address is not None
        with socket.create_connection(address, 1.0) as line:
            line.settimeout(wait_s)
            for word in (b"CLIENT PROTOCOL 2\n", b"TIMEOUT 2\n", text):
                line.sendall(word)
                said += line.recv(1 << 12)
            line.sendall(b"VERBOSE STATUS\n")
            while chunk := line.recv(1 << 16):
                said += chunk
    except OSError as error:
        said += f"\n[{type(error).__name__}: {error}]".encode()
    return bytes(said), time.monotonic() - began


def named(seen: dict[int, nccl_records.SeenByRas]) -> tuple[int, ...]:
    troubled = tuple(sorted(rank for rank, each in seen.items() if each.trouble))
    if troubled:
        return troubled
    late: set[int] = set()
    ahead: set[int] = set()
    for key in {key for each in seen.values() for key in each.launched}:
        counts = {rank: each.launched[key] for rank, each in seen.items() if key in each.launched}
        last = max(counts.values())
        behind = {rank for rank, count in counts.items() if count < last}
        late |= behind
        ahead |= set(counts) - behind if behind else set()
    return tuple(sorted(late - ahead))


def look(moment: str, ranks: dict[int, int], out: Path, *, wait_s: float) -> None:
    """All three ways to ask."""
    began = time.monotonic()
    question = nccl_records.NcclQuestion(os.environ, ranks, world=RANKS, seconds=1.5)
    while not question.is_over and time.monotonic() - began < 3.0:
        time.sleep(0.005)
    row: dict[str, Any] = {"moment": moment, "how": "product", "s": round(time.monotonic() - began, 3)}
    report(row, question.seen, moment)
    for how, word in (("json", b"SET FORMAT json\n"), ("text", b"SET FORMAT text\n")):
        said, took_s = ask(word, wait_s)
        (out / f"{moment}.{how}").write_bytes(said)
        row = {"moment": moment, "how": how, "s": round(took_s, 3), "bytes": len(said)}
        if how == "json":
            report(row, nccl_records.seen_by_ras(said, ranks, RANKS), moment)
        else:
            print(json.dumps(row | {"begins": said[:200].decode(errors="replace")}), flush=True)


def report(row: dict[str, Any], seen: dict[int, nccl_records.SeenByRas], moment: str) -> None:
    row |= {"answered": bool(seen), "named": named(seen), "right": named(seen) == RIGHT[moment]}
    row["launched"] = {rank: sorted(each.launched.values()) for rank, each in sorted(seen.items())}
    row["trouble"] = {rank: each.trouble for rank, each in sorted(seen.items()) if each.trouble}
    print(json.dumps(row), flush=True)


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        be_a_rank(args.device)
        return
    out = args.out or Path(tempfile.mkdtemp(prefix="ras-"))
    out.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began = time.monotonic()
    processes = [start(rank, port, args.device) for rank in range(RANKS)]
    ranks = {process.pid: rank for rank, process in enumerate(processes)}
    said: queue.Queue[str] = queue.Queue()
    for process in processes:
        threading.Thread(
            target=lambda out=process.stdout: [said.put(x.strip()) for x in out], daemon=True
        ).start()
    end = threading.Timer(LIMIT_S, lambda: [process.kill() for process in processes])
    end.start()
    try:
        for moment in ("running", "late", "subgroup", "over"):
            while (word := said.get(timeout=LIMIT_S)) != moment:
                print(f"a rank says {word}", flush=True)
            print(f"{moment} after {time.monotonic() - began:.1f} s", flush=True)
            if moment == "over":
                break
            time.sleep(0.0 if moment == "running" else 1.0)
            look(moment, ranks, out, wait_s=2.0)
        os.kill(processes[1].pid, signal.SIGSTOP)
        time.sleep(1.0)
        look("stopped", ranks, out, wait_s=5.0)
        os.kill(processes[1].pid, signal.SIGCONT)
        time.sleep(0.5)
        os.kill(processes[3].pid, signal.SIGKILL)
        time.sleep(0.2)  # the others end soon, by an error of NCCL
        look("killed", ranks, out, wait_s=3.0)
    finally:
        end.cancel()
        for process in processes:
            process.kill()
            process.wait()
    print(f"{time.monotonic() - began:.1f} s; raw answers are in {out}", flush=True)


if __name__ == "__main__":
    main()
