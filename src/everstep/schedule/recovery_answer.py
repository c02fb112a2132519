"""Answers recovery's question: the rest of each broken step, and the step that repeats after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from everstep.protocol.actions import BrokenStep, ComputePlan
from everstep.protocol.events import PlanComputed
from everstep.protocol.ops import Kind, Op, OpLists, Worker
from everstep.protocol.shape import Shape
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


def plain_answer(question: ComputePlan, shape: Shape) -> PlanComputed:
    """Without a planner, for when it fails: slow and certain. Every worker runs its microbatches one after
    another, all in the same order, so the first that is not done can always go on; and no worker keeps the
    activations of two.
    """
    lists, hosts = {}, {}
    for step, broken in question.broken.items():
        lists[step], hosts[step] = _plain(shape, broken)
    steady, steady_hosts = _plain(shape, BrokenStep(question.dead, {}))
    return PlanComputed(
        epoch=question.epoch, lists=lists, steady=steady, hosts=hosts, steady_hosts=steady_hosts
    )


def _plain(shape: Shape, broken: BrokenStep) -> tuple[OpLists, dict[Place, int]]:
    live = [w for w in shape.workers() if w not in broken.dead]
    here = [[w.replica for w in live if w.stage == stage] for stage in range(shape.stages)]
    ops: dict[Worker, list[Op]] = {worker: [] for worker in live}
    away: dict[Place, int] = {}
    order = sorted(shape.all_microbatches(), key=lambda m: (m.number, m.home))
    for turn, microbatch in enumerate(order):
        backward: list[tuple[Worker, list[Op]]] = []
        for stage, replicas in enumerate(here):
            home = microbatch.home if microbatch.home in replicas else replicas[turn % len(replicas)]
            host, kinds = broken.done.get((microbatch, stage), (home, ""))
            if host != microbatch.home:
                away[microbatch, stage] = host
            owed = [Op(kind, microbatch, stage) for kind in (Kind.F, Kind.I, Kind.W) if kind not in kinds]
            if owed:
                worker, first = Worker(host, stage), int(owed[0].kind is Kind.F)
                ops[worker] += owed[:first]
                backward.append((worker, owed[first:]))
        for worker, owed in reversed(backward):
            ops[worker] += owed
    for worker, mine in ops.items():
        mine += [Op(Kind.R, None, worker.stage), Op(Kind.U, None, worker.stage)]
    return OpLists.of(ops), away


def away_from_home(schedule: Schedule) -> dict[Place, int]:
    """Only what differs from home travels to the workers."""
    return {place: host for place, host in schedule.hosts().items() if host != place[0].home}


def away_from_home_done(done: Mapping[Place, tuple[int, str]]) -> dict[Place, int]:
    return {place: host for place, (host, _) in done.items() if host != place[0].home}
