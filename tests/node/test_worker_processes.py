"""A node's worker processes, real ones: started, spoken to, killed, replaced; no coordinator."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everstep.core.agent.processes import NodeProcesses
from everstep.core.faults.detector import DetectorLimits
from everstep.engine.telemetry.beacon import Beacon
from everstep.job.job import DataSpec, Job, ModelSpec
from everstep.node.fork_server import ForkServer, ForkServerDied
from everstep.node.lifeline import Bell
from everstep.node.slot_devices import NodeDevices, SlotDevice
from everstep.node.worker_processes import Glances, NodeSettings, WorkerProcesses
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.actions import InterruptWorkers
from everstep.protocol.messages import TaskNeeds
from everstep.protocol.ops import Worker

JOB = Job(
    model=ModelSpec(preset="gpt-tiny"),
    data=DataSpec(kind="synthetic", rows=1, sequence=16),
    steps=3,
    replicas=1,
    stages=1,
    microbatches=1,
)
A = Worker(0, 0)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """One that may be killed, and is replaced: without what only a worker's first update needs."""
    running = ForkServer()
    running._always = tuple(name for name in running._always if name != "torch._dynamo")
    running.start()
    yield running
    running.close()


class SelectorLoop:
    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()

    def watch(self, fd: int, ready: Callable[[], object]) -> None:
        self.selector.register(fd, selectors.EVENT_READ, ready)

    def unwatch(self, fd: int) -> None:
        self.selector.unregister(fd)


class Node:
    def __init__(self, folder: Path, server: ForkServer) -> None:
        self.loop = SelectorLoop()
        self.reports: list[Any] = []
        self.workers = WorkerProcesses(
            NodeSettings(folder=folder),
            loop=self.loop,
            machine=NodeProcesses(DetectorLimits()),
            report=lambda report, sender: self.reports.append(report),
            fork_server=lambda needs: server,
        )
        self.workers.open()
        self.open(JOB.to_dict(), needs=JOB.needs())

    def open(self, job: dict[str, Any], needs: TaskNeeds | None = None) -> None:
        order = msg.OpenTask(task="t", job=job, secret="00" * 32, shape=JOB.task_shape(), needs=needs)
        self.workers.carry_out(order)

    def start(self, incarnation: int, slot: int = 0) -> None:
        order = msg.StartProcess(task="t", worker=A, incarnation=incarnation, slot=slot)
        self.workers.carry_out(order)

    def kill(self, incarnation: int) -> None:
        self.workers.carry_out(msg.KillProcess(task="t", worker=A, incarnation=incarnation))

    def events(self, kind: type) -> list[Any]:
        return [r.event for r in self.reports if isinstance(r, msg.TaskEvent) and isinstance(r.event, kind)]

    def until(self, holds: Callable[[], Any], within_s: float = 300.0) -> None:
        end = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < end, f"in vain: {self.reports}"
            self.turn()

    def turn(self) -> None:
        for key, _ in self.loop.selector.select(0.02):
            if self.loop.selector.get_map().get(key.fd) is key:
                key.data()
        self.workers.tick(time.monotonic())
        self.workers.machine.validate()

    def is_up(self, incarnation: int) -> bool:
        return incarnation in [event.incarnation for event in self.events(ev.WorkerStarted)]

    @property
    def pid(self) -> int:
        return self.workers.processes["t", A].child.pid


@pytest.fixture
def node(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Iterator[Node]:
    made = Node(tmp_path_factory.mktemp("n"), server)
    yield made
    made.workers.close()


def test_a_start_waits_for_the_death_of_the_process_before_it(node: Node) -> None:
    node.start(1)
    node.until(lambda: node.is_up(1))
    first = node.pid
    node.kill(1)
    node.start(2)
    node.until(lambda: node.is_up(2))
    (exited,) = node.events(ev.WorkerExited)
    assert (exited.incarnation, exited.reason) == (1, "killed by SIGKILL")
    assert node.pid != first
    assert not Path(f"/proc/{first}").exists(), "the new process came before the old one was gone"


def test_files_of_a_process_go_with_it(node: Node) -> None:
    """266 KB of every process that ever ran here stayed until the agent ended."""
    folder = node.workers.settings.folder
    node.start(1)
    node.until(lambda: node.is_up(1))
    assert [path.name for path in sorted(folder.glob("beacon-*"))][:2] == [
        "beacon-t-0-0-1",
        "beacon-t-0-0-1.life",
    ]
    node.kill(1)
    node.until(lambda: not list(folder.glob("beacon-*")))


def test_it_is_known_which_task_has_which_slots(node: Node) -> None:
    assert node.workers.tasks_by_slot() == {}
    node.start(1)
    node.until(lambda: node.is_up(1))
    assert node.workers.tasks_by_slot() == {0: {"t"}}
    node.kill(1)
    node.until(lambda: node.events(ev.WorkerExited))
    assert node.workers.tasks_by_slot() == {}


def test_a_worker_gets_the_devices_of_its_node_or_is_not_started(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an empty answer of nvidia-smi every worker of the node ran on GPU 0."""
    asked: list[dict[str, Any]] = []

    def spawn(server: ForkServer, spec: dict[str, Any], *, output: Path) -> Any:
        asked.append(spec)
        raise OSError("no process is wanted here")

    monkeypatch.setattr(ForkServer, "warm_up", lambda server: None)
    monkeypatch.setattr(ForkServer, "spawn", spawn)
    node.workers.settings = replace(node.workers.settings, slots=2)
    job = replace(JOB, device="cuda")
    node.open(job.to_dict(), needs=job.needs())
    node.workers.devices = NodeDevices(lambda: ())
    node.start(1)
    node.workers.devices = NodeDevices(lambda: (SlotDevice("GPU-6", "00:6", "GPU-6"), SlotDevice("GPU-7")))
    node.start(2)
    refused, spawned = (event.reason for event in node.events(ev.WorkerExited))
    assert refused.startswith("could not be started: device")
    assert "nvidia-smi shows no GPU for 2 slots" in refused
    assert spawned == "could not be started: OSError: no process is wanted here"
    assert [[uuid for uuid, *_ in spec["devices"]] for spec in asked] == [["GPU-6", "GPU-7"]]


def test_a_dead_fork_server_is_replaced(node: Node, server: ForkServer) -> None:
    """Before, no worker could be started on the node again, and the reason given was another one."""
    node.start(1)
    node.until(lambda: node.is_up(1))
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(ForkServerDied, match="was killed by SIGKILL"):
        server.warm_up()
    os.kill(node.pid, 0)  # its workers live on
    node.kill(1)
    node.until(lambda: node.events(ev.WorkerExited))
    node.start(2)
    node.until(lambda: node.is_up(2))
    assert len(node.events(ev.WorkerExited)) == 1


def test_a_fork_server_that_does_not_answer_is_replaced(
    node: Node, server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped one held up the whole agent, heartbeats and all, for ever."""
    node.start(1)
    node.until(lambda: node.is_up(1))
    node.kill(1)
    node.until(lambda: node.events(ev.WorkerExited))
    os.kill(server.pid, signal.SIGSTOP)
    patience, replace, number = server.answer_s, server.replace, server.number

    def replace_and_wait_as_usual() -> None:
        server.answer_s = patience
        replace()

    monkeypatch.setattr(server, "replace", replace_and_wait_as_usual)
    server.answer_s = 0.2
    node.start(2)
    node.until(lambda: node.is_up(2))
    assert server.number == number + 1
    assert len(node.events(ev.WorkerExited)) == 1


def test_a_worker_is_passed_over_while_it_moves_and_looked_at_closely_when_it_does_not(
    tmp_path: Path,
) -> None:
    """Stopped, in another step, silent for long, or not looked at for long: a close look."""
    child = subprocess.Popen(["sleep", "60"])
    try:
        beacon = Beacon(tmp_path / "beacon", create=True)
        machine = NodeProcesses(DetectorLimits())
        glances = Glances(msg.Sender("t", A, 1), child.pid, beacon)

        def moves(at: float, step: int = 1) -> None:
            beacon.write(at_ns=int(at * 1e9), epoch=1, step=step, done=0, num_ops=1, busy=True, doing="0F0.0")

        def passed(now: float) -> bool:
            return glances.passes_over(machine.limits.look_s, now)

        assert not passed(10.0), "nothing is written yet"
        moves(10.0)
        assert not passed(10.0), "nobody has looked"
        assert glances.look(machine.curious, 10.01) is not None
        assert passed(10.03)
        assert passed(10.09), "not stopped, says the kernel"
        assert not passed(10.105), "too old"
        moves(10.095)
        assert passed(10.1)
        assert not passed(10.115), "too long without a close look"
        assert glances.look(machine.curious, 10.12) is not None
        moves(10.12, step=2)
        assert not passed(10.13), "how long a step takes is learned from looks"
        assert glances.look(machine.curious, 10.13) is not None
        assert passed(10.17)
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert not passed(10.17)
        found = glances.look(machine.curious, 10.17)
        assert found is not None
        assert found.stopped
        of_two = Glances(msg.Sender("t", A, 1), child.pid, beacon, shards=2)
        assert of_two.look(machine.curious, 10.13) is not None
        assert not of_two.passes_over(machine.limits.look_s, 10.14)
    finally:
        child.kill()
        child.wait()


def test_a_death_after_the_end_of_its_node_is_not_written_into_another_file() -> None:
    """A lifeline's thread outlives the node: the number of the bell was a pipe's by then."""
    bell = Bell()
    bell.close()
    others = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        os.dup2(others, bell.fd)
        bell.ring("a death")
        with pytest.raises(BlockingIOError):
            os.eventfd_read(others)
    finally:
        if bell.fd != others:
            os.close(bell.fd)
        os.close(others)


def test_a_worker_that_is_stopped_and_does_not_read_holds_up_nobody(node: Node) -> None:
    node.start(1)
    node.until(lambda: node.is_up(1))
    os.kill(node.pid, signal.SIGSTOP)
    words = InterruptWorkers(workers=(A,), epoch=1, because="x" * 100_000)
    began = time.monotonic()
    for _ in range(20):  # ten times what a socket's buffer holds
        node.workers.carry_out(msg.NotifyWorker(task="t", worker=A, words=words))
    assert time.monotonic() - began < 5.0
    os.kill(node.pid, signal.SIGCONT)
    node.until(lambda: len(node.events(ev.LedgerReported)) == 20)


def test_a_task_is_closed_in_good_order(node: Node) -> None:
    node.start(1)
    node.until(lambda: node.is_up(1))
    node.workers.carry_out(msg.CloseTask(task="t", gently=True))
    node.until(lambda: node.events(ev.WorkerExited))
    assert node.events(ev.WorkerExited)[0].reason == "exited with code 0"


def test_a_job_that_its_worker_cannot_read_is_said_in_words(node: Node) -> None:
    """The agent hands the job on; the worker reads it."""
    node.open({"model": {"preset": "none"}}, needs=JOB.needs())
    node.start(1)
    node.until(lambda: node.events(ev.WorkerExited))
    (raised,) = node.events(ev.WorkerRaised)
    assert raised.error.startswith("UserError: model preset 'none'")
