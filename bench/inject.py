"""Faults put into real gloo jobs, and what `everstep diagnose` makes of the records they leave.

    python bench/inject.py                      every case: a table, then precision and recall
    python bench/inject.py --only sigstop       cases whose name contains a word
    python bench/inject.py --json               one JSON document
    python bench/inject.py --keep FOLDER        leave the records there

The jobs are plain PyTorch: DDP, or a pipeline of sends and receives whose stages all-reduce their
gradients. They know nothing of Everstep but two lines: a worker server, so that their Flight Recorder can
be read while they hang, and `watch_messages`, since gloo's Flight Recorder leaves messages out. Computing
is sleeping, so that eight ranks on two cores do not measure the scheduler. A job that hangs is read from
outside and then killed; one that ends writes its records itself; one that raises writes them as it goes
down.

Slow links are real: each rank in its own network namespace, a token bucket on one path (needs root).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEPS = 30
STRIKE = 12  # the step a fault strikes in
WORK_S = 0.05
FOLDER = Path()  # of this rank's job, set in its process
Suspect = tuple[int, ...]  # a rank, or the two ends of a link


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    job: str  # ddp or pipeline
    ranks: int = 4
    fault: str = ""
    at: tuple[int, ...] = ()
    stages: int = 4
    from_step: int = 0
    factor: float = 1.0
    hang: bool = False
    network: bool = False
    snapshot: bool = False  # read it while it runs well
    seed: int = 0
    where: str = ""
    truth: frozenset[Suspect] = field(default_factory=frozenset)


def cases() -> list[Case]:
    found: list[Case] = []

    def add(name: str, job: str, fault: str, at: tuple[int, ...], where: str, **more: Any) -> None:
        truth = frozenset({at}) if where == "link" else frozenset((rank,) for rank in at)
        found.append(Case(name=name, job=job, fault=fault, at=at, where=where, truth=truth, **more))

    for job, ranks, victims in (
        ("ddp", 4, (1, 3)),
        ("ddp", 8, (5,)),
        ("pipeline", 4, (2,)),
        ("pipeline", 8, (1, 6)),
    ):
        for victim in victims:
            tag = f"{job}{ranks} rank {victim}"
            for fault in ("sigstop", "gil", "sleep"):
                add(f"{fault} {tag}", job, fault, (victim,), "host", ranks=ranks, hang=True)
    add("sleep ddp8 ranks 2,6", "ddp", "sleep", (2, 6), "host", ranks=8, hang=True)
    add("sigstop ddp8 ranks 0,7", "ddp", "sigstop", (0, 7), "host", ranks=8, hang=True)
    for ranks, victim in ((4, 2), (8, 5)):
        add(
            f"mismatch kind ddp{ranks} rank {victim}",
            "ddp",
            "mismatch kind",
            (victim,),
            "program",
            ranks=ranks,
            hang=True,
        )
        add(f"skip ddp{ranks} rank {victim}", "ddp", "skip", (victim,), "host", ranks=ranks, hang=True)
    # gloo aborts a process that is sent more than it asked for: all that is left to see is that it is gone
    add("mismatch size ddp4 rank 2", "ddp", "mismatch size", (2,), "host", hang=True)
    for job, ranks, victim in (("ddp", 4, 0), ("pipeline", 8, 4)):
        add(f"sigkill {job}{ranks} rank {victim}", job, "sigkill", (victim,), "host", ranks=ranks)
    for job, ranks, victim in (("ddp", 4, 2), ("ddp", 8, 6), ("pipeline", 4, 1), ("pipeline", 8, 7)):
        add(f"raise {job}{ranks} rank {victim}", job, "raise", (victim,), "host", ranks=ranks)
        add(
            f"slow {job}{ranks} rank {victim}",
            job,
            "slow",
            (victim,),
            "worker",
            ranks=ranks,
            factor=1.8,
            from_step=10,
        )
    for ranks, victim, factor in ((4, 0, 1.5), (8, 3, 2.5)):
        add(
            f"slow from the start ddp{ranks} rank {victim}",
            "ddp",
            "slow",
            (victim,),
            "worker",
            ranks=ranks,
            factor=factor,
        )
    add("slow from the start pipeline8 rank 2", "pipeline", "slow", (2,), "worker", ranks=8, factor=2.0)
    for ranks, ends in ((4, (1, 2)), (8, (5, 6)), (4, (0, 1))):
        add(
            f"slow link pipeline{ranks} {ends[0]}-{ends[1]}",
            "pipeline",
            "slow link",
            ends,
            "link",
            ranks=ranks,
            network=True,
        )
    for ranks, victim in ((4, 2), (8, 1)):
        name = f"slow receiver pipeline{ranks} rank {victim}"
        add(name, "pipeline", "slow receiver", (victim,), "receiving side", ranks=ranks, network=True)
    return found + _innocent()


def _innocent() -> list[Case]:
    found = []
    for seed in range(3):
        for job, ranks in (("ddp", 4), ("ddp", 8), ("pipeline", 8)):
            found.append(Case(name=f"healthy {job}{ranks} #{seed}", job=job, ranks=ranks, seed=seed))
    for job, ranks in (("ddp", 4), ("ddp", 8), ("pipeline", 4), ("pipeline", 8)):
        found.append(Case(name=f"snapshot of healthy {job}{ranks}", job=job, ranks=ranks, snapshot=True))
        found.append(Case(name=f"first steps {job}{ranks}", job=job, ranks=ranks, fault="first steps"))
        found.append(Case(name=f"pauses {job}{ranks}", job=job, ranks=ranks, fault="pauses", seed=7))
    for seed, ranks in ((1, 4), (2, 8)):
        found.append(
            Case(name=f"sequence lengths ddp{ranks}", job="ddp", ranks=ranks, fault="lengths", seed=seed)
        )
        found.append(
            Case(name=f"data loading ddp{ranks}", job="ddp", ranks=ranks, fault="loading", seed=seed)
        )
    for ranks in (4, 8):
        found.append(
            Case(
                name=f"long last stage pipeline{ranks}",
                job="pipeline",
                ranks=ranks,
                fault="stage",
                factor=2.0,
            )
        )
    found.append(Case(name="network pipeline4", job="pipeline", ranks=4, network=True))
    return found


# ------------------------------------------------------------------ the jobs: plain PyTorch


def work(case: Case, rank: int, step: int, share: float = 1.0) -> None:
    """Compute, as long as this rank does in this step."""
    length = WORK_S * share
    draw = random.Random(f"{case.seed} {rank} {step}")
    match case.fault:
        case "slow" if rank in case.at and step >= case.from_step:
            length *= case.factor
        case "stage" if rank % case.stages == case.stages - 1:
            length *= case.factor
        case "lengths":
            length *= draw.lognormvariate(0, 0.5)
        case "first steps" if step < 3:
            length *= 5 if rank == 1 else 2
        case "pauses" if draw.random() < 0.03:
            length += 0.1
        case "loading" if step % 10 == 9:
            length += 0.08
    time.sleep(length)


def strike(case: Case, rank: int, step: int) -> None:
    if step != STRIKE or rank not in case.at or case.network or case.fault == "slow":
        return
    (FOLDER / f"struck_{rank}").touch()
    match case.fault:
        case "sigstop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "gil":
            ctypes.PyDLL(None).sleep(60)  # a foreign function that does not let go of the interpreter
        case "sleep":
            time.sleep(60)
        case "raise":
            raise RuntimeError("planted")


def ddp_job(case: Case, rank: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        work(case, rank, step)
        (FOLDER / f"step_{rank}").touch()
        strike(case, rank, step)
        strike_now = step == STRIKE and rank in case.at
        if case.fault.startswith("mismatch") and strike_now:
            wrong = torch.ones(7)
            dist.broadcast(wrong, src=rank) if case.fault.endswith("kind") else dist.all_reduce(wrong)
        optimizer.zero_grad()
        with model.no_sync() if case.fault == "skip" and strike_now else contextlib.nullcontext():
            model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()


def pipeline_job(case: Case, rank: int) -> None:
    import torch
    import torch.distributed as dist

    stages, replicas = case.stages, case.ranks // case.stages
    stage = rank % stages
    groups = [dist.new_group([s + stages * r for r in range(replicas)]) for s in range(stages)]
    activation, gradient = torch.ones(64, 256), torch.ones(5000)
    last, microbatches = stages - 1, 3
    for step in range(STEPS):
        (FOLDER / f"step_{rank}").touch()
        strike(case, rank, step)
        for _ in range(microbatches):
            if stage > 0:
                dist.recv(activation, rank - 1)
            work(case, rank, step, 1 / microbatches / 2)
            if stage < last:
                dist.send(activation, rank + 1)
        for _ in range(microbatches):
            if stage < last:
                dist.recv(activation, rank + 1)
            work(case, rank, step, 1 / microbatches)
            if stage > 0:
                dist.send(activation, rank - 1)
        if replicas > 1:
            dist.all_reduce(gradient, group=groups[stage])
        dist.all_reduce(gradient[:1])


def run_rank(case: Case, rank: int, folder: Path, address: str) -> None:
    """One rank, in a forked child; it never returns."""
    import torch
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d
    from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

    from everstep.engine.telemetry.recorder import Recorder, watch_messages

    globals()["FOLDER"] = folder
    torch.set_num_threads(1)
    if case.network:
        enter_namespace(rank)
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"error_rank_{rank}.json")
    server = c10d._WorkerServer(str(folder / f"socket_{rank}"), -1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=case.ranks)
    watch_messages(Recorder(folder / f"ring_rank_{rank}", rank=rank, world_size=case.ranks))
    code = 0
    try:
        (ddp_job if case.job == "ddp" else pipeline_job)(case, rank)
    except Exception as error:
        code = 1
        ErrorHandler().record_exception(error)  # as torchrun's @record does
    (folder / f"fr_rank_{rank}").write_bytes(c10d._dump_fr_trace(True, False, False))
    (folder / f"done_{rank}").touch()
    if not code:
        time.sleep(0.1)  # let the slower ones write before their peers' sockets close
    del server
    os._exit(code)


# ------------------------------------------------------------------ networks


def enter_namespace(rank: int) -> None:
    with open(f"/run/netns/inj{rank}") as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), 0x40000000) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = "e0"


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


def tc(space: str, *words: str) -> None:
    subprocess.run(["ip", "netns", "exec", space, "tc", *words], check=True, capture_output=True)


@contextlib.contextmanager
def network(case: Case) -> Any:
    """A router, a veth to each rank, and one path narrowed by a token bucket."""
    if not case.network:
        yield "127.0.0.1"
        return
    spaces = ["injr", *(f"inj{rank}" for rank in range(case.ranks))]
    for space in spaces:
        ip("netns", "del", space, check=False)
        ip("netns", "add", space)
        ip("-n", space, "link", "set", "lo", "up")
    subprocess.run(["ip", "netns", "exec", "injr", "sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)
    try:
        for rank in range(case.ranks):
            space = f"inj{rank}"
            ip("-n", space, "link", "add", "e0", "type", "veth", "peer", "name", f"p{rank}", "netns", "injr")
            ip("-n", space, "addr", "add", f"10.9.{rank}.2/24", "dev", "e0")
            ip("-n", "injr", "addr", "add", f"10.9.{rank}.1/24", "dev", f"p{rank}")
            ip("-n", space, "link", "set", "e0", "up")
            ip("-n", "injr", "link", "set", f"p{rank}", "up")
            ip("-n", space, "route", "add", "default", "via", f"10.9.{rank}.1")
        narrow = ["root", "tbf", "rate", "24mbit", "burst", "16kb", "latency", "400ms"]
        if case.fault == "slow link":
            a, b = case.at
            ip("-n", f"inj{a}", "link", "add", "d0", "type", "veth", "peer", "name", "d1", "netns", f"inj{b}")
            for space, device, mine, other in ((f"inj{a}", "d0", a, b), (f"inj{b}", "d1", b, a)):
                ip("-n", space, "addr", "add", f"10.8.0.{mine + 1}/24", "dev", device)
                ip("-n", space, "link", "set", device, "up")
                ip(
                    "-n",
                    space,
                    "route",
                    "add",
                    f"10.9.{other}.2",
                    "via",
                    f"10.8.0.{other + 1}",
                    "src",
                    f"10.9.{mine}.2",
                )
                tc(space, "qdisc", "add", "dev", device, *narrow)
        elif case.fault == "slow receiver":
            tc("injr", "qdisc", "add", "dev", f"p{case.at[0]}", *narrow)
        yield "10.9.0.2"
    finally:
        for space in spaces:
            ip("netns", "del", space, check=False)


# ------------------------------------------------------------------ one case


def run_case(case: Case, folder: Path, port: int) -> None:
    from everstep.node import pulled_records

    children: dict[int, int] = {}
    with network(case) as host:
        for rank in range(case.ranks):
            pid = os.fork()
            if pid == 0:
                quiet = os.open(os.devnull, os.O_WRONLY)
                os.dup2(quiet, 2)
                os.setpgid(0, 0)
                try:
                    run_rank(case, rank, folder, f"{host}:{port}")
                finally:
                    os._exit(3)
            children[rank] = pid
        try:
            addresses = {rank: str(folder / f"socket_{rank}") for rank in range(case.ranks)}
            if case.hang:
                wait_until_stuck(folder, case)
                pulled_records.save(
                    pulled_records.pull(addresses, timeout_s=0.8), folder, world_size=case.ranks
                )
            elif case.snapshot:
                time.sleep(1.2)
                pulled_records.save(
                    pulled_records.pull(addresses, timeout_s=0.8), folder, world_size=case.ranks
                )
            else:
                wait_for_end(folder, children)
        finally:
            for pid in children.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in children.values():
                os.waitpid(pid, 0)
    for junk in (file for kind in ("socket", "done", "struck", "step") for file in folder.glob(f"{kind}_*")):
        junk.unlink()


def wait_for_end(folder: Path, children: dict[int, int]) -> None:
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline and len(list(folder.glob("done_*"))) < len(children):
        if all(_is_gone(pid) for pid in children.values()):
            return
        time.sleep(0.05)


def _is_gone(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def wait_until_stuck(folder: Path, case: Case) -> None:
    """Until the fault has struck, and then until no rank has begun a step for seven times as long as any
    step before: a busy machine makes steps of seconds, and some faults show only at the job's end."""
    deadline, moved, longest = time.monotonic() + 60, time.monotonic(), 0.0
    seen: dict[str, int] = {}
    begun: dict[str, float] = {}
    while time.monotonic() < deadline:
        now = time.monotonic()
        for file in folder.glob("step_*"):
            if seen.get(file.name) != (stamp := file.stat().st_mtime_ns):
                longest = max(longest, now - begun.get(file.name, now))
                seen[file.name], begun[file.name], moved = stamp, now, now
        struck = len(list(folder.glob("struck_*"))) >= len(case.at)
        if struck and now - moved > max(2.0, 7 * longest):
            return
        time.sleep(0.02)


def judge(case: Case, folder: Path) -> dict[str, Any]:
    from rich.console import Console

    from everstep.cli.diagnose import _analyse

    analysis = _analyse(folder, Console(stderr=True, quiet=True))
    said = analysis.diagnosis
    accused: set[Suspect] = set()
    places = set()
    for finding in said.incidents:
        for suspect in finding.suspects:
            both = suspect.peer is not None
            accused.add(tuple(sorted((suspect.rank, suspect.peer))) if both else (suspect.rank,))
            places.add(str(finding.where))
    return {
        "case": case.name,
        "truth": sorted(case.truth),
        "accused": sorted(accused),
        "where": sorted(places),
        "where_right": places == ({case.where} if case.truth else set()),
        "imbalances": [imbalance.kind for imbalance in said.imbalances],
        "syndromes": sorted({str(finding.syndrome) for finding in said.incidents}),
        "true_positives": len(accused & case.truth),
        "false_positives": len(accused - case.truth),
        "missed": len(case.truth - accused),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--which", default="", choices=("", "stuck", "slow", "innocent"))
    parser.add_argument("--part", default="", help="1/3: the first third of the cases")
    parser.add_argument("--lanes", type=int, default=1, help="jobs beside each other")
    given = parser.parse_args()
    warm_up()

    port = 21000 + os.getpid() % 20000
    chosen = [case for case in cases() if given.only in case.name]
    if given.which:
        chosen = [case for case in chosen if sort_of(case) == given.which]
    if given.part:
        which, of = map(int, given.part.split("/"))
        chosen = chosen[which - 1 :: of]
    return report(in_lanes(chosen, given, port), given.json)


def in_lanes(chosen: list[Case], given: argparse.Namespace, port: int) -> list[dict[str, Any]]:
    """Jobs mostly sleep, so several can run beside each other; those with a network of their own, after each
    other."""
    lanes: list[list[tuple[int, Case]]] = [[] for _ in range(given.lanes)]
    for numbered in sorted(enumerate(chosen), key=lambda each: not each[1].network):
        lane = lanes[0] if numbered[1].network else min(lanes, key=lambda lane: sum(c.ranks for _, c in lane))
        lane.append(numbered)
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for number, lane in enumerate(lanes):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    rows = [one_case(case, given, port + at) for at, case in lane]
                    (Path(folder) / str(number)).write_text(json.dumps(rows))
                    code = 0
                finally:
                    os._exit(code)
            pids.append(pid)
        if any(os.waitpid(pid, 0)[1] for pid in pids):
            raise SystemExit("a lane ended early; its last words are above")
        told = [
            row
            for number in range(len(lanes))
            for row in json.loads((Path(folder) / str(number)).read_text())
        ]
    order = {case.name: at for at, case in enumerate(chosen)}
    for row in told:
        row["truth"], row["accused"] = [[tuple(who) for who in row[key]] for key in ("truth", "accused")]
    return sorted(told, key=lambda row: order[row["case"]])


def one_case(case: Case, given: argparse.Namespace, port: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        began = time.monotonic()
        run_case(case, folder, port)
        took = time.monotonic() - began
        row = {**judge(case, folder), "seconds": round(took, 1)}
        if given.keep:
            shutil.copytree(folder, given.keep / case.name.replace(" ", "_"), dirs_exist_ok=True)
    mark = "ok " if not row["false_positives"] and not row["missed"] and row["where_right"] else "BAD"
    print(
        f"{mark} {case.name:42} truth {row['truth']!s:16} accused {row['accused']!s:16} "
        f"{row['where']} {row['imbalances']} {took:.1f} s",
        file=sys.stderr,
        flush=True,
    )
    return row


def sort_of(case: Case) -> str:
    """`slow` and `innocent` are about milliseconds: run them on a quiet machine."""
    if not case.truth:
        return "innocent"
    return "slow" if case.fault.startswith("slow") else "stuck"


def warm_up() -> None:
    """What every rank would import, once: they are forked. No thread may be running then."""
    import torch
    import torch.distributed
    import torch.nn.parallel

    import everstep.cli.diagnose
    import everstep.diagnose
    import everstep.engine.telemetry.recorder
    import everstep.node.pulled_records  # noqa: F401

    torch.set_num_threads(1)
    layer = torch.nn.Linear(4, 4)
    layer(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()


def report(rows: list[dict[str, Any]], as_json: bool) -> int:
    """The exit code is 1 if anyone was accused wrongly, or a culprit was not."""
    faults = [row for row in rows if row["truth"]]
    right = sum(row["true_positives"] for row in rows)
    wrong = sum(row["false_positives"] for row in rows)
    missed = sum(row["missed"] for row in rows)
    innocent = [row for row in rows if not row["truth"]]
    summary = {
        "injections": len(faults),
        "innocent_runs": len(innocent),
        "accused_in_innocent_runs": sum(len(row["accused"]) for row in innocent),
        "precision": round(right / max(right + wrong, 1), 4),
        "recall": round(right / max(right + missed, 1), 4),
        "place_right": sum(row["where_right"] for row in faults),
    }
    if as_json:
        print(json.dumps({"summary": summary, "rows": rows}))
    else:
        for name, value in summary.items():
            print(f"{name:28} {value}")
    return 1 if wrong or missed else 0


if __name__ == "__main__":
    sys.exit(main())
