"""What diagnosis costs, and how it grows. Each figure is made by a command:

    python bench/diagnose.py recorder      nanoseconds a record; shares of a step and of a core
    python bench/diagnose.py scale         4,096 ranks of 2,000 records: seconds and memory, and how they grow
    python bench/diagnose.py read          what reading costs: dumps a second
    python bench/diagnose.py               all three; --json for one document
    python bench/diagnose.py ab            one run, the recorder on for ten steps and off for ten, and so on
    python bench/diagnose.py agent         a real agent with four workers: its share of a core
    python bench/diagnose.py stock         beside torchfrtrace: two NCCL cases, and gloo jobs hung on purpose

`scale` makes a job of tensor-parallel groups of 8, data-parallel groups across them and one group of all,
lets one rank stop or turn slow, and checks that it and nobody else is named. Each size runs in a process of
its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import everstep
from everstep.diagnose import Case, Group, Log, read
from everstep.diagnose.finding import Diagnosis
from everstep.diagnose.record import UNKNOWN
from everstep.diagnose.stream import DiagnosisStream
from everstep.diagnose.verdict import Analysis, analyse_case

SIZES = (256, 512, 1024, 2048, 4096)
RECORDS = 2000
PER_STEP = (16, 3, 1)  # operations of a step: in the tensor group, the data group, the group of all


# ------------------------------------------------------------------ recorder


def recorder() -> dict[str, Any]:
    from everstep.engine.telemetry.recorder import COMPUTE, SEND, Recorder

    with tempfile.TemporaryDirectory() as folder:
        ring = Recorder(Path(folder) / "ring", rank=0, world_size=8)
        count, costs, pairs = 20_000, [], []
        for _ in range(15):
            began = time.thread_time_ns()
            for number in range(count):
                ring.happened(COMPUTE, 1, 2, seq=number)
            costs.append((time.thread_time_ns() - began) / count)
            began = time.thread_time_ns()
            for number in range(count):
                ring.end(ring.begin(SEND, peer=1, bytes=4096, seq=number))
            pairs.append((time.thread_time_ns() - began) / count)
        content = ring.content()
        began, stream = time.process_time(), DiagnosisStream()
        for _ in range(50):
            stream.feed(read("ring_rank_0", content))
        reading_us = (time.process_time() - began) / 50 * 1e6
    measured = {
        "record_ns": round(statistics.median(costs)),
        "begin_and_end_ns": round(statistics.median(pairs)),
        "read_a_ring_of_4096_us": round(reading_us),
    }
    measured |= stopwatch_ns()
    return measured | in_training(measured["record_ns"])


def stopwatch_ns() -> dict[str, Any]:
    """What timing an op costs its worker, and judging a telling costs the coordinator."""
    from everstep.diagnose.watch import Watch
    from everstep.engine.telemetry.stopwatch import Stopwatch
    from everstep.protocol.messages import TimesReported
    from everstep.protocol.ops import Kind, Worker

    watch, count = Stopwatch(), 20_000
    began = time.thread_time_ns()
    for _ in range(count):
        watch.op(Kind.F, watch.moment(), on_a_core=True)
    timing = (time.thread_time_ns() - began) / count
    judge, tellings = Watch("job"), 0
    began = time.thread_time_ns()
    for step in range(1, 60):
        for replica in range(64):
            ops = dict.fromkeys("FIW", (8, 0.08 + replica % 7 * 0.0001))
            worker = Worker(replica, replica % 4)
            judge.reported(
                TimesReported(
                    task="job", worker=worker, times={}, incarnation=1, step=step, ops=ops, seconds=1
                )
            )
            tellings += 1
    judging = (time.thread_time_ns() - began) / tellings
    return {"timing_an_op_ns": round(timing), "judging_a_telling_of_64_workers_us": round(judging / 1e3)}


def in_training(record_ns: float) -> dict[str, Any]:
    """Records a step and a step's time, off the rings of a real run."""
    job = """
        steps = 40
        replicas = 2
        stages = 2
        microbatches = 4
        [model]
        preset = "gpt-tiny"
        [data]
        kind = "synthetic"
        rows = 4
    """
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        (scratch / "job.toml").write_text(job)
        command = [sys.executable, "-m", "everstep.cli.main", "train", str(scratch / "job.toml"), "--json"]
        process = subprocess.Popen(
            command,
            env={**os.environ, "TMPDIR": folder},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        rings: dict[str, bytes] = {}
        while process.poll() is None:
            for file in scratch.rglob("*.ring"):
                try:
                    rings[file.name] = file.read_bytes()
                except OSError:
                    continue
            time.sleep(0.2)
    if not rings:
        return {"training": "left no rings"}
    shares, counts, steps_ms = [], [], []
    for name, content in rings.items():
        log = read(name, content).log
        computes = log.is_kind("compute")
        if not computes.any():
            continue
        steps = int(log.seq[computes].max() - log.seq[computes].min()) or 1
        seconds = float(log.enqueued_ns[computes].max() - log.enqueued_ns[computes].min()) / 1e9
        counts.append(len(log) / steps)
        steps_ms.append(seconds / steps * 1e3)
        shares.append(len(log) * record_ns / 1e9 / max(seconds, 1e-9))
    return {
        "workers": len(shares),
        "records_a_step": round(statistics.mean(counts), 1),
        "step_ms": round(statistics.mean(steps_ms), 2),
        "share_of_step": round(max(shares), 6),
    }


# ------------------------------------------------------------------ recorder on and off, in one run

_BLOCK = 10  # steps
_ALTERNATING = """
import everstep
from everstep.engine.datasets.data import Synthetic
from everstep.engine.layers.gpt import gpt
from everstep.engine.telemetry.recorder import WorkerRecorder
from everstep.node import worker

class Alternating(WorkerRecorder):
    on = True

    def op(self, step, *times):
        self.on = step // {block} % 2 == 0
        if self.on:
            super().op(step, *times)

    def sent(self, *what):
        if self.on:
            super().sent(*what)

    def got(self, *what):
        if self.on:
            super().got(*what)

worker.WorkerRecorder = Alternating
everstep.train(model=gpt("gpt-tiny"), data=Synthetic(vocab=256, sequence=64, rows=4), replicas=2, stages=2,
               steps={steps}, log="log", clip=None)
"""


def on_and_off(steps: int) -> dict[str, Any]:
    """Blocks of steps with and without records, compared with their neighbours of the same run."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "alternating.py"
        script.write_text(_ALTERNATING.format(block=_BLOCK, steps=steps))
        subprocess.run(
            [sys.executable, str(script)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(Path(everstep.__file__).parent.parent)},
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        lines = (Path(folder) / "log" / "steps.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    blocks: dict[int, list[float]] = {}
    for row in rows:
        if row["step"] % _BLOCK not in (0, 1):  # steps flow into each other: the first two are of both kinds
            blocks.setdefault(row["step"] // _BLOCK, []).append(row["seconds"])
    middle = {number: statistics.median(seconds) for number, seconds in blocks.items() if number > 1}
    ratios = [
        middle[n] / statistics.fmean((middle[n - 1], middle[n + 1]))
        for n in middle
        if n % 2 == 0 and n - 1 in middle and n + 1 in middle
    ]
    spread = statistics.stdev(ratios) / len(ratios) ** 0.5
    return {
        "steps": steps,
        "step_ms": round(statistics.median(middle.values()) * 1e3, 2),
        "blocks": len(ratios),
        "on_over_off": round(statistics.median(ratios), 5),
        "mean": round(statistics.fmean(ratios), 5),
        "standard_error": round(spread, 5),
    }


# ------------------------------------------------------------------ an agent at work


def agent(seconds: float) -> dict[str, Any]:
    """Core seconds of an agent's own process over those of the clock, while its four workers train."""
    import psutil
    from cluster import Cluster, small_job

    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        cluster.start_coordinator()
        cluster.start_agent("n1", slots=4)
        cluster.nodes_up(1)
        cluster.submit(small_job(Path(folder), steps=100_000))
        cluster.step_reached(20)
        processes = {
            "agent": psutil.Process(cluster.agents["n1"].pid),
            "coordinator": psutil.Process(cluster.coordinators["first"].pid),
        }
        step, began = cluster.task()["step"], time.monotonic()
        before = {name: sum(p.cpu_times()[:2]) for name, p in processes.items()}
        time.sleep(seconds)
        after = {name: sum(p.cpu_times()[:2]) for name, p in processes.items()}
        took, steps = time.monotonic() - began, cluster.task()["step"] - step
        cluster.client.post("/v1/tasks/job/cancel", {})
    shares = {f"{name}_share_of_a_core": round((after[name] - before[name]) / took, 4) for name in processes}
    return {"workers": 4, "steps_a_second": round(steps / took, 1), **shares}


# ------------------------------------------------------------------ beside PyTorch's own tool

_NCCL = Path(__file__).parent.parent.parent / "shared" / "data" / "flight_recorder"
_GLOO = (
    "sigstop ddp4 rank 1",
    "gil ddp8 rank 5",
    "sleep pipeline4 rank 2",
    "sleep pipeline8 rank 6",
    "mismatch kind ddp4 rank 2",
    "skip ddp4 rank 2",
    "sigkill ddp4 rank 0",
    "raise pipeline8 rank 7",
)


def stock() -> list[dict[str, Any]]:
    import frtrace
    import inject
    from rich.console import Console

    from everstep.cli.diagnose import _analyse

    def row(name: str, truth: list[int], folder: Path) -> dict[str, Any]:
        dumps = frtrace.of_folder(folder)
        said = _analyse(folder, Console(stderr=True, quiet=True)).diagnosis
        ours = sorted({s.rank for finding in said.incidents for s in finding.suspects})
        where = sorted({str(finding.where) for finding in said.incidents})
        made = {
            "case": name,
            "truth": truth,
            "ours": ours,
            "where": where,
            "torchfrtrace": str(frtrace.ask(dumps)),
            "repaired": str(frtrace.ask(dumps, repaired=True)) if name[0] != "N" else "",
        }
        print(_stock_line(made), file=sys.stderr, flush=True)
        return made

    rows = [row(f"NCCL {case.name}", [9, 14], case) for case in sorted(_NCCL.glob("*_*"))]
    inject.warm_up()
    for number, case in enumerate(case for case in inject.cases() if case.name in _GLOO):
        with tempfile.TemporaryDirectory() as folder:
            inject.run_case(case, Path(folder), 23000 + os.getpid() % 10000 + number)
            rows.append(row(f"gloo {case.name}", sorted(rank for (rank,) in case.truth), Path(folder)))
    return rows


def _stock_line(row: dict[str, Any]) -> str:
    return (
        f"{row['case']:32} truth {row['truth']!s:8} ours {row['ours']!s:8} {' '.join(row['where']):8} "
        f"torchfrtrace: {row['torchfrtrace']}" + (f"; repaired: {row['repaired']}" if row["repaired"] else "")
    )


# ------------------------------------------------------------------ scale


def job_of(ranks: int, records: int, *, culprit: int, fault: str) -> Case:
    """Columns of a job, made at once; a rank's row is its program, in order."""
    tensor, data, _ = PER_STEP
    per_step = sum(PER_STEP)
    steps = records // per_step
    kinds = np.concatenate([np.zeros(tensor, int), np.ones(data, int), [2]])
    rank = np.repeat(np.arange(ranks, dtype=np.int32), records)
    place = np.tile(np.arange(records, dtype=np.int64), ranks)
    which = kinds[place % per_step]
    step = place // per_step
    groups = [Group(name=f"tensor {g}", members=tuple(range(8 * g, 8 * g + 8))) for g in range(ranks // 8)]
    groups += [Group(name=f"data {i}", members=tuple(range(i, ranks, 8))) for i in range(8)]
    groups += [Group(name="all", members=tuple(range(ranks)))]
    group = np.where(which == 0, rank // 8, np.where(which == 1, ranks // 8 + rank % 8, len(groups) - 1))
    before = np.concatenate([np.arange(tensor), np.arange(data), [0]])
    seq = step * np.array(PER_STEP)[which] + before[place % per_step]
    draw = np.random.default_rng(1)
    gap = draw.normal(2e6, 4e4, size=(ranks, records))
    if fault == "slow":
        gap[culprit] *= 1.5
    # a step begins when its slowest rank of the step before has ended: the group of all holds everyone
    own = gap.reshape(ranks, steps, per_step)
    begin = np.r_[0, np.cumsum(own.sum(axis=2).max(axis=0))[:-1]]
    enqueued = (begin[None, :, None] + np.cumsum(own, axis=2)).reshape(-1).astype(np.int64) + 10**15
    done = np.ones(ranks * records, dtype=np.int8)
    if fault == "hang":
        keep, done = _stop(rank, place, which, culprit, steps - 1, per_step, tensor)
    else:
        keep = np.ones(len(rank), dtype=bool)
    unknown = np.full(int(keep.sum()), UNKNOWN, dtype=np.int64)
    log = Log(
        kinds=["all_reduce"],
        rank=rank[keep],
        group=group[keep].astype(np.int32),
        seq=seq[keep],
        kind=np.zeros(int(keep.sum()), dtype=np.int16),
        bytes=np.where(which == 1, 1 << 20, 1 << 16)[keep],
        peer=unknown.astype(np.int32),
        enqueued_ns=enqueued[keep],
        started_ns=unknown,
        ended_ns=unknown,
        took_ns=unknown,
        done=done[keep],
        order=enqueued[keep],
    )
    everyone = tuple(range(ranks))
    return Case(log=log, groups=groups, ranks=everyone, world=everyone)


def _stop(
    rank: np.ndarray,
    place: np.ndarray,
    which: np.ndarray,
    culprit: int,
    step: int,
    per_step: int,
    tensor: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The culprit stops before the fifth operation of the last step: its tensor group waits there, and all
    others at their first operation with a data group that has one of those in it."""
    last = step * per_step
    near = rank // 8 == culprit // 8
    end = np.where(rank == culprit, last + 4, np.where(near, last + 5, last + tensor + 1))
    keep = place < end
    done = np.ones(len(rank), dtype=np.int8)
    done[(place == end - 1) & (rank != culprit)] = 0
    return keep, done


def one_size(ranks: int, fault: str) -> dict[str, Any]:
    culprit = ranks // 3
    case = job_of(ranks, RECORDS, culprit=culprit, fault=fault)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    analysis = Analysis(diagnosis=Diagnosis())
    began, burned = time.perf_counter(), time.process_time()
    analyse_case(case, analysis)
    took, burned = time.perf_counter() - began, time.process_time() - burned
    named = sorted({s.rank for finding in analysis.diagnosis.incidents for s in finding.suspects})
    return {
        "ranks": ranks,
        "fault": fault,
        "records": len(case.log),
        "seconds": round(took, 2),
        "cpu_seconds": round(burned, 2),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "before_mb": round(held),
        "exact": named == [culprit],
    }


def scale() -> list[dict[str, Any]]:
    rows = []
    for ranks in SIZES:
        for fault in ("hang", "slow"):
            command = [sys.executable, __file__, "one", "--ranks", str(ranks), "--fault", fault]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append(json.loads(done.stdout))
            print(_line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    verdict = "the culprit and nobody else" if row["exact"] else "WRONG"
    return (
        f"{row['ranks']:6} ranks {row['records']:9} records  {row['fault']:5} {row['seconds']:7.2f} s "
        f"({row['cpu_seconds']:.2f} of a core) {row['peak_mb']:6} MB  {verdict}"
    )


# ------------------------------------------------------------------ reading


def reading() -> dict[str, Any]:
    entry = {
        "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": 1, "p2p_seq_id": 0, "op_id": 1,
        "profiling_name": "nccl:all_reduce", "input_sizes": [[1024]], "input_dtypes": ["Float"],
        "output_sizes": [[1024]], "output_dtypes": ["Float"], "state": "completed", "retired": True,
        "time_discovered_started_ns": None, "time_discovered_completed_ns": 5, "timeout_ms": 600000,
        "is_p2p": False,
    }  # fmt: skip
    entries = [
        {**entry, "record_id": i, "collective_seq_id": i, "time_created_ns": 10**18 + i * 1000}
        for i in range(RECORDS)
    ]
    dump = {"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": entries}
    content = pickle.dumps(dump, protocol=2)
    began = time.process_time()
    for number in range(10):
        read(f"trace_rank_{number}", content)
    each = (time.process_time() - began) / 10
    return {
        "records_a_dump": RECORDS,
        "kilobytes_a_dump": len(content) // 1024,
        "ms_a_dump": round(each * 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("all", "recorder", "scale", "read", "one", "ab", "agent", "stock")
    parser.add_argument("what", nargs="?", default="all", choices=parts)
    parser.add_argument("--steps", type=int, default=1500, help="of `ab`")
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--fault", default="hang", choices=("hang", "slow"))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.what == "one":
        print(json.dumps(one_size(given.ranks, given.fault)))
        return
    document: dict[str, Any] = {}
    if given.what in ("all", "recorder"):
        document["recorder"] = recorder()
    if given.what in ("all", "read"):
        document["read"] = reading()
    if given.what == "ab":
        document["recorder on over off"] = on_and_off(given.steps)
    if given.what == "agent":
        document["agent"] = agent(20.0)
    if given.what == "stock":
        document["stock"] = stock()
    if given.what in ("all", "scale"):
        document["scale"] = scale()
    if given.json:
        print(json.dumps(document))
        return
    for name, value in document.items():
        print(name)
        for row in value if isinstance(value, list) else value.items():
            if isinstance(row, dict):
                print("  ", _stock_line(row) if "case" in row else _line(row))
            else:
                print(f"   {row[0]:40} {row[1]}")


if __name__ == "__main__":
    main()
