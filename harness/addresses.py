"""Workers of one machine on several of its loopback addresses: to the product these are nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from everstep.node.worker_processes import WorkerProcesses


@contextmanager
def spread_over_addresses(per_node: int) -> Iterator[None]:
    """So many replicas are on one address, the next ones on the next. 0: all are where they would be."""
    right = WorkerProcesses._spec

    def spec(self: WorkerProcesses, sender: Any, *more: Any) -> Any:
        node = sender.worker.replica // per_node
        return replace(right(self, sender, *more), host=f"127.0.{1 + node // 250}.{1 + node % 250}")

    if per_node:
        WorkerProcesses._spec = spec  # type: ignore[method-assign]
    try:
        yield
    finally:
        WorkerProcesses._spec = right  # type: ignore[method-assign]
