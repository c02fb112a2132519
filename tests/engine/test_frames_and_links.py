"""Messages between workers: what goes in comes out, and what is not ours is refused."""

import json
import queue
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import PeerError, UserError
from everstep.net import frames
from everstep.net.envelope import (
    DTYPES,
    Envelope,
    Form,
    FrameKind,
    OnLane,
    OpenLane,
    StateEnd,
    StatePiece,
    type_number,
)
from everstep.net.handshake import ANSWER, HELLO, PROOF, Acceptor, Opener
from everstep.net.links import Address, LinkEvents, Links
from everstep.net.seal import Suite
from everstep.net.sockets import listening
from everstep.protocol.ops import Microbatch
from everstep.protocol.parcels import Parcel, ParcelKind, Part, RunHashes, StateTransfer, StepHashes

TOKEN = b"t" * 32
PART = Part((Microbatch(0, 1), Microbatch(1, 0)), ((Microbatch(0, 1), 2.5),), 6, (3.0, 0.0))
SAID = {  # of every kind that has a value
    ParcelKind.PART: PART,
    ParcelKind.SUM: (0.5,),
    ParcelKind.COPY: (0.5, PART),
    ParcelKind.NEWS: 2.0,
    ParcelKind.FEED: 0.25,
    ParcelKind.HASHES: StepHashes(2, "cpu", {"w": "a1"}, {"0.1": {"loss": "b2"}}),
    ParcelKind.ANSWER: RunHashes(2, ({"loss": "b2"}, {})),
}
PIECE = {ParcelKind.FILL: StateEnd(3)}


def received(data: bytes, chunk: int = 1 << 20) -> frames.Incoming:
    frame = frames.Incoming(lambda shape, dtype: torch.empty(shape, dtype=dtype))
    whole = False
    while data:
        count = min(len(frame.want), len(data), chunk)
        frame.want[:count] = data[:count]
        data = data[count:]
        whole = frame.took(count)
    assert whole
    return frame


@given(
    what=st.sampled_from(list(ParcelKind)),
    numbers=st.lists(st.integers(0, 2**31 - 1), min_size=5, max_size=5),
    microbatch=st.none() | st.builds(Microbatch, st.integers(0, 99), st.integers(0, 99)),
    chunk=st.integers(1, 99),
    forms=st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=4), st.sampled_from(DTYPES)), max_size=4),
)
def test_a_message_arrives_as_it_was_sent(what, numbers, microbatch, chunk, forms) -> None:
    attempt, step, stage, round_, sender = numbers
    parcel = Parcel(what, attempt, step, stage, microbatch, round_, sender, 3)
    tensors = [torch.randint(0, 2, shape).to(dtype) for shape, dtype in forms]
    payload = b"".join(bytes(frames.raw(tensor)) for tensor in tensors)
    envelope = Envelope(SAID.get(what), {"x": [1.5, None]}, piece=PIECE.get(what))
    frame = received(frames.encode(parcel, envelope, *tensors) + payload, chunk)
    assert (frame.kind, frame.parcel, frame.envelope) == (what, parcel, envelope)
    assert [t.dtype for t in frame.tensors] == [dtype for _, dtype in forms]
    assert all(torch.equal(a, b) for a, b in zip(frame.tensors, tensors, strict=True))


@pytest.mark.parametrize(
    ("what", "envelope"),
    [
        (ParcelKind.PART, Envelope(PART)),
        (ParcelKind.PART, Envelope(PART._replace(scores=((Microbatch(0, 1), (1.5, 2.0)),)))),
        (ParcelKind.COPY, Envelope((0.25, PART))),
        (ParcelKind.COPY, Envelope((None, None))),
        (ParcelKind.SUM, Envelope((1.0, 2.5))),
        (ParcelKind.FEED, Envelope()),
        (FrameKind.STATE, Envelope(StateTransfer(1, 2, 3, 4), piece=StatePiece("a", (2, 3), 4))),
        (ParcelKind.ACTIVATION, Envelope(where=OnLane("h:1/2", 7, (Form((3, 4), 1), Form((), 0))))),
        (FrameKind.LANE, Envelope(OpenLane("h:1/2", "h", 1, "006d"))),
    ],
)
def test_what_a_message_says_survives_the_wire(what: ParcelKind | FrameKind, envelope: Envelope) -> None:
    assert Envelope.decode(what, envelope.encode()) == envelope


LANE = {"is": "OnLane", "lane": "a", "number": 1, "forms": []}
OPEN = {"is": "OpenLane", "lane": "a", "host": "h", "port": "1", "meet": ""}


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("PART", [None, None, None, None]),
        ("PART", [[["0.0"], [], "many", [1.0], []], None, None, None]),
        ("SUM", [7, None, None, None]),
        ("NEWS", [None, None, None, None]),
        ("NEWS", [1.0, None, None, {"is": "StateEnd", "pieces": 1}]),
        ("HELD", [7, None, None, None]),
        ("HELD", [None, None, None]),
        ("HELD", {"value": None}),
        ("HELD", [None, None, {"is": "Elsewhere"}, None]),
        ("HELD", [None, None, LANE | {"number": True}, None]),
        ("HELD", [None, None, LANE | {"forms": [[[2], 99]]}, None]),
        ("HELD", [None, None, LANE | {"forms": [[[-2], 0]]}, None]),
        ("HELD", [None, None, LANE | {"forms": [[[1 << 40], 0]]}, None]),
        ("HELD", [None, None, LANE | {"forms": [[[1] * 9, 0]]}, None]),
        ("HELD", [None, None, LANE | {"forms": [[["2"], 0]]}, None]),
        ("HELD", [None, None, LANE | {"forms": [[[1], 0]] * 5000}, None]),
        ("HELD", [None, None, {"is": "InMemory", "places": [["a", ["h", 1], [[2], 0]]]}, None]),
        ("FILL", [None, None, None, None]),
        ("FILL", [None, None, None, {"is": "StatePiece", "name": "0", "shape": None, "at": 0}]),
        ("FILL", [None, None, None, {"is": "StatePiece", "shape": [4], "at": 0}]),
        ("LANE", [OPEN, None, None, None]),
        ("LANE", [None, None, None, None]),
        ("STATE", [[1, 2, 3], None, None, {"is": "StateEnd", "pieces": 1}]),
    ],
)
def test_what_is_not_declared_is_refused(what: str, told: object) -> None:
    kinds = {**ParcelKind.__members__, **FrameKind.__members__}
    with pytest.raises(PeerError):
        Envelope.decode(kinds[what], json.dumps(told).encode())


def head(kind: bytes, *, tensors: int = 0, shapes: int = 0, facts: int = 0) -> bytes:
    return frames.HEAD.pack(frames.MAGIC, kind, tensors, shapes, facts, *[0] * 8)


def form(dtype: int, *shape: int) -> bytes:
    return struct.pack(f"<BB{len(shape)}q", dtype, len(shape), *shape)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"GET / HTTP/1.1\r\n" + bytes(64), "not a message"),
        (head(b"?"), "unknown kind"),
        (head(b"A", tensors=9999), "not a message"),
        (head(b"A", shapes=10), "not a message"),
        (head(b"A", facts=2**32 - 1), "not a message"),
        (head(b"A", tensors=1, shapes=18) + form(0, 2**40, 2**40), "more than any"),
        (head(b"A", tensors=1, shapes=10) + form(0, -1), "cannot be"),
        (head(b"A", tensors=2, shapes=20) + 2 * form(0, 2**34), "more than any"),
        (head(b"A", tensors=1, shapes=2) + bytes([99, 0]), "cannot be"),
        (head(b"A", tensors=1, shapes=2) + bytes([0, 3]), "cannot be read"),
        (head(b"A", tensors=1, shapes=18) + form(0, 1) + bytes(8), "cannot be read"),
        (head(b"H", facts=3) + b"{]}", "not JSON"),
    ],
)
def test_what_is_not_a_message_is_refused_before_memory_is_taken(sent: bytes, why: str) -> None:
    with pytest.raises(PeerError, match=why):
        received(sent)


class End:
    """One worker's links and what they delivered."""

    def __init__(self, host: str = "127.0.0.1", bind: str = "") -> None:
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.opened: queue.SimpleQueue = queue.SimpleQueue()
        events = LinkEvents(
            deliver=lambda f: self.inbox.put(("frame", f)),
            broken=lambda a: self.inbox.put(("broken", a)),
            opened=self.opened.put,
            failed=lambda e: self.inbox.put(("failed", e)),
        )
        self.links = Links(
            events,
            token=TOKEN,
            host=host,
            listener=listening(bind) if bind else None,
            empty=lambda shape, dtype: torch.empty(shape, dtype=dtype),
        )
        self.links.start()


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    pair = End(), End()
    yield pair
    for end in pair:
        end.links.stop()


def name(step: int) -> Parcel:
    return Parcel(ParcelKind.ACTIVATION, 0, step, 1, Microbatch(0, 0))


@pytest.mark.parametrize(
    ("host", "bind", "told"),
    [("::1", "", "::1"), ("127.0.0.1", "0.0.0.0", "127.0.0.1"), ("localhost", "127.0.0.1", "127.0.0.1")],
)
def test_links_listen_at_one_address_and_tell_another_by_ipv4_or_ipv6(
    host: str, bind: str, told: str
) -> None:
    """`--host` was both, and IPv4 alone: peers of a node behind NAT, or of IPv6, could not be reached."""
    here, there = End(host, bind), End(host, bind)
    try:
        assert there.links.address.host == told
        here.links.send(there.links.address, name(1), Envelope(), torch.ones(3))
        kind, frame = there.inbox.get(timeout=20)
        assert (kind, frame.parcel) == ("frame", name(1))
    finally:
        here.links.stop()
        there.links.stop()


def test_messages_of_any_size_arrive_in_the_order_they_were_sent(ends: tuple[End, End]) -> None:
    here, there = ends
    tensors = [torch.full((size,), float(i)) for i, size in enumerate([1, 0, 3_000_000, 7, 1_000_000, 2])]
    for step, tensor in enumerate(tensors):
        here.links.send(there.links.address, name(step), Envelope(), tensor)
    for step, tensor in enumerate(tensors):
        kind, frame = there.inbox.get(timeout=20)
        assert (kind, frame.parcel) == ("frame", name(step))
        assert torch.equal(frame.tensor, tensor)


def test_a_peer_that_is_gone_is_reported_and_the_others_go_on(ends: tuple[End, End]) -> None:
    here, there = ends
    third = End()
    here.links.send(third.links.address, name(1), Envelope(), torch.ones(3))
    assert third.inbox.get(timeout=20)[0] == "frame"
    third.links.stop()
    assert here.inbox.get(timeout=20) == ("broken", third.links.address)
    here.links.send(there.links.address, name(2), Envelope(), torch.ones(3))
    assert there.inbox.get(timeout=20)[1].parcel == name(2)


def test_a_connection_counts_as_open_when_the_peer_has_answered(ends: tuple[End, End]) -> None:
    """A listener's kernel accepts a connection though its process does nothing any more."""
    here, there = ends
    with socket.create_server(("127.0.0.1", 0)) as silent:
        here.links.send(Address(*silent.getsockname()), name(1), Envelope(), torch.ones(3))
        line, _ = silent.accept()
        here.links.send(there.links.address, name(2), Envelope(), torch.ones(3))
        assert here.opened.get(timeout=20) == there.links.address
        line.close()
    assert here.opened.empty()


def test_nobody_listens_at_an_address_is_reported_too(ends: tuple[End, End]) -> None:
    here, _ = ends
    with socket.create_server(("127.0.0.1", 0)) as server:
        nowhere = Address(*server.getsockname())
    here.links.send(nowhere, name(1), Envelope(), torch.ones(3))
    assert here.inbox.get(timeout=20) == ("broken", nowhere)


def closed(sock: socket.socket) -> bool:
    sock.settimeout(20)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_who_listens_at_an_old_address_is_not_sent_the_secret(ends: tuple[End, End]) -> None:
    here, _ = ends
    with socket.create_server(("127.0.0.1", 0)) as imposter:
        where = Address(*imposter.getsockname())
        here.links.send(where, name(1), Envelope(), torch.ones(3))
        line, _ = imposter.accept()
        with line:
            line.settimeout(20)
            heard = line.recv(HELLO, socket.MSG_WAITALL)
            line.sendall(bytes(ANSWER - 3) + bytes([1 << Suite.PLAIN, 0, 0]))  # all in order but the proof
            heard += line.recv(1 << 16)
        assert len(heard) == HELLO
        assert TOKEN not in heard
        assert here.inbox.get(timeout=20) == ("broken", where)


def test_idle_connections_until_no_descriptor_is_left_do_not_end_a_worker() -> None:
    code = """
import resource, socket, sys, torch
resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
from everstep.net.links import LinkEvents, Links
events = LinkEvents(deliver=lambda f: print(f.parcel.step, flush=True),
                    broken=lambda a: None, failed=lambda e: print("failed", e, flush=True))
links = Links(events, token=b"t" * 32, host="127.0.0.1",
              empty=lambda shape, dtype: torch.empty(shape, dtype=dtype))
links.start()
print(links.address.port, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        there = Address("127.0.0.1", int(worker.stdout.readline()))
        idle = [socket.create_connection(there) for _ in range(100)]
        here = End()
        here.links.send(there, name(7), Envelope(), torch.ones(3))
        assert worker.stdout.readline() == "7\n"
        for sock in idle:
            sock.close()
        here.links.stop()
        worker.stdin.close()


def test_the_kernel_is_told_to_give_up_a_path_that_swallows_everything(ends: tuple[End, End]) -> None:
    here, there = ends
    here.links.send(there.links.address, name(1), Envelope(), torch.ones(3))
    there.inbox.get(timeout=20)
    ((_, sock),) = here.links.sockets()
    assert 0 < sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 10_000
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_stranger_without_the_token_is_shown_the_door(ends: tuple[End, End]) -> None:
    here, there = ends
    with socket.create_connection(there.links.address) as stranger:
        stranger.sendall(b"x" * 32 + frames.encode(name(1), Envelope()))
        assert closed(stranger)
    with socket.create_connection(there.links.address) as stranger:  # speaks our language, not our secret
        opener = Opener(b"u" * 32)
        stranger.sendall(opener.hello())
        assert len(stranger.recv(ANSWER, socket.MSG_WAITALL)) == ANSWER
        stranger.sendall(bytes(1 + PROOF) + frames.encode(name(1), Envelope()))
        assert closed(stranger)
    here.links.send(there.links.address, name(2), Envelope(), torch.ones(3))
    assert there.inbox.get(timeout=20)[1].parcel == name(2)
    assert there.inbox.empty()


def test_a_sender_is_not_held_up_by_a_receiver_that_does_not_read(ends: tuple[End, End]) -> None:
    here, there = ends
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address(*server.getsockname())
        for step in range(50):
            here.links.send(address, name(step), Envelope(), torch.ones(1_000_000))
        deaf, _ = server.accept()
        with deaf:
            deaf.settimeout(20)
            acceptor = Acceptor(TOKEN)
            while acceptor.wants:  # it is one of ours, takes the first bytes, and then reads no more
                deaf.sendall(acceptor.feed(deaf.recv(acceptor.wants)))
            assert deaf.recv(1 << 16, socket.MSG_WAITALL), "frames flow"
            here.links.send(there.links.address, name(99), Envelope(), torch.ones(3))
            assert there.inbox.get(timeout=20)[1].parcel == name(99)
            assert here.links.queued(address) > 100_000_000, "what it does not read waits here"


def test_no_two_kinds_of_frames_have_one_letter() -> None:
    """A chunk's state was once taken for the opening of a lane."""
    letters = [*ParcelKind, *FrameKind]
    assert len({str(letter) for letter in letters}) == len(letters)


def test_a_type_without_whole_bytes_is_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match=r"a tensor of quint4x2 cannot be sent to another worker"):
        type_number(torch.quint4x2)
