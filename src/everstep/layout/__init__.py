"""Where every element of every tensor lives, and how to get from one layout to another (pure)."""

from everstep.layout.box import Box
from everstep.layout.layout import Layout, Piece, Tensor, merged
from everstep.layout.reshard import Transfer, Transfers, reshard

__all__ = ["Box", "Layout", "Piece", "Tensor", "Transfer", "Transfers", "merged", "reshard"]
