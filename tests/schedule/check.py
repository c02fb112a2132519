"""Is a schedule valid? A second opinion that shares no code with the generators.

It reads only what an engine would read: the ops of each worker, in order, and (for the clock) their start
times. `violations` returns sentences, none for a valid schedule:

    complete     every op that is owed, exactly once, on a live worker that may run it, all kinds on one host
    closed       each worker ends with its stage's R and U
    runs dry     walking the lists with unlimited time, no worker waits without end
    on time      with the given starts: inputs have arrived, one op at a time, R after all of the stage's ops
    fits         the stash never exceeds its limit (what was held before we began excepted)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from everstep.protocol.ops import Kind, Microbatch, Op, Worker
from everstep.schedule.instance import Instance
from everstep.schedule.schedule import Planned, Schedule

Place = tuple[Microbatch, int]
SLACK = 1e-6


def violations(instance: Instance, planned: Planned) -> list[str]:
    """Everything wrong with a plan; an empty list proves it valid."""
    found = [*_incomplete(instance, planned.schedule), *deadlocks(instance, planned.schedule)]
    if found:
        return found  # the clock of a broken order means nothing
    return [
        *_too_early(instance, planned),
        *_too_full(instance, planned.schedule),
        *_wrong_totals(instance, planned),
    ]


def deadlocks(instance: Instance, schedule: Schedule) -> list[str]:
    """Dry run: walk all lists until no worker can move."""
    finished = _done_before(instance)
    at = dict.fromkeys(schedule.ops, 0)
    moved = True
    while moved:
        moved = False
        for worker, ops in schedule.ops.items():
            while at[worker] < len(ops):
                op = ops[at[worker]]
                if not all(need in finished for need in _needs(instance, op)):
                    break
                finished.add((op.kind, op.microbatch, op.stage))
                at[worker] += 1
                moved = True
    return [
        f"worker {w} waits forever before {schedule.ops[w][i]}."
        for w, i in at.items()
        if i < len(schedule.ops[w])
    ]


def _incomplete(instance: Instance, schedule: Schedule) -> Iterator[str]:
    if set(schedule.ops) != set(instance.workers()):
        yield "the schedule is not over exactly the live workers."
    seen: Counter[tuple[str, Microbatch, int]] = Counter()
    host: dict[Place, int] = {place: done.host for place, done in instance.done.items()}
    for worker, ops in schedule.ops.items():
        if [op.kind for op in ops[-2:]] != [Kind.R, Kind.U]:
            yield f"worker {worker} does not end with R and U."
        for op in ops:
            if worker.stage != op.stage:
                yield f"worker {worker} runs {op}, an op of another stage."
            if op.microbatch is None:
                continue
            seen[str(op.kind), op.microbatch, op.stage] += 1
            if host.setdefault((op.microbatch, op.stage), worker.replica) != worker.replica:
                yield f"{op} runs on {worker}, but its stash is on replica {host[op.microbatch, op.stage]}."
    for microbatch in instance.homes():
        for stage in range(instance.stages):
            done = instance.kinds_done(microbatch, stage)
            for letter in "FIW":
                count = seen.pop((letter, microbatch, stage), 0)
                if count != (letter not in done):
                    yield f"{stage}{letter}{microbatch} runs {count} times, owed {int(letter not in done)}."
    if seen:
        yield f"ops that do not exist: {sorted(map(str, seen))[:3]}."


def _needs(instance: Instance, op: Op) -> Iterator[tuple[str, Microbatch, int]]:
    """What must have finished, by letter, before an op may start."""
    if op.microbatch is None:
        return
    if op.kind is Kind.F and op.stage > 0:
        yield "F", op.microbatch, op.stage - 1
    if op.kind is Kind.I:
        yield "F", op.microbatch, op.stage
        if op.stage + 1 < instance.stages:
            yield "I", op.microbatch, op.stage + 1
    if op.kind is Kind.W:
        yield "I", op.microbatch, op.stage


def _done_before(instance: Instance) -> set[tuple[str, Microbatch | None, int]]:
    return {
        (letter, microbatch, stage)
        for (microbatch, stage), done in instance.done.items()
        for letter in done.kinds
    }


def _too_early(instance: Instance, planned: Planned) -> Iterator[str]:
    ends: dict[tuple[str, Microbatch, int], float] = {}
    hosts = planned.schedule.hosts()
    for timed in planned.timeline(instance.time):
        if timed.op.microbatch is not None:
            ends[str(timed.op.kind), timed.op.microbatch, timed.op.stage] = timed.end
    stage_end = [0.0] * instance.stages
    closing = []
    for worker, ops in planned.schedule.ops.items():
        free = float("-inf")
        for op, start in zip(ops, planned.starts[worker], strict=True):
            if start < free - SLACK:
                yield f"worker {worker} starts {op} at {start:g}, before it is free at {free:g}."
            for need in _needs(instance, op):
                if need in ends:
                    made_by = Worker(hosts[need[1], need[2]], need[2])
                    arrives = ends[need] + (instance.hop if made_by != worker else 0.0)
                    if start < arrives - SLACK:
                        yield f"{op} starts at {start:g}; its input comes at {arrives:g}."
            free = start + instance.time(op.kind, Worker(worker.replica, op.stage))
            if op.microbatch is None:
                closing.append((op, start))
            else:
                stage_end[worker.stage] = max(stage_end[worker.stage], free)
                assert (op.microbatch, op.stage) in hosts
    for op, start in closing:
        if start < stage_end[op.stage] - SLACK:
            yield f"{op} starts at {start:g}, before its stage has finished at {stage_end[op.stage]:g}."


def _too_full(instance: Instance, schedule: Schedule) -> Iterator[str]:
    for worker, ops in schedule.ops.items():
        waiting: Counter[int] = Counter()  # by stage: between F and I
        ready: Counter[int] = Counter()  # between I and W
        for (_, stage), before in instance.done.items():
            if stage == worker.stage and before.host == worker.replica:
                waiting[stage] += before.kinds == "F"
                ready[stage] += before.kinds == "FI"
        for op in ops:
            done = instance.kinds_done(op.microbatch, op.stage) if op.microbatch is not None else ""
            match op.kind:
                case Kind.F:
                    waiting[op.stage] += 1
                    yield from _over_limit(instance, worker, op, waiting.total() + ready.total())
                    waiting[op.stage] -= "I" in done  # run again for its output alone
                case Kind.I:
                    waiting[op.stage] -= 1
                    ready[op.stage] += "W" not in done
                case Kind.W:
                    ready[op.stage] -= 1


def _over_limit(instance: Instance, worker: Worker, op: Op, count: int) -> Iterator[str]:
    if instance.stash_cap is not None and count > instance.stash_cap.get(worker, count):
        yield f"worker {worker} holds {count} microbatches at {op}; it may hold {instance.stash_cap[worker]}."


def _wrong_totals(instance: Instance, planned: Planned) -> Iterator[str]:
    """The figures a plan states must be those of its own clock."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for timed in planned.timeline(instance.time):
        stage = timed.worker.stage
        first[stage] = min(first.get(stage, timed.start), timed.start)
        last[stage] = max(last.get(stage, timed.end), timed.end)
    makespan = max(last.values()) - min(first.values())
    period = max(last[s] - first[s] for s in first)
    scale = SLACK * max(1.0, makespan)
    if abs(makespan - planned.makespan) > scale:
        yield f"the plan states a makespan of {planned.makespan:g}; its ops take {makespan:g}."
    if period > planned.period + scale:
        yield f"the plan states a period of {planned.period:g}; a stage takes {period:g}."
    if planned.value < planned.lower_bound - scale:
        yield f"the plan takes {planned.value:g}, less than its own lower bound {planned.lower_bound:g}."
