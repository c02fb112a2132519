"""A state on its way from a member to a joiner, as frames: one per tensor, and a last one that counts them.

Every frame names its transfer. Which transfer counts is decided in `core.worker.joining`; here its frames are
collected, and those of no other one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from everstep.core.words.worker_messages import StateTransfer
from everstep.core.worker.joining import FrameUse
from everstep.engine import frames
from everstep.engine.links import Address, Links


def send_state(links: Links, target: Address, transfer: StateTransfer, state: Mapping[str, Tensor]) -> None:
    for name, tensor in state.items():
        facts = {"transfer": list(transfer), "name": name}
        links.send(target, frames.STATE, None, facts, tensor.contiguous())
    links.send(target, frames.STATE, None, {"transfer": list(transfer), "tensors": len(state)})


class ArrivingState:
    """The frames of the transfer that counts, until they are complete."""

    def __init__(self, use: Callable[[StateTransfer], FrameUse]) -> None:
        self._use = use
        self._tensors: dict[str, Tensor] = {}

    def take(self, frame: frames.Incoming) -> tuple[StateTransfer, dict[str, Tensor]] | None:
        """A frame is here. Returns the whole state with its last one."""
        transfer = StateTransfer(*map(int, frame.facts["transfer"]))
        use = self._use(transfer)
        if use is FrameUse.DROP:
            return None
        if use is FrameUse.BEGIN:
            self._tensors = {}
        if frame.tensor is not None:
            self._tensors[frame.facts["name"]] = frame.tensor
            return None
        if len(self._tensors) != frame.facts["tensors"]:
            return None  # a connection broke in between; the source sends all of it again
        whole, self._tensors = self._tensors, {}
        return transfer, whole
