"""A flow: who sends how much to whom over the fabric, and when."""

from __future__ import annotations

from dataclasses import dataclass

Endpoint = tuple[str, int]  # node, NIC


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Bytes from one NIC to another in every step. Flows of one phase run at the same time."""

    name: str
    task: str
    phase: str
    group: str
    source: Endpoint
    target: Endpoint
    bytes: float
    weight: float = 1.0
    plane: int | None = None  # where its sender's port must be, if that was decided outside


def connection_name(task: str, sender: str, host: str, port: int) -> str:
    """The flow of a worker's connection to where a peer listens: a peer that is started again listens
    elsewhere, and the flow to it is another one.
    """
    return f"{task} {sender} to {host}:{port}"
