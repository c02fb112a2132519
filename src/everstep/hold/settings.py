"""What a held rank begins with: said by its keeper on the line, before anything of the script runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from everstep.protocol.held import Address


@dataclass(frozen=True, slots=True, kw_only=True)
class Born:
    """Of a newcomer. `peers`: the ranks that know how the run began, and where they are."""

    epoch: int
    absent: tuple[int, ...]
    peers: Mapping[int, Address]


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldSettings:
    rank: int
    world: int
    unit: int
    key: str  # by which ranks of this run know each other
    slate: str  # the path of its file
    host: str = "127.0.0.1"
    born: Born | None = None  # None: its run begins
