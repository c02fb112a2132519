"""A state as frames, over real sockets: two sources at once, and a joiner that loads one state or none."""

import queue
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from everstep.core.words.ops import Worker
from everstep.core.words.worker_messages import StateTransfer
from everstep.core.worker.joining import Joiner
from everstep.core.worker.mailbox import Mailbox
from everstep.engine import frames
from everstep.engine.links import Links
from everstep.engine.transfers import ArrivingState, send_state

TOKEN = b"t" * 32
NAMES = ("model/w", "adam/m", "adam/v")


class Process:
    """Links, and what has arrived over them."""

    def __init__(self, name: str) -> None:
        self.events: queue.SimpleQueue[frames.Incoming] = queue.SimpleQueue()
        self.links = Links(
            token=TOKEN,
            host="127.0.0.1",
            deliver=self.events.put,
            broken=lambda address: None,
            failed=lambda error: None,
            empty=lambda shape, dtype: torch.empty(shape, dtype=dtype),
            identity=name.encode(),
        )
        self.links.start()


@pytest.fixture
def processes() -> Iterator[tuple[Process, Process, Process]]:
    made = Process("a"), Process("b"), Process("joiner")
    yield made
    for process in made:
        process.links.stop()


def state(step: int) -> dict[str, Tensor]:
    return {name: torch.full((50,), float(step)) for name in NAMES}


def test_a_state_is_never_made_of_two_transfers(processes: tuple[Process, Process, Process]) -> None:
    """The frames of a source that was given up arrive between those of its successor. They were kept by the
    name of their tensor alone: the joiner loaded a mixture of step 5 and step 8.
    """
    slow, good, target = processes
    joiner = Joiner(Mailbox(Worker(0, 0)), incarnation=1)
    arriving = ArrivingState(joiner.take_state)
    late, counts = StateTransfer(1, 5, 1, 1), StateTransfer(2, 8, 2, 1)
    send_state(good.links, target.links.address, counts, state(8))
    from_good = [target.events.get(timeout=20) for _ in range(len(NAMES) + 1)]
    send_state(slow.links, target.links.address, late, state(5))
    from_slow = [target.events.get(timeout=20) for _ in range(len(NAMES) + 1)]
    # As they can come over two connections: the late ones before the end of those that count.
    in_turn = [from_slow[0], *from_good[:3], *from_slow[1:], from_good[3]]
    found = [whole for frame in in_turn if (whole := arriving.take(frame)) is not None]
    assert [transfer for transfer, _ in found] == [counts]
    for tensor in found[0][1].values():
        assert torch.equal(tensor, torch.full((50,), 8.0))


def test_a_transfer_with_a_frame_lost_is_no_state_until_it_is_sent_again(
    processes: tuple[Process, Process, Process],
) -> None:
    source, _, target = processes
    joiner = Joiner(Mailbox(Worker(0, 0)), incarnation=1)
    arriving = ArrivingState(joiner.take_state)
    transfer = StateTransfer(1, 5, 1, 1)
    send_state(source.links, target.links.address, transfer, state(5))
    got = [target.events.get(timeout=20) for _ in range(len(NAMES) + 1)]
    assert [arriving.take(frame) for frame in (got[0], got[2], got[3])] == [None, None, None]
    found = [arriving.take(frame) for frame in got]
    assert found[:3] == [None, None, None]
    assert found[3] is not None
    assert set(found[3][1]) == set(NAMES)
