"""Messages with both their ends, and the delay matrix made of them.

The delay of a message is the time it took once both sides were ready: the receiver's end minus the later of
the two beginnings. What came before that is waiting, and is caused by the rank that was late, not by the
link. A cell of the matrix is the median delay from a sender to a receiver; a hot cell is a link, a hot row
the sending side of a rank, a hot column the receiving side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from everstep_diagnose.case import Case
from everstep_diagnose.comm_record import RECV, SEND, UNKNOWN, Ints

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pairs:
    """One entry a message that both its ends recorded."""

    sender: Ints
    receiver: Ints
    bytes: Ints
    sent_ns: Ints  # the sender enqueued it
    awaited_ns: Ints  # the receiver enqueued it
    received_ns: Ints  # the receiver was done

    def delays_ns(self, offsets: dict[int, int]) -> Ints:
        """Delays on one clock; messages with an unknown time get UNKNOWN."""
        size = int(max(self.sender.max(initial=0), self.receiver.max(initial=0))) + 1
        shift = np.zeros(size, dtype=np.int64)
        for rank, offset in offsets.items():
            if rank < size:
                shift[rank] = offset
        awaited = np.where(self.awaited_ns != UNKNOWN, self.awaited_ns - shift[self.receiver], UNKNOWN)
        ready = np.maximum(self.sent_ns - shift[self.sender], awaited)  # unknown: it takes whatever comes
        delay = np.maximum(self.received_ns - shift[self.receiver] - ready, 0)
        known = (self.sent_ns != UNKNOWN) & (self.received_ns != UNKNOWN)
        return np.where(known, delay, UNKNOWN)


def pair_up(case: Case) -> Pairs:
    """Sends with their receives: same group, same two ranks, same number."""
    log = case.log
    sends, receives = np.flatnonzero(log.is_kind(SEND)), np.flatnonzero(log.is_kind(RECV))
    pairwise = np.array([group.pairwise for group in case.groups] or [False])
    sends = sends[pairwise[log.group[sends]]]
    receives = receives[pairwise[log.group[receives]]]
    if not len(sends) or not len(receives):
        empty = np.zeros(0, dtype=np.int64)
        return Pairs(empty, empty, empty, empty, empty, empty)
    ranks = int(max(log.rank.max(), log.peer.max())) + 1
    # Numbers as they are would leave no room for the ranks: those of our own rings have a step in them.
    known, number = np.unique(np.concatenate([log.seq[sends], log.seq[receives]]), return_inverse=True)

    def keys(rows: Ints, number: Ints, sender: NDArray[np.int32], receiver: NDArray[np.int32]) -> Ints:
        place = (log.group[rows].astype(np.int64) * ranks + sender[rows]) * ranks + receiver[rows]
        return place * len(known) + number

    _, at, other = np.intersect1d(
        keys(sends, number[: len(sends)], log.rank, log.peer),
        keys(receives, number[len(sends) :], log.peer, log.rank),
        return_indices=True,
    )
    sends, receives = sends[at], receives[other]
    return Pairs(
        sender=log.rank[sends].astype(np.int64),
        receiver=log.rank[receives].astype(np.int64),
        bytes=np.maximum(log.bytes[sends], log.bytes[receives]),
        sent_ns=log.enqueued_ns[sends],
        awaited_ns=log.enqueued_ns[receives],
        received_ns=log.ended_ns[receives],
    )


@dataclass(frozen=True, slots=True)
class DelayMatrix:
    ranks: tuple[int, ...]
    seconds: Floats  # [sender, receiver], nan where nothing was sent
    counts: Ints

    def cell(self, sender: int, receiver: int) -> float:
        return float(self.seconds[self.ranks.index(sender), self.ranks.index(receiver)])


def delay_matrix(pairs: Pairs, offsets: dict[int, int], rows: NDArray[np.bool_] | None = None) -> DelayMatrix:
    delay = pairs.delays_ns(offsets)
    use = delay != UNKNOWN
    if rows is not None:
        use &= rows
    ranks = tuple(np.unique(np.concatenate([pairs.sender[use], pairs.receiver[use]])).tolist())
    seconds = np.full((len(ranks), len(ranks)), np.nan)
    counts = np.zeros((len(ranks), len(ranks)), dtype=np.int64)
    if ranks:
        where = np.array(ranks)
        cell = np.searchsorted(where, pairs.sender[use]) * len(ranks) + np.searchsorted(
            where, pairs.receiver[use]
        )
        order = np.argsort(cell, kind="stable")
        cells, starts = np.unique(cell[order], return_index=True)
        for one, values in zip(cells.tolist(), np.split(delay[use][order], starts[1:]), strict=True):
            seconds[divmod(one, len(ranks))] = float(np.median(values)) / 1e9
            counts[divmod(one, len(ranks))] = len(values)
    return DelayMatrix(ranks, seconds, counts)
