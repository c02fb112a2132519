"""The coordinator's state as the documents people and programs read."""

from __future__ import annotations

import itertools
import math
import time
from statistics import median
from typing import Any, NamedTuple

from everstep.core.cluster.node import Node
from everstep.core.cluster.progress import STALLED, empty_stages, slots_lacking, why_stalled
from everstep.core.cluster.task import OVER, Task
from everstep.core.task.states import Absent, Copied, Copying, Entering, Member, Started, Starting
from everstep.drive.recent_events import EventTold
from everstep.drive.step_rows import StepRows
from everstep.protocol.codec import encode
from everstep.protocol.incidents import Incident
from everstep.server.record import ClusterRecord

STORIES = 30
CURVE = 24  # losses of a task that is over, for the page's list
USUAL_OF = 9  # steps whose median is the usual time of one
QUIET_S = 1.0  # without a heartbeat; they come four times a second
_PLACE_STATES: dict[type, str] = {
    Absent: "absent",
    Starting: "starting",
    Started: "joining",
    Copying: "joining",
    Copied: "joining",
    Entering: "joining",
    Member: "member",
}


def status(record: ClusterRecord, connected: set[str], now: float) -> dict[str, Any]:
    machine, seated = record.machine, _seated(record)
    return {
        "at": now,
        "leads": record.leads,
        "journal": record.number,
        "nodes": [_node(record, node, connected, seated) for node in machine.nodes.values()],
        "tasks": [task_row(record, task) for task in machine.tasks.values()],
        "incidents": incident_counts(record),
    }


def incident_counts(record: ClusterRecord) -> dict[str, Any]:
    log = record.machine.log
    return {
        "open": [incident.number for incident in log.open_ones()],
        "total": len(log.incidents) + log.forgotten.count,
        "forgotten": log.forgotten.count,  # closed long ago: only counted
    }


def _seated(record: ClusterRecord) -> dict[str, list[dict[str, Any]]]:
    """By node; found in one pass, because there may be thousands of both."""
    found: dict[str, list[dict[str, Any]]] = {}
    for task in record.machine.tasks.values():
        for worker, seat in task.seats.items():
            row = {"task": task.name, "worker": str(worker), "slot": seat.slot}
            found.setdefault(seat.node, []).append(row)
    return found


class NodeMark(NamedTuple):
    """All that a page shows of a node. Compared at every look, and written out only where it is another."""

    state: str
    because: str
    since: float
    slots: int
    host: str
    connected: bool
    quiet_since: int | None  # instead of an age, which would be another one at every look
    isolations: int
    rack: str
    workers: tuple[tuple[str, str, int], ...]  # task, worker, slot

    def row(self, name: str) -> dict[str, Any]:
        workers = [{"task": task, "worker": worker, "slot": slot} for task, worker, slot in self.workers]
        return {"node": name} | self._asdict() | {"workers": workers}


def node_marks(record: ClusterRecord, connected: set[str], now: float) -> dict[str, NodeMark]:
    """By name. There may be thousands, many times a second: so one pass over the seats, and no row yet."""
    seated: dict[str, list[tuple[str, str, int]]] = {}
    for task in record.machine.tasks.values():
        for worker, seat in task.seats.items():
            seated.setdefault(seat.node, []).append((task.name, str(worker), seat.slot))
    monotonic, found = time.monotonic(), {}
    for name, node in record.machine.nodes.items():
        age = record.hearts.age_s(name, monotonic)
        found[name] = NodeMark(
            node.state,
            node.because,
            node.since + record.ahead_s,
            node.slots,
            node.host,
            name in connected,
            round(now - age) if age is not None and age > QUIET_S else None,
            len(node.isolations),
            node.rack,
            tuple(seated[name]) if name in seated else (),
        )
    return found


def _node(
    record: ClusterRecord, node: Node, connected: set[str], seated: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    age = record.hearts.age_s(node.name, time.monotonic())
    return {
        "node": node.name,
        "state": node.state,
        "admin": node.admin,
        "liveness": node.liveness,
        "because": node.because,
        "since": node.since + record.ahead_s,
        "slots": node.slots,
        "lost_slots": sorted(node.lost_slots),
        "host": node.host,
        "connected": node.name in connected,
        "heard_s_ago": None if age is None else round(age, 3),
        "isolations": len(node.isolations),
        "rack": node.rack,
        "workers": seated.get(node.name, []),
    }


def node(record: ClusterRecord, node: Node, connected: set[str]) -> dict[str, Any]:
    """One node in full: with its last checks, and the network to the peers that it was measured with."""
    run = node.checked[-1] if node.checked else None
    checks = (
        None if run is None else {"at": run.at + record.ahead_s, "figures": run.figures, "facts": run.facts}
    )
    pairs = [
        {
            "peer": pair.peer,
            "at": pair.asked_at + record.ahead_s,
            "out_mb_s": pair.found.out_mb_s,
            "in_mb_s": pair.found.in_mb_s,
            "answer_ms": pair.found.answer_ms,
            "error": pair.found.error,
        }
        for pair in node.pairs
        if pair.found is not None
    ]
    return _node(record, node, connected, _seated(record)) | {
        "isolated_slots": sorted(node.isolated_slots),
        "checks": checks,
        "pairs": pairs,
    }


def task_row(record: ClusterRecord, task: Task) -> dict[str, Any]:
    steps = record.steps.get(task.name)
    last = steps.rows[-1] if steps is not None and steps.rows else None
    recovery = task.recovery
    stalled = _stalled(record, steps, task)
    account = record.accounts.tasks.get(task.name)
    return {
        "task": task.name,
        "state": STALLED if stalled else task.state,
        "because": stalled or task.because,
        "owner": task.request.owner,
        "goodput": None if account is None or account.ratio is None else round(account.ratio, 3),
        "weight": task.weight,
        "min_workers": task.request.least_workers,
        "shape": {
            "replicas": task.shape.replicas,
            "stages": task.shape.stages,
            "shards": task.shape.shards,
            "microbatches": task.shape.microbatches,
        },
        "workers": len(task.seats),
        "places": task.shape.replicas * task.shape.stages,
        "asked": _asked(task),
        "working": _working(task),
        "step": _recorded(task) if recovery is not None else 0 if steps is None else steps.last,
        "steps": task.steps,
        "made": 0 if steps is None else steps.made,
        "epoch": recovery.epoch if recovery is not None else 0,
        "phase": type(recovery.phase).__name__.lower() if recovery is not None else None,
        "script": _script(task),
        "saved": saved_row(task),
        "loss": None if last is None else finite(last.loss),
        "curve": _curve(steps) if task.state in OVER else [],
        "step_seconds": None if last is None else round(last.seconds, 6),
        "evaluation": None if steps is None else _evaluation(steps),
        "microbatches": _microbatches(task, steps),
    }


def _working(task: Task) -> int:
    """Workers that take part; of a task that is over none, though its recovery still names them."""
    if task.recovery is None or task.state in OVER:
        return 0
    return sum(isinstance(place, Member) for place in task.recovery.places.values())


def _curve(steps: StepRows | None) -> list[float | None]:
    """Losses of the steps that are kept, at equal distances: the shape of a run that is over."""
    rows = [] if steps is None else list(steps.rows)
    last = len(rows) - 1
    chosen = sorted({round(last * number / (CURVE - 1)) for number in range(CURVE)}) if rows else []
    return [finite(rows[index].loss) for index in chosen]


def _asked(task: Task) -> int:
    """How many workers were asked for: by an operator, else by the job, whatever shape the planner chose."""
    places = task.shape.replicas * task.shape.stages
    if not task.bounds.is_shape_kept and not task.request.job.get("max_replicas"):
        places = max(places, task.request.most_workers)
    return places if task.bounds.workers is None else min(places, task.bounds.workers)


def _script(task: Task) -> dict[str, Any] | None:
    """What is known of a script's ranks; None: a managed task."""
    rules, lives = task.request.ranks, task.lives
    if rules is None:
        return None
    members = () if lives is None else lives.members
    return {
        "command": list(rules.command),
        "ranks_per_node": rules.ranks,
        "nodes": {"least": rules.least, "most": rules.most},
        "life": 0 if lives is None else lives.epoch,
        "restarts": 0 if lives is None else lives.failures,
        "max_restarts": rules.max_restarts,
        "exit_code": 0 if lives is None else lives.exit_code,
        "suspicion": "" if lives is None else lives.suspicion,
        "world": len(members) * rules.ranks,
        "tokens": 0 if lives is None else lives.tokens,
        "saved_step": 0 if lives is None else lives.checkpoint,
        "groups": [
            {
                "group": group,
                "worker": str(worker),
                "node": task.seats[worker].node,
                "ranks": [group * rules.ranks, (group + 1) * rules.ranks - 1],
            }
            for group, worker in enumerate(members)
            if worker in task.seats
        ],
    }


def _evaluation(steps: StepRows) -> dict[str, Any] | None:
    """The newest."""
    if not steps.evaluations:
        return None
    step = max(steps.evaluations)
    return evaluation_row(step, steps.evaluations[step])


def evaluation_row(step: int, values: dict[str, float]) -> dict[str, Any]:
    return {"step": step, "values": {name: finite(value) for name, value in values.items()}}


def _recorded(task: Task) -> int:
    """The last step that is done. The closing step, which only evaluates, is not one of the task's."""
    recorded = (task.recovery or task.progress).recorded
    return min(recorded, task.steps) if task.steps else recorded


def _microbatches(task: Task, steps: StepRows | None) -> dict[str, int]:
    """Of the steps that count: a task that went back will do the later ones again."""
    if steps is None or not steps.first:
        return {"issued": 0, "committed": 0}
    total = task.shape.replicas * task.shape.microbatches
    recorded = _recorded(task)
    undone = max(0, steps.last - recorded)
    return {
        "issued": (recorded - steps.first + 1) * total,
        "committed": steps.committed - undone * total,
    }


def _stalled(record: ClusterRecord, steps: StepRows | None, task: Task) -> str:
    if steps is None or not steps.last_at:
        return ""
    recent = [row.seconds for row in itertools.islice(reversed(steps.rows), USUAL_OF)]
    usual_s = median(recent) if recent else 0.0
    roster, since_step_s = record.machine.roster, record.clock() - steps.last_at
    why = why_stalled(roster, task, since_step_s=since_step_s, usual_step_s=usual_s)
    slots = slots_lacking(task) if why else 0
    return f"{why}; slots needed: {slots}, free: {roster.num_free}" if slots else why


def saved_row(task: Task) -> dict[str, Any]:
    """Up to where a task is protected: what it would keep if all its workers were lost now."""
    return {
        "protected": task.protected,
        "failed": task.checkpoints.num_failed,
        "failing": task.checkpoints.failing,
    }


def task(record: ClusterRecord, task: Task, *, rows: int | None = None, after: int = 0) -> dict[str, Any]:
    """One task in full; of its steps, the last `rows`, and of these those behind step `after`."""
    steps = record.steps.get(task.name)
    every = () if steps is None else reversed(steps.rows)
    # From the newest back: a task that went back has rows of the same steps twice.
    kept = list(every) if not after else list(itertools.takewhile(lambda row: row.step > after, every))
    kept.reverse()
    if rows is not None:
        kept = kept[len(kept) - min(rows, len(kept)) :]
    places = task.recovery.places if task.recovery is not None else {}
    return task_row(record, task) | {
        "submitted_at": task.submitted_at + record.ahead_s,
        "compile": {"is": task.job.get("compile") is True, "because": task.request.compile_because},
        "empty_stages": empty_stages(task) if task.recovery is not None else [],
        "seats": [
            {
                "worker": str(worker),
                "node": seat.node,
                "slot": seat.slot,
                "incarnation": seat.incarnation,
                "state": _PLACE_STATES.get(type(places.get(worker)), "seated"),
                "leaving": seat.leaving,
            }
            for worker, seat in sorted(task.seats.items())
        ],
        "rows": [step_row(row.document()) for row in kept],
        "rows_lost": [] if steps is None else [list(each) for each in steps.lost],
        "evaluations": []
        if steps is None
        else [evaluation_row(step, values) for step, values in sorted(steps.evaluations.items())],
        "kept_step": task.copies.newest,
        "moves": [{"step": step, **encode(moved)} for step, moved in sorted(task.copies.fetched.items())],
        "incidents": [i.number for i in record.machine.log.incidents if i.task == task.name],
        "stories": [
            {
                "number": i.number,
                "what": i.what,
                "workers": [str(worker) for worker in i.workers],
                "step": i.step,
                "seconds": None if i.resumed_at is None else i.resumed_at - i.evidence_at,
            }
            for i in record.machine.log.incidents
            if i.task == task.name
        ][-STORIES:],
    }


def step_row(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"loss": finite(row["loss"]), "grad_norm": finite(row["grad_norm"])}


def incident(record: ClusterRecord, one: Incident) -> dict[str, Any]:
    def at(moment: float | None) -> float | None:
        return None if moment is None else moment + record.ahead_s

    return {
        "number": one.number,
        "task": one.task,
        "node": one.node,
        "workers": [str(worker) for worker in one.workers],
        "what": one.what,
        "rank": one.rank,
        "traceback": one.traceback or None,
        "step": one.step,
        "opened_at": at(one.evidence_at),
        "planned_at": at(one.planned_at),
        "closed_at": at(one.resumed_at),
        "stopped_training": one.stops_training,
        "replayed_ops": one.replayed_ops,
        "kept_outputs": one.kept_outputs,
        "restored_from": one.restored_from,
        "restored_where": one.restored_where,
        "evidence": [
            {
                "at": at(e.at),
                "source": e.source,
                "text": e.text,
                "event": e.event,
                "clears": bool(e.clears),
            }
            for e in one.evidence
        ],
        "verdict": None
        if one.verdict is None
        else {
            "at": at(one.verdict.at),
            "kind": one.verdict.kind,
            "severity": f"SEV{one.verdict.severity}",
            "because": one.verdict.because,
            "event": one.verdict.event,
        },
        "remedies": [
            {
                "at": at(r.at),
                "what": r.what,
                "because": r.because,
                "outcome": r.outcome,
                "event": r.event,
            }
            for r in one.remedies
        ],
        "finding": finding(one),
        "timeline": [
            {"at": at(moment), "because": because}
            for moment, because in _timeline(one, _is_script(record, one))
        ],
    }


def event(record: ClusterRecord, one: EventTold) -> dict[str, Any]:
    """An event and what followed from it."""
    return {
        "event": one.number,
        "at": one.at + record.ahead_s,
        "text": one.text,
        "actions": [{"text": done.text, "because": done.because} for done in one.actions],
    }


def _is_script(record: ClusterRecord, one: Incident) -> bool:
    task = record.machine.tasks.get(one.task)
    return task is not None and task.is_script


def _timeline(one: Incident, is_script: bool) -> list[tuple[float, str]]:
    """Events other than evidence, verdict and remedies."""
    found = []
    if is_script:
        if one.planned_at is not None:
            found.append((one.planned_at, f"all ranks were ended; life {one.epoch} begins"))
        if one.resumed_at is not None and one.planned_at is not None:
            found.append((one.resumed_at, "the ranks of the new life have started"))
        return found
    if one.planned_at is not None:
        found.append((one.planned_at, f"{_planned(one)}, in epoch {one.epoch}"))
    if one.resumed_at is not None and one.stops_training:
        found.append((one.resumed_at, "training resumed: the first op of the new epoch has run"))
    return found


def _planned(one: Incident) -> str:
    """What is done after it; and, where no worker of a stage was left, what is lost."""
    if one.restored_from is None:
        return f"rescheduled the rest of step {one.step}"
    lost = max(0, (one.first_step or one.step) - 1 - one.restored_from)
    kept = (
        f"step {one.restored_from}, from {one.restored_where}" if one.restored_from else "the initial state"
    )
    if not lost:
        return f"back at {kept}: no step is lost"
    again = "1 step is" if lost == 1 else f"{lost} steps are"
    return f"back at {kept}: {again} done again"


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# What a diagnosis found, for a picture: who waits for whom, and how fast each worker is.
#
# It is made of the facts behind the evidence of an incident (`protocol.incidents`), not of its sentences.


def finding(one: Incident) -> dict[str, Any]:
    """Who is suspected, and who was ruled out."""
    return {
        "suspects": [f"worker {worker}" for worker in one.workers]
        + ([f"node {one.node}"] if one.node else []),
        "ruled_out": [item.clears for item in one.evidence if item.clears],
    }
