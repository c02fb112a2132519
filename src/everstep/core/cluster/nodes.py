"""The life of a node: it joins, falls silent, is given up, drained, isolated, readmitted.

A node that falls silent is not dead yet: if the steps of its tasks go on, only the line to it is cut. It is
given up when its workers' peers elsewhere wait for it too, or when for a long time no other node can speak
for it; whatever an operator or a remedy wants with it meanwhile (`node_states`).
"""

from __future__ import annotations

from everstep.core.cluster.dispatch import Actions
from everstep.core.cluster.node_states import NodeAdmin, NodeLiveness, NodeState
from everstep.core.cluster.roster import Node, Seat, Task, TaskState
from everstep.core.cluster.tasks import TaskDesk
from everstep.core.faults import remedies
from everstep.core.faults.severity import judge
from everstep.core.task.states import Gathering, Member
from everstep.core.words import cluster_messages as msg
from everstep.core.words import events as ev
from everstep.core.words.ops import Worker


class NodeDesk(TaskDesk):
    def _joined(self, event: msg.NodeJoined, now: float) -> Actions:
        node = self.nodes.get(event.node)
        actions: Actions = []
        if node is not None and node.boot != event.boot:
            if node.reachable:
                actions += self._lost(event.node, NodeLiveness.GONE, "its agent was started anew", now)
            node.boot, node.slots, node.host = event.boot, event.slots, event.host
            node.shelf_port = event.shelf_port
            node.heard, node.sent, node.pending = 0, 0, []
            node.opened, node.shelving = set(), set()
        if node is None:
            node = Node(
                name=event.node,
                boot=event.boot,
                slots=event.slots,
                host=event.host,
                admin_since=now,
                liveness_since=now,
                shelf_port=event.shelf_port,
            )
            self.nodes[event.node] = node
        given_up = node.liveness is NodeLiveness.GONE
        if node.liveness is not NodeLiveness.HEARD:
            actions += self._seen(node, NodeLiveness.HEARD, "it is back", now)
        elif node.heard == 0 and node.sent == 0:
            actions.append(msg.NodeChanged(node=node.name, state=node.state, because=node.because))
        keep = tuple(
            (task.name, worker, task.seats[worker].incarnation)
            for task, worker in self.roster.on_node(node.name)
        )
        actions += self._order(node, msg.KeepOnly(keep=keep), "the node is back: only these count")
        if given_up:
            actions += self._clear_shelf(node)
        return actions + self._fill(now, f"node {node.name} joined")

    def _silent(self, event: msg.NodeFellSilent, now: float) -> Actions:
        node = self.nodes.get(event.node)
        if node is None or node.liveness is not NodeLiveness.HEARD:
            return []
        training = "; its workers may be training" if self.roster.on_node(node.name) else ""
        because = f"not heard for {event.silent_s:.2f} s{training}"
        return self._seen(node, NodeLiveness.SILENT, because, now) + self._confirm_silence(now)

    def _confirm_silence(self, now: float) -> Actions:
        """Give up a silent node once the peers of its workers, elsewhere, wait too."""
        actions: Actions = []
        for node in [n for n in self.nodes.values() if n.liveness is NodeLiveness.SILENT]:
            silent_s = now - node.liveness_since
            witnesses = [
                f"{worker} of {task.name}"
                for task in {t.name: t for t, _ in self.roster.on_node(node.name)}.values()
                for worker, report in task.overdue.items()
                if worker in task.seats and task.seats[worker].node != node.name and not report.busy
            ]
            if witnesses:
                because = f"silent, and worker {witnesses[0]} on another node waits for it"
                actions += self._lost(node.name, NodeLiveness.GONE, because, now)
            elif (owed := self._owed_by(node.name)) and silent_s >= self.patience.awaited_silence_s:
                because = f"silent, and the ledger of worker {owed} is waited for"
                actions += self._lost(node.name, NodeLiveness.GONE, because, now)
            elif silent_s >= self.patience.lonely_silence_s and not self._speaks_for(node.name):
                alone = "no other worker can speak for it" if self.roster.on_node(node.name) else "it is idle"
                because = f"silent for {silent_s:.0f} s, and {alone}"
                actions += self._lost(node.name, NodeLiveness.GONE, because, now)
        return actions

    def _silence_ends_at(self, node: Node) -> float | None:
        """When a silent node is given up, if nothing is heard until then."""
        if self._owed_by(node.name):
            return node.liveness_since + self.patience.awaited_silence_s
        if not self._speaks_for(node.name):
            return node.liveness_since + self.patience.lonely_silence_s
        return None

    def _owed_by(self, node: str) -> str:
        """A worker of this node whose ledger a task waits for: its peers stand still and blame nobody."""
        for task, worker in self.roster.on_node(node):
            phase = task.recovery.phase if task.recovery is not None else None
            if isinstance(phase, Gathering) and worker in phase.awaited:
                return f"{worker} of {task.name}"
        return ""

    def _speaks_for(self, node: str) -> bool:
        """Does a worker of this node train with workers on other nodes? Then only the line is cut.

        One that only starts, or joins, is waited for by nobody: its silence would otherwise last for ever.
        """
        return any(
            task.recovery is not None
            and isinstance(task.recovery.places.get(worker), Member)
            and any(seat.node != node and self._is_heard(seat.node) for seat in task.seats.values())
            for task, worker in self.roster.on_node(node)
        )

    def _lost(self, name: str, state: NodeLiveness, because: str, now: float) -> Actions:
        """A node is gone, and with it every worker on it."""
        node = self.nodes.get(name)
        if node is None or not node.reachable:
            return []
        actions = self._seen(node, state, because, now)
        node.pending.clear()
        losers = self._forget_copies(name)
        for task in losers:
            actions += self._settle_kept(task, now)
        taken: dict[str, list[tuple[Worker, Seat]]] = {}
        for task, worker in self.roster.on_node(name):
            taken.setdefault(task.name, []).append((worker, task.seats.pop(worker)))
        for task_name, seats in taken.items():
            task = self.tasks[task_name]
            if task.state is TaskState.SEARCHING:  # the answer may have died with the node
                task.state, task.search_at = TaskState.WAITING, None
            actions += self._grant(task, now)
            if state is NodeLiveness.GONE and task.state is TaskState.RUNNING:
                self._blame_node(task, node, [worker for worker, seat in seats if seat.incarnation], now)
            for worker, seat in seats:
                actions += self._gone(task, worker, seat, f"node {name} is gone: {because}", now)
        for task in losers:
            lost = ev.CopiesLost(because=f"node {name}, which kept copies of its state in memory, is gone")
            actions += self._of_task(task.name, lost, now)
        return actions + self._fill(now, f"node {name} is gone")

    def _blame_node(self, task: Task, node: Node, workers: list[Worker], now: float) -> None:
        """One incident for all the workers that went with it."""
        if not workers:
            return
        judgement = judge("silence", node.because)
        incident = self._evidence(
            task, workers[0], "silence", f"node {node.name} is gone: {node.because}", now
        )
        incident.node = node.name
        incident.workers += [worker for worker in workers if worker not in incident.workers]
        self._verdict(incident, judgement, now)
        self._remedy(incident, "go on without the node, and fill its places elsewhere", node.because, now)

    def _drain(self, name: str, now: float) -> Actions:
        node = self.nodes.get(name)
        if node is None or node.admin is NodeAdmin.DRAINING:
            return []
        actions = self._wanted(node, NodeAdmin.DRAINING, "drained by an operator", now)
        return actions + self._evacuate(node, "drained by an operator", now)

    def _evacuate(self, node: Node, because: str, now: float) -> Actions:
        """Ask a node's workers to go; their places are filled elsewhere."""
        actions: Actions = []
        for task, worker in self.roster.on_node(node.name):
            actions += self._ask_to_go(task, worker, f"node {node.name}: {because}", now)
        return actions

    def _isolate(self, node: Node, because: str, now: float) -> Actions:
        node.isolations = [*remedies.recent(node.isolations, now, self.patience), now]
        lemon = len(node.isolations) >= self.patience.isolations_before_lemon
        if node.admin is NodeAdmin.DRAINING:  # it is on its way out, and stays out
            return []
        state = NodeAdmin.LEMON if lemon else NodeAdmin.ISOLATED
        told = f"isolated {len(node.isolations)} times lately; {because}" if lemon else because
        return self._wanted(node, state, told, now) + self._evacuate(node, f"isolated: {because}", now)

    def _readmit(self, event: msg.ReadmitRequested, now: float) -> Actions:
        node = self.nodes.get(event.node)
        if node is None or node.admin is NodeAdmin.UP:
            return []
        node.isolations.clear()
        actions = self._wanted(node, NodeAdmin.UP, f"readmitted by {event.by}", now)
        return actions + self._fill(now, f"node {node.name} was readmitted")

    def _wanted(self, node: Node, admin: NodeAdmin, because: str, now: float) -> Actions:
        node.set_admin(admin, because, now)
        return [msg.NodeChanged(node=node.name, state=node.state, because=because)]

    def _seen(self, node: Node, liveness: NodeLiveness, because: str, now: float) -> Actions:
        node.set_liveness(liveness, because, now)
        return [msg.NodeChanged(node=node.name, state=node.state, because=because)]

    def _could_live_without(self, name: str) -> bool:
        """Would every task with workers on this node still have, or find, a worker for each stage?"""
        free = sum(1 for node, _ in self.roster.free() if node != name)
        needed = 0
        for task in {t.name: t for t, _ in self.roster.on_node(name)}.values():
            elsewhere = {w.stage for w, seat in task.seats.items() if seat.node != name}
            needed += task.shape.stages - len(elsewhere)
        return free >= needed and any(n.name != name and n.state is NodeState.UP for n in self.nodes.values())
