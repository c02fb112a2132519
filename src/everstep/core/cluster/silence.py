"""When a silent node is given up.

A node that falls silent is not dead yet: if the steps of its tasks continue, only the line to it is cut. It
is given up when its workers' peers elsewhere wait for it too, or when for a long time no other node can speak
for it; whatever an operator or a remedy wants with it meanwhile (`node_states`).

Where all nodes of a task fall silent together, the listener is in doubt first: its own network may be away
while the task trains on, and to give it up would cost every step since its newest state. So

    nobody is heard                        no node with workers, or copies of states, is given up: nothing
                                           could go on elsewhere
    of a task nobody is, others are        its nodes are waited for as long as a switch needs to start again
                                           (`cut_silence_s`), and longer while no free slots could take it
    some are back that fell silent with    those still missing have as long as an agent may need to find us
    others                                 (`awaited_silence_s`): the first to return may bring workers that
                                           wait, to whom all that are on their way would look dead

and who returns says which processes it runs, and what they did: they are adopted (`Nodes.joined`).

A node that dies with its workers may still report that they died: then new ones are ordered from it, and no
one of them is a member that a peer could miss. Where nothing else trains there, or a task does nothing until
one of them has started, they are waited for about as long as a start elsewhere takes; longer, if the only
copy of some task's newest state is there.

A peer that waits says for which parcel. If the usual sender of that parcel is on a node that is heard and
does not wait itself, the peer waits for that one, and is no witness against the silent node: on a crowded
machine an agent is late with its heartbeats while a slow link elsewhere lets others wait. Senders change with
every re-routing, so after `awaited_silence_s` any peer that waits is believed. A peer on a silent node is
none: what it said before may be long over; and neither is what a peer said before this node can have died: a
cut of the coordinator's line reaches its nodes within a second, one after the other.

A node that is frozen for two seconds (a flush of checkpoints, the migration of a virtual machine) lets its
peers wait as a dead one does. To give it up costs what its workers do not do while they copy their states
again; to wait costs what the whole task does not do. So it is waited for until both are equal: then, whether
it comes back or not, the loss is at most twice the least that was possible. Where copies take milliseconds
that is no time at all; where no copy was ever made, its time is not known and counts as nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from math import inf

from everstep.core.cluster.node import Node
from everstep.core.cluster.node_states import NodeLiveness
from everstep.core.cluster.policy import CoordinatorPolicy
from everstep.core.cluster.roster import Roster
from everstep.core.cluster.task import OVER, Task
from everstep.core.task.states import Assembling, Gathering, Member, PlaceState, Started, Starting
from everstep.protocol.incidents import usual_sender
from everstep.protocol.ops import Worker

UNKNOWN = ""  # the node that a worker waits for


class Silence:
    """Answers for one moment: what it finds about a task is kept for the next silent node that is asked for.
    A row of racks can fall silent at once, and a task can have thousands of workers that wait.
    """

    def __init__(self, roster: Roster, policy: CoordinatorPolicy) -> None:
        self._roster, self._patience, self._limits = roster, policy.patience, policy.limits
        self._awaited: dict[str, dict[str, list[Worker]]] = {}  # by task and node: those that wait for it
        self._training: dict[str, list[str]] = {}  # by task: up to two nodes that are heard and train
        self._heard_of: dict[str, bool] = {}  # by task: is any of its nodes heard?
        self._sole_keepers: set[str] | None = None

    def why_given_up(self, node: Node, now: float) -> str:
        """The reason to give up a silent node now; empty: it is waited for."""
        for at, because in self._reasons(node):
            if now >= at:
                silent_s = now - node.liveness_since
                return f"silent{f' for {silent_s:.0f} s' if silent_s >= 1.0 else ''}, and {because}"
        return ""

    def given_up_at(self, node: Node) -> float | None:
        """When a silent node is given up, if nothing is heard until then."""
        return min((at for at, _ in self._reasons(node)), default=None)

    def _reasons(self, node: Node) -> Iterator[tuple[float, str]]:
        """What speaks against a silent node, and from when on."""
        patience, name, since = self._patience, node.name, node.liveness_since
        tasks = self._roster.tasks_on_node(name)
        if (tasks or node.memory_open) and not self._is_anyone_heard:
            return
        earliest = since + self._replaced_s(node)
        if (back_at := self._others_back_at(node)) is not None:
            since, earliest = back_at, max(earliest, back_at + patience.awaited_silence_s)
        if not tasks:
            yield max(earliest, since + patience.lonely_silence_s), "it is idle"
            return
        for any_sender in (False, True):
            if witness := self._waiting_elsewhere(name, any_sender=any_sender):
                least_s = patience.awaited_silence_s if any_sender else 0.0
                at = since + max(least_s, self._worth_waiting_s(name))
                yield max(earliest, at), f"worker {witness} on another node waits for it"
        if owed := self._owed_by(name):
            because = f"the ledger of worker {owed} is waited for"
            yield max(earliest, since + patience.awaited_silence_s), because
        if awaited := self._start_awaited(name):
            yield max(earliest, since + patience.start_silence_s), f"worker {awaited} was to start there"
        if self._others_speak_for(name):
            return
        unheard = [task for task in tasks if self._trains_unheard(task)]
        if not unheard:
            yield max(earliest, since + patience.lonely_silence_s), "no other worker can speak for it"
        for task in unheard:
            if self._roster.has_room_for(task):
                because = f"so is every node of {task.name}, which others could run"
                yield max(earliest, since + patience.cut_silence_s), because

    @cached_property
    def _is_anyone_heard(self) -> bool:
        return any(node.liveness is NodeLiveness.HEARD for node in self._roster.nodes.values())

    def _others_back_at(self, node: Node) -> float | None:
        """When the last of those that fell silent with this one came back."""
        fell_at, together_s = _last_heard_at(node), self._patience.awaited_silence_s
        back = (at for their, at in self._back if abs(their - fell_at) <= together_s and at > fell_at)
        return max(back, default=None)

    @cached_property
    def _back(self) -> list[tuple[float, float]]:
        """Of the nodes that were silent and are heard: when they were last heard before, and came back."""
        return [
            (node.last_heard_at, node.liveness_since)
            for node in self._roster.nodes.values()
            if node.last_heard_at is not None and node.liveness is NodeLiveness.HEARD
        ]

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
        died_at = -inf if any_sender else _last_heard_at(self._roster.nodes[node])  # at the earliest
        for task in self._roster.tasks_on_node(node):
            overdue, seats = task.failures.overdue, task.seats
            if any_sender:
                waiting = (w for w, report in overdue.items() if not report.busy)
            else:
                awaited = self._whom_they_await(task)
                waiting = (w for at in (node, UNKNOWN) for w in awaited.get(at, ()))
            # One that was found to wait may have lost its seat since, with another node of the same look.
            there = (
                (w, seats[w].node) for w in waiting if w in seats and self._spoke_after(died_at, task, w)
            )
            witness = next((w for w, at in there if at != node and self._roster.is_heard(at)), None)
            if witness is not None:
                return f"{witness} of {task.name}"
        return ""

    def _spoke_after(self, died_at: float, task: Task, waiting: Worker) -> bool:
        """Could it wait for somebody who died then? Waits are told once they have lasted for a while."""
        overdue = task.failures.overdue
        waited_s = min(overdue[waiting].elapsed_s, self._limits.wait_floor_s)
        return overdue.heard_at[waiting] >= died_at + waited_s

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
            if isinstance(phase, Gathering) and worker in phase.awaited and self._is_heard_of(task):
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

    def _trains_unheard(self, task: Task) -> bool:
        """It has a state to lose, and may train on: no node of it is heard."""
        places = () if task.recovery is None else task.recovery.places.values()
        return not self._is_heard_of(task) and any(isinstance(place, Member) for place in places)

    def _is_heard_of(self, task: Task) -> bool:
        if task.name not in self._heard_of:
            self._heard_of[task.name] = any(map(self._roster.is_heard, self._roster.nodes_of(task)))
        return self._heard_of[task.name]

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


def _last_heard_at(node: Node) -> float:
    return node.liveness_since if node.last_heard_at is None else node.last_heard_at
