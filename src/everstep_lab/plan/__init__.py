"""Which task gets which workers, and is it worth the move: WAF, throughput model. Pure."""

from everstep_lab.plan.answer import decide
from everstep_lab.plan.cluster import Assignment, Cluster, PlanNode, SlotPlace
from everstep_lab.plan.curve import Curve, from_table, replicated
from everstep_lab.plan.task import TaskSpec
from everstep_lab.plan.task_shape import ParallelShape
from everstep_lab.plan.transition import Costs

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
