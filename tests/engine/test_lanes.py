"""Lanes: transfers in announced order on a wire of their own, and what a break touches."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from everstep.engine.layers.software import computes_with
from everstep.errors import DeviceError, PeerError
from everstep.net import frames, lanes, nccl
from everstep.net.envelope import Envelope, FrameKind, LaneBroke, OpenLane
from everstep.net.lanes import Lane, LaneOrder, Lanes, LaneState, LaneTransfer
from everstep.net.links import Address, LinkEvents, Links
from everstep.net.nccl import NcclWire
from everstep.net.plane import (
    MAX_COMPUTES,
    Identity,
    bits_differ,
    chosen,
)
from everstep.net.turns import Traffic, Turns
from everstep.protocol.parcels import Parcel, ParcelKind
from harness.transports import PipeWire
from tests.support.processes import until

GPU_A, GPU_B = (Identity("ipc", f"boot {gpu}", "nccl 22809") for gpu in "ab")


@pytest.mark.parametrize(
    ("mine", "theirs", "by"),
    [
        (GPU_A, GPU_A, "ipc"),
        (GPU_A, GPU_B, "nccl"),
        (GPU_A, Identity("ipc", "boot b", "nccl 22907"), "tcp"),  # two versions do not talk
        (GPU_A, Identity("ipc", "boot b"), "tcp"),
        (Identity("tcp", "", "nccl 22809"), Identity("tcp", "", "nccl 22809"), "nccl"),  # asked for
        (Identity("tcp", ""), Identity("tcp", ""), "tcp"),
        (GPU_A, Identity("tcp", ""), "tcp"),
    ],
)
def test_the_transport_of_a_pair_follows_from_what_both_say(
    mine: Identity, theirs: Identity, by: str
) -> None:
    assert chosen(mine, theirs) == chosen(theirs, mine) == by
    assert Identity.decode(mine.encode()) == mine


def test_workers_that_compute_with_other_software_say_so() -> None:
    with_it, without = (Identity("tcp", "", "", f"torch 2, {what}") for what in ("front end", "none"))
    assert Identity.decode(with_it.encode()) == with_it
    sentence = bits_differ(with_it, without)
    assert sentence is not None
    assert "it computes with torch 2, none, this worker with torch 2, front end" in sentence
    assert bits_differ(with_it, with_it) is None
    assert bits_differ(with_it, Identity("tcp", "")) is None, "a task whose sums depend on their order"


def test_a_cpus_instructions_and_threads_are_part_of_what_it_computes_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = computes_with(torch.device("cpu"))
    assert computes_with(torch.device("cpu")) == here
    monkeypatch.setattr(torch, "get_num_threads", lambda: 17)
    more = computes_with(torch.device("cpu"))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SSE")
    assert len({here, more, computes_with(torch.device("cpu"))}) == 3
    assert "SSE" in computes_with(torch.device("cpu"))
    assert len(here) < MAX_COMPUTES


def test_a_gap_in_the_numbers_breaks_the_order() -> None:
    sender, receiver = LaneOrder(), LaneOrder()
    receiver.expect(sender.take())
    sender.take()
    with pytest.raises(PeerError, match="transfer 3 was announced where 2 was due"):
        receiver.expect(sender.take())


# ------------------------------------------------------------------ two ends


class Slow(PipeWire):
    """A wire that carries nothing until it is let."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self._gate, self._first = gate, True

    def is_done(self) -> bool:
        if not self._first and not self._gate.is_set():
            return False
        done = super().is_done()
        self._first = self._first and not done
        return done


class Waiting(PipeWire):
    """As a call to a GPU that waits, because another call does, for a transfer whose other end does not come.
    A kernel that is told to stop is over then: without an error, and with whatever it has written.
    """

    def __init__(self, *, waits: bool) -> None:
        super().__init__()
        self._is_first, self._waits, self._told = True, waits, threading.Event()

    def is_done(self) -> bool:
        if self._is_first or not self._waits:
            done = super().is_done()
            self._is_first = self._is_first and not done
            return done
        assert self._told.wait(20)
        return True

    def interrupt(self) -> None:
        self._told.set()


class LateName(PipeWire):
    """As NCCL's: making a name takes a while, and messages are posted meanwhile."""

    def name(self) -> bytes:
        time.sleep(0.1)
        return super().name()


class End:
    def __init__(self, wire: Callable[[], PipeWire] = PipeWire, *, most: int = 1000) -> None:
        self.got: queue.Queue[frames.Incoming] = queue.Queue()
        self.broken: queue.Queue[Address] = queue.Queue()
        self.said: list[str] = []
        self.links = Links(
            LinkEvents(deliver=self._arrived, broken=self._broke, failed=lambda error: None),
            token=b"secret",
            host="127.0.0.1",
            empty=lambda shape, dtype: torch.empty(shape, dtype=dtype),
        )
        self.failed: queue.Queue[BaseException] = queue.Queue()
        self.lanes = Lanes(
            self.links,
            wire,
            deliver=self.got.put,
            failed=self.failed.put,
            kind="pipe",
            most=most,
            log=self.said.append,
        )
        self.links.start()

    def _arrived(self, frame: frames.Incoming) -> None:
        if not self.lanes.take(frame):
            self.got.put(frame)

    def _broke(self, address: Address) -> None:
        self.lanes.link_broke(address)
        self.broken.put(address)

    def lane(self, to: End) -> Lane:
        lane = self.lanes.lane(to.links.address)
        assert lane is not None
        return lane

    def send(self, to: End, number: int, *tensors: Tensor) -> None:
        lane = self.lane(to)
        parcel = Parcel(ParcelKind.WEIGHTS, 0, number, 0, sender=0, owner=1)
        self.lanes.send(lane, parcel, Envelope(beside=number), self.lanes.reserve(lane, tensors))


@pytest.fixture
def ends() -> Iterator[Callable[..., End]]:
    made: list[End] = []

    def make(wire: Callable[[], PipeWire] = PipeWire, *, most: int = 1000) -> End:
        made.append(End(wire, most=most))
        return made[-1]

    yield make
    for end in made:
        end.lanes.stop()
        end.links.stop()


class SlowWire(PipeWire):
    """A transfer takes a twentieth of a second."""

    def begin(self, tensors: tuple[Tensor, ...]) -> None:
        time.sleep(0.05)
        super().begin(tensors)


def test_what_a_lane_has_sent_and_how_long_that_took_is_counted(ends: Callable[..., End]) -> None:
    """Rates of links between machines were those of sockets: of a slow NCCL lane nothing was seen."""
    a, b = ends(SlowWire), ends()
    for number in range(4):
        a.send(b, number, torch.zeros(1000), torch.zeros(10, dtype=torch.uint8))
    for _ in range(4):
        b.got.get(timeout=20)
    to = b.links.address
    until(lambda: a.lanes.progress()[to].acked_bytes == 4 * 4010)
    assert a.lanes.progress()[to].busy_s >= 4 * 0.05
    assert not a.lanes.progress()[to].waiting
    assert b.lanes.progress() == {}


@pytest.mark.parametrize("wire", [PipeWire, LateName])
def test_transfers_arrive_whole_and_in_order_with_their_facts(
    ends: Callable[..., End], wire: type[PipeWire]
) -> None:
    a, b = ends(wire), ends()
    sent = [torch.randn(300_000 + i) for i in range(8)]
    for number, tensor in enumerate(sent):
        a.send(b, number, tensor, tensor[:3].bfloat16(), torch.empty(0))
    for number, tensor in enumerate(sent):
        frame = b.got.get(timeout=20)
        assert frame.parcel is not None
        assert (frame.parcel.step, frame.envelope) == (number, Envelope(beside=number))
        assert torch.equal(frame.tensors[0], tensor)
        assert torch.equal(frame.tensors[1], tensor[:3].bfloat16())
        assert frame.tensors[2].numel() == 0
    assert a.lane(b).state is LaneState.READY
    until(lambda: not a.lanes.borrows(sent[0]))


def test_both_directions_at_once_do_not_wait_for_each_other(ends: Callable[..., End]) -> None:
    a, b = ends(), ends()
    large = torch.randn(4 << 20)
    for number in range(3):
        a.send(b, number, large)
        b.send(a, number, large)
    for end in (a, b):
        for _ in range(3):
            assert torch.equal(end.got.get(timeout=20).tensors[0], large)


def test_one_thread_moves_all_open_lanes_and_one_that_stands_still_holds_up_no_other(
    ends: Callable[..., End],
) -> None:
    gate, wires = threading.Event(), iter([True] + [False] * 20)
    before = set(threading.enumerate())
    a, peers = ends(lambda: Slow(gate) if next(wires) else PipeWire()), [ends() for _ in range(6)]
    for peer in peers:
        a.send(peer, 0, torch.ones(4))
    for number in range(1, 4):
        for peer in peers[1:]:
            a.send(peer, number, torch.full((1000,), float(number)))
    for peer in peers[1:]:
        assert [peer.got.get(timeout=20).envelope.beside for _ in range(4)] == [0, 1, 2, 3]
    until(lambda: a.lane(peers[0]).state is LaneState.READY)
    assert peers[0].got.empty()

    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread not in before]

    until(lambda: not [name for name in names() if name.startswith("lane ")])  # which opened them
    assert names().count("lanes") == 1 + len(peers), "one in every worker"
    gate.set()
    assert peers[0].got.get(timeout=20).envelope.beside == 0


@pytest.mark.parametrize("at_sender", [True, False])
def test_a_transfer_for_which_even_the_thread_of_the_lanes_waits_is_interrupted(
    ends: Callable[..., End], monkeypatch: pytest.MonkeyPatch, at_sender: bool
) -> None:
    """Eight workers of one GPU waited for each other in a circle, until the coordinator ended them."""
    waits = iter([True])
    waiting = lambda: Waiting(waits=next(waits, False))  # noqa: E731
    a, b, c = ends(waiting if at_sender else PipeWire), ends(PipeWire if at_sender else waiting), ends()
    first = a.lane(b)
    until(lambda: b.lanes._wired)
    opened = [first, a.lane(c), b.lane(c)]
    until(lambda: all(lane.state is LaneState.READY for lane in [*opened, *b.lanes._wired, *c.lanes._wired]))
    monkeypatch.setattr(lanes, "LATE_S", 0.3)
    a.send(b, 1, sent := torch.ones(50_000))
    for end in (a, b):
        end.send(c, 2, torch.full((2,), 2.0))
    assert a.broken.get(timeout=20) == b.links.address, "what it had is sent again by who owes it"
    assert {tuple(c.got.get(timeout=20).tensors[0].tolist()) for _ in range(2)} == {(2.0, 2.0)}
    said = [line for end in (a, b) for line in end.said if "a transfer was not over after 0." in line]
    assert said
    until(lambda: not a.lanes.borrows(sent))
    monkeypatch.undo()
    a.send(b, 3, torch.full((3,), 3.0))
    assert a.lane(b) is not first
    frame = b.got.get(timeout=20)
    assert frame.envelope.beside == 3
    assert torch.equal(frame.tensors[0], torch.full((3,), 3.0))
    assert b.got.empty()


@pytest.mark.parametrize(("nbytes", "lasts_s"), [(0, 3.0), (100_000_000, 13.0), (1 << 40, 3.0 + 2**40 / 1e7)])
def test_a_transfer_is_late_after_a_time_for_its_bytes(nbytes: int, lasts_s: float) -> None:
    wire = PipeWire()
    lane = Lane("a/1", Address("a", 1), sends=True, wire=wire)
    assert lanes._is_late(lane, 1e9) is None, "nothing is on the wire"
    wire._began = 100.0
    lane.moving = LaneTransfer((torch.empty(nbytes, dtype=torch.uint8, device="meta"),))
    assert lanes._is_late(lane, 100.0 + lasts_s - 0.01) is None
    assert lanes._is_late(lane, 100.0 + lasts_s + 0.01) == pytest.approx(lasts_s + 0.01)


def test_attempts_to_open_a_lane_are_forgiven_after_a_time(
    ends: Callable[..., End], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = ends(), ends()
    for _ in range(3):
        a.send(b, 1, torch.ones(1))
        b.got.get(timeout=20)
        a.lanes._broke(a.lane(b), "a test")
        a.broken.get(timeout=20)
    assert a.lanes.lane(b.links.address) is None
    monkeypatch.setattr(lanes, "LATELY_S", 0.0)
    assert a.lanes.lane(b.links.address) is not None


def test_so_many_lanes_send_at_once_and_the_others_have_their_turn(ends: Callable[..., End]) -> None:
    """Each occupies the device until its receiver is there."""
    most = [0]

    class Counted(SlowWire):
        def begin(self, tensors: tuple[Tensor, ...]) -> None:
            if a.lanes._open:  # it is no opening
                sending = [lane for lane in a.lanes._wired if lane.sends and lane.moving is not None]
                most[0] = max(most[0], len(sending))
            super().begin(tensors)

        def is_done(self) -> bool:
            return self._began is not None and time.monotonic() > self._began + 0.02 and super().is_done()

    a, peers = ends(Counted, most=2), [ends() for _ in range(5)]
    for peer in peers:
        a.lane(peer)
    until(lambda: len(a.lanes._open) == len(peers))
    order: list[int] = []
    for number, peer in enumerate(peers):
        deliver = lambda frame, number=number: order.append(number)  # noqa: E731
        peer.lanes._deliver = deliver
    for number in range(6):
        a.send(peers[0], number, torch.ones(4))
    for peer in peers[1:]:
        a.send(peer, 0, torch.ones(4))
    until(lambda: len(order) == 10)
    assert most[0] == 2
    assert set(order[:5]) == set(range(5)), "one that has much to send keeps no other from its turn"


def test_so_many_lanes_receive_at_once_and_the_others_have_their_turn(ends: Callable[..., End]) -> None:
    most = [0]

    class Counted(Slow):
        def begin(self, tensors: tuple[Tensor, ...]) -> None:
            receiving = [lane for lane in a.lanes._wired if not lane.sends and lane.moving is not None]
            most[0] = max(most[0], len(receiving))
            super().begin(tensors)

    gate = threading.Event()
    a, peers = ends(lambda: Counted(gate), most=2), [ends() for _ in range(5)]
    for number, peer in enumerate(peers):
        peer.send(a, number, torch.ones(4))
        peer.send(a, number, torch.ones(4))
    until(lambda: sum(lane.work.qsize() for lane in a.lanes._open) == 8)
    gate.set()
    assert Counter(a.got.get(timeout=20).envelope.beside for _ in range(10)) == dict.fromkeys(range(5), 2)
    assert most[0] == 2


def test_workers_that_rest_at_once_all_come_to_rest_and_nothing_is_lost(ends: Callable[..., End]) -> None:
    """Each has messages on their way to and from all others whenever it asks."""
    made, messages, rests = [ends(most=2) for _ in range(4)], 60, 15
    taken: Counter[End] = Counter()

    def send(end: End) -> None:
        for number in range(messages):
            for to in made:
                if to is not end:
                    end.send(to, number, torch.full((5000,), float(number)))
            time.sleep(1e-3)

    def rest(end: End) -> None:
        while taken[end] < rests:
            with end.lanes.at_rest() as is_there:
                moving = [lane.name for lane in end.lanes._wired if lane.moving is not None]
                assert is_there
                assert not moving
                time.sleep(1e-3)
                taken[end] += 1

    threads = [threading.Thread(target=what, args=(end,)) for what in (send, rest) for end in made]
    for thread in threads:
        thread.start()
    for end in made:
        got = Counter(end.got.get(timeout=20).envelope.beside for _ in range(3 * messages))
        assert got == dict.fromkeys(range(messages), 3)
    for thread in threads:
        thread.join(timeout=20)
    assert taken == dict.fromkeys(made, rests)


def test_in_rest_a_message_waits_and_a_lane_is_not_connected(ends: Callable[..., End]) -> None:
    a, b, c = ends(), ends(), ends()
    a.send(b, 1, torch.ones(1))
    b.got.get(timeout=20)
    with a.lanes.at_rest() as rests:
        assert rests
        a.send(b, 2, torch.ones(1))
        opening = a.lane(c)
        with pytest.raises(queue.Empty):
            b.got.get(timeout=0.3)
        assert opening.state is LaneState.OPENING
    assert b.got.get(timeout=20).envelope.beside == 2
    until(lambda: opening.state is LaneState.READY)


def test_rest_is_not_waited_for_longer_than_messages_take(
    ends: Callable[..., End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "REST_WITHIN_S", 0.1)
    gate = threading.Event()
    a, b = ends(), ends(lambda: Slow(gate))
    a.send(b, 1, torch.ones(1))
    until(lambda: any(lane.moving for lane in b.lanes._wired))
    with b.lanes.at_rest() as rests:
        assert not rests
        b.send(a, 2, torch.ones(1))
    gate.set()
    assert b.got.get(timeout=20).envelope.beside == 1
    assert a.got.get(timeout=20).envelope.beside == 2


def test_who_asks_for_rest_still_answers() -> None:
    turns = Turns(2)
    assert turns.take("a", Traffic.SENDS)
    assert not turns.rests()
    assert not turns.take("b", Traffic.SENDS), "another one would have to answer"
    assert turns.take("c", Traffic.RECEIVES)
    assert turns.take("d", Traffic.OPENS)
    for lane, what in (("a", Traffic.SENDS), ("c", Traffic.RECEIVES)):
        turns.ended(lane, what)
    assert not turns.rests()
    turns.ended("d", Traffic.OPENS)
    assert turns.rests()
    assert not any(turns.take("e", what) for what in Traffic)
    turns.resume()
    assert turns.take("e", Traffic.SENDS)


class IdleNccl:
    """Takes every call, and does nothing: what a wire asks of it, where there is no GPU."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*given: Any) -> int:
            self.called.append(name)
            if name == "ncclCommInitRankConfig":
                given[0]._obj.value = 5
            if name == "ncclCommGetAsyncError":
                given[1]._obj.value = nccl.SUCCESS
            return 0

        if not name.startswith("nccl"):
            raise AttributeError(name)
        return call


def no_gpu(monkeypatch: pytest.MonkeyPatch, library: IdleNccl, moment: Any, make: Any) -> None:
    nccl._idle.cache_clear()
    monkeypatch.setattr(nccl, "library", lambda: library)
    monkeypatch.setattr(nccl, "_own_stream", make)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", moment)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: None)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)


@pytest.mark.parametrize("sends", [True, False])
def test_a_transfer_that_an_abort_does_not_end_is_an_error(
    monkeypatch: pytest.MonkeyPatch, sends: bool
) -> None:
    """`leave` returned as done: the lane let go of memory that the device was still in."""

    class Never:
        cuda_stream = 7

        def record(self, stream: object) -> None: ...

        def query(self) -> bool:
            return False

    library, here = IdleNccl(), torch.device("cpu")
    no_gpu(monkeypatch, library, Never, lambda device: Never())
    monkeypatch.setattr(nccl, "LEAVE_WITHIN_S", 0.01)
    wire = NcclWire(here)
    wire.begin_open(wire.name(), sends=sends)
    assert wire.is_open()
    wire.begin((wire.empty((4,), torch.float32),))
    assert not wire.is_done()
    with pytest.raises(DeviceError, match="still on the device"):
        wire.leave()
    assert "ncclCommAbort" in library.called
    assert nccl._idle(here, sends).qsize() == 0, "its stream is not given to another transfer"


def test_a_lane_that_cannot_be_left_keeps_what_it_borrows_and_ends_the_worker(
    ends: Callable[..., End],
) -> None:
    class Held(PipeWire):
        def leave(self) -> None:
            raise DeviceError("a transfer is still on the device")

    gate = threading.Event()
    a, b = ends(Held), ends(lambda: Slow(gate))
    a.send(b, 1, torch.ones(1))
    lane = a.lane(b)
    until(lambda: lane.state is LaneState.READY)
    borrowed = torch.ones(5)
    transfer = a.lanes.reserve(lane, (borrowed,))
    assert transfer.tensors
    a.lanes.forget(set())
    assert isinstance(a.failed.get(timeout=20), DeviceError)
    assert a.lanes.borrows(borrowed)
    gate.set()


@pytest.mark.parametrize("sends", [True, False])
def test_a_wire_of_nccl_has_a_stream_only_while_something_moves(
    monkeypatch: pytest.MonkeyPatch, sends: bool
) -> None:
    library, is_over = IdleNccl(), [False]
    made: list[Any] = []

    class Moment:
        cuda_stream = 7

        def record(self, stream: object) -> None:
            is_over[0] = False

        def query(self) -> bool:
            return is_over[0]

    def make(device: torch.device) -> Moment:
        made.append(Moment())
        return made[-1]

    here, idle = torch.device("cpu"), nccl._idle
    no_gpu(monkeypatch, library, Moment, make)
    wire = NcclWire(here)
    wire.begin_open(wire.name(), sends=sends)
    assert wire.is_open()
    for _ in range(3):  # the first one opens it
        tensor = wire.empty((4,), torch.float32)
        wire.begin((tensor,))
        assert not wire.is_done()
        assert idle(here, sends).qsize() == 0
        assert wire.waits_since() is not None
        is_over[0] = True
        assert wire.is_done()
        assert idle(here, sends).qsize() == 1
        assert wire.waits_since() is None
    wire.begin((tensor,))
    assert not wire.is_done()
    wire.interrupt()
    wire.interrupt()
    assert library.called.count("ncclCommShrink") == 1
    is_over[0] = True
    wire.leave()
    wire.close()
    assert idle(here, sends).qsize() == 1
    with pytest.raises(PeerError):
        wire.begin((tensor,))
    assert len(made) == 1, "all used one and the same"
    wires = [NcclWire(here) for _ in range(3)]
    for one in wires:
        one.begin_open(one.name(), sends=sends)
        one.begin((tensor,))
    assert len({id(one._on) for one in wires}) == len(made) == 3, "none shares its stream"
    other = NcclWire(here)
    other.begin_open(other.name(), sends=not sends)
    other.begin((tensor,))
    assert len(made) == 4, "what is received has streams of its own"
    for begun in (True, False):  # left before it was open
        unused = NcclWire(here)
        if begun:
            unused.begin_open(unused.name(), sends=sends)
        unused.leave()
        unused.close()


@pytest.mark.parametrize(
    ("given", "set_to", "is_told"),
    [
        ("", "8", False),
        ("1", "8", True),
        ("8", "8", False),
        ("32", "32", False),
        ("64", "8", True),
        ("many", "8", True),
        ("9" * 5000, "8", True),
    ],
)
def test_fewer_than_eight_queues_of_a_gpu_are_not_taken_over(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: str,
    set_to: str,
    is_told: bool,
) -> None:
    """Scripts of Megatron are started with a single one: transfers could wait behind each other."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=lo")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    if not given:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    nccl.prepare("127.0.0.1", alone=False)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == set_to
    said = capsys.readouterr()
    assert (f"CUDA_DEVICE_MAX_CONNECTIONS={given} is taken for 8" in said.out + said.err) == is_told


def test_a_tensor_is_borrowed_from_its_reservation_until_the_wire_has_let_go(
    ends: Callable[..., End],
) -> None:
    gate = threading.Event()
    a, b = ends(lambda: Slow(gate)), ends()
    buffer, other = torch.randn(1000), torch.randn(10)
    lane = a.lane(b)
    assert not a.lanes.borrows(buffer)
    a.lanes.reserve(lane, (other,))
    assert a.lanes.borrows(other)
    a.send(b, 1, buffer[100:200])
    until(lambda: lane.state is LaneState.READY)
    assert a.lanes.borrows(buffer), "a view of it is on its way"
    gate.set()
    b.got.get(timeout=20)
    until(lambda: not a.lanes.borrows(buffer))
    assert a.lanes.borrows(other), "not sent yet"


def test_a_dead_peer_breaks_its_lanes_and_no_others(ends: Callable[..., End]) -> None:
    gate = threading.Event()
    a, dead, live = ends(lambda: Slow(gate)), ends(), ends()
    a.send(live, 1, torch.ones(1))
    stuck = torch.ones(5)
    a.send(dead, 1, stuck)
    lane, other = a.lane(dead), a.lane(live)
    until(lambda: lane.state is LaneState.READY and other.state is LaneState.READY)
    a.lanes.forget({live.links.address})
    assert lane.state is LaneState.BROKEN
    until(lambda: not a.lanes.borrows(stuck))
    gate.set()
    assert live.got.get(timeout=20).envelope.beside == 1
    a.send(live, 2, torch.ones(1))
    assert live.got.get(timeout=20).envelope.beside == 2
    assert other.state is LaneState.READY
    assert a.broken.empty(), "no link of a live peer was touched"


def test_a_wire_that_breaks_counts_as_a_broken_link_at_the_sender(ends: Callable[..., End]) -> None:
    gate = threading.Event()
    a, b = ends(), ends(lambda: Slow(gate))
    a.send(b, 1, torch.ones(1))
    first = a.lane(b)
    until(lambda: first.state is LaneState.READY and b.lanes._from)
    (end,) = b.lanes._from.values()
    b.lanes._broke(end, "a test")  # the receiver cannot go on
    assert a.broken.get(timeout=20) == b.links.address
    assert first.state is LaneState.BROKEN
    gate.set()
    a.send(b, 2, torch.full((3,), 2.0))  # on a new lane
    assert a.lane(b) is not first
    frame = b.got.get(timeout=20)
    assert frame.envelope.beside == 2, (
        "what the broken lane had is sent again by who owes it, not by the lane"
    )


@pytest.mark.parametrize("error", [PeerError("no"), ValueError("a device without a number")])
def test_a_lane_that_cannot_be_opened_is_given_up_after_a_few_attempts(
    ends: Callable[..., End], error: Exception
) -> None:
    class Never(PipeWire):
        def begin_open(self, name: bytes, *, sends: bool) -> None:
            raise error

    a, b = ends(Never), ends()
    for _ in range(3):
        lane = a.lanes.lane(b.links.address)
        assert lane is not None
        until(lambda lane=lane: lane.state is LaneState.BROKEN and b.links.address not in a.lanes._to)
    assert a.lanes.lane(b.links.address) is None, "tcp has to do"
    a.links.send(b.links.address, Parcel(ParcelKind.WEIGHTS, 0, 1, 0), Envelope(beside=1))
    assert b.got.get(timeout=20).envelope.beside == 1
    assert a.broken.empty(), "nothing was lost: no link is broken for it"


def test_an_error_of_one_wire_ends_no_other_lane(ends: Callable[..., End]) -> None:
    class Fails(PipeWire):
        def begin(self, tensors: tuple[Tensor, ...]) -> None:
            if tensors[0].numel() == 5:
                raise ValueError("no five numbers")
            super().begin(tensors)

    a, b, c = ends(Fails), ends(), ends()
    for peer in (b, c):
        a.send(peer, 1, torch.ones(1))
        assert peer.got.get(timeout=20).envelope.beside == 1
    a.send(b, 2, torch.ones(5))
    assert a.broken.get(timeout=20) == b.links.address
    a.send(c, 2, torch.ones(2))
    assert c.got.get(timeout=20).envelope.beside == 2


@pytest.mark.parametrize(
    "opening",
    [
        OpenLane("", "h", 1, ""),
        OpenLane("x" * 200, "h", 1, ""),
        OpenLane("l", "h", 0, ""),
        OpenLane("l", "h", 1 << 16, ""),
        OpenLane("l", "h", 1, "xyz"),
    ],
)
def test_an_opening_that_cannot_be_is_refused(ends: Callable[..., End], opening: OpenLane) -> None:
    end = ends()
    with pytest.raises(PeerError):
        end.lanes.take(frames.Incoming.whole(FrameKind.LANE, Envelope(opening), ()))
    assert end.lanes.take(frames.Incoming.whole(FrameKind.LANE, Envelope(LaneBroke("of nobody")), ()))
