"""`everstep diagnose`: one document, one sentence for a mistake, no torch needed."""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.cli.main import run
from tests.diagnose.test_readers import dump, entry


@pytest.fixture
def hung(tmp_path: Path) -> Path:
    """Four ranks; rank 2 never comes to operation 9. One foreign file, one truncated one."""
    folder = tmp_path / "dumps"
    folder.mkdir()
    for rank in range(4):
        rows = [entry(n, retired=True, time_created_ns=10**18 + n * 10**7) for n in range(9)]
        if rank != 2:
            rows.append(entry(9, time_created_ns=10**18 + 9 * 10**7))
        (folder / f"trace_rank_{rank}").write_bytes(pickle.dumps(dump(*rows), protocol=2))
    (folder / "notes.txt").write_text("nothing to see")
    (folder / "trace_rank_7").write_bytes(pickle.dumps(dump(entry(1)), protocol=2)[:90])
    return folder


def test_json_has_the_keys_and_nothing_else_is_printed(
    hung: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["diagnose", str(hung), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (incident,) = document["incidents"]
    assert incident["syndrome"] == "non-communication hang"
    assert incident["where"] == "host"
    assert [s["rank"] for s in incident["suspects"]] == [2]
    assert set(incident["suspects"][0]) >= {"rank", "confidence", "evidence"}
    assert incident["victims"] == [0, 1, 3]
    assert incident["ruled_out"]
    assert {f["file"] for f in document["unusable_files"]} == {"notes.txt", "trace_rank_7"}
    assert document["imbalances"] == []


def test_the_stacks_of_a_rank_say_where_it_is(hung: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They were left out as "not a format known here", for every rank."""
    for rank in range(4):
        (hung / str(rank)).mkdir()
        (hung / str(rank) / "stacks.txt").write_text(
            'Thread 0x00007f01 (most recent call first):\n  File "/usr/lib/threading.py", line 9 in wait\n\n'
            "Current thread 0x00007f00 (most recent call first):\n"
            '  File "/x/torch/utils/data.py", line 3 in next\n'
            f'  File "/home/u/hang.py", line {10 + rank} in load_batch\n'
            '  File "/home/u/hang.py", line 40 in <module>\n'
        )
    assert run(["diagnose", str(hung), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert "rank 2 is at hang.py:12 in load_batch in its last stacks" in document["notes"]
    assert not any("rank 1 is at" in note for note in document["notes"]), "no suspect"
    assert {f["file"] for f in document["unusable_files"]} == {"notes.txt", "trace_rank_7"}


def test_words_and_table(hung: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diagnose", str(hung)]) == 0
    shown = capsys.readouterr().out
    assert "the host of rank 2 never asked for what 3 other ranks wait for" in shown
    assert "left out: notes.txt" in shown


@pytest.mark.parametrize("what", ["missing", "empty", "foreign"])
def test_a_folder_that_holds_nothing_is_one_sentence(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / what
    if what != "missing":
        path.mkdir()
    if what == "foreign":
        (path / "a.txt").write_text("x")
    assert run(["diagnose", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_two_jobs_in_a_folder_are_asked_about_and_not_mixed(
    hung: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each rank the newest file counted, whichever job had left it: "unknown"."""
    other = tmp_path / "jobs" / "b"
    shutil.copytree(hung, tmp_path / "jobs" / "a" / "host")
    shutil.copytree(hung, other)
    for rank in range(4):
        rows = [entry(n, retired=True, time_created_ns=2 * 10**18 + n * 10**7) for n in range(5)]
        rows += [entry(5, time_created_ns=2 * 10**18 + 6 * 10**7)] if rank else []
        (other / f"trace_rank_{rank}").write_bytes(pickle.dumps(dump(*rows), protocol=2))
    jobs = ["diagnose", str(tmp_path / "jobs")]
    assert run(jobs) == 2
    said = capsys.readouterr().err
    assert "has files of rank 0 in 2 folders (a/host, b): of several jobs, or of several attempts" in said
    assert "Choose with --only a/host." in said
    for only, suspect in (("a/host", 2), ("b", 0)):
        assert run([*jobs, "--only", only, "--json"]) == 0
        (incident,) = json.loads(capsys.readouterr().out)["incidents"]
        assert [s["rank"] for s in incident["suspects"]] == [suspect]
    assert run([*jobs, "--only", "c"]) == 2
    assert "not found" in capsys.readouterr().err
    shutil.copytree(hung, tmp_path / "parts" / "host0")
    (tmp_path / "parts" / "host1").mkdir()
    (tmp_path / "parts" / "host0" / "trace_rank_3").rename(tmp_path / "parts" / "host1" / "trace_rank_3")
    assert run(["diagnose", str(tmp_path / "parts"), "--json"]) == 0, "one job, a folder per host"


def test_it_works_without_torch(hung: Path) -> None:
    blocked = (
        "import sys; sys.modules['torch'] = None; "
        "from everstep.cli.main import run; sys.exit(run(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", blocked, "diagnose", str(hung), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["incidents"][0]["suspects"][0]["rank"] == 2
