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

A node that is frozen for two seconds (a flush of checkpoints, the migration of a virtual machine) lets its
peers wait as a dead one does. To give it up costs what its workers do not do while they copy their states
again; to wait costs what the whole task does not do. So it is waited for until both are equal: then, whether
it comes back or not, the loss is at most twice the least that was possible. Where copies take milliseconds
that is no time at all; where no copy was ever made, its time is not known and counts as nothing.
"""

from __future__ import annotations

from everstep.core.cluster.node import Node
from everstep.core.cluster.roster import Roster
from everstep.core.cluster.task import OVER, Task
from everstep.core.task.states import Assembling, Gathering, Member, PlaceState, Started, Starting
from everstep.protocol.incidents import usual_sender
from everstep.protocol.messages import Patience
from everstep.protocol.ops import Worker

UNKNOWN = ""  # the node that a worker waits for


class Silence:
    """Answers for one moment: what it finds about a task is kept for the next silent node that is asked for.
    A row of racks can fall silent at once, and a task can have thousands of workers that wait.
    """

    def __init__(self, roster: Roster, patience: Patience) -> None:
        self._roster, self._patience = roster, patience
        self._awaited: dict[str, dict[str, list[Worker]]] = {}  # by task and node: those that wait for it
        self._training: dict[str, list[str]] = {}  # by task: up to two nodes that are heard and train
        self._sole_keepers: set[str] | None = None

    def why_given_up(self, node: Node, now: float) -> str:
        """The reason to give up a silent node now; empty: it is waited for."""
        patience, name, silent_s = self._patience, node.name, now - node.liveness_since
        if silent_s < self._replaced_s(node):
            return ""
        witness = self._waiting_elsewhere(name, any_sender=silent_s >= patience.awaited_silence_s)
        if witness and silent_s >= self._worth_waiting_s(name):
            return f"silent, and worker {witness} on another node waits for it"
        if silent_s >= patience.awaited_silence_s and (owed := self._owed_by(name)):
            return f"silent, and the ledger of worker {owed} is waited for"
        if silent_s >= patience.start_silence_s and (awaited := self._start_awaited(name)):
            return f"silent for {silent_s:.0f} s, and worker {awaited} was to start there"
        if silent_s >= patience.lonely_silence_s and not self._others_speak_for(name):
            alone = "no other worker can speak for it" if self._roster.on_node(name) else "it is idle"
            return f"silent for {silent_s:.0f} s, and {alone}"
        return ""

    def given_up_at(self, node: Node) -> float | None:
        """When a silent node is given up, if nothing is heard until then."""
        patience, name = self._patience, node.name
        waits_s: list[float] = []
        if self._start_awaited(name):
            waits_s.append(patience.start_silence_s)
        if self._owed_by(name):
            waits_s.append(patience.awaited_silence_s)
        if self._waiting_elsewhere(name, any_sender=False):
            waits_s.append(self._worth_waiting_s(name))
        if self._waiting_elsewhere(name, any_sender=True):
            waits_s.append(max(patience.awaited_silence_s, self._worth_waiting_s(name)))
        if not self._others_speak_for(name):
            waits_s.append(patience.lonely_silence_s)
        return node.liveness_since + max(min(waits_s), self._replaced_s(node)) if waits_s else None

    def _replaced_s(self, node: Node) -> float:
        """Where workers outlive their agent, another one comes when it ends: its machine lives."""
        return min(self._patience.replaced_s, node.alone_s) if node.agent_gone else 0.0

    def is_witness(self, task: Task, worker: Worker, node: Node, now: float) -> bool:
        """Does what this worker has just said speak against a silent node?"""
        report, seat = task.failures.overdue.get(worker), task.seats.get(worker)
        if report is None or report.busy or seat is None or seat.node == node.name:
            return False
        if not self._roster.seats_on(task, node.name):
            return False
        if now - node.liveness_since >= self._patience.awaited_silence_s:
            return True
        return self._waits_for(task, worker) in (node.name, UNKNOWN)

    def given_up(self, node: str) -> None:
        """Its places are empty now: who waited for it waits for no node that is known."""
        for awaited in self._awaited.values():
            awaited.setdefault(UNKNOWN, []).extend(awaited.pop(node, ()))
        self._sole_keepers = None

    # -------------------------------------------------------------- what workers say

    def _waiting_elsewhere(self, node: str, *, any_sender: bool) -> str:
        """A worker on another node that waits, for a worker on this one as far as is known."""
        for task in self._roster.tasks_on_node(node):
            overdue, seats = task.failures.overdue, task.seats
            if any_sender:
                waiting = (w for w, report in overdue.items() if not report.busy)
                found = next((w for w in waiting if w in seats and seats[w].node != node), None)
            else:
                awaited = self._whom_they_await(task)
                waiting = (w for at in (node, UNKNOWN) for w in awaited.get(at, ()))
                found = next((w for w in waiting if seats[w].node != node), None)
            if found is not None:
                return f"{found} of {task.name}"
        return ""

    def _whom_they_await(self, task: Task) -> dict[str, list[Worker]]:
        """By node that is not heard, or not known: the workers that wait for it."""
        if task.name not in self._awaited:
            awaited: dict[str, list[Worker]] = {}
            self._awaited[task.name] = awaited
            for worker, report in task.failures.overdue.items():
                if not report.busy and worker in task.seats:
                    node = self._waits_for(task, worker)
                    if node is not None:
                        awaited.setdefault(node, []).append(worker)
        return self._awaited[task.name]

    def _waits_for(self, task: Task, waiting: Worker) -> str | None:
        """The node that is not heard from which it would get what it waits for, directly or through workers
        that wait themselves; None: it waits for one that is heard and does not wait.
        """
        passed: set[Worker] = set()
        while (report := task.failures.overdue.get(waiting)) is not None and not report.busy:
            passed.add(waiting)
            sender = usual_sender(report.doing)
            if sender is None or sender in passed or sender not in task.seats:
                return UNKNOWN  # no parcel, a circle, or an empty place
            at = task.seats[sender].node
            if not self._roster.is_heard(at):
                return at
            waiting = sender
        return None

    def _owed_by(self, node: str) -> str:
        """A worker of this node whose ledger a task waits for: its peers wait and blame no worker."""
        for task, worker in self._roster.on_node(node):
            phase = task.recovery.phase if task.recovery is not None else None
            if isinstance(phase, Gathering) and worker in phase.awaited:
                return f"{worker} of {task.name}"
        return ""

    # -------------------------------------------------------------- what is on the node

    def _worth_waiting_s(self, node: str) -> float:
        """Seconds of the whole task that giving this node up costs: its workers' share of it, for as long as
        they copy their states; the most of all tasks there.
        """
        costs = [
            task.starts.longest_copy_s * len(self._roster.seats_on(task, node)) / len(task.seats)
            for task in self._roster.tasks_on_node(node)
            if task.seats
        ]
        return min(self._patience.lonely_silence_s, max(costs, default=0.0))

    def _start_awaited(self, node: str) -> str:
        """A worker that was to start on this node, where a start elsewhere loses nothing: no worker there
        takes part in training, or its task does nothing until its stage has one; and no state is kept there
        alone.
        """
        here = self._roster.on_node(node)
        starting = [(t, w) for t, w in here if isinstance(_place(t, w), Starting | Started)]
        if not starting or self._has_the_only_copy(node):
            return ""
        trains = any(isinstance(_place(task, worker), Member) for task, worker in here)
        for task, worker in starting:
            if not trains or self._stands_still(task, worker):
                return f"{worker} of {task.name}"
        return ""

    def _stands_still(self, task: Task, worker: Worker) -> bool:
        """Its task does nothing, as no other worker of this one's stage is up on a node that is heard."""
        if task.recovery is None or not isinstance(task.recovery.phase, Assembling):
            return False
        peers = (Worker(replica, worker.stage) for replica in range(task.shape.replicas))
        return not any(
            isinstance(_place(task, peer), Started) and self._roster.is_heard(task.seats[peer].node)
            for peer in peers
            if peer != worker and peer in task.seats
        )

    def _has_the_only_copy(self, node: str) -> bool:
        """Would steps be lost with this node? Its memory may have what is neither on a disk nor elsewhere."""
        if self._sole_keepers is None:
            self._sole_keepers = set()
            for task in self._roster.tasks.values():
                newest = task.copies.newest
                if task.state in OVER or newest is None or newest <= task.checkpoints.newest:
                    continue
                for holders in task.copies.states[newest].copies.values():
                    if not any(map(self._roster.is_heard, holders)):
                        self._sole_keepers.update(holders)
        return node in self._sole_keepers

    def _others_speak_for(self, node: str) -> bool:
        """Does a worker of this node train with workers on other nodes? Then only the line is cut.

        Both must be members. One that only starts, or joins, waits for nothing of a step and blames no
        worker: the silence would otherwise never end.
        """
        return any(
            isinstance(_place(task, worker), Member) and any(n != node for n in self._where_trained(task))
            for task, worker in self._roster.on_node(node)
        )

    def _where_trained(self, task: Task) -> list[str]:
        """Two nodes that are heard and have members, if there are two."""
        if task.name not in self._training:
            found: list[str] = []
            self._training[task.name] = found
            for node in self._roster.nodes_of(task):
                seats = self._roster.seats_on(task, node)
                if self._roster.is_heard(node) and any(isinstance(_place(task, w), Member) for w in seats):
                    found.append(node)
                if len(found) == 2:
                    break
        return self._training[task.name]


def _place(task: Task, worker: Worker) -> PlaceState | None:
    return None if task.recovery is None else task.recovery.places.get(worker)
