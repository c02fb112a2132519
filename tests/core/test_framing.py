"""Messages between a worker and its agent survive the wire, and what is none is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import PeerError
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.actions import InterruptWorkers
from everstep.protocol.codec import Unpacker, pack
from everstep.protocol.messages import EndWorker, FromWorker, PlantFaults, WorkerHello, WorkerOrder
from everstep.protocol.ops import Microbatch, Replicas, Worker, parse_op
from everstep.protocol.parcels import Parcel, ParcelKind
from everstep.protocol.work import EpochFacts, Ledger, Members, OwnOrders, StateDirections, changes

OPS = tuple(map(parse_op, ["1F0.0", "1F1.2", "1I0.0", "1W0.0", "1W1.2", "1R", "1U"]))
W = Worker(0, 1)
FACTS = EpochFacts(
    epoch=3,
    attempts=((0, 1), (5, 2)),
    hosts={5: {(Microbatch(1, 2), 0): 0}},
    steady_hosts={(Microbatch(1, 2), 1): 0},
    members=(
        Members(4, (Replicas((0, 1)), Replicas((0,))), (1, 7)),
        Members(6, (Replicas((0, 1)), Replicas((0, 1))), (1, 7)),
    ),
    rewind=4,
    shares=((4, 0, 0.25),),
    until=9,
    book={W: ("host", 80)},
)
LATER = replace(FACTS, epoch=4, book={W: ("host", 81), Worker(1, 0): ("host", 82)})
NEWS = changes(FACTS, LATER)
assert NEWS is not None
OWN = OwnOrders(
    step=5,
    lists={5: "0F0.0 0F1.2", 6: "0F0.0 0R 0U"},
    steady="0F0.0 0R 0U",
    ghosts=frozenset({(5, Microbatch(0, 1))}),
    give={5: (1, 2)},
    feeds={1: 5, 2: None},
    awaits=frozenset({5}),
)
PLACE = msg.MemoryAddress("n", "host", 81)
STATES = StateDirections(copy_to=PLACE, copy_at_end=False, copies=((PLACE, {"file": "part"}),))
LEDGER = Ledger(
    step=3,
    done=OPS[:2],
    done_before=OPS,
    holding=(Parcel(ParcelKind.GRADIENT, 1, 3, 0, Microbatch(1, 0)),),
    joining=True,
)
ORDERS: list[Any] = [
    msg.ResumeWorker(task="t", worker=W, facts=FACTS, own=OWN, states=STATES),
    msg.ResumeWorker(task="t", worker=W, facts=NEWS, own=OWN, states=STATES),
    msg.NotifyWorker(task="t", worker=W, words=InterruptWorkers(workers=(W,), epoch=3, because="so")),
    EndWorker(gently=True),
    PlantFaults(faults=("stage=0,replica=0,step=3",)),
]
SAID: list[Any] = [
    WorkerHello(task="t", worker=W, incarnation=2, pid=77),
    msg.TaskEvent(task="t", event=ev.LedgerReported(worker=W, epoch=3, ledger=LEDGER)),
    msg.TimesReported(task="t", worker=W, times={"F": 0.25}, ops={"F": (3, 0.5)}),
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_order_is_the_same_after_the_wire(order: Any) -> None:
    assert list(Unpacker(WorkerOrder).feed(pack(order))) == [order]


@pytest.mark.parametrize("said", SAID, ids=lambda said: type(said).__name__)
def test_what_a_worker_says_is_the_same_after_the_wire(said: Any) -> None:
    assert list(Unpacker(FromWorker).feed(pack(said))) == [said]


def test_every_order_of_the_coordinator_to_a_worker_can_be_passed_on() -> None:
    assert issubclass(msg.NotifyWorker, WorkerOrder)


def test_messages_are_found_however_the_bytes_come() -> None:
    data = b"".join(map(pack, ORDERS[2:]))
    unpacker = Unpacker(WorkerOrder)
    assert [order for byte in data for order in unpacker.feed(bytes([byte]))] == ORDERS[2:]


def test_a_message_that_claims_to_be_huge_is_refused() -> None:
    with pytest.raises(PeerError, match="allowed"):
        list(Unpacker(WorkerOrder).feed(b"\xff\xff\xff\xff"))


@given(st.binary(max_size=64))
def test_nothing_but_a_refusal_comes_of_nonsense(body: bytes) -> None:
    data = len(body).to_bytes(4, "little") + body
    with pytest.raises(PeerError):
        list(Unpacker(WorkerOrder).feed(data))
