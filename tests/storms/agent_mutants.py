"""Planted bugs in what agents and worker loops decide, and in how the coordinator believes them.

The first three are bugs that real processes found; those named after a number of an issue's list
are what the code did before that item was closed. All are sought by storms around a whole cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from everstep.core.agent.agent import AgentState, LeaveLine, LineClosed
from everstep.core.agent.agent_messages import Kill, SendToCoordinator, Spawn, SpawnFailed
from everstep.core.agent.process import Process, ProcessState
from everstep.core.agent.processes import NodeProcesses
from everstep.core.agent.reports import ReportQueue
from everstep.core.cluster import copy_placement, fences
from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.node import Node
from everstep.core.cluster.node_states import NodeAdmin
from everstep.core.cluster.nodes import Nodes
from everstep.core.cluster.task import Ending, Task, TaskState
from everstep.core.cluster.tasks import Tasks
from everstep.core.cluster.training import Training
from everstep.core.task.recovery import Recovery
from everstep.core.worker.control import WorkerControl
from everstep.core.worker.mending import LinkMending
from everstep.drive.driver import Driver
from everstep.protocol import messages as msg
from everstep.protocol.events import StepSealed
from everstep.protocol.moment import Moment
from everstep.protocol.work import PeerAddress

Patch = tuple[Any, str, Any]  # owner, name, the wrong function


# ------------------------------------------------------------------ the agent's processes


def start_does_not_wait() -> list[Patch]:
    """A worker is started though an earlier process of it, or of its slot, is still there."""
    right = NodeProcesses._in_the_way

    def wrong(self: NodeProcesses, order: msg.StartProcess) -> Iterator[Process]:
        return (p for p in right(self, order) if p.state is ProcessState.STUCK)

    return [(NodeProcesses, "_in_the_way", wrong), (NodeProcesses, "validate", lambda self: None)]


def unwanted_start_stays() -> list[Patch]:
    """A start that waits is not dropped when its worker is ended: it comes up when nothing expects it."""
    right = NodeProcesses._drop

    def wrong(self: NodeProcesses, starts: list[msg.StartProcess]) -> list[Any]:
        kept = dict(self.waiting)
        found = right(self, starts)
        self.waiting.update(kept)
        return found

    return [(NodeProcesses, "_drop", wrong), (NodeProcesses, "validate", lambda self: None)]


def kill_of_a_starting_process_is_lost() -> list[Patch]:
    """A process that is ordered killed before it is up is not killed when it is."""
    right = NodeProcesses._spawned

    def wrong(self: NodeProcesses, sender: msg.Sender, now: float) -> list[Any]:
        return [action for action in right(self, sender, now) if not isinstance(action, Kill)]

    return [(NodeProcesses, "_spawned", wrong)]


def no_escalation() -> list[Patch]:
    """A worker that does not leave when it is asked to is asked for ever."""
    right = NodeProcesses._press

    def wrong(self: NodeProcesses, process: Process, now: float) -> list[Any]:
        late = process.deadline is not None and now >= process.deadline
        if late and process.state is ProcessState.ENDING:
            process.deadline = now + self.limits.finish_s
            return []
        return right(self, process, now)

    return [(NodeProcesses, "_press", wrong)]


def killed_for_ever() -> list[Patch]:
    """Issue 16, 13: a process that survives SIGKILL is killed again and again, and never given up."""

    def wrong(self: NodeProcesses, process: Process) -> list[Any]:
        assert process.deadline is not None
        process.deadline += self.limits.kill_s
        return [Kill(process.sender)]

    return [(NodeProcesses, "_give_up", wrong)]


def dead_fork_server_stays() -> list[Patch]:
    """Issue 16, 9: a fork server that has died is not replaced."""
    right = NodeProcesses._not_spawned

    def wrong(self: NodeProcesses, event: SpawnFailed) -> list[Any]:
        return [Spawn(action.order) if isinstance(action, Spawn) else action for action in right(self, event)]

    return [(NodeProcesses, "_not_spawned", wrong)]


def exit_not_reported() -> list[Patch]:
    """The death of a process that the agent has killed is not reported: it was ordered, after all."""
    right = NodeProcesses._died

    def wrong(self: NodeProcesses, event: Any) -> list[Any]:
        process = self.processes.get(event.sender)
        killed = process is not None and process.state is ProcessState.KILLED
        return [a for a in right(self, event) if not (killed and isinstance(a, SendToCoordinator))]

    return [(NodeProcesses, "_died", wrong)]


def deaf_worker_is_patient() -> list[Patch]:
    """Orders that a waiting worker does not take are no evidence."""
    right = NodeProcesses._tell

    def wrong(self: NodeProcesses, task: str, orders: Any, now: float) -> list[Any]:
        found = right(self, task, orders, now)
        for process in self.processes.values():
            process.unanswered.clear()
        return found

    return [(NodeProcesses, "_tell", wrong)]


# ------------------------------------------------------------------ the agent's line


def closed_line_ends_workers() -> list[Patch]:
    """Issue 16, 14: an agent whose line is refused or closed kills its workers."""
    right = AgentState.handle

    def wrong(self: AgentState, event: Any, now: float) -> list[Any]:
        found = right(self, event, now)
        if isinstance(event, LineClosed):
            for process in list(self.processes.processes.values()):
                found += self.processes._kill(process, now)
        return found

    return [(AgentState, "handle", wrong)]


def old_term_obeyed() -> list[Patch]:
    """Issue 16, 10: a deposed coordinator is obeyed like any other."""

    def wrong(self: AgentState, term: int) -> list[LeaveLine]:
        self.term = term
        return []

    return [(AgentState, "_refuses", wrong)]


def order_carried_out_twice() -> list[Patch]:
    """An order that is sent again after the line was cut is carried out again."""
    right = AgentState._ordered

    def wrong(self: AgentState, event: Any, now: float) -> list[Any]:
        done, self.done = self.done, 0
        found = right(self, event, now)
        self.done = max(done, self.done)
        return found

    return [(AgentState, "_ordered", wrong)]


def reports_forgotten_when_sent() -> list[Patch]:
    """Reports are kept until they are sent, not until the coordinator has them on disk."""
    right = ReportQueue.after

    def wrong(self: ReportQueue, number: int, *, at_most: int = 256) -> Iterator[Any]:
        found = list(right(self, number, at_most=at_most))
        if found:
            self.heard(found[-1].number)
        return iter(found)

    return [(ReportQueue, "after", wrong)]


# ------------------------------------------------------------------ the worker's loop


def broken_link_opened_at_once() -> list[Patch]:
    """A broken link is opened again at once and for ever, and said to work each time."""
    right = LinkMending.broke

    def wrong(self: LinkMending, address: PeerAddress, now: float) -> None:
        right(self, address, now)
        self._broken[address].send_at = now
        self.opened(address, now)

    return [(LinkMending, "broke", wrong)]


def silence_counts_as_mended() -> list[Patch]:
    """A link is said to work again when it has not broken for a while, though nothing has answered."""
    right = LinkMending.due

    def wrong(self: LinkMending, now: float) -> Any:
        found = right(self, now)
        for address in found[0]:
            self.opened(address, now)
        return found

    return [(LinkMending, "due", wrong)]


def beacon_written_at_every_wake_up() -> list[Patch]:
    """A worker's beacon begins anew whenever it is woken, so it never waits for long."""
    return [(WorkerControl, "shows", lambda self, *, busy, doing: True)]


def leaves_with_work_in_hand() -> list[Patch]:
    """A worker that is asked to finish leaves at once."""
    return [(WorkerControl, "may_leave", lambda self, task: self.over or self._finishing)]


# ------------------------------------------------------------------ whom the coordinator believes


def late_reports_count() -> list[Patch]:
    """Issue 16, 4: seals of processes that were given up count, whatever attempt they are of."""
    right, counted = Recovery.is_late, fences.refused

    def wrong(self: Recovery, said: Any) -> bool:
        return not isinstance(said, StepSealed) and right(self, said)

    def lenient(node: str, report: Any, sender: Any, tasks: Any) -> str:
        is_seal = isinstance(report, msg.TaskEvent) and isinstance(report.event, StepSealed)
        return "" if is_seal else counted(node, report, sender, tasks)

    return [(fences, "refused", lenient), (Recovery, "is_late", wrong)]


def drained_node_not_given_up() -> list[Patch]:
    """Issue 16, 8: a node that dies while it is drained or isolated is awaited for ever."""
    right = Nodes.fell_silent

    def wrong(self: Nodes, node: Node, silent_s: float, now: Any) -> Any:
        return [] if node.admin is not NodeAdmin.UP else right(self, node, silent_s, now)

    return [(Nodes, "fell_silent", wrong)]


def elected_one_starts_from_nothing() -> list[Patch]:
    """Issue 16, 10: an elected coordinator does not read the journal."""
    return [(Driver, "replay", lambda self, entries, *, carried_out=None: None)]


# ------------------------------------------------------------------ states in memory


def one_holder_is_asked() -> list[Patch]:
    """A worker asks one holder of a part; if that read fails, the state is lost."""
    right = copy_placement.copies_for

    def wrong(*given: Any) -> Any:
        return tuple(holders[:1] for holders in right(*given))

    return [(copy_placement, "copies_for", wrong)]


# ------------------------------------------------------------------ operators


def cancel_does_not_close() -> list[Patch]:
    """A cancelled task is over, and its workers are not told."""
    right = Tasks.end

    def wrong(self: Tasks, task: Task, ending: Ending, now: Moment) -> Any:
        actions = right(self, task, ending, now)
        if ending.state is not TaskState.CANCELLED:
            return actions
        return [
            a for a in actions if not (isinstance(a, msg.Dispatch) and isinstance(a.order, msg.CloseTask))
        ]

    return [(Tasks, "end", wrong)]


def cancel_of_a_task_that_stops_is_lost() -> list[Patch]:
    """One that leaves its slots for now, or is paused, takes no other word until it has."""
    right = Tasks.cancel

    def wrong(self: Tasks, task: Task, by: str, now: Moment) -> Any:
        return [] if task.state is TaskState.ENDING else right(self, task, by, now)

    return [(Tasks, "cancel", wrong)]


# ------------------------------------------------------------------ timers


def _without_timer(what: str) -> Callable[[], list[Patch]]:
    """The coordinator does not wake up for this."""
    right = Coordinator.timers_of

    def wrong(self: Coordinator, task: Task | None) -> Any:
        return {name: times for name, times in right(self, task).items() if name != what}

    return lambda: [(Coordinator, "timers_of", wrong)]


NOT_IN_STORMS = ("life of a script", "node that is checked")  # none is there: tests/core
# One for each row of the table.
TIMER_MUTANTS: dict[str, Callable[[], list[Patch]]] = {
    f"no_timer_of_{what.replace(' ', '_')}": _without_timer(what)
    for what in Coordinator().timers()
    if what not in NOT_IN_STORMS
}


def over_with_the_last_seal() -> list[Patch]:
    """A task ends when its last step is recorded, whether its last state is saved or not."""

    def wrong(
        self: Training, task: Task, step: int, state: TaskState, because: str, now: Moment
    ) -> list[Any]:
        return self._ends(task, state, because, gently=True)

    return [(Training, "_hold_last", wrong)]


CANCEL_MUTANTS: dict[str, Callable[[], list[Patch]]] = {
    make.__name__: make for make in (cancel_does_not_close, cancel_of_a_task_that_stops_is_lost)
}
MEMORY_MUTANTS: dict[str, Callable[[], list[Patch]]] = {"one_holder_is_asked": one_holder_is_asked}
CLUSTER_MUTANTS: dict[str, Callable[[], list[Patch]]] = {
    make.__name__: make
    for make in (
        start_does_not_wait,
        over_with_the_last_seal,
        broken_link_opened_at_once,
        beacon_written_at_every_wake_up,
        unwanted_start_stays,
        kill_of_a_starting_process_is_lost,
        no_escalation,
        exit_not_reported,
        deaf_worker_is_patient,
        order_carried_out_twice,
        reports_forgotten_when_sent,
        silence_counts_as_mended,
        leaves_with_work_in_hand,
        late_reports_count,
        drained_node_not_given_up,
        dead_fork_server_stays,
        elected_one_starts_from_nothing,
        old_term_obeyed,
        killed_for_ever,
        closed_line_ends_workers,
    )
}
