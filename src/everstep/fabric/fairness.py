"""The rates that flows get on shared links: max-min fair, with flows that advance together.

Rates of all flows rise at one pace until a link is full; the flows on it keep what they have, the others
rise on. TCP with equal round trips comes near it, and so does RoCE with congestion control; it is the usual
model. Flows of one group (the edges of a ring) have one rate: what the slowest edge cannot take, the others
do not use.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from everstep.fabric.topology import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUsage:
    """Which group uses which link, how many times: parallel arrays, one entry a (group, link) use."""

    link: Ints
    group: Ints
    amount: Floats
    num_groups: int

    @staticmethod
    def of(paths: Ints, groups: Ints, amounts: Floats, num_groups: int) -> LinkUsage:
        """From one row of links per flow (negative entries are padding) and each flow's group."""
        width = paths.shape[1]
        flat = paths.ravel()
        real = flat >= 0
        return LinkUsage(
            link=flat[real],
            group=np.repeat(groups, width)[real],
            amount=np.repeat(amounts, width)[real],
            num_groups=num_groups,
        )


def max_min(usage: LinkUsage, capacity: Floats, most: Floats | None = None) -> Floats:
    """Rate of each group; `most` is what a group can send at all. A group on a dead link gets 0."""
    count = usage.num_groups
    rate = np.zeros(count)
    ceiling = np.full(count, np.inf) if most is None else most
    active = np.ones(count, dtype=bool)
    left = capacity.astype(np.float64).copy()
    num_links = len(capacity)
    while active.any():
        using = active[usage.group]
        demand = np.bincount(usage.link[using], weights=usage.amount[using], minlength=num_links)
        wanted = demand > 0
        share = np.full(num_links, np.inf)
        share[wanted] = np.maximum(left[wanted], 0.0) / demand[wanted]
        level = min(share.min(initial=np.inf), ceiling[active].min(initial=np.inf))
        if not np.isfinite(level):
            rate[active] = np.inf  # a flow that uses no link
            break
        full = share <= level * (1 + 1e-9)
        stopped = np.zeros(count, dtype=bool)
        stopped[usage.group[using & full[usage.link]]] = True
        stopped |= active & (ceiling <= level * (1 + 1e-9))
        rate[stopped] = level
        gone = using & stopped[usage.group]
        left -= np.bincount(usage.link[gone], weights=usage.amount[gone] * level, minlength=num_links)
        active &= ~stopped
    return rate
