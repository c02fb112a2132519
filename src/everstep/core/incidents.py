"""The incidents of a task: opened by evidence, planned, and closed by the first op that runs again."""

from __future__ import annotations

from everstep.core.actions import Incident
from everstep.core.ops import Worker


class IncidentLog:
    def __init__(self) -> None:
        self.incidents: list[Incident] = []

    def open(self, worker: Worker, what: str, step: int, now: float, lost_ops: int) -> None:
        """A second disturbance before the first has been planned for belongs to the same incident."""
        waiting = [incident for incident in self._unresumed() if incident.planned_at is None]
        if waiting:
            waiting[-1].workers.append(worker)
            waiting[-1].replayed_ops += lost_ops
        else:
            self.incidents.append(
                Incident(
                    number=len(self.incidents) + 1,
                    workers=[worker],
                    what=what,
                    step=step,
                    evidence_at=now,
                    replayed_ops=lost_ops,
                )
            )

    def planned(self, now: float, epoch: int) -> None:
        for incident in self._unresumed():
            incident.planned_at = incident.planned_at or now
            incident.epoch = epoch

    def restoring(self, checkpoint: int) -> None:
        for incident in self._unresumed():
            incident.restored_from = checkpoint

    def recorded(self, step: int, replayed_elsewhere: int) -> None:
        for incident in self.incidents:
            if incident.step == step:
                incident.replayed_elsewhere += replayed_elsewhere

    def resumed(self, at: float) -> list[Incident]:
        """The incidents that are over now."""
        closed = [incident for incident in self._unresumed() if incident.planned_at is not None]
        for incident in closed:
            incident.resumed_at = at
        return closed

    def _unresumed(self) -> list[Incident]:
        return [incident for incident in self.incidents if incident.resumed_at is None]
