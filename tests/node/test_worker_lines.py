"""The Unix socket that worker processes call: real sockets, processes of the test's own making."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.core.agent.agent_messages import ProcessEvent, ProcessGreeted, ProcessMisspoke, ProcessSpoke
from everstep.errors import named
from everstep.node import worker_lines
from everstep.node.worker_lines import WorkerLines
from everstep.protocol import messages as msg
from everstep.protocol.actions import InterruptWorkers
from everstep.protocol.codec import Unpacker, pack
from everstep.protocol.messages import EndWorker, WorkerHello, WorkerOrder
from everstep.protocol.ops import Worker

ME = msg.Sender("t", Worker(0, 0), 1)
HELLO = WorkerHello(task="t", worker=Worker(0, 0), incarnation=1, pid=7)
INTERRUPT = InterruptWorkers(workers=(Worker(0, 0),), epoch=1, because="so")
TIMES = msg.TimesReported(task="t", worker=Worker(0, 0), times={"F": 0.5})


class NoLoop:
    def watch(self, fd: int, ready: Callable[[], object]) -> None: ...

    def unwatch(self, fd: int) -> None: ...


class Agent:
    def __init__(self, folder: Path) -> None:
        self.events: list[ProcessEvent] = []
        self.lines = WorkerLines(
            NoLoop(), folder / "s", knows=lambda sender, pid: pid == 7, happened=self.events.append
        )
        self.lines.open()

    def called_by(self, *messages: bytes) -> socket.socket:
        caller = socket.socket(socket.AF_UNIX)
        caller.connect(str(self.lines.path))
        for message in messages:
            caller.sendall(message)
        self.lines.drain(ME)
        return caller


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path)
    yield made
    made.lines.close()


def test_what_a_process_says_is_heard_and_orders_reach_it(agent: Agent) -> None:
    caller = agent.called_by(pack(HELLO), pack(TIMES))
    assert agent.events == [ProcessGreeted(ME), ProcessSpoke(ME, TIMES)]
    agent.lines.send(ME, EndWorker(gently=True))
    assert list(Unpacker(WorkerOrder).feed(caller.recv(4096))) == [EndWorker(gently=True)]


def test_the_last_words_of_a_process_that_died_at_the_door_are_heard(agent: Agent) -> None:
    caller = socket.socket(socket.AF_UNIX)
    caller.connect(str(agent.lines.path))
    caller.sendall(pack(HELLO) + pack(TIMES))
    caller.close()
    agent.lines.drain(ME)
    assert agent.events == [ProcessGreeted(ME), ProcessSpoke(ME, TIMES)]


@pytest.mark.parametrize(
    "first",
    [
        pack(WorkerHello(task="t", worker=Worker(0, 0), incarnation=1, pid=8)),
        pack(WorkerHello(task="t", worker=Worker(0, 0), incarnation=1, pid=7, protocol=1)),
        pack(TIMES),
        b"\x05\x00\x00\x00hello",
        b"\xff\xff\xff\xff",
    ],
    ids=["another pid", "another protocol", "no hello", "no JSON", "too long"],
)
def test_a_stranger_is_hung_up_on(agent: Agent, first: bytes) -> None:
    caller = agent.called_by(first)
    assert agent.events == []
    assert caller.recv(1) == b""


def test_callers_that_say_nothing_keep_no_worker_out(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket is open to all users of the machine where workers run as several: who opened a thousand
    connections, and said nothing, kept every new worker of every owner from its agent.
    """
    monkeypatch.setattr(worker_lines, "MOST_UNGREETED", 4)
    silent = [agent.called_by() for _ in range(6)]
    assert [caller.recv(1) for caller in silent[:2]] == [b"", b""], "the oldest were hung up on"
    agent.called_by(pack(HELLO), pack(TIMES))
    assert agent.events == [ProcessGreeted(ME), ProcessSpoke(ME, TIMES)]
    for caller in silent:
        caller.close()


def test_a_hello_that_never_ends_is_hung_up_on(agent: Agent) -> None:
    caller = agent.called_by(b"\xff\xff\xff\x00")

    def goes_on() -> None:
        for _ in range(64):
            caller.sendall(b" " * 4000)
            agent.lines.drain(ME)

    with pytest.raises(BrokenPipeError):
        goes_on()


def test_a_second_caller_does_not_take_a_process_s_place(agent: Agent) -> None:
    first = agent.called_by(pack(HELLO))
    second = socket.socket(socket.AF_UNIX)
    second.connect(str(agent.lines.path))
    second.sendall(pack(HELLO) + pack(TIMES))
    agent.lines._accept()
    for fd in list(agent.lines._callers):
        agent.lines._greet(fd)
    assert agent.events == [ProcessGreeted(ME)]
    assert second.recv(1) == b""
    first.close()


def test_a_process_that_says_what_is_no_report_is_told_of(agent: Agent) -> None:
    agent.called_by(pack(HELLO), b"\x02\x00\x00\x00[]")
    assert isinstance(agent.events[-1], ProcessMisspoke)
    assert "not a report" in agent.events[-1].because


def test_orders_that_a_process_never_reads_are_bounded(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_lines, "MOST_UNSENT", 1 << 20)
    caller = agent.called_by(pack(HELLO))
    order = msg.NotifyWorker(
        task="t" * 100_000, worker=Worker(0, 0), words=INTERRUPT, book=((Worker(0, 0), "h", 1),)
    )
    for _ in range(40):
        agent.lines.send(ME, order)
        assert len(agent.lines._lines[ME].unsent) <= 1 << 20
    assert isinstance(agent.events[-1], ProcessMisspoke)
    assert "does not read" in agent.events[-1].because
    caller.close()


def test_an_exception_without_a_text_has_its_type() -> None:
    """Its report failed as well: two workers that raised it had no exception in common."""

    class Unprintable(Exception):
        def __str__(self) -> str:
            raise ValueError("no")

    assert named(Unprintable()) == "Unprintable: (its text cannot be shown: ValueError)"
    assert named(KeyError("x")) == "KeyError: 'x'"
