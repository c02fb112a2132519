"""A step as ops on workers: notation, generators, bounds, checker, pictures. Pure."""

from everstep.core.ops import Kind, Microbatch, Op, Worker
from everstep.schedule.instance import Done, Instance, uniform
from everstep.schedule.schedule import Planned, Schedule
from everstep.schedule.simple import plan

__all__ = ["Done", "Instance", "Kind", "Microbatch", "Op", "Planned", "Schedule", "Worker", "plan", "uniform"]
