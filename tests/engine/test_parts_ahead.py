"""Pieces of parts that are sent while the last W runs: what its receiver has, and what never counts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from pipeline import forward, input_grad, stages
from torch import Tensor

from everstep.engine.datasets.data import Synthetic
from everstep.engine.layers.gpt import gpt
from everstep.engine.state.optimizer import Updater, adamw
from everstep.engine.state.sharded import ShardedUpdater
from everstep.engine.sums.sum_parts import joined
from everstep.engine.worker import parts_ahead
from everstep.engine.worker.parts_ahead import ArrivingParts
from everstep.engine.worker.step_tensors import StepTensors
from everstep.errors import PeerError
from everstep.net.envelope import MAX_BYTES, Envelope, PartAhead, PartRest, Stretch
from everstep.protocol.ops import Worker
from everstep.protocol.parcels import Parcel, ParcelKind
from everstep.protocol.routes import Routes
from everstep.protocol.work import Send, SumChunk

DATA = Synthetic(vocab=32, sequence=8, rows=2)
SMALL = {"vocab": 32, "width": 16, "heads": 2, "hidden": 24, "depth": 3}
ROUTES = Routes.direct(1, (0, 1))  # of an owner; a sender finds the same
Message = tuple[Parcel, Envelope, tuple[Tensor, ...]]


class OnTheHost:
    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def kept(self, tensor: Tensor) -> Tensor:
        return tensor


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_ahead, "PIECE", {"cpu": 2048})


def worker(replica: int, accumulate: str = "strict", *, sharded: bool = False) -> StepTensors:
    (stage,) = stages(gpt(**SMALL), 1, DATA, accumulate=accumulate, sharded=sharded)
    if sharded:
        updater = ShardedUpdater(stage, adamw(lr=1e-2), chunks=4)
        holders = ((0, 1), (0, 1), (1, 0), (1, 0))
        return StepTensors(
            Worker(replica, 0),
            stage,
            updater,
            replicas=2,
            borrowed=lambda tensor: False,
            shared=OnTheHost(),
            holders=lambda step: holders,
        )
    return StepTensors(
        Worker(replica, 0),
        stage,
        Updater(stage, adamw(lr=1e-2)),
        replicas=2,
        borrowed=lambda tensor: False,
        shared=OnTheHost(),
    )


def part(sender: int, owner: int, *, round: int = 0, step: int = 1) -> Parcel:
    return Parcel(ParcelKind.PART, 0, step, 0, None, round, sender, owner)


def computed(tensors: StepTensors, microbatches: tuple[int, ...], to: int | None) -> list[Message]:
    """F, I, W of these microbatches, pieces sent ahead during the last W. Copies, as a wire makes them."""
    sent: list[Message] = []
    me = tensors.me.replica

    def post(parcel: Parcel, envelope: Envelope, tensor: Tensor) -> None:
        sent.append((parcel, envelope, (tensor.clone(),)))

    def begins(slots: set[int]) -> Any:
        assert to is not None
        parcel = part(me, to)
        stretches = tensors.stretches(parcel, ROUTES)
        return tensors.ahead.begin(tensors.stage.sums, [(parcel, stretches)], slots, post)

    for microbatch in microbatches:
        forward([tensors.stage], 1, microbatch)
        input_grad([tensors.stage], 1, microbatch)
        last = to is not None and microbatch == microbatches[-1]
        tensors.stage.weight_grad(1, microbatch, begins if last else None)
    return sent


def closing(tensors: StepTensors, to: int, *, round: int = 0) -> Message:
    """The PART itself."""
    parcel = part(tensors.me.replica, to, round=round)
    envelope, made = tensors.contents(Send(parcel, to, 0, None), ROUTES)
    return parcel, envelope, tuple(tensor.clone() for tensor in made)


def whole(tensors: StepTensors, to: int) -> tuple[Any, tuple[Tensor, ...]]:
    """What a PART would be without pieces."""
    payload = tensors.outgoing(part(tensors.me.replica, to), ROUTES)
    return payload.facts, payload.tensors


def delivered(messages: list[Message]) -> tuple[Envelope, tuple[Tensor, ...]] | None:
    arriving, found = ArrivingParts(), None
    for message in messages:
        found = arriving.take(*message) or found
    return found


@pytest.mark.parametrize("accumulate", ["strict", "strict32", "fp64", "fp32"])
@pytest.mark.parametrize("sharded", [False, True], ids=["", "sharded"])
def test_pieces_and_rest_are_the_part_in_whatever_order_they_come(accumulate: str, sharded: bool) -> None:
    tensors = worker(0, accumulate, sharded=sharded)
    sent = computed(tensors, (0, 1), to=1)
    assert len(sent) > 1
    last = closing(tensors, 1)
    facts, right = whole(tensors, 1)
    assert sum(t.numel() for t in last[2]) < sum(t.numel() for t in right), "what was sent is not sent again"
    for seed in range(5):
        messages = random.Random(seed).sample([*sent, last], len(sent) + 1)
        found = delivered(messages)
        assert found is not None
        assert found[0] == Envelope(beside=facts)
        assert [t.shape for t in found[1]] == [t.shape for t in right]
        assert all(torch.equal(a, b) for a, b in zip(found[1], right, strict=True))
        assert delivered(messages[:-1]) is None, "a part counts once it is whole"


def test_a_sum_of_parts_in_pieces_has_the_bits_of_one_of_whole_parts() -> None:
    means = []
    for ahead in (False, True):
        owner, peer = worker(1), worker(0)
        computed(owner, (2, 3), to=None)
        sent = computed(peer, (0, 1), to=1 if ahead else None)
        found = delivered([*sent, closing(peer, 1)])
        assert found is not None
        owner.received(part(0, 1), found[1], found[0].beside)
        squares = owner.sum_chunk(SumChunk(1, ROUTES, (part(0, 1),), 4.0))
        means.append((owner.sum_of(1)[owner._stretch(ROUTES, 1)].clone(), squares))
    assert torch.equal(means[0][0], means[1][0])
    assert means[0][1] == means[1][1]


def with_integers(tensors: StepTensors, kind: str, limit: int | None = None) -> StepTensors:
    """Sums as on a GPU."""
    stage = tensors.stage
    stage.sums = type(stage.sums)(
        stage.slots, stage.size, kind=kind, contributions=256, device=stage.device, late=True
    )
    if limit is not None:
        stage.sums.begin(1, [limit] * len(stage.slots))
    return tensors


@pytest.mark.parametrize("sharded", [False, True], ids=["", "sharded"])
@pytest.mark.parametrize(("limit", "sent_as"), [(4, torch.int32), (-3, torch.int8), (-8, torch.int8)])
def test_pieces_and_rest_of_short_sums_give_the_mean_of_whole_ones(
    limit: int, sent_as: torch.dtype, sharded: bool
) -> None:
    """Integers of 40 bits, as on a GPU: sent in 4 or 5 bytes, ahead or not, they are what they were."""
    found: list[tuple[float, ...]] = []
    for accumulate, ahead in (("strict40", True), ("strict40", False), ("fp64", False)):
        owner, peer = (worker(k, sharded=sharded) for k in (1, 0))
        for one in (owner, peer):
            with_integers(one, accumulate, limit if accumulate == "strict40" else None)
        computed(owner, (0, 1), to=None)
        sent = [*computed(peer, (2, 3), to=1 if ahead else None), closing(peer, 1)]
        types = {tensor.dtype for *_, tensors in sent for tensor in tensors}
        assert accumulate == "fp64" or sent_as in types
        came = delivered(sent)
        assert came is not None
        owner.received(part(0, 1), came[1], came[0].beside)
        chunks = (2, 3) if sharded else ()
        found.append(owner.sum_chunk(SumChunk(1, ROUTES, (part(0, 1),), 4.0, chunks)))
    assert found[0] == found[1]
    assert found[0] == pytest.approx(found[2], rel=1e-3)


def test_a_piece_from_which_something_was_taken_back_is_sent_again() -> None:
    """As on a GPU: whether a contribution fits is known after it was added and sent."""
    tensors = with_integers(worker(0), "strict", -30)  # far too small: all is promoted
    late = tensors.stage.sums
    sent = computed(tensors, (0, 1), to=1)
    last = closing(tensors, 1)
    assert late.changed
    found = delivered([*sent, last])
    facts, right = whole(tensors, 1)
    assert found is not None
    assert late.num_promoted
    assert found[0] == Envelope(beside=facts)
    assert all(torch.equal(a, b) for a, b in zip(found[1], right, strict=True))


def test_what_32_bits_of_pieces_lack_comes_with_the_part_and_no_piece_comes_again() -> None:
    tensors = with_integers(worker(0), "strict40", 4)
    sums = tensors.stage.sums
    computed(tensors, (0, 1), to=None)
    sums.begin(1, sums.part(slice(0, sums.size)).peaks)  # what fits has up to 33 bits
    sent = computed(tensors, (0, 1), to=1)
    assert {tensor.dtype for *_, (tensor,) in sent} == {torch.int32}
    last = closing(tensors, 1)
    assert not sums.num_promoted
    assert not sums.changed
    assert [tensor.dtype for tensor in last[2]].count(torch.int8) == 1
    found = delivered([*sent, last])
    assert found is not None
    where = tensors._stretch(ROUTES, 1)
    mine, (peaks, *told) = sums.part(where), found[0].beside
    came = sums.arrived(where, found[1], peaks, told)
    assert mine.high is not None
    assert came.high is not None
    assert mine.high.any()
    assert torch.equal(joined(came.tensors[0], came.high), joined(mine.tensors[0], mine.high))


def test_after_more_work_a_break_or_in_a_new_round_the_part_is_sent_whole() -> None:
    for what in ("more work", "break", "round"):
        tensors = worker(0)
        sent = computed(tensors, (0, 1), to=1)
        if what == "more work":
            tensors.ahead.clear()  # as the worker does before any W
            computed(tensors, (2,), to=None)
        elif what == "break":
            tensors.ahead.lost(lambda parcel: parcel.owner == 1)
        last = closing(tensors, 1, round=1 if what == "round" else 0)
        found = delivered([*sent, last])
        _, right = whole(tensors, 1)
        assert found is not None
        assert sum(t.numel() for t in last[2]) == sum(t.numel() for t in right)
        assert all(torch.equal(a, b) for a, b in zip(found[1], right, strict=True))


def test_pieces_of_two_attempts_are_never_mixed() -> None:
    tensors = worker(0)
    first = computed(tensors, (0, 1), to=1)
    second = computed(tensors, (2,), to=1)
    last = closing(tensors, 1)
    assert delivered([*first, last]) is None
    assert delivered([*first, *second[:-1], last]) is None
    for messages in ([*first, *second, last], [*second, *first, last], [*second, last, *first]):
        found = delivered(messages)
        assert found is not None
        assert all(torch.equal(a, b) for a, b in zip(found[1], whole(tensors, 1)[1], strict=True))


def test_an_old_part_that_comes_late_does_not_displace_the_pieces_of_a_newer_one() -> None:
    tensors = worker(0)
    sent = computed(tensors, (0, 1), to=1)
    last = closing(tensors, 1)
    arriving = ArrivingParts()
    for message in sent:
        assert arriving.take(*message) is None
    assert arriving.take(part(0, 1, step=0), Envelope(), (torch.ones(3),)) is not None
    assert arriving.take(*last) is not None


def test_pieces_whose_sender_died_are_forgotten_with_their_step() -> None:
    sent = computed(worker(0), (0, 1), to=1)
    arriving = ArrivingParts()
    for message in sent:
        arriving.take(*message)
    assert arriving._of
    arriving.forget_until(0)
    assert arriving._of
    arriving.forget_until(1)
    assert not arriving._of


def test_small_parts_send_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_ahead, "PIECE", {"cpu": 4 << 20})
    tensors = worker(0)
    assert not computed(tensors, (0, 1), to=1)
    assert closing(tensors, 1)[1] == Envelope(beside=whole(tensors, 1)[0])


@pytest.mark.parametrize(
    "told",
    [
        PartAhead(1, Stretch(0, 5, 2), 10),
        PartAhead(1, Stretch(0, 0, 3), 2),
        PartAhead(1, Stretch(0, -3, 0), 10),
        PartAhead(1, Stretch(0, 0, 3), MAX_BYTES),
        PartRest(1, (), (Stretch(4, 0, 3),), (0,), (3,)),
        PartRest(1, (), (Stretch(0, 0, 3),), (0, 1), (3, 3)),
    ],
)
def test_pieces_that_cannot_be_are_refused(told: PartAhead | PartRest) -> None:
    with pytest.raises(PeerError):
        ArrivingParts().take(part(0, 1), Envelope(piece=told), (torch.ones(3),))


def test_a_worker_on_a_cpu_asks_nothing_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether memory is pinned is a question to CUDA, which took half a GiB of a GPU for each worker."""

    def asked(tensor: Tensor) -> bool:
        raise AssertionError("CUDA was asked")

    monkeypatch.setattr(Tensor, "is_pinned", asked)
    tensors = worker(0)
    sent = computed(tensors, (0, 1), to=1)
    assert delivered([*sent, closing(tensors, 1)]) is not None
