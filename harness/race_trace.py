"""Which faults a race has, and when: drawn from a seed, the same for every system.

Six faults: three kills, a hang, a lost node and a slow worker, in an order and at times that the seed gives.
The first comes after a time without faults, in which the pace is measured; the others follow at about equal
distances.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

KINDS = ("kill", "kill", "kill", "hang", "node", "slow")
NODES, PER_NODE = 2, 1  # a worker has a core, so that one that is lost is missed
WORKERS = NODES * PER_NODE
SLOW_FOR_S = 25.0  # a slow worker runs for a third of the time
NODE_AWAY_S = 15.0  # a lost node comes back empty
OPERATOR_S = 45.0  # a hung worker that its system has not ended by then is killed, as an operator would do


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    at_s: float  # since the first finished step
    kind: str
    slot: int  # a worker's place; of a lost node its first


def trace(
    seed: int, seconds: float, *, warm_s: float = 40.0, kinds: tuple[str, ...] = KINDS
) -> tuple[Fault, ...]:
    """Worker 0 and node 0 are spared: they hold the rendezvous of several systems, which say so."""
    draw = random.Random(seed)
    kinds = list(kinds)
    draw.shuffle(kinds)
    gap = (seconds - warm_s) / len(kinds)
    faults = []
    for number, kind in enumerate(kinds):
        at_s = warm_s + gap * (number + 0.2 * draw.random())
        slot = PER_NODE if kind == "node" else draw.randrange(1, WORKERS)
        faults.append(Fault(at_s=round(at_s, 3), kind=kind, slot=slot))
    return tuple(faults)
