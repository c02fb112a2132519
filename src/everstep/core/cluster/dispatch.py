"""What every desk of the coordinator shares: who is there, what was ordered, what is known of each incident.

Orders to a node are numbered, and kept until the node says it has carried them out.
"""

from __future__ import annotations

from everstep.core.cluster.node_states import NodeLiveness
from everstep.core.cluster.roster import Node, Roster, Task
from everstep.core.faults import detector
from everstep.core.faults.severity import Judgement
from everstep.core.words import cluster_messages as msg
from everstep.core.words.cluster_messages import ClusterAction, Order, Patience
from everstep.core.words.incidents import Evidence, Incident, IncidentLog, Remedy, Verdict
from everstep.core.words.ops import Worker

Actions = list[ClusterAction]


class Orders:
    def __init__(
        self,
        *,
        patience: Patience | None = None,
        limits: detector.DetectorLimits | None = None,
        planned: bool = False,
    ) -> None:
        """`planned`: ask a planner how many workers each task gets; else first come, first served."""
        self.patience = patience or Patience()
        self.limits = limits or detector.DetectorLimits()
        self.planned = planned
        self.roster = Roster()
        self.log = IncidentLog()
        self.version = 0  # of the question to the planner
        self.asked = False  # and it is not answered yet
        self.events = 0

    @property
    def nodes(self) -> dict[str, Node]:
        return self.roster.nodes

    @property
    def tasks(self) -> dict[str, Task]:
        return self.roster.tasks

    def acknowledged(self, node: str, number: int) -> None:
        """A node has carried out its orders up to this one. Changes no decision, only what is kept."""
        if node in self.nodes:
            self.nodes[node].pending = [order for order in self.nodes[node].pending if order[0] > number]

    def _order(self, node: Node, order: Order, because: str) -> Actions:
        if not node.reachable:
            return []
        node.sent += 1
        node.pending.append((node.sent, order, because))
        return [msg.Dispatch(node=node.name, number=node.sent, order=order, because=because)]

    def _is_heard(self, name: str) -> bool:
        return self.nodes[name].liveness is NodeLiveness.HEARD

    def _evidence(self, task: Task, worker: Worker, source: str, text: str, now: float) -> Incident:
        step = task.recovery.recorded + 1 if task.recovery is not None else 0
        incident = self.log.of_task(task.name).suspected(worker, text, step, now)
        incident.told(Evidence(at=now, source=source, text=text))
        return incident

    def _verdict(self, incident: Incident, judgement: Judgement, now: float) -> None:
        incident.verdict = Verdict(
            at=now, kind=judgement.kind, severity=int(judgement.severity), because=judgement.because
        )

    def _remedy(self, incident: Incident, what: str, because: str, now: float) -> None:
        incident.tried(Remedy(at=now, what=str(what), because=because))
