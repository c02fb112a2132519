"""What is held of one microbatch between its ops."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from everstep.engine.layers.linear import Queue
from everstep.engine.stage.recordings import RecordedOps


@dataclass(slots=True)
class Stash:
    inputs: dict[int, Tensor]  # the boundary's tensors that want a gradient, by their number
    outputs: list[Tensor] | None  # what gradients come back for, in order; the loss, on the last stage
    weight: Tensor | float | None = None  # of the microbatch, on the last stage
    queue: Queue = field(default_factory=list)
    others: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (gradient view's parameter, gradient)
    recorded: RecordedOps | None = None  # whose tensors these are

    @property
    def open(self) -> bool:
        """Between F and I."""
        return self.outputs is not None

    def for_weights(self) -> list[Tensor]:
        """What is held from I to W."""
        queued = (tensor for entry in self.queue for tensor in entry if isinstance(tensor, Tensor))
        return [*queued, *(grad for _, grad in self.others)]
