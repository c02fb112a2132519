"""Who runs what: the host of every (microbatch, stage).

Mental model: at each stage the live workers are machines of different speed, and `replicas x microbatches`
equal jobs must be spread so that the busiest machine finishes first. A worker's *quota* is what it can run
within that best busiest time. Microbatches stay at home when home lives and its quota allows (a slow worker
sheds only if that shortens the step: up to the busiest time of *any* stage it may as well keep its own);
the homeless go to peers with room, in turn, so that they arrive evenly over the step.

Quotas balance each stage by itself. They do not see that a microbatch on a slow worker holds a place in the
stash of all stages above for longer, nor that its last one is late for everyone below. So the planner orders
the step with more and with less `patience` for slow workers, and keeps what is best.

On ties, fewest re-routed bytes: neighbouring broken stages draw helpers in the same order, so a homeless
microbatch tends to stay with one helper and crosses between replicas once. In a large job the homeless are
given to as few helpers as the quota allows: all other replicas remain alike, and are scheduled once.

Rejected: round-robin over all peers (ReCycle). It ignores speed, and makes every replica different.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from everstep.protocol.ops import Kind, Microbatch, Worker
from everstep.schedule.instance import Instance

Place = tuple[int, int, int]  # home replica, number, stage
PATIENCE = (1.0, 0.5, 0.0, -0.4, -1.0)  # what is tried
FEW_HELPERS_FROM_OPS = 8_000


def choose_hosts(instance: Instance, *, patience: float = 1.0) -> dict[Place, int]:
    """The replica that hosts each place which is not hosted at home. `patience`: 1, and a slow worker keeps
    its own microbatches up to the busiest time of any stage; 0, up to that of its own stage; below 0, up to
    what it could run if it were slower still, by as much again at -1.
    """
    if instance.done:
        return _hosts_of_the_rest(instance)
    works = [_work(instance, s, patience) for s in range(instance.stages)]
    quotas = [_quotas(work, instance.replicas * instance.microbatches) for work in works]
    busiest = max(longest for longest, _ in quotas)
    few = 3 * instance.replicas * instance.stages * instance.microbatches > FEW_HELPERS_FROM_OPS
    broken = {worker.replica for worker in instance.dead}
    moved: dict[Place, int] = {}
    for stage, (level, quota) in enumerate(quotas):
        if len(quota) < instance.replicas or min(quota.values()) < instance.microbatches:
            keep_up_to = max(level, patience * busiest)
            keep = {
                k: min(instance.microbatches, max(n, int(keep_up_to / max(works[stage][k], 1e-12) + 1e-9)))
                for k, n in quota.items()
            }
            moved.update(_spread(instance, stage, quota, keep, broken, few=few))
    return moved


def _work(instance: Instance, stage: int, patience: float) -> dict[int, float]:
    """What a microbatch costs each worker of a stage; with less than no patience, a slow one more."""
    work = {k: work_time(instance, Worker(k, stage)) for k in instance.live(stage)}
    fastest, times = min(work.values()), max(1.0, 1.0 - patience)
    return {k: seconds * (times if seconds > fastest else 1.0) for k, seconds in work.items()}


def _quotas(work: Mapping[int, float], jobs: int) -> tuple[float, dict[int, int]]:
    """The least possible time of a stage's busiest worker, and how many microbatches each fits into it."""
    level = least_busiest(Counter(work.values()), jobs)
    if level == 0.0:
        return 0.0, dict.fromkeys(work, jobs)
    quota = {k: int(level / w + 1e-9) for k, w in work.items()}
    return max(n * work[k] for k, n in quota.items()), quota


def least_busiest(counts: Mapping[float, int], jobs: int) -> float:
    """The least time in which `jobs` equal jobs fit on machines, `counts[time a job takes]` of each sort."""
    if min(counts) <= 0:
        return 0.0
    level = jobs / sum(count / work for work, count in counts.items())
    while sum(count * int(level / work + 1e-9) for work, count in counts.items()) < jobs:
        level = min((int(level / work + 1e-9) + 1) * work for work in counts)
    return level


def work_time(instance: Instance, worker: Worker, done: str = "") -> float:
    """What one microbatch costs a worker, less what is done."""
    return sum(instance.time(kind, worker) for kind in (Kind.F, Kind.I, Kind.W) if kind not in done)


def _spread(
    instance: Instance,
    stage: int,
    quota: dict[int, int],
    keep: dict[int, int],
    broken: set[int],
    *,
    few: bool,
) -> dict[Place, int]:
    count = instance.microbatches
    homeless = [(m, k) for k in range(instance.replicas) for m in _shed(count, count - keep.get(k, 0))]
    room = {k: n - keep[k] for k, n in quota.items() if n > keep[k]}
    helpers = sorted(room, key=lambda k: (k in broken, k))
    if few:
        helpers = _fewest(helpers, room, len(homeless))
    given = dict.fromkeys(helpers, 0)
    moved: dict[Place, int] = {}
    for number, home in sorted(homeless):
        free = (k for k in helpers if given[k] < room[k])
        helper = min(free, key=lambda k: given[k] / room[k])
        given[helper] += 1
        moved[home, number, stage] = helper
    return moved


def _shed(count: int, shed: int) -> list[int]:
    """Which of `count` microbatches leave, evenly over the step."""
    return [(i * count + count // 2) // shed for i in range(shed)] if shed < count else list(range(count))


def _fewest(helpers: Sequence[int], room: dict[int, int], homeless: int) -> list[int]:
    taken, left = [], homeless
    for helper in helpers:
        if left <= 0:
            break
        taken.append(helper)
        left -= room[helper]
    return taken


def _hosts_of_the_rest(instance: Instance) -> dict[Place, int]:
    """The rest of a broken step: where the stash is, else at home if it lives, else with the least loaded."""
    moved: dict[Place, int] = {}
    for stage in range(instance.stages):
        load = dict.fromkeys(instance.live(stage), 0.0)
        homeless: list[Microbatch] = []
        for microbatch in instance.homes():
            done = instance.done.get((microbatch, stage))
            if done is None and microbatch.home not in load:
                homeless.append(microbatch)
                continue
            host = done.host if done else microbatch.home
            if host != microbatch.home:
                moved[microbatch.home, microbatch.number, stage] = host
            if host in load:
                load[host] += work_time(instance, Worker(host, stage), done.kinds if done else "")
        for microbatch in sorted(homeless, key=lambda j: (j.number, j.home)):
            host = min(load, key=lambda k: (load[k] + work_time(instance, Worker(k, stage)), k))
            moved[microbatch.home, microbatch.number, stage] = host
            load[host] += work_time(instance, Worker(host, stage))
    return moved
