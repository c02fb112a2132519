"""What other systems do when something fails. One small class each; constants with where they come from.

All run on the same throughput model (`everstep_lab.plan`), so what differs is policy alone: how fast a
failure is seen, what is lost, how long the change takes, and what a task runs on afterwards. Only the task
that was hit reacts, and a repaired node returns to it, as in Unicron's comparison; cluster-wide ones are in
`planned.py`. Sources: [U] Unicron's accounting, [O] the simulators of Oobleck's artifact, [F] Meta's FT-HSDP,
[G] GEMINI, [C] C4's table of overheads (recalled), [T] TrainMover's measurements of others, [A] an assumption
of ours. Some have two rows: charged with what they are known to pay, and `idealised`, with what their own
papers count or nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np

from everstep_lab.plan import Costs
from everstep_lab.plan.holes import num_moving, ratio
from everstep_lab.plan.memory import STATE
from everstep_lab.plan.pipeline_orders import RESCHEDULED
from everstep_lab.plan.reroute import dead_groups, live_per_stage, throughput_ratio
from everstep_lab.plan.task_shape import Floats
from everstep_lab.plan.transition import StateSource
from everstep_lab.study.failures import Failure, Seen
from everstep_lab.study.life import Life, StudyTask
from everstep_lab.study.templates import by_templates

MINUTE_S = 60.0
STORAGE = 20e9  # bytes/s of the shared storage, as `plan.transition.Costs` has it


class Policy(ABC):
    """Reacts to failures and returns by stalling tasks and setting their rates."""

    overhead: float = 0.0  # share of the healthy rate spent while nothing fails
    checkpoint_s: float | None = None  # of those that write one to shared storage and stand still meanwhile
    in_memory: bool = False  # a state comes from the memory of nodes; from the disk only if no node is left
    disk_interval_s: float = 30 * MINUTE_S  # between checkpoints on disk

    def begin(self, life: Life) -> None:
        for task in life.tasks:
            task.overhead = self.overhead
            if self.checkpoint_s is not None:
                write = task.curve.state_bytes / STORAGE
                task.overhead += write / (write + self.checkpoint_s)

    @abstractmethod
    def failed(self, life: Life, failure: Failure, task: StudyTask) -> None:
        """A node of this task is in trouble; if severely, it is away already."""

    @abstractmethod
    def returned(self, life: Life, node: int, task: StudyTask | None) -> None:
        """A node is back, or new (then no task owns it)."""

    def spare_lost(self, life: Life, failure: Failure) -> None:
        if failure.severity == 1 and failure.node in life.spares:
            life.spares.remove(failure.node)


def take_spare(life: Life, task: StudyTask, node: int) -> bool:
    """Put a spare in the place of a lost node; the lost one will be a spare when it is back."""
    ready = [spare for spare in life.spares if spare not in life.away]
    if not ready:
        return False
    life.spares.remove(ready[0])
    task.nodes[task.nodes.index(node)] = ready[0]
    life.owner[ready[0]] = task
    life.owner.pop(node, None)
    return True


def best_on(life: Life, task: StudyTask, nodes: int) -> float:
    """The best shape that fits on so many nodes."""
    most = min(nodes * life.slots, task.curve.most)
    return float(task.curve.throughput[: most + 1].max(initial=0.0))


def same_cut_on(life: Life, task: StudyTask, nodes: int) -> float:
    """Whole replicas of the cut it started with."""
    if task.shape is None or (cut := task.curve.like(task.shape)) is None:
        return best_on(life, task, nodes)
    replicas = nodes * life.slots // (cut.stages * cut.shards)
    return float(np.max(cut.throughput[: replicas + 1], initial=0.0))


def by_size(task: StudyTask, seconds: Mapping[float, float]) -> float:
    """A constant known for some model sizes: the one of the nearest size not above."""
    parameters = task.curve.state_bytes / STATE
    fitting = [s for size, s in seconds.items() if size <= parameters * 1.05]
    return fitting[-1] if fitting else next(iter(seconds.values()))


class Megatron(Policy):
    """Restart from the checkpoint, with as many nodes as before: wait for the repair, or take a spare.

    30 min until the collective times out, 9 min to resubmit, 14 min to set up, half of a 30 min checkpoint
    interval to compute again: the 68 min of [U]. A node that dies visibly is seen in 5.7 s [U].
    `in_memory`: with a checkpoint in the memory of other hosts at every step, one step is lost [G].
    """

    timeout_s = 30 * MINUTE_S
    visible_s = 5.7
    restart_s = (9 + 14) * MINUTE_S
    checkpoint_s = 30 * MINUTE_S

    def __init__(self, *, in_memory: bool = False) -> None:
        self.in_memory = in_memory

    def replay_s(self, task: StudyTask) -> float:
        return task.step_s() if self.in_memory else 0.5 * self.checkpoint_s

    def failed(self, life: Life, failure: Failure, task: StudyTask) -> None:
        seen = self.visible_s if failure.seen is Seen.SILENCE else self.timeout_s
        task.stall(detection=seen, transition=self.restart_s, replay=self.replay_s(task))
        if failure.severity == 1 and not take_spare(life, task, failure.node):
            task.waiting = True

    def returned(self, life: Life, node: int, task: StudyTask | None) -> None:
        if task is None:
            life.spares.append(node)
            for waiting in [t for t in life.tasks if t.waiting]:
                missing = [n for n in waiting.nodes if n in life.away]
                if missing and take_spare(life, waiting, missing[0]) and len(missing) == 1:
                    waiting.waiting = False
        elif all(n not in life.away for n in task.nodes):
            task.waiting = False


class C4Month(Policy):
    """C4's account of a month with 40 crashes of one job [C]: 31.19 % of it lost, by four phases. A backup
    node takes the place of the faulty one at once, so nothing is lost between two crashes. With C4D, faults
    are located from collective communication within tens of seconds, the node is isolated and the job
    restarted without people, and checkpoints are more frequent.

                     before C4D   with C4D
        lost work        7.53 %     0.23 %     since the last checkpoint
        detection        3.41 %     0.05 %
        diagnosis       19.65 %     0.73 %     and isolation
        start            0.60 %     0.15 %     of the job
    """

    month_s = 30 * 86_400.0 / 40  # of a crash
    before: ClassVar = (0.0753, 0.0341, 0.1965, 0.0060)
    after: ClassVar = (0.0023, 0.0005, 0.0073, 0.0015)

    def __init__(self, *, with_c4d: bool) -> None:
        self.lost, self.detection, self.diagnosis, self.start = self.after if with_c4d else self.before

    def failed(self, life: Life, failure: Failure, task: StudyTask) -> None:
        task.stall(
            detection=self.detection * self.month_s,
            transition=(self.diagnosis + self.start) * self.month_s,
            replay=self.lost * self.month_s,
        )

    def returned(self, life: Life, node: int, task: StudyTask | None) -> None:
        return


class Elastic(Policy):
    """torchrun with nnodes=min:max: all workers restart from the checkpoint with those that are there.

    An exit is seen at once by its agent (5 s of polling), a hang by the collective's 10 min watchdog, a lost
    node after 30 s without a keep-alive [A]. Everybody restarts in 200 s, the least that [F]
    gives (16k GPUs); half of a 30 min checkpoint interval is computed again, also when a node is added.
    """

    seen_s: ClassVar = {Seen.EXIT: 5.0, Seen.EXCEPTION: 5.0, Seen.SILENCE: 30.0, Seen.STATISTICS: 600.0}
    restart_s = 200.0
    checkpoint_s = 30 * MINUTE_S

    def failed(self, life: Life, failure: Failure, task: StudyTask) -> None:
        again = 0.5 * self.checkpoint_s
        task.stall(detection=self.seen_s[failure.seen], transition=self.restart_s, replay=again)
        if failure.severity == 1 and not take_spare(life, task, failure.node):
            _run_on(task, same_cut_on(life, task, len(life.here(task))))

    def returned(self, life: Life, node: int, task: StudyTask | None) -> None:
        task = _adopt(life, node, task)
        before = 0.0 if task.waiting else task.rate
        rate = same_cut_on(life, task, len(life.here(task)))
        if rate > before:
            _run_on(task, rate)
            task.stall(transition=self.restart_s, replay=0.5 * self.checkpoint_s)


class Varuna(Policy):
    """Morphs to the best pipelines x replicas grid of what is left, through a checkpoint.

    Heartbeats 3 min (60 to 300 s), a checkpoint every 10 steps that blocks (120 s of 10 x 186 s at 6.7B),
    five steps lost on average, restarts of 79 to 701 s by size, without loss when a node is added [O].
    Idealised: checkpoints cost nothing, as in one of the figures of [O].
    """

    seen_s = 180.0
    restart_s: ClassVar = {0.35e9: 78.7, 2.7e9: 515.0, 6.7e9: 701.0}

    def __init__(self, *, idealised: bool = False) -> None:
        self.overhead = 0.0 if idealised else 120 / (120 + 10 * 186)

    def failed(self, life: Life, failure: Failure, task: StudyTask) -> None:
        task.stall(detection=self.seen_s, transition=by_size(task, self.restart_s), replay=5 * task.step_s())
        if failure.severity == 1 and not take_spare(life, task, failure.node):
            _run_on(task, best_on(life, task, len(life.here(task))))

    def returned(self, life: Life, node: int, task: StudyTask | None) -> None:
        task = _adopt(life, node, task)
        rate = best_on(life, task, len(life.here(task)))
        if task.waiting or rate > task.rate:
            _run_on(task, rate)
            task.pause(by_size(task, self.restart_s))


class Bamboo(Policy):
    """Every node also computes its neighbour's part; a loss is taken over, then the pipelines are re-formed.

    The redundant work costs 1.3 times the step, the least of the 1.3 to 3 that are reported; seen in 5 s,
    15 s to take over, 76 to 450 s to re-form by size [O]. With fewer than forty nodes a task one loss is
    beyond the 5 % it tolerates, so it re-forms at once. Idealised: the redundant work fits into bubbles, and
    it re-forms within the 10 to 20 s of its own simulator.
    """

    in_memory = True

    def __init__(self, *, idealised: bool = False) -> None:
        self.overhead = 0.0 if idealised else 1 - 1 / 1.3
        self.reform_s = {0.35e9: 15.0} if idealised else {0.35e9: 100.0, 2.7e9: 230.0, 6.7e9: 450.0}

    def failed(self, life: Life, failure: Failure, task: StudyTask) -> None:
        reform = by_size(task, self.reform_s)
        task.stall(detection=5.0, transition=15.0 + reform, replay=0.5 * task.step_s())
        if failure.severity == 1 and not take_spare(life, task, failure.node):
            _run_on(task, same_cut_on(life, task, len(life.here(task))))

    def returned(self, life: Life, node: int, task: StudyTask | None) -> None:
        task = _adopt(life, node, task)
        rate = same_cut_on(life, task, len(life.here(task)))
        if task.waiting or rate > task.rate:
            _run_on(task, rate)
            task.pause(by_size(task, self.reform_s))


class Oobleck(Policy):
    """Pipeline templates for every number of nodes: all that is left is used.

    A broken connection is seen in 5 s [A], the step under way is lost. A process that restarts leaves and
    returns: two reconfigurations. Charged: pipelines run whole microbatches (`templates.py`), and a change
    takes what was measured, 57 s for a loss and 100 s for a join at 6.7B on 32 GPUs [T], in proportion to
    [O]'s own seconds at other sizes [A]. Idealised: [O]'s 2 to 10 s by size, and every number of nodes is at
    least as good as a mixture of the good ones (the concave hull of the curve).
    """

    in_memory = True
    change_s: ClassVar = {0.35e9: 2.0, 2.7e9: 6.0, 6.7e9: 10.0}
    measured_s: ClassVar = {"loss": 57.0 / 10.0, "join": 100.0 / 10.0}  # over [O]'s seconds at 6.7B

    def __init__(self, *, idealised: bool = False) -> None:
        self.idealised = idealised

    def failed(self, life: Life, failure: Failure, task: StudyTask) -> None:
        change = self._change_s(task, "loss")
        if failure.severity != 1:
            change += self._change_s(task, "join")
        task.stall(detection=5.0, transition=change, replay=0.5 * task.step_s())
        if failure.severity == 1 and not take_spare(life, task, failure.node):
            _run_on(task, self._rate(life, task))

    def returned(self, life: Life, node: int, task: StudyTask | None) -> None:
        task = _adopt(life, node, task)
        _run_on(task, self._rate(life, task))
        task.pause(self._change_s(task, "join"))

    def _change_s(self, task: StudyTask, what: str) -> float:
        return by_size(task, self.change_s) * (1.0 if self.idealised else self.measured_s[what])

    def _rate(self, life: Life, task: StudyTask) -> float:
        here = len(life.here(task))
        if best_on(life, task, here) <= 0:
            return 0.0
        workers = min(here * life.slots, task.curve.most)
        best = np.maximum.accumulate(task.curve.throughput)  # more nodes than it can use do no harm
        if self.idealised:
            best = concave_hull(best)
        return max(float(best[workers]), by_templates(task.curve, workers))


class Recycle(Policy):
    """Re-routes a dead worker's microbatches to its peers, with decoupled backward and staggered optimizer,
    and moves failures to the stages where they cost least (failure normalization).

    Seen in 5 s [A], half a step lost, 10 s to take the new schedule (as Oobleck; the paper's figure is not at
    hand). Workers that change their stage for the normalization copy its state from a peer first, at the
    bandwidth of `plan.Costs`. A process that restarts is away for a minute [A]. The rate is our scheduler's
    for the dead, spread evenly or left where they fell, whichever is faster. A stage without any worker is
    restored from the checkpoint, as with `Elastic`, on a worker of another stage. No view beyond the task,
    and no more workers than it started with. Charged: all wait for a joiner's initialisation as with Oobleck
    ([T] names ReCycle, without seconds). Idealised: a join takes 10 s too.
    """

    in_memory = True
    change_s = 10.0
    restart_s = 60.0

    def __init__(self, *, idealised: bool = False) -> None:
        self.idealised = idealised

    def failed(self, life: Life, failure: Failure, task: StudyTask) -> None:
        lost = failure.severity == 1
        spare = lost and take_spare(life, task, failure.node)
        rate, moves_s, again_s = self._normalized(life, task, extra=None if lost else failure.node)
        away_s = 0.0 if lost and not spare else self.restart_s
        task.stall(
            detection=5.0,
            transition=(2 * self.change_s if away_s else self.change_s) + (0.0 if away_s else moves_s),
            replay=0.5 * task.step_s() + away_s * max(0.0, 1 - rate / task.healthy) + again_s,
        )
        if not away_s:
            _run_on(task, rate)

    def returned(self, life: Life, node: int, task: StudyTask | None) -> None:
        if task is None:
            life.spares.append(node)
            short = [(t, gone) for t in life.tasks for gone in t.nodes if gone in life.away]
            if not short or not take_spare(life, *short[0]):
                return
            task = short[0][0]
        rate, moves_s, _ = self._normalized(life, task, extra=None)
        _run_on(task, rate)
        joined = by_size(task, Oobleck.change_s) * Oobleck.measured_s["join"]
        task.pause((self.change_s if self.idealised else joined) + moves_s)

    def _normalized(self, life: Life, task: StudyTask, *, extra: int | None) -> tuple[float, float, float]:
        """The rate, seconds of copies between stages, and of work done again. `extra`: a node that is there,
        but whose first worker is being restarted.
        """
        missing = [
            i * life.slots + slot
            for i, node in enumerate(task.nodes)
            for slot in (range(life.slots) if node in life.away else [0] if node == extra else [])
        ]
        as_is, shape = ratio_without(task, missing, RESCHEDULED), task.shape
        if shape is None or (cut := task.curve.like(shape)) is None:
            return as_is * task.healthy, 0.0, 0.0
        live = live_per_stage(shape, dead_groups(shape, [i for i in missing if i < shape.workers]))
        if sum(live) < shape.stages or not num_moving(live, np.array([sum(live)]), shape.stages)[0]:
            return as_is * task.healthy, 0.0, 0.0
        even = ratio(replace(task.curve, schedule=RESCHEDULED), cut, shape.replicas, sum(live))
        if even <= as_is * 1.001:
            return as_is * task.healthy, 0.0, 0.0
        parts = np.array(float(shape.stages * shape.shards))
        moves_s = float(Costs().fetch_s(StateSource.LIVE, task.curve.state_bytes, parts))
        if min(live) == 0:
            return even * task.healthy, moves_s + Elastic.restart_s, 0.5 * Elastic.checkpoint_s
        return even * task.healthy, moves_s, 0.0


def ratio_without(task: StudyTask, missing: list[int], order: str = "") -> float:
    """Throughput with these workers gone over throughput with all, by re-routing; in the curve's own order
    of ops if none is given.
    """
    if task.shape is None:
        return max(0.0, 1 - len(missing) / max(1, task.curve.most))
    dead = dead_groups(task.shape, [i for i in missing if i < task.shape.workers])
    curve = task.curve
    return throughput_ratio(
        task.shape,
        dead,
        batch=curve.batch,
        schedule=order or curve.schedule,
        shares=curve.shares(task.shape),
    )


def concave_hull(values: Floats) -> Floats:
    """The least concave curve above these."""
    corners = [0]
    for x in range(1, len(values)):
        while len(corners) > 1:
            a, b = corners[-2], corners[-1]
            if (values[b] - values[a]) * (x - a) > (values[x] - values[a]) * (b - a):
                break
            corners.pop()
        corners.append(x)
    return np.interp(np.arange(len(values)), corners, values[corners])


def _run_on(task: StudyTask, rate: float) -> None:
    task.rate = rate
    task.waiting = rate <= 0


def _adopt(life: Life, node: int, task: StudyTask | None) -> StudyTask:
    """A node without an owner goes to the task that is furthest below its healthy rate."""
    if task is None:
        task = min(life.tasks, key=lambda t: t.rate / t.healthy)
        life.give(task, [*task.nodes, node])
    return task
