from collections.abc import Iterator

import pytest

from everstep.node.fork_server import ForkServer


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    running = ForkServer(threads=1).start()
    yield running
    running.close()
