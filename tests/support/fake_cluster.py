"""A coordinator on a stage: nodes and workers that answer as they should, until the script says otherwise.

What they answer is in `harness.crew`. Everything said is written down: `transcript` is what the golden files
keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.copy_placement import Keepers
from everstep.drive.ports import ClusterDriver, ClusterPorts, HandledEvent
from everstep.drive.thinking import Thinking
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.ops import Microbatch, Worker
from everstep.protocol.shape import Shape
from everstep.protocol.table import TABLE, WORKER
from harness.crew import Crew


class FakeCluster:
    def __init__(
        self,
        *,
        nodes: dict[str, int] | None = None,
        patience: msg.Patience | None = None,
        planned: bool = False,
        memory_port: int = 0,
        racks: dict[str, str] | None = None,
    ) -> None:
        self.memory_port, self.racks = memory_port, racks or {}
        self.coordinator = Coordinator(patience=patience, planned=planned)
        self.now = 0.001
        self.transcript: list[str] = []
        self.crew = Crew(self.says, clock=self.time)
        self.thinking = Thinking()
        self.numbers: dict[str, int] = {}
        self.done: dict[str, int] = {}
        self.leaves = planned  # the last state of a shape in the memory of nodes
        self.cut: set[str] = set()  # nodes that are not heard
        self.lost: list[msg.Dispatch] = []  # what was sent to them
        self.actions: list[msg.ClusterAction] = []
        self.heard: list[msg.ClusterEvent] = []
        self._driver = ClusterDriver(
            self,
            clock=self,
            store=self,
            port=self._play,
            time_passed=msg.TimePassed(),
            most_at_once=1,  # each event has a time of its own
        )
        self._ports = ClusterPorts(self, self, self)
        for node, slots in (nodes if nodes is not None else {"a": 2, "b": 2}).items():
            self.join(node, slots)

    # -------------------------------------------------------------- what the script does

    def join(self, node: str, slots: int = 2, boot: str = "1") -> None:
        self.cut.discard(node)
        self.numbers[node] = 0 if boot != "1" else self.numbers.get(node, 0)
        self.hear(
            msg.NodeJoined(
                node=node,
                boot=boot,
                slots=slots,
                host=node,
                memory_port=self.memory_port,
                rack=self.racks.get(node, ""),
            )
        )

    def submit(self, name: str = "t", shape: Shape | None = None, steps: int = 9, **more: Any) -> None:
        shape = shape or Shape(2, 2, 2)
        self.hear(
            msg.TaskSubmitted(task=name, job={"job": name}, shape=shape, steps=steps, secret="s", **more)
        )

    def seal(self, name: str = "t", *, sum_of_squares: float = 0.0, loss: float = 1.0) -> None:
        """Every stage seals the next step."""
        task = self.coordinator.tasks[name]
        assert task.recovery is not None
        step = task.recovery.recorded + 1
        total = task.shape.replicas * task.shape.microbatches
        for stage in range(task.shape.stages):
            worker = next(w for w, seat in task.seats.items() if w.stage == stage and seat.incarnation)
            losses: tuple[tuple[Microbatch, float], ...] = ()
            if stage == task.shape.stages - 1:
                losses = tuple((Microbatch(k, 0), loss) for k in range(task.shape.replicas))
            sealed = ev.StepSealed(
                step=step,
                stage=stage,
                attempt=task.recovery.attempt_of(step),
                microbatches=total,
                executed=3 * total,
                losses=losses,
                sum_of_squares=sum_of_squares,
            )
            self.report(name, worker, msg.TaskEvent(task=name, event=sealed))
        for (of, _), actor in self.crew.actors.items():
            if of == name and not actor.joining:
                actor.step = step + 1
        if self.leaves and self.memory_port and task.progress.held is not None:
            self.leave_in_memory(step, name)

    def copy_to_memory(self, step: int, *, away: bool = True, name: str = "t") -> None:
        """The first worker of every stage keeps its state on its node, and on another one if `away`."""
        task = self.coordinator.tasks[name]
        for stage in range(task.shape.stages):
            worker = min(w for w in task.seats if w.stage == stage)
            for node in (task.seats[worker].node, Keepers(self.coordinator.roster, task).of(worker).name):
                part = {"file": f"{worker}", "on": node}
                attempt = task.recovery.attempt_of(step) if task.recovery is not None else 0
                told = msg.PartWritten(
                    task=name, step=step, stage=stage, attempt=attempt, part=part, memory_of=node
                )
                self.report(name, worker, told)
                if not away:
                    break

    def leave_in_memory(self, step: int, name: str = "t") -> None:
        """As when a shape ends: on every node one worker of each stage leaves its state there."""
        task = self.coordinator.tasks[name]
        assert task.recovery is not None
        first = {
            (worker.stage, seat.node): worker for worker, seat in sorted(task.seats.items(), reverse=True)
        }
        for (stage, node), worker in first.items():
            if worker not in task.seats:
                return  # what was left so far was enough
            attempt, part = task.recovery.attempt_of(step), {"file": f"{worker}", "on": node}
            told = msg.PartWritten(
                task=name, step=step, stage=stage, attempt=attempt, part=part, memory_of=node
            )
            self.report(name, worker, told)

    def save(self, step: int, name: str = "t") -> None:
        """Every stage has written its part of a checkpoint."""
        task = self.coordinator.tasks[name]
        assert task.recovery is not None
        for stage in range(task.shape.stages):
            worker = min(w for w in task.seats if w.stage == stage)
            attempt = task.recovery.attempt_of(step)
            self.report(
                name, worker, msg.PartWritten(task=name, step=step, stage=stage, attempt=attempt, part="p")
            )

    def exits(self, worker: Worker, reason: str, name: str = "t", **more: Any) -> None:
        self.crew.ends(name, worker, reason, **more)

    def raises(
        self,
        worker: Worker,
        error: str,
        name: str = "t",
        raised_for: ev.RaisedFor = ev.RaisedFor.UNKNOWN,
    ) -> None:
        actor = self.crew.actors[name, worker]
        raised = ev.WorkerRaised(
            worker=worker,
            incarnation=actor.incarnation,
            error=error,
            where=f"step {actor.step} F",
            raised_for=raised_for,
        )
        self.crew.says(name, worker, raised)
        self.exits(worker, f"raised {error}", name)

    def overdue(self, worker: Worker, *, name: str = "t", **more: Any) -> None:
        actor = self.crew.actors[name, worker]
        facts = {"doing": "1F0.0", "busy": True, "stopped": False, "elapsed_s": 5.0, "expected_s": 0.1}
        report = msg.OpOverdue(
            task=name, worker=worker, incarnation=actor.incarnation, step=actor.step, **facts | more
        )
        self.crew.reports(name, worker, report)

    def report(self, name: str, worker: Worker, report: msg.NodeReport) -> None:
        seat = self.coordinator.tasks[name].seats[worker]
        is_workers = WORKER in TABLE[type(report)].by
        self.says(seat.node, report, msg.Sender(name, worker, seat.incarnation) if is_workers else None)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._driver.look_at_clock()

    def silence(self, node: str) -> None:
        self.cut.add(node)
        self.hear(msg.NodeFellSilent(node=node, silent_s=1.0))

    def says(self, node: str, report: msg.NodeReport, sender: msg.Sender | None = None) -> None:
        if node not in self.cut:
            self.arrives(node, report, sender)

    def arrives(self, node: str, report: msg.NodeReport, sender: msg.Sender | None = None) -> None:
        """Also from a node that is cut off by now."""
        self.numbers[node] += 1
        number, boot = self.numbers[node], self.coordinator.nodes[node].boot
        self.hear(msg.FromNode(node=node, boot=boot, number=number, report=report, sender=sender))

    def resumes(self) -> list[msg.ResumeWorker]:
        """What every worker was told to resume with, in the order in which it was."""
        return [
            msg.ResumeWorker(task=order.task, worker=worker, facts=order.facts, own=own, states=states)
            for action in self.actions
            if isinstance(action, msg.Dispatch) and isinstance(order := action.order, msg.ResumeTask)
            if order.facts is not None
            for worker, own, states in order.workers
        ]

    # -------------------------------------------------------------- the machine

    def hear(self, event: msg.ClusterEvent) -> None:
        self._driver.hear(event)

    def handle(self, event: msg.ClusterEvent, now: float) -> list[msg.ClusterAction]:
        return self.coordinator.handle(event, now)

    def due_at(self) -> float | None:
        return self.coordinator.due_at()

    def unfinished(self) -> list[msg.ClusterAction]:
        return self.coordinator.unfinished()

    # -------------------------------------------------------------- the driver's ports

    def time(self) -> float:
        return self.now

    def wake_at(self, when: float) -> None:
        """`wait` looks at the clock."""

    def write(self, entries: Sequence[tuple[float, msg.ClusterEvent]], done: Callable[[], None]) -> None:
        done()

    def _play(self, one: HandledEvent) -> None:
        self.coordinator.validate()
        self._ports.take(one)
        self.now = round(self.now + 0.001, 6)

    def handled(self, one: HandledEvent) -> None:
        assert one.event is not None
        self.heard.append(one.event)
        self.thinking.handled(one, self.coordinator)
        self._write(">", one.event)
        for action in one.actions:
            assert action.cause == self.coordinator.events, "every action names its cause"
            self.actions.append(action)
            self._write("<", action)

    def send(self, action: msg.Dispatch) -> None:
        if action.node in self.cut:
            self.lost.append(action)
        else:
            self.coordinator.acknowledged(action.node, action.number)
            self.crew.obey(action.node, action.order)

    def received(self, node: str, number: int) -> None:
        """Nothing is sent again here."""

    def choose(self, action: msg.ChooseAssignment) -> None:
        if action.version == self.coordinator.version:
            for event in self.thinking.choose(self.coordinator, action, self.now):
                self.hear(event)

    def think(self, action: msg.Think) -> None:
        for event in self.thinking.answer(self.coordinator, action):
            self.hear(event)

    # -------------------------------------------------------------- the transcript

    def _write(self, sign: str, said: msg.ClusterEvent | msg.ClusterAction) -> None:
        self.transcript.append(f"{self.now:8.3f} {sign} {_line(said)}")

    def story(self) -> list[str]:
        lines = []
        for one in self.coordinator.log.incidents:
            state = "open" if one.resumed_at is None else f"closed at {one.resumed_at:.3f}"
            workers = " ".join(map(str, one.workers))
            lines.append(f"incident {one.number} {one.task} {one.node} {workers} {state}: {one.what}")
            lines += [f"  evidence {e.at:.3f} {e.source}: {e.text}" for e in one.evidence]
            if one.verdict is not None:
                lines.append(
                    f"  verdict  SEV{one.verdict.severity} {one.verdict.kind}: {one.verdict.because}"
                )
            lines += [f"  remedy   {r.at:.3f} {r.what} [{r.outcome}]: {r.because}" for r in one.remedies]
        return lines


def _line(said: msg.ClusterEvent | msg.ClusterAction) -> str:
    match said:
        case msg.FromNode(node=node, number=number, report=report):
            return f"{node}#{number} {_report(report)}"
        case msg.Dispatch(node=node, number=number, order=order, because=because):
            return f"{node}#{number} {_order(order)}  -- {because}"
        case msg.PlanAnswered(task=task, event=event):
            return f"PlanAnswered {task} {type(event).__name__} epoch {getattr(event, 'epoch', '')}"
        case msg.RecordRow(task=task, record=record):
            return f"Record {task} step {record.step}"
        case msg.Think(task=task, question=question):
            return f"Think {task} epoch {question.epoch}"
        case _:
            facts = [
                f"{n}={getattr(said, n)}"
                for n in said.__slots__
                if n not in ("job", "secret", "because", "cause")
            ]
            because = f"  -- {said.because}" if hasattr(said, "because") else ""
            return f"{type(said).__name__} {' '.join(facts)}{because}"


def _report(report: msg.NodeReport) -> str:
    if isinstance(report, msg.TaskEvent):
        event = report.event
        worker = getattr(event, "worker", "")
        detail = " ".join(
            f"{name}={getattr(event, name)}"
            for name in ("incarnation", "epoch", "step", "stage", "reason", "error")
            if hasattr(event, name)
        )
        return f"{report.task} {worker} {type(event).__name__} {detail}"
    facts = [f"{n}={getattr(report, n)}" for n in report.__slots__ if n != "part"]
    return f"{type(report).__name__} {' '.join(facts)}"


def _order(order: msg.Order) -> str:
    match order:
        case msg.NotifyWorker(task=task, worker=worker, words=words):
            return f"{type(words).__name__} {task} {worker}"
        case msg.InterruptTask(task=task, epoch=epoch, workers=workers):
            return f"InterruptTask {task} epoch {epoch}: {' '.join(map(str, workers))}"
        case msg.ResumeTask(task=task, workers=workers):
            return f"ResumeTask {task}: {' '.join(str(one.worker) for one in workers)}"
        case msg.StartProcesses(task=task, starts=starts):
            each = ", ".join(f"{s.worker} incarnation {s.incarnation} slot {s.slot}" for s in starts)
            return f"StartProcesses {task}: {each}"
        case msg.StartProcess(task=task, worker=worker, incarnation=incarnation, slot=slot):
            return f"StartProcess {task} {worker} incarnation {incarnation} slot {slot}"
        case msg.KillProcess(task=task, worker=worker, incarnation=incarnation):
            return f"KillProcess {task} {worker} incarnation {incarnation}"
        case msg.KeepOnly(keep=keep):
            return f"KeepOnly {' '.join(f'{t}/{w}' for t, w, _ in keep)}"
        case _:
            return f"{type(order).__name__} {getattr(order, 'task', '')}"
