"""core's values survive JSON, and what is not what it claims to be is refused by name."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import PeerError
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.actions import ComputePlan
from everstep.protocol.codec import decode, encode
from everstep.protocol.ops import Kind, Microbatch, Op, OpLists, Replicas, Worker
from everstep.protocol.parcels import Parcel, ParcelKind
from everstep.protocol.shape import Shape
from everstep.protocol.work import EpochFacts, Ledger, Members, OwnOrders, StateDirections

W = Worker(1, 2)
M = Microbatch(0, 3)
SAMPLES: list[Any] = [
    msg.NodeJoined(node="a", boot="1", slots=2, host="h"),
    msg.TaskSubmitted(task="t", job={"a": [1, {"is": 3}]}, shape=Shape(2, 2, 2), steps=5, secret="s"),
    msg.FromNode(
        node="a",
        boot="1",
        number=3,
        report=msg.TaskEvent(
            task="t",
            event=ev.LedgerReported(
                worker=W,
                epoch=4,
                ledger=Ledger(
                    step=3,
                    done=(Op(Kind.F, M, 2), Op(Kind.R, None, 2)),
                    holding=(Parcel(ParcelKind.ACTIVATION, 0, 3, 2, M),),
                ),
            ),
        ),
    ),
    msg.PlanAnswered(
        task="t",
        event=ev.PlanComputed(
            epoch=1,
            lists={3: OpLists.of({W: (Op(Kind.W, M, 2),)})},
            steady=OpLists.of({W: ()}),
            hosts={3: {(M, 2): 0}},
            steady_hosts={},
        ),
    ),
    msg.FromNode(
        node="a",
        boot="1",
        number=4,
        report=msg.TaskEvent(
            task="t",
            event=ev.StepSealed(step=1, stage=0, attempt=1, microbatches=4, executed=12, losses=((M, 1.5),)),
        ),
    ),
]
ORDERS: list[Any] = [
    msg.ResumeTask(
        task="t",
        facts=EpochFacts(
            epoch=2,
            attempts=((0, 0),),
            members=(Members(2, (Replicas((0, 1, 3)), Replicas((0,))), (1, 2)),),
            book={W: ("host", 80)},
        ),
        news=None,
        workers=(
            msg.WorkerResume(
                W,
                OwnOrders(step=3, lists={3: "2F0.3"}, ghosts=frozenset({(3, M)}), feeds={1: None}),
                StateDirections(copy_to=msg.MemoryAddress("n", "host", 81)),
            ),
        ),
    ),
    msg.KeepOnly(keep=(("t", W, 1),)),
]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: type(s).__name__)
def test_an_event_comes_back_as_it_was(sample: Any) -> None:
    assert decode(msg.ClusterEvent, json.loads(json.dumps(encode(sample)))) == sample


@pytest.mark.parametrize("order", ORDERS, ids=lambda s: type(s).__name__)
def test_an_order_comes_back_as_it_was(order: Any) -> None:
    assert decode(msg.Order, json.loads(json.dumps(encode(order)))) == order


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"is": "NodeLeft"}, "NodeLeft lacks 'node'"),
        ({"is": "NodeLeft", "node": 3}, "3 is not str"),
        ({"is": "Nothing"}, "'Nothing' is not one of"),
        ([], "is not one of"),
        ({"is": "FromNode", "node": "a", "boot": "b", "number": True, "report": {}}, "True is not int"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(data: Any, sentence: str) -> None:
    with pytest.raises(PeerError, match="not a") as caught:
        decode(msg.ClusterEvent, data)
    assert sentence in str(caught.value)


def test_two_versions_understand_each_other() -> None:
    """A field that this version does not know is ignored; one that it alone knows takes its default."""
    newer = {"is": "NodeLeft", "node": "a", "more": 1}
    assert decode(msg.ClusterEvent, newer) == msg.NodeLeft(node="a")
    older = {"is": "NodeJoined", "node": "a", "boot": "1", "slots": 2, "host": "h"}
    assert decode(msg.ClusterEvent, older) == msg.NodeJoined(node="a", boot="1", slots=2, host="h")


def test_equal_tuples_of_two_kinds_keep_their_own_texts() -> None:
    """Worker(1, 2) and Microbatch(1, 2) are equal to Python, and so are their hashes."""
    assert [encode(Worker(1, 2)), encode(Microbatch(1, 2)), encode(Worker(1, 2))] == ["1:2", "1.2", "1:2"]


def test_ops_are_one_text_and_a_list_of_them_is_read_too() -> None:
    ledger = Ledger(step=3, done=(Op(Kind.F, M, 2), Op(Kind.R, None, 2)))
    data = encode(ledger)
    assert data["done"] == "2F0.3 2R"
    assert decode(Ledger, {**data, "done": ["2F0.3", "2R"]}) == ledger


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["is", "node", "report", "task", "event", "number", "worker"]), inner
        )
    ),
    max_leaves=12,
)
NAMES = st.sampled_from(["FromNode", "NodeJoined", "TaskSubmitted", "PlanAnswered", "TaskEvent"])


@given(JSON_VALUES, NAMES)
def test_no_message_can_do_more_than_be_refused(data: Any, name: str) -> None:
    if isinstance(data, dict):
        data = data | {"is": name}
    with contextlib.suppress(PeerError):
        decode(msg.ClusterEvent, data)


def test_a_question_can_be_kept() -> None:
    question = ComputePlan(epoch=1, broken={}, dead=frozenset({W}), because="so")
    assert decode(ComputePlan, json.loads(json.dumps(encode(question)))) == question
