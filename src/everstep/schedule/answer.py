"""Answers recovery's question: the rest of each broken step, and the step that repeats after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from everstep.core.actions import ComputePlan
from everstep.core.events import PlanComputed
from everstep.core.messages import Place
from everstep.schedule.instance import Done, Instance
from everstep.schedule.schedule import Planned, Schedule

Planner = Callable[[Instance, str], Planned]


def answer(question: ComputePlan, healthy: Instance, mode: str, plan: Planner) -> PlanComputed:
    """`healthy` is the task's instance with nobody dead and nothing done: its shape and op times."""
    steady = plan(replace(healthy, dead=question.dead), mode).schedule
    lists, hosts = {}, {}
    for step, broken in question.broken.items():
        done = {place: Done(host, kinds) for place, (host, kinds) in broken.done.items()}
        rest = plan(replace(healthy, dead=broken.dead, done=done), mode).schedule
        lists[step] = rest.ops
        hosts[step] = away_from_home(rest) | away_from_home_done(broken.done)
    return PlanComputed(
        epoch=question.epoch, lists=lists, steady=steady.ops, hosts=hosts, steady_hosts=away_from_home(steady)
    )


def away_from_home(schedule: Schedule) -> dict[Place, int]:
    """Only what differs from home travels to the workers."""
    return {place: host for place, host in schedule.hosts().items() if host != place[0].home}


def away_from_home_done(done: Mapping[Place, tuple[int, str]]) -> dict[Place, int]:
    return {place: host for place, (host, _) in done.items() if host != place[0].home}
