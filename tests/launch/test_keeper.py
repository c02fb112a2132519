"""The keeper of a node's ranks, with real processes: what it starts, reports and leaves behind."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.protocol import messages as msg
from everstep.protocol.messages import RankRules, Sender
from everstep.protocol.ops import Worker
from everstep.ranks import keeper as rank_keeper
from everstep.ranks.keeper import Inbox, KeeperSettings
from tests.support.processes import lives, until

SENDER = Sender("t", Worker(1, 0), 4)
HEAD = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"


PLACE = {"group": 1, "first_rank": 2, "num_groups": 2, "world": 4, "restarts": 0}


class Kept:
    """A keeper in a thread, and what it says."""

    def __init__(self, folder: Path, script: str, **rules: Any) -> None:
        (folder / "script.py").write_text(HEAD + script)
        self.inbox, self.said = Inbox(), queue.SimpleQueue[msg.RankReport]()
        self.folder = folder
        given = {"command": ("script.py",), "run_id": "run", "folder": str(folder), "ranks": 2, **rules}
        settings = KeeperSettings(
            sender=SENDER,
            rules=RankRules(**given),
            host="127.0.0.1",
            logs=folder / "logs",
            environment=os.environ,
            secret="s",
        )
        self.code: int | None = None
        self.thread = threading.Thread(target=self._keep, args=(settings,))
        self.thread.start()

    def _keep(self, settings: KeeperSettings) -> None:
        self.code = rank_keeper.keep(settings, self.said.put, self.inbox)

    def hear(self, kind: type) -> Any:
        """The next report, which is of this kind. That a script is at its end is told besides."""
        while isinstance(said := self.said.get(timeout=120), msg.RanksLeft) and kind is not msg.RanksLeft:
            pass
        assert isinstance(said, kind), said
        return said

    def until(self, kind: type) -> Any:
        while not isinstance(said := self.said.get(timeout=120), kind):
            pass
        return said

    def order(self, kind: Any, life: int = 1, **fields: Any) -> None:
        given = {"task": "t", "worker": SENDER.worker, "incarnation": SENDER.incarnation, "life": life}
        self.inbox.put(kind(**given, because="", **fields))

    def begin(self, life: int = 1, address: tuple[str, int] = ("127.0.0.1", 1)) -> None:
        place = PLACE | {"restarts": life - 1}
        self.order(msg.BeginLife, life, master=address, hosts_store=False, **place)

    def file(self, rank: int, name: str = "stdout.log", attempt: int = 0) -> str:
        return (self.folder / "logs" / "run" / f"attempt_{attempt}" / str(rank) / name).read_text()

    def close(self) -> None:
        self.inbox.put(msg.EndWorker(gently=False))
        self.thread.join(60)
        assert not self.thread.is_alive()


Keep = Callable[..., Kept]


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Keep]:
    made: list[Kept] = []

    def make(script: str, **rules: Any) -> Kept:
        made.append(Kept(tmp_path, script, **rules))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_rank_is_told_from_another_in_top_and_ps(keep: Keep) -> None:
    """All were called as their fork server is, and forked, so that not even /proc/PID/environ said which."""
    kept = keep("print(open('/proc/self/comm').read().strip())")
    kept.hear(msg.RanksIdle)
    kept.begin()
    assert kept.until(msg.RanksIdle).codes == {2: 0, 3: 0}
    assert (kept.file(2), kept.file(3)) == ("rank 2\n", "rank 3\n")


def test_ranks_find_their_place_among_several_nodes(keep: Keep) -> None:
    kept = keep("print(*(os.environ[n] for n in sys.argv[1:]))", command=("script.py", *NAMES))
    idle = kept.hear(msg.RanksIdle)
    assert (idle.task, idle.worker, idle.incarnation, idle.life) == ("t", Worker(1, 0), 4, 0)
    kept.begin(address=("10.0.0.9", 1234))
    assert set(kept.hear(msg.RanksStarted).pids) == {2, 3}
    assert kept.hear(msg.RanksIdle).codes == {2: 0, 3: 0}
    assert kept.file(3).split() == ["3", "1", "1", "4", "2", "2", "10.0.0.9", "1234", "0"]


NAMES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
)


def test_a_failed_rank_is_told_once_and_the_others_wait_for_the_order_to_end(keep: Keep) -> None:
    kept = keep("if rank == 2: raise OSError('no disk')\ntime.sleep(120)")
    kept.hear(msg.RanksIdle)
    kept.begin()
    kept.hear(msg.RanksStarted)
    failed = kept.hear(msg.RankFailed)
    assert failed.what == "rank 2 raised OSError: no disk at script.py:3 in <module>"
    assert failed.source == "exception"
    kept.order(msg.EndLife, grace_s=30.0)
    idle = kept.hear(msg.RanksIdle)
    assert idle.codes == {2: 1, 3: -15}
    kept.begin(2)
    kept.until(msg.RankFailed)


def test_who_ignores_sigterm_is_killed_with_its_children_after_the_grace(keep: Keep, tmp_path: Path) -> None:
    kept = keep(
        "import subprocess\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '120'])\n"
        "open(f'{rank}.new', 'w').write(str(child.pid))\n"
        "os.rename(f'{rank}.new', f'{rank}.child')\n"
        "import everstep; everstep.progress(1)\n"
        "time.sleep(120)"
    )
    kept.hear(msg.RanksIdle)
    kept.begin()
    kept.until(msg.RankProgressed)
    until(lambda: all((tmp_path / f"{rank}.child").exists() for rank in (2, 3)))
    children = [int((tmp_path / f"{rank}.child").read_text()) for rank in (2, 3)]
    kept.order(msg.EndLife, grace_s=0.2)
    assert kept.until(msg.RanksIdle).codes == {2: -9, 3: -9}
    until(lambda: not any(lives(pid) for pid in children))


def test_progress_is_told_and_a_spinning_rank_is_still_once_steps_are_late(keep: Keep) -> None:
    kept = keep(
        "import everstep\nif rank == 3: everstep.progress(7, tokens=70, saved=True)\nwhile True: pass",
        hang_after_s=2.0,
    )
    kept.hear(msg.RanksIdle)
    kept.begin()
    kept.hear(msg.RanksStarted)
    told = kept.hear(msg.RankProgressed)
    assert (told.rank, told.step, told.tokens, told.is_saved) == (3, 7, 70, True)
    still = kept.hear(msg.RanksStill)
    assert still.still_s >= 2.0
    kept.order(msg.LocateRanks)
    located = kept.until(msg.RanksLocated)
    assert [(p.rank, p.at, p.is_inside_torch) for p in located.positions] == [
        (2, "script.py:5 in <module>", False),
        (3, "script.py:5 in <module>", False),
    ]
    assert [p.step for p in located.positions] == [None, 7]


def test_what_nccls_inspector_has_written_comes_with_the_positions(
    keep: Keep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of each process, in the folder that the script's environment gives; RAS is not there."""
    monkeypatch.setenv("NCCL_RAS_ADDR", "127.0.0.1:1")
    monkeypatch.setenv("NCCL_PROFILER_PLUGIN", "libnccl-profiler-inspector.so")
    monkeypatch.setenv("NCCL_INSPECTOR_ENABLE", "1")
    monkeypatch.setenv("NCCL_INSPECTOR_DUMP_DIR", "dumps")
    (tmp_path / "dumps").mkdir()
    perf = '"coll_sn": %d, "coll_exec_time_us": 5, "coll_timing_source": "kernel_gpu"'
    kept = keep(
        "import socket, everstep\n"
        f"perf = '{perf}' % (40 + rank)\n"
        'row = \'{"header": {"id": "0x1"}, "coll_perf": {"coll": "AllReduce", \' + perf + \'}}\'\n'
        "open(f'dumps/{socket.gethostname()}-pid{os.getpid()}.log', 'w').write(row)\n"
        "everstep.progress(1)\ntime.sleep(120)"
    )
    kept.hear(msg.RanksIdle)
    kept.begin()
    kept.until(msg.RankProgressed)
    until(lambda: len(list((tmp_path / "dumps").iterdir())) == 2)
    kept.order(msg.LocateRanks)
    positions = kept.until(msg.RanksLocated).positions
    assert [(p.rank, p.completed) for p in positions] == [
        (rank, {"NCCL communicator 0x1 (AllReduce)": 40 + rank}) for rank in (2, 3)
    ]
    assert [p.launched for p in positions] == [{}, {}]


def test_a_script_that_is_not_there_is_a_sentence(keep: Keep) -> None:
    kept = keep("", command=("absent.py",))
    kept.hear(msg.RanksIdle)
    kept.begin()
    failed = kept.hear(msg.RankFailed)
    assert failed.what == "rank 2 could not be started: script 'absent.py' is not a file on this node."
    assert failed.program_error
    assert kept.hear(msg.RanksIdle).codes == {2: 1, 3: 1}


def test_a_port_that_is_taken_is_a_sentence_and_the_keeper_stays(keep: Keep) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        kept = keep("", ranks=1, port=taken.getsockname()[1])
        assert kept.hear(msg.RanksIdle).address[1] == 0
        kept.order(msg.BeginLife, master=("127.0.0.1", 0), hosts_store=True, **PLACE)
        failed = kept.hear(msg.RankFailed)
        assert "cannot be used for the rendezvous of the ranks (Address already in use)" in failed.what
        assert failed.program_error
        kept.hear(msg.RanksIdle)


def test_a_program_that_is_no_python_is_run_as_it_is(keep: Keep) -> None:
    kept = keep("", command=("sh", "-c", "echo $RANK of $WORLD_SIZE; exit 3"), is_program=True)
    kept.hear(msg.RanksIdle)
    kept.begin()
    kept.hear(msg.RanksStarted)
    assert kept.hear(msg.RankFailed).what.endswith("exited with code 3")
    assert kept.until(msg.RanksIdle).codes == {2: 3, 3: 3}
    assert kept.file(3) == "3 of 4\n"


def test_a_module_that_cannot_be_preloaded_is_left_to_the_script(keep: Keep) -> None:
    kept = keep("print('ran')", preload=("no_such_module",), ranks=1)
    kept.hear(msg.RanksIdle)
    kept.begin()
    kept.hear(msg.RanksStarted)
    assert kept.hear(msg.RanksIdle).codes == {2: 0}
    assert kept.file(2) == "ran\n"


def test_output_without_a_newline_and_a_script_that_forks_leave_nothing_behind(keep: Keep) -> None:
    kept = keep(
        "if os.fork() == 0: time.sleep(120)\n"
        "for _ in range(200): sys.stdout.write('x' * 100_000)\n"
        "open('forked', 'w')",
        ranks=1,
    )
    kept.hear(msg.RanksIdle)
    kept.begin()
    pid = kept.hear(msg.RanksStarted).pids[2]
    assert kept.hear(msg.RanksIdle).codes == {2: 0}
    assert len(kept.file(2)) == 20_000_000
    until(lambda: not members_of_group(pid))


def members_of_group(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found
