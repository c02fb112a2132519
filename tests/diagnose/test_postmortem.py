"""Dumps of gloo that were written after a failure: who stopped first, and how sure that is.

Three kinds of evidence here: jobs made up of groups and operations that fail as gloo's do; dumps of real
gloo jobs, kept in `postmortem.jsonl` (made by real faults); and one job run on the spot.
"""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.cli.main import run
from everstep.diagnose import Analysis, analyse, read
from tests.diagnose.test_readers import dump, entry

NAMELESS = {"": {"name": "", "desc": "", "ranks": "[]"}}
SECOND = 10**9


def suspects(analysis: Analysis) -> dict[int, float]:
    return {s.rank: s.confidence for finding in analysis.diagnosis.incidents for s in finding.suspects}


# ------------------------------------------------------------------ jobs that are made up


class Job:
    """Ranks that run one program of blocking operations; every group is named and its members are not."""

    def __init__(self, ranks: int, divisions: list[int], steps: int) -> None:
        """`divisions`: strides; 1 is the world, 2 is groups of every other rank, and so on."""
        self.ranks, self.steps = ranks, steps
        self.names: dict[tuple[int, ...], str] = {tuple(range(ranks)): "0"}
        self.divisions = [
            [tuple(range(at, ranks, stride)) for at in range(stride)] for stride in divisions if stride > 1
        ]
        for division in self.divisions:
            for group in division:
                self.names.setdefault(group, str(len(self.names)))

    def round_of(self, rank: int) -> list[tuple[int, ...]]:
        mine = [group for division in self.divisions for group in division if rank in group]
        return [*(group for group in mine if len(group) > 1), tuple(range(self.ranks))]

    def run(self, culprit: int, stops_before: int) -> dict[int, list[tuple[tuple[int, ...], int]]]:
        """What each rank issued, as (group, number), until nobody can go on."""
        programs = {
            rank: [(group, step) for step in range(self.steps) for group in self.round_of(rank)]
            for rank in range(self.ranks)
        }
        done = dict.fromkeys(programs, 0)
        limit = {r: min(len(p), stops_before if r == culprit else len(p)) for r, p in programs.items()}
        moved = True
        while moved:
            moved = False
            for rank, program in programs.items():
                at = done[rank]
                if at >= limit[rank]:
                    continue
                group, number = program[at]
                if all((group, number) in programs[m][: min(done[m] + 1, limit[m])] for m in group):
                    done[rank] += 1
                    moved = True
        return {r: p[: min(done[r] + 1, limit[r])] for r, p in programs.items()}

    def dumps(self, issued: dict[int, list[tuple[tuple[int, ...], int]]], young: int) -> dict[int, bytes]:
        """As pickles. The last operation of rank `young` is not retired yet."""
        found = {}
        for rank, calls in issued.items():
            levels = {group: at for at, group in enumerate(dict.fromkeys(self.round_of(rank)))}
            rows = [
                entry(
                    number + 1,
                    record_id=at,
                    pg_id=levels[group],
                    process_group=(
                        self.names[group],
                        "default_pg" if len(group) == self.ranks else "undefined",
                    ),
                    profiling_name="gloo:all_reduce",
                    retired=at < len(calls) - 1 or rank != young,
                    time_created_ns=10**18 + at * 10**7 + rank,
                    timeout_ms=30_000,
                )
                for at, (group, number) in enumerate(calls)
            ]
            found[rank] = pickle.dumps(dump(*rows, pg_config=NAMELESS, version="2.10"), protocol=2)
        return found


@st.composite
def failures(draw: st.DrawFn) -> tuple[Job, int, int]:
    ranks = draw(st.integers(2, 8))
    strides = [s for s in (2, 4) if ranks % s == 0 and ranks > s]
    divisions = [s for s in strides if draw(st.booleans())]
    job = Job(ranks, divisions, steps=6)
    culprit = draw(st.integers(0, ranks - 1))
    length = 6 * len(job.round_of(culprit))
    return job, culprit, draw(st.integers(1, length - 1))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(failures(), st.integers(0, 7))
def test_the_rank_that_never_issued_an_operation_is_named(failure: tuple[Job, int, int], young: int) -> None:
    job, culprit, before = failure
    dumps = job.dumps(job.run(culprit, before), young)
    parts = [read(f"rank_{r}", d, modified_ns=10**18 + SECOND) for r, d in dumps.items()]
    found = suspects(analyse(parts))
    assert set(found) == {culprit}
    assert found[culprit] >= (0.85 if job.ranks > 2 or young > 1 else 0.4)  # of two, one is just waited for


@settings(max_examples=80, deadline=None, derandomize=True)
@given(failures())
def test_a_rank_that_left_no_dump_is_named_less_surely(failure: tuple[Job, int, int]) -> None:
    job, culprit, before = failure
    dumps = job.dumps(job.run(culprit, before), young=-1)
    del dumps[culprit]
    parts = [read(f"rank_{r}", d, modified_ns=10**18 + SECOND) for r, d in dumps.items()]
    found = suspects(analyse(parts))
    is_known = culprit < job.ranks - 1 or any(len(g) == 2 for division in job.divisions for g in division)
    if is_known or job.ranks == 2:  # else nothing says that there is one rank more
        assert set(found) == {culprit}
    assert all(confidence <= 0.7 for confidence in found.values())


@settings(max_examples=30, deadline=None, derandomize=True)
@given(failures())
def test_a_healthy_end_accuses_nobody(failure: tuple[Job, int, int]) -> None:
    job, rank, _ = failure
    dumps = job.dumps(job.run(rank, 10**6), young=rank)
    parts = [read(f"rank_{r}", d, modified_ns=10**18 + SECOND // 3) for r, d in dumps.items()]
    assert suspects(analyse(parts)) == {}


def world_op(number: int, at_s: float, **more: Any) -> dict[str, Any]:
    plain = {"profiling_name": "gloo:all_reduce", "retired": True, "timeout_ms": 2000}
    return entry(number, time_created_ns=10**18 + int(at_s * SECOND), **(plain | more))


def files(*ranks: list[dict[str, Any]], written_s: float = 9.0) -> list[Any]:
    return [
        read(
            f"rank_{rank}",
            pickle.dumps(dump(*rows, pg_config=NAMELESS, version="2.10"), protocol=2),
            modified_ns=10**18 + int(written_s * SECOND),
        )
        for rank, rows in enumerate(ranks)
    ]


def steady(last: int) -> list[dict[str, Any]]:
    return [world_op(n, 0.1 * n) for n in range(1, last + 1)]


def test_a_rank_that_comes_after_the_timeout_of_the_others_is_named() -> None:
    others = [*steady(20), world_op(21, 2.1)]
    late = [*steady(20), world_op(21, 4.2)]
    found = suspects(analyse(files(others, others, late, others)))
    assert found == {2: 0.9}


def test_clocks_that_differ_make_nobody_late() -> None:
    """Rank 1's clock is five seconds ahead, all along."""
    others = steady(21)
    ahead = [world_op(n, 0.1 * n + 5) for n in range(1, 22)]
    assert suspects(analyse(files(others, ahead, others))) == {}


def test_a_dump_of_earlier_is_set_aside() -> None:
    """Rank 1's dump is from ten steps before the end: the others went on without a pause."""
    analysis = analyse(files(steady(30), steady(20), steady(30)))
    assert suspects(analysis) == {}
    assert any("rank 1 is older" in note for note in analysis.diagnosis.notes)


def test_on_a_tie_the_one_that_strays_from_its_own_past_is_named() -> None:
    rounds = [("gloo:all_reduce", [[10]]), ("gloo:all_gather", [[4]]), ("gloo:barrier", [])]
    calls = [rounds[n % 3] for n in range(15)]
    rows = [
        world_op(n + 1, 0.1 * n, profiling_name=name, input_sizes=sizes)
        for n, (name, sizes) in enumerate(calls)
    ]
    right = world_op(16, 1.6, input_sizes=[[10]])
    wrong = world_op(16, 1.6, profiling_name="gloo:all_gather", input_sizes=[[4]])
    analysis = analyse(files([*rows, wrong], [*rows, right]))
    assert suspects(analysis) == {0: 0.7}
    assert analysis.diagnosis.incidents[0].where == "program"


def test_more_than_half_of_the_dumps_missing_accuses_nobody() -> None:
    config = {"": {"name": "", "desc": "", "ranks": "[0, 1, 2, 3, 4]"}}
    parts = [
        read(f"rank_{r}", pickle.dumps(dump(*steady(7), pg_config=config, version="2.10"), protocol=2))
        for r in (0, 3)
    ]
    assert suspects(analyse(parts)) == {}


def test_a_rank_that_dies_inside_an_operation_is_named_though_some_complete_it() -> None:
    """Rank 2 is killed in operation 8: 0 and 1 fail in it, 3 completes it and fails in the next."""
    config = {"": {"name": "", "desc": "", "ranks": "[0, 1, 2, 3]"}}
    parts = [
        read(
            f"rank_{rank}",
            pickle.dumps(dump(*steady(last), pg_config=config, version="2.10"), protocol=2),
            modified_ns=10**18 + 2 * SECOND,
        )
        for rank, last in ((0, 8), (1, 8), (3, 9))
    ]
    found = suspects(analyse(parts))
    assert set(found) == {2}


def pipeline(rank: int, ranks: int, last: int) -> list[dict[str, Any]]:
    """A chain of messages, counted in `op_id` and not recorded, then one collective per step: the first stage
    is the last to come to it, the more so the longer the chain."""
    return [
        world_op(n, 0.2 * n + 0.05 * (ranks - rank), op_id=5 * n, timeout_ms=600_000)
        for n in range(1, last + 1)
    ]


def test_without_its_messages_no_stage_of_a_pipeline_is_called_slow() -> None:
    parts = files(*(pipeline(rank, 4, 24) for rank in range(4)), written_s=4.9)
    analysis = analyse(parts)
    assert suspects(analysis) == {}
    assert any("messages are not recorded" in note for note in analysis.diagnosis.notes)


@pytest.mark.parametrize(
    ("order", "named"), [((1, 0, 2, 3), {1: 0.35}), ((1, 3, 0, 2), {}), ((0, 1, 2, 3), {0: 0.35})]
)
def test_where_only_messages_were_under_way_the_order_of_dumps_is_weak_evidence(
    order: tuple[int, ...], named: dict[int, float]
) -> None:
    parts = []
    for place, rank in enumerate(order):
        rows = pickle.dumps(dump(*pipeline(rank, 4, 24), pg_config=NAMELESS, version="2.10"), protocol=2)
        parts.append(read(f"rank_{rank}", rows, modified_ns=10**18 + 5 * SECOND + place * 9_000_000))
    assert suspects(analyse(parts)) == named


# ------------------------------------------------------------------ dumps of real jobs

KEPT = [json.loads(line) for line in (Path(__file__).parent / "postmortem.jsonl").read_text().splitlines()]


def kept_parts(case: dict[str, Any]) -> list[Any]:
    parts = []
    for rank, kept in case["dumps"].items():
        rows = [dict(zip(case["columns"], row, strict=True)) for row in kept["entries"]]
        whole = {"version": "2.10", **kept["rest"], "entries": rows}
        parts.append(read(f"fr_rank_{rank}", json.dumps(whole).encode(), modified_ns=kept["written_ns"]))
    return parts


@pytest.mark.parametrize("case", KEPT, ids=lambda case: case["name"])
def test_real_dumps(case: dict[str, Any]) -> None:
    found = suspects(analyse(kept_parts(case)))
    wrong = {rank: confidence for rank, confidence in found.items() if rank not in case["truth"]}
    assert set(found) >= set(case["truth"])
    assert all(confidence <= 0.4 for confidence in wrong.values())
    if "no dump" in case["name"] or "kill" in case["name"]:
        assert all(confidence <= 0.7 for confidence in found.values())


JOB = """
import os, sys
import torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d

folder, pids = sys.argv[1], []
for rank in range(3):
    pid = os.fork()
    if pid:
        pids.append(pid)
        continue
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    try:
        for step in range(6):
            if step == 4 and rank == 1:
                raise ValueError("a bad batch")
            dist.all_reduce(torch.ones(8))
            dist.barrier()
    except Exception:
        pass
    with open(f"{folder}/fr_rank_{rank}", "wb") as file:
        file.write(c10d._dump_fr_trace(True, False, False))
    os._exit(0)
for pid in pids:
    os.waitpid(pid, 0)
os.remove(f"{folder}/store")
"""


def test_a_real_rank_that_raises_is_named_from_the_dumps_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run([sys.executable, "-c", JOB, str(tmp_path)], check=True, timeout=60, capture_output=True)
    assert run(["diagnose", str(tmp_path), "--json"]) == 0
    (incident,) = json.loads(capsys.readouterr().out)["incidents"]
    assert [s["rank"] for s in incident["suspects"]] == [1]
    assert "never issued all_reduce 9" in incident["suspects"][0]["evidence"]
    assert "after the failure" in incident["because"]
