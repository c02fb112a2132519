"""Which workers a task has: places are granted and taken away, workers are asked to go and are gone."""

from __future__ import annotations

from everstep.core.cluster.followups import FollowUps
from everstep.core.cluster.orders import Actions, Orders
from everstep.core.cluster.roster import Roster
from everstep.core.cluster.task import Seat, Task, TaskState
from everstep.core.cluster.training import Training
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.moment import Moment
from everstep.protocol.ops import Worker


class Staffing:
    """Takes workers from their seats; `Roster.seat_workers` fills them."""

    def __init__(self, *, roster: Roster, orders: Orders, training: Training, later: FollowUps) -> None:
        self._roster, self._orders, self._training, self._later = roster, orders, training, later

    def grant(self, task: Task, now: Moment, clean: frozenset[Worker] = frozenset()) -> Actions:
        """Its recovery learns which places have a slot. `clean`: their earlier failures are forgotten."""
        places = task.staying()
        return self._training.inform(task, ev.PlacesGranted(places=places, clean=clean & places), now)

    def shrink(self, task: Task, because: str, now: Moment) -> Actions:
        """Take away workers until the task has no more than it may; never the last of a stage."""
        actions: Actions = []
        while True:
            staying = [w for w, seat in task.seats.items() if not seat.leaving]
            crowded = [w for w in staying if sum(x.stage == w.stage for x in staying) > 1]
            if len(staying) <= task.wanted() or not crowded:
                return actions
            worker = max(crowded, key=lambda w: (sum(x.stage == w.stage for x in staying), w.replica))
            actions += self.ask_to_go(task, worker, because, now)

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
        return actions + self.kill(task, worker, because, now)

    def kill(self, task: Task, worker: Worker, because: str, now: Moment) -> Actions:
        seat = task.seats[worker]
        order = msg.KillProcess(task=task.name, worker=worker, incarnation=seat.incarnation)
        return self._orders.send(seat.node, order, because, now)

    def gone(self, task: Task, worker: Worker, seat: Seat, reason: str, now: Moment) -> Actions:
        """A worker that will not come back where it was: its node is gone, or it was asked to go."""
        task.starts.waiting.pop(worker, None)
        task.failures.overdue.pop(worker, None)
        if task.recovery is None or task.state is not TaskState.RUNNING:
            self._later.vacated.append(task)
            return []
        actions = self.grant(task, now)
        place = task.recovery.places[worker]
        incarnation = seat.incarnation or getattr(place, "incarnation", 0)
        exited = ev.WorkerExited(
            worker=worker, incarnation=incarnation, reason=reason, planned=bool(seat.leaving)
        )
        self._later.slots_changed(f"worker {worker} of {task.name} is gone")
        return actions + self._training.inform(task, exited, now)
