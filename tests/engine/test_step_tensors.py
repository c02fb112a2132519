"""Who owns a tensor that is queued for sending; what a sum is, whoever it is taken from."""

import math
import queue
import socket
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipeline import CPU, run_step, stages
from torch import nn

from everstep.core.worker.control import WorkerControl
from everstep.core.worker.worker_state import WorkerState
from everstep.engine.datasets.data import Synthetic
from everstep.engine.layers.gpt import gpt
from everstep.engine.layers.model import Model
from everstep.engine.prepare.program import Program
from everstep.engine.stage.stage import Stage, StageSettings
from everstep.engine.state.optimizer import Updater, adamw
from everstep.engine.state.sharded import ShardedUpdater
from everstep.engine.sums.sums import MOST_PROMOTED
from everstep.engine.worker.step_tensors import Payload, StepTensors
from everstep.engine.worker.work_items import ShardedSteps, WorkItems
from everstep.job.job import DataSpec, Job, ModelSpec, OptimizerSpec
from everstep.net import envelope, frames
from everstep.net.envelope import Envelope, FrameKind, StateEnd
from everstep.net.handshake import Acceptor
from everstep.net.links import Address, LinkEvents, Links
from everstep.protocol.messages import LOADING, Sender
from everstep.protocol.ops import Worker
from everstep.protocol.parcels import Parcel, ParcelKind, Part, StateTransfer
from everstep.protocol.routes import Routes
from everstep.protocol.work import AssembleSum, Restore, Send, SumChunk

DATA = Synthetic(vocab=32, sequence=8, rows=2)
SMALL = {"vocab": 32, "width": 16, "heads": 2, "hidden": 24, "depth": 2}
TOKEN = b"t" * 32
COUNT = 4  # microbatches in a step
TRANSFER = StateTransfer(1, 5, 1, 1)
SAID = Part((), (), 0, ())
ALONE, BOTH = Routes.direct(0, (0,)), Routes.direct(0, (0, 1))


class OnTheHost:
    """Tensors that are sent, not shared."""

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class SlowReader:
    """A peer that reads nothing until it is asked to."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(20)
        self.address = Address(*self._server.getsockname())

    def read(self, count: int) -> list[frames.Incoming]:
        sock, _ = self._server.accept()
        sock.settimeout(20)
        with sock:
            acceptor = Acceptor(TOKEN)
            while acceptor.wants:
                sock.sendall(acceptor.feed(sock.recv(acceptor.wants)))
            return [self._frame(sock) for _ in range(count)]

    def _frame(self, sock: socket.socket) -> frames.Incoming:
        frame = frames.Incoming(lambda shape, dtype: torch.empty(shape, dtype=dtype))
        while not frame.took(sock.recv_into(frame.want)):
            pass
        return frame

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def links() -> Iterator[Links]:
    events: queue.SimpleQueue = queue.SimpleQueue()
    made = Links(
        LinkEvents(deliver=events.put, broken=events.put, failed=events.put),
        token=TOKEN,
        host="127.0.0.1",
        empty=lambda shape, dtype: torch.empty(shape, dtype=dtype),
    )
    made.start()
    yield made
    made.stop()


@pytest.fixture
def reader() -> Iterator[SlowReader]:
    made = SlowReader()
    yield made
    made.close()


def worker(
    replica: int = 0,
    *,
    tied: bool = False,
    borrowed=lambda tensor: False,
    accumulate: str = "strict",
    is_alone: bool = False,
) -> StepTensors:
    (stage,) = stages(gpt(**SMALL, tied=tied), 1, DATA, accumulate=accumulate)
    updater = Updater(stage, adamw(lr=1e-2))
    return StepTensors(
        Worker(replica, 0),
        stage,
        updater,
        replicas=1 if is_alone else 2,
        borrowed=borrowed,
        shared=OnTheHost(),
        is_alone=is_alone,
    )


def parcel(kind: ParcelKind, step: int, *, sender: int = -1, owner: int = -1) -> Parcel:
    return Parcel(kind, 0, step, 0, None, 0, sender, owner)


def train_alone(tensors: StepTensors, step: int) -> torch.Tensor:
    """A step of a worker without peers, up to the end of its update. The sum, copied."""
    run_step([tensors.stage], step, COUNT)
    tensors.sum_chunk(SumChunk(step, ALONE, (), COUNT))
    tensors.assemble(AssembleSum(step, ALONE, ()))
    mean = tensors.sum_of(step).clone()
    tensors.updater.apply(step, tensors.sum_of(step))
    tensors.updated(step)
    return mean


@pytest.mark.parametrize("accumulate", ["strict", "fp32"])
def test_sums_of_a_worker_without_peers_become_its_means(accumulate: str) -> None:
    """A new epoch may ask for them once more, before the update."""
    weights = []
    for is_alone in (False, True):
        tensors = worker(accumulate=accumulate, is_alone=is_alone, tied=True)
        for step in (1, 2, 3):
            run_step([tensors.stage], step, COUNT)
            task = SumChunk(step, ALONE, (), COUNT)
            once, twice = tensors.sum_chunk(task), tensors.sum_chunk(task)
            assert math.fsum(once) == math.fsum(twice)
            is_own = tensors.sum_of(step).data_ptr() == tensors.stage.sums.flat.data_ptr()
            assert is_own == (is_alone and accumulate != "strict"), "of 8 bytes on a CPU"
            tensors.updater.apply(step, tensors.sum_of(step))
            tensors.updated(step)
            tensors.release_sum(step)
        weights.append(tensors.stage.masters.clone())
    assert torch.equal(*weights)


def test_a_feed_queued_behind_a_snapshot_arrives_as_it_was(links: Links, reader: SlowReader) -> None:
    """The sum's buffer is wanted again two steps later; the joining worker has read nothing by then."""
    tensors = worker(borrowed=links.borrows)
    links.send(reader.address, FrameKind.STATE, Envelope(TRANSFER, piece=StateEnd(0)), torch.ones(8_000_000))
    sums = {}
    for step in range(1, 6):
        sums[step] = train_alone(tensors, step)
        feed = parcel(ParcelKind.FEED, step)
        links.send(reader.address, feed, Envelope(1.0), *tensors.outgoing(feed, ALONE).tensors)
        tensors.release_sum(step)
    assert len({float(total.double().sum()) for total in sums.values()}) == len(sums)
    for frame in reader.read(1 + len(sums))[1:]:
        assert frame.parcel is not None
        assert torch.equal(frame.tensors[0], sums[frame.parcel.step]), f"feed of step {frame.parcel.step}"


def test_a_part_still_queued_when_its_work_is_discarded_arrives_as_it_was(
    links: Links, reader: SlowReader
) -> None:
    tensors = worker(borrowed=links.borrows)
    links.send(reader.address, FrameKind.STATE, Envelope(TRANSFER, piece=StateEnd(0)), torch.ones(8_000_000))
    run_step([tensors.stage], 1, COUNT)
    part = parcel(ParcelKind.PART, 1, sender=0, owner=1)
    sent = tensors.outgoing(part, BOTH).tensors
    before = sent[0].clone()
    links.send(reader.address, part, Envelope(SAID), *sent)
    tensors.discard(1, ())
    assert not tensors.stage.sums.values().any()
    run_step([tensors.stage], 1, 1)
    assert torch.equal(reader.read(2)[1].tensors[0], before)


def test_what_the_kernel_has_taken_is_not_borrowed_any_more(links: Links, reader: SlowReader) -> None:
    tensor = torch.ones(8_000_000)
    part = tensor[5:4_000_005]
    assert not links.borrows(part)
    links.send(reader.address, FrameKind.STATE, Envelope(TRANSFER, piece=StateEnd(0)), part)
    assert links.borrows(tensor)
    assert links.borrows(tensor[-1:]), "the memory is one"
    assert not links.borrows(torch.ones(3))
    reader.read(1)
    for _ in range(2000):
        if not links.borrows(tensor):
            return
        torch.ones(100_000).sum()
    raise AssertionError("all is read and the tensor is still borrowed")


def reduced(tied: bool) -> tuple[StepTensors, StepTensors, dict[Parcel, Payload]]:
    """Two replicas after the sums of their own chunks, and the chunks as sent."""
    pair = [worker(replica, tied=tied) for replica in range(2)]
    for replica, tensors in enumerate(pair):
        for microbatch in (0, 1) if replica == 0 else (2, 3):
            tensors.stage.forward(1, microbatch)
            tensors.stage.input_grad(1, microbatch)
            tensors.stage.weight_grad(1, microbatch)
    chunks = {}
    for me, other in (pair, pair[::-1]):
        part = parcel(ParcelKind.PART, 1, sender=other.me.replica, owner=me.me.replica)
        me.payloads[part] = other.outgoing(part, BOTH)
        me.sum_chunk(SumChunk(1, BOTH, (part,), COUNT))
        chunk = parcel(ParcelKind.SUM, 1, sender=me.me.replica)
        chunks[chunk] = me.outgoing(chunk, BOTH)
    return pair[0], pair[1], chunks


@pytest.mark.parametrize("accumulate", ["strict", "fp32"])
def test_a_worker_that_follows_by_feeds_has_the_bits_and_limits_of_the_one_that_feeds_it(
    accumulate: str,
) -> None:
    member, joiner = worker(accumulate=accumulate), worker(1, accumulate=accumulate)
    for step in range(1, 4):
        train_alone(member, step)
        if step == 1:  # a snapshot
            joiner.updater.load({n: t.clone() for n, t in member.updater.state(step).items()}, step)
            joiner.loaded(step)
        else:
            feed = parcel(ParcelKind.FEED, step)
            joiner.payloads[feed] = member.outgoing(feed, ALONE)
            joiner.updater.apply(step, joiner.fed(step, feed))
            joiner.updated(step)
        member.release_sum(step)
        assert torch.equal(member.stage.masters, joiner.stage.masters)
        assert member.stage.limits.at(step + 1) == joiner.stage.limits.at(step + 1)
        assert (member.stage.sums.step, joiner.stage.sums.step) == (step + 1, step + 1)
    is_strict = member.stage.sums.is_strict
    assert set(member.updater.state(3)) >= {f"extra/grid/{name}" for name in member.stage.slots if is_strict}


def test_a_sum_taken_as_a_copy_is_the_givers_also_for_a_tied_pair() -> None:
    """The giver has assembled its sum; the taker must not join the halves of the pair once more."""
    giver, taker, chunks = reduced(tied=True)
    theirs = next(chunk for chunk in chunks if chunk.sender == 1)
    giver.payloads[theirs] = chunks[theirs]
    squares = giver.assemble(AssembleSum(1, BOTH, (theirs,)))
    copy = parcel(ParcelKind.COPY, 1)
    taker.payloads[copy] = giver.outgoing(copy, BOTH)
    assert taker.assemble(AssembleSum(1, BOTH, (copy,))) == squares
    for tensors in (giver, taker):
        tensors.updater.apply(1, tensors.sum_of(1), 0.5)
    assert torch.equal(giver.stage.masters, taker.stage.masters)


def test_a_chunk_sent_again_after_assembly_is_the_chunk_that_was_summed() -> None:
    """A broken link is mended after the sender has assembled its sum and before the receiver has."""
    first, second, chunks = reduced(tied=True)
    before = {chunk: Payload((payload.tensors[0].clone(),)) for chunk, payload in chunks.items()}
    for tensors, sender in ((first, 1), (second, 0)):
        chunk = next(c for c in chunks if c.sender == sender)
        tensors.payloads[chunk] = before[chunk]
        tensors.assemble(AssembleSum(1, BOTH, (chunk,)))
    for tensors in (first, second):
        chunk = parcel(ParcelKind.SUM, 1, sender=tensors.me.replica)
        for payload in (tensors.outgoing(chunk, BOTH), chunks[chunk]):
            assert torch.equal(payload.tensors[0], before[chunk].tensors[0])


class ManyTensors(nn.Module):
    """As a stage of experts, each with matrices of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(2) for _ in range(MANY))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.stack(list(self.scales)).sum(0)


class Rows:
    def batch(self, step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((3, 2), 100.0 + microbatch), torch.zeros(3)


def summed(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output - targets).sum()


def over_the_wire(parcel: Parcel, envelope: Envelope, tensors: tuple[torch.Tensor, ...]) -> frames.Incoming:
    """As a receiver has it, who refuses a message that is not one."""
    arriving = frames.Incoming(lambda shape, dtype: torch.empty(shape, dtype=dtype))
    data = frames.encode(parcel, envelope, *tensors)
    for piece in (data, *map(frames.raw, tensors)):
        while len(piece):
            count = min(len(arriving.want), len(piece))
            arriving.want[:count] = piece[:count]
            piece = piece[count:]
            arriving.took(count)
    return arriving


MOST = MOST_PROMOTED + 8  # tensors of a message, in this test: as many as a real one holds take seconds
MANY = 2 * MOST + 2


@pytest.mark.parametrize("chunks", [0, 4])
def test_a_part_with_more_promoted_sums_than_a_message_holds_is_sent_and_summed(
    chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step nothing is known of the gradients, and a loss that is a sum promotes all of them."""
    for reader in (envelope, frames):
        monkeypatch.setattr(reader, "MAX_TENSORS", MOST)
    model = Model(layers=[ManyTensors], loss=summed)
    holders = ((0, 1), (1, 0)) * (chunks // 2)
    pair = []
    for replica in range(2):
        stage = Stage(model, range(1), data=Rows(), device=CPU, settings=StageSettings(sharded=bool(chunks)))
        updater = ShardedUpdater(stage, chunks=chunks) if chunks else Updater(stage)
        where = Worker(replica, 0)
        tensors = StepTensors(
            where,
            stage,
            updater,
            replicas=2,
            borrowed=lambda tensor: False,
            shared=OnTheHost(),
            holders=lambda step: holders,
        )
        stage.forward(1, replica)
        stage.input_grad(1, replica)
        stage.weight_grad(1, replica)
        assert stage.sums.num_promoted == MANY
        pair.append(tensors)
    for me, other in (pair, pair[::-1]):
        part = parcel(ParcelKind.PART, 1, sender=other.me.replica, owner=me.me.replica)
        arrived = over_the_wire(part, *other.contents(Send(part, me.me.replica, 0, SAID), BOTH))
        me.received(part, arrived.tensors, arrived.envelope.beside)
        owned = tuple(c for c, row in enumerate(holders) if row[0] == me.me.replica)
        me.sum_chunk(SumChunk(1, BOTH, (part,), 2.0, owned))
        means = me.by_chunk.means[1].values() if chunks else [me.sum_of(1)[me._stretches(part, BOTH)[0][1]]]
        found = torch.cat([mean.flatten() for mean in means])
        assert set(found[found != 0].tolist()) == {301.5}  # (3 * 100 + 3 * 101) / 2


@pytest.mark.parametrize("chunks", [0, 4])
def test_a_worker_that_begins_again_lets_go_of_its_first_state_before_it_builds_another(
    chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both at once would need twice the memory of a GPU."""
    monkeypatch.setattr(ShardedSteps, "begin", lambda self: None)  # it would ask who is a member
    shard = OptimizerSpec(shard=bool(chunks))
    job = Job(
        model=ModelSpec(preset="gpt-tiny", options=SMALL), data=DataSpec(kind="synthetic"), optimizer=shard
    )
    program = Program(job, gpt(**SMALL), DATA, adamw(lr=1e-2))
    before: list[weakref.ref[Any]] = []
    seen: list[str] = []

    def build() -> tuple[Stage, Updater | ShardedUpdater]:
        assert [one() for one in before] == [None] * len(before)
        stage = Stage(
            program.model, range(4), data=DATA, device=CPU, settings=StageSettings(sharded=bool(chunks))
        )
        updater = ShardedUpdater(stage, chunks=chunks) if chunks else Updater(stage)
        before.extend(weakref.ref(one) for one in (stage, updater, stage.masters, stage.sums.flat))
        return stage, updater

    control = WorkerControl(
        Sender("task", Worker(0, 0), 1), WorkerState(Worker(0, 0), program.rules(), incarnation=1)
    )
    signs = SimpleNamespace(shard=0, show=lambda **shown: seen.append(shown["doing"]))
    times = SimpleNamespace(recorder=None)
    ports = SimpleNamespace(states=SimpleNamespace(settle=lambda waiting: None))  # nothing is being saved
    work = WorkItems(control, build, ports=ports, plane=Idle(), signs=signs, times=times)
    for step in (1, 2):
        run_step([work.stage], step, 2)
        work.stage.take_gradients()
    work._touched = True
    assert work.do(Restore(0))
    assert seen == [LOADING], "the beacon: it may take long, and is no pause"
    assert len(before) == 8
    run_step([work.stage], 1, 2)


class Idle(OnTheHost):
    """A plane with nothing to carry."""

    links = None

    def borrows(self, tensor: torch.Tensor) -> bool:
        return False
