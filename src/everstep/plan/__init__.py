"""Which task gets which workers, and is it worth the move: WAF, throughput model. Pure."""

from everstep.plan.answer import decide
from everstep.plan.cluster import Assignment, Cluster, PlanNode, SlotPlace
from everstep.plan.curve import Curve, from_table, replicated
from everstep.plan.task import TaskSpec
from everstep.plan.task_shape import ParallelShape
from everstep.plan.transition import Costs

__all__ = [
    "Assignment",
    "Cluster",
    "Costs",
    "Curve",
    "ParallelShape",
    "PlanNode",
    "SlotPlace",
    "TaskSpec",
    "decide",
    "from_table",
    "replicated",
]
