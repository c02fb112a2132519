"""When a silent node is given up.

A node that falls silent is not dead yet: if the steps of its tasks continue, only the line to it is cut. It
is given up when its workers' peers elsewhere wait for it too, or when for a long time no other node can speak
for it; whatever an operator or a remedy wants with it meanwhile (`node_states`).

A node that dies with its workers may still report that they died: then new ones are ordered from it, and no
one of them is a member that a peer could miss. Where nothing else trains there, or a task does nothing until
one of them has started, they are waited for about as long as a start elsewhere takes; longer, if the only
copy of some task's newest state is there.

A peer that waits says for which parcel. If the usual sender of that parcel is on a node that is heard and
does not wait itself, the peer waits for that one, and is no witness against the silent node: on a crowded
machine an agent is late with its heartbeats while a slow link elsewhere lets others wait. Senders change with
every re-routing, so after `awaited_silence_s` any peer that waits is believed.
"""

from __future__ import annotations

from everstep.core.cluster.node import Node
from everstep.core.cluster.roster import Roster
from everstep.core.cluster.task import OVER, Task
from everstep.core.task.states import Assembling, Gathering, Member, Started, Starting
from everstep.protocol.cluster_messages import Patience
from everstep.protocol.facts import usual_sender
from everstep.protocol.ops import Worker


def why_given_up(roster: Roster, node: Node, patience: Patience, now: float) -> str:
    """The reason to give up a silent node now; empty: it is waited for."""
    name, silent_s = node.name, now - node.liveness_since
    if witness := _waiting_elsewhere(roster, name, any_sender=silent_s >= patience.awaited_silence_s):
        return f"silent, and worker {witness} on another node waits for it"
    if (owed := _owed_by(roster, name)) and silent_s >= patience.awaited_silence_s:
        return f"silent, and the ledger of worker {owed} is waited for"
    if silent_s >= patience.start_silence_s and (awaited := _start_awaited(roster, name)):
        return f"silent for {silent_s:.0f} s, and worker {awaited} was to start there"
    if silent_s >= patience.lonely_silence_s and not _others_speak_for(roster, name):
        alone = "no other worker can speak for it" if roster.on_node(name) else "it is idle"
        return f"silent for {silent_s:.0f} s, and {alone}"
    return ""


def given_up_at(roster: Roster, node: Node, patience: Patience) -> float | None:
    """When a silent node is given up, if nothing is heard until then."""
    if _start_awaited(roster, node.name):
        return node.liveness_since + patience.start_silence_s
    if _owed_by(roster, node.name) or _waiting_elsewhere(roster, node.name, any_sender=True):
        return node.liveness_since + patience.awaited_silence_s
    if not _others_speak_for(roster, node.name):
        return node.liveness_since + patience.lonely_silence_s
    return None


def _waiting_elsewhere(roster: Roster, node: str, *, any_sender: bool) -> str:
    """A worker on another node that waits, for a worker on this one as far as is known."""
    witnesses = (
        f"{worker} of {task.name}"
        for task in roster.tasks_on_node(node)
        for worker, report in task.failures.overdue.items()
        if worker in task.seats
        and task.seats[worker].node != node
        and not report.busy
        and (any_sender or _waits_for(roster, task, worker, node))
    )
    return next(witnesses, "")


def _waits_for(roster: Roster, task: Task, waiting: Worker, node: str) -> bool:
    """Does what it waits for come from this node, directly or through workers that wait themselves?"""
    passed: set[Worker] = set()
    while (report := task.failures.overdue.get(waiting)) is not None and not report.busy:
        passed.add(waiting)
        sender = usual_sender(report.doing)
        if sender is None or sender in passed or sender not in task.seats:
            return True  # no parcel, a circle, or an empty place: it is not known
        at = task.seats[sender].node
        if at == node or not roster.is_heard(at):
            return at == node
        waiting = sender
    return False


def _owed_by(roster: Roster, node: str) -> str:
    """A worker of this node whose ledger a task waits for: its peers wait and blame no worker."""
    for task, worker in roster.on_node(node):
        phase = task.recovery.phase if task.recovery is not None else None
        if isinstance(phase, Gathering) and worker in phase.awaited:
            return f"{worker} of {task.name}"
    return ""


def _start_awaited(roster: Roster, node: str) -> str:
    """A worker that was to start on this node, where a start elsewhere loses nothing: no worker there takes
    part in training, or its task does nothing until its stage has one; and no state is kept there alone.
    """
    if any(_has_the_only_copy(roster, task, node) for task in roster.tasks.values()):
        return ""
    here = roster.on_node(node)
    trains = any(_is_member(task, worker) for task, worker in here)
    for task, worker in here:
        place = None if task.recovery is None else task.recovery.places.get(worker)
        if isinstance(place, Starting | Started) and (not trains or _stands_still(roster, task, worker)):
            return f"{worker} of {task.name}"
    return ""


def _stands_still(roster: Roster, task: Task, worker: Worker) -> bool:
    """Its task does nothing, as no other worker of this one's stage is up on a node that is heard."""
    if task.recovery is None or not isinstance(task.recovery.phase, Assembling):
        return False
    return not any(
        isinstance(task.recovery.places.get(other), Started)
        for other, seat in task.seats.items()
        if other.stage == worker.stage and other != worker and roster.is_heard(seat.node)
    )


def _has_the_only_copy(roster: Roster, task: Task, node: str) -> bool:
    """Would steps be lost with this node? Its memory may have what neither a disk nor another node has."""
    newest = task.copies.newest
    if task.state in OVER or newest is None or newest <= task.checkpoints.newest:
        return False
    return any(
        node in holders and not any(other != node and roster.is_heard(other) for other in holders)
        for holders in task.copies.states[newest].copies.values()
    )


def _others_speak_for(roster: Roster, node: str) -> bool:
    """Does a worker of this node train with workers on other nodes? Then only the line is cut.

    Both must be members. One that only starts, or joins, waits for nothing of a step and blames no worker:
    the silence would otherwise last for ever.
    """
    return any(
        _is_member(task, worker)
        and any(
            seat.node != node and roster.is_heard(seat.node) and _is_member(task, other)
            for other, seat in task.seats.items()
        )
        for task, worker in roster.on_node(node)
    )


def _is_member(task: Task, worker: Worker) -> bool:
    return task.recovery is not None and isinstance(task.recovery.places.get(worker), Member)
