"""`linear_bound_s` solves the linear program in which flows may be cut at will: a true bound, below what
whole flows can reach. The larger of it and of what counting says (`everstep.fabric.bound`) is `bound_s`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from everstep.errors import UserError
from everstep.fabric.bound import lower_bound_s
from everstep.fabric.flows import Endpoint, Flow
from everstep.fabric.routing import BITS
from everstep.fabric.topology import Topology


def linear_bound_s(topology: Topology, flows: Sequence[Flow]) -> float:
    """The least worst load if flows could be cut at will: a linear program over bundles of flows.

    Flows of one task, phase and pair of NICs are one bundle. For one phase a task (else the heaviest phases
    are maxima, which this program states as well, one variable a link and task).
    """
    try:
        from scipy.optimize import linprog
        from scipy.sparse import coo_matrix
    except ImportError:
        raise UserError("the linear bound needs scipy: pip install scipy.") from None
    bundles: dict[tuple[str, str, Endpoint, Endpoint, int | None], float] = {}
    for flow in flows:
        key = flow.task, flow.phase, flow.source, flow.target, flow.plane
        bundles[key] = bundles.get(key, 0.0) + flow.bytes * BITS
    if not bundles:
        return 0.0
    phases: dict[str, dict[str, int]] = {}
    for task, phase, *_ in bundles:
        phases.setdefault(task, {}).setdefault(phase, len(phases.get(task, {})))
    num_links = len(topology.links)
    multi = [task for task, found in phases.items() if len(found) > 1]
    peak_at = {task: 1 + n * num_links for n, task in enumerate(multi)}  # variables: T, peaks, amounts
    column = 1 + len(multi) * num_links
    upper: list[tuple[int, int, float]] = [
        (link, 0, -float(topology.capacity[link])) for link in range(num_links)
    ]
    equal: list[tuple[int, int, float]] = []
    row_of: dict[tuple[str, str], int] = {}
    rows = num_links
    for task in multi:
        upper += [(link, peak_at[task] + link, 1.0) for link in range(num_links)]
        for phase in phases[task]:
            row_of[task, phase] = rows
            upper += [(rows + link, peak_at[task] + link, -1.0) for link in range(num_links)]
            rows += num_links
    for number, (task, phase, source, target, plane) in enumerate(bundles):
        paths = topology.paths(source, target)
        paths = paths[topology.alive(paths)]
        if plane is not None:
            paths = paths[topology.plane_of[paths[:, 0]] == plane]
        for path in paths:
            first = row_of.get((task, phase), 0)
            upper += [(first + int(link), column, 1.0) for link in path if link >= 0]
            equal.append((number, column, 1.0))
            column += 1
    cost = np.zeros(column)
    cost[0] = 1.0

    def sparse(entries: list[tuple[int, int, float]], height: int) -> object:
        i, j, x = (np.array(part) for part in zip(*entries, strict=True))
        return coo_matrix((x, (i, j)), shape=(height, column)).tocsr()

    solved = linprog(
        cost,
        A_ub=sparse(upper, rows),
        b_ub=np.zeros(rows),
        A_eq=sparse(equal, len(bundles)),
        b_eq=np.array(list(bundles.values())),
        method="highs",
    )
    return math.inf if solved.x is None else float(solved.x[0])


def bound_s(topology: Topology, flows: Sequence[Flow]) -> float:
    return max(lower_bound_s(topology, flows), linear_bound_s(topology, flows))
