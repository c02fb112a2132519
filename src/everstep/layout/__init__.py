"""Which elements of which tensor a part has (pure)."""

from everstep.layout.box import Box
from everstep.layout.tensor import Tensor

__all__ = ["Box", "Tensor"]
