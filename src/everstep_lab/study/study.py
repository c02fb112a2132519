"""One study: a cluster, its tasks, a source of failures, policies; many seeds; what came of it.

Every policy lives through the same failures, starts from the same allocation (the plan's, in whole nodes),
and is charged on the same throughput model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from everstep.errors import UserError
from everstep_lab.plan import Assignment, Cluster, Curve, PlanNode, TaskSpec
from everstep_lab.plan.answer import decide
from everstep_lab.study.failures import Failure, Trace
from everstep_lab.study.life import Life, StudyTask, lost_by_kind
from everstep_lab.study.planned import Ideal, Means, PlannedPolicy, everstep, unicron
from everstep_lab.study.policies import (
    Bamboo,
    C4Month,
    Elastic,
    Megatron,
    Oobleck,
    Policy,
    Recycle,
    Varuna,
)

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "megatron": Megatron,
    "megatron+memory": lambda: Megatron(in_memory=True),
    "before-c4d": lambda: C4Month(with_c4d=False),
    "c4d": lambda: C4Month(with_c4d=True),
    "elastic": Elastic,
    "varuna": Varuna,
    "varuna-idealised": lambda: Varuna(idealised=True),
    "bamboo": Bamboo,
    "bamboo-idealised": lambda: Bamboo(idealised=True),
    "oobleck": Oobleck,
    "oobleck-idealised": lambda: Oobleck(idealised=True),
    "recycle": Recycle,
    "recycle-idealised": lambda: Recycle(idealised=True),
    "unicron": unicron,
    "everstep": everstep,
    "ideal": Ideal,
}
OF_C4 = ("before-c4d", "c4d")  # accounts of that month, not policies for any trace
NO_MEANS = Means(
    reroute=False, stagger=False, mid_step=False, repair_aware=False, placement=False, fast_detection=False
)
ABLATIONS: Mapping[str, Callable[[], Policy]] = {
    "everstep": everstep,
    "without re-routing": lambda: everstep(Means(reroute=False)),
    "without staggering": lambda: everstep(Means(stagger=False)),
    "without mid-step resume": lambda: everstep(Means(mid_step=False)),
    "without placement by slots": lambda: everstep(Means(placement=False)),
    "without fast detection": lambda: everstep(Means(fast_detection=False)),
    "without any of them": lambda: everstep(NO_MEANS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSetup:
    name: str
    curve: Curve
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What does not change from seed to seed."""

    slots: int
    tasks: Sequence[TaskSetup]
    spares: int = 0  # nodes kept out of the first allocation


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """One policy's life under one trace. WAF is weighted FLOP/s; accumulated, weighted FLOPs."""

    accumulated_waf: float
    healthy_waf: float  # if nothing had failed: WAF x time
    lost: Mapping[str, float]  # accumulated WAF lost, by kind
    availability: float  # share of task-time in which work was done
    failures: int
    curve: tuple[tuple[float, float], ...] = ()  # (time, accumulated WAF), at every event

    @property
    def share(self) -> float:
        return self.accumulated_waf / self.healthy_waf


def run(policy: Policy, trace: Trace, life: Life, *, record: bool = False) -> StudyResult:
    """Live through the trace."""
    healthy = life.healthy_waf() * trace.horizon_s
    policy.begin(life)
    points = [(0.0, 0.0)]
    count = 0
    for at, what in _events(trace, life):
        life.advance(at)
        if isinstance(what, Failure):
            count += _fail(policy, life, what)
        else:
            _return(policy, life, what)
        if record:
            points.append((at, _accumulated(life)))
    life.advance(trace.horizon_s)
    points.append((trace.horizon_s, _accumulated(life)))
    tasks = life.tasks
    return StudyResult(
        accumulated_waf=float(_accumulated(life)),
        healthy_waf=healthy,
        lost=lost_by_kind(tasks),
        availability=sum(t.running_s for t in tasks) / (len(tasks) * trace.horizon_s),
        failures=count,
        curve=tuple(points) if record else (),
    )


def _events(trace: Trace, life: Life) -> Iterator[tuple[float, Failure | int]]:
    """In order; a repair joins the queue when its failure has happened to a node that was there."""
    heap: list[tuple[float, int, Failure | int]] = []
    for i, failure in enumerate(trace.failures):
        heappush(heap, (failure.at_s, i, failure))
    for i, (at, node) in enumerate(trace.joins):
        heappush(heap, (at, len(trace.failures) + i, node))
    serial = len(heap)
    while heap:
        at, _, what = heappop(heap)
        if at > trace.horizon_s:
            return
        if isinstance(what, Failure):
            if what.node in life.away:
                continue
            if what.severity == 1 and math.isfinite(what.repair_s):
                serial += 1
                heappush(heap, (at + what.repair_s, serial, what.node))
        elif what not in life.away:
            continue
        yield at, what


def _fail(policy: Policy, life: Life, failure: Failure) -> int:
    if failure.severity == 1:
        life.away[failure.node] = life.now_s + failure.repair_s
    task = life.owner.get(failure.node)
    if isinstance(policy, PlannedPolicy):
        policy.struck(life, failure)
    elif task is None:
        policy.spare_lost(life, failure)
    elif failure.severity == 1 or not task.waiting:
        policy.failed(life, failure, task)
    if policy.in_memory and life.num_here() == 0:
        for each in life.tasks:
            each.on_disk_alone = True
    return 1


def _return(policy: Policy, life: Life, node: int) -> None:
    del life.away[node]
    policy.returned(life, node, life.owner.get(node))
    for task in life.tasks:
        if task.on_disk_alone and not task.waiting:
            task.on_disk_alone = False
            task.owe(0.5 * policy.disk_interval_s)


def _accumulated(life: Life) -> float:
    return sum(task.weight * task.done for task in life.tasks)


def first_life(setup: Setup, trace: Trace) -> Life:
    """The allocation everybody starts from: the plan's, in whole nodes, spares left out."""
    if trace.horizon_s <= 0:
        raise UserError(
            f"{trace.name} ends at the moment at which its nodes are there; give it later events."
        )
    present = [n for n in range(trace.nodes) if n not in set(trace.absent)]
    if not present:
        raise UserError(f"{trace.name} has no node at its start; cut it to begin with one that is there.")
    if setup.spares >= len(present):
        raise UserError(
            f"spares is {setup.spares}, but only {len(present)} nodes are there; keep some to work."
        )
    working = present[: len(present) - setup.spares]
    tasks = [StudyTask(name=t.name, curve=t.curve, weight=t.weight) for t in setup.tasks]
    life = Life(
        slots=setup.slots,
        num_nodes=trace.nodes,
        tasks=tasks,
        severe_per_1000_node_days=trace.severe_per_1000_node_days,
        away=dict.fromkeys(trace.absent, math.inf),
        spares=present[len(working) :],
    )
    for task, nodes, workers in _first_allocation(setup, tasks, working):
        used = -(-workers // setup.slots)
        life.give(task, nodes[:used])
        life.spares += nodes[used:]  # fewer are faster: what the best shape leaves out may step in
        task.shape = task.curve.shape(workers)
        task.healthy = task.rate = task.curve.at(workers)
    return life


def _first_allocation(
    setup: Setup, tasks: Sequence[StudyTask], working: Sequence[int]
) -> Iterator[tuple[StudyTask, list[int], int]]:
    if len(tasks) == 1:
        most = len(working) * setup.slots
        table = tasks[0].curve.throughput[: most + 1]
        yield tasks[0], list(working), int(table.argmax())
        return
    nodes = [PlanNode(name=str(n), slots=setup.slots) for n in working]
    # In whole shapes: not every policy runs with empty places.
    whole = [replace(t.curve, replicated=False) for t in tasks]
    specs = [
        TaskSpec(name=t.name, curve=curve, weight=t.weight, must_run=True)
        for t, curve in zip(tasks, whole, strict=True)
    ]
    plan = decide(Cluster(nodes=nodes, whole_nodes=True), specs, Assignment())
    free = list(working)
    for task in tasks:
        workers = plan.choices[task.name].workers
        count = -(-workers // setup.slots)
        if count == 0:
            raise UserError(
                f"task {task.name!r} finds no room on {len(working)} nodes; give the study more nodes."
            )
        mine, free = free[:count], free[count:]
        yield task, mine, _best_workers(task.curve, count * setup.slots)


def _best_workers(curve: Curve, most: int) -> int:
    return int(curve.throughput[: most + 1].argmax())


STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # by degrees of freedom


@dataclass(slots=True)
class Summary:
    """One policy over all seeds."""

    policy: str
    results: list[StudyResult] = field(default_factory=list)

    def mean(self, of: Callable[[StudyResult], float]) -> float:
        return sum(map(of, self.results)) / len(self.results)

    def half_width(self, of: Callable[[StudyResult], float]) -> float:
        """Of the 95 % confidence interval of the mean, by Student's t."""
        count = len(self.results)
        if count < 2:
            return 0.0
        mean = self.mean(of)
        variance = sum((of(r) - mean) ** 2 for r in self.results) / (count - 1)
        return _student(count - 1) * math.sqrt(variance / count)


def run_study(
    setup: Setup,
    traces: Sequence[Trace],
    policies: Mapping[str, Callable[[], Policy]],
    *,
    record: bool = False,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Summary]:
    summaries = {name: Summary(name) for name in policies}
    for trace in traces:
        life = first_life(setup, trace)
        for name, make in policies.items():
            summaries[name].results.append(
                run(make(), trace, copy.deepcopy(life, _keep(setup)), record=record)
            )
            advance()
    return summaries


def _keep(setup: Setup) -> dict[int, object]:
    """Curves are large and never changed: copies of a life share them."""
    return {id(t.curve): t.curve for t in setup.tasks}


def _student(freedom: int) -> float:
    """The 97.5 % point of Student's t: tabled, then to a few per mille from the normal's 1.96."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z = 1.959964
    n = float(freedom)
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n * n)
