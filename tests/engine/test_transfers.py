"""A state as frames, over real sockets: two sources at once, and a joiner that loads one state or none."""

import queue
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from everstep.core.worker.joining import Joiner
from everstep.core.worker.mailbox import Mailbox
from everstep.errors import PeerError
from everstep.net import frames
from everstep.net.envelope import Envelope, FrameKind, StateEnd, StatePiece
from everstep.net.links import Address, LinkEvents, Links
from everstep.net.transfers import ArrivingFills, ArrivingState, StateSender
from everstep.protocol.ops import Worker
from everstep.protocol.parcels import Parcel, ParcelKind, StateTransfer

TOKEN = b"t" * 32
NAMES = ("model/w", "adam/m", "adam/v")


class Process:
    """Links, and what has arrived over them."""

    def __init__(self, name: str) -> None:
        self.events: queue.SimpleQueue[frames.Incoming] = queue.SimpleQueue()
        self.links = Links(
            LinkEvents(deliver=self.events.put, broken=lambda address: None, failed=lambda error: None),
            token=TOKEN,
            host="127.0.0.1",
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
    joiner = Joiner(Mailbox(Worker(0, 0), incarnation=1))
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
    joiner = Joiner(Mailbox(Worker(0, 0), incarnation=1))
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


@pytest.mark.parametrize("filled", [False, True])
def test_an_error_in_the_thread_that_copies_ends_the_worker(
    processes: tuple[Process, Process, Process], monkeypatch: pytest.MonkeyPatch, filled: bool
) -> None:
    """It was lost, and the joiner waited for the end of the state for ever."""

    def copy(self: object, piece: Tensor) -> Tensor:
        raise RuntimeError("no pinned memory")

    monkeypatch.setattr("everstep.net.transfers._Host.copy", copy)
    source, _, target = processes
    sender = StateSender(source.links)
    if filled:
        sender.begin_fill(target.links.address, fill(0), Envelope(None), (torch.ones(4),))
    else:
        sender.begin(target.links.address, StateTransfer(1, 5, 1, 1), state(5))
    with pytest.raises(RuntimeError, match="no pinned memory"):
        sender.settle()


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

        self.links.events.deliver = slowly


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
        arriving = ArrivingState(Joiner(Mailbox(Worker(0, 0), incarnation=1)).take_state)
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
    source.links.events.broken = broken.append
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
            Joiner(Mailbox(Worker(0, 0), incarnation=1)).take_state,
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


def chunk_state(chunk: int, mib: int) -> tuple[Tensor, ...]:
    large = [torch.arange(mib * MIB // 12, dtype=torch.float32) + 100 * chunk + index for index in range(3)]
    return (*large, torch.tensor(float(chunk)))


def fill(chunk: int, step: int = 5) -> Parcel:
    return Parcel(ParcelKind.FILL, 0, step, 0, None, 0, 0, chunk)


def collecting(target: Process, delivered: "queue.SimpleQueue[frames.Incoming]") -> ArrivingFills:
    """In the links' thread, as on a worker."""
    arriving = ArrivingFills(torch.device("cpu"), delivered.put)
    other = target.links.events.deliver
    target.links.events.deliver = lambda frame: None if arriving.take(frame) else other(frame)
    return arriving


def test_chunks_for_a_slow_holder_take_bounded_memory_and_are_those_of_one_step() -> None:
    """Three chunks of 24 MiB to a holder that reads slowly: every one of them was copied and queued as a
    whole, 72 MiB at once. And the update changes them as soon as it may.
    """
    source, holder = Process("a"), SlowJoiner(frame_s=0.002)
    delivered: queue.SimpleQueue[frames.Incoming] = queue.SimpleQueue()
    collecting(holder, delivered)
    slowly = holder.links.events.deliver
    holder.links.events.deliver = lambda frame: (time.sleep(0.001), slowly(frame))[1]
    try:
        live = {chunk: chunk_state(chunk, 24) for chunk in range(3)}
        wanted = {chunk: [tensor.clone() for tensor in tensors] for chunk, tensors in live.items()}
        sender = StateSender(source.links, window=WINDOW, rest=REST, piece=PIECE)
        for chunk, tensors in live.items():
            sender.begin_fill(holder.links.address, fill(chunk), Envelope(beside=chunk), tensors)
        sender.settle()
        for tensors in live.values():
            for tensor in tensors:
                tensor.fill_(-1.0)  # the next update
        found = [delivered.get(timeout=60) for _ in range(3)]
    finally:
        source.links.stop()
        holder.links.stop()
    assert WINDOW // 2 < sender.peak_bytes <= WINDOW + REST + 4 * PIECE
    for frame in found:
        assert frame.parcel is not None
        assert frame.envelope == Envelope(beside=frame.parcel.owner)
        assert all(map(torch.equal, frame.tensors, wanted[frame.parcel.owner]))
    assert sorted(frame.parcel.owner for frame in found if frame.parcel is not None) == [0, 1, 2]


def test_a_chunk_whose_pieces_were_lost_is_whole_once_it_was_sent_again() -> None:
    source, holder = Process("a"), Process("holder")
    delivered: queue.SimpleQueue[frames.Incoming] = queue.SimpleQueue()
    arriving = ArrivingFills(torch.device("cpu"), delivered.put)
    try:
        tensors = chunk_state(1, 3)
        sender = StateSender(source.links, piece=PIECE)
        sender.begin_fill(holder.links.address, fill(1), Envelope(), tensors)
        sender.settle()
        got = [holder.events.get(timeout=20)]
        while got[-1].tensor is not None:
            got.append(holder.events.get(timeout=20))
    finally:
        source.links.stop()
        holder.links.stop()
    assert all(arriving.take(frame) for frame in (*got[:2], *got[3:]))
    assert delivered.empty()
    assert all(arriving.take(frame) for frame in got)
    assert all(map(torch.equal, delivered.get_nowait().tensors, tensors))
    assert all(arriving.take(frame) for frame in got[:-1])  # once more, and too late: nothing comes of it
    assert delivered.empty()


def test_pieces_of_a_chunk_that_do_not_fit_are_refused_and_those_of_an_older_state_are_dropped() -> None:
    delivered: queue.SimpleQueue[frames.Incoming] = queue.SimpleQueue()
    arriving = ArrivingFills(torch.device("cpu"), delivered.put)

    def take(parcel: Parcel, piece: StatePiece | StateEnd | None, *tensors: Tensor) -> bool:
        return arriving.take(frames.Incoming.whole(parcel, Envelope(piece=piece), tensors))

    assert take(fill(1), StatePiece("0", (4,), 0), torch.ones(4))
    assert take(fill(1, step=4), StateEnd(1))
    assert delivered.empty()
    for bad in (
        StatePiece("0", (4,), 2),
        StatePiece("0", (4,), -1),
        StatePiece("0", (-4,), 0),
        StatePiece("0", (1 << 50,), 0),
        StatePiece("0", (8,), 4),
        None,
    ):
        with pytest.raises(PeerError):
            take(fill(1), bad, torch.ones(4))
    with pytest.raises(PeerError):
        take(fill(1), StatePiece("0", (4,), 0), torch.ones(4, dtype=torch.int32))
    assert take(fill(1), StateEnd(1))
    assert torch.equal(delivered.get_nowait().tensors[0], torch.ones(4))
    assert take(fill(2), StatePiece("other", (4,), 0), torch.ones(4))
    with pytest.raises(PeerError, match="other names"):
        take(fill(2), StateEnd(1))


@pytest.mark.parametrize(
    "bad",
    [
        StatePiece("model/w", (1 << 50,), 0),
        StatePiece("model/w", (-3,), 0),
        StatePiece("model/w", (4,), 2),
        None,
    ],
)
def test_pieces_of_a_state_that_cannot_be_are_refused_before_memory_is_taken(bad: StatePiece | None) -> None:
    """A shape of 2^50 elements ended the joining worker."""
    arriving = ArrivingState(Joiner(Mailbox(Worker(0, 0), incarnation=1)).take_state)
    envelope = Envelope(StateTransfer(1, 5, 1, 1), piece=bad)
    with pytest.raises(PeerError):
        arriving.take(frames.Incoming.whole(FrameKind.STATE, envelope, (torch.ones(4),)))
