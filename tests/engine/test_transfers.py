"""A state as frames, over real sockets: two sources at once, and a joiner that loads one state or none."""

import queue
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from everstep.core.words.ops import Worker
from everstep.core.words.worker_messages import StateTransfer
from everstep.core.worker.joining import Joiner
from everstep.core.worker.mailbox import Mailbox
from everstep.engine import frames
from everstep.engine.links import Address, Links
from everstep.engine.transfers import ArrivingState, StateSender

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


def send_state(links: Links, to: Address, transfer: StateTransfer, tensors: dict[str, Tensor]) -> None:
    sender = StateSender(links)
    sender.begin(to, transfer, tensors)
    sender.settle()


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


MIB = 1 << 20
WINDOW, REST, PIECE = 2 * MIB, 8 * MIB, MIB // 2


class SlowJoiner(Process):
    """Takes a frame, then nothing for a while; or nothing at all until it is let go."""

    def __init__(self, *, frame_s: float, stopped: bool = False) -> None:
        self.go = threading.Event()
        if not stopped:
            self.go.set()
        super().__init__("joiner")
        take = self.events.put

        def slowly(frame: frames.Incoming) -> None:
            self.go.wait()
            time.sleep(frame_s)
            take(frame)

        self.links._deliver = slowly


def large_state(mib: int) -> dict[str, Tensor]:
    half = mib * MIB // 8
    return {
        "model/w": torch.arange(half, dtype=torch.float32).view(-1, 1024),
        "optimizer/w/exp_avg": torch.arange(half, dtype=torch.float32).view(-1, 1024) * 0.5,
        "optimizer/w/step": torch.tensor(7.0),
        "model/empty": torch.zeros(0),
    }


def test_a_large_state_for_a_slow_joiner_takes_bounded_memory_and_is_that_of_one_step() -> None:
    """64 MiB; training goes on and changes the state as soon as it may."""
    source, joiner = Process("a"), SlowJoiner(frame_s=0.002)
    try:
        live, transfer = large_state(64), StateTransfer(1, 5, 1, 1)
        wanted = {name: tensor.clone() for name, tensor in live.items()}
        sender = StateSender(source.links, window=WINDOW, rest=REST, piece=PIECE)
        sender.begin(joiner.links.address, transfer, live)
        most, done = 0, threading.Event()

        def look() -> None:
            nonlocal most
            while not done.is_set():
                most = max(most, source.links.queued(joiner.links.address))
                time.sleep(0.001)

        looking = threading.Thread(target=look)
        looking.start()
        sender.settle()
        for tensor in live.values():
            tensor.fill_(-1.0)  # the next update
        arriving = ArrivingState(Joiner(Mailbox(Worker(0, 0)), incarnation=1).take_state)
        found = None
        while found is None:
            found = arriving.take(joiner.events.get(timeout=60))
        done.set()
        looking.join()
    finally:
        source.links.stop()
        joiner.links.stop()
    bound = WINDOW + REST + 2 * PIECE
    assert max(most, sender.peak_bytes) <= bound
    assert sender.peak_bytes > WINDOW // 2
    assert found[0] == transfer
    assert all(torch.equal(found[1][name], tensor) for name, tensor in wanted.items())


def test_a_joiner_that_takes_nothing_is_cut_off_and_the_update_goes_on() -> None:
    source, joiner = Process("a"), SlowJoiner(frame_s=0.0, stopped=True)
    broken: list[Address] = []
    source.links._broken = broken.append
    try:
        sender = StateSender(source.links, window=WINDOW, rest=REST, piece=PIECE, stuck_s=0.3)
        sender.begin(joiner.links.address, StateTransfer(1, 5, 1, 1), large_state(96))
        waited: list[bool] = []
        sender.settle(waiting=lambda: waited.append(True))
        assert waited
        until = time.monotonic() + 20
        while not broken and time.monotonic() < until:
            time.sleep(0.01)
        assert broken == [joiner.links.address]
    finally:
        joiner.go.set()
        source.links.stop()
        joiner.links.stop()


def test_pieces_go_to_their_place_and_others_are_kept() -> None:
    source, target = Process("a"), Process("joiner")
    try:
        live, transfer = large_state(4), StateTransfer(1, 5, 1, 1)
        home = torch.zeros_like(live["model/w"])
        sender = StateSender(source.links, piece=PIECE)
        sender.begin(target.links.address, transfer, live)
        sender.settle()
        arriving = ArrivingState(
            Joiner(Mailbox(Worker(0, 0)), incarnation=1).take_state,
            lambda name, shape, dtype: home if name == "model/w" else None,
        )
        found = None
        while found is None:
            found = arriving.take(target.events.get(timeout=60))
    finally:
        source.links.stop()
        target.links.stop()
    assert found[1]["model/w"].data_ptr() == home.data_ptr()
    assert all(torch.equal(found[1][name], tensor) for name, tensor in live.items())
