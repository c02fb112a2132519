"""A reduce by nodes gives the bits of one without: real sums, real messages, no network."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from pipeline import forward, input_grad, stages
from torch import Tensor

from everstep.engine.datasets.data import Synthetic
from everstep.engine.layers.gpt import gpt
from everstep.engine.state.optimizer import Updater, adamw
from everstep.engine.state.sharded import ShardedUpdater
from everstep.engine.worker.step_tensors import StepTensors
from everstep.protocol.ops import Worker
from everstep.protocol.parcels import Parcel, ParcelKind, Part
from everstep.protocol.routes import Routes
from everstep.protocol.work import AssembleSum, GatherParts, Send, SumChunk

DATA = Synthetic(vocab=32, sequence=8, rows=2)
SMALL = {"vocab": 32, "width": 16, "heads": 2, "hidden": 24, "depth": 2}
NODES = {
    "two nodes": ((0, 2, 4), (1, 3)),
    "three nodes of one, two and three": ((5,), (0, 3), (1, 2, 4)),
    "one node": ((0, 1, 2, 3),),
}
SAID = Part((), (), 0, ())


class OnTheHost:
    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def kept(self, tensor: Tensor) -> Tensor:
        return tensor


class Sums(NamedTuple):
    """How sums are kept. `limit`: of every tensor; low ones make promoted sums, and sums beyond 32 bits."""

    accumulate: str
    late: bool = False  # integers, as on a GPU
    limit: int | None = None


KINDS = {
    "strict": Sums("strict"),
    "strict, all promoted": Sums("strict", limit=-30),
    "strict, some promoted": Sums("strict", limit=-8),
    "integers of 64 bits": Sums("strict", late=True, limit=-8),
    "40 bits": Sums("strict40", late=True, limit=4),
    "40 bits, sums beyond 32": Sums("strict40", late=True, limit=-3),
    "40 bits, some promoted": Sums("strict40", late=True, limit=-8),
    "fp32": Sums("fp32"),
}


def worker(replica: int, count: int, kind: Sums, *, sharded: bool) -> StepTensors:
    (stage,) = stages(gpt(**SMALL), 1, DATA, accumulate=kind.accumulate, sharded=sharded)
    if kind.late:
        stage.sums = type(stage.sums)(
            stage.slots, stage.size, kind=kind.accumulate, contributions=256, device=stage.device, late=True
        )
    if kind.limit is not None:
        stage.sums.begin(1, [kind.limit] * len(stage.slots))
    chunks = 2 * count - 1  # one worker owns one, the others two
    holders = tuple((c % count, (c + 1) % count) for c in range(chunks))
    return StepTensors(
        Worker(replica, 0),
        stage,
        ShardedUpdater(stage, adamw(lr=1e-2), chunks=chunks) if sharded else Updater(stage, adamw(lr=1e-2)),
        replicas=count,
        borrowed=lambda tensor: False,
        shared=OnTheHost(),
        holders=(lambda step: holders) if sharded else None,
    )


def name(what: ParcelKind, sender: int, owner: int = -1) -> Parcel:
    return Parcel(what, 0, 1, 0, None, 0, sender, owner)


def part(sender: int, owner: int) -> Parcel:
    return name(ParcelKind.PART, sender, owner)


class Reduce:
    """Of one step, from the parts of all to the sum at all. `spoiled`: whose gradients have a NaN."""

    def __init__(
        self, nodes: tuple[tuple[int, ...], ...], kind: Sums, *, sharded: bool, spoiled: int | None = None
    ) -> None:
        members = sorted(k for node in nodes for k in node)
        self.sharded = sharded
        self.routes = {k: Routes(k, nodes) for k in members}
        self.workers = {k: worker(k, len(members), kind, sharded=sharded) for k in members}
        self.bytes_between = 0
        self.node_of = {k: number for number, node in enumerate(nodes) for k in node}
        for k, tensors in self.workers.items():
            for microbatch in (2 * k, 2 * k + 1):
                forward([tensors.stage], 1, microbatch)
                input_grad([tensors.stage], 1, microbatch)
                if k == spoiled and microbatch == 2 * k:
                    self.spoil(tensors)
                tensors.stage.weight_grad(1, microbatch)

    def spoil(self, tensors: StepTensors) -> None:
        sums = tensors.stage.sums
        add, hold = sums.add, sums.hold
        if sums.is_late:
            sums.add = lambda i, made: add(i, (lambda: made() * math.nan) if i == 1 else made)  # type: ignore[method-assign]
        else:
            sums.hold = lambda i, x: hold(i, x * math.nan if i == 1 else x)  # type: ignore[method-assign]

    def send(self, parcel: Parcel, sender: int, to: int) -> None:
        envelope, tensors = self.workers[sender].contents(Send(parcel, to, 0, SAID), self.routes[sender])
        if self.node_of[sender] != self.node_of[to]:
            self.bytes_between += sum(tensor.nbytes for tensor in tensors)
        self.workers[to].received(parcel, tuple(tensor.clone() for tensor in tensors), envelope.beside)

    def run(self) -> dict[int, Any]:
        for k, routes in self.routes.items():
            for to in routes.mates or routes.owners:
                self.send(part(k, to), k, to)
        for k, routes in self.routes.items():
            for owner in routes.owners if routes.mates else ():
                here = tuple(part(mate, k) for mate in routes.mates)
                self.workers[k].gather(GatherParts(1, routes, here, part(k, owner)))
                self.send(part(k, owner), k, owner)
        squares = {}
        for k, routes in self.routes.items():
            parts = tuple(part(sender, k) for sender in routes.senders)
            chunks = self.chunks_of(k)
            squares[k] = self.workers[k].sum_chunk(SumChunk(1, routes, parts, 8.0, chunks))
        if self.sharded:
            means = {k: dict(tensors.by_chunk.means[1]) for k, tensors in self.workers.items()}
            return {"means": means, "squares": squares, "peaks": self.peaks()}
        for k, routes in self.routes.items():
            for to in routes.gatherers if routes.passes_on else routes.senders:
                self.send(name(ParcelKind.SUM, k), k, to)
        for k, routes in self.routes.items():
            for mate in routes.mates if routes.passes_on else ():
                self.send(name(ParcelKind.SUM, k, k), k, mate)
        for k, routes in self.routes.items():
            here = tuple(
                name(ParcelKind.SUM, mate, mate if routes.passes_on else -1) for mate in routes.mates
            )
            away = tuple(name(ParcelKind.SUM, owner) for owner in routes.owners)
            self.workers[k].assemble(AssembleSum(1, routes, (*here, *away)))
            self.workers[k].forget((*here, *away))
        means = {k: {0: tensors.sum_of(1)} for k, tensors in self.workers.items()}
        return {"means": means, "squares": squares, "peaks": self.peaks()}

    def peaks(self) -> list[list[int]]:
        return [tensors._peaks[1] for tensors in self.workers.values()]

    def chunks_of(self, k: int) -> tuple[int, ...]:
        if not self.sharded:
            return ()
        count = len(self.workers)
        return tuple(c for c in range(2 * count - 1) if c % count == k)


@pytest.mark.parametrize("sharded", [False, True], ids=["", "sharded"])
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("kind", KINDS)
def test_parts_that_are_added_up_on_their_node_give_the_same_means(
    kind: str, nodes: str, sharded: bool
) -> None:
    alone = tuple((k,) for node in NODES[nodes] for k in node)
    right = Reduce(alone, KINDS[kind], sharded=sharded)
    here = Reduce(NODES[nodes], KINDS[kind], sharded=sharded)
    expected, found = right.run(), here.run()
    assert found["peaks"] == expected["peaks"]
    for k, means in expected["means"].items():
        for place, mean in means.items():
            other = found["means"][k][place]
            if KINDS[kind].accumulate == "fp32":
                assert torch.allclose(mean, other, rtol=1e-5, atol=1e-7)
            else:
                assert torch.equal(mean, other)
    if KINDS[kind].accumulate != "fp32":
        assert found["squares"] == expected["squares"]
    if "promoted" in kind:
        assert any(tensors.stage.sums.num_promoted for tensors in here.workers.values())
    if len(NODES[nodes]) > 1:
        assert here.bytes_between < 0.75 * right.bytes_between
    assert not sharded or any(len(one) == 1 for one in found["squares"].values()), "no odd number of chunks"


@pytest.mark.parametrize("kind", ["strict", "40 bits"])
def test_a_gradient_that_is_not_finite_is_not_lost_on_its_way(kind: str) -> None:
    right = Reduce(((0,), (1,), (2,), (3,)), KINDS[kind], sharded=False, spoiled=2).run()
    found = Reduce(((0, 1), (2, 3)), KINDS[kind], sharded=False, spoiled=2).run()
    for k in range(4):
        assert found["means"][k][0].isnan().any()
        assert torch.equal(found["means"][k][0].isnan(), right["means"][k][0].isnan())
    assert found["peaks"] == right["peaks"]


def test_sums_that_were_passed_on_can_be_sent_again_after_they_were_assembled() -> None:
    """The connection within the node broke meanwhile."""
    reduce = Reduce(((0, 1), (2, 3)), KINDS["strict"], sharded=False)
    reduce.run()
    tensors, routes = reduce.workers[0], reduce.routes[0]
    again = tensors.outgoing(name(ParcelKind.SUM, 0, 0), routes).tensors
    owners = routes.of_sum(0, 0)
    assert owners == (0, 2)
    mean = reduce.workers[3].sum_of(1)
    assert all(
        torch.equal(one, mean[tensors._stretch(routes, k)]) for k, one in zip(owners, again, strict=True)
    )


def test_parts_of_an_earlier_round_are_dropped() -> None:
    reduce = Reduce(((0, 1), (2, 3)), KINDS["strict"], sharded=False)
    reduce.run()
    tensors, routes = reduce.workers[0], reduce.routes[0]
    (owner,) = routes.owners
    tensors.gather(GatherParts(1, routes, (part(1, 0),), part(0, owner)))
    assert len(tensors._gathered) == 1
    later = part(0, owner)._replace(round=7)
    tensors.gather(GatherParts(1, routes, (part(1, 0),), later))
    assert list(tensors._gathered) == [later]
