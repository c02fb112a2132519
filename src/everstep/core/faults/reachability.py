"""Who cannot reach whom on the data network: which node is it?

A worker that cannot open a connection to a live peer says so. One such pair blames both ends alike; several
pairs have something in common:

    a ─x─ b      a, c and d do not reach b: b is cut off, though its agent is heard (control and data are
    c ─x─ b      two networks on most machines). Nodes that are silent are no part of this: `silence`.
    d ─x─ b

Several nodes may be cut off at once, if together they explain every pair and are fewer than those that do not
reach them: then the smaller side of a split network is left. Where the two sides are equal, or there is one
pair only, no node is named. A single pair is probed from other nodes, whose answers are pairs as well.

Rejected: to blame the node with the most pairs. While two nodes are cut off, the first healthy one that
reports both has two pairs, and each of them one.
"""

from __future__ import annotations

from collections.abc import Collection

Pair = tuple[str, str]  # two nodes, in order of their names
MANY = 2  # a node that so many others cannot reach is cut off


def pair_of(one: str, other: str) -> Pair:
    return (one, other) if one < other else (other, one)


def cut_off(pairs: Collection[Pair]) -> tuple[str, ...]:
    """The nodes whose data network is dead, as far as these pairs say; empty: they do not say it."""
    others: dict[str, set[str]] = {}
    for one, other in pairs:
        others.setdefault(one, set()).add(other)
        others.setdefault(other, set()).add(one)
    most = max(map(len, others.values()), default=0)
    found = tuple(sorted(node for node, theirs in others.items() if len(theirs) == most))
    explains_all = all(one in found or other in found for one, other in pairs)
    is_smaller = 2 * len(found) < len(others)
    return found if most >= MANY and explains_all and is_smaller else ()
