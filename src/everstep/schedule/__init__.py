"""A step as ops on workers, and how near to the best possible it is. Pure."""

from everstep.protocol.ops import Kind, Microbatch, Op, Worker
from everstep.schedule.instance import Done, Instance, per_stage, same_cap, uniform
from everstep.schedule.modes import MODES
from everstep.schedule.planner import plan
from everstep.schedule.schedule import Planned, Schedule

__all__ = [
    "MODES",
    "Done",
    "Instance",
    "Kind",
    "Microbatch",
    "Op",
    "Planned",
    "Schedule",
    "Worker",
    "per_stage",
    "plan",
    "same_cap",
    "uniform",
]
