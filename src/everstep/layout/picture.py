"""Who holds what, drawn as text: a row a holder, a column a tensor, a block for what is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everstep.layout.box import Box
from everstep.layout.layout import Holder, Layout

_BLOCKS = " ▁▂▃▄▅▆▇█"


def share(boxes: Sequence[Box], volume: int) -> str:
    """A block as high as the part of a tensor that is held."""
    held = min(volume, sum(box.volume for box in boxes))
    if not held or not volume:
        return "·"
    return _BLOCKS[max(1, round(8 * held / volume))]


def grid(
    held: Mapping[Holder, Mapping[str, Sequence[Box]]], volumes: Mapping[str, int], columns: int = 64
) -> list[str]:
    """One line a holder. More tensors than columns: neighbours share a column."""
    names = list(volumes)
    step = -(-len(names) // columns) if names else 1
    wide = max((len(str(holder)) for holder in held), default=0)
    lines = []
    for holder, mine in held.items():
        row = ""
        for at in range(0, len(names), step):
            group = names[at : at + step]
            boxes = [box for name in group for box in mine.get(name, ())]
            row += share(boxes, sum(volumes[name] for name in group))
        lines.append(f"{holder!s:>{wide}} {row}")
    return lines


def draw(layout: Layout, columns: int = 64) -> list[str]:
    held: dict[Holder, dict[str, list[Box]]] = {holder: {} for holder in layout.holders}
    for piece in layout.pieces:
        for holder in piece.holders:
            held[holder].setdefault(piece.tensor, []).append(piece.box)
    return grid(held, {name: tensor.num_elements for name, tensor in layout.tensors.items()}, columns)
