"""What the coordinator decides: orders to nodes, questions to scheduler and planner, what is recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep.protocol.actions import ComputePlan, RecordStep
from everstep.protocol.node_orders import Order
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    node: str
    number: int
    order: Order
    because: str
    cause: int = 0  # the number of the event it follows from


@dataclass(frozen=True, slots=True, kw_only=True)
class Think:
    """Have the scheduler answer; its answer comes back as `PlanAnswered`."""

    task: str
    question: ComputePlan
    because: str
    slow: Mapping[Worker, float] = field(default_factory=dict)  # workers that take so many times as long
    cause: int = 0  # the number of the event it follows from


@dataclass(frozen=True, slots=True, kw_only=True)
class ChooseAssignment:
    """Have the planner say how many workers each task gets; its answer comes back as `AssignmentChosen`."""

    version: int
    because: str
    cause: int = 0  # the number of the event it follows from


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRow:
    task: str
    record: RecordStep
    because: str
    cause: int = 0  # the number of the event it follows from


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentClosed:
    number: int
    because: str
    cause: int = 0  # the number of the event it follows from


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnded:
    task: str
    state: str  # finished, failed, cancelled
    because: str
    cause: int = 0  # the number of the event it follows from


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReshaped:
    """The task's workers of its old shape are gone; it begins anew in this one, where it was."""

    task: str
    shape: Shape
    because: str
    cause: int = 0  # the number of the event it follows from


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChanged:
    node: str
    state: str
    because: str
    cause: int = 0  # the number of the event it follows from


ClusterAction = (
    Dispatch | Think | ChooseAssignment | RecordRow | IncidentClosed | TaskEnded | TaskReshaped | NodeChanged
)
