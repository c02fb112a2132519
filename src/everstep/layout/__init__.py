"""Where every element of every tensor lives (pure)."""

from everstep.layout.box import Box
from everstep.layout.layout import Layout, Piece, Tensor, merged

__all__ = ["Box", "Layout", "Piece", "Tensor", "merged"]
