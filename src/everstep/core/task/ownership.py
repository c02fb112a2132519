"""Which replicas of a stage hold the optimizer state of which chunk: the owner first, then its guard.

The map is recorded and changed by events. A holder is *filled* once it has the chunk's state; which ones are
is known from the ledgers. A change keeps these rules:

1. A chunk's owner is filled. A chunk without a filled holder is lost, and with it the state of the task.
2. Every chunk has two holders, where two replicas live. The second may still be on its way to be filled.
3. A filled holder is let go only where two other filled ones remain. So a chunk that is to change its
   holder has three for a while: the one to come is last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    return tuple(tuple(replica for replica in chunk if replica in live) for chunk in holders)


def lost_chunk(holders: Holders, filled: Filled) -> int | None:
    """A chunk of which no live replica has the state; `filled` is of the live ones."""
    for chunk in range(len(holders)):
        if not any(chunk in chunks for chunks in filled.values()):
            return chunk
    return None


def reassigned(holders: Holders, live: Sequence[int], filled: Filled) -> Holders:
    """The map for these live replicas. No chunk is lost."""
    rows = [_survivors(chunk, before, live, filled) for chunk, before in enumerate(holders)]
    load = {replica: sum(replica in row for row in rows) for replica in live}
    for chunk, row in enumerate(rows):
        _let_go(chunk, row, load, filled)
    for row in rows:
        while len(row) < min(COPIES, len(live)):
            _add(row, load)
    _even_out(rows, load, filled)
    return _with_owners(rows, live, filled)


def _survivors(chunk: int, before: Sequence[int], live: Sequence[int], filled: Filled) -> list[int]:
    """Filled ones first, in their order; then those on their way."""
    known = [replica for replica in before if replica in live]
    others = [replica for replica in live if replica not in known and chunk in filled.get(replica, ())]
    ready = [replica for replica in (*known, *others) if chunk in filled.get(replica, ())]
    return ready + [replica for replica in known if replica not in ready]


def _let_go(chunk: int, row: list[int], load: dict[int, int], filled: Filled) -> None:
    """Where more than two are filled, those with the most chunks."""
    ready = [replica for replica in row if chunk in filled.get(replica, ())]
    while len(ready) > COPIES:
        gone = max(ready, key=lambda replica: (load[replica], ready.index(replica)))
        ready.remove(gone)
        row.remove(gone)
        load[gone] -= 1


def _add(row: list[int], load: dict[int, int]) -> None:
    added = min(
        (replica for replica in load if replica not in row), key=lambda replica: (load[replica], replica)
    )
    row.append(added)
    load[added] += 1


def _even_out(rows: list[list[int]], load: dict[int, int], filled: Filled) -> None:
    """A replica with few chunks becomes the third holder of chunks of one with many."""
    due = dict(load)  # as it will be, once the third holders are filled and another has gone
    for row in rows:
        if len(row) > COPIES:
            due[max(row[:COPIES], key=lambda replica: due[replica])] -= 1
    for chunk, row in enumerate(rows):
        if len(row) != COPIES or not all(chunk in filled.get(replica, ()) for replica in row):
            continue
        rich = max(row, key=lambda replica: (due[replica], -replica))
        poor = min(due, key=lambda replica: (due[replica], replica))
        if poor not in row and due[rich] - due[poor] >= 2:
            row.append(poor)
            due[rich] -= 1
            due[poor] += 1


def _with_owners(rows: list[list[int]], live: Sequence[int], filled: Filled) -> Holders:
    """An owner stays, unless a guard that has the state too owns fewer by two or more."""
    ready = [[k for k in row if chunk in filled.get(k, ())] for chunk, row in enumerate(rows)]
    owners = [one[0] for one in ready]
    owned = {replica: owners.count(replica) for replica in live}
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
