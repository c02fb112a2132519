"""What one agent leaves to the next: the record, the lines of workers, a fork server with its children."""

from __future__ import annotations

import json
import os
import queue
import select
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.core.agent.agent_messages import ProcessEvent, ProcessSpoke
from everstep.core.agent.reports import KeptReport
from everstep.errors import UserError
from everstep.job.worker_spec import WorkerSpec
from everstep.node import agent_record, worker_processes
from everstep.node import fork_server as module
from everstep.node.agent_record import AgentRecord, Left, held, line_row, report_row
from everstep.node.fork_server import InheritedServer
from everstep.node.line_to_agent import call_agent
from everstep.node.worker_lines import WorkerLines
from everstep.procfs import born, end_leftovers
from everstep.protocol import messages as msg
from everstep.protocol.messages import EndWorker, PlantFaults, Sender
from everstep.protocol.ops import Worker
from tests.support.processes import until

ME = Sender("t", Worker(0, 0), 1)


# ------------------------------------------------------------------ lines


class Polled:
    """A loop that turns when it is asked to."""

    def __init__(self) -> None:
        self.ready: dict[int, Callable[[], object]] = {}

    def watch(self, fd: int, ready: Callable[[], object]) -> None:
        self.ready[fd] = ready

    def unwatch(self, fd: int) -> None:
        self.ready.pop(fd, None)

    def turn(self) -> None:
        for fd in select.select(list(self.ready), [], [], 0.01)[0]:
            if fd in self.ready:
                self.ready[fd]()


class OneAgent:
    """Its lines, and a record of them. `die` leaves what a SIGKILL leaves."""

    def __init__(self, folder: Path, heard: list[int], *, knows: bool = True) -> None:
        self.loop, self.heard, self.record = Polled(), heard, AgentRecord(folder)
        self.lines = WorkerLines(
            self.loop,
            folder / "agent",
            knows=lambda sender, pid: knows and pid == os.getpid(),
            happened=self._happened,
            keeps=True,
            on_record=self.commit,
        )
        (folder / "agent").unlink(missing_ok=True)
        if (left := self.record.read()) is not None:
            self.lines.counts.update(left.counts)
        rows = [line_row(sender, one, list(one.kept)) for sender, one in self.lines.counts.items()]
        self.record.rewrite({"image": {"any": 1}, "lines": rows})
        self.lines.open()

    def _happened(self, event: ProcessEvent) -> None:
        if isinstance(event, ProcessSpoke):
            assert isinstance(event.report, msg.SaveFailed)
            self.heard.append(event.report.step)

    def commit(self) -> None:
        if news := self.lines.news():
            self.record.append({"lines": [line_row(sender, *one) for sender, one in news.items()]})

    def turn(self) -> None:
        self.loop.turn()
        self.lines.flush()

    def die(self) -> None:
        """Whatever it has decided is on record, since it was heard; its sockets are closed by the system."""
        self.commit()
        self.lines.close()


def spec(folder: Path, alone_s: float = 60.0) -> WorkerSpec:
    return WorkerSpec(
        sender=ME,
        job={},
        secret="",
        node="a",
        host="127.0.0.1",
        slots=(0,),
        slots_on_node=1,
        agent=str(folder / "agent"),
        alone_s=alone_s,
        memory="",
    )


def failed(step: int) -> msg.SaveFailed:
    return msg.SaveFailed(task="t", step=step, attempt=1, because="so")


def test_reports_and_orders_are_heard_once_by_whichever_agent_there_is(tmp_path: Path) -> None:
    heard: list[int] = []
    orders = queue.SimpleQueue[Any]()
    agent = OneAgent(tmp_path, heard)
    line = call_agent(spec(tmp_path))
    line.listen(orders)
    said = ordered = 0
    for turn in range(8):
        for _ in range(5):
            line.say(failed(said))
            said += 1
        until(
            lambda agent=agent, turn=turn: agent.turn() or len(heard) > 5 * turn, "it hears the first of them"
        )
        for _ in range(3):
            agent.lines.send(ME, PlantFaults(faults=(str(ordered),)))
            ordered += 1
        if turn % 2:
            agent.lines.flush()  # else it dies before they are sent
        agent.die()
        line.say(failed(said))  # to nobody
        said += 1
        agent = OneAgent(tmp_path, heard)
    until(lambda: agent.turn() or len(heard) == said, f"{said} reports are heard, not {len(heard)}")
    agent.lines.acknowledge(time.monotonic())
    finishing = threading.Thread(target=line.finish)
    finishing.start()
    until(lambda: agent.turn() or not finishing.is_alive(), "its last words are on record")
    assert heard == list(range(said)), "in order, none lost, none doubled"
    taken = [orders.get(timeout=20) for _ in range(ordered)]
    assert taken == [PlantFaults(faults=(str(number),)) for number in range(ordered)]
    agent.die()


def test_a_worker_that_nobody_knows_is_told_to_end(tmp_path: Path) -> None:
    heard: list[int] = []
    orders = queue.SimpleQueue[Any]()
    agent = OneAgent(tmp_path, heard)
    line = call_agent(spec(tmp_path))
    line.listen(orders)
    until(lambda: agent.turn() or ME in agent.lines.counts, "it calls")
    agent.die()
    stranger = OneAgent(tmp_path, heard, knows=False)
    until(lambda: stranger.turn() or not orders.empty(), "it is told")
    assert orders.get() == EndWorker(gently=False)
    stranger.die()


def test_a_worker_without_an_agent_ends_itself(tmp_path: Path) -> None:
    orders = queue.SimpleQueue[Any]()
    agent = OneAgent(tmp_path, [])
    line = call_agent(spec(tmp_path, alone_s=0.3))
    line.listen(orders)
    agent.die()
    assert orders.get(timeout=30) == EndWorker(gently=False)


# ------------------------------------------------------------------ the record


def test_a_record_ends_with_its_last_whole_line(tmp_path: Path) -> None:
    record = AgentRecord(tmp_path)
    record.rewrite({"boot": "b", "image": {"done": 1}})
    record.append({"image": {"done": 2}, "reports": [report_row(KeptReport(1, failed(7), ME))], "number": 1})
    record.append({"kept": 1})
    record.append({"image": {"done": 3}})
    path = tmp_path / "record"
    path.write_bytes(path.read_bytes() + b'{"image": {"done": 4')
    left = AgentRecord(tmp_path).read()
    assert isinstance(left, Left)
    assert (left.boot, left.image, left.reports, left.number) == ("b", {"done": 3}, {}, 1)


def test_a_record_of_another_start_of_the_machine_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AgentRecord(tmp_path).rewrite({"boot": "b", "image": {"done": 1}})
    monkeypatch.setattr(agent_record, "_boot_id", lambda: "after a power cut")
    assert AgentRecord(tmp_path).read() is None


def test_workers_that_speak_another_protocol_are_not_taken_over(tmp_path: Path) -> None:
    """Said before the agent that has them is told to leave."""
    state = tmp_path / "state"
    with held(state, replace=False):
        record = AgentRecord(state)
        record.rewrite({"boot": "b", "image": {"done": 1}, "protocol": 3})
        with pytest.raises(UserError, match="spoke protocol 3, and this one speaks 4: end their tasks"):  # noqa: SIM117
            with held(state, replace=True):
                pass


def test_a_folder_has_one_agent(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with held(folder, replace=False):
        assert folder.stat().st_mode & 0o777 == 0o700
        with pytest.raises(UserError, match=rf"the agent with pid {os.getpid()}; give --replace"):  # noqa: SIM117
            with held(folder, replace=False):
                pass
    with pytest.raises(UserError, match="shorter path"), held(tmp_path / ("x" * 90), replace=False):
        pass


def test_an_agent_that_is_told_leaves_its_folder(tmp_path: Path) -> None:
    program = (
        "import signal, sys; from pathlib import Path; from everstep.node.agent_record import held\n"
        "def leave(*_): raise SystemExit\n"
        "signal.signal(signal.SIGUSR2, leave)\n"
        "with held(Path(sys.argv[1]), replace=False): print('held', flush=True); signal.pause()"
    )
    old = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "s")], stdout=subprocess.PIPE)
    assert old.stdout is not None
    assert old.stdout.readline() == b"held\n"
    with held(tmp_path / "s", replace=True):
        assert old.wait(20) == 0


# ------------------------------------------------------------------ fork servers, and processes without one


SERVER = """
import os, sys, time
from everstep.node import fork_server as module
def live(spec, output):
    os.setsid()
    if (grandchild := os.fork()) == 0:
        time.sleep(600)
        os._exit(0)
    with open(output, "w") as file: file.write(str(grandchild))
    if spec["waits"]: time.sleep(600)
    os._exit(7)
module._live = live
module.serve(int(sys.argv[1]), [], [], float(sys.argv[2]))
"""


def serving(folder: Path, *, alone_s: float, waits: bool) -> tuple[subprocess.Popen[bytes], int]:
    """A fork server whose owner is gone before it has read the answer, and what its child has started."""
    owner, door = module.Lasting(folder=folder, alone_s=alone_s).sockets()
    command = [sys.executable, "-c", SERVER, str(door.fileno()), str(alone_s)]
    server = subprocess.Popen(command, pass_fds=[door.fileno()])
    door.close()
    spawn = {"sender": ["t", "0:0", 1], "waits": waits}
    owner.send(json.dumps({"spawn": spawn, "output": str(folder / "out")}).encode())
    until(lambda: (folder / "out").exists() and (folder / "out").read_text(), "the child has run")
    owner.close()
    return server, int((folder / "out").read_text())


def test_the_next_owner_learns_how_a_child_ended_and_what_it_left_ends(tmp_path: Path) -> None:
    server, grandchild = serving(tmp_path, alone_s=60.0, waits=False)
    (path,) = tmp_path.glob("fork-*")
    inherited = InheritedServer(path)
    assert inherited.ask()
    assert inherited.answers()
    ((known, pid),) = inherited.children.items()
    assert known == ME
    pidfd = os.pidfd_open(pid)
    assert select.select([pidfd], [], [], 20)[0], "it is dead"
    assert module.exit_reason(pid) == "exited with code 7"
    watched = os.pidfd_open(grandchild)
    inherited.reap(module.ForkedProcess(pid, pidfd, 0, born(pid)))
    assert select.select([watched], [], [], 20)[0], "what the child had started has ended"
    assert server.wait(20) == 0, "without children it ends"
    assert not path.exists()


def test_a_fork_server_that_nobody_comes_for_ends_its_children(tmp_path: Path) -> None:
    server, grandchild = serving(tmp_path, alone_s=0.5, waits=True)
    watched = os.pidfd_open(grandchild)
    assert server.wait(20) == 0
    assert select.select([watched], [], [], 20)[0]
    (path,) = tmp_path.glob("fork-*")
    assert not InheritedServer(path).ask(), "and the next one is told so"


def test_a_number_that_another_process_has_now_is_not_taken_for_the_worker() -> None:
    assert worker_processes._pidfd(os.getpid(), born(os.getpid()) - 1) is None
    found = worker_processes._pidfd(os.getpid(), born(os.getpid()))
    assert found is not None
    os.close(found)


def test_what_a_dead_session_leader_left_is_ended_and_nothing_else() -> None:
    program = "import os, subprocess; print(subprocess.Popen(['sleep', '600']).pid, os.getpid(), flush=True)"
    leader = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    assert leader.stdout is not None
    left, pid = map(int, leader.stdout.readline().split())
    started = born(left)
    leader.wait(20)
    watched = os.pidfd_open(left)
    end_leftovers(pid, started + 1_000_000)
    assert not select.select([watched], [], [], 0)[0], "it is older than that process was"
    end_leftovers(pid, started - 1)
    assert select.select([watched], [], [], 20)[0]


def test_a_folder_that_others_use_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    """Given /tmp, an agent of root closed it to everybody, and took files of others for its own."""
    shared, full = tmp_path / "shared", tmp_path / "full"
    shared.mkdir()
    shared.chmod(0o1777)
    full.mkdir(mode=0o700)
    (full / "beacon-notes").write_text("mine")
    with pytest.raises(UserError, match="open to other users"), held(shared, replace=False):
        pass
    assert shared.stat().st_mode & 0o7777 == 0o1777
    with pytest.raises(UserError, match="holds other files"), held(full, replace=False):
        pass
    assert [path.name for path in full.iterdir()] == ["beacon-notes"]
    for _ in range(2):  # its own folder, made and then found
        with held(tmp_path / "own", replace=False):
            pass


def place(thread: threading.Thread) -> str:
    assert thread.ident is not None
    return traceback.extract_stack(sys._current_frames()[thread.ident])[-1].line or ""


@pytest.mark.parametrize("how", ["close", "let_go"])
def test_a_fork_server_that_does_not_answer_yet_does_not_hold_up_the_end_of_its_agent(
    how: str, tmp_path: Path
) -> None:
    """An agent that had taken over waited two minutes in this thread, and systemd killed it after 30 s."""
    path = tmp_path / "server"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(path))
        silent.listen()
        inherited, answers = InheritedServer(path), list[bool]()
        assert inherited.ask()
        waiting = threading.Thread(target=lambda: answers.append(inherited.answers(60.0)), daemon=True)
        waiting.start()
        until(lambda: "recv" in place(waiting), "it waits")
        getattr(inherited, how)()
        waiting.join(5.0)
        assert not waiting.is_alive()
    assert len(answers) == 1
