"""A whole task on this machine: nursery, workers, recovery, log and checkpoints in one process tree, no
second shell.

One thread, one selector. Workers' exits come from pidfds, their words from Unix sockets; both become events
for `core.recovery`, whose actions are carried out here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.core import actions as act
from everstep.core import events as ev
from everstep.core.ops import Kind, Worker, parse_worker
from everstep.core.recovery import Recovery
from everstep.core.standing import Policy, Running
from everstep.core.survey import Shape
from everstep.engine.beacon import Beacon, Reading
from everstep.engine.faults import Fault
from everstep.engine.job import Job
from everstep.launch.outcome import Outcome, StepLog
from everstep.node import wire
from everstep.node.checkpoints import Checkpoints
from everstep.node.nursery import Child, Nursery, exit_reason
from everstep.schedule.answer import answer
from everstep.schedule.cache import PlanCache
from everstep.schedule.profile import Profile

PROFILE_STEPS = 3  # after these the schedule is made again, with measured times
PROFILE_EVERY = 20
Watcher = Callable[[str, Any], None]  # ("step" | "incident" | "action" | "worker" | "tick", what)


@dataclass(slots=True)
class _Process:
    worker: Worker
    incarnation: int
    child: Child
    beacon: Beacon
    line: socket.socket | None = None
    address: list[Any] | None = None
    unpacker: wire.Unpacker = field(default_factory=wire.Unpacker)
    raised: str | None = None


class LocalTask:
    """Runs one job to its end. `run` blocks; `watch` is told what happens meanwhile."""

    def __init__(
        self,
        job: Job,
        *,
        nursery: Nursery,
        faults: tuple[Fault, ...] = (),
        policy: Policy | None = None,
        watch: Watcher = lambda kind, what: None,
        script: list[str] | None = None,
        tick_s: float = 0.1,
    ) -> None:
        self.job, self.nursery, self.faults, self.watch, self.script = job, nursery, faults, watch, script
        self.policy = policy or Policy()
        self.tick_s = tick_s
        self.shape = Shape(job.replicas, job.stages, job.microbatches)
        self.profile = Profile(self.shape)
        self.outcome = Outcome()
        self.checkpoints = Checkpoints(job)
        self._mode = "decoupled" if job.optimizer.stagger == "never" else "staggered"
        self._plans: PlanCache | None = None
        self._gone: frozenset[Worker] = frozenset()
        self._all_ready = False
        self.processes: dict[Worker, _Process] = {}
        self._selector = selectors.DefaultSelector()
        self._token = secrets.token_hex(32)
        self._over = False
        self._killed_at: dict[Worker, float] = {}
        self._last_step_at = 0.0
        self._log: StepLog | None = None

    # -------------------------------------------------------------- life

    def run(self) -> Outcome:
        first = self.checkpoints.newest() + 1
        self.outcome.resumed_from, self.outcome.refused_checkpoints = first - 1, self.checkpoints.refused
        self.recovery = Recovery(self.shape, steps=self.job.steps, policy=self.policy, first_step=first)
        if first > self.job.steps:
            return self.outcome
        with tempfile.TemporaryDirectory(prefix="everstep-") as name:
            self._dir = Path(name)
            try:
                self._open()
                self._perform(self.recovery.begin())
                while not self._over:
                    self._turn()
            finally:
                self._close()
        self.outcome.incidents = self.recovery.incidents
        self.outcome.issued = (self.recovery.recorded - first + 1) * self.job.microbatches_in_step
        return self.outcome

    def kill(self, worker: Worker) -> None:
        """SIGKILL, and remember when."""
        self._killed_at[worker] = time.monotonic()
        os.kill(self.processes[worker].child.pid, signal.SIGKILL)

    def finish(self, because: str) -> None:
        """End the task now, in good order, before its last step."""
        self.watch("action", act.FinishTask(because=because))
        self._over = True

    def words(self, worker: Worker) -> Path:
        """The file with what a worker printed; kept where the job has a log folder."""
        folder = self._dir if self.job.log is None else self.job.path(self.job.log)
        return folder / f"worker-{worker.replica}-{worker.stage}.log"

    def readings(self) -> dict[Worker, Reading | None]:
        """What every live worker is doing right now."""
        return {worker: process.beacon.read() for worker, process in self.processes.items()}

    def _open(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._dir / "agent"))
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        if self.job.log is not None:
            self._log = StepLog(self.job.path(self.job.log))

    def _close(self) -> None:
        if self._over and self.outcome.failure is None:
            self._end_workers("finish", 5.0)
        self._over = True  # also when it ends early, by Ctrl-C: what stops now is no incident
        self._end_workers("stop", 20.0)
        for process in list(self.processes.values()):
            os.kill(process.child.pid, signal.SIGKILL)
            self._bury(process)
        self._listener.close()
        self._selector.close()
        if self._log is not None:
            self._log.close()

    def _end_workers(self, kind: str, within_s: float) -> None:
        for process in list(self.processes.values()):
            self._tell(process, {"kind": kind})
        deadline = time.monotonic() + within_s
        while self.processes and time.monotonic() < deadline:
            self._turn()

    def _turn(self) -> None:
        if not self._serve(self.tick_s):
            self._think_ahead()
        self.watch("tick", self)

    def _serve(self, within_s: float) -> bool:
        """Handle what is ready. A handler may serve others too, so an event can be stale: nothing blocks."""
        ready = self._selector.select(within_s)
        for key, _ in ready:
            now = self._selector.get_map().get(key.fd)
            if now is not None:
                with contextlib.suppress(BlockingIOError):
                    now.data(now.fileobj)
        return bool(ready)

    # -------------------------------------------------------------- events

    def _hear(self, event: ev.Event) -> None:
        if not self._over:
            self._perform(self.recovery.handle(event, time.monotonic()))

    def _accept(self, listener: Any) -> None:
        """A process calls. Its first words say which one it is."""
        sock, _ = listener.accept()
        sock.setblocking(True)
        unpacker = wire.Unpacker()

        def greet(sock: Any) -> None:
            data = sock.recv(1 << 12, socket.MSG_DONTWAIT)
            hello = next(unpacker.feed(data), None)
            process = None if hello is None else self.processes.get(parse_worker(hello["worker"]))
            if process is not None and hello is not None and process.child.pid == hello["pid"]:
                process.line, process.unpacker = sock, unpacker
                self._selector.modify(sock, selectors.EVENT_READ, lambda _: self._listen(process))
                self._heard(process, b"")
            elif hello is not None or not data:
                self._selector.unregister(sock)
                sock.close()

        self._selector.register(sock, selectors.EVENT_READ, greet)

    def _listen(self, process: _Process) -> None:
        assert process.line is not None
        try:
            data = process.line.recv(1 << 20, socket.MSG_DONTWAIT)
        except ConnectionResetError:
            data = b""
        if not data:
            self._selector.unregister(process.line)
            process.line.close()
            process.line = None
            return
        self._heard(process, data)

    def _heard(self, process: _Process, data: bytes) -> None:
        for message in process.unpacker.feed(data):
            self._said(process, message)

    def _said(self, process: _Process, said: Mapping[str, Any]) -> None:
        worker = process.worker
        match said["kind"]:
            case "started":
                process.address = said["address"]
                self._hear(ev.WorkerStarted(worker=worker, incarnation=process.incarnation))
            case "ledger":
                self._hear(
                    ev.LedgerReported(
                        worker=worker, epoch=said["epoch"], ledger=wire.ledger_in(said["ledger"])
                    )
                )
            case "sealed":
                self._hear(
                    ev.StepSealed(
                        step=said["step"],
                        stage=worker.stage,
                        microbatches=said["microbatches"],
                        executed=said["executed"],
                        losses=wire.losses_in(said["losses"]),
                        sum_of_squares=said["sum_of_squares"],
                    )
                )
            case "times":
                self.profile.learn(worker, {Kind(k): v for k, v in said["times"].items()})
            case "invalid":
                self._hear(
                    ev.UpdateInvalidated(
                        worker=worker, step=said["step"], norm=said["norm"], attempt=said["attempt"]
                    )
                )
            case "copied":
                self._hear(
                    ev.StateCopied(
                        worker=worker, incarnation=process.incarnation, state_step=said["state_step"]
                    )
                )
            case "resumed":
                self._hear(ev.WorkerResumed(worker=worker, epoch=said["epoch"], at=said["at_ns"] / 1e9))
            case "saved":
                self.checkpoints.part_written(said["step"], said["part"])
                self._commit_checkpoints()
            case "raised":
                process.raised = f"raised {said['error']}"
                self.watch("raised", (worker, said["error"], said["traceback"]))
                self._hear(
                    ev.WorkerRaised(
                        worker=worker,
                        incarnation=process.incarnation,
                        error=said["error"],
                        where=said["where"],
                    )
                )

    def _exited(self, process: _Process) -> None:
        """A pidfd is readable: the process is gone. Hear its last words first."""
        if process.line is None:
            self._selector.unregister(process.child.pidfd)
            for _ in range(3):  # it may have died at the door: accept, greet, listen
                self._serve(0)
            self._selector.register(
                process.child.pidfd, selectors.EVENT_READ, lambda _: self._exited(process)
            )
        with contextlib.suppress(BlockingIOError):
            while process.line is not None:
                self._listen(process)
        reading = process.beacon.read()
        reason = process.raised or exit_reason(process.child.pid)
        self._bury(process)
        if reading is not None and reading.doing.startswith("dies at"):
            self._killed_at.setdefault(process.worker, reading.at_ns / 1e9)
        self._hear(
            ev.WorkerExited(
                worker=process.worker,
                incarnation=process.incarnation,
                reason=reason,
                done_ops=reading.done if reading is not None else 0,
            )
        )

    def _bury(self, process: _Process) -> None:
        self._selector.unregister(process.child.pidfd)
        self.nursery.reap(process.child)
        if process.line is not None:
            self._selector.unregister(process.line)
            process.line.close()
        process.beacon.close()
        del self.processes[process.worker]

    # -------------------------------------------------------------- actions

    def _perform(self, actions: list[act.Action]) -> None:
        for action in actions:
            if not isinstance(action, act.RecordStep):
                self.watch("action", action)
            match action:
                case act.StartWorker():
                    self._start(action)
                case act.InterruptWorkers():
                    for worker in action.workers:
                        self._order(worker, {"kind": "interrupt", "epoch": action.epoch})
                case act.ComputePlan():
                    self._hear(self._planned(action))
                case act.ResumeStep():
                    self._last_step_at = self._last_step_at or time.monotonic()
                    self._order(
                        action.worker,
                        {"kind": "resume", "order": wire.resume_out(action.order), "book": self._book()},
                    )
                case act.CopyState():
                    joiner = self.processes.get(action.joiner)
                    if joiner is not None:
                        self._order(
                            action.source,
                            {"kind": "copy", "joiner": action.joiner.replica, "address": joiner.address},
                        )
                case act.StopFeeding():
                    self._order(action.source, {"kind": "stop_feeding", "joiner": action.joiner.replica})
                case act.RecordStep():
                    self._record(action)
                case act.CloseIncident():
                    self._close_incident(action.incident)
                case act.FinishTask():
                    self._over = True
                case act.FailTask():
                    self.outcome.failure = action.because
                    self._over = True

    def _planned(self, question: act.ComputePlan) -> ev.PlanComputed:
        if self._plans is None or self.profile.drift() is not None:
            self._plans = PlanCache(self.profile.instance())
        self._gone, self._all_ready = question.dead, False
        return answer(question, self._plans, self._mode)

    def _think_ahead(self) -> None:
        """In an idle moment: plan for one of the deaths that may come next."""
        if self._plans is not None and not self._all_ready and isinstance(self.recovery.phase, Running):
            self._all_ready = self._plans.prepare(self._gone, self._mode, most=1) == 0

    def _start(self, action: act.StartWorker) -> None:
        worker = action.worker
        name = f"{worker.replica}-{worker.stage}"
        path = self._dir / f"beacon-{name}-{action.incarnation}"
        beacon = Beacon(path, create=True)
        faults = [f.text() for f in self.faults if f.worker == worker] if action.incarnation == 1 else []
        spec = {
            "worker": str(worker),
            "incarnation": action.incarnation,
            "agent": str(self._dir / "agent"),
            "token": self._token,
            "host": "127.0.0.1",
            "beacon": str(path),
            "faults": faults,
            "script": self.script,
            "job": self.job.to_dict(),
        }
        child = self.nursery.spawn(spec, output=self.words(worker))
        process = _Process(worker, action.incarnation, child, beacon)
        self.processes[worker] = process
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda _: self._exited(process))

    def _order(self, worker: Worker, message: Mapping[str, Any]) -> None:
        process = self.processes.get(worker)
        if process is not None:
            self._tell(process, message)

    def _tell(self, process: _Process, message: Mapping[str, Any]) -> None:
        if process.line is None:
            return
        with contextlib.suppress(OSError):  # it is dying: its pidfd says so
            process.line.sendall(wire.pack(message))

    def _book(self) -> list[list[Any]]:
        return [[*worker, *process.address] for worker, process in self.processes.items() if process.address]

    def _record(self, action: act.RecordStep) -> None:
        now = time.monotonic()
        row = self.outcome.add(action, now=now, since=self._last_step_at)
        self._last_step_at = now
        if self._log is not None:
            self._log.write(row)
        self.watch("step", row)
        self._commit_checkpoints()
        if action.step == self.outcome.resumed_from + PROFILE_STEPS or action.step % PROFILE_EVERY == 0:
            drift = self.profile.drift()
            if drift is not None and action.step < self.job.steps:
                self._hear(ev.ProfileChanged(because=f"a new schedule: {drift}"))

    def _commit_checkpoints(self) -> None:
        for step in self.checkpoints.commit(self.recovery.recorded):
            self._hear(ev.CheckpointCommitted(step=step))

    def _close_incident(self, incident: act.Incident) -> None:
        killed = [self._killed_at.pop(w) for w in incident.workers if w in self._killed_at]
        incident.killed_at = min(killed) if killed else None
        self.watch("incident", incident)
