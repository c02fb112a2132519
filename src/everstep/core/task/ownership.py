"""Which replicas of a stage hold the optimizer state of which chunk: the owner first, then its guard.

The map is recorded and changed by events. A holder is *filled* once it has the chunk's state; which ones are
is known from the ledgers. A change keeps these rules:

1. A chunk's owner is filled. A chunk without a filled holder is lost, and with it the state of the task.
2. Every chunk has two holders, where two replicas live. The second may still be on its way to be filled.
3. A filled holder is let go only where two other filled ones remain. So a chunk that is to change its
   holder has three for a while: the one to come is last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush

Holders = tuple[tuple[int, ...], ...]  # by chunk
Filled = Mapping[int, frozenset[int]]  # by replica, the chunks whose state it has

COPIES = 2


def first_holders(chunks: int, live: Sequence[int]) -> Holders:
    """For replicas that all load a state. A replica's chunks have different guards, so that after its death
    they do not all fall to one peer; and its n-th chunk is guarded by the n-th peer after it, so that all
    guard equally many.
    """
    count = len(live)
    if count == 1:
        return ((live[0],),) * chunks
    found: list[tuple[int, ...]] = []
    num_owned = [0] * count
    for chunk in range(chunks):
        owner = chunk * count // chunks
        found.append((live[owner], live[(owner + 1 + num_owned[owner] % (count - 1)) % count]))
        num_owned[owner] += 1
    return tuple(found)


def without_dead(holders: Holders, live: Sequence[int]) -> Holders:
    """The same map among those who live."""
    alive = frozenset(live)
    return tuple(
        chunk if alive.issuperset(chunk) else tuple(replica for replica in chunk if replica in alive)
        for chunk in holders
    )


def lost_chunk(holders: Holders, filled: Filled) -> int | None:
    """A chunk of which no live replica has the state; `filled` is of the live ones."""
    there = frozenset().union(*filled.values())
    return next((chunk for chunk in range(len(holders)) if chunk not in there), None)


def reassigned(holders: Holders, live: Sequence[int], filled: Filled) -> Holders:
    """The map for these live replicas. No chunk is lost."""
    having: list[list[int]] = [[] for _ in holders]  # by chunk: who has its state
    for replica in live:
        for chunk in filled.get(replica, ()):
            having[chunk].append(replica)
    alive = frozenset(live)
    rows = [_survivors(*both, alive) for both in zip(holders, having, strict=True)]
    held = Counter(replica for row in rows for replica in row)
    load = {replica: held[replica] for replica in live}
    for row, ready in zip(rows, having, strict=True):
        if len(ready) > COPIES:
            _let_go(row, ready, load)
    least = _Least(load)
    for row in rows:
        while len(row) < min(COPIES, len(live)):
            added = least.but(row)
            row.append(added)
            least.change(added, +1)
    _even_out(rows, load, having)
    return _with_owners(rows, live, having)


def is_settled(holders: Holders, live: Sequence[int]) -> bool:
    """Would the map stay as it is, once every holder is filled?"""
    filled = {k: frozenset(c for c, row in enumerate(holders) if k in row) for k in live}
    return reassigned(holders, live, filled) == holders


def _survivors(before: Sequence[int], having: Sequence[int], alive: Collection[int]) -> list[int]:
    """Filled ones first, in their order; then those on their way."""
    known = [replica for replica in before if replica in alive]
    ready = [k for k in known if k in having] + [k for k in having if k not in known]
    return ready + [replica for replica in known if replica not in ready]


def _let_go(row: list[int], having: Sequence[int], load: dict[int, int]) -> None:
    """Where more than two are filled, those with the most chunks."""
    ready = [replica for replica in row if replica in having]
    while len(ready) > COPIES:
        gone = max(ready, key=lambda replica: (load[replica], ready.index(replica)))
        ready.remove(gone)
        row.remove(gone)
        load[gone] -= 1


class _Least:
    """Replicas by load, the least first; `load` is changed here while it is in use."""

    def __init__(self, load: dict[int, int]) -> None:
        self.load = load
        self._heap = [(count, replica) for replica, count in load.items()]
        heapify(self._heap)

    def but(self, others: Collection[int]) -> int:
        """The least loaded one that is none of these."""
        passed = []
        while True:
            count, replica = self._heap[0]
            if self.load[replica] == count and replica not in others:
                break
            heappop(self._heap)
            if self.load[replica] == count:
                passed.append((count, replica))
        for one in passed:
            heappush(self._heap, one)
        return replica

    def change(self, replica: int, by: int) -> None:
        self.load[replica] += by
        heappush(self._heap, (self.load[replica], replica))


def _even_out(rows: list[list[int]], load: dict[int, int], having: Sequence[Sequence[int]]) -> None:
    """A replica with few chunks becomes the third holder of chunks of one with many."""
    due = dict(load)  # as it will be, once the third holders are filled and another has gone
    for row in rows:
        if len(row) > COPIES:
            due[max(row[:COPIES], key=due.__getitem__)] -= 1
    if max(due.values()) - min(due.values()) < 2:
        return
    least = _Least(due)
    for row, ready in zip(rows, having, strict=True):
        if len(row) != COPIES or not all(replica in ready for replica in row):
            continue
        rich = max(row, key=lambda replica: (due[replica], -replica))
        poor = least.but(())
        if poor not in row and due[rich] - due[poor] >= 2:
            row.append(poor)
            least.change(rich, -1)
            least.change(poor, +1)


def _with_owners(rows: list[list[int]], live: Sequence[int], having: Sequence[Sequence[int]]) -> Holders:
    """An owner stays, unless a guard that has the state too owns fewer by two or more."""
    ready = [[k for k in row if k in there] for row, there in zip(rows, having, strict=True)]
    owners = [one[0] for one in ready]
    counts = Counter(owners)
    owned = {replica: counts[replica] for replica in live}
    changed = True
    while changed:  # each change makes the counts more even, so there are few
        changed = False
        for chunk, candidates in enumerate(ready):
            least = min(candidates, key=lambda replica: owned[replica])
            if owned[owners[chunk]] - owned[least] >= 2:
                owned[owners[chunk]] -= 1
                owned[least] += 1
                owners[chunk] = least
                changed = True
    return tuple(
        (owner, *(k for k in one if k != owner), *(k for k in row if k not in one))
        for owner, one, row in zip(owners, ready, rows, strict=True)
    )
