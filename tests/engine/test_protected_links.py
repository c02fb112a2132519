"""What workers send each other cannot be changed or played again, nor read if the job asks for it."""

import contextlib
import queue
import socket
from collections.abc import Iterator

import pytest
import torch

from everstep.errors import PeerError, UserError
from everstep.job.job import Job, NetSpec
from everstep.net import seal
from everstep.net.envelope import Envelope
from everstep.net.frames import HEAD
from everstep.net.handshake import HELLO, NONCE, PROOF, Acceptor, Opener
from everstep.net.links import Address, LinkEvents, Links
from everstep.net.plane import chosen, identity_of
from everstep.net.seal import CHUNK_BYTES, TAG_BYTES, Sealer, Suite, TamperedError, Unsealer
from everstep.protocol.ops import Microbatch
from everstep.protocol.parcels import Parcel, ParcelKind
from tests.support.tap import Tap

SECRET = b"sixteen secret bytes, then more!"
needs_cryptography = pytest.mark.skipif(
    not seal.is_available(Suite.AES_GCM), reason="the package cryptography is not installed"
)
SEALED = [
    Suite.BLAKE2B,
    pytest.param(Suite.GMAC, marks=needs_cryptography),
    pytest.param(Suite.AES_GCM, marks=needs_cryptography),
]


class End:
    def __init__(self, suite: Suite, secret: bytes = SECRET) -> None:
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.broken: queue.SimpleQueue = queue.SimpleQueue()
        self.links = Links(
            LinkEvents(deliver=self.inbox.put, broken=self.broken.put, failed=self.inbox.put),
            token=secret,
            host="127.0.0.1",
            empty=lambda shape, dtype: torch.empty(shape, dtype=dtype),
            accepts=lambda host: (suite,),
        )
        self.links.start()


@pytest.fixture(params=SEALED)
def suite(request: pytest.FixtureRequest) -> Suite:
    found: Suite = request.param
    return found


@pytest.fixture
def ends(suite: Suite) -> Iterator[tuple[End, End]]:
    pair = End(suite), End(suite)
    yield pair
    for end in pair:
        end.links.stop()


def name(step: int) -> Parcel:
    return Parcel(ParcelKind.ACTIVATION, 1, step, 0, Microbatch(0, 0), 0, 0, 0)


def numbers(size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size))


SIZES = (0, 1, 3, CHUNK_BYTES // 4, CHUNK_BYTES // 4 + 1, 900_000)


def test_messages_of_all_sizes_arrive_and_a_capture_shows_no_secret_and_no_tensor(
    ends: tuple[End, End], suite: Suite
) -> None:
    here, there = ends
    with Tap(there.links.address.port) as tap:
        for step, size in enumerate(SIZES):
            here.links.send(Address("127.0.0.1", tap.port), name(step), Envelope(), numbers(size), numbers(7))
        for step, size in enumerate(SIZES):
            frame = there.inbox.get(timeout=30)
            assert frame.parcel == name(step)
            assert torch.equal(frame.tensors[0], numbers(size))
            assert torch.equal(frame.tensors[1], numbers(7))
        seen = bytes(tap.seen)
    assert SECRET not in seen
    in_clear = [numbers(size).numpy().tobytes()[:64] in seen for size in SIZES[3:]]
    assert in_clear == [suite is not Suite.AES_GCM] * 3


HANDSHAKE = HELLO + 1 + PROOF


@pytest.mark.parametrize(
    "at",
    [
        HANDSHAKE,  # the first byte of a message
        HANDSHAKE + HEAD.size + 3,  # a tag
        HANDSHAKE + 200_000,  # a tensor
        HANDSHAKE + 1_500_000,
    ],
)
def test_a_flipped_bit_is_noticed_and_the_link_heals(ends: tuple[End, End], at: int) -> None:
    here, there = ends
    with Tap(there.links.address.port, flip=at) as tap:
        to = Address("127.0.0.1", tap.port)
        here.links.send(to, name(1), Envelope(), numbers(900_000))
        assert here.broken.get(timeout=30) == to
        assert there.inbox.empty(), "nothing of it was delivered"
        here.links.send(to, name(1), Envelope(), numbers(900_000))
        assert torch.equal(there.inbox.get(timeout=30).tensor, numbers(900_000))
        assert there.inbox.empty()
        assert len(tap.connections) == 2


def test_a_connection_that_is_played_again_delivers_nothing(ends: tuple[End, End]) -> None:
    here, there = ends
    with Tap(there.links.address.port) as tap:
        here.links.send(Address("127.0.0.1", tap.port), name(1), Envelope(), numbers(3))
        there.inbox.get(timeout=30)
        recorded = bytes(tap.connections[0])
    again = socket.create_connection(there.links.address, timeout=30)
    with again, contextlib.suppress(ConnectionError):
        again.sendall(recorded)
        while again.recv(1 << 16):  # its answer, and then the end
            pass
    assert there.inbox.empty()


def test_chunks_that_are_repeated_left_out_or_swapped_are_refused(suite: Suite) -> None:
    key, data = bytes(range(32)), [bytes([number]) * 50 for number in range(3)]
    sealer = Sealer(suite, key)
    wire = [b"".join(sealer.seal(memoryview(chunk))) for chunk in data]

    def opened(*order: int) -> list[bytes]:
        unsealer, found = Unsealer(suite, key), []
        for number in order:
            want, left = memoryview(bytearray(50)), memoryview(wire[number])
            whole = 0
            while left:  # in small pieces, as a network may bring them
                room = unsealer.room(want)[0][: min(7, len(left))]
                room[:], left = left[: len(room)], left[len(room) :]
                whole = unsealer.took(want, len(room))
            assert whole == 50
            found.append(bytes(want))
        return found

    assert opened(0, 1, 2) == data
    for order in ((0, 0), (0, 2), (1, 0), (2,)):
        with pytest.raises(TamperedError):
            opened(*order)
    assert len(wire[0]) == 50 + TAG_BYTES == seal.sealed_bytes(suite, 50)


def test_a_peer_of_another_task_is_refused_by_either_end(suite: Suite) -> None:
    here, foreign = End(suite), End(suite, secret=b"of another task".ljust(32))
    try:
        here.links.send(foreign.links.address, name(1), Envelope(), numbers(3))
        assert here.broken.get(timeout=30) == foreign.links.address
        foreign.links.send(here.links.address, name(1), Envelope(), numbers(3))
        assert foreign.broken.get(timeout=30) == here.links.address
        assert here.inbox.empty()
        assert foreign.inbox.empty()
    finally:
        here.links.stop()
        foreign.links.stop()


@needs_cryptography
def test_no_one_on_the_way_can_make_the_protection_weaker() -> None:
    both = (Suite.GMAC, Suite.BLAKE2B)
    opener, acceptor = Opener(SECRET, both), Acceptor(SECRET, b"me", both)
    answer = acceptor.feed(opener.hello())
    weaker = bytearray(answer)
    weaker[NONCE + PROOF] = 1 << Suite.BLAKE2B
    with pytest.raises(PeerError, match="does not know the task's secret"):
        Opener.feed(opener, bytes(weaker))
    opener, acceptor = Opener(SECRET, both), Acceptor(SECRET, b"me", both)
    proof = opener.feed(acceptor.feed(opener.hello()))
    assert proof is not None
    assert opener.sealer is not None
    assert opener.sealer.suite is Suite.GMAC, "the better one that both have"
    with pytest.raises(PeerError, match="does not know"):
        acceptor.feed(bytes([Suite.PLAIN]) + proof[1:])
    opener, acceptor = Opener(SECRET, (Suite.PLAIN,)), Acceptor(SECRET, b"me", both)
    with pytest.raises(PeerError, match="do not agree on how it is protected"):
        opener.feed(acceptor.feed(opener.hello()))


@needs_cryptography
@pytest.mark.parametrize(
    ("net", "peer", "wanted"),
    [
        (NetSpec(), "127.0.0.1", Suite.PLAIN),
        (NetSpec(), "::1", Suite.PLAIN),
        (NetSpec(), "10.0.0.7", Suite.GMAC),
        (NetSpec(authenticate="always"), "127.0.0.1", Suite.GMAC),
        (NetSpec(authenticate="never"), "10.0.0.7", Suite.PLAIN),
        (NetSpec(encrypt=True), "127.0.0.1", Suite.AES_GCM),
        (NetSpec(encrypt=True), "10.0.0.7", Suite.AES_GCM),
    ],
)
def test_what_a_job_asks_for_is_what_a_connection_accepts(net: NetSpec, peer: str, wanted: Suite) -> None:
    assert seal.accepted(net, peer)[0] is wanted
    assert (Suite.PLAIN in seal.accepted(net, peer)) is (wanted is Suite.PLAIN)


@pytest.mark.parametrize(("mine", "theirs"), [("127.0.0.1", "10.0.0.7"), ("10.0.0.7", "127.0.0.1")])
def test_through_a_tunnel_that_ends_on_loopback_a_connection_is_authenticated(mine: str, theirs: str) -> None:
    opener = Opener(SECRET, seal.accepted(NetSpec(), mine))
    acceptor = Acceptor(SECRET, b"me", seal.accepted(NetSpec(), theirs))
    proof = opener.feed(acceptor.feed(opener.hello()))
    assert proof is not None
    acceptor.feed(proof)
    assert opener.sealer is not None
    assert acceptor.unsealer is not None
    assert opener.sealer.suite is acceptor.unsealer.suite is not Suite.PLAIN


def test_a_node_without_the_package_authenticates_and_says_what_encryption_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seal, "_aes_gcm", lambda: None)
    assert seal.accepted(NetSpec(), "10.0.0.7") == (Suite.BLAKE2B,)
    with pytest.raises(UserError, match=r"net\.encrypt = true needs the package cryptography"):
        seal.require_encryption()


JOB = {"model": {"preset": "gpt-tiny"}, "data": {"kind": "synthetic"}}


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UserError, match=r"net\.encrypt = true authenticates as well"):
        Job.from_dict({**JOB, "net": {"encrypt": True, "authenticate": "never"}})
    job = Job.from_dict({**JOB, "device": "cuda", "transport": "nccl", "net": {"encrypt": True}})
    with pytest.raises(UserError, match='transport = "nccl" is not encrypted'):
        job.refuse_contradictions()
    with pytest.raises(UserError, match=r"net\.encript is not a key of \[net\]; did you mean 'encrypt'"):
        Job.from_dict({**JOB, "net": {"encript": True}})


def test_lanes_that_are_not_encrypted_stay_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.net.plane._memory_and_lanes", lambda *which: ("tcp", "", "nccl 22809"))
    device = torch.device("cuda")
    mine, open_one = identity_of(device, "auto", encrypt=True), identity_of(device, "auto")
    assert chosen(open_one, identity_of(device, "auto")) == "nccl"
    assert chosen(mine, identity_of(device, "auto", encrypt=True)) == "nccl", "two GPUs of this machine"
    monkeypatch.setattr("everstep.net.plane._machine", lambda: "another machine")
    assert chosen(mine, identity_of(device, "auto", encrypt=True)) == "tcp"
