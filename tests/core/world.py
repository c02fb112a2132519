"""A virtual cluster around the real `Recovery` and the real `Walker`s: random orders, random deaths, checked
sums.

Payloads are symbols. A gradient buffer is a bag of (microbatch, was it computed from the right weights); a
state is the chain of updates applied to it. So the world knows whether a sum holds every microbatch once, and
whether every survivor ends with the state of a run without faults. Links keep their order; everything else
happens in any order.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from everstep.core import actions as act
from everstep.core import events as ev
from everstep.core import messages as msg
from everstep.core.ops import Kind, Worker
from everstep.core.recovery import Recovery
from everstep.core.rules import Rules
from everstep.core.standing import Policy
from everstep.core.survey import Shape
from everstep.core.walker import Walker
from everstep.schedule import Instance, uniform
from everstep.schedule.answer import answer
from everstep.schedule.cache import PlanCache


@dataclass
class Virtual:
    """A worker process: a walker and the payloads it keeps."""

    walker: Walker
    incarnation: int
    state: tuple = (0,)  # (updates applied, chain)
    kept: tuple | None = None
    payloads: dict = field(default_factory=dict)
    inputs: dict = field(default_factory=dict)  # (step, microbatch) -> the right weights so far?
    gradients: dict = field(default_factory=dict)  # step -> bag
    sums: dict = field(default_factory=dict)
    losses: dict = field(default_factory=dict)
    inbox: deque = field(default_factory=deque)  # orders from recovery
    may_work: bool | None = None  # has it a task? None: something has happened to it since it was asked


class World:
    def __init__(
        self,
        seed: int,
        *,
        replicas: int = 2,
        stages: int = 2,
        microbatches: int = 2,
        steps: int = 4,
        deaths: int = 1,
        tied: bool = False,
        clip: bool = False,
        stagger: str = "auto",
        checkpoint_every: int = 0,
        mode: str = "decoupled",
        rejoin_after_steps: int = 0,
        restarts: int = 50,
        raises: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.shape = Shape(replicas, stages, microbatches)
        self.rules = Rules(
            replicas=replicas,
            stages=stages,
            microbatches=microbatches,
            steps=steps,
            clip=1.0 if clip else None,
            stagger=stagger,
            checkpoint_every=checkpoint_every,
            tied=(0, stages - 1) if tied and stages > 1 else None,
        )
        self.mode = mode
        self.norms = [
            [
                self.random.choice([0.01, 0.05, 0.6, 3.0, float("nan")] if clip else [0.01])
                for _ in range(stages)
            ]
            for _ in range(steps + 1)
        ]
        self.recovery = Recovery(
            self.shape,
            steps=steps,
            policy=Policy(rejoin_after_steps=rejoin_after_steps, max_restarts=restarts),
        )
        self.workers: dict[Worker, Virtual] = {}
        self.links: dict[tuple, deque] = {}
        self.reports: dict[tuple, deque] = {}
        self.pending: deque = deque()  # events on their way to recovery, besides the workers' own
        self.disk: dict[int, dict[int, tuple]] = {0: dict.fromkeys(range(stages), (0,))}
        self.committed = 0
        self.deaths_left = deaths
        self.raises = raises
        self.recorded: list[act.RecordStep] = []
        self.executions: Counter = Counter()
        self.ghosts = 0
        self.outcome: str | None = None
        self.clock = 0.0
        self.ticks = 0
        self.log: list[str] = []

    # ---------------------------------------------------------- the truth

    def scale(self, step: int) -> float | None:
        squares = [n * n for n in self.norms[step]]
        norm = sum(squares) ** 0.5
        if norm != norm:
            return None
        return 1.0 if self.rules.clip is None or norm <= self.rules.clip else self.rules.clip / norm

    def right_state(self, step: int) -> tuple:
        state: tuple = (0,)
        for t in range(1, step + 1):
            state = self.applied(state, t, self.scale(t))
        return state

    @staticmethod
    def applied(state: tuple, step: int, scale: float | None) -> tuple:
        return (step, hash((state, None if scale is None else round(scale, 9))))

    # ---------------------------------------------------------- running

    def run(self, budget: int = 200_000) -> str:
        self.perform(self.recovery.begin())
        while self.outcome is None:
            self.ticks += 1
            assert self.ticks < budget, f"no end in {budget} ticks: {self.recovery.phase}\n" + "\n".join(
                self.log[-40:]
            )
            choices = self.choices()
            if not choices:
                raise AssertionError(
                    f"stuck: {self.recovery.phase}; "
                    + "; ".join(
                        f"{w} {v.walker.next()} paused={v.walker.paused}" for w, v in self.workers.items()
                    )
                )
            self.random.choice(choices)()
            self.recovery.validate()
        return self.outcome

    def choices(self) -> list:
        found: list = []
        for worker, virtual in self.workers.items():
            if virtual.inbox:
                found.append(lambda w=worker: self.obey(w))
            if virtual.may_work is None:
                virtual.may_work = not isinstance(virtual.walker.next(), msg.Wait | msg.Paused | msg.Finished)
                self.carry_out(worker, virtual)
            if virtual.may_work:
                found += [lambda w=worker: self.work(w)] * 3
        for key, queue in self.links.items():
            if queue:
                found.append(lambda k=key: self.deliver(k))
        for key, queue in self.reports.items():
            if queue:
                found.append(lambda k=key: self.hear(self.reports[k].popleft()))
        if self.pending:
            found.append(lambda: self.hear(self.pending.popleft()))
        if (
            self.deaths_left
            and self.workers
            and self.recovery.recorded < self.rules.steps
            and self.random.random() < 0.02
        ):
            found.append(self.kill_someone)
        return found

    def hear(self, event: ev.Event) -> None:
        self.clock += 1.0
        self.log.append(f"event {event}"[:300])
        self.perform(self.recovery.handle(event, self.clock))

    def kill_someone(self) -> None:
        self.deaths_left -= 1
        self.kill(self.random.choice(sorted(self.workers)))

    def kill(self, worker: Worker) -> None:
        virtual = self.workers.pop(worker)
        me = (worker, virtual.incarnation)
        self.log.append(f"KILL {worker} in {virtual.walker.now.step} {virtual.walker.next()}"[:200])
        for key in [k for k in self.links if k[1] == me]:
            del self.links[key]
        for key in [k for k in self.links if k[0] == me]:  # some of what it sent last is lost
            queue = self.links[key]
            for _ in range(self.random.randint(0, len(queue))):
                queue.pop()
        queue = self.reports.setdefault(me, deque())
        for _ in range(self.random.randint(0, len(queue))):
            queue.pop()
        if self.raises:
            queue.append(
                ev.WorkerRaised(
                    worker=worker,
                    incarnation=virtual.incarnation,
                    error="planted",
                    where=f"{worker} {virtual.incarnation}",
                )
            )
        queue.append(ev.WorkerExited(worker=worker, incarnation=virtual.incarnation, reason="killed"))

    # ---------------------------------------------------------- recovery's hands

    def perform(self, actions: list[act.Action]) -> None:
        for action in actions:
            self.log.append(f"  action {action}"[:400])
            match action:
                case act.StartWorker():
                    self.workers[action.worker] = Virtual(
                        Walker(action.worker, self.rules), action.incarnation
                    )
                    self.pending.append(
                        ev.WorkerStarted(worker=action.worker, incarnation=action.incarnation)
                    )
                case act.InterruptWorkers():
                    for worker in action.workers:
                        self.order(worker, ("interrupt", action.epoch))
                case act.ComputePlan():
                    grid = uniform(replicas=self.shape.replicas, stages=self.shape.stages, value=1.0)
                    healthy = Instance(
                        replicas=self.shape.replicas,
                        stages=self.shape.stages,
                        microbatches=self.shape.microbatches,
                        forward=grid,
                        input_grad=grid,
                        weight_grad=grid,
                    )
                    self.pending.append(answer(action, PlanCache(healthy), self.mode))
                case act.ResumeStep():
                    self.order(action.worker, ("resume", action.order))
                case act.CopyState():
                    self.order(action.source, ("copy", action.joiner.replica))
                case act.StopFeeding():
                    self.order(action.source, ("stop", action.joiner.replica))
                case act.RecordStep():
                    assert action.microbatches_committed == self.shape.replicas * self.shape.microbatches
                    assert action.replayed_elsewhere == 0, f"step {action.step} re-ran ops on live workers"
                    self.recorded.append(action)
                    self.commit_checkpoints()
                case act.FinishTask():
                    self.outcome = "finished"
                case act.FailTask():
                    self.outcome = f"failed: {action.because}"
                case act.CloseIncident():
                    pass

    def order(self, worker: Worker, what: tuple) -> None:
        if worker in self.workers:
            self.workers[worker].inbox.append(what)

    # ---------------------------------------------------------- a worker's hands

    def obey(self, worker: Worker) -> None:
        virtual = self.workers[worker]
        virtual.may_work = None
        verb, value = virtual.inbox.popleft()
        match verb:
            case "interrupt":
                ledger = virtual.walker.interrupt(value)
                self.report(worker, ev.LedgerReported(worker=worker, epoch=value, ledger=ledger))
            case "resume":
                virtual.walker.resume(value)
            case "copy":
                virtual.walker.copy_to(value)
            case "stop":
                virtual.walker.stop_feeding(value)
        self.carry_out(worker, virtual)

    def report(self, worker: Worker, event: ev.Event) -> None:
        self.reports.setdefault((worker, self.workers[worker].incarnation), deque()).append(event)

    def deliver(self, key: tuple) -> None:
        (_, (worker, _)) = key
        parcel, value, payload = self.links[key].popleft()
        virtual = self.workers[worker]
        virtual.may_work = None
        if isinstance(parcel, tuple) and parcel[0] == "snapshot":
            virtual.state = payload
            virtual.walker.snapshot_arrived(parcel[1])
        elif virtual.walker.arrived(parcel, value):
            virtual.payloads[parcel] = payload
        self.carry_out(worker, virtual)

    def carry_out(self, worker: Worker, virtual: Virtual) -> None:
        for command in virtual.walker.take_commands():
            match command:
                case msg.Send():
                    self.send(worker, virtual, command)
                case msg.Forget():
                    for parcel in command.parcels:
                        virtual.payloads.pop(parcel, None)
                case msg.ReleaseGradients():
                    del virtual.gradients[command.step]
                case msg.ReleaseSum():
                    bag = virtual.sums.pop(command.step)
                    self.check_sum(bag, command.step, worker.stage)
                case msg.DiscardWork():
                    for store in (virtual.gradients, virtual.sums):
                        for step in [s for s in store if command.from_step is None or s >= command.from_step]:
                            del store[step]
                    virtual.inputs.clear()
                case msg.TellSealed():
                    self.report(
                        worker,
                        ev.StepSealed(
                            step=command.step,
                            stage=worker.stage,
                            microbatches=command.microbatches,
                            executed=command.executed,
                            losses=command.losses,
                            sum_of_squares=command.sum_of_squares,
                        ),
                    )
                case msg.TellInvalid():
                    self.report(
                        worker,
                        ev.UpdateInvalidated(
                            worker=worker, step=command.step, norm=command.norm, attempt=command.attempt
                        ),
                    )
                case msg.TellCopied():
                    self.report(
                        worker,
                        ev.StateCopied(
                            worker=worker, incarnation=virtual.incarnation, state_step=command.state_step
                        ),
                    )

    def send(self, worker: Worker, virtual: Virtual, command: msg.Send) -> None:
        target = Worker(command.replica, command.stage)
        parcel = command.parcel
        payload: Any = None
        match parcel.what:
            case msg.What.ACTIVATION | msg.What.GRADIENT:
                payload = virtual.payloads[parcel]  # KeyError here = an outbox dropped too early
            case msg.What.PART:
                payload = Counter(virtual.gradients[parcel.step])
            case msg.What.SUM | msg.What.COPY | msg.What.FEED:
                payload = Counter(virtual.sums[parcel.step])
        if target in self.workers:
            me, to = (worker, virtual.incarnation), (target, self.workers[target].incarnation)
            self.links.setdefault((me, to), deque()).append((parcel, command.value, payload))

    def work(self, worker: Worker) -> None:
        virtual = self.workers[worker]
        virtual.may_work = None
        walker = virtual.walker
        task = walker.next()
        self.carry_out(worker, virtual)
        result: Any = None
        match task:
            case msg.Compute():
                self.compute(worker, virtual, task)
            case msg.Contribute():
                virtual.gradients.setdefault(task.step, Counter())
                last = worker.stage == self.shape.stages - 1
                result = (
                    tuple((op.microbatch, 1.0) for op in walker.now.done if op.kind is Kind.F) if last else ()
                )
            case msg.SumChunk():
                bag = Counter(virtual.gradients[task.step])
                for part in task.parts:
                    bag.update(virtual.payloads[part])
                virtual.sums[task.step] = bag
                result = (
                    self.norms[task.step][worker.stage] ** 2 if worker.replica == task.members[0] else 0.0
                )
            case msg.AssembleSum():
                for chunk in task.chunks:
                    bag = virtual.payloads[chunk]
                    if chunk.what is msg.What.COPY:
                        virtual.sums[task.step] = Counter(bag)
                    else:
                        assert bag == virtual.sums[task.step], "two owners summed different things"
            case msg.CombineTied():
                result = self.norms[task.step][worker.stage] ** 2
            case msg.Update():
                if task.keep:
                    virtual.kept = virtual.state
                virtual.state = self.applied(virtual.state, task.step, task.scale)
            case msg.Undo():
                assert virtual.kept is not None
                virtual.state, virtual.kept = virtual.kept, None
            case msg.Snapshot():
                target = Worker(task.joiner, worker.stage)
                if target in self.workers:
                    key = ((worker, virtual.incarnation), (target, self.workers[target].incarnation))
                    self.links.setdefault(key, deque()).append(
                        (("snapshot", task.state_step), None, virtual.state)
                    )
            case msg.ApplyFeed():
                self.check_sum(virtual.payloads[task.feed], task.step, worker.stage)
                virtual.state = self.applied(virtual.state, task.step, task.scale)
            case msg.Restore():
                virtual.state = self.disk[task.state_step][worker.stage]
            case msg.SaveCheckpoint():
                assert virtual.state == self.right_state(task.state_step)
                parts = self.disk.setdefault(task.state_step, {})
                parts[worker.stage] = virtual.state
                self.commit_checkpoints()
        walker.finished(task, result)
        self.carry_out(worker, virtual)

    def commit_checkpoints(self) -> None:
        """A checkpoint counts once all its parts are there and its step is on record."""
        for step, parts in self.disk.items():
            if step > self.committed and len(parts) == self.shape.stages and step <= self.recovery.recorded:
                self.committed = step
                self.pending.append(ev.CheckpointCommitted(step=step))

    def compute(self, worker: Worker, virtual: Virtual, task: msg.Compute) -> None:
        op, right = task.op, virtual.state == self.right_state(task.step - 1)
        self.executions[(task.step, op)] += 1
        self.ghosts += task.ghost
        key = (task.step, op.microbatch)
        kinds = (Kind.I, Kind.W) if op.kind is Kind.B else (op.kind,)
        for kind in kinds:
            if kind is Kind.F:
                virtual.inputs[key] = right and (task.input is None or virtual.payloads[task.input])
            elif kind is Kind.I:
                below = task.input is None or virtual.payloads[task.input]
                virtual.inputs[key] = virtual.inputs[key] and below and right
            else:
                bag = virtual.gradients.setdefault(task.step, Counter())
                bag[(op.microbatch, virtual.inputs.pop(key))] += 1
        if task.output is not None:
            virtual.payloads[task.output] = virtual.inputs.get(key, True) if op.kind is not Kind.B else right
        if task.ghost and op.kind is Kind.I:
            del virtual.inputs[key]

    def check_sum(self, bag: Counter, step: int, stage: int) -> None:
        expected = Counter({(m, True): 1 for m in self.shape.all_microbatches()})
        assert bag == expected, f"step {step} stage {stage}: the sealed sum holds {bag}"

    def check_the_end(self) -> None:
        steps: dict[int, int] = {}
        for record in self.recorded:
            steps[record.step] = record.attempt
        assert sorted(steps) == list(range(1, self.rules.steps + 1))
        for worker, virtual in self.workers.items():
            walker = virtual.walker
            if not walker.joining and walker.now.step == self.rules.steps + 1:
                assert virtual.state == self.right_state(self.rules.steps), (
                    f"{worker} ends with another state"
                )
