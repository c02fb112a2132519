"""Runs a scenario file: one death, driven step by step through the real recovery and the real worker states.

A file is prose (`#`), commands (`>`) and, under each command, what came of it. The commands:

    task KEY=VALUE …                  a task at its start: replicas, stages, microbatches, steps, clip, …;
                                      per_node: how many replicas of a stage are on a node
    norm of step N is X               the gradient norm of a step, over all stages; 1 if not given
    run until WORKER WHAT in step N   workers take turns, one work item each, until this one is done
    run until step N is recorded
    run until all workers wait
    run to the end
    hold WORKER to WORKER             what the one sends to the other is under way for now
    release WORKER to WORKER          … until it arrives now
    kill WORKER [and WORKER]          what it had under way is lost with it
    start WORKER                      the replacement that recovery has ordered is up
    show WORKER                       what it knows of its open steps
    show holders                      sharded states: by stage and chunk, the owner first, and who is filled

Everything but the network and the processes is the real thing: `Recovery`, `WorkerState`, the scheduler.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from everstep.core.task.owed import Owed
from everstep.core.task.recovery import Course, Recovery
from everstep.core.task.states import Over, Planning, RecoveryPolicy
from everstep.core.worker.joining import FrameUse
from everstep.core.worker.rules import TaskRules
from everstep.core.worker.step_state import StepState
from everstep.core.worker.worker_state import WorkerState
from everstep.protocol import actions as act
from everstep.protocol import events as ev
from everstep.protocol import work
from everstep.protocol.ops import Op, Worker, parse_worker
from everstep.protocol.parcels import ParcelKind, StateTransfer
from everstep.protocol.shape import Shape
from everstep.schedule import Instance, uniform
from everstep.schedule.cache import PlanCache
from everstep.schedule.recovery_answer import answer

IDLE = (work.Wait, work.Paused, work.Finished)
MOST_TURNS = 10_000


def performed(text: str) -> str:
    """The scenario with every command's output as it is now."""
    scenario = Scenario()
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("> "):
            lines += [line, *scenario.obey(line[2:])]
        elif line.startswith("#") or not line.strip():
            lines.append(line)
    return "\n".join(lines) + "\n"


class Scenario:
    def __init__(self) -> None:
        self.workers: dict[Worker, WorkerState] = {}
        self.incarnations: dict[Worker, int] = {}
        self.to_start: dict[Worker, int] = {}
        self.held: dict[tuple[Worker, Worker], list[Callable[[], None]]] = {}
        self.norms: dict[int, float] = {}
        self.saved: dict[int, dict[int, set[int]]] = {}  # step -> stage -> shares
        self.out: list[str] = []
        self.trace: dict[Worker, list[tuple[int, str]]] = {}
        self.now = 0.0
        self.per_node = 1

    def obey(self, command: str) -> list[str]:
        for pattern, method in _COMMANDS.items():
            if (found := re.fullmatch(pattern, command)) is not None:
                self.out = []
                method(self, *found.groups())
                return self.out
        raise ValueError(f"no such command: {command}")

    # -------------------------------------------------------------- commands

    def task(self, given: str) -> None:
        values = dict(pair.split("=") for pair in given.split())
        rules: dict[str, Any] = {"replicas": 2, "stages": 2, "microbatches": 1, "steps": 2}
        rules |= {k: v if k == "stagger" else float(v) if k == "clip" else int(v) for k, v in values.items()}
        self.per_node = rules.pop("per_node", 1)
        self.rules = TaskRules(**rules)
        fixed = self.rules
        shape = Shape(fixed.replicas, fixed.stages, fixed.microbatches, fixed.chunks)
        self.recovery = Recovery(shape, Course(steps=self.rules.steps), policy=RecoveryPolicy())
        grid = uniform(replicas=shape.replicas, stages=shape.stages, value=1.0)
        self.plans = PlanCache(
            Instance(
                replicas=shape.replicas,
                stages=shape.stages,
                microbatches=shape.microbatches,
                forward=grid,
                input_grad=grid,
                weight_grad=grid,
            )
        )
        for action in self.recovery.begin():
            self._perform(action)
        for worker in shape.workers():
            self.start(str(worker))
        for worker in shape.workers():
            self._turn(worker)  # it builds its initial state
        self.out = [f"  {w}  {_ops(self.workers[w].mail.order.steady)}" for w in shape.workers()]

    def norm(self, step: str, value: str) -> None:
        self.norms[int(step)] = float(value)

    def run_until_item(self, worker: str, what: str, step: str) -> None:
        self._run(lambda: self.trace.get(parse_worker(worker), [])[-1:] == [(int(step), what)])

    def run_until_recorded(self, step: str) -> None:
        self._run(lambda: self.recovery.recorded >= int(step))

    def run_until_all_wait(self) -> None:
        self._run(lambda: False, may_stop=True)

    def run_to_the_end(self) -> None:
        self._run(lambda: isinstance(self.recovery.phase, Over))

    def hold(self, one: str, other: str) -> None:
        self.held[parse_worker(one), parse_worker(other)] = []

    def release(self, one: str, other: str) -> None:
        for arrive in self.held.pop((parse_worker(one), parse_worker(other))):
            arrive()

    def kill(self, names: str) -> None:
        dead = [parse_worker(name) for name in names.split(" and ")]
        incarnations = {worker: self.incarnations.pop(worker) for worker in dead}
        for worker in dead:
            del self.workers[worker]
        self.held = {(a, b): [] if a in dead or b in dead else q for (a, b), q in self.held.items()}
        for worker in dead:
            self.happens(ev.WorkerExited(worker=worker, incarnation=incarnations[worker], reason="killed"))

    def start(self, name: str) -> None:
        worker = parse_worker(name)
        incarnation = self.incarnations[worker] = self.to_start.pop(worker)
        self.workers[worker] = WorkerState(worker, self.rules, incarnation=incarnation)
        self.happens(ev.WorkerStarted(worker=worker, incarnation=incarnation))

    def show(self, name: str) -> None:
        worker = self.workers[parse_worker(name)]
        if worker.joining:
            step = worker.joiner.state_step
            self.out.append(f"  {worker.joiner.life}{'' if step is None else f', state of step {step}'}")
        for state in worker.steps.all:
            if not worker.joining:
                self.out.append(f"  {_shown(state)}")

    def show_holders(self) -> None:
        for stage in range(self.rules.stages):
            here = {w.replica: state for w, state in sorted(self.workers.items()) if w.stage == stage}
            newest = max((state for state in here.values() if not state.joining), key=lambda s: s.now.step)
            rows = newest.chunks.holders(newest.now.step)
            words = [
                " ".join(
                    f"{k}{'' if k in here and chunk in here[k].chunks.kept else ' (empty)'}" for k in row
                )
                for chunk, row in enumerate(rows)
            ]
            self.out.append(
                f"  stage {stage}: {'; '.join(f'chunk {c}: {row}' for c, row in enumerate(words))}"
            )

    # -------------------------------------------------------------- turns

    def _run(self, is_done: Callable[[], bool], *, may_stop: bool = False) -> None:
        self.trace = {worker: [] for worker in sorted(self.workers)}
        recorded: list[str] = []
        for _ in range(MOST_TURNS):
            moved = False
            for worker in sorted(self.workers):
                moved = self._turn(worker) or moved
                if is_done():
                    break
            recorded, self.out = recorded + self.out, []
            if is_done() or not moved:
                break
        assert is_done() or may_stop, f"all workers wait: {[w.next() for w in self.workers.values()]}"
        for worker, items in self.trace.items():
            self.out += _by_step(worker, items)
        self.out += recorded

    def _turn(self, worker: Worker) -> bool:
        state = self.workers[worker]
        item = state.next()
        self._carry_out(worker)
        if isinstance(item, IDLE):
            return False
        self.trace.setdefault(worker, []).append((_step_of(item), _word(item)))
        state.finished(item, self._do(worker, item))
        self._carry_out(worker)
        return True

    def _do(self, worker: Worker, item: work.WorkItem) -> Any:
        state = self.workers[worker]
        match item:
            case work.Contribute():
                return (), dict.fromkeys(state.now.accumulated(), 1.0)
            case work.SumChunk():
                share = self.norms.get(item.step, 1.0) ** 2 / self.rules.stages
                return (share if worker.replica == item.routes.members[0] else 0.0,)
            case work.CombineTied():
                return self.norms.get(item.step, 1.0) ** 2 / self.rules.stages
            case work.Snapshot():
                self._send_state(worker, Worker(item.joiner, worker.stage), item.transfer)
            case work.SaveCheckpoint():
                self._save(worker, item)
        return None

    def _save(self, worker: Worker, item: work.SaveCheckpoint) -> None:
        shares = self.saved.setdefault(item.state_step, {})
        shares.setdefault(worker.stage, set()).update(item.chunks or (item.index,))
        whole = len(shares) == self.rules.stages and all(len(s) == item.count for s in shares.values())
        if whole and item.state_step <= self.recovery.recorded:
            self.happens(ev.CheckpointCommitted(step=item.state_step))
            self.out.append(f"  the checkpoint of step {item.state_step} is complete")

    # -------------------------------------------------------------- the network

    def _carry_out(self, worker: Worker) -> None:
        for command in self.workers[worker].take_commands():
            match command:
                case work.Send():
                    self._send(worker, command)
                case ev.Event():
                    self.happens(command)

    def _send(self, worker: Worker, command: work.Send) -> None:
        to = Worker(command.replica, command.stage)
        self._transmit(worker, to, lambda: self.workers[to].arrived(command.parcel, command.value))

    def _send_state(self, worker: Worker, to: Worker, transfer: StateTransfer) -> None:
        def arrive() -> None:
            if self.workers[to].joiner.take_state(transfer) is not FrameUse.DROP:
                self.workers[to].joiner.state_arrived(transfer)
                self._carry_out(to)

        self._transmit(worker, to, arrive)

    def _transmit(self, worker: Worker, to: Worker, arrive: Callable[[], Any]) -> None:
        if to not in self.workers:
            return
        if (worker, to) in self.held:
            self.held[worker, to].append(arrive)
        else:
            arrive()

    # -------------------------------------------------------------- recovery

    def happens(self, event: ev.Event) -> None:
        self.now += 1.0
        actions = self.recovery.handle(event, self.now)
        self.recovery.validate()
        for action in actions:
            self._perform(action)

    def _perform(self, action: act.Action) -> None:
        say = self.out.append
        match action:
            case act.StartWorker():
                self.to_start[action.worker] = action.incarnation
                say(f"  a process for {action.worker} is ordered: {action.because}")
            case act.InterruptWorkers():
                say(f"  epoch {action.epoch}: {action.because}")
                self._interrupt(action)
            case act.ComputePlan():
                phase = self.recovery.phase
                if isinstance(phase, Planning):
                    self.out += _owed(phase.owed, self.recovery.shape)
                else:
                    say(f"  epoch {action.epoch}: {action.because}")
                self.happens(answer(action, self.plans, "decoupled"))
            case act.ResumeWorkers():
                book = {w: (f"node {w.replica // self.per_node}", 1) for w in self.recovery.shape.workers()}
                for worker, own in action.orders.items():
                    order = work.resume(replace(action.facts, book=book), own)
                    say(f"    {worker} {_resumed(order)}")
                    if worker in self.workers:
                        self.workers[worker].resume(order)
                        self._carry_out(worker)
            case act.CopyState():
                say(f"  {action.because}")
                if action.source in self.workers:
                    self.workers[action.source].feeder.copy_to(
                        action.joiner.replica, action.incarnation, action.transfer
                    )
            case act.StopFeeding():
                say(f"  worker {action.source} stops feeding: {action.because}")
                if action.source in self.workers:
                    self.workers[action.source].feeder.stop(action.joiner.replica)
            case act.RecordStep():
                total = action.microbatches_committed
                say(f"  step {action.step} is recorded: {total} microbatches, each once")
            case act.FinishTask() | act.FailTask():
                say(f"  {action.because}")

    def _interrupt(self, action: act.InterruptWorkers) -> None:
        """The members report their ledgers, all before the first is heard."""
        ledgers = [(w, self.workers[w].interrupt(action.epoch)) for w in action.workers if w in self.workers]
        self.out += [f"    {worker} {_reported(ledger)}" for worker, ledger in ledgers]
        for worker, ledger in ledgers:
            self.happens(ev.LedgerReported(worker=worker, epoch=action.epoch, ledger=ledger))


_COMMANDS: dict[str, Callable[..., None]] = {
    r"task ?(.*)": Scenario.task,
    r"norm of step (\d+) is ([\d.]+)": Scenario.norm,
    r"run until step (\d+) is recorded": Scenario.run_until_recorded,
    r"run until (\d+:\d+) (.+) in step (\d+)": Scenario.run_until_item,
    r"run until all workers wait": Scenario.run_until_all_wait,
    r"run to the end": Scenario.run_to_the_end,
    r"hold (\S+) to (\S+)": Scenario.hold,
    r"release (\S+) to (\S+)": Scenario.release,
    r"kill (\S+(?: and \S+)*)": Scenario.kill,
    r"start (\S+)": Scenario.start,
    r"show holders": Scenario.show_holders,
    r"show (\S+)": Scenario.show,
}


# ------------------------------------------------------------------ words


def _word(item: work.WorkItem) -> str:
    match item:
        case work.Compute():
            return f"{_op(item.op)}{' (ghost)' if item.ghost else ''}"
        case work.AssembleSum():
            given = item.chunks and item.chunks[0].what is ParcelKind.COPY
            return "takes the sum" if given else "holds the sum"
        case work.Update():
            return "skips" if item.scale is None else "updates eagerly" if item.keep else "updates"
        case work.Snapshot():
            return f"sends its state to replica {item.joiner}"
        case work.ApplyFeed():
            return "follows"
        case work.LoadFill():
            return f"takes the state of chunk {item.fill.owner} after step {item.fill.step}"
        case _:
            words = {
                work.Contribute: "contributes its part",
                work.GatherParts: "adds up the parts of its node",
                work.SumChunk: "sums its chunk",
                work.CombineTied: "combines",
                work.Commit: "commits",
                work.Undo: "undoes",
                work.AdoptWeights: "adopts weights",
                work.Restore: "restores",
                work.SaveCheckpoint: "saves",
                work.StoreCopy: "stores",
            }
            return words[type(item)]


def _op(op: Op) -> str:
    return f"{op.kind}{'' if op.microbatch is None else op.microbatch}"


def _ops(ops: Any) -> str:
    return " ".join(_op(op) for op in ops) or "nothing"


def _step_of(item: Any) -> int:
    if isinstance(item, work.Snapshot):
        return item.transfer.state_step
    if isinstance(item, work.LoadFill):
        return item.fill.step + 1
    return int(item.step if hasattr(item, "step") else item.state_step)


def _by_step(worker: Worker, items: list[tuple[int, str]]) -> Iterator[str]:
    for step in dict.fromkeys(step for step, _ in items):
        ops = [word for at, word in items if at == step and word[0].isupper()]
        others = [word for at, word in items if at == step and not word[0].isupper()]
        yield f"  {worker}  step {step}: {', '.join([' '.join(ops), *others] if ops else others)}"


def _reported(ledger: work.Ledger) -> str:
    if ledger.joining:
        return f"joins, with the state of step {ledger.step - 1}"
    before = f"; of step {ledger.step - 1}: {_ops(ledger.done_before)}" if ledger.done_before else ""
    return f"is in step {ledger.step}, done: {_ops(ledger.done)}{before}"


def _owed(owed: Owed, shape: Shape) -> Iterator[str]:
    replicas = range(shape.replicas)
    for step, broken in owed.broken.items():
        for stage in range(shape.stages):
            missing = [
                f"{kind}{microbatch}"
                for microbatch in shape.all_microbatches()
                for kind in "FIW"
                if kind not in broken.done.get((microbatch, stage), (0, ""))[1]
                and not any((step, microbatch) in owed.ghosts.get(Worker(k, stage), ()) for k in replicas)
            ]
            yield f"    owed in step {step} at stage {stage}: {' '.join(missing) or 'nothing'}"
    for worker, steps in owed.give.items():
        for step, peers in steps.items():
            names = " ".join(str(Worker(k, worker.stage)) for k in peers)
            yield f"    {worker} gives its sum of step {step} to {names}"
    for worker, places in owed.ghosts.items():
        names = " ".join(f"{microbatch} of step {step}" for step, microbatch in sorted(places))
        yield f"    {worker} runs {names} again, for its outputs only"
    if owed.rewind is not None:
        yield f"    the eager update of step {owed.rewind} is undone"


def _resumed(order: work.Resume) -> str:
    lists = {order.step: order.ops(order.step), **order.lists}
    text = ", then ".join(f"step {step}: {_ops(ops)}" for step, ops in sorted(lists.items()))
    verb = f"loads the state of step {order.restore}; " if order.restore is not None else ""
    return f"{verb}resumes with {text}"


def _shown(state: StepState) -> str:
    return f"step {state.step}: sum {state.sum}, seal {state.seal}, update {state.update}"
