"""Orders and ledgers survive the wire."""

import pytest

from everstep.core.words.ops import Microbatch, parse_op
from everstep.core.words.worker_messages import Ledger, Members, Parcel, ParcelKind, Resume
from everstep.errors import PeerError
from everstep.node import wire

OPS = tuple(map(parse_op, ["1F0.0", "1F1.2", "1I0.0", "1W0.0", "1B1.2", "1R", "1U"]))


def test_a_resume_is_the_same_after_the_wire() -> None:
    order = Resume(
        epoch=7,
        attempts=((0, 1), (5, 2)),
        step=5,
        lists={5: OPS[:3], 6: OPS},
        steady=OPS,
        hosts={5: {(Microbatch(1, 2), 0): 0}},
        steady_hosts={(Microbatch(1, 2), 1): 0},
        members=(Members(4, ((0, 1), (0,)), (1, 7)), Members(6, ((0, 1), (0, 1)), (1, 7))),
        ghosts=frozenset({(5, Microbatch(0, 1))}),
        give={5: (1, 2)},
        feeds={1: 5, 2: None},
        rewind=4,
    )
    (message,) = wire.Unpacker().feed(wire.pack({"order": wire.resume_out(order)}))
    assert wire.resume_in(message["order"]) == order


def test_a_ledger_is_the_same_after_the_wire() -> None:
    ledger = Ledger(
        step=3,
        done=OPS[:2],
        done_before=OPS,
        holding=(Parcel(ParcelKind.GRADIENT, 1, 3, 0, Microbatch(1, 0)),),
        joining=True,
    )
    (message,) = wire.Unpacker().feed(wire.pack(wire.ledger_out(ledger)))
    assert wire.ledger_in(message) == ledger


def test_messages_are_found_however_the_bytes_come() -> None:
    data = wire.pack({"a": 1}) + wire.pack({"b": [2]})
    unpacker = wire.Unpacker()
    found = [message for byte in data for message in unpacker.feed(bytes([byte]))]
    assert found == [{"a": 1}, {"b": [2]}]


def test_a_message_that_claims_to_be_huge_is_refused() -> None:
    with pytest.raises(PeerError, match="allowed"):
        list(wire.Unpacker().feed(b"\xff\xff\xff\xff"))


def test_a_message_that_is_no_object_is_refused() -> None:
    with pytest.raises(PeerError, match="JSON object"):
        list(wire.Unpacker().feed(b"\x02\x00\x00\x00[]"))
