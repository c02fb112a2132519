"""Who writes what: every element once, by one of its holders, the work spread over the replicas.

Writing is resharding to a disk that holds everything and is equally far from all: the transfers that
`reshard` plans are the shares. Boxes that several replicas hold are cut between them.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.layout.box import Box, Shape, row_major
from everstep.layout.builders import replicated
from everstep.layout.layout import Holder, Layout, merged
from everstep.layout.reshard import reshard

_DISK = "disk"


@dataclass(frozen=True, slots=True)
class Share:
    """A box of a tensor, and where its writer has it."""

    tensor: str
    box: Box
    buffer: str
    offset: int
    strides: Shape


def writing_shares(layout: Layout) -> dict[Holder, list[Share]]:
    """What each holder writes. Tensors to be averaged must be averaged before."""
    disk = merged([replicated(tensor, [_DISK]) for tensor in layout.tensors.values()])
    found: dict[Holder, list[Share]] = {holder: [] for holder in layout.holders}
    for t in reshard(layout, disk):
        shape = layout.tensors[t.tensor].shape
        box = Box(_index_of(t.target_offset, shape), t.size)
        found[t.source].append(Share(t.tensor, box, t.source_buffer, t.source_offset, t.source_strides))
    return found


def _index_of(offset: int, shape: Shape) -> Shape:
    index = []
    for stride in row_major(shape):
        place, offset = divmod(offset, stride)
        index.append(place)
    return tuple(index)
