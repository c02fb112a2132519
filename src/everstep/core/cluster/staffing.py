"""Which workers a task has: places are granted and taken away, workers are asked to go and are gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from heapq import heapify, heapreplace

from everstep.core.cluster.context import ClusterContext
from everstep.core.cluster.orders import Actions
from everstep.core.cluster.stages import costs_of, load_at, moved
from everstep.core.cluster.task import Seat, Task, TaskState
from everstep.core.cluster.training import Training
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.moment import Moment
from everstep.protocol.ops import Worker

CHANGES_STAGE = "it changes its stage"


class Staffing:
    """Takes workers from their seats; `Roster.seat_workers` fills them."""

    def __init__(self, context: ClusterContext, *, training: Training) -> None:
        self._roster, self._orders, self._later = context.roster, context.orders, context.later
        self._training = training

    def grant(self, task: Task, now: Moment, clean: frozenset[Worker] = frozenset()) -> Actions:
        """Its recovery learns which places have a slot. `clean`: their earlier failures are forgotten."""
        places = task.staying()
        return self._training.inform(task, ev.PlacesGranted(places=places, clean=clean & places), now)

    def shrink(self, task: Task, because: str, now: Moment) -> Actions:
        """Take away workers until the task has no more than it may; never the last of a stage."""
        staying = task.staying()
        too_many = len(staying) - task.wanted()
        if too_many <= 0:
            return []
        stages: dict[int, list[Worker]] = {}
        for worker in sorted(staying):
            stages.setdefault(worker.stage, []).append(worker)

        def ease(stage: int) -> tuple[float, int, int, int]:
            """The stage that is least busy without its last worker comes first."""
            peers = stages[stage]
            return load_at(task, stage, len(peers) - 1), -len(peers), -peers[-1].replica, stage

        easiest = [ease(stage) for stage in stages]
        heapify(easiest)
        going: list[Worker] = []
        while len(going) < too_many and len(peers := stages[easiest[0][3]]) > 1:
            going.append(peers.pop())
            heapreplace(easiest, ease(easiest[0][3]))
        actions: Actions = []
        for worker in going:
            actions += self.ask_to_go(task, worker, because, now)
        return actions

    def spread(self, task: Task, because: str, now: Moment) -> Actions:
        """Workers of the stages that can best do without leave, out of broken replicas first, until the
        busiest stage is as quick as it gets with so many; `Roster.seat_workers` gives their slots to it, and
        those who come copy the state of a live peer while the others train. Slots that are free now are given
        away before that.
        """
        staying, shape = task.staying(), task.shape
        if task.state is not TaskState.RUNNING or len({w.stage for w in staying}) < shape.stages:
            return []
        whole = Counter(worker.replica for worker in staying)
        stages = [
            sorted(
                (w for w in staying if w.stage == stage),
                key=lambda w: (whole[w.replica] < shape.stages, w.replica),
            )
            for stage in range(shape.stages)
        ]
        counts = [len(peers) for peers in stages]
        for _ in range(min(task.wanted() - len(staying), self._roster.num_free // shape.shards)):
            open_ones = [stage for stage in range(shape.stages) if counts[stage] < shape.replicas]
            counts[max(open_ones, key=lambda s: (load_at(task, s, counts[s]), -counts[s], -s))] += 1
        jobs = shape.replicas * shape.microbatches
        actions: Actions = []
        for stage, _ in moved(counts, shape.replicas, costs_of(task.stage_costs, shape.stages), jobs):
            if stages[stage]:
                actions += self.ask_to_go(task, stages[stage].pop(), because, now)
        return actions

    def ask_to_go(self, task: Task, worker: Worker, because: str, now: Moment) -> Actions:
        seat = task.seats[worker]
        if seat.leaving:
            return []
        seat.leaving = because
        actions = self.grant(task, now)
        if seat.incarnation == 0:  # no process yet
            self._roster.unseat(task, worker)
            held = task.starts.waiting.pop(worker, None)
            if held is not None:
                exited = ev.WorkerExited(
                    worker=worker, incarnation=held.incarnation, reason=because, planned=True
                )
                actions += self._training.inform(task, exited, now)
            return actions
        if task.is_script:  # its ranks may save, and there is one worker of it on the node for each place
            close = msg.CloseTask(task=task.name, gently=True)
            return actions + self._orders.send(seat.node, close, because, now)
        return actions + self.kill(task, worker, because, now)

    def kill(self, task: Task, worker: Worker, because: str, now: Moment) -> Actions:
        seat = task.seats[worker]
        order = msg.KillProcess(task=task.name, worker=worker, incarnation=seat.incarnation)
        return self._orders.send(seat.node, order, because, now)

    def gone(self, task: Task, workers: Iterable[tuple[Worker, Seat, str]], now: Moment) -> Actions:
        """Workers that will not come back where they were, with the reason: their node is gone, or they were
        asked to go.
        """
        runs = task.recovery is not None and task.state is TaskState.RUNNING
        exits: list[ev.WorkerExited] = []
        for worker, seat, reason in workers:
            task.starts.waiting.pop(worker, None)
            task.starts.forget(worker)
            task.failures.overdue.drop(worker)
            if task.recovery is None or not runs:
                continue
            incarnation = seat.incarnation or getattr(task.recovery.places[worker], "incarnation", 0)
            exits.append(
                ev.WorkerExited(
                    worker=worker, incarnation=incarnation, reason=reason, planned=bool(seat.leaving)
                )
            )
        if not runs:
            self._later.vacated.append(task)
            return []
        actions = self.grant(task, now)
        for gone in exits[-1:]:
            self._later.slots_changed(f"worker {gone.worker} of {task.name} is gone")
        exited = exits[0] if len(exits) == 1 else ev.WorkersExited(exits=tuple(exits))
        return actions + self._training.inform(task, exited, now)
