"""What of a task's state is in the memory of nodes: counted, announced, dropped in time.

Where copies go and which are needed is decided in `core.cluster.copy_placement`; here it becomes orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from everstep.core.cluster import copy_placement as placement
from everstep.core.cluster.context import ClusterContext
from everstep.core.cluster.node import Node
from everstep.core.cluster.node_states import NodeAdmin
from everstep.core.cluster.orders import Actions
from everstep.core.cluster.task import OVER, Fetched, KeptState, Task
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.messages import FailedRead
from everstep.protocol.moment import Moment
from everstep.protocol.ops import Worker
from everstep.protocol.work import StateDirections

KEPT_MOVES = 8  # of a task, for the planner and for the page
MOST_ATTEMPTS = 3  # to load a state of which a worker could not read a part, each with all holders asked


class MemoryCopies:
    """Changes `task.copies`, and `node.memory_open`."""

    def __init__(self, context: ClusterContext) -> None:
        self._roster, self._orders, self._incidents = context.roster, context.orders, context.incidents

    def add(self, task: Task, event: msg.PartWritten, node: str) -> bool:
        """A copy of a stage's state is in a node's memory. Does it count?"""
        known = self._roster.nodes.get(node)
        if task.state in OVER or known is None or not known.reachable:
            return False
        states = task.copies.states
        if event.step not in states or states[event.step].attempt != event.attempt:
            parts = task.shape.stages * max(1, task.shape.chunks)
            states[event.step] = KeptState(parts, event.attempt)
        index, count = event.share  # sharded: of the chunks of a stage
        states[event.step].copies.setdefault(event.stage * count + index, {})[node] = event.part
        return True

    def count(self, task: Task, now: Moment) -> Actions:
        """Find the newest whole state; those that are not needed any more make room."""
        actions = self.drop(task, placement.needed_from(self._roster.nodes, task), now)
        task.copies.newest = max(placement.whole_steps(task), default=None)
        return actions

    def drop(self, task: Task, before: int | None, now: Moment) -> Actions:
        """States older than this step; None: all of them, for the task is over."""
        actions: Actions = []
        states = task.copies.states
        old = [step for step in states if before is None or step < before]
        holders = {node for step in old for copies in states.pop(step).copies.values() for node in copies}
        for name in sorted(holders):
            order = msg.DropCopies(task=task.name, before=task.steps + 2 if before is None else before)
            because = "the task is over" if before is None else f"the state of step {before} is safe"
            actions += self._orders.send(name, order, because, now)
        if before is None:
            task.copies.newest = None
        return actions

    def node_gone(self, name: str) -> list[Task]:
        """A node's memory is gone: the tasks that had copies there."""
        losers = []
        for task in self._roster.tasks.values():
            of_stages = [copies for kept in task.copies.states.values() for copies in kept.copies.values()]
            holding = [copies for copies in of_stages if name in copies]
            for copies in holding:
                del copies[name]
            if holding:
                losers.append(task)
        return losers

    def node_back(self, node: Node, now: Moment) -> Actions:
        """A node that was given up is back: what it kept is on no list any more."""
        actions: Actions = []
        for name in sorted(node.opened | node.memory_open):
            if name in self._roster.tasks:
                order = msg.DropCopies(task=name, before=self._roster.tasks[name].steps + 2)
                actions += self._orders.send(node.name, order, "its copies were given up with the node", now)
        return actions

    def directions(
        self, task: Task, restore: int | None, workers: Mapping[str, Iterable[Worker]], now: Moment
    ) -> tuple[Actions, dict[Worker, StateDirections]]:
        """What these workers, by node, are told about states; and the orders that must come before it."""
        nodes = self._roster.nodes
        kept = task.copies.states.get(restore) if restore and restore == task.copies.newest else None
        keepers = placement.Keepers(self._roster, task)
        used: dict[str, Node] = {}
        found: dict[Worker, StateDirections] = {}
        shared: dict[tuple[str, bool, bool], StateDirections] = {}  # of those that load nothing
        for own, here in workers.items():
            copy_away = nodes[own].admin is not NodeAdmin.UP
            here = tuple(here)  # not those that are still to join: they may have no state when the shape ends
            leaders = placement.copied_at_end(here)
            for worker in here:
                keeper = keepers.after(own, worker.stage)
                if keeper != own:
                    used[keeper] = nodes[keeper]
                leads = worker in leaders
                if kept is None and (known := shared.get((keeper, leads, copy_away))) is not None:
                    found[worker] = known
                    continue
                parts = () if kept is None else placement.copies_for(nodes, kept, worker, own)
                found[worker] = shared[keeper, leads, copy_away] = StateDirections(
                    copy_to=keepers.address(keeper),
                    copy_at_end=leads,
                    copy_away=copy_away,
                    copies=tuple([holders[0] for holders in parts]),
                    other_holders=tuple([holders[1:] for holders in parts]),
                )
        actions: Actions = []
        for node in used.values():
            actions += self._open_memory(task, node, now)
        return actions, found

    def fetched(self, task: Task, event: msg.StateFetched, now: Moment) -> None:
        """A worker has read a state, or tried to."""
        self._note_failed_reads(task, event, now)
        fetched = task.copies.fetched
        moved = fetched.setdefault(event.step, Fetched())
        moved.bytes_here += event.bytes_here
        moved.bytes_elsewhere += event.bytes_elsewhere
        moved.seconds = max(moved.seconds, event.seconds)
        for step in sorted(fetched)[:-KEPT_MOVES]:
            del fetched[step]

    def give_up(self, task: Task, event: ev.RestoreFailed) -> bool:
        """A worker could not load a state: no holder gave it all parts. It may have been cut off for a
        moment, or another holder has been heard of since, so the state counts for a few more attempts.
        Then it does not any more; it is not deleted because it could not be read.
        """
        kept = task.copies.states.get(event.step)
        if kept is None:
            return False
        kept.failed_in.add(event.epoch)
        if event.epoch and len(kept.failed_in) < MOST_ATTEMPTS:
            return False
        del task.copies.states[event.step]
        return True

    def _note_failed_reads(self, task: Task, event: msg.StateFetched, now: Moment) -> None:
        """The nodes that did not give a part are asked last from now on; the incident says what was tried."""
        kept = task.copies.states.get(event.step)
        by_node: dict[str, list[FailedRead]] = {}
        for read in event.failed:
            by_node.setdefault(read.node, []).append(read)
        for node, reads in by_node.items():
            if kept is not None:
                kept.failed_reads[node] = kept.failed_reads.get(node, 0) + 1
            lost = any(not read.then for read in reads)
            self._incidents.read_failed(task, event, _what_failed(event, node, reads), now, lost=lost)

    def _open_memory(self, task: Task, keeper: Node, now: Moment) -> Actions:
        """A node that keeps copies of other nodes' workers must know the task."""
        if task.name in keeper.memory_open or task.name in keeper.opened:
            return []
        keeper.memory_open.add(task.name)
        order = msg.OpenMemory(task=task.name, secret=task.request.secret, owner=task.request.owner)
        because = f"{keeper.name} keeps copies of {task.name}'s state"
        return self._orders.send(keeper.name, order, because, now)


def _what_failed(event: msg.StateFetched, node: str, reads: list[FailedRead]) -> str:
    parts = "1 part" if len(reads) == 1 else f"{len(reads)} parts"
    then = sorted({read.then for read in reads if read.then})
    found = f"read from node {' and '.join(then)} instead" if then else "no other node gives it"
    return (
        f"worker {event.worker} could not read {parts} of the state of step {event.step} from the memory of "
        f"node {node} ({reads[0].because}); {found}"
    )
