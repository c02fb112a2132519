"""One storm, drawn from one seed: shape, rules, weather and faults.

A swarm, as in TigerBeetle's simulator: every seed switches a random few kinds of fault on and the others off.
A mix of everything would be the same grey storm each time, where one common fault hides the rare ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from everstep.core.worker.rules import TaskRules
from everstep.protocol.ops import Kind, Microbatch, Worker
from everstep.protocol.shape import CHUNKS_PER_REPLICA
from everstep_lab.draw import Draw
from tests.storms.faults import (
    HERE,
    OF_AGENTS,
    OF_CLUSTERS,
    OF_CUTS,
    OF_HANGS,
    OF_LISTENER,
    OF_ROLES,
    TRIGGERS,
    WHO_WORKERS,
    FaultKind,
    StormFault,
)

StormKind = Literal[
    "",
    "cluster",
    "moves",
    "sharded",
    "sharded-cluster",
    "sharded-moves",
    "groups",
    "votes",
    "flips",
    "corruption",
    "spikes",
    "hangs",
    "cuts",
    "plans",
    "agents",
    "tasks",
    "roles",
    "crowded",
    "deaf",
]
OP_US = 1_000  # a typical op; all else is in proportion to it
FOR_GOOD = (FaultKind.SLEEP, FaultKind.DRAIN)  # no end that anything could wait for
FOR_GOOD_US = 3_600_000_000
MOST_DEAF_US = 250_000  # to one task alone; less than nodes of a task are waited for of which nobody is heard
OF_TASKS = tuple(
    kind
    for kind in FaultKind
    if kind
    not in (
        *OF_CLUSTERS,
        *OF_HANGS,
        *OF_CUTS,
        *OF_AGENTS,
        *OF_ROLES,
        *OF_LISTENER,
        FaultKind.SHARD,
        FaultKind.UNREAD,
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherTask:
    """A task of one worker beside the one that is simulated in full. Times in us."""

    name: str
    steps: int
    submitted_us: int
    killed_us: tuple[int, ...] = ()  # when its worker dies, if it has one then
    cancelled_us: int | None = None

    def __str__(self) -> str:
        words = [f"{self.name}: {self.steps} steps, at {self.submitted_us / 1e3:g} ms"]
        words += [f"its worker dies at {at / 1e3:g} ms" for at in self.killed_us]
        words += [] if self.cancelled_us is None else [f"cancelled at {self.cancelled_us / 1e3:g} ms"]
        return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """How long things take when nothing is wrong."""

    op_us: int = OP_US
    hop_us: int = 300  # between two workers
    order_us: int = 300  # between coordinator and worker
    plan_us: int = 2_000
    sync_us: int = 100  # until a journal entry is on disk
    start_us: int = 8_000  # until a process is up
    exit_us: int = 500  # until an agent knows that a process is gone
    clear_us: int = 300  # from then until its memory is free
    silence_us: int = 6_000  # until the coordinator gives up on a node
    overdue_us: int = 30_000  # until an agent kills a worker that stands still
    save_us: int = 3_000  # until a checkpoint's part is on disk
    wake_us: int = 0  # until a waiting process looks into its inbox; more may have come by then
    copy_us: int = 0  # until a joiner holds a peer's state; 0: four hops
    op_times_us: Mapping[Kind, int] | None = None  # measured ones; then nothing is left to chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Gray:
    """Memory errors that are corrected: now and then on every node, again and again on a gray one. Hours are
    milliseconds here.
    """

    errors: tuple[tuple[int, int], ...]  # when, in us, and which node: a number, to be taken by their count
    node: int | None = None  # the gray one, the same way


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A worker's machine flips a bit: in what it makes of a microbatch, or in its state (None). `lasting`: in
    all it computes from this step on, until its process is gone; `steady`: the same bits each time.
    """

    worker: Worker
    step: int
    microbatch: Microbatch | None
    lasting: bool = False
    steady: bool = True

    def strikes(self, step: int, microbatch: Microbatch | None, incarnation: int) -> bool:
        if self.lasting:
            return incarnation == 1 and microbatch is not None and step >= self.step
        return incarnation == 1 and (step, microbatch) == (self.step, self.microbatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    seed: int
    rules: TaskRules
    mode: str = "decoupled"
    rejoin_after_steps: int = 0
    max_restarts: int = 200
    workers_per_node: int = 1
    nodes_per_rack: int = 2
    scattered: bool = False  # places are spread over nodes at random, else in order
    weather: Weather = Weather()
    faults: tuple[StormFault, ...] = ()
    moves: tuple[int, ...] = ()  # when another shape is asked for, in us
    shards: int = 1  # processes per worker
    flip: Flip | None = None
    gray: Gray | None = None
    spike: Flip | None = None  # its machine gives a loss that is not a number, once
    hangs: bool = False  # starts, disks and copies may never end, so deadlines are short
    planned: bool = False  # a planner is asked at every change, and gives and takes as it likes
    roles: bool = False  # that planner also lets workers change their stage
    pauses: tuple[tuple[int, int], ...] = ()  # when an operator pauses the task, and for how long, in us
    cancel_us: int | None = None  # when an operator cancels it
    others: tuple[OtherTask, ...] = ()

    def keep(self, which: tuple[int, ...]) -> Spec:
        return replace(self, faults=tuple(self.faults[i] for i in which))

    def lines(self) -> list[str]:
        """Seed first, then every parameter: what a reader needs before the storm begins."""
        r, w = self.rules, self.weather
        return [
            f"seed {self.seed}",
            f"shape {r.replicas} x {r.stages}, {r.microbatches} microbatches, {r.steps} steps, {self.mode}",
            f"rules clip {r.clip}, stagger {r.stagger}, tied {r.tied}, checkpoint every {r.checkpoint_every}",
            f"nodes of {self.workers_per_node} workers, racks of {self.nodes_per_rack} nodes, "
            f"{'scattered' if self.scattered else 'in order'}; rejoin after {self.rejoin_after_steps} steps",
            f"weather op {w.op_us} us, hop {w.hop_us}, order {w.order_us}, plan {w.plan_us}, "
            f"sync {w.sync_us}, start {w.start_us}, exit {w.exit_us}, silence {w.silence_us}, "
            f"save {w.save_us}",
            *([f"optimizer states in {r.chunks} chunks per stage"] if r.chunks else []),
            *([f"workers of {self.shards} processes"] if self.shards > 1 else []),
            *([f"states in memory every {r.copy_every} steps"] if r.copy_every else []),
            *(
                [f"votes every {r.vote_every} steps{', on all microbatches' if r.vote_all else ''}"]
                if r.vote_every
                else []
            ),
            *([f"{self.flip}"] if self.flip else []),
            *([f"{len(self.gray.errors)} corrected errors; gray: {self.gray.node}"] if self.gray else []),
            *([f"a loss that is no number: {self.spike}"] if self.spike else []),
            *(["a planner that changes its mind"] if self.planned else []),
            *(["workers that change their stage"] if self.roles else []),
            *(f"paused at {at / 1e3:g} ms for {span / 1e3:g} ms" for at, span in self.pauses),
            *([f"cancelled at {self.cancel_us / 1e3:g} ms"] if self.cancel_us is not None else []),
            *(f"another shape at {at_us / 1e3:g} ms" for at_us in self.moves),
            *(str(task) for task in self.others),
            *(f"fault {i}: {fault}" for i, fault in enumerate(self.faults)),
        ]

    @property
    def is_deaf_only(self) -> bool:
        """Nothing goes wrong, but that the coordinator does not hear of it for a while."""
        others = any(task.killed_us or task.cancelled_us is not None for task in self.others)
        deaf = bool(self.faults) and all(fault.what is FaultKind.DEAF for fault in self.faults)
        return deaf and not (others or self.flip or self.rules.replays or self.planned)

    @property
    def is_calm(self) -> bool:
        """Nothing is planted, in other tasks neither: deaths of theirs can cost this one a node."""
        others = any(task.killed_us for task in self.others)
        return not (self.faults or self.flip or self.rules.replays or others)


def draw_spec(seed: int) -> Spec:
    """Everything about one storm."""
    draw = Draw(seed, "spec")
    rules = _draw_rules(draw)
    weather = Weather(
        hop_us=draw.choice((30, 300, 3_000)),
        order_us=draw.choice((30, 300, 3_000)),
        plan_us=draw.choice((100, 2_000, 20_000)),
        start_us=draw.choice((500, 8_000, 40_000)),
        silence_us=draw.choice((2_000, 6_000, 30_000)),
        save_us=draw.choice((100, 3_000, 20_000)),
        wake_us=Draw(seed, "wake").choice((0, 0, 0, 40, 400)),
        clear_us=Draw(seed, "clear").choice((300, 3_000, 20_000)),
    )
    spec = Spec(
        seed=seed,
        rules=rules,
        mode=draw.choice(("decoupled", "decoupled", "staggered", "decoupled")),
        rejoin_after_steps=draw.choice((0, 0, 0, 1, 2)),
        workers_per_node=draw.choice((1, 1, 2, 2, 3)),
        nodes_per_rack=draw.choice((1, 2, 3)),
        scattered=draw.chance(0.5),
        weather=weather,
    )
    return replace(spec, faults=draw_faults(Draw(seed, "faults"), spec))


def draw_storm(seed: int, kind: StormKind = "") -> Spec:
    """For one task's recovery alone, for the whole cluster, or for that with other shapes asked for; each
    also with sharded optimizer states. `groups`: for the whole cluster, with workers of several processes.
    """
    sharded, around = kind.startswith("sharded"), kind.removeprefix("sharded").removeprefix("-")
    spec = draw_spec(seed)
    if around:
        spec = with_nodes(spec)
    if around in AROUND:
        spec = AROUND[around](spec)
    return with_sharded_states(spec) if sharded else spec


def is_of_cluster(kind: StormKind) -> bool:
    """Is it a storm around the whole coordinator?"""
    return kind not in ("", "sharded")


def with_nodes(spec: Spec) -> Spec:
    """The same storm around a whole cluster, in two of three seeds with faults of nodes and coordinators."""
    draw = Draw(spec.seed, "nodes")
    if not spec.faults or draw.chance(1 / 3):
        return spec
    kinds = draw.shuffled(OF_CLUSTERS)[: draw.choice((1, 1, 2))]
    if set(FOR_GOOD) <= set(kinds):  # there is one node to spare
        kinds.pop()
    duration = run_time_us(spec)
    more = [_draw_node_fault(draw, kind, duration) for kind in kinds]
    return replace(spec, faults=(*spec.faults, *more))


def _draw_node_fault(draw: Draw, what: FaultKind, duration_us: int) -> StormFault:
    fault = draw_fault(draw, what, duration_us)
    if what in FOR_GOOD:
        return replace(fault, span_us=FOR_GOOD_US)
    return replace(fault, span_us=4 * fault.span_us) if what is FaultKind.FREEZE else fault


def with_moves(spec: Spec) -> Spec:
    """The same storm for a task that keeps states in memory and is asked for other shapes."""
    draw = Draw(spec.seed, "moves")
    rules = replace(spec.rules, copy_every=draw.choice((0, 1, 1, 2)))
    duration = run_time_us(spec)
    moves = tuple(draw.below(duration) for _ in range(draw.between(1, 3)))
    return _with_unread_memory(replace(spec, rules=rules, moves=moves))


def _with_unread_memory(spec: Spec) -> Spec:
    """In two of three seeds with faults the memory of a node or two cannot be read, mostly around a move."""
    draw = Draw(spec.seed, "unread")
    if not spec.faults or draw.chance(1 / 3):
        return spec
    more = [
        StormFault(
            what=FaultKind.UNREAD,
            at_us=max(0, draw.choice(spec.moves) + draw.below(20_000) - 10_000),
            target=draw.below(64),
            span_us=draw.choice((5_000, 50_000, 500_000)),
        )
        for _ in range(draw.choice((1, 1, 2)))
    ]
    return replace(spec, faults=(*spec.faults, *more))


def with_sharded_states(spec: Spec) -> Spec:
    """The same storm for a task whose replicas share the optimizer states of their stage."""
    rules = spec.rules
    return replace(spec, rules=replace(rules, tied=None, chunks=CHUNKS_PER_REPLICA * rules.replicas))


def with_votes(spec: Spec) -> Spec:
    """The same storm for a task whose replicas check each other; in one of three seeds with sharded ones."""
    draw = Draw(spec.seed, "votes")
    every = draw.between(1, spec.rules.microbatches) > 1
    spec = replace(spec, rules=replace(spec.rules, vote_every=draw.choice((1, 1, 2, 3)), vote_all=every))
    return with_sharded_states(spec) if draw.chance(1 / 3) else spec


def with_hangs(spec: Spec) -> Spec:
    """The same storm with processes that never start, disks that never answer, and nodes that leave."""
    draw = Draw(spec.seed, "hangs")
    rules, duration = spec.rules, run_time_us(spec)
    rules = replace(rules, checkpoint_every=draw.choice((1, 1, 2)), copy_every=draw.choice((0, 0, 1)))
    kinds = draw.shuffled(OF_HANGS)[: draw.choice((1, 2, 2, 3))]
    more = [draw_fault(draw, draw.choice(kinds), duration) for _ in range(draw.between(1, 4))]
    # Some strike while the task looks for its first checkpoint and its first processes start.
    more += [replace(fault, at_us=draw.below(1_000), after="") for fault in more[: draw.choice((0, 1, 2))]]
    return replace(spec, rules=rules, faults=(*spec.faults, *more), hangs=True)


def with_cuts(spec: Spec) -> Spec:
    """A node that its peers do not reach, until it is left; in half of the seeds nothing else goes wrong."""
    draw = Draw(spec.seed, "cuts")
    rules = replace(spec.rules, replicas=max(2, spec.rules.replicas), copy_every=draw.choice((0, 1)))
    cut = draw_fault(draw, FaultKind.DATA, run_time_us(spec))
    others = spec.faults if draw.chance(0.5) else ()
    return replace(spec, rules=rules, faults=(*others, cut))


def with_plans(spec: Spec) -> Spec:
    """The same storm with a planner, and an operator who pauses the task, or cancels it."""
    draw = Draw(spec.seed, "plans")
    rules = replace(spec.rules, checkpoint_every=draw.choice((1, 1, 2)), copy_every=draw.choice((0, 1)))
    duration = run_time_us(spec)
    pauses = [(draw.below(duration), draw.spread(100_000)) for _ in range(draw.choice((0, 1, 1, 2)))]
    cancels = Draw(spec.seed, "cancel")
    cancel_us = cancels.below(2 * duration) if cancels.chance(0.25) else None
    return replace(spec, rules=rules, planned=True, pauses=tuple(pauses), cancel_us=cancel_us)


def with_roles(spec: Spec) -> Spec:
    """The same storm, in which a stage loses most of its nodes, and a planner lets workers of other stages
    move there. In one of three seeds states are sharded too.
    """
    draw = Draw(spec.seed, "roles")
    rules = replace(spec.rules, replicas=draw.choice((4, 4, 5)), stages=draw.choice((2, 2, 2, 3)), tied=None)
    rules = replace(rules, microbatches=draw.choice((1, 1, 2)), steps=rules.steps + 3)
    spec = replace(spec, rules=rules, planned=True, roles=True, workers_per_node=1)
    away_us = spec.weather.start_us + spec.weather.silence_us
    more = [
        StormFault(
            what=FaultKind.STAGE,
            at_us=draw.below(2_000),
            target=draw.below(64),
            span_us=draw.choice((5, 20)) * away_us,
            after=draw.choice(("hold", "update")),
            nth=draw.between(1, 12),
        )
        for _ in range(draw.choice((1, 1, 2)))
    ]
    spec = replace(spec, faults=(*spec.faults, *more))
    return with_sharded_states(spec) if draw.chance(1 / 3) else spec


def with_flip(spec: Spec) -> Spec:
    """A calm storm in which every contribution is checked, and one of them, or one state, is wrong."""
    draw = Draw(spec.seed, "flips")
    rules = spec.rules
    replicas = max(2, rules.replicas)
    # Without norms that matter: an update that is undone breaks a step, in which nothing is checked.
    rules = replace(rules, replicas=replicas, vote_every=1, vote_all=True, clip=None)
    worker = Worker(draw.below(rules.replicas), draw.below(rules.stages))
    own = Microbatch(worker.replica, draw.below(rules.microbatches))
    flip = Flip(worker=worker, step=draw.between(1, rules.steps), microbatch=draw.choice((own, own, None)))
    return replace(spec, rules=rules, faults=(), flip=flip)


def with_corruption(spec: Spec) -> Spec:
    """The same storm for a task with votes, one of whose machines computes wrong numbers from a step on.
    Where these are the same bits each time, a third replica is needed to tell who is wrong. Nodes correct
    errors now and then; in half of the seeds one of them does so far too often.
    """
    draw = Draw(spec.seed, "corruption")
    steady = draw.chance(0.5)
    rules = replace(
        spec.rules,
        replicas=max(3 if steady else 2, spec.rules.replicas),
        steps=draw.between(6, 9),
        vote_every=1,  # of others nothing is promised about steps between votes
        vote_all=draw.between(1, spec.rules.microbatches) > 1,
        checkpoint_every=draw.choice((1, 2)),
        copy_every=draw.choice((0, 1, 2)),
        clip=None,  # an update that is undone breaks a step, in which nothing is checked
        tied=None,
    )
    worker = Worker(draw.below(rules.replicas), draw.below(rules.stages))
    first = draw.between(2, rules.steps - 2)
    flip = Flip(worker=worker, step=first, microbatch=None, lasting=True, steady=steady)
    spec = replace(spec, rules=rules, flip=flip)
    return replace(spec, gray=_draw_gray(Draw(spec.seed, "gray"), 2 * run_time_us(spec)))


def _draw_gray(draw: Draw, duration_us: int) -> Gray:
    errors = [(draw.below(duration_us), draw.below(64)) for _ in range(draw.between(0, 4))]
    if draw.chance(0.5):
        return Gray(errors=tuple(sorted(errors)))
    bad = draw.below(64)
    every_us = draw.between(1_100, 3_000)
    errors += [(at, bad) for at in range(draw.below(duration_us), duration_us, every_us)]
    return Gray(errors=tuple(sorted(errors)), node=bad)


def with_spikes(spec: Spec) -> Spec:
    """The same storm, in which steps with a NaN are computed again: the data's, which come again, and in half
    of the seeds one that a machine has made. In one of two seeds replicas check each other.
    """
    draw = Draw(spec.seed, "spikes")
    spec = with_votes(spec) if draw.chance(1 / 2) else spec
    rules = replace(spec.rules, replays=True, clip=1.0)
    worker = Worker(draw.below(rules.replicas), rules.stages - 1)
    microbatch = Microbatch(worker.replica, draw.below(rules.microbatches))
    spike = Flip(worker=worker, step=draw.between(1, rules.steps), microbatch=microbatch)
    return replace(spec, rules=rules, spike=spike if draw.chance(1 / 2) else None)


def with_groups(spec: Spec) -> Spec:
    """The same storm for workers of two or three processes; some kills hit one that is not the first. In one
    of three seeds states are sharded too, in one of three copies are kept in memory.
    """
    draw = Draw(spec.seed, "groups")
    faults = [
        replace(fault, what=FaultKind.SHARD) if fault.what is FaultKind.KILL and draw.chance(0.5) else fault
        for fault in spec.faults
    ]
    if spec.faults and draw.chance(0.5):
        faults.append(draw_fault(draw, FaultKind.SHARD, run_time_us(spec)))
    spec = replace(spec, shards=draw.choice((2, 2, 3)), faults=tuple(faults))
    if draw.chance(1 / 3):
        spec = replace(spec, rules=replace(spec.rules, copy_every=1))
    return with_sharded_states(spec) if draw.chance(1 / 3) else spec


def _draw_rules(draw: Draw) -> TaskRules:
    replicas = draw.choice((1, 2, 2, 2, 3, 3, 3, 4))
    stages = draw.choice((1, 2, 2, 2, 3, 3))
    microbatches = draw.choice((1, 1, 2, 2, 3) if replicas * stages <= 6 else (1, 2))
    clip = draw.chance(0.5)
    return TaskRules(
        replicas=replicas,
        stages=stages,
        microbatches=microbatches,
        steps=draw.between(3, 6),
        clip=1.0 if clip else None,
        stagger=draw.choice(("auto", "always", "always", "never")),
        checkpoint_every=draw.choice((0, 1, 2)) if replicas > 1 else draw.choice((1, 2)),
        tied=(0, stages - 1) if stages > 1 and draw.chance(0.2) else None,
    )


def draw_faults(draw: Draw, spec: Spec, kinds: tuple[FaultKind, ...] = OF_TASKS) -> tuple[StormFault, ...]:
    """A random few kinds of fault, some faults of these kinds. One seed in sixteen is calm."""
    if draw.chance(1 / 16):
        return ()
    chosen = draw.shuffled(kinds)[: draw.choice((1, 1, 2, 2, 3, 5))]
    if draw.chance(0.7):
        chosen.append(FaultKind.KILL)
    duration = run_time_us(spec)
    return tuple(draw_fault(draw, draw.choice(chosen), duration) for _ in range(draw.between(1, 6)))


def draw_fault(draw: Draw, what: FaultKind, duration_us: int) -> StormFault:
    """One fault of this kind: aimed at something that happens, or at any moment."""
    aimed = draw.chance(0.5)
    target = draw.below(64)
    if aimed and what in WHO_WORKERS and draw.chance(0.6):
        target = HERE
    return StormFault(
        what=what,
        at_us=draw.spread(draw.choice((20, 300, 2_000))) if aimed else draw.below(duration_us),
        target=target,
        span_us=draw.spread(draw.choice((1_000, 10_000, 60_000))),
        factor=draw.choice((2, 5, 20)) if what in (FaultKind.SLOW, FaultKind.FLAP, FaultKind.LAG) else 1,
        after=draw.choice(TRIGGERS) if aimed else "",
        nth=draw.between(1, draw.choice((4, 40))),
    )


def run_time_us(spec: Spec) -> int:
    """About how long the storm would take if nothing went wrong."""
    rules, weather = spec.rules, spec.weather
    a_step = 3 * weather.op_us * (rules.microbatches + rules.stages) + weather.hop_us * (2 * rules.stages + 3)
    return weather.start_us + weather.plan_us + rules.steps * a_step


def with_replaced_agents(spec: Spec) -> Spec:
    """The same storm with agents that are replaced under their workers, which die meanwhile or do not."""
    draw, duration = Draw(spec.seed, "agents"), run_time_us(spec)
    rules = replace(spec.rules, checkpoint_every=draw.choice((0, 1, 2)), copy_every=draw.choice((0, 0, 1)))
    more = [draw_fault(draw, FaultKind.REPLACE, duration) for _ in range(draw.between(1, 6))]
    for fault in more[: draw.choice((0, 1, 2))]:  # and a worker dies in it
        kill = draw_fault(draw, FaultKind.KILL, duration)
        more.append(replace(kill, at_us=fault.at_us + draw.below(fault.span_us + 1), after="", nth=1))
    return replace(spec, rules=rules, faults=(*spec.faults, *more))


def with_crowded_nodes(spec: Spec) -> Spec:
    """The same storm for a task with several replicas of each stage on a node, with connections that break
    too. In one of three seeds states are sharded.
    """
    draw, duration = Draw(spec.seed, "crowded"), run_time_us(spec)
    stages = draw.choice((1, 1, 1, 2))
    rules = replace(spec.rules, replicas=draw.choice((4, 4, 5, 6, 7)), stages=stages, tied=None)
    rules = replace(rules, microbatches=draw.choice((1, 1, 2)))
    cuts = [draw_fault(draw, FaultKind.CUT, duration) for _ in range(draw.choice((0, 0, 1, 3)))]
    spec = replace(
        spec,
        rules=rules,
        workers_per_node=stages * draw.choice((2, 2, 3)),
        faults=(*spec.faults, *cuts) if spec.faults else (),
    )
    return with_sharded_states(spec) if draw.chance(1 / 3) else spec


def with_other_tasks(spec: Spec) -> Spec:
    """The same storm beside other tasks, which come, die and are cancelled; half of them with plans."""
    draw, duration = Draw(spec.seed, "tasks"), run_time_us(spec)
    others = [
        OtherTask(
            name=f"other-{number}",
            steps=draw.between(2, 12),
            submitted_us=draw.choice((1, draw.below(duration))),
            killed_us=tuple(draw.below(2 * duration) for _ in range(draw.choice((0, 1, 1, 3)))),
            cancelled_us=draw.between(duration, 2 * duration) if draw.chance(0.2) else None,
        )
        for number in range(draw.between(1, 4))
    ]
    around = with_plans(spec) if draw.chance(0.5) else spec
    return replace(around, others=tuple(others))


def with_a_deaf_coordinator(spec: Spec) -> Spec:
    """The same storm around a coordinator whose own network is away for a while, once or a few times. In half
    of the seeds nothing else goes wrong, and all workers train: then none may be ended, and no step is done
    again.
    """
    draw, duration = Draw(spec.seed, "deaf"), run_time_us(spec)
    if draw.chance(0.6):
        spec = with_other_tasks(spec)
    more = [draw_fault(draw, FaultKind.DEAF, duration) for _ in range(draw.choice((1, 1, 2, 3)))]
    more = [replace(fault, span_us=fault.span_us * draw.choice((1, 2, 5))) for fault in more]
    if draw.chance(0.5) and spec.faults:
        return replace(spec, faults=(*spec.faults, *more))
    others = tuple(replace(task, killed_us=(), cancelled_us=None) for task in spec.others)
    rules = replace(spec.rules, checkpoint_every=draw.choice((0, 1, 2)), copy_every=draw.choice((0, 1)))
    faults = [replace(fault, after=draw.choice(("sum", "hold", "update"))) for fault in more]
    if len(faults) > 1 or not faults[0].is_of_all:  # others are heard: the task could go on elsewhere
        faults = [replace(fault, span_us=min(fault.span_us, MOST_DEAF_US)) for fault in faults]
    calm = replace(spec, rules=rules, planned=False, pauses=(), cancel_us=None, others=others)
    return replace(calm, faults=tuple(faults))


AROUND: Mapping[str, Callable[[Spec], Spec]] = {
    "moves": with_moves,
    "groups": with_groups,
    "votes": with_votes,
    "flips": with_flip,
    "corruption": with_corruption,
    "spikes": with_spikes,
    "hangs": with_hangs,
    "cuts": with_cuts,
    "plans": with_plans,
    "agents": with_replaced_agents,
    "tasks": with_other_tasks,
    "roles": with_roles,
    "crowded": with_crowded_nodes,
    "deaf": with_a_deaf_coordinator,
}
