"""Which holder of each part of a state in memory is read, and which one next if a read fails.

A state is in the memory of nodes in parts (a stage, or a chunk of one), each on one node or several. The
order to load it names the holders of every part, best first. A holder that cannot be reached is the last to
be asked for the other parts too: each attempt may take as long as a connection's time limit. A part of which
no holder is left cannot be loaded; what is tried then (the same state again, an older one, the disk) is the
coordinator's to decide, and every failed read is reported to it.
"""

from __future__ import annotations

from dataclasses import replace

from everstep.errors import clipped
from everstep.protocol.messages import FailedRead
from everstep.protocol.work import PartHolder, StateDirections

Holder = PartHolder
MOST_FAILED_READS = 64  # that are reported


class CopyHolders:
    def __init__(self, directions: StateDirections) -> None:
        others = directions.other_holders or ((),) * len(directions.copies)
        self._left: list[list[Holder]] = [
            [first, *more] for first, more in zip(directions.copies, others, strict=False)
        ]
        self._failed: list[FailedRead] = []

    def chosen(self) -> list[Holder]:
        """Of every part the holder that is asked now."""
        return [holders[0] for holders in self._left]

    def read_failed(self, part: int, because: str, *, reached: bool) -> bool:
        """This part could not be read from its holder; `reached`: the node answered. False: no other one has
        it.
        """
        address, _ = self._left[part].pop(0)
        self._failed.append(FailedRead(part=part, node=address.node, because=clipped(because)))
        if not reached:
            for holders in self._left:
                holders.sort(key=lambda holder: holder[0].node == address.node)
        return bool(self._left[part])

    def failed(self) -> tuple[FailedRead, ...]:
        """The reads that failed, each with the node that the part was read from instead."""
        return tuple(
            replace(read, then=self._left[read.part][0][0].node if self._left[read.part] else "")
            for read in self._failed[:MOST_FAILED_READS]
        )
