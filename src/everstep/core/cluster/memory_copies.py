"""What of a task's state is in the memory of nodes: counted, told to those who need it, dropped in time.

Where copies go and which are needed is decided in `core.cluster.copy_placement`; here it becomes orders.
"""

from __future__ import annotations

from dataclasses import replace

from everstep.core.cluster import copy_placement as shelves
from everstep.core.cluster.dispatch import Actions
from everstep.core.cluster.roster import Fetched, Node, Task
from everstep.core.cluster.slowness import SlowDesk
from everstep.core.words import cluster_messages as msg
from everstep.core.words.ops import Worker

KEPT_MOVES = 8  # of a task, for the planner and for people


class ShelfDesk(SlowDesk):
    def _count_kept(self, task: Task) -> Actions:
        """Find the newest whole state; those that are not needed any more make room."""
        actions = self._drop_shelved(task, shelves.needed_from(self.nodes, task))
        task.kept_step = max(shelves.whole_steps(task), default=None)
        return actions

    def _drop_shelved(self, task: Task, before: int | None) -> Actions:
        """States older than this step; None: all of them, for the task is over."""
        actions: Actions = []
        old = [step for step in task.kept if before is None or step < before]
        holders = {node for step in old for copies in task.kept.pop(step).copies.values() for node in copies}
        for name in sorted(holders):
            order = msg.DropCopies(task=task.name, before=task.steps + 1 if before is None else before)
            because = "the task is over" if before is None else f"the state of step {before} is safe"
            actions += self._order(self.nodes[name], order, because)
        if before is None:
            task.kept_step = None
        return actions

    def _forget_copies(self, name: str) -> list[Task]:
        """A node's memory is gone: the tasks that had copies there."""
        losers = []
        for task in self.tasks.values():
            of_stages = [copies for kept in task.kept.values() for copies in kept.copies.values()]
            holding = [copies for copies in of_stages if name in copies]
            for copies in holding:
                del copies[name]
            if holding:
                losers.append(task)
        return losers

    def _clear_shelf(self, node: Node) -> Actions:
        """A node that was given up is back: what it kept is on nobody's list any more."""
        actions: Actions = []
        for name in sorted(node.opened | node.shelving):
            if name in self.tasks:
                order = msg.DropCopies(task=name, before=self.tasks[name].steps + 1)
                actions += self._order(node, order, "its copies were given up with the node")
        return actions

    def _open_shelf(self, task: Task, worker: Worker) -> Actions:
        """The node that keeps this worker's copies must know the task."""
        keeper = self.nodes[shelves.shelf_for(self.nodes, task, worker).node]
        own = task.seats[worker].node
        if keeper.name == own or task.name in keeper.shelving | keeper.opened:
            return []
        keeper.shelving.add(task.name)
        known = msg.OpenMemory(task=task.name, secret=task.secret)
        return self._order(keeper, known, f"{keeper.name} keeps copies of {task.name}'s state")

    def _with_shelves(self, order: msg.NotifyWorker, task: Task, restore: int | None) -> msg.NotifyWorker:
        """An order to go on, with what it must say about states."""
        worker = order.worker
        kept = task.kept.get(restore) if restore and restore == task.kept_step else None
        own = task.seats[worker].node
        return replace(
            order,
            shelf=shelves.shelf_for(self.nodes, task, worker),
            leaves=shelves.leaves(task, worker),
            kept=() if kept is None else shelves.copies_for(self.nodes, kept, worker, own),
        )

    def _fetched(self, event: msg.StateFetched) -> Actions:
        task = self.tasks.get(event.task)
        if task is not None:
            moved = task.fetched.setdefault(event.step, Fetched())
            moved.bytes_here += event.bytes_here
            moved.bytes_elsewhere += event.bytes_elsewhere
            moved.seconds = max(moved.seconds, event.seconds)
            for step in sorted(task.fetched)[:-KEPT_MOVES]:
                del task.fetched[step]
        return []
