"""What follows from what Slurm says: who is drained, readmitted, started again, asked for, and given back.

Two views of one set of machines are laid side by side. The coordinator knows within a second who has died and
heals by itself; Slurm knows what people intend with a node, and is the only one who can give us another.

    Slurm says of a node      the coordinator says      then
    drain, failing, reboot    up or silent              drain it: its workers go in good order
    down, powered down        up, connected             drain it: Slurm ends what runs there any moment
    usable again              draining, by our order    readmit it
    usable, in the job        not connected for long    start its keeper again, by a step of its own
    fewer usable than wanted                            ask for so many more, each in a job of one node
    more than wanted                                    give back requests that still wait

A job that Slurm has shrunk (`--no-kill`) never grows again: a node that comes back, or any other, comes as a
job of its own, a *spare*, and joins the same coordinator. A node that does not answer slurmctld counts for as
long as the coordinator hears it, since it may well be training.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from everstep.launch.slurm.slurm_text import NodeUse, SlurmJob, SlurmNode

RESTART_AFTER_S = 15.0
ASK_EVERY_S = 10.0
MAX_ASKED_PER_WANTED = (
    20  # spares in the life of a run, for one that cannot start must not be asked for for ever
)
_CAN_BE_DRAINED = ("up", "silent")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedNode:
    """A node as the coordinator sees it."""

    state: str
    connected: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    wanted: int
    job: SlurmJob
    nodes: Mapping[str, SlurmNode]
    spares: Sequence[SlurmJob] = ()
    members: Mapping[str, AllocatedNode] = field(default_factory=dict)
    drained: frozenset[str] = frozenset()  # by our own order, not by a person's
    away_s: Mapping[str, float] = field(default_factory=dict)  # since when a node of the job is not connected
    asked: int = 0
    asked_s_ago: float = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainNode:
    node: str
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadmitNode:
    node: str
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartKeeper:
    node: str
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AskForNodes:
    count: int
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveBack:
    job: str
    because: str


Action = DrainNode | ReadmitNode | StartKeeper | AskForNodes | GiveBack


def decide(view: View) -> list[Action]:
    ours = [*view.job.nodes, *(node for spare in view.spares if spare.runs for node in spare.nodes)]
    actions: list[Action] = []
    for name in dict.fromkeys(ours):
        node = view.nodes.get(name)
        if node is not None:
            actions += _about_node(view, node)
    return actions + _about_number(view, list(dict.fromkeys(ours)))


def _about_node(view: View, node: SlurmNode) -> list[Action]:
    member = view.members.get(node.name)
    state = member.state if member else ""
    connected = member is not None and member.connected
    match node.use:
        case NodeUse.LEAVING if state in _CAN_BE_DRAINED:
            return [DrainNode(node=node.name, because=f"Slurm wants it back: {node.described}")]
        case NodeUse.LOST if state in _CAN_BE_DRAINED and connected:
            return [DrainNode(node=node.name, because=f"Slurm ends what runs there: {node.described}")]
        case NodeUse.USABLE if state == "draining" and node.name in view.drained:
            return [ReadmitNode(node=node.name, because=f"Slurm says it is {node.described} again")]
        case NodeUse.USABLE if not connected and node.name in view.job.nodes:
            away = view.away_s.get(node.name, 0.0)
            if away >= RESTART_AFTER_S:
                because = (
                    f"it is in the job, Slurm says {node.described}, and no agent was heard for {away:.0f} s"
                )
                return [StartKeeper(node=node.name, because=because)]
    return []


def _about_number(view: View, ours: Sequence[str]) -> list[Action]:
    here = [name for name in ours if _counts(view, name)]
    waiting = [spare for spare in view.spares if spare.waits]
    short = view.wanted - len(here) - len(waiting)
    have = f"{len(here)} of {view.wanted} nodes can be used"
    if short > 0:
        left = view.wanted * MAX_ASKED_PER_WANTED - view.asked
        if view.asked_s_ago < ASK_EVERY_S or left <= 0:
            return []
        return [AskForNodes(count=min(short, left), because=have)]
    surplus = waiting[: max(0, -short)]
    return [GiveBack(job=spare.number, because=have) for spare in surplus]


def _counts(view: View, name: str) -> bool:
    node, member = view.nodes.get(name), view.members.get(name)
    connected = member is not None and member.connected
    match node.use if node is not None else NodeUse.UNCLEAR:
        case NodeUse.USABLE:
            return True
        case NodeUse.UNCLEAR:
            return connected
        case _:
            return False


def like(job: SlurmJob) -> list[str]:
    """sbatch options that ask for one more node of the kind this job has."""
    given = {
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "constraint": job.features,
        "time": job.time_limit,
    }
    options = [f"--{key}={value}" for key, value in given.items() if value]
    if job.tres_per_node:
        options.append(f"--gres={re.sub(r'gres[:/]', '', job.tres_per_node)}")
    return options


def slots_of(environment: Mapping[str, str]) -> int:
    """Workers a node can hold: its GPUs in this job, or its CPUs; 0 if Slurm does not say."""
    for key in ("SLURM_GPUS_ON_NODE", "SLURM_CPUS_ON_NODE"):
        text = environment.get(key, "")
        if text.isdigit() and int(text) > 0:
            return int(text)
    return 0
