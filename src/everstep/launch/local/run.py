"""A whole task on this machine: coordinator and workers in one process tree, no second shell.

The same machines as on a cluster, with one node and one task: `Coordinator` decides, `WorkerProcesses` carry
out. What a cluster sends over a wire is a call here, and there is no journal: if this process ends, so do its
workers, and the next run goes on from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.core.agent.process import AgentLimits
from everstep.core.agent.processes import NodeProcesses
from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.task import TaskState
from everstep.core.faults.detector import DetectorLimits
from everstep.core.task.recovery import Recovery
from everstep.core.task.states import Running
from everstep.drive.ports import ClusterDriver, ClusterPorts, HandledEvent
from everstep.drive.step_rows import begins_training, means
from everstep.drive.thinking import Thinking
from everstep.engine.telemetry.beacon import BeaconReading
from everstep.engine.telemetry.faults import PlantedFault
from everstep.job.job import Job
from everstep.launch.local.data_needs import DataWaits
from everstep.launch.local.outcome import Outcome, StepLog
from everstep.node.fork_server import ForkServer
from everstep.node.worker_processes import NodeSettings, WorkerProcess, WorkerProcesses
from everstep.protocol import actions as act
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.ops import Worker
from everstep.protocol.work import EpochFacts
from everstep.schedule.task_scheduler import TaskScheduler
from everstep.store.owned_folders import one_run_at_a_time, temporary_folder
from everstep.store.places import root_of

if TYPE_CHECKING:
    from everstep.launch.local.page import RunPage

NODE, TASK = "here", "task"
LOOK_EVERY_S = 0.02
ENDING_S = 20.0  # for workers to leave in good order; afterwards they are killed
# (kind, what): page, step, evaluation, checkpoint, incident, action, raised, warning, tick
Watcher = Callable[[str, Any], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalNode:
    """This machine as the one node of a run. `slots`: for the largest shape it may take, if it is to change
    its shape; None: for the job's. `detect` off: only deaths are noticed; to measure what detection costs.
    """

    slots: int | None = None
    detect: bool = True


class LocalTask:
    """Runs one job to its end. `run` blocks; `watch` gets every event."""

    def __init__(
        self,
        job: Job,
        *,
        fork_server: ForkServer,
        faults: tuple[PlantedFault, ...] = (),
        patience: msg.Patience | None = None,
        watch: Watcher = lambda kind, what: None,
        script: list[str] | None = None,
        page: RunPage | None = None,
        node: LocalNode | None = None,
        name: str = TASK,
    ) -> None:
        self.name = name
        self._node = node or LocalNode()
        self._slots = self._node.slots or job.replicas * job.stages * job.shards
        self.job, self.fork_server, self.faults, self.script = job, fork_server, faults, script
        self.watch, self._page = watch, page
        self.shape = job.task_shape()
        self.outcome = Outcome()
        self.coordinator = Coordinator(patience=patience)
        self._thinking = Thinking()
        self._driver = ClusterDriver(
            self.coordinator,
            clock=self,
            store=self,
            port=ClusterPorts(self, self, self).take,
            time_passed=msg.TimePassed(),
        )
        self._loop = _Loop()
        self._reports = 0
        self._over = False
        self._looked_at = 0.0
        self._log: StepLog | None = None
        self._unsaved = ""  # why the newest state is not saved, as last told
        self._data_waits = DataWaits()

    # -------------------------------------------------------------- life

    def run(self) -> Outcome:
        with contextlib.ExitStack() as held:
            # Short, because the path of a Unix socket may have no more than 107 characters.
            folder = held.enter_context(temporary_folder("everstep-run-"))
            memory = held.enter_context(temporary_folder("everstep-beacons-", in_memory=True))
            if isinstance(root := self._checkpoint_root(), Path):
                held.enter_context(one_run_at_a_time(root, "checkpoint.folder"))
            self.workers = WorkerProcesses(
                NodeSettings(folder=folder, memory=memory, slots=self._slots, detect=self._node.detect),
                loop=self._loop,
                machine=NodeProcesses(DetectorLimits(), AgentLimits()),
                report=self._reported,
                fork_server=lambda needs: self.fork_server,
            )
            if self.job.device == "cuda":
                self.workers.devices.for_slots(self._slots)
            self.workers.open()
            if self._page is not None:
                self._page.attach(self, self._loop)
                self.watch("page", self._page)  # not before: a browser would wait for an answer
            if self.job.log is not None:
                self._log = StepLog(self.job.path(self.job.log))
            try:
                self._begin()
                while not self._over:
                    self._turn()
            finally:
                self._close()
        if self.recovery is not None:
            self.outcome.incidents = self.recovery.incidents
            last = self.last_step
            self.outcome.issued = (last - self.outcome.resumed_from) * self.job.microbatches_in_step
            self.outcome.unsaved = self.job.checkpoint is not None and self.outcome.saved < last
        return self.outcome

    def _checkpoint_root(self) -> str | Path | None:
        spec = self.job.checkpoint
        return None if spec is None else root_of(self.job.base, spec.folder)

    @property
    def recovery(self) -> Recovery | None:
        """None until it is known from which step the task starts."""
        task = self.coordinator.tasks.get(self.name)
        return None if task is None else task.managed

    @property
    def last_step(self) -> int:
        """The last one that is complete, also of earlier starts."""
        return 0 if self.recovery is None else min(self.recovery.recorded, self.job.steps)

    @property
    def scheduler(self) -> TaskScheduler:
        return self._thinking.scheduler(self.coordinator.tasks[self.name])

    @property
    def running(self) -> bool:
        """Is training going on, with nothing to mend at the moment?"""
        return self.recovery is not None and isinstance(self.recovery.phase, Running)

    @property
    def processes(self) -> dict[Worker, WorkerProcess]:
        return {worker: process for (_, worker), process in self.workers.processes.items()}

    def kill(self, worker: Worker) -> None:
        """SIGKILL, and remember when."""
        self.workers.kill(self.name, worker)

    def slow(self, worker: Worker, factor: float) -> None:
        """From now on its ops take so many times as long; 1: as long as they did."""
        fault = f"stage={worker.stage},replica={worker.replica},step=1,how=slow,factor={factor:g}"
        self.workers.plant(self.name, worker, (fault,) if factor != 1 else ())

    def finish_early(self, because: str) -> None:
        """After the step it is in, whose state is saved."""
        self.outcome.stopped = because
        self._driver.hear(msg.FinishRequested(task=self.name, because=because))

    def finish(self, because: str) -> None:
        """End the task now, in good order, before its last step."""
        self.watch("action", act.FinishTask(because=because))
        self._driver.hear(msg.CancelRequested(task=self.name))

    def reshape(self, replicas: int, stages: int, shards: int | None = None) -> None:
        """Take another shape at the next step boundary; training goes on from where it is."""
        job = self.job.reshaped(replicas, stages, shards)
        shape = job.task_shape()
        self._driver.hear(msg.ReshapeRequested(task=self.name, job=job.to_dict(), shape=shape))

    def words(self, worker: Worker) -> Path:
        """The file with what a worker printed; kept where the job has a log folder."""
        return self.workers.log_path(self.name, worker)

    def readings(self) -> dict[Worker, BeaconReading | None]:
        """What every live worker is doing right now."""
        return self.workers.readings(self.name)

    def readings_document(self) -> list[dict[str, Any]]:
        """The same, as an agent reports it."""
        return self.workers.readings_document(self.name)

    def _begin(self) -> None:
        self._driver.hear(msg.NodeJoined(node=NODE, boot=NODE, slots=self._slots, host="127.0.0.1"))
        self._driver.hear(
            msg.TaskSubmitted(
                task=self.name,
                job=self.job.to_dict(),
                shape=self.shape,
                steps=self.job.steps,
                secret=secrets.token_hex(32),
                has_checkpoints=self.job.checkpoint is not None,
                script=tuple(self.script or ()),
                faults=tuple(fault.text() for fault in self.faults),
                closes=self.job.evaluation is not None,
                on_nan=self.job.verify.nan,
                on_spike=self.job.verify.spike,
                votes_on_all=self.job.vote_period == 1,
                needs=self.job.needs(),
            )
        )

    def _close(self) -> None:
        if not self._over:  # it ends early, by Ctrl-C: what stops now is no incident
            self._driver.hear(msg.CancelRequested(task=self.name))
            until = time.monotonic() + ENDING_S
            with contextlib.suppress(KeyboardInterrupt):
                while not self._over and time.monotonic() < until:
                    self._turn()
        self.workers.close()
        if self._page is not None:
            self._page.detach()
        self._loop.close()
        if self._log is not None:
            self._log.close()

    def _turn(self) -> None:
        if not self._loop.serve(LOOK_EVERY_S) and self.running:
            self.scheduler.think_ahead()
        now = time.monotonic()
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            self.workers.tick(now)
        self._driver.look_at_clock()
        task = self.coordinator.tasks.get(self.name)
        # By a rule of the job. There is no operator here who could resume it.
        if task is not None and task.state is TaskState.PAUSED:
            self.outcome.ended = self.outcome.failure = f"{task.because}; the next start continues"
            self._over = True
        if self._page is not None:
            self._page.tick()
        self.watch("tick", self)

    # -------------------------------------------------------------- the driver's ports

    def time(self) -> float:
        return time.monotonic()

    def wake_at(self, when: float) -> None:
        """`_turn` looks often enough."""

    def write(self, entries: Sequence[tuple[float, msg.ClusterEvent]], done: Callable[[], None]) -> None:
        """There is no journal."""
        done()

    def send(self, action: msg.Dispatch) -> None:
        self._tell_watcher(action)
        self.coordinator.acknowledged(NODE, action.number)
        self.workers.carry_out(action.order)

    def received(self, node: str, number: int) -> None:
        """Nothing is sent again here."""

    def think(self, action: msg.Think) -> None:
        self.watch("action", action.question)
        for event in self._thinking.answer(self.coordinator, action):
            self._driver.hear(event)

    def choose(self, action: msg.ChooseAssignment) -> None:
        """One task has all slots."""

    def handled(self, one: HandledEvent) -> None:
        if self._page is not None:
            self._page.handled(one)
        for action in one.actions:
            match action:
                case msg.RecordRow():
                    self._record(action.record, one.at)
                case msg.IncidentClosed(number=number):
                    for incident in self.coordinator.log.incidents:
                        if incident.number == number:
                            self.watch("incident", incident)
                case msg.TaskEnded():
                    self.outcome.ended = action.because
                    self.outcome.failure = action.because if action.state == "failed" else None
                    self._over = True
                case msg.TaskReshaped(shape=shape):
                    self.shape = shape
                    self._thinking.forget(self.name)
                case _ if begins_training(action):
                    self.outcome.steps.begin(one.at)

    # -------------------------------------------------------------- what is reported and watched

    def _reported(self, report: msg.NodeReport, sender: msg.Sender | None) -> None:
        match report:
            case msg.TimesReported():
                self._look_at_data(report)
                self.watch("times", report)
                for found in self._thinking.learn(self.coordinator, report):
                    self._driver.hear(found)
                return
            case msg.CheckpointFound():
                self.outcome.resumed_from, self.outcome.resumed_loss = report.step, report.loss
                self.outcome.saved = report.step
                self.outcome.refused_checkpoints = list(report.refused)
            case msg.TaskEvent(event=ev.CheckpointCommitted(step=step)):
                self.outcome.saved = max(self.outcome.saved, step)
                self._unsaved = ""
                self.watch("checkpoint", step)
            case msg.SaveFailed() if report.because != self._unsaved:  # its incident closes when it is over
                self._unsaved = report.because
                self.watch("warning", f"the state of step {report.step} is not saved: {report.because}")
            case msg.TaskEvent(event=ev.WorkerRaised() as raised):
                self.watch("raised", (raised.worker, raised.error, raised.traceback))
        self._reports += 1
        event = msg.FromNode(node=NODE, boot=NODE, number=self._reports, report=report, sender=sender)
        self._driver.hear(event)

    def _evaluated(self, record: act.RecordStep) -> None:
        assert self.job.evaluation is not None
        metrics = [name.rpartition(":")[2] for name in self.job.evaluation.metrics]
        found = means(("loss", *metrics), (line for _, line in record.scores))
        again = record.step - 1 in self.outcome.evaluations  # done again, from a kept state
        self.outcome.evaluations[record.step - 1] = found
        if not again:
            self.watch("evaluation", (record.step - 1, found))

    def _look_at_data(self, report: msg.TimesReported) -> None:
        rows = self.outcome.steps.rows
        step_s = rows[-1].seconds if rows else 0.0
        waits_s = report.times.get("data", 0.0)
        warning = self._data_waits.warning(report.worker, waits_s, step_s, len(rows))
        if warning is not None and rows:
            self.watch("warning", warning)

    def _tell_watcher(self, action: msg.Dispatch) -> None:
        match action.order:
            case msg.NotifyWorker(words=words):
                self.watch("action", words)
            case msg.InterruptTask(epoch=epoch, workers=workers, because=because):
                words = act.InterruptWorkers(workers=workers, epoch=epoch, because=because)
                self.watch("action", words)
            case msg.ResumeTask(facts=EpochFacts() as facts, workers=resumed):
                orders = {worker: own for worker, own, _ in resumed}
                self.watch("action", act.ResumeWorkers(facts=facts, orders=orders, because=action.because))
            case msg.StartProcess() as order:
                self._tell_start(order, action.because)
            case msg.StartProcesses(starts=starts):
                for order in starts:
                    self._tell_start(order, action.because)

    def _tell_start(self, order: msg.StartProcess, because: str) -> None:
        words = act.StartWorker(worker=order.worker, incarnation=order.incarnation, because=because)
        self.watch("action", words)

    def _record(self, record: act.RecordStep, now: float) -> None:
        if record.scores:
            self._evaluated(record)
        if not record.trains:
            return
        row = self.outcome.add(record, now)
        if self._log is not None:
            self._log.write(row)
        self.watch("step", row)
        task = self.coordinator.tasks[self.name]
        wish = self._thinking.outdated(task, record.step, self.outcome.resumed_from + 1)
        if wish is not None:
            self._driver.hear(wish)


class _Loop:
    """A selector as the loop of worker processes."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, fd: int, ready: Callable[[], object]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, ready)

    def unwatch(self, fd: int) -> None:
        self._selector.unregister(fd)

    def serve(self, within_s: float) -> bool:
        """Handle what is ready. A handler may end others, so what was ready may be gone."""
        ready = self._selector.select(within_s)
        for key, _ in ready:
            now = self._selector.get_map().get(key.fd)
            if now is not None and now.data is key.data:
                key.data()
        return bool(ready)

    def close(self) -> None:
        self._selector.close()
