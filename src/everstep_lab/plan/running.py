"""How long a plan will hold: D_running, and the repairs that will end it.

Failures come at a rate that grows with the cluster, repairs at promised times. The next event is
the earlier of the two, so a plan made now lasts in expectation

    E[min(failure, repair)] = (1 - exp(-rate x repair)) / rate

and with probability exp(-rate x repair) it is the repair that ends it. A change that the repair will undo
pays twice: once now, once back. That is why a node back in an hour and a node back in a week call for
different plans, and it is all the lookahead there is (`answer.py` computes what each task will want after
each repair, latest first, and charges today's options for the way there).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from everstep_lab.plan.cluster import Cluster

FOREVER_S = 3650 * 86_400.0
MOST_REPAIRS = 4  # looked at one by one; later ones count as one


@dataclass(frozen=True, slots=True)
class Period:
    """From one foreseen event to the next: which nodes live in it, and how long it lasts in expectation."""

    cluster: Cluster
    starts_s: float
    running_s: float
    ends_by_repair: float  # probability
    repaired: tuple[str, ...]  # nodes back when it ends


def periods(cluster: Cluster) -> list[Period]:
    """Now, and after each repair under way."""
    due: dict[float, list[str]] = {}
    for node in cluster.nodes:
        if node.lost and node.back_in_s is not None:
            due.setdefault(node.back_in_s, []).append(node.name)
    ends = sorted(due)
    if len(ends) > MOST_REPAIRS:
        merged = [name for end in ends[MOST_REPAIRS - 1 :] for name in due.pop(end)]
        due[ends[-1]] = merged
        ends = sorted(due)
    found, starts, world = [], 0.0, cluster
    for end in ends:
        found.append(_period(world, starts, end - starts, tuple(due[end])))
        starts, world = end, with_repaired(world, due[end])
    found.append(_period(world, starts, None, ()))
    return found


def _period(cluster: Cluster, starts: float, length: float | None, repaired: tuple[str, ...]) -> Period:
    rate = 1 / cluster.running_s if cluster.running_s else cluster.failures_per_s()
    if length is None:
        return Period(cluster, starts, min(FOREVER_S, 1 / rate) if rate > 0 else FOREVER_S, 0.0, ())
    survives = math.exp(-rate * length)
    lasts = length if rate * length < 1e-9 else -math.expm1(-rate * length) / rate
    return Period(cluster, starts, lasts, survives, repaired)


def with_repaired(cluster: Cluster, names: list[str]) -> Cluster:
    back = set(names)
    nodes = [replace(n, lost=False, back_in_s=None) if n.name in back else n for n in cluster.nodes]
    return replace(cluster, nodes=nodes)
