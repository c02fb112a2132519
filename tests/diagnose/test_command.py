"""`everstep diagnose`: one document, one sentence for a mistake, no torch needed; and the live pull."""

import http.server
import json
import pickle
import shutil
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from everstep.cli.main import run
from everstep.node import pulled_records
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


# ------------------------------------------------------------------ the live pull


class Handler(http.server.BaseHTTPRequestHandler):
    """A rank's worker server: its recorder answers, its interpreter as told."""

    stuck = False

    def do_POST(self) -> None:
        if self.path.endswith("dump_traceback"):
            if self.stuck:
                time.sleep(1.0)
            body = b'Thread 0x1 (most recent call first):\n  File "/a/train.py", line 31 in step\n'
        else:
            body = json.dumps(dump(entry(4))).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def ranks() -> Any:
    servers = {}
    for rank, stuck in ((0, False), (1, True)):
        handler = type("Handler", (Handler,), {"stuck": stuck})
        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers[rank] = server
    addresses = {rank: f"127.0.0.1:{server.server_address[1]}" for rank, server in servers.items()}
    addresses[2] = "127.0.0.1:9"  # a closed port
    yield addresses
    for server in servers.values():
        server.shutdown()
        server.server_close()


def test_a_pull_tells_a_held_interpreter_from_a_process_that_is_gone(ranks: Any, tmp_path: Path) -> None:
    answers = {answer.rank: answer for answer in pulled_records.pull(ranks, timeout_s=0.4)}
    assert answers[0].stack == "train.py:31 in step"
    assert (answers[1].stuck, answers[1].dump is not None) == (True, True)
    assert "its process is gone" in answers[2].why
    pulled_records.save(list(answers.values()), tmp_path, world_size=4)
    assert {f.name for f in tmp_path.iterdir()} == {"fr_rank_0.json", "fr_rank_1.json", "pull.json"}
    assert run(["diagnose", str(tmp_path), "--json"]) == 0


def test_the_command_pulls_from_running_ranks_and_then_reads_what_they_said(
    ranks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [word for rank in sorted(ranks) for word in ("--pull", ranks[rank])]
    assert run(["diagnose", str(tmp_path / "now"), "--json", *asked]) == 0
    assert "all_reduce 4" in json.loads(capsys.readouterr().out)["incidents"][0]["because"]
    assert {f.name for f in (tmp_path / "now").iterdir()} == {"fr_rank_0.json", "fr_rank_1.json", "pull.json"}


def test_a_pull_from_what_is_no_address_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["diagnose", str(tmp_path), "--pull", "nonsense"]) == 2
    assert "neither HOST:PORT nor the path of a Unix socket" in " ".join(capsys.readouterr().err.split())
