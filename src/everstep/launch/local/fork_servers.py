"""A fork server for as long as it is needed. Torch-free: it loads torch while its owner does other things."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from everstep.node.fork_server import ForkServer


@contextlib.contextmanager
def open_server(threads: int, preload: tuple[str, ...] = ()) -> Iterator[ForkServer]:
    made = ForkServer(threads=threads, preload=preload).start()
    try:
        yield made
    finally:
        made.close()
