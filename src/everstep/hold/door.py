"""The way from a rank's process and its script into a held run. `current`: None where ranks are not held."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from everstep.hold.settings import HoldSettings
from everstep.protocol.codec import decode, encode
from everstep.protocol.held import RankOrder, RankWord
from everstep.protocol.table import Json

if TYPE_CHECKING:
    from collections.abc import Callable

    from everstep.hold.rank import HeldRank

current: HeldRank | None = None


def open_door(settings: Json, say: Callable[..., None]) -> None:
    """Once, before anything of the script runs. Loads torch."""
    global current
    given: HoldSettings = decode(HoldSettings, settings)
    for name, value in FOR_NCCL.items():
        os.environ[name] = value
    from everstep.hold import torch_hooks
    from everstep.hold.rank import HeldRank

    def tell(word: RankWord) -> None:
        say(kind="held", word=encode(word))

    current = HeldRank(given, tell)
    torch_hooks.install(current)
    os.register_at_fork(after_in_child=_close_door)


def _close_door() -> None:
    """What a rank forks, such as workers of a DataLoader, is no rank."""
    global current
    if current is not None:
        current.is_forked = True
    current = None


def take(order: Json) -> None:
    """What the keeper says, in the thread that hears it."""
    if current is not None:
        decoded: Any = decode(RankOrder, order)
        current.take(decoded)


# NCCL's own watchdogs would end a rank that is held.
FOR_NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
