"""No state without a deadline: what the coordinator waits for ends by a timer, or by a process that lives.

Two walks over its whole state, written apart from its own list of timers (`Coordinator.timers`):

    after every event    what has a clock of its own wakes the coordinator in time: `due_at` is not later
    after everything     who is waited for is there: the process lives, the agent is connected, the question
    is healed            is being answered. What has no such one for `PERSISTS_US` is a failure

Both name the state, where the end of a storm could only say that training does not end; and they see states
that training does not need: a worker that never joins, a node that is never used again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.node import Node
from everstep.core.cluster.node_states import NodeAdmin, NodeLiveness
from everstep.core.cluster.nodes import CHECK_WAIT_S
from everstep.core.cluster.task import Task, TaskState
from everstep.core.task.recovery import Recovery
from everstep.core.task.states import (
    Absent,
    Copied,
    Copying,
    Gathering,
    Member,
    Planning,
    Restoring,
    Running,
    Started,
    Starting,
)
from tests.storms.checkers import Violation

if TYPE_CHECKING:
    from tests.storms.cluster_world import ClusterWorld

PERSISTS_US = 5_000_000  # longer than any deadline of a storm
LOOK_EVERY_US = 100_000

Clock = tuple[str, float | None]  # what waits, and until when; None: it has no clock, and must have one


def without_timer(coordinator: Coordinator) -> Iterator[str]:
    """The states whose time can come without the coordinator waking up for it."""
    due_at = coordinator.due_at()
    for what, at in _clocks(coordinator):
        if at is None or due_at is None or due_at > at + 1e-9:
            yield what


def _clocks(coordinator: Coordinator) -> Iterator[Clock]:
    for task in coordinator.tasks.values():
        yield from _of_task(coordinator, task)
    for node in coordinator.nodes.values():
        yield from _of_node(coordinator, node)
    if coordinator.question.review_at is not None:
        yield "the review of the plan", coordinator.question.review_at


def _of_task(coordinator: Coordinator, task: Task) -> Iterator[Clock]:
    patience, starts, known = coordinator.patience, task.starts, task.checkpoints
    for worker in starts.waiting:
        yield f"the start of {worker}, put off", starts.not_before.get(worker)
    for worker, since in starts.under_way.items():
        yield f"the start of {worker}", since + starts.limit_s(patience)
    if task.state is TaskState.SEARCHING:
        asked = None if known.searched_at is None else known.searched_at
        limit_s = patience.disk_answer_s * (patience.verify_factor if known.failed_loads else 1.0)
        answer_at = None if asked is None else asked + limit_s
        yield "the search for checkpoints", answer_at if known.search_at is None else known.search_at
    elif known.search_at is not None:
        yield "the next search for checkpoints", known.search_at
    if task.failures.links.judge_at is not None:
        yield "broken links", task.failures.links.judge_at
    for step in known.committing:
        asked = known.commit_asked_at.get(step)
        yield f"the commit of step {step}", None if asked is None else asked + patience.disk_answer_s
    if task.state is not TaskState.RUNNING:
        return
    if task.lives is not None:
        yield from _of_lives(task)
        return
    assert task.managed is not None
    if (held := task.progress.held) is not None:
        yield f"the state of step {held.step} that is held", held.since + patience.disk_answer_s
    for worker, place in task.managed.places.items():
        if isinstance(place, Starting) and worker in task.seats and worker not in starts.waiting:
            ordered = starts.under_way.get(worker)
            yield f"the start of {worker}", None if ordered is None else ordered + starts.limit_s(patience)
        if isinstance(place, Copying):
            begun = starts.copying.get(worker)
            yield f"the copy to {worker}", None if begun is None else begun + starts.copy_limit_s(patience)


def _of_lives(task: Task) -> Iterator[Clock]:
    assert task.lives is not None
    at = task.lives.due_at()
    if at is not None:
        yield f"the ranks of {task.name}", at


def _of_node(coordinator: Coordinator, node: Node) -> Iterator[Clock]:
    patience = coordinator.patience
    if node.admin is NodeAdmin.ISOLATED:
        over_at, asked_at = node.admin_since + patience.isolation_s, node.check_asked_at
        yield f"isolated node {node.name}", over_at if asked_at is None else asked_at + CHECK_WAIT_S
    for slot, since in node.isolated_slots.items():
        if len(node.slot_isolations.get(slot, ())) < patience.isolations_before_lemon:
            over_at, asked_at = since + patience.isolation_s, node.slots_asked_at
            waits_until = over_at if asked_at is None else max(over_at, asked_at + CHECK_WAIT_S)
            yield f"isolated slot {slot} of {node.name}", waits_until
    if node.admin is NodeAdmin.CHECKING:
        yield f"network check of {node.name}", node.pairs_at
    if node.drain_at is not None:
        yield f"node {node.name}, which leaves", node.drain_at
    if node.liveness is NodeLiveness.SILENT:
        waited_s = _silence_s(coordinator, node)
        if waited_s is not None:
            heard = [n.liveness_since for n in coordinator.nodes.values() if _is_heard(coordinator, n.name)]
            since = max([node.liveness_since, *heard])  # those that came back since may be witnesses
            yield f"silent node {node.name}", since + max(waited_s, patience.awaited_silence_s)


def _silence_s(coordinator: Coordinator, node: Node) -> float | None:
    """How long it may be silent at most; None: its workers' peers elsewhere say whether they miss it, or
    nobody could take them.
    """
    patience, spoken_for, unheard = coordinator.patience, False, []
    tasks = [t for t in coordinator.tasks.values() if any(s.node == node.name for s in t.seats.values())]
    if not any(_is_heard(coordinator, name) for name in coordinator.nodes):
        return None
    if not tasks:
        return patience.lonely_silence_s
    for task in tasks:
        recovery = task.managed
        if recovery is None:
            continue
        here = {worker for worker, seat in task.seats.items() if seat.node == node.name}
        is_heard_of = any(_is_heard(coordinator, seat.node) for seat in task.seats.values())
        if isinstance(recovery.phase, Gathering) and here & recovery.phase.awaited and is_heard_of:
            return patience.awaited_silence_s
        members = {worker for worker in task.seats if isinstance(recovery.places.get(worker), Member)}
        heard = {w for w in members - here if _is_heard(coordinator, task.seats[w].node)}
        spoken_for = spoken_for or bool(here & members and heard)
        if not is_heard_of and any(isinstance(place, Member) for place in recovery.places.values()):
            unheard.append(task)
    if spoken_for:
        return None
    if not unheard:
        return patience.lonely_silence_s
    room = Counter(name for name, _ in coordinator.roster.free())
    can_move = any(
        sum(slots // task.shape.shards for slots in room.values()) >= task.starts_with for task in unheard
    )
    return patience.cut_silence_s if can_move else None


def _is_heard(coordinator: Coordinator, node: str) -> bool:
    return coordinator.nodes[node].liveness is NodeLiveness.HEARD


class Waits:
    """Looks at a storm's coordinator as it goes."""

    def __init__(self, world: ClusterWorld) -> None:
        self._world = world
        self._since: dict[str, int] = {}  # what has had no one that it waits for, since when
        self.is_healed = False
        self._look_at_us = 0

    def heal(self) -> None:
        self.is_healed = True

    def look(self) -> None:
        """After an event."""
        for what in without_timer(self._world.coordinator):
            raise Violation(f"deadlines: {what} has no timer")
        now_us = self._world.scene.agenda.now_us
        if not self.is_healed or now_us < self._look_at_us:
            return
        self._look_at_us = now_us + LOOK_EVERY_US
        self._since = {what: self._since.get(what, now_us) for what in self._unattended()}
        for what, since_us in self._since.items():
            if now_us - since_us >= PERSISTS_US:
                raise Violation(f"deadlines: {what}")

    def complain(self) -> None:
        """Training does not end: because of what?"""
        for what in self._unattended():
            raise Violation(f"deadlines: {what}")

    def _unattended(self) -> Iterator[str]:
        coordinator = self._world.coordinator
        for task in coordinator.tasks.values():
            yield from self._unattended_task(task)
        for agent in self._world.nodes:
            node = coordinator.nodes.get(agent.name)
            if node is None or not agent.is_reachable():
                continue
            if agent.line is None or node.liveness is not NodeLiveness.HEARD:
                yield f"node {agent.name} can be reached, and is {node.liveness}"
            elif agent.state.done < node.sent:
                yield f"orders to node {agent.name} are not carried out"

    def _unattended_task(self, task: Task) -> Iterator[str]:
        coordinator = self._world.coordinator
        match task.state:
            case TaskState.WAITING if task.most != 0:
                needed = task.least * task.shape.shards
                if coordinator.roster.num_free >= needed and not coordinator.question.is_open:
                    yield f"task {task.name} waits, and has {coordinator.roster.num_free} free slots"
            case TaskState.ENDING:
                for worker, seat in task.seats.items():
                    if not self._lives(task, worker, seat.incarnation) and _is_heard(coordinator, seat.node):
                        yield f"task {task.name} ends, and waits for {worker}, which is gone"
                if not task.seats and not task.checkpoints.committing:
                    yield f"task {task.name} ends, and waits for no worker"
            case TaskState.RUNNING if task.managed is not None:
                yield from self._unattended_recovery(task, task.managed)

    def _unattended_recovery(self, task: Task, recovery: Recovery) -> Iterator[str]:
        coordinator, phase, question = self._world.coordinator, recovery.phase, task.progress.question
        is_asked = question is not None and (task.name, question.epoch) in self._world.asked
        if isinstance(phase, Planning | Restoring) and not is_asked:
            yield f"a schedule for epoch {phase.epoch} is not being computed"
        if isinstance(phase, Gathering):
            for worker in phase.awaited:
                seat = task.seats.get(worker)
                if seat is None or not self._lives(task, worker, seat.incarnation):
                    yield f"the ledger of {worker} is waited for, and its process is gone"
        leaves = task.next_shape is not None or task.after_stop is TaskState.PAUSED
        if leaves and not recovery._book.stopping:
            yield f"task {task.name} is to leave its shape, and does not"
        if not isinstance(phase, Running):
            return
        for worker, place in recovery.places.items():
            seat = task.seats.get(worker)
            if seat is None or seat.leaving or not _is_heard(coordinator, seat.node):
                continue
            match place:
                case Absent() if place.due_step <= recovery.recorded and worker not in task.starts.waiting:
                    yield f"{worker} has a slot and is not started"
                case Started() | Copied():
                    yield f"{worker} is {type(place).__name__}, and is not let in"
                case Member() if not self._lives(task, worker, seat.incarnation):
                    yield f"{worker} counts as a member, and its process is gone"

    def _lives(self, task: Task, worker: object, incarnation: int) -> bool:
        others = (one.sender for one in self._world.others.living())
        ours = (one.sender for one in self._world.processes.living.values() if one.alive)
        return any(sender == (task.name, worker, incarnation) for sender in (*ours, *others))
