"""Flight Recorder dumps of real gloo jobs that failed, and what `everstep diagnose` makes of them.

    python bench/postmortem.py                      every scenario, at 2 to 8 ranks: a table and a summary
    python bench/postmortem.py --only kill          scenarios whose name contains a word
    python bench/postmortem.py --ranks 2 5          other world sizes
    python bench/postmortem.py --keep FOLDER        leave the dumps there, with truth.json beside them
    python bench/postmortem.py --read FOLDER        judge dumps that were kept
    python bench/postmortem.py --read FOLDER --fixture FILE    write some of them as tests read them
    python bench/postmortem.py --json               one JSON document

The jobs are plain PyTorch and write nothing but their Flight Recorder: no error file, no ring, no pull. Each
rank writes its dump when its loop ends or raises, as a training script with a `try` around it does. So the
dumps are mostly *post-mortem*: gloo marks an operation as retired when it failed, as if it were completed.
A scenario is a job and a fault; a few are healthy, and a few are dumped while they hang.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

STEPS, STRIKE = 8, 5
TIMEOUT_S, SLEEP_S = 3.0, 4.5
WORK_S = 0.01

# fault -> is its dump written, who is to blame ("one": the struck rank, "two": it and another, "none")
FAULTS = {
    "raise": "an exception between two operations",
    "raise, no dump": "the same, and its dump is lost",
    "exit": "it leaves the loop early, without an error",
    "kill": "SIGKILL between two operations",
    "kill later": "SIGKILL from outside, at any moment",
    "sleep": "it comes after the timeout of the others",
    "stop": "SIGSTOP; killed when the others are gone",
    "skip": "it leaves one operation out",
    "kind": "it calls a broadcast where the others all-reduce",
    "large": "it brings a larger tensor than the others",
    "small": "it brings a smaller tensor than the others",
    "first": "it raises before its first operation",
    "two raise": "two ranks raise in one step",
    "live": "it hangs, and all are dumped meanwhile",
    "healthy": "nothing happens",
    "late end": "one rank is late for the last operation, within the timeout",
    "lost file": "nothing happens, and one dump is lost",
}
HARMLESS = ("healthy", "late end", "lost file", "slow, harmless")
JOBS = ("world", "ddp", "groups", "pipeline", "replicas", "roots", "ahead")
FITS: dict[str, tuple[str, ...]] = {  # what makes no sense in other jobs
    "skip": ("world", "roots", "groups", "ddp"),
    "kind": ("world", "groups"),
    "large": ("world", "groups"),
    "small": ("world", "groups"),
    "sleep": ("world", "ddp", "groups", "roots"),
    "late end": ("world", "ddp", "groups"),
}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    job: str
    fault: str
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.job}, {self.fault}, {self.ranks} ranks"

    @property
    def struck(self) -> tuple[int, ...]:
        one = zlib.crc32(self.name.encode()) % self.ranks
        return (one, (one + 1) % self.ranks) if self.fault == "two raise" else (one,)

    @property
    def truth(self) -> tuple[int, ...]:
        return () if self.fault in HARMLESS else tuple(sorted(self.struck))


def scenarios(sizes: list[int]) -> list[Scenario]:
    found = []
    for job in JOBS:
        for fault in FAULTS:
            for ranks in sizes:
                fits = job in FITS.get(fault, JOBS)
                fits &= not (job == "replicas" and (ranks < 4 or ranks % 2))
                fits &= not (fault == "two raise" and ranks < 4)
                if fits:
                    found.append(Scenario(job=job, fault=fault, ranks=ranks))
    return found


# ------------------------------------------------------------------ the jobs: plain PyTorch


class Run:
    """One rank of one scenario: what it communicates with, and when it is struck."""

    def __init__(self, scenario: Scenario, rank: int, folder: Path) -> None:
        import torch

        self.scenario, self.rank, self.folder = scenario, rank, folder
        self.size = scenario.ranks
        self.tensor = torch.ones(1000)
        self.step = 0

    def is_struck(self, fault: str) -> bool:
        scenario = self.scenario
        struck = scenario.fault == fault and self.rank in scenario.struck and self.step == STRIKE
        if struck:
            (self.folder / f"struck_{self.rank}").touch()
        return struck

    def reduce(self, group: Any = None, *, size: int = 1000) -> None:
        """An all-reduce, or what the fault makes of it."""
        import torch
        import torch.distributed as dist

        if self.is_struck("skip"):
            self.step = -self.step  # one only
            return
        if self.is_struck("kind"):
            dist.broadcast(self.tensor, src=self.rank, group=group)
        size = 30_000 if self.is_struck("large") else 7 if self.is_struck("small") else size
        dist.all_reduce(torch.ones(size), group=group)

    def strike(self) -> None:
        if self.scenario.fault == "late end" and self.rank in self.scenario.struck and self.step == STEPS - 1:
            time.sleep(TIMEOUT_S * 0.6)
        if self.is_struck("sleep") or self.is_struck("live"):
            time.sleep(SLEEP_S)
        if self.is_struck("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.is_struck("stop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if any(self.is_struck(fault) for fault in ("raise", "raise, no dump", "two raise")):
            raise RuntimeError("planted")
        if self.scenario.fault == "first" and self.rank in self.scenario.struck:
            (self.folder / f"struck_{self.rank}").touch()
            raise RuntimeError("planted")


def world(run: Run) -> None:
    import torch
    import torch.distributed as dist

    gathered = torch.empty(1000 * run.size)
    for run.step in range(STEPS):
        time.sleep(WORK_S)
        run.strike()
        if run.is_struck("exit"):
            return
        run.reduce()
        dist.all_gather_into_tensor(gathered, run.tensor)
        dist.barrier()


def ddp(run: Run) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    if run.scenario.fault == "first":
        run.strike()
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.02)
    for run.step in range(STEPS):
        time.sleep(WORK_S)
        run.strike()
        if run.is_struck("exit"):
            return
        with model.no_sync() if run.is_struck("skip") else contextlib.nullcontext():
            loss = model(torch.randn(4, 64)).square().mean()
            loss.backward()
        run.step = abs(run.step)
        run.reduce(size=1) if run.scenario.fault != "skip" else None


def groups(run: Run) -> None:
    """Tensor-parallel pairs, data-parallel groups across them, and the world."""
    import torch.distributed as dist

    pairs = [list(range(at, min(at + 2, run.size))) for at in range(0, run.size, 2)]
    across = [list(range(at, run.size, 2)) for at in range(2)]
    mine: list[Any] = []
    for ranks in (*pairs, *across):
        group = dist.new_group(ranks, timeout=timedelta(seconds=TIMEOUT_S))
        if run.rank in ranks and len(ranks) > 1:
            mine.append(group)
    for run.step in range(STEPS):
        time.sleep(WORK_S)
        run.strike()
        if run.is_struck("exit"):
            return
        for group in mine:
            run.reduce(group)
        dist.all_reduce(run.tensor)


def pipeline(run: Run) -> None:
    """A chain of messages forward and back, which gloo's recorder only counts, then the world."""
    _pipeline(run, stages=run.size)


def replicas(run: Run) -> None:
    _pipeline(run, stages=run.size // 2)


def _pipeline(run: Run, stages: int) -> None:
    import torch.distributed as dist

    stage, copies = run.rank % stages, run.size // stages
    peers = [
        dist.new_group([s + stages * c for c in range(copies)], timeout=timedelta(seconds=TIMEOUT_S))
        for s in range(stages)
    ]
    for run.step in range(STEPS):
        run.strike()
        if run.is_struck("exit"):
            return
        for came, goes in ((-1, 1), (1, -1)):
            for _ in range(2):
                if 0 <= stage + came < stages:
                    dist.recv(run.tensor, run.rank + came)
                time.sleep(WORK_S / 4)
                if 0 <= stage + goes < stages:
                    dist.send(run.tensor, run.rank + goes)
        if copies > 1:
            dist.all_reduce(run.tensor, group=peers[stage])
        dist.all_reduce(run.tensor)


def roots(run: Run) -> None:
    """Operations with a root, which some members complete without the others."""
    import torch
    import torch.distributed as dist

    many = [torch.empty(1000) for _ in range(run.size)] if run.rank == 0 else None
    for run.step in range(STEPS):
        time.sleep(WORK_S)
        run.strike()
        if run.is_struck("exit"):
            return
        dist.broadcast(run.tensor, src=0)
        if not run.is_struck("skip"):
            dist.reduce(run.tensor, 0)
        dist.gather(run.tensor, many, dst=0)
        dist.scatter(run.tensor, many, src=0)
        dist.all_to_all_single(torch.empty(run.size * 2), torch.ones(run.size * 2))


def ahead(run: Run) -> None:
    """Operations issued ahead of the waits for them."""
    import torch
    import torch.distributed as dist

    for run.step in range(STEPS):
        works = [dist.all_reduce(torch.ones(100 + at), async_op=True) for at in range(2)]
        time.sleep(WORK_S)
        run.strike()
        if run.is_struck("exit"):
            return
        works += [dist.all_reduce(torch.ones(200 + at), async_op=True) for at in range(2)]
        for work in works:
            work.wait()


RUNS: dict[str, Callable[[Run], None]] = {
    "world": world,
    "ddp": ddp,
    "groups": groups,
    "pipeline": pipeline,
    "replicas": replicas,
    "roots": roots,
    "ahead": ahead,
}


def run_rank(scenario: Scenario, rank: int, folder: Path, port: int) -> None:
    import torch
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=scenario.ranks,
        timeout=timedelta(seconds=TIMEOUT_S if scenario.fault != "live" else 60),
    )
    run = Run(scenario, rank, folder)

    def dump() -> None:
        (folder / f"fr_rank_{rank}").write_bytes(c10d._dump_fr_trace(True, False, False))

    if scenario.fault == "live":
        look = threading.Timer(SLEEP_S * 0.8, dump)
        look.daemon = True
        run.step = STRIKE
        look_from = run.strike

        def strike() -> None:
            if run.step == STRIKE:
                look.start()
            look_from()

        run.strike = strike  # type: ignore[method-assign]
    (folder / f"began_{rank}").touch()
    with contextlib.suppress(Exception, SystemExit):
        RUNS[scenario.job](run)
    if scenario.fault == "live":
        look.join()
    elif not (scenario.fault == "raise, no dump" and rank in scenario.struck):
        dump()
    if scenario.fault in (*HARMLESS, "live"):
        time.sleep(0.3)  # the others are not done with their last operation
    os._exit(0)


def run_scenario(scenario: Scenario, folder: Path, port: int) -> bool:
    """False where the fault did not come about: on a busy machine ranks time out before it."""
    children: dict[int, int] = {}
    for rank in range(scenario.ranks):
        pid = os.fork()
        if pid == 0:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 2)
            try:
                run_rank(scenario, rank, folder, port)
            finally:
                os._exit(3)
        children[rank] = pid
    if scenario.fault == "kill later":
        while len(list(folder.glob("began_*"))) < scenario.ranks:
            time.sleep(0.005)
        time.sleep(0.06 + 0.007 * scenario.ranks)
        os.kill(children[scenario.struck[0]], signal.SIGKILL)
        (folder / f"struck_{scenario.struck[0]}").touch()
    stopped = set(scenario.struck) if scenario.fault == "stop" else set()
    for rank, pid in children.items():
        if rank not in stopped:
            os.waitpid(pid, 0)
    for rank in stopped:
        os.kill(children[rank], signal.SIGKILL)
        os.waitpid(children[rank], 0)
    if scenario.fault == "lost file":
        (folder / f"fr_rank_{scenario.struck[0]}").unlink()
    struck = len(list(folder.glob("struck_*"))) >= len(scenario.truth)
    for junk in (*folder.glob("began_*"), *folder.glob("struck_*")):
        junk.unlink()
    return struck


# ------------------------------------------------------------------ the verdict on each


def judge(scenario: Scenario, folder: Path) -> dict[str, Any]:
    from rich.console import Console

    from everstep.cli.diagnose import _analyse
    from everstep.errors import UserError

    try:
        said = _analyse(folder, Console(stderr=True, quiet=True)).diagnosis
        accused = {s.rank: s.confidence for finding in said.incidents for s in finding.suspects}
        why = "; ".join(finding.because for finding in said.incidents)
    except UserError as error:
        accused, why = {}, str(error)
    wrong = {rank: c for rank, c in accused.items() if rank not in scenario.truth}
    return {
        "job": scenario.job,
        "fault": scenario.fault,
        "ranks": scenario.ranks,
        "truth": list(scenario.truth),
        "accused": {str(rank): round(c, 2) for rank, c in sorted(accused.items())},
        "exact": set(accused) == set(scenario.truth),
        "first": bool(accused) and max(accused, key=lambda r: accused[r]) in scenario.truth,
        "surest_wrong": round(max(wrong.values(), default=0.0), 2),
        "because": why,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    faults = [row for row in rows if row["truth"]]
    innocent = [row for row in rows if not row["truth"]]
    named = sum(len(row["accused"]) for row in rows)
    right = sum(len(set(map(str, row["truth"])) & set(row["accused"])) for row in rows)
    return {
        "scenarios": len({(row["job"], row["fault"]) for row in rows}),
        "runs": len(rows),
        "with a fault": len(faults),
        "exactly the culprits": sum(row["exact"] for row in faults),
        "surest suspect is a culprit": sum(row["first"] for row in faults),
        "said nothing": sum(not row["accused"] for row in faults),
        "precision": round(right / max(named, 1), 4),
        "recall": round(right / max(sum(len(row["truth"]) for row in rows), 1), 4),
        "innocent named at 0.8 or more": sum(row["surest_wrong"] >= 0.8 for row in rows),
        "healthy runs": len(innocent),
        "accused in healthy runs": sum(bool(row["accused"]) for row in innocent),
        "at 0.5 or more": sum(row["surest_wrong"] >= 0.5 for row in innocent),
    }


KEPT_COLUMNS = (
    "record_id", "pg_id", "process_group", "collective_seq_id", "p2p_seq_id", "op_id", "profiling_name",
    "time_created_ns", "input_sizes", "input_dtypes", "output_sizes", "state", "retired", "timeout_ms",
)  # fmt: skip
KEPT_ENTRIES = 18  # the last ones of a rank


def as_fixture(scenario: Scenario, folder: Path) -> dict[str, Any]:
    """A scenario's dumps without what the reader does not look at."""
    dumps = {}
    for file in sorted(folder.glob("fr_rank_*")):
        whole = pickle.loads(file.read_bytes())
        rows = [[entry[name] for name in KEPT_COLUMNS] for entry in whole.get("entries", [])[-KEPT_ENTRIES:]]
        rest = {name: whole[name] for name in ("pg_config", "pg_status")}
        rank = file.name.rsplit("_", 1)[-1]
        dumps[rank] = {"written_ns": file.stat().st_mtime_ns, "rest": rest, "entries": rows}
    return {"name": scenario.name, "truth": list(scenario.truth), "columns": KEPT_COLUMNS, "dumps": dumps}


def is_kept(scenario: Scenario, number: int) -> bool:
    """One size of each scenario, the small sizes in turn; of jobs other than `world` every third fault."""
    sizes = [4, 8][number % 2 :][:1] if scenario.job == "replicas" else [2 + number % 4, 4]
    if (scenario.job, scenario.fault) == ("pipeline", "two raise"):
        return False  # messages leave no trace: only one of the two can be told
    of = list(FAULTS).index(scenario.fault)
    return scenario.ranks == sizes[0] and (scenario.job == "world" or of % 3 == JOBS.index(scenario.job) % 3)


def folder_of(root: Path, scenario: Scenario) -> Path:
    return root / scenario.name.replace(", ", "_").replace(" ", "-")


def warm_up() -> None:
    """What every rank imports, once: ranks are forked."""
    import torch
    import torch._dynamo
    import torch.distributed
    import torch.nn.parallel

    import everstep.cli.diagnose

    torch.set_num_threads(1)
    assert everstep.cli.diagnose


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="words that a scenario's name contains")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 3, 4, 5, 6, 8])
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--read", type=Path)
    parser.add_argument("--fixture", type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    chosen = [s for s in scenarios(given.ranks) if given.only in s.name]
    rows = []
    if given.read is None:
        warm_up()
    for number, scenario in enumerate(chosen):
        with tempfile.TemporaryDirectory() as scratch:
            kept = given.read or given.keep
            folder = folder_of(kept, scenario) if kept is not None else Path(scratch)
            if given.read is None:
                folder.mkdir(parents=True, exist_ok=True)
                if not run_scenario(scenario, folder, 20000 + (os.getpid() * 7 + number * 3) % 30000):
                    shutil.rmtree(folder)
                    folder.mkdir()
                    continue
            elif not any(folder.glob("fr_rank_*")):
                continue
            rows.append(judge(scenario, folder))
        row = rows[-1]
        mark = "ok " if row["exact"] else "bad"
        print(f"{mark} {scenario.name:34} truth {row['truth']!s:8} accused {row['accused']}", file=sys.stderr)
    if given.fixture is not None:
        kept = [
            as_fixture(s, folder_of(given.read, s))
            for number, (job, fault) in enumerate((job, fault) for job in JOBS for fault in FAULTS)
            for s in chosen
            if (s.job, s.fault) == (job, fault) and is_kept(s, number) and folder_of(given.read, s).is_dir()
        ]
        given.fixture.write_text("".join(json.dumps(one, separators=(",", ":")) + "\n" for one in kept))
    if given.json:
        print(json.dumps({"summary": summary(rows), "rows": rows}))
        return
    for name, value in summary(rows).items():
        print(f"{name:32} {value}")


if __name__ == "__main__":
    main()
