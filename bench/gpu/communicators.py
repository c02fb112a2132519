"""The ways out of an NCCL communicator whose member is dead, timed; and what a lane carries per second.

    python bench/gpu/communicators.py                 all ways, each twice
    python bench/gpu/communicators.py --repeat 3 --json
    python bench/gpu/communicators.py --bandwidth     one lane of two ranks, both directions at once

All ranks share the one GPU, each with its own NCCL_HOSTID, so that NCCL talks through sockets as between
machines. Three survivors and a victim form a communicator; the victim is killed by SIGKILL; the survivors sit
in an all-reduce with it for 0.8 s and then take the way out. Times are from that moment, in milliseconds.

    abort            ncclCommAbort, then a new communicator of the three
    revoke           ncclCommRevoke, then the same
    shrink           ncclCommShrink with NCCL_SHRINK_ABORT, then the same
    spare            a communicator of the three is ready; the broken one is dropped and aborted behind
    pairs            what Everstep does: one communicator per pair; those with the victim are left behind
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import queue
import signal
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # where nothing can be installed

WAYS = ("abort", "revoke", "shrink", "spare", "pairs")
SURVIVORS = (0, 1, 2)


class Rank:
    """One process of the trial: raw communicators of any size on top of the engine's own library."""

    def __init__(self, rank: int, queues: list[Any]) -> None:
        import torch

        from everstep.net import nccl

        self.rank, self.queues = rank, queues
        os.environ.setdefault("NCCL_DEBUG", "ERROR")
        nccl.prepare("127.0.0.1", alone=True)
        self.torch, self.nccl = torch, nccl
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        torch.zeros(1, device=self.device)
        self.library = nccl.library()
        self.stream = nccl._own_stream(self.device)

    def meet(self, ranks: tuple[int, ...]) -> bytes:
        if self.rank != ranks[0]:
            return self.queues[self.rank].get(timeout=60)
        name = self.nccl.NcclWire(self.device).name()
        for other in ranks[1:]:
            self.queues[other].put(name)
        return name

    def communicator(self, ranks: tuple[int, ...]) -> ctypes.c_void_p:
        name, comm, config = self.nccl._Name(), ctypes.c_void_p(), self.nccl._config()
        ctypes.memmove(ctypes.byref(name), self.meet(ranks), self.nccl.NAME_BYTES)
        self.library.ncclCommInitRankConfig(
            ctypes.byref(comm), len(ranks), name, ranks.index(self.rank), ctypes.byref(config)
        )
        self.wait(comm)
        return comm

    def wait(self, comm: ctypes.c_void_p, within_s: float = 30.0) -> int:
        state, until = ctypes.c_int(7), time.monotonic() + within_s
        while time.monotonic() < until:
            self.library.ncclCommGetAsyncError(comm, ctypes.byref(state))
            if state.value != 7:
                break
            time.sleep(2e-4)
        return state.value

    def all_reduce(self, comm: ctypes.c_void_p, tensor: Any, stream: Any = None) -> None:
        stream = stream or self.stream
        pointer = ctypes.c_void_p(tensor.data_ptr())
        count = ctypes.c_size_t(tensor.numel())
        self.library.ncclAllReduce(pointer, pointer, count, 7, 0, comm, ctypes.c_void_p(stream.cuda_stream))
        self.wait(comm, 5)

    # -------------------------------------------------------------- one trial

    def trial(self, way: str, victim: int) -> dict[str, Any] | None:
        everyone = (*SURVIVORS, victim)
        small = self.torch.ones(1 << 20, device=self.device)
        large = self.torch.ones(16 << 20, device=self.device)
        self.torch.cuda.current_stream().synchronize()
        if way == "pairs":
            return self._pairs(victim)
        comm = self.communicator(everyone)
        spare = self.communicator(SURVIVORS) if way == "spare" and self.rank != victim else None
        for _ in range(3):
            self.all_reduce(comm, small)
        if spare is not None:
            self.all_reduce(spare, small)
        self.stream.synchronize()
        if self.rank == victim:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        self.all_reduce(comm, large)
        time.sleep(0.8)
        began = time.monotonic()

        def passed() -> float:
            return round((time.monotonic() - began) * 1e3, 1)

        found: dict[str, Any] = {"way": way, "rank": self.rank}
        if way == "spare":
            assert spare is not None
            behind = threading.Thread(target=self.library.ncclCommAbort, args=(comm,))
            behind.start()
            other = self.nccl._own_stream(self.device)
            self.all_reduce(spare, small, other)
            other.synchronize()
            found["works_again"] = passed()
            behind.join(10)
            self.stream.synchronize()
            found["stream_free"] = passed()
            return found
        if way == "abort":
            self.library.ncclCommAbort(comm)
        elif way == "revoke":
            if not hasattr(self.library, "ncclCommRevoke"):
                return found | {"missing": True}
            found["code"] = self.library.ncclCommRevoke(comm, 0)
            self.wait(comm, 5)
        else:
            left, gone = ctypes.c_void_p(), (ctypes.c_int * 1)(3)
            found["code"] = self.library.ncclCommShrink(comm, gone, 1, ctypes.byref(left), None, 1)
        found["call"] = passed()
        while not self.stream.query() and passed() < 5000:
            time.sleep(2e-4)
        found["stream_free"] = passed()
        new = self.communicator(SURVIVORS)
        self.all_reduce(new, small)
        self.stream.synchronize()
        found["works_again"] = passed()
        if way != "abort":
            threading.Thread(target=self.library.ncclCommAbort, args=(comm,), daemon=True).start()
        return found

    def _pairs(self, victim: int) -> dict[str, Any] | None:
        """Rank 0 sends to the victim and to rank 1."""
        large = self.torch.ones(64 << 20, device=self.device)
        if self.rank == 2:
            return None
        to_live = self._wire((0, 1)) if self.rank in (0, 1) else None
        if self.rank in (0, victim):
            to_victim = self._wire((0, victim))
        if self.rank == victim:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.rank == 1:
            assert to_live is not None
            self._carry(to_live, large)
            return None
        assert to_live is not None
        self.torch.cuda.current_stream().synchronize()
        to_victim.begin((large,))
        end = time.monotonic() + 0.8
        broken = None
        while time.monotonic() < end and broken is None:
            try:
                to_victim.is_done()
            except Exception as error:
                broken = str(error)[:200]
            time.sleep(1e-3)
        began = time.monotonic()
        left: list[float] = []

        def leave() -> None:
            to_victim.leave()
            left.append(time.monotonic())
            to_victim.close()

        behind = threading.Thread(target=leave)
        behind.start()
        first = large[: 1 << 20]
        self._carry(to_live, first)
        works = time.monotonic() - began
        behind.join(10)
        self._carry(to_live, large[1 << 20 :])
        return {
            "way": "pairs",
            "rank": 0,
            "works_again": round(works * 1e3, 1),
            "left": round((left[0] - began) * 1e3, 1) if left else None,
            "noticed_by_nccl": broken,
        }

    def _wire(self, ranks: tuple[int, int]) -> Any:
        wire = self.nccl.NcclWire(self.device)
        wire.begin_open(self.meet(ranks), sends=self.rank == ranks[0])
        while not wire.is_open():
            time.sleep(2e-4)
        self._carry(wire, self.torch.zeros(1, device=self.device))
        return wire

    def _carry(self, wire: Any, tensor: Any) -> None:
        if self.rank == 1 and tensor.numel() > 1 << 20:  # the receiver takes it in the same two pieces
            self._carry(wire, tensor[: 1 << 20])
            tensor = tensor[1 << 20 :]
        wire.begin((tensor,))
        while not wire.is_done():
            time.sleep(2e-5)


def member(rank: int, victims: list[tuple[str, int]], queues: list[Any], results: Any, turns: Any) -> None:
    one = Rank(rank, queues)
    for number, (way, victim) in enumerate(victims):
        if rank not in (*SURVIVORS, victim):
            continue
        if rank == victim:  # not before its turn: it would wait for the others with a limit
            while turns.value < number:
                time.sleep(0.01)
        try:
            found = one.trial(way, victim)
        except Exception as error:
            found = {"way": way, "rank": rank, "failed": f"{type(error).__name__}: {error}"[:300]}
        if found is not None:
            results.put(found)
        if rank == 0:
            turns.value = number + 1
        time.sleep(0.05)
    results.put(None)
    results.close()
    results.join_thread()
    os._exit(0)


def ways_out(repeat: int, limit_s: float) -> list[dict[str, Any]]:
    import torch.multiprocessing as mp

    mp.set_start_method("spawn")
    victims = [(way, 3 + i) for i, way in enumerate(way for _ in range(repeat) for way in WAYS)]
    count = 3 + len(victims)
    queues, results, turns = [mp.Queue() for _ in range(count)], mp.Queue(), mp.Value("i", 0)
    args = (victims, queues, results, turns)
    processes = [mp.Process(target=member, args=(rank, *args), daemon=True) for rank in range(count)]
    for process in processes:
        process.start()
    found, over, end = [], 0, time.monotonic() + limit_s
    while over < len(SURVIVORS) and time.monotonic() < end:
        try:
            row = results.get(timeout=1)
        except queue.Empty:
            continue
        if row is None:
            over += 1
        else:
            found.append(row)
            print(row, file=sys.stderr, flush=True)
    for process in processes:
        process.kill()
    return found


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    made = []
    for way in WAYS:
        here = [row for row in rows if row["way"] == way]
        line: dict[str, Any] = {"way": way, "trials": len(here)}
        for name in ("call", "stream_free", "works_again", "left"):
            values = [row[name] for row in here if row.get(name) is not None]
            if values:
                line[name] = [min(values), statistics.median(values), max(values)]
        made.append(line)
    return made


# ------------------------------------------------------------------ bandwidth


def carrier(rank: int, queues: list[Any], results: Any, sizes: list[int]) -> None:
    one = Rank(rank, queues)
    ends = {}
    for ranks in ((0, 1), (1, 0)):
        ends[ranks] = one._wire(ranks)
    for size in sizes:
        tensors = {ranks: one.torch.ones(size, dtype=one.torch.uint8, device=one.device) for ranks in ends}
        one.torch.cuda.current_stream().synchronize()
        for what in ("one way", "both ways"):
            used = [(0, 1)] if what == "one way" else list(ends)
            times = []
            for _ in range(4):
                began = time.monotonic()
                for ranks in used:
                    ends[ranks].begin((tensors[ranks],))
                waiting = set(used)
                while waiting:
                    waiting = {ranks for ranks in waiting if not ends[ranks].is_done()}
                times.append(time.monotonic() - began)
            if rank == 1:
                best = statistics.median(times[1:])
                results.put(
                    {
                        "bytes": size,
                        "what": what,
                        "ms": round(best * 1e3, 2),
                        "GB_per_s_per_direction": round(size / best / 1e9, 2),
                    }
                )
    results.put(None)
    results.close()
    results.join_thread()
    os._exit(0)


def bandwidth(limit_s: float) -> list[dict[str, Any]]:
    import torch.multiprocessing as mp

    mp.set_start_method("spawn")
    queues, results = [mp.Queue() for _ in range(2)], mp.Queue()
    sizes = [16 << 20, 256 << 20]
    processes = [mp.Process(target=carrier, args=(r, queues, results, sizes), daemon=True) for r in (0, 1)]
    for process in processes:
        process.start()
    found, over, end = [], 0, time.monotonic() + limit_s
    while over < 2 and time.monotonic() < end:
        try:
            row = results.get(timeout=1)
        except queue.Empty:
            continue
        if row is None:
            over += 1
        else:
            found.append(row)
    for process in processes:
        process.kill()
    return found


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--bandwidth", action="store_true")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for all of it")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.bandwidth:
        rows = bandwidth(given.limit)
        print(json.dumps(rows) if given.json else "\n".join(map(str, rows)))
        return
    rows = ways_out(given.repeat, given.limit)
    if given.json:
        print(json.dumps({"table": table(rows), "trials": rows}))
    else:
        print("\n".join(map(str, table(rows))))


if __name__ == "__main__":
    main()
