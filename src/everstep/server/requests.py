"""What a caller may write into a request, checked before anything is decided: every number has a bound."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from aiohttp import web

from everstep.core.cluster.node import Node
from everstep.core.cluster.node_states import NodeState
from everstep.core.cluster.progress import costs_of_drain
from everstep.core.cluster.roster import Roster
from everstep.core.cluster.task import OVER, Task, TaskState
from everstep.engine.telemetry.faults import check_fault, parse_fault
from everstep.errors import PeerError, UserError, clipped
from everstep.job.compiling import choice_for, settled
from everstep.job.job import MOST_WORKERS, Job
from everstep.job.tables import shown
from everstep.protocol.codec import decode
from everstep.protocol.messages import (
    CheckpointFolder,
    DrainRequested,
    LeaveAnnounced,
    PauseRequested,
    RankRules,
    ReshapeRequested,
    TaskNeeds,
    TaskSubmitted,
    UpdateRequested,
)
from everstep.protocol.shape import Shape
from everstep.store.places import root_of

MOST_WEIGHT = 1_000_000
MOST_RESTARTS = 1_000_000
MOST_REPAIR_S = 365 * 86_400
MOST_NESTED = 100  # levels of a request
NAMED = 20  # tasks or nodes, in a sentence that says what is there
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def submission(
    given: dict[str, Any], *, known: Mapping[str, Task], owner: str, nodes: Collection[Node] = ()
) -> TaskSubmitted:
    """The task that a submission asks for. `known`: those whose names are taken. `nodes`: of the cluster."""
    unknown = given.keys() - {"name", "job", "ranks", "weight", "script", "faults", "min_workers"}
    if unknown:
        raise UserError(
            f"{shown(min(unknown))} is not a key of a submission; give name, job or ranks, and weight."
        )
    name = given.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(f"name is {shown(name)}; give 1 to 63 letters, digits, dots and dashes.")
    if name in known:
        raise UserError(f"there is a task named {name!r} already; choose another name.")
    weight = given.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= MOST_WEIGHT:
        raise UserError(f"weight is {shown(weight)}; give a number above 0, at most {MOST_WEIGHT:,}.")
    if "ranks" in given:
        if "job" in given or "script" in given or "faults" in given:
            raise UserError("ranks is a script task and job a managed one; give one of them.")
        if given.get("min_workers"):
            raise UserError("min_workers is for jobs; a script has --nodes MIN:MAX.")
        return _script_task(name, given["ranks"], float(weight), owner)
    if not isinstance(given.get("job"), dict):
        raise UserError("job is missing; give the job's table.")
    job = Job.from_dict(given["job"])
    job.refuse_contradictions()
    compiling = choice_for(job, unable=_unable(nodes))
    job = settled(job, compiling)
    needs = job.needs()
    if needs.checkpoints is not None:
        _refuse_shared_folder(needs.checkpoints, known)
    script = _script(given.get("script", []))
    most = max(job.replicas, job.max_replicas) * job.stages
    least = given.get("min_workers", 0)
    if type(least) is not int or not 0 <= least <= most:
        raise UserError(f"min_workers is {shown(least)}; give 0 to {most}, what the job can have.")
    return TaskSubmitted(
        task=name,
        owner=owner,
        job=job.to_dict(),
        shape=job.task_shape(),
        steps=job.steps,
        secret=secrets.token_hex(32),
        weight=float(weight),
        has_checkpoints=job.checkpoint is not None,
        least_stages=min(job.stages, job.min_stages or job.stages),
        most_stages=0 if script else job.most_stages() or job.stages,
        most_workers=most,
        least_workers=least,
        least_shards=0 if script else min(job.shards, job.min_shards or job.shards),
        most_shards=0 if script else job.shards,
        script=script,
        faults=_faults(given.get("faults", []), job),
        closes=job.evaluation is not None,
        on_nan=job.verify.nan,
        on_spike=job.verify.spike,
        votes_on_all=job.vote_period == 1,
        needs=needs,
        compile_because=compiling.because,
    )


def _unable(nodes: Collection[Node]) -> str:
    """Why not every node can compile."""
    those = (node for node in nodes if node.state is NodeState.UP and node.cannot_compile)
    return next((f"node {node.name} cannot: {node.cannot_compile}" for node in those), "")


def _script_task(name: str, given: Any, weight: float, owner: str) -> TaskSubmitted:
    """Ranks of a script: a worker is all of them on one node."""
    if not isinstance(given, dict):
        raise UserError(f"ranks is {shown(given)}; give the table of a script task.")
    try:
        rules: RankRules = decode(RankRules, {"is": "RankRules", "run_id": name, **given})
    except PeerError as error:
        raise UserError(f"ranks is not the table of a script task: {error}") from None
    if not rules.command or not all(rules.command[:1]):
        raise UserError("ranks.command is empty; give the script and its arguments.")
    numbers = {
        "ranks": (rules.ranks, 1, MOST_WORKERS),
        "least": (rules.least, 1, rules.most),
        "most": (rules.most, rules.least, MOST_WORKERS),
        "max_restarts": (rules.max_restarts, 0, MOST_RESTARTS),
        "port": (rules.port, 0, 65535),
        "grace_s": (rules.grace_s, 0, MOST_REPAIR_S),
        "join_s": (rules.join_s, 0, MOST_REPAIR_S),
        "hang_after_s": (1 if rules.hang_after_s is None else rules.hang_after_s, 1, MOST_REPAIR_S),
    }
    for field, (value, least, most) in numbers.items():
        if not least <= value <= most:  # also false for what is not a number
            raise UserError(f"ranks.{field} is {value}; give a number from {least} to {most}.")
    return TaskSubmitted(
        task=name,
        job={},
        shape=Shape(rules.most, 1, 1, shards=rules.ranks),
        steps=0,
        secret=secrets.token_hex(32),
        weight=weight,
        needs=TaskNeeds(),
        ranks=rules,
        owner=owner,
    )


def _refuse_shared_folder(wanted: CheckpointFolder, known: Mapping[str, Task]) -> None:
    """Two tasks in one folder would continue from each other's states and damage each other's checkpoints."""
    for task in known.values():
        theirs = task.request.needs.checkpoints
        if theirs is not None and task.state not in OVER and _root(theirs) == _root(wanted):
            raise UserError(
                f"checkpoint.folder is {wanted.folder!r}, where task {task.name} ({task.state}) keeps its "
                "checkpoints; give this task another folder, or cancel that one."
            )


def _root(at: CheckpointFolder) -> str:
    return os.path.normpath(str(root_of(at.base, at.folder)))


def reshape(task: Task, given: Mapping[str, Any], *, slots: Sequence[int], by: str) -> ReshapeRequested:
    """Wrong requests are rejected here, so that a running task does not fail because of one. `slots`: of
    each node that is up.
    """
    if task.is_script:
        raise UserError(f"task {task.name} is a script: resize it; how its ranks share the work is its own.")
    if task.state in (TaskState.SEARCHING, TaskState.ENDING):
        raise UserError(f"task {task.name} is {task.state}; change its shape while it is running.")
    replicas, stages, shards = (given.get(key) for key in ("replicas", "stages", "shards"))
    if type(replicas) is not int or type(stages) is not int or type(shards) not in (int, type(None)):
        raise UserError(
            f"replicas is {shown(replicas)}, stages {shown(stages)} and shards {shown(shards)}; give whole "
            "numbers. Shards stay as they are if not given."
        )
    now = Job.from_dict(task.job)
    job = now.reshaped(replicas, stages, shards)
    if now.shards % job.shards and (job.model.preset is None or task.request.script):
        raise UserError(
            f"shards is {job.shards}: a model of your own can go to a divisor of its {now.shards} while it "
            "runs, for what else divides it is not known here; pause the task, change the job and resume it."
        )
    if now.optimizer.build is not None and now.stages == 1 < job.stages:
        raise UserError(
            f"stages is {job.stages}: optimizer.build was checked with one stage only; pause the task, "
            "change the job and resume it."
        )
    most = job.most_stages()
    if most is not None and job.stages > most:
        raise UserError(f"stages is {job.stages}, and the model has {most} layers.")
    if job.stages > sum(count // job.shards for count in slots):
        each = "one slot" if job.shards == 1 else f"{job.shards} slots of one node"
        raise UserError(
            f"shape {job.task_shape()} needs {each} per stage; there are {sum(slots)} slots on {len(slots)} "
            "nodes."
        )
    shape = job.task_shape()
    return ReshapeRequested(task=task.name, job=job.to_dict(), shape=shape, by=by)


def update(task: Task, given: Mapping[str, Any], *, by: str) -> UpdateRequested:
    """Another job for a running task."""
    unknown = given.keys() - {"job"}
    if unknown:
        raise UserError(f"{shown(min(unknown))} is not a key of an update; give job.")
    if task.is_script or task.request.script:
        raise UserError(f"task {task.name} is a script; cancel it and submit the new one.")
    if task.next_shape is not None:
        raise UserError(
            f"task {task.name} is being changed already; wait for the end of it (everstep status)."
        )
    if task.state is not TaskState.RUNNING:
        raise UserError(f"task {task.name} is {task.state}; update it while it is running.")
    if not isinstance(given.get("job"), dict):
        raise UserError("job is missing; give the job's table.")
    now, job = Job.from_dict(task.job), Job.from_dict(given["job"])
    job.refuse_contradictions()
    job = settled(job, choice_for(job, kept=now.compiles))
    for key in ("steps", "checkpoint", "base"):
        if getattr(job, key) != getattr(now, key):
            raise UserError(
                f"{key} of the new job is not that of task {task.name}; an update keeps it. Cancel the task "
                "and submit the new job to change it."
            )
    if job.microbatches_in_step != now.microbatches_in_step:
        raise UserError(
            f"a step of the new job has {job.microbatches_in_step} microbatches, and one of task {task.name} "
            f"{now.microbatches_in_step}; an update keeps the batch."
        )
    shaped = job.reshaped(now.replicas, now.stages, now.shards)
    return UpdateRequested(
        task=task.name,
        job=shaped.to_dict(),
        shape=shaped.task_shape(),
        by=by,
    )


async def body(request: web.Request) -> dict[str, Any]:
    try:
        if packed := request.headers.get("Content-Encoding", "").strip():
            raise UserError(f"a body in {clipped(packed, 20)} is not unpacked here; send it as plain JSON.")
        body = json.loads(await request.read() or b"{}")
    except (ValueError, RecursionError):
        raise UserError("the body is not JSON.") from None
    if not isinstance(body, dict):
        raise UserError("the body is not a JSON object.")
    if _is_deep(body):
        raise UserError(f"the body is nested more than {MOST_NESTED} levels deep.")
    return body


def _is_deep(body: Any) -> bool:
    """What reads a job calls itself for each level: a thousand of them end in an error of ours."""
    level = [body]
    for _ in range(MOST_NESTED):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return bool(level)


def pause(given: dict[str, Any], task: str, *, by: str) -> PauseRequested:
    return PauseRequested(task=task, by=by, force=_force(given))


def _force(given: dict[str, Any]) -> bool:
    force = given.get("force", False)
    if not isinstance(force, bool):
        raise UserError(f"force is {shown(force)}; give true or false.")
    return force


def drain(given: dict[str, Any], node: Node, roster: Roster, *, by: str) -> DrainRequested:
    """A drain that would cost steps waits for the state to be safe; where it cannot be, it needs `force`."""
    force = _force(given)
    costs = costs_of_drain(roster, node.name)
    if lost := [cost.sentence(node.name) for cost in costs if not cost.is_savable and not force]:
        raise UserError(
            f"node {node.name} is not drained: {'; '.join(lost)}, and there is neither a checkpoint "
            "folder nor another node for its state. Start an agent on another node, or use everstep "
            f"drain {node.name} --force."
        )
    return DrainRequested(node=node.name, force=force, by=by)


def notice(given: dict[str, Any], node: Node, *, by: str) -> LeaveAnnounced:
    """A node is to be taken away."""
    seconds = _seconds(given, "leaves_in_s", 0, "the node leaves")
    if node.state is not NodeState.UP:
        raise UserError(
            f"node {node.name} is {node.state}; only a node that is up can be announced to leave."
        )
    return LeaveAnnounced(node=node.name, leaves_in_s=seconds, by=by)


def _seconds(given: dict[str, Any], field: str, least: float, until: str) -> float:
    seconds: Any = given.get(field)
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not least <= seconds <= MOST_REPAIR_S:
        raise UserError(
            f"{field} is {shown(seconds)}; give the seconds until {until}, at most {MOST_REPAIR_S:,}."
        )
    return float(seconds)


def workers(given: dict[str, Any], task: Task) -> int:
    """How many workers a task may have at most."""
    count = given.get("workers")
    if type(count) is not int or not task.least <= count <= MOST_WORKERS:
        least = "its least number of nodes" if task.is_script else "one per stage"
        raise UserError(f"workers is {shown(count)}; give at least {task.least}, {least}.")
    return count


def _faults(texts: Any, job: Job) -> tuple[str, ...]:
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UserError("faults is not a list of texts.")
    for text in texts:
        check_fault(parse_fault(text), job)
    return tuple(texts)


def _script(words: Any) -> tuple[str, ...]:
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words) or len(words) > 1000:
        raise UserError("script is not a list of at most 1,000 texts; give the script and its arguments.")
    return tuple(words)


def last(request: web.Request) -> int | None:
    """How many of the newest rows are asked for; None: all."""
    return max(1, whole(request.query["last"], "last")) if "last" in request.query else None


def whole(text: str, name: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 12:
        raise UserError(f"{name} is {shown(text)}; give a whole number of at most 12 digits.")
    return int(text)


def known_names(what: str, names: Collection[str]) -> str:
    """The newest of them, in words."""
    newest = list(names)[-NAMED:]
    more = f"{len(names)} {what}, the newest are" if len(names) > NAMED else f"known {what}:"
    return f"{more} {', '.join(newest) or 'none'}"
