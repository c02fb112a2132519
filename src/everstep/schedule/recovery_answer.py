"""Answers recovery's question: the rest of each broken step, and the step that repeats after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from everstep.protocol.actions import ComputePlan
from everstep.protocol.events import PlanComputed
from everstep.protocol.ops import OpLists
from everstep.protocol.work import Place
from everstep.schedule.cache import PlanCache
from everstep.schedule.instance import Done
from everstep.schedule.planner import plan
from everstep.schedule.schedule import Schedule


def answer(question: ComputePlan, plans: PlanCache, mode: str) -> PlanComputed:
    """The step that repeats comes from the cache, mostly thought of before; the rest of a step is its own."""
    steady = plans.get(question.dead, mode).schedule
    lists, hosts = {}, {}
    for step, broken in question.broken.items():
        done = {place: Done(host, kinds) for place, (host, kinds) in broken.done.items()}
        rest = plan(replace(plans.healthy, dead=broken.dead, done=done), mode).schedule
        lists[step] = OpLists.of(rest.ops)
        hosts[step] = away_from_home(rest) | away_from_home_done(broken.done)
    return PlanComputed(
        epoch=question.epoch,
        lists=lists,
        steady=OpLists.of(steady.ops),
        hosts=hosts,
        steady_hosts=away_from_home(steady),
    )


def away_from_home(schedule: Schedule) -> dict[Place, int]:
    """Only what differs from home travels to the workers."""
    return {place: host for place, host in schedule.hosts().items() if host != place[0].home}


def away_from_home_done(done: Mapping[Place, tuple[int, str]]) -> dict[Place, int]:
    return {place: host for place, (host, _) in done.items() if host != place[0].home}
