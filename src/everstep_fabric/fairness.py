"""The rates that flows get on shared links: max-min fair.

Rates of all flows rise at one pace until a link is full; the flows on it keep what they have, the others
rise on. TCP with equal round trips comes near it, and so does RoCE with congestion control; it is the usual
model.
"""

from __future__ import annotations

import numpy as np

from everstep_fabric.topology import Floats, Ints


def max_min(paths: Ints, capacity: Floats) -> Floats:
    """The rate of each row of links (negative entries are padding); 0 on a dead link."""
    count, num_links = len(paths), len(capacity)
    flat = paths.ravel()
    real = flat >= 0
    link, flow = flat[real], np.repeat(np.arange(count), paths.shape[1])[real]
    rate = np.zeros(count)
    active = np.ones(count, dtype=bool)
    left = capacity.astype(np.float64).copy()
    while active.any():
        using = active[flow]
        demand = np.bincount(link[using], minlength=num_links)
        share = np.full(num_links, np.inf)
        share[demand > 0] = np.maximum(left[demand > 0], 0.0) / demand[demand > 0]
        level = share.min(initial=np.inf)
        if not np.isfinite(level):
            rate[active] = np.inf  # a flow that uses no link
            break
        full = share <= level * (1 + 1e-9)
        stopped = np.zeros(count, dtype=bool)
        stopped[flow[using & full[link]]] = True
        rate[stopped] = level
        left -= np.bincount(link[using & stopped[flow]], minlength=num_links) * level
        active &= ~stopped
    return rate
