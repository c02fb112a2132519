"""The life of a node: it joins, falls silent, is given up, drained, isolated, readmitted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from everstep.core.cluster.context import ClusterContext
from everstep.core.cluster.memory_copies import MemoryCopies
from everstep.core.cluster.network_checks import NetworkChecks, NetworkFound
from everstep.core.cluster.node import Node
from everstep.core.cluster.node_states import NodeAdmin, NodeLiveness, NodeState
from everstep.core.cluster.orders import Actions
from everstep.core.cluster.progress import costs_of_drain
from everstep.core.cluster.silence import Silence
from everstep.core.cluster.staffing import Staffing
from everstep.core.cluster.task import Ending, Seat, Task, TaskState
from everstep.core.cluster.tasks import Tasks
from everstep.core.cluster.training import Training
from everstep.core.faults import gray, remedies
from everstep.core.faults.fitness import CheckRun, Fitness, judge_checks, kept_with, run_of
from everstep.core.faults.severity import ErrorKind, known
from everstep.core.task.states import Lived
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.moment import Moment
from everstep.protocol.ops import Worker

CHECK_WAIT_S = 120.0  # for the answer of a node that is checked before it is readmitted
SHOWN_CHECKS = 8
LEAVE_EARLY_S = 30.0  # before a node that was announced to leave its workers go; half of a shorter notice


class Nodes:
    """Changes the state of nodes."""

    def __init__(
        self,
        context: ClusterContext,
        *,
        copies: MemoryCopies,
        training: Training,
        staffing: Staffing,
        tasks: Tasks,
    ) -> None:
        self._roster, self._orders, self._incidents = context.roster, context.orders, context.incidents
        self._policy, self._later = context.policy, context.later
        self._copies, self._training, self._staffing, self._tasks = copies, training, staffing, tasks
        self._network = NetworkChecks(roster=context.roster, orders=context.orders, policy=context.policy)

    def joined(self, event: msg.NodeJoined, now: Moment) -> Actions:
        node = self._roster.nodes.get(event.node)
        actions: Actions = []
        is_new = False  # else its line was cut, and it says what it found when it began
        if node is not None and node.boot != event.boot:
            if node.reachable:
                actions += self._lost(node, NodeLiveness.GONE, "its agent was started anew", now)
            node.boot, node.slots, node.host = event.boot, event.slots, event.host
            node.memory_port = event.memory_port
            node.heard, node.sent, node.pending = 0, 0, []
            node.lost_slots = set()
            actions += self._incidents.slots_back(node, "its agent was started anew", now)
            node.isolated_slots = {s: at for s, at in node.isolated_slots.items() if s < node.slots}
            node.slots_asked_at = None
            node.opened, node.memory_open = set(), set()
            left, node.leaves_at, node.drain_at = node.leaves_at is not None, None, None
            if left and node.admin is NodeAdmin.DRAINING and not node.drained_by:
                actions += self._set_admin(node, NodeAdmin.UP, "it left as announced and is back", now)
            self._roster.node_changed(node)
            is_new = True
        if node is None:
            node = Node(
                name=event.node,
                boot=event.boot,
                slots=event.slots,
                host=event.host,
                admin_since=now.at,
                liveness_since=now.at,
                gray=gray.GrayRecord(since=self._gray_time(now)),
                memory_port=event.memory_port,
            )
            self._roster.add_node(node)
            is_new = True
            if event.journal and event.journal == self._policy.journal:
                node.sent = event.done  # a node that was gone, and was forgotten with many others
        node.pair_port, node.memory_port = event.pair_port, event.memory_port
        node.alone_s, node.rack, node.cannot_compile = event.alone_s, event.rack, event.cannot_compile
        strange = self._strange_tasks(event)
        if because := self._why_records_disagree(node, event):
            actions += self._reconcile(node, event, strange, because, now)
        actions += self._doubts_over(node, now)  # its agent says it again
        given_up = node.liveness is NodeLiveness.GONE
        if node.liveness is not NodeLiveness.HEARD:
            actions += self._set_liveness(node, NodeLiveness.HEARD, "it is back", now)
        elif is_new or (node.heard == 0 and node.sent == 0):
            actions += self._changed(node, node.because, now)
        keep = tuple(
            (task.name, worker, task.seats[worker].incarnation)
            for task, worker in self._roster.on_node(node.name)
        )
        order = msg.KeepOnly(keep=keep + tuple(run for run in event.runs if run[0] in strange))
        actions += self._orders.send(node.name, order, "the node is back: only these count", now)
        for task in strange:  # they may finish what they have in hand: it is not theirs that it is unknown
            close = msg.CloseTask(task=task, gently=True)
            actions += self._orders.send(node.name, close, "this coordinator does not run the task", now)
        if given_up:
            actions += self._copies.node_back(node, now)
            # Its last orders were given up with it. Which of them it had carried out is not in the journal.
            node.opened, node.memory_open = set(), set()
        if is_new and event.checks:
            actions += self.checked(node, event.checks, "it joins", now)
        if is_new and event.checks_network and node.admin in (NodeAdmin.UP, NodeAdmin.CHECKING):
            actions += self._check_network(node, "it joins", now)
        self._later.slots_changed(f"node {node.name} joined")
        return actions

    def checked(self, node: Node, results: Sequence[msg.CheckResult], because: str, now: Moment) -> Actions:
        """What its checks have found, compared with its peers. An unfit node, or slot, gets no workers."""
        was_asked, node.check_asked_at = node.check_asked_at is not None, None
        slots_asked, node.slots_asked_at = node.slots_asked_at is not None, None
        # Beside workers of ours the same checks are slower.
        is_busy = bool(self._roster.on_node(node.name))
        peers = [
            other.checked[-1] for other in self._roster.nodes.values() if other is not node and other.checked
        ]
        found = judge_checks(results, () if is_busy else node.checked, () if is_busy else peers)
        if len(found.slots) >= node.slots:
            found = replace(found, unfit=(*found.unfit, *dict.fromkeys(found.slots.values())), slots={})
        if not is_busy and not found.unfit:
            node.checked = kept_with(node.checked, run_of(results, now.at))
        actions: Actions = []
        if found.unfit or found.marked or found.slots:
            actions += self._tell_checks(node, found, because, now)
        if found.slots:
            why = f"it fails its checks: {next(iter(found.slots.values()))}"
            slots = tuple(sorted(found.slots))
            actions += self.isolate_slots(node, slots, why, now, counts=not slots_asked)
        if slots_asked and not found.unfit:
            self._free_slots(node, now)
        is_over = node.admin is NodeAdmin.ISOLATED and was_asked
        if not found.unfit:
            passes = "passes its checks" if results else "could not be checked"
            why = f"its time of isolation is over and it {passes}"
            return actions + (self._check_network(node, why, now) if is_over else [])
        why = f"it fails its checks: {found.unfit[0]}"
        if is_over:  # for as long again
            node.admin_since, node.admin_because = now.at, why
            self._roster.node_changed(node)
            return actions + self._changed(node, why, now)
        return actions + (self.isolate(node, why, now) if node.admin is NodeAdmin.UP else [])

    def _check_network(self, node: Node, because: str, now: Moment) -> Actions:
        """It gets workers once that is done; at once where it cannot be done."""
        if not self._network.is_possible(node):
            return [] if node.admin is NodeAdmin.UP else self._back(node, because, now)
        node.check_asked_at = None
        node.measured_because = because
        measured = f"its network is measured before it gets workers: {because}"
        actions = self._set_admin(node, NodeAdmin.CHECKING, measured, now)
        self._network.begin(node, now)
        return actions + self._network_settled(now)

    def pair_measured(self, node: Node, report: msg.PairMeasured, now: Moment) -> Actions:
        self._network.measured(node, report)
        return self._network_settled(now)

    def compare_networks(self, names: Sequence[str], now: Moment) -> Actions:
        """Links between them are slow."""
        return self._network.compare([self._roster.nodes[name] for name in names], now)

    def _network_settled(self, now: Moment) -> Actions:
        actions, judged = self._network.settle(now)
        return [*actions, *(action for found in judged for action in self._network_found(found, now))]

    def _network_found(self, found: NetworkFound, now: Moment) -> Actions:
        node, fitness = found.node, found.fitness
        self._later.networks.append(node.name)
        actions: Actions = []
        if fitness.unfit or fitness.marked:
            actions += self._tell_checks(node, fitness, "its network was measured", now)
        if fitness.unfit and node.admin in (NodeAdmin.UP, NodeAdmin.CHECKING):
            return actions + self.isolate(node, f"it fails its checks: {fitness.unfit[0]}", now)
        if found.figures and not fitness.unfit:
            node.checked = kept_with(node.checked, CheckRun(at=now.at, figures=found.figures))
        if node.admin is not NodeAdmin.CHECKING:
            return actions
        network = "; ".join(found.pairs) or "no other node is there to measure its network with"
        return actions + self._back(node, f"{node.measured_because}; {network}", now)

    def _tell_checks(self, node: Node, found: Fitness, because: str, now: Moment) -> Actions:
        some = f"slot {', '.join(map(str, sorted(found.slots)))} of " if found.slots else ""
        fails = bool(found.unfit or found.slots)
        what = f"{some}node {node.name} {'fails its checks' if fails else 'is marked by its checks'}"
        incident = self._incidents.new(task=None, what=what, now=now)
        incident.node, incident.stops_training = node.name, False
        self._incidents.tell(incident, "checks", (f"checked because {because}",), now)
        told = (*found.unfit, *dict.fromkeys(found.slots.values()), *found.marked)
        self._incidents.tell(incident, "checks", told[:SHOWN_CHECKS], now)
        kind = ErrorKind.UNFIT if fails else ErrorKind.MARKED
        self._incidents.judge(incident, known(kind, told[0]), now)
        what = "isolate the node" if found.unfit else "isolate the slot" if found.slots else ""
        because = "`everstep check` on the node shows all of it"
        self._incidents.treat(incident, what or "none: an operator can help", because, now)
        outcome = "it gets no workers" if fails else "it gets workers"
        return self._incidents.close(incident, outcome, now)

    def ask_check(self, node: Node, because: str, now: Moment) -> Actions:
        return self._orders.send(node.name, msg.CheckNode(because=because), because, now)

    def _back(self, node: Node, because: str, now: Moment) -> Actions:
        node.check_asked_at = None
        self._later.slots_changed(f"node {node.name} may get workers")
        return self._set_admin(node, NodeAdmin.UP, because, now)

    def _isolation_over(self, node: Node, now: Moment) -> Actions:
        """It is checked first; if it does not answer, time is all there is to go by."""
        if node.check_asked_at is None and node.liveness is NodeLiveness.HEARD:
            node.check_asked_at = now.at
            return self.ask_check(node, "its time of isolation is over", now)
        if node.check_asked_at is not None and now.at < node.check_asked_at + CHECK_WAIT_S:
            return []
        return self._back(node, "its time of isolation is over", now)

    # -------------------------------------------------------------- records that disagree

    def _strange_tasks(self, event: msg.NodeJoined) -> list[str]:
        """The tasks that a node runs and that this coordinator does not know."""
        return [
            name for name in dict.fromkeys(run[0] for run in event.runs) if name not in self._roster.tasks
        ]

    def _why_records_disagree(self, node: Node, event: msg.NodeJoined) -> str:
        """An agent ignores orders of a number that it has carried out already. So a journal that is new, or
        that was put back from a copy, must not go on counting where it is.
        """
        if event.journal and self._policy.journal and event.journal != self._policy.journal:
            return f"its agent followed journal {event.journal[:8]}, this is {self._policy.journal[:8]}"
        if event.done > node.sent:
            return f"its agent has carried out {event.done} orders; this journal has {node.sent} of them"
        return ""

    def _reconcile(
        self, node: Node, event: msg.NodeJoined, strange: list[str], because: str, now: Moment
    ) -> Actions:
        """Adopt its workers if they are exactly those of this journal, at the same epoch. Else the tasks that
        have workers there begin again from their newest state, with numbers that no process has used.
        """
        is_prefix = event.journal in ("", self._policy.journal)  # of a journal that was put back all is done
        may_lack = bool(node.pending) and not is_prefix
        node.sent, node.pending = max(node.sent, event.done), []
        node.opened, node.memory_open = set(), set()
        ours: dict[str, set[tuple[str, Worker, int]]] = {}
        for task, worker in self._roster.on_node(node.name):
            if incarnation := task.seats[worker].incarnation:
                ours.setdefault(task.name, set()).add((task.name, worker, incarnation))
        theirs = {name: {run for run in event.runs if run[0] == name} for name in ours}
        agreed = not may_lack and theirs == ours
        for task in (self._roster.tasks[name] for name in ours):
            is_same = task.state is TaskState.RUNNING and task.epoch == event.epochs.get(task.name)
            agreed = agreed and is_same
        incident = self._incidents.new(
            task=None, what=f"the records of node {node.name} and of this coordinator disagree", now=now
        )
        incident.stops_training, incident.node = False, node.name
        self._incidents.tell(incident, "coordinator", (because,), now)
        self._incidents.judge(incident, known(ErrorKind.OTHER, because), now)
        remedy = "adopt its workers" if agreed else "begin its tasks again from their newest state"
        self._incidents.treat(incident, remedy, "its agent would ignore orders that it takes for done", now)
        ended = f"; workers of {', '.join(strange)} end: such a task is not known here" if strange else ""
        if agreed:
            adopted = f"its {len(event.runs)} workers are adopted" if ours else "it has no worker of ours"
            return self._incidents.close(incident, adopted + ended, now)
        actions: Actions = []
        for name in ours:
            task = self._roster.tasks[name]
            before = task.epoch
            sentence = f"node {node.name} knows more of it than this coordinator: {because}"
            actions += self._tasks.end(
                task, Ending(state=TaskState.WAITING, because=sentence, gently=True), now
            )
            lived, epoch = task.progress.lived, event.epochs.get(name, 0)
            task.progress.lived = Lived(
                max(lived.epoch, epoch),
                lived.attempt + max(0, epoch - before) + 1,  # an epoch raises it by one at most
                max([lived.incarnation, *(run[2] for run in theirs[name])]),
            )
        actions += self._lost(node, NodeLiveness.GONE, because, now)
        outcome = f"its tasks begin again from their newest state: {', '.join(ours)}"
        return actions + self._incidents.close(incident, outcome + ended, now)

    def fell_silent(self, node: Node, event: msg.NodeFellSilent, now: Moment) -> Actions:
        if node.liveness is not NodeLiveness.HEARD:
            return []
        training = "; its workers may be training" if self._roster.on_node(node.name) else ""
        node.agent_gone = event.closed and node.alone_s > 0
        what = "its agent has ended" if node.agent_gone else f"not heard for {event.silent_s:.2f} s"
        because = f"{what}{training}"
        node.last_heard_at = now.at - event.silent_s
        actions = self._set_liveness(node, NodeLiveness.SILENT, because, now)
        return actions + self._doubts_over(node, now) + self._confirm_silence(now, [node])

    def _doubts_over(self, node: Node, now: Moment) -> Actions:
        """What was said of the progress of its workers may be over by now: nobody would have heard that."""
        actions: Actions = []
        for task, worker in self._roster.on_node(node.name):
            task.failures.overdue.drop(worker)
            if task.lives is not None:
                incarnation, life = task.seats[worker].incarnation, task.lives.epoch
                moved = msg.RanksMoved(task=task.name, worker=worker, incarnation=incarnation, life=life)
                actions += self._training.inform(task, moved, now)
        return actions

    def witnessed(self, task: Task, worker: Worker, now: Moment) -> Actions:
        """A worker waits: is it for one on a silent node? Only its own report is looked at. What others wait
        for was looked at when they said so, and is again when a silent node's time is up.
        """
        silence = Silence(self._roster, self._policy)
        accused = [n for n in self._silent() if silence.is_witness(task, worker, n, now.at)]
        return self._confirm_silence(now, accused)

    def _silent(self) -> list[Node]:
        return [n for n in self._roster.timed_nodes() if n.liveness is NodeLiveness.SILENT]

    def _confirm_silence(self, now: Moment, nodes: Iterable[Node]) -> Actions:
        """Give up those of these silent nodes that are not only behind a cut line."""
        actions: Actions = []
        silence = Silence(self._roster, self._policy)
        lost: list[_LostNode] = []
        for node in nodes:
            if because := silence.why_given_up(node, now.at):
                actions += self._empty(node, NodeLiveness.GONE, because, lost, now)
                silence.given_up(node.name)
        return actions + self._tell_tasks(lost, now)

    def left(self, node: Node, now: Moment) -> Actions:
        return self._lost(node, NodeLiveness.LEFT, "its agent ended in good order", now)

    def drain(self, node: Node, now: Moment, *, force: bool, because: str = "", by: str = "") -> Actions:
        """Its workers go: those of a task that would lose steps by that, once its state is safe. `by`: a
        person, whose word lasts until the node is readmitted.
        """
        was, because = node.admin, f"drained by {by}" if by else because
        actions: Actions = []
        if was is not NodeAdmin.DRAINING:
            actions += self._set_admin(node, NodeAdmin.DRAINING, because, now)
        node.drained_by = by or node.drained_by
        if was is NodeAdmin.DRAINING and not force:
            return []
        why = "" if by else f": {because}"
        self._later.slots_changed(f"node {node.name} is drained{why}")
        costs = [] if force else costs_of_drain(self._roster, node.name)
        saving = {cost.task for cost in costs if cost.is_savable}
        for name in sorted(saving):
            task, why = self._roster.tasks[name], f"node {node.name} is drained"
            actions += self._tasks.leave_safely(task, why, now, node=node.name)
        return actions + self._evacuate(node, because, now, but=saving)

    def isolate(self, node: Node, because: str, now: Moment) -> Actions:
        lemon = self.noted(node, gray.ISOLATION, now)
        if node.admin is NodeAdmin.DRAINING:  # it is on its way out, and stays out
            return []
        return self._isolate(node, because, lemon, now)

    def noted(self, node: Node, kind: str, now: Moment) -> gray.Lemon | None:
        """One more of what healthy nodes do now and then. Does this one do it too often?"""
        at = self._gray_time(now)
        if not node.gray.note(kind, at):
            return None
        peers = [other.gray for other in self._roster.nodes.values() if other is not node]
        return gray.judge_gray(kind, node.gray, gray.Peers.of(peers, kind, at), at)

    def _gray_time(self, now: Moment) -> float:
        return now.at * (gray.HOUR_S / self._policy.limits.gray_hour_s)

    def _isolate(self, node: Node, because: str, lemon: gray.Lemon | None, now: Moment) -> Actions:
        state = NodeAdmin.LEMON if lemon is not None else NodeAdmin.ISOLATED
        reason = because if lemon is None else f"{lemon.because}; {because}"
        actions = self._set_admin(node, state, reason, now) + self._evacuate(
            node, f"isolated: {because}", now
        )
        copies = ev.CopiesLost(
            because=f"node {node.name}, which was to keep copies of its state, is isolated"
        )
        here = {task.name for task, _ in self._roster.on_node(node.name)}
        for name in sorted(node.memory_open - here):  # where it has workers, their going is a change anyway
            task = self._roster.tasks.get(name)
            if task is not None and task.managed is not None:
                actions += self._training.inform(task, copies, now)
        self._later.slots_changed(f"node {node.name} is isolated")
        return actions

    def keep_out(self, node: Node, lemon: gray.Lemon, now: Moment) -> Actions:
        """A lemon gets no workers until an operator readmits it."""
        if node.admin is not NodeAdmin.UP:
            return []
        return self._isolate(node, "it fails more often than its peers", lemon, now)

    def isolate_slots(
        self,
        node: Node,
        slots: tuple[int, ...],
        because: str,
        now: Moment,
        *,
        counts: bool = True,
        evicts: bool = True,
    ) -> Actions:
        """These slots get no workers for a time, and those that they have move, now or, if it does not evict
        them, with their task; the others keep working. If it `counts`, one that is isolated again and again
        waits for an operator.
        """
        patience = self._policy.patience
        for slot in slots:
            if counts:
                times = remedies.recent(node.slot_isolations.get(slot, []), now.at, patience)
                node.slot_isolations[slot] = [*times, now.at]
            node.isolated_slots[slot] = now.at
        self._roster.node_changed(node)
        self._later.slots_changed(f"slot {', '.join(map(str, slots))} of node {node.name} is isolated")
        actions: Actions = []
        for task, worker in self._roster.on_node(node.name):
            if evicts and not set(slots).isdisjoint(task.seats[worker].slots):
                actions += self._staffing.ask_to_go(task, worker, f"its slot is isolated: {because}", now)
        return actions

    def leave_link(self, node: Node, task: Task, because: str, now: Moment) -> Actions:
        """Its link is slow for this task. Where no other task is there, the node is checked before it gets
        workers again; else the others keep their slots.
        """
        if self._roster.tasks_on_node(node.name) == [task]:
            return self.isolate(node, because, now)
        there = [w for t, w in self._roster.on_node(node.name) if t is task]
        return self.isolate_slots(node, self.slots_without_others(node, task, there), because, now)

    def slots_without_others(self, node: Node, task: Task, workers: Collection[Worker]) -> tuple[int, ...]:
        """The usable slots of a node, but for those that other workers than these of a task have."""
        taken = {
            slot
            for other, worker in self._roster.on_node(node.name)
            if other is not task or worker not in workers
            for slot in other.seats[worker].slots
        }
        return tuple(sorted(set(range(node.slots)) - taken - node.unusable))

    def _slots_back(self, node: Node, now: Moment) -> Actions:
        """Those whose time is over, once the node has passed its checks. One that was isolated again and
        again waits for an operator.
        """
        if not self._slots_over(node, now):
            return []
        if node.slots_asked_at is not None:
            if now.at >= node.slots_asked_at + CHECK_WAIT_S:  # time is all there is to go by
                self._free_slots(node, now)
            return []
        if node.liveness is not NodeLiveness.HEARD:
            self._free_slots(node, now)
            return []
        node.slots_asked_at = now.at
        return self.ask_check(node, "the isolation of its slots is over", now)

    def _slots_over(self, node: Node, now: Moment) -> list[int]:
        patience = self._policy.patience
        return [slot for slot in node.isolated_slots if self._slot_due(node, slot, patience) <= now.at]

    def _free_slots(self, node: Node, now: Moment) -> None:
        node.slots_asked_at = None
        if over := self._slots_over(node, now):
            for slot in over:
                del node.isolated_slots[slot]
            self._roster.node_changed(node)
            self._later.slots_changed(f"slots of node {node.name} are back from isolation")

    def _slot_due(self, node: Node, slot: int, patience: msg.Patience) -> float:
        is_lemon = len(node.slot_isolations.get(slot, ())) >= patience.isolations_before_lemon
        return inf if is_lemon else node.isolated_slots[slot] + patience.isolation_s

    def announced(
        self, node: Node, leaves_in_s: float, by: str, now: Moment, *, at_once: bool = False
    ) -> Actions:
        """A spot notice. Where its workers find slots elsewhere, they go at once and training continues
        meanwhile; where not, they train on and go shortly before the node does, with their state safe.
        `at_once`: no workers may stay longer than that takes.
        """
        may_leave = node.state in (NodeState.UP, NodeState.CHECKING)
        if not may_leave or (node.leaves_at is not None and not at_once):
            return []
        early_s = min(LEAVE_EARLY_S, leaves_in_s / 2)
        node.leaves_at, node.drain_at = now.at + leaves_in_s, now.at + leaves_in_s - early_s
        because = f"it leaves in {leaves_in_s:.0f} s, says {by}"
        node.admin_because, node.admin_since = because, now.at
        self._roster.node_changed(node)
        self._later.slots_changed(f"node {node.name}: {because}")
        actions = self._changed(node, because, now)
        if at_once:
            node.drain_at = None
            return actions + self.drain(node, now, force=False, because=because)
        used = sum(len(task.seats[worker].slots) for task, worker in self._roster.on_node(node.name))
        stays = {other.name for other in self._roster.nodes.values() if other.leaves_at is None}
        free = sum(name in stays for name, _ in self._roster.free())
        return actions + (self._leave(node, now) if used <= free else [])

    def _leave(self, node: Node, now: Moment) -> Actions:
        """Not where nothing can be made safe: then training to the end is the best."""
        node.drain_at = None
        self._roster.node_changed(node)
        if not all(cost.is_savable for cost in costs_of_drain(self._roster, node.name)):
            return []
        left_s = max(0.0, (node.leaves_at or now.at) - now.at)
        return self.drain(node, now, force=False, because=f"it leaves in {left_s:.0f} s: spot notice")

    def readmit(self, node: Node, by: str, now: Moment) -> Actions:
        if node.leaves_at is not None:  # the notice is withdrawn
            node.leaves_at = node.drain_at = None
            self._roster.node_changed(node)
            self._later.slots_changed(f"node {node.name} stays")
        if node.isolated_slots:
            node.isolated_slots.clear()
            node.slot_isolations.clear()
            node.slots_asked_at = None
            self._roster.node_changed(node)
            self._later.slots_changed(f"slots of node {node.name} were readmitted")
        if node.admin is NodeAdmin.UP:
            return []
        node.gray = gray.GrayRecord(since=self._gray_time(now))
        node.check_asked_at = None
        self._later.slots_changed(f"node {node.name} was readmitted")
        actions = self._set_admin(node, NodeAdmin.UP, f"readmitted by {by}", now)
        for task in self._roster.tasks_on_node(node.name):
            actions += self._tasks.need_not_leave(task, node.name, "was readmitted", now)
        return actions

    def time_passed(self, now: Moment) -> Actions:
        actions: Actions = []
        for node in self._roster.timed_nodes():
            if node.drain_at is not None and node.drain_at <= now.at:
                actions += self._leave(node, now)
            actions += self._slots_back(node, now)
            over = now.at - node.admin_since >= self._policy.patience.isolation_s
            if node.admin is NodeAdmin.ISOLATED and over:
                actions += self._isolation_over(node, now)
        return actions + self._network_settled(now) + self._confirm_silence(now, self._silent())

    def timers(self) -> dict[str, list[float]]:
        """When something is to be decided about a node, if nothing happens before."""
        patience, nodes = self._policy.patience, self._roster.timed_nodes()
        silence = Silence(self._roster, self._policy)
        silent = (silence.given_up_at(n) for n in nodes if n.liveness is NodeLiveness.SILENT)
        slots = (
            max(self._slot_due(node, slot, patience), (node.slots_asked_at or -inf) + CHECK_WAIT_S)
            for node in nodes
            for slot in node.isolated_slots
        )
        return {
            "silent node": [at for at in silent if at is not None],
            "isolated node": [
                n.admin_since + patience.isolation_s
                for n in nodes
                if n.admin is NodeAdmin.ISOLATED and n.check_asked_at is None
            ],
            "node that is checked": [
                n.check_asked_at + CHECK_WAIT_S
                for n in nodes
                if n.admin is NodeAdmin.ISOLATED and n.check_asked_at is not None
            ],
            "network check": [node.pairs_at for node in nodes if node.pairs_at is not None],
            "isolated slot": [at for at in slots if at < inf],
            "leaving node": [node.drain_at for node in nodes if node.drain_at is not None],
        }

    def _set_admin(self, node: Node, admin: NodeAdmin, because: str, now: Moment) -> Actions:
        node.set_admin(admin, because, now.at)
        return self._moved(node, because, now)

    def _set_liveness(self, node: Node, liveness: NodeLiveness, because: str, now: Moment) -> Actions:
        node.set_liveness(liveness, because, now.at)
        return self._moved(node, because, now)

    def _moved(self, node: Node, because: str, now: Moment) -> Actions:
        self._roster.node_changed(node)
        return self._changed(node, because, now)

    def _changed(self, node: Node, because: str, now: Moment) -> Actions:
        return [msg.NodeChanged(node=node.name, state=node.state, because=because, cause=now.event)]

    def _lost(self, node: Node, liveness: NodeLiveness, because: str, now: Moment) -> Actions:
        """A node is gone, and with it every worker on it and every copy in its memory."""
        lost: list[_LostNode] = []
        return self._empty(node, liveness, because, lost, now) + self._tell_tasks(lost, now)

    def _empty(
        self, node: Node, liveness: NodeLiveness, because: str, lost: list[_LostNode], now: Moment
    ) -> Actions:
        """Take its seats and its copies away; the tasks are told by `_tell_tasks`."""
        if not node.reachable:
            return []
        actions = self._set_liveness(node, liveness, because, now)
        node.pending.clear()
        self._tasks.answers_lost(node.name, now)
        losers = self._copies.node_gone(node.name)
        for task in losers:
            actions += self._training.count_copies(task, now)
        seats: dict[str, list[tuple[Worker, Seat]]] = {}
        for task, worker in self._roster.on_node(node.name):
            task.failures.overdue.drop(worker)
            seats.setdefault(task.name, []).append((worker, self._roster.unseat(task, worker)))
        lost.append(_LostNode(node, because, seats, losers))
        return actions

    def _tell_tasks(self, lost: list[_LostNode], now: Moment) -> Actions:
        """All workers of a task that are gone at once are one change of its membership: its other workers,
        which may be thousands, are interrupted once.
        """
        actions: Actions = []
        for name in dict.fromkeys(name for one in lost for name in one.seats):
            task = self._roster.tasks[name]
            self._tasks.give_up_search(task)
            actions += self._staffing.grant(task, now)
            gone: list[tuple[Worker, Seat, str]] = []
            for one in lost:
                seats = one.seats.get(name, ())
                if one.node.liveness is NodeLiveness.GONE and task.state is TaskState.RUNNING:
                    self._blame(task, one.node, [worker for worker, seat in seats if seat.incarnation], now)
                reason = f"node {one.node.name} is gone: {one.because}"
                gone += [(worker, seat, reason) for worker, seat in seats]
            actions += self._staffing.gone(task, gone, now)
            for one in lost:
                actions += self._tasks.need_not_leave(task, one.node.name, "is gone", now)
        for one in lost:
            because = f"node {one.node.name}, which kept copies of its state in memory, is gone"
            for task in one.losers:
                actions += self._training.inform(task, ev.CopiesLost(because=because), now)
            self._later.slots_changed(f"node {one.node.name} is gone")
        return actions

    def _blame(self, task: Task, node: Node, workers: list[Worker], now: Moment) -> None:
        """One incident for all the workers that went with it."""
        if not workers:
            return
        text = f"node {node.name} is gone: {node.because}"
        incident = self._incidents.suspect(task, workers[0], "silence", text, now)
        incident.node = node.name
        incident.workers += [worker for worker in workers if worker not in incident.workers]
        judgement = known(ErrorKind.LOST_CONNECTION, node.because)
        self._incidents.judge(incident, judgement, now)
        choice = remedies.choose(remedies.Situation(judgement=judgement), self._policy.patience)
        self._incidents.treat(incident, choice.what, choice.because, now)

    def _evacuate(self, node: Node, because: str, now: Moment, but: Collection[str] = frozenset()) -> Actions:
        """Ask a node's workers to go; their places are filled elsewhere. `but`: not those of these tasks."""
        actions: Actions = []
        for task, worker in self._roster.on_node(node.name):
            if task.name in but:
                continue
            actions += self._staffing.ask_to_go(task, worker, f"node {node.name}: {because}", now)
        return actions


@dataclass(frozen=True, slots=True)
class _LostNode:
    """A node that is gone, and what went with it."""

    node: Node
    because: str
    seats: Mapping[str, Sequence[tuple[Worker, Seat]]]  # by task
    losers: Sequence[Task]  # of copies in its memory
