"""What a process says: a full disk, a closed pipe, a hung file system cost lines and nothing else.

`/dev/full` is a file whose disk is full, whoever writes to it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from everstep import log
from everstep.log import LineFile, LineWriter, trim
from tests.support.processes import fill, until

FULL = Path("/dev/full")


def ran(code: str, **streams: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"import os, sys\nfrom everstep import log\n{code}"]
    return subprocess.run(command, text=True, timeout=60, check=False, **streams)


@pytest.mark.parametrize("start", ["", "log.start()", "log.start(form='json')"])
def test_nothing_that_is_said_on_a_full_disk_raises(start: str) -> None:
    with FULL.open("w") as full:
        done = ran(
            f"{start}\nfor n in range(5): log.say('x')\nlog.warn('y')\nprint('goes on')",
            stdout=-1,
            stderr=full,
        )
    assert (done.stdout, done.returncode) == ("goes on\n", 0)


def test_no_print_of_a_process_that_has_begun_raises() -> None:
    code = """
log.start()
import traceback
try:
    raise ValueError("a user's")
except ValueError:
    traceback.print_exc()
print("x" * 100_000, flush=True)
sys.stdout.flush()
os._exit(0 if log.lost_output().errno == 28 else 3)
"""
    with FULL.open("w") as full:
        assert ran(code, stdout=full, stderr=full).returncode == 0


def test_a_document_that_could_not_be_printed_is_no_success() -> None:
    code = """
from everstep.cli import main, render
main.run = lambda: log.start() or render.emit({}) or 0
main.main()
"""
    with FULL.open("w") as full:
        done = ran(code, stdout=full, stderr=-1)
    assert done.returncode == 1
    assert "stdout could not be written: No space left on device." in done.stderr


def test_a_reader_that_exits_ends_the_output_only() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = ran(
        "log.start()\nlog.say('x')\nprint('y', flush=True)\nprint('z', file=sys.stderr)",
        stdout=writer,
        stderr=writer,
    )
    os.close(writer)
    assert done.returncode == 0


def test_a_closed_stderr_is_not_the_next_file(tmp_path: Path) -> None:
    """The file that is opened next gets the descriptor 2: lines went into a journal, or to a peer."""
    other = tmp_path / "journal"
    code = f"from everstep import log; log.start(); f = open({str(other)!r}, 'w'); log.say('x'); log.flush()"
    command = ["sh", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
    assert other.read_text() == ""


@pytest.mark.parametrize(
    ("form", "level", "shown"),
    [
        ("plain", "info", ["one", "two"]),
        ("plain", "warning", ["two"]),
        ("text", "info", None),
        ("json", "info", None),
    ],
)
def test_lines_have_levels_and_times(form: str, level: str, shown: list[str] | None) -> None:
    start = f"log.start(form={form!r}, level={level!r})"
    done = ran(f"{start}\nlog.say('one', step=3)\nlog.warn('two')", stderr=-1)
    lines = done.stderr.splitlines()
    if shown is not None:
        assert lines == shown
    elif form == "text":
        assert [line.split(maxsplit=1)[1] for line in lines] == ["INFO    one", "WARNING two"]
        assert lines[0][:4].isdigit()
        assert lines[0].split()[0].endswith("Z")
    else:
        first, second = map(json.loads, lines)
        assert (first["message"], first["level"], first["step"]) == ("one", "info", 3)
        assert second["level"] == "warning"


def test_lines_wait_for_room_in_order_and_whole(small_disk: Path) -> None:
    told: list[str] = []
    rows = LineFile(small_disk / "rows.jsonl", tell=told.append)
    rows.add('{"row": 0}')
    until(lambda: (small_disk / "rows.jsonl").exists())
    fill(small_disk)
    for row in range(1, 800):
        rows.add(json.dumps({"row": row}))
    until(lambda: told)
    (small_disk / "filler").unlink()
    rows.add('{"row": 800}')
    until(lambda: (small_disk / "rows.jsonl").read_text().endswith('{"row": 800}\n'))
    assert rows.close() == 0
    found = [json.loads(line)["row"] for line in (small_disk / "rows.jsonl").read_text().splitlines()]
    assert found == list(range(801))
    assert told == ["No space left on device"], "once"


def test_lines_that_never_find_room_are_counted(small_disk: Path) -> None:
    rows = LineFile(small_disk / "rows.jsonl", tell=lambda why: None)
    fill(small_disk)
    for _ in range(7):
        rows.add("x" * 5000)
    began = time.monotonic()
    assert rows.close() == 7
    assert time.monotonic() - began < 20


def test_a_file_that_is_removed_is_made_again(tmp_path: Path) -> None:
    rows = LineFile(tmp_path / "folder" / "rows", tell=pytest.fail)
    rows.add("first")
    until(lambda: rows.path.exists() and rows.path.read_text())
    rows.path.unlink()
    rows.path.parent.rmdir()
    rows.add("second")
    assert rows.close() == 0
    assert rows.path.read_text() == "second\n"


def test_a_line_does_not_join_the_half_of_one_that_a_crash_left(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text('{"row": 1}\n{"ro')
    rows = LineFile(tmp_path / "rows", tell=pytest.fail)
    rows.add('{"row": 2}')
    rows.close()
    assert (tmp_path / "rows").read_text().splitlines() == ['{"row": 1}', '{"ro', '{"row": 2}']


def test_storage_that_hangs_holds_up_nobody() -> None:
    """A pipe that no process reads takes 64 KiB, then whoever writes waits."""
    reader, writer = os.pipe()
    lines = LineWriter(lambda: writer)
    began = time.monotonic()
    for _ in range(log.MOST_HELD + 500):
        lines.add("x" * 1000)
    assert not lines.flush(0.1)
    assert time.monotonic() - began < 10
    read: list[bytes] = []
    draining = threading.Thread(target=lambda: read.extend(iter(lambda: os.read(reader, 1 << 20), b"")))
    draining.start()
    lines.flush(30)
    lines.add("the last")
    assert lines.flush(30)
    os.close(writer)
    draining.join(30)
    os.close(reader)
    assert b" lines were lost here\n" in b"".join(read)
    assert b"".join(read).endswith(b"x\nthe last\n") or b"here\nthe last\n" in b"".join(read)


def test_a_fork_says_its_own_lines_and_not_its_parent_s() -> None:
    code = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: forks where there are threads
log.start()
log.say("parent")
log.flush()
if (child := os.fork()) == 0:
    log.say("child")
    log.flush()
    os._exit(0)
os.waitpid(child, 0)
log.say("parent again")
"""
    assert ran(code, stderr=-1).stderr.splitlines() == ["parent", "child", "parent again"]


def test_a_handler_of_a_signal_may_say_something() -> None:
    code = """
import signal, threading
log.start()
signal.signal(signal.SIGALRM, lambda number, frame: log.say("from the handler"))
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0005)
for n in range(20_000):
    log.say("x")
signal.setitimer(signal.ITIMER_REAL, 0)
log.flush(30)
os._exit(7)
"""
    done = ran(code, stderr=-1)
    assert done.returncode == 7
    assert "from the handler" in done.stderr


def test_a_log_that_grows_too_large_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    with path.open("ab", buffering=0) as worker:  # as workers do: what is written is always at the end
        worker.write(b"a" * 900)
        trim(path, 1000)
        assert path.stat().st_size == 900
        worker.write(b"b" * 900)
        trim(path, 1000)
        assert path.read_bytes() == b""
        assert (tmp_path / "worker.log.1").read_bytes() == b"a" * 100 + b"b" * 900
        worker.write(b"c")
    assert path.read_bytes() == b"c"
    trim(tmp_path / "not there")


def test_a_log_on_a_full_disk_keeps_its_end(small_disk: Path) -> None:
    path = small_disk / "worker.log"
    path.write_bytes(b"a" * (3 << 20) + b"the end\n")
    fill(small_disk)
    trim(path, 1 << 20)
    assert path.stat().st_size == 1 << 20
    assert path.read_bytes().endswith(b"a" * 1000 + b"the end\n")
    assert not (small_disk / "worker.log.1").exists()


AGENT = """
import asyncio
from everstep.node.agent import Agent, AgentSettings
async def main():
    run = asyncio.create_task(Agent(AgentSettings(node="a", slots=1, coordinators=("http://127.0.0.1:9",))).run())
    done, _ = await asyncio.wait({run}, timeout=1.5)
    os._exit(5 if done else 0)
log.start(form="text")
asyncio.run(main())
"""
COORDINATOR = """
import asyncio, tempfile
from pathlib import Path
from everstep.server.term import Daemon
from everstep.server.journal import SqliteJournal
async def main():
    folder = Path(tempfile.mkdtemp(dir=sys.argv[1]))
    journal = SqliteJournal(folder / "journal.sqlite")
    await journal.open(); await journal.campaign()
    run = asyncio.create_task(Daemon(journal, folder=folder).lead())
    done, _ = await asyncio.wait({run}, timeout=1.5)
    os._exit(5 if done else 0)
asyncio.run(main())
"""


@pytest.mark.parametrize("code", [AGENT, COORDINATOR], ids=["agent", "coordinator"])
def test_a_full_log_ends_no_agent_and_no_coordinator(code: str, tmp_path: Path) -> None:
    """The first line of a coordinator, and an agent's word that its coordinator is away, ended them."""
    head = "import os, sys\nfrom everstep import log\n"
    with FULL.open("w") as full:
        command = [sys.executable, "-c", head + code, str(tmp_path)]
        assert subprocess.run(command, stderr=full, timeout=120, check=False).returncode == 0
