"""Real dumps, each with its truth beside it; and the same dumps put in worse shape."""

import json
import re
from pathlib import Path

import pytest

from everstep_diagnose import Diagnosis, UnusableFileError, analyse, read
from everstep_diagnose.flight import unpickle

DATA = Path(__file__).parents[2].parent / "shared" / "data"
CASES = sorted(p for p in (DATA / "flight_recorder").glob("*") if p.is_dir())
needs_data = pytest.mark.skipif(not CASES, reason="the real dumps are not on this machine")
PLACES = {"GPU_ERROR": "device", "LOCK_GIL": "host"}


def truth(folder: Path) -> dict[int, str]:
    words = (folder / "fault_injection.log").read_text()
    return {int(rank): PLACES[kind] for rank, kind in re.findall(r"Rank (\d+), fault_type: (\w+)", words)}


def dumps(folder: Path) -> dict[int, bytes]:
    return {int(f.name.split("_")[-1]): f.read_bytes() for f in folder.glob("_dump_*")}


def accused(diagnosis: Diagnosis) -> dict[int, str]:
    return {s.rank: str(finding.where) for finding in diagnosis.incidents for s in finding.suspects}


@needs_data
@pytest.mark.parametrize("folder", CASES, ids=lambda p: p.name)
def test_the_true_ranks_and_no_one_else(folder: Path) -> None:
    analysis = analyse([read(f"_dump_{rank}", content) for rank, content in dumps(folder).items()])
    assert accused(analysis) == truth(folder)
    (finding,) = analysis.incidents
    assert set(finding.victims) == set(range(16)) - set(truth(folder))


@needs_data
@pytest.mark.parametrize("folder", CASES, ids=lambda p: p.name)
def test_the_same_from_json(folder: Path) -> None:
    """Numbers of pg_status as text, 0 for no time, no entries where there are none."""
    parts = []
    for rank, content in dumps(folder).items():
        dump = unpickle(content)
        dump["pg_status"] = {k: {n: str(v) for n, v in s.items()} for k, s in dump["pg_status"].items()}
        for entry in dump["entries"]:
            entry["time_discovered_completed_ns"] = 0
        if not dump["entries"]:
            del dump["entries"]
        parts.append(read(f"rank{rank}.json", json.dumps(dump).encode()))
    assert accused(analyse(parts)) == truth(folder)


@needs_data
@pytest.mark.parametrize("folder", CASES, ids=lambda p: p.name)
def test_ranks_come_from_the_groups_where_file_names_tell_nothing(folder: Path) -> None:
    parts = [read(f"dump-{chr(97 + rank)}", content) for rank, content in dumps(folder).items()]
    assert accused(analyse(parts)) == truth(folder)


@needs_data
def test_a_stuck_rank_without_its_dump_is_still_named() -> None:
    folder = DATA / "flight_recorder" / "lock_gil_1st"
    content = dumps(folder)
    analysis = analyse([read(f"_dump_{rank}", content[rank]) for rank in content if rank not in (9, 14)])
    assert set(accused(analysis)) == {9, 14}


@needs_data
def test_counters_that_are_gone_cost_confidence_not_the_verdict() -> None:
    folder = DATA / "flight_recorder" / "lock_gil_1st"
    parts = []
    for rank, content in dumps(folder).items():
        dump = unpickle(content)
        dump["pg_status"] = {}
        parts.append(read(f"rank_{rank}.json", json.dumps(dump).encode()))
    analysis = analyse(parts)
    assert set(accused(analysis)) == {9, 14}
    assert all(s.confidence < 0.9 for s in analysis.incidents[0].suspects)


@needs_data
def test_a_truncated_dump_is_refused_by_name() -> None:
    content = next(iter(dumps(CASES[0]).values()))
    with pytest.raises(UnusableFileError, match="truncated"):
        read("_dump_3", content[: len(content) // 2])
