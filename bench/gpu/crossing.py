"""Lanes over NCCL that all workers use in all directions at once: how fast, and does anything stand still?

    python bench/gpu/crossing.py --mps                                 8 workers on one GPU
    python bench/gpu/crossing.py --mps --set MOST_AT_ONCE=2            a constant of net/nccl.py
    python bench/gpu/crossing.py --mps --kernels --env CUDA_MODULE_LOADING=EAGER
    python bench/gpu/crossing.py --mps --plan FILE                     a line of such options for each run

Each worker has a few messages on their way to every other one, and answers each that comes with another one,
while its GPU multiplies matrices; with `--kernels` it also launches hundreds of kernels for the first time.
Late transfers are not interrupted, unless `--guard` says so. Where nothing has come to any worker for two
seconds, each tells what its lanes wait for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import queue
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

STILL_S = 2.0
FIRST_WITHIN_S = 25.0
START_WITHIN_S = 60.0
BEHIND = 2  # products that the device is behind the host
AGAIN_S = 4.0  # MPS refuses new processes for a while when others were killed
MATHS = (  # a kernel each, for each type of numbers
    "sin cos tan asin acos atan sinh cosh asinh acosh atanh exp exp2 expm1 log log2 log10 log1p sqrt rsqrt "
    "erf erfc erfinv lgamma digamma sigmoid ceil floor round trunc frac neg abs sign reciprocal isnan "
    "cumsum cumprod logcumsumexp sort argsort median mode logsumexp softmax prod std amax argmax"
)


@dataclass
class Crossing:
    """One worker."""

    me: int
    given: argparse.Namespace
    pipe: Connection
    moved: Any  # bytes that have come, of each worker
    is_over: threading.Event = field(default_factory=threading.Event)
    launching: str = ""
    slowest_s: float = 0.0  # of all first launches

    def run(self) -> None:
        import torch

        from everstep.net.frames import Incoming

        self.plane, self.peers = self._connected()
        device = self.plane.device
        self.sent = torch.ones(int(self.given.mb * 250_000), dtype=torch.float32, device=device)
        self.numbers = dict.fromkeys(self.peers, 0)
        for peer in list(self.peers) * self.given.ahead:
            self._post(peer)
        threading.Thread(target=self._answer, daemon=True).start()
        self.pipe.send("posted")
        computes = self._computes() if device.type == "cuda" else iter(lambda: None, 0)
        while True:
            next(computes)
            with contextlib.suppress(queue.Empty):
                while True:
                    item = self.plane.inbox.get(timeout=1e-4)
                    if isinstance(item, Incoming):
                        self.moved[self.me] += item.nbytes
                        if not self.is_over.is_set():
                            self._post(item.envelope.beside)

    def _connected(self) -> tuple[Any, dict[int, Any]]:
        import torch

        from everstep.net import lanes, nccl, plane
        from everstep.net.links import Address

        for name, value in (change.split("=", 1) for change in self.given.set):
            assert hasattr(nccl, name), name
            setattr(nccl, name, int(value))
        plane.WIRES["nccl"] = plane.WIRES["nccl"]._replace(most=nccl.MOST_AT_ONCE)
        if not self.given.guard:
            lanes.LATE_S = float("inf")
        is_gpu = self.given.device == "cuda"
        nccl.prepare("127.0.0.1", alone=True)
        found = plane.DataPlane(
            plane.PlaneSettings(
                secret=b"s" * 32,
                host="127.0.0.1",
                device=torch.device("cuda", 0) if is_gpu else torch.device("cpu"),
                transport="nccl" if is_gpu else "pipe",
                waits=True,
            )
        )
        found.start()
        self.pipe.send(tuple(found.links.address))
        addresses = [Address(*one) for one in self.pipe.recv()]
        peers = {number: at for number, at in enumerate(addresses) if number != self.me}
        for at in peers.values():
            found.links.connect(at)
        while any(found.links.identity(at) is None for at in peers.values()):
            time.sleep(0.01)
        return found, peers

    def _post(self, to: int) -> None:
        from everstep.net.envelope import Envelope
        from everstep.protocol.parcels import Parcel, ParcelKind

        self.numbers[to] += 1
        parcel = Parcel(ParcelKind.WEIGHTS, 0, self.numbers[to], 0)
        self.plane.post(self.peers[to], parcel, Envelope(beside=self.me), (self.sent,))

    def _computes(self) -> Iterator[None]:
        import torch

        left = torch.ones((self.given.matrix,) * 2, dtype=torch.bfloat16, device=self.plane.device)
        new = first_launches(self.plane.device) if self.given.kernels else iter(())
        behind: list[Any] = []
        while True:
            if self.moved[self.me] and not self.is_over.is_set() and (found := next(new, None)):
                self.launching, began = found[0], time.monotonic()
                found[1]()
                self.launching, self.slowest_s = "", max(self.slowest_s, time.monotonic() - began)
            torch.mm(left, left)
            behind.append(torch.cuda.Event())
            behind[-1].record()
            while len(behind) > BEHIND:
                if behind[0].query():
                    behind.pop(0)
                else:
                    time.sleep(1e-4)
            yield

    def _answer(self) -> None:
        """What the bench asks, whatever the worker is in."""
        while (asked := self.pipe.recv()) != "end":
            if asked == "stop":
                self.is_over.set()
                self.pipe.send(self.slowest_s)
            else:
                self.pipe.send({"launches": self.launching, "lanes": list(self._lanes())})
        os._exit(0)

    def _lanes(self) -> Iterator[str]:
        for lane in list(self.plane._lanes._wired):
            if lane.moving is None and not lane.held:
                continue
            peer = next((number for number, at in self.peers.items() if at == lane.peer), None)
            since = lane.wire.waits_since()
            on_device = "" if since is None else f", on the device for {time.monotonic() - since:.1f} s"
            way = f"to {peer}" if lane.sends else f"from {peer}"
            yield f"{way} is {lane.state}, {'moves' if lane.moving else 'has its turn later'}{on_device}"


def first_launches(device: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Of kernels that this process has not launched yet."""
    import torch

    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.full((1000,), 0.5, dtype=dtype, device=device)
        for name in MATHS.split():
            function = getattr(torch, name)

            def launch(function: Any = function, x: Any = x) -> None:
                with contextlib.suppress(RuntimeError):  # there is none for this type
                    try:
                        function(x)
                    except TypeError:
                        function(x, 0)

            yield f"{name} of {dtype}", launch


def work(me: int, given: argparse.Namespace, pipe: Connection, moved: Any) -> None:
    os.environ["NCCL_HOSTID"] = f"worker {me}"  # several ranks of NCCL on one GPU
    Crossing(me, given, pipe, moved).run()


def one_run(given: argparse.Namespace) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    moved = context.Array("d", given.workers, lock=False)
    pipes, processes = [], []
    began = time.monotonic()
    for me in range(given.workers):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=work, args=(me, given, theirs, moved), daemon=True))
        processes[-1].start()
        theirs.close()  # so that its death ends the wait for it
        pipes.append(ours)
    try:
        addresses = [_said(pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send(addresses)
        for pipe in pipes:
            _said(pipe)
        while not all(moved) and time.monotonic() - began < FIRST_WITHIN_S:
            time.sleep(0.05)
        result: dict[str, Any] = {"all began after": round(time.monotonic() - began, 1)}
        result |= _traffic(moved, given.seconds)
        if result["longest pause"] > STILL_S or not result["GB/s of all"]:
            for pipe in pipes:
                pipe.send("tell")
            return result | {"told": [pipe.recv() if pipe.poll(5) else None for pipe in pipes]}
        for pipe in pipes:
            pipe.send("stop")
        result["slowest launch"] = round(max(map(_said, pipes)), 3)
        time.sleep(1.0)  # what is on its way arrives
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send("end")
            process.join(5)
        return result
    except (EOFError, OSError) as error:
        return {"failed": repr(error)}
    finally:
        for process in processes:
            process.kill()
            process.join()


def _said(pipe: Connection) -> Any:
    if not pipe.poll(START_WITHIN_S):
        raise TimeoutError(f"a worker said nothing for {START_WITHIN_S:.0f} s")
    return pipe.recv()


def _traffic(moved: Any, seconds: float) -> dict[str, Any]:
    """Until so many seconds are over, or nothing has come for too long."""
    before = last = sum(moved)
    started = came = time.monotonic()
    pause_s = 0.0
    while (now := time.monotonic()) < started + seconds and pause_s <= STILL_S:
        if sum(moved) != last:
            last, came = sum(moved), now
        pause_s = max(pause_s, now - came)
        time.sleep(0.01)
    rate = (last - before) / max(came - started, 1e-3) / 1e9
    return {"longest pause": round(pause_s, 3), "GB/s of all": round(rate, 2)}


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    found = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    found.add_argument("--workers", type=int, default=8)
    found.add_argument("--mb", type=float, default=4.0, help="of a message")
    found.add_argument("--ahead", type=int, default=2, help="messages to each peer at once")
    found.add_argument("--kernels", action="store_true", help="launch kernels for the first time meanwhile")
    found.add_argument("--matrix", type=int, default=4096, help="rows of the matrices")
    found.add_argument("--seconds", type=float, default=8.0)
    found.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    found.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--guard", action="store_true", help="interrupt transfers that are late")
    found.add_argument("--plan", metavar="FILE")
    found.add_argument("--mps", action="store_true", help="start MPS, and stop it at the end")
    return found


def main() -> int:
    from harness.mps import mps

    given, has_stood = parser().parse_args(), False
    lines = Path(given.plan).read_text().splitlines() if given.plan else [shlex.join(sys.argv[1:])]
    with mps(given.mps):
        for line in lines:
            one, before = parser().parse_args(shlex.split(line)), dict(os.environ)
            os.environ.update(change.split("=", 1) for change in one.env)
            found = one_run(one)
            if "failed" in found:
                time.sleep(AGAIN_S)
                found = one_run(one)
            os.environ.clear()
            os.environ.update(before)
            told = found.pop("told", [])
            print(line, json.dumps(found), flush=True)
            for me, tells in enumerate(told):
                print(f"    worker {me}: {json.dumps(tells)}", flush=True)
            has_stood |= bool(told) or "failed" in found
    return 1 if has_stood else 0


if __name__ == "__main__":
    sys.exit(main())
