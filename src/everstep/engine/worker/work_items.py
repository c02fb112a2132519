"""How a worker carries out its work items: with its stage's layers, its optimizer and its tensors.

What is next is decided elsewhere (`core.worker`), and so is who hears of it (`worker_loop`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from everstep.core.worker.chunks import Chunks
from everstep.core.worker.control import WorkerControl
from everstep.core.worker.joining import WorkerLife
from everstep.engine.datasets.loading import Loader
from everstep.engine.fingerprint import partial_hash, settled
from everstep.engine.layers.boundary import Boundary, Gradients
from everstep.engine.prepare.fitting import allocated
from everstep.engine.shards.collectives import summed
from everstep.engine.shards.slices import sliced, together
from everstep.engine.stage.stage import Stage
from everstep.engine.state.optimizer import Updater
from everstep.engine.state.sharded import ShardedUpdater, StateSlice
from everstep.engine.telemetry.op_times import Began, OpTimes
from everstep.engine.telemetry.signs import WorkerSigns
from everstep.engine.worker.ports import Ports, StateParts
from everstep.engine.worker.step_tensors import StepTensors
from everstep.engine.worker.voted_ops import Hashes, VotedOps
from everstep.layout.box import whole
from everstep.net import host_memory
from everstep.net.links import Address
from everstep.net.plane import DataPlane
from everstep.net.sockets import FlowProgress
from everstep.net.transfers import StateSender
from everstep.protocol import work
from everstep.protocol.messages import LOADING, SAVING, TimesReported
from everstep.protocol.ops import Kind, Microbatch, Op, Worker
from everstep.protocol.parcels import Scores
from everstep.schedule.profile import ALLOCATED, HELD_FORWARD, HELD_WEIGHT, PEAK, ROOM

# What changes the state that a joiner is being sent.
_WRITES = (
    work.Update,
    work.Commit,
    work.Undo,
    work.ApplyFeed,
    work.AdoptWeights,
    work.LoadFill,
    work.Restore,
)
_OF_CHUNKS = (work.AdoptWeights, work.LoadFill, work.ApplyFeed, work.SaveCheckpoint, work.StoreCopy)


class WorkItems:
    def __init__(
        self,
        control: WorkerControl,
        build: Callable[[], tuple[Stage, Updater | ShardedUpdater]],
        *,
        ports: Ports,
        plane: DataPlane,
        signs: WorkerSigns,
        times: OpTimes,
        loader: Loader | None = None,
    ) -> None:
        self.control, self.ports, self.plane, self.shard = control, ports, plane, signs.shard
        self.state, self.me, self.rules = control.state, control.sender.worker, control.state.rules
        self.signs, self.times, self.loader = signs, times, loader
        self._last = self.rules.stages - 1
        self._data_waited_s = 0.0
        self._sent_before: dict[Address, FlowProgress] = {}
        self.sender = StateSender(plane.links)
        self._voted = VotedOps()
        self._build = build
        self.stage, made = build()
        self.tensors = StepTensors(
            self.me,
            self.stage,
            made,
            replicas=self.rules.replicas,
            borrowed=plane.borrows,
            shared=plane,
            holders=self.state.chunks.holders if self.rules.chunks else None,
            is_alone=self.rules.replicas * self.rules.stages == 1,
        )
        self._use(made)
        self._touched = False  # has the initial state been changed?

    def _use(self, made: Updater | ShardedUpdater) -> None:
        self.updater: Any = made  # where states are sharded, `sharded` uses it
        self.sharded: ShardedSteps | None = None
        if isinstance(made, ShardedUpdater):
            self.sharded = ShardedSteps(made, self.tensors, self.state.chunks)

    def do(self, task: work.WorkItem) -> Any:
        if isinstance(task, _WRITES):
            self._settle()
        if isinstance(task, work.StoreCopy) and not self.ports.states.takes(task, self.control.directions):
            return None
        if self.sharded is not None and isinstance(task, _OF_CHUNKS):
            return self._do_sharded(task, self.sharded)
        match task:
            case work.Compute():
                return self._compute(task)
            case work.HashState():
                return self._hash_state(task.step)
            case work.Recompute():
                return self._recompute(task)
            case work.Contribute():
                self.signs.maybe_die(task.step, "R", "before")
                return self._losses(task.step), self._weights(task.step), self._scores(task.step)
            case work.GatherParts():
                self.signs.begin(task.step, "R")
                self.signs.maybe_die(task.step, "R", "gathering")
                return self.tensors.gather(task)
            case work.SumChunk():
                return self._sum_chunk(task)
            case work.AssembleSum():
                return self._assemble(task)
            case work.CombineTied():
                return self.tensors.combine(task)
            case work.Update():
                return self._update(task)
            case work.Commit():
                self.signs.show(busy=True, doing=f"{self.me.stage}U")
                return self.updater.commit(task.step, self.tensors.sum_of(task.step))
            case work.Undo():
                return self.updater.undo()
            case work.Snapshot():
                return self._snapshot(task)
            case work.ApplyFeed():
                self._apply(task.step, self.tensors.fed(task.step, task.feed), task.scale)
                return self.tensors.updated(task.step)
            case work.Restore():
                self.signs.show(busy=True, doing=LOADING)
                return self._all_have(self._restore(task.state_step))
            case work.SaveCheckpoint():
                self.signs.show(busy=True, doing=SAVING)  # it may wait for the disk: no op's time is billed
                groups = self.updater.groups(task.state_step)
                share = share_of(self.updater.state(task.state_step), task.index, task.count)
                return self.ports.states.save(task, whole_tensors(share, task.index, task.count), groups)
            case work.StoreCopy():
                self.signs.show(busy=True, doing=SAVING)
                directions = self.control.directions
                if task.leaving and not directions.copy_at_end:
                    return None  # a peer on its node has the same state, and leaves it
                parts = whole_tensors(self.updater.state(task.state_step), 0, 1)
                return self.ports.states.copy(task, parts, directions)

    def _settle(self) -> None:
        """The state is about to change: until what is sent, saved or copied of it has been read."""
        waiting = partial(self.signs.show, busy=True, doing=SAVING)
        self.sender.settle(self._fed(), waiting)
        self.ports.states.settle(waiting)

    def _do_sharded(self, task: work.WorkItem, sharded: ShardedSteps) -> None:
        match task:
            case work.AdoptWeights():
                sharded.adopt(task)
            case work.LoadFill():
                self.signs.maybe_die(self.state.now.step, "U", "during")
                sharded.load_fill(task)
            case work.ApplyFeed():
                sharded.apply_feed(task)
            case work.SaveCheckpoint():
                self.signs.show(busy=True, doing=SAVING)
                sharded.save(task, self.ports)
            case work.StoreCopy():
                self.signs.show(busy=True, doing=SAVING)
                sharded.store(task, self.ports, self.control.directions)

    def _compute(self, task: work.Compute) -> Hashes | None:
        op = task.op
        microbatch = op.microbatch
        assert microbatch is not None
        self.signs.show(busy=True, doing=str(op))
        self.signs.begin(task.step, f"{op.kind}{microbatch.home}.{microbatch.number}")
        self.signs.maybe_die(task.step, f"{op.kind}{microbatch.home}.{microbatch.number}", "before")
        number, stage = self.number(microbatch), self.stage
        given: Any = None
        if task.input is not None:
            given = together(self.tensors.boundaries[task.input], self.stage.shards, self.stage.device)
        if op.kind is Kind.F:
            self._load_data(task.step, number, op)
            if stage.evaluates(task.step):
                self.signs.show(busy=True, doing=f"evaluating beside {op}")
                stage.evaluate(task.step, number, given)
                self.signs.show(busy=True, doing=str(op))
        began = self.times.begin()
        output: Boundary | Gradients | None = None
        hash, hashes, at = "", None, (stage, task.step, number)
        if op.kind is Kind.F:
            output = stage.forward(task.step, number, given)
            if task.hashed:
                hash = self._voted.forward(*at, given, output)
        elif op.kind is Kind.I:
            output = stage.input_grad(task.step, number, given)
            if task.hashed:
                hash = self._voted.input_grad(*at, given, output)
        if op.kind is Kind.W:
            seen = self._voted.contributes(task.step, number) if task.hashed else None
            stage.weight_grad(task.step, number, seen)
            hashes = self._voted.finish(task.step, number) if task.hashed else None
        if task.output is not None:
            assert output is not None
            output = replace(output, hash=hash)
            self.tensors.boundaries[task.output] = sliced(output, self.stage.shards).moved(self.plane.kept)
        if stage.trains(task.step):  # else its time is none that an op takes
            self._time(op.kind, began, str(op))
        self.signs.maybe_die(task.step, f"{op.kind}{microbatch.home}.{microbatch.number}", "after")
        return hashes

    def _recompute(self, task: work.Recompute) -> list[Hashes]:
        """What another worker hosts, from the same inputs."""
        number = self.number(task.microbatch)
        given: Any
        gradient: Any
        self.signs.show(busy=True, doing=f"checking {task.microbatch}")
        if task.replay is not None:
            given, gradient = self.tensors.replayed(task.replay)
        else:
            given = None if task.activation is None else self.tensors.boundaries[task.activation]
            gradient = None if task.gradient is None else self.tensors.boundaries[task.gradient]
        return [self._voted.again(self.stage, task.step, number, given, gradient) for _ in range(task.runs)]

    def _hash_state(self, step: int) -> Hashes:
        self.signs.show(busy=True, doing=f"checking the state before step {step}")
        return state_hashes(self.stage, {} if self.sharded is not None else self.updater.state())

    def _load_data(self, step: int, number: int, op: Op) -> None:
        """Data first, and under its own name: a slow loader is not a slow op."""
        if self.loader is not None:
            self.loader.shows = lambda: self.signs.show(busy=True, doing=f"loading data for {op}")
            coming = islice(self._coming(step), self.loader.ahead + 1)
            self.loader.expect([(at, self.number(microbatch)) for at, microbatch in coming])
        self.stage.load(step, number)
        self.signs.show(busy=True, doing=str(op))

    def _coming(self, step: int) -> Iterator[tuple[int, Microbatch]]:
        """The microbatches whose forward is next here, in order, at the ends of the model."""
        ends = (0, self._last)
        for op in reversed(self.state.now.todo):
            if op.kind is Kind.F and op.microbatch is not None and op.stage in ends:
                yield step, op.microbatch
        if step < self.state.steps.last_step:
            for op in self.state.mail.order.ops(step + 1):
                if op.kind is Kind.F and op.microbatch is not None and op.stage in ends:
                    yield step + 1, op.microbatch

    def _losses(self, step: int) -> list[tuple[Microbatch, float]]:
        if self.me.stage != self._last:
            return []
        done = [
            op.microbatch for op in self.state.now.done if op.kind is Kind.F and op.microbatch is not None
        ]
        losses = [self.stage.loss(step, self.number(microbatch)) for microbatch in done]
        found = torch.stack(losses).tolist() if losses else []  # the host waits once, not for each
        return list(zip(done, found, strict=True))

    def _scores(self, step: int) -> Scores:
        if self.me.stage != self._last or not self.stage.evaluates(step):
            return ()
        done = self.state.now.accumulated()
        return tuple((m, self.stage.scores(step, self.number(m))) for m in done)

    def _weights(self, step: int) -> dict[Microbatch, float]:
        done = self.state.now.accumulated()
        return {m: self.stage.weight(step, self.number(m)) for m in done}

    def _sum_chunk(self, task: work.SumChunk) -> tuple[float, ...]:
        began = self.times.begin()
        self.signs.begin(task.step, "R")
        self.signs.maybe_die(task.step, "R", "during")
        squares = self.tensors.sum_chunk(task)
        self._time(Kind.R, began)
        return squares

    def _assemble(self, task: work.AssembleSum) -> float | None:
        squares = self.tensors.assemble(task)
        self.signs.maybe_die(task.step, "R", "after")
        return squares

    def _update(self, task: work.Update) -> None:
        began = self.times.begin()
        self.signs.show(busy=True, doing=f"{self.me.stage}U")
        self.signs.maybe_die(task.step, "U", "before")
        if self.sharded is not None:
            self.sharded.update(task)
        elif task.keep:
            self._touched = True
            self.updater.preview(task.step, self.tensors.sum_of(task.step))
        else:
            self._apply(task.step, self.tensors.sum_of(task.step), task.scale)
        self.tensors.updated(task.step)
        self._time(Kind.U, began)
        if self.loader is not None:
            waited_s, self._data_waited_s = self.loader.waited_s - self._data_waited_s, self.loader.waited_s
            self.times.stopwatch.waited_for_data(waited_s)
        self.times.stopwatch.updated(eagerly=task.keep)
        if (measured := self.times.stopwatch.step(task.step)) is not None:
            measured["times"] |= self._memory()
            name, worker, incarnation = self.control.sender
            carriers = self._carriers()
            sent = self._sent()
            times = TimesReported(
                task=name, worker=worker, incarnation=incarnation, carriers=carriers, sent=sent, **measured
            )
            self.ports.report(times)
        self.signs.maybe_die(task.step, "U", "after")

    def _apply(self, step: int, mean: Tensor, scale: float | None) -> None:
        self._touched = True
        if scale is not None:
            self.updater.apply(step, host_memory.to_device(mean, self.stage.device), scale)

    def _snapshot(self, task: work.Snapshot) -> None:
        address = self.control.book.get(Worker(task.joiner, self.me.stage))
        if address is None:
            return
        target = self.address(address)
        step = task.transfer.state_step
        state = self.updater.weights(step) if self.sharded is not None else self.updater.state(step)
        self.sender.begin(target, task.transfer, state)

    def _fed(self) -> list[Address]:
        """The joiners that this worker feeds."""
        joiners = [Worker(replica, self.me.stage) for replica in self.state.feeder.feeds]
        return [self.address(self.control.book[worker]) for worker in joiners if worker in self.control.book]

    def place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Where a tensor of a peer's state belongs, if this worker has no state of its own to lose."""
        if self.state.joiner.life is not WorkerLife.EMPTY:
            return None
        self._touched = True
        self.ports.states.settle(lambda: None)
        found: Tensor | None = self.updater.place(name, shape, dtype)
        return found

    def load_arrived(self, state_step: int, state: Mapping[str, Tensor]) -> None:
        """A joiner has a peer's state, or with sharded states its weights."""
        self.ports.states.settle(lambda: None)
        if self.sharded is None:
            self._load(state_step, state)
            return
        self._touched = True
        self.updater.follow(state, state_step)
        self.tensors.loaded(state_step)

    def _restore(self, state_step: int) -> bool:
        """False: the state is gone."""
        self.stage.discard()
        if state_step == 0:
            if self._touched:
                self.tensors.let_go()
                del self.stage, self.updater, self.sharded
                gc.collect()  # layers and their forwards know each other; two of them would not fit on a GPU
                self.stage, made = self._build()
                self.tensors.rebuilt(self.stage, made)
                self._use(made)
                self._touched = False
            if self.sharded is not None:
                self.sharded.begin()
                self._touched = True
            return True
        names, directions = list(self.stage.slots), self.control.directions
        load = partial(self._load, state_step, owned=True)
        return self.ports.states.load(state_step, names, directions, load)

    def _all_have(self, mine: bool) -> bool:
        """A state that one shard could not load is gone for all."""
        shards = self.stage.shards
        if shards is None:
            return mine
        return not summed(shards, [0.0 if mine else 1.0], self.stage.device)[0]

    def _load(self, state_step: int, state: Mapping[str, Tensor], *, owned: bool = False) -> None:
        self._touched = True
        if self.sharded is not None:
            self.sharded.load(state_step, state)
        else:
            self.updater.load(state, state_step, owned=owned)
        self.tensors.loaded(state_step)

    def number(self, microbatch: Microbatch) -> int:
        """Its number in the whole step, on any worker."""
        return microbatch.home * self.rules.microbatches + microbatch.number

    def _time(self, kind: Kind, began: Began, doing: str = "") -> None:
        step = self.state.now.step
        slower = self.signs.slower(step)
        self.times.end(kind, began, step, doing=doing or f"{self.me.stage}{kind}", slower=slower)

    def _memory(self) -> dict[str, float]:
        """What a stash takes and how much there is for stashes, in bytes, for the scheduler."""
        forward, weight = self.stage.held_bytes
        held = {HELD_FORWARD: float(forward), HELD_WEIGHT: float(weight)}
        shared, device = self.plane.shared_bytes, self.stage.device
        if device.type == "cuda":
            held[ALLOCATED], held[PEAK] = (float(each + shared) for each in allocated(self.stage))
            torch.cuda.reset_peak_memory_stats(device)
        room = self.ports.room(self.stage, shared)
        return held if room is None else held | {ROOM: room}

    def _carriers(self) -> dict[str, str]:
        """By peer: what carries tensors to it now."""
        book = {self.address(at): worker for worker, at in self.control.book.items()}
        return {str(book[to]): kind for to, kind in self.plane.carriers.items() if to in book}

    def _sent(self) -> dict[str, tuple[int, float]]:
        """By peer on another machine: bytes that have come there, by its socket and its lane, and seconds
        under way, since the last call.
        """
        book = {self.address(at): worker for worker, at in self.control.book.items()}
        now, before, here = self.plane.progress(), self._sent_before, self.plane.links.address.host
        self._sent_before = now
        return {
            str(book[to]): (seen.acked_bytes - before[to].acked_bytes, seen.busy_s - before[to].busy_s)
            for to, seen in now.items()
            if to in book and to.host != here and to in before and seen.acked_bytes >= before[to].acked_bytes
        }

    def address(self, address: tuple[str, int]) -> Address:
        """Of the same shard of that worker: shards listen on neighbouring ports."""
        host, port = address
        return Address(host, port + self.shard)


class ShardedSteps:
    """What is done with sharded states, in the place of one optimizer for the whole stage."""

    def __init__(self, updater: ShardedUpdater, tensors: StepTensors, chunks: Chunks) -> None:
        self.updater, self.tensors, self.chunks = updater, tensors, chunks

    def update(self, task: work.Update) -> None:
        """The chunks that this worker holds. A skipped step changes none."""
        assert self.tensors.by_chunk is not None
        if task.scale is not None:
            means = self.tensors.by_chunk.means[task.step]
            self.updater.apply(task.step, {chunk: means[chunk] for chunk in task.chunks}, task.scale)

    def adopt(self, task: work.AdoptWeights) -> None:
        for parcel in task.weights:
            (weights,) = self.tensors.payloads[parcel].tensors
            self.updater.weights_of(parcel.owner).copy_(
                host_memory.to_device(weights, self.updater.stage.device)
            )

    def load_fill(self, task: work.LoadFill) -> None:
        payload = self.tensors.payloads[task.fill]
        self.updater.take_fill(task.fill.owner, payload.tensors, payload.facts)

    def apply_feed(self, task: work.ApplyFeed) -> None:
        """The working weights after a step that this joiner took no part in."""
        self.updater.stage.working.copy_(self.tensors.fed(task.step, task.feed))
        self.tensors.updated(task.step)

    def begin(self) -> None:
        """The initial state."""
        self.updater.begin(self.chunks.held(1))

    def load(self, state_step: int, state: Mapping[str, Tensor]) -> None:
        self.updater.load(state, state_step, self.chunks.held(state_step + 1))

    def store(self, task: work.StoreCopy, ports: Ports, directions: work.StateDirections) -> None:
        """No other worker has all of these chunks: it leaves its own behind whatever its node keeps."""
        parts = self._parts(task.chunks, len(self.updater.ranges), task.state_step)
        ports.states.copy(task, parts, directions)

    def save(self, task: work.SaveCheckpoint, ports: Ports) -> None:
        groups = self.updater.groups(task.state_step)
        ports.states.save(task, self._parts(task.chunks, task.count, task.state_step), groups)

    def _parts(self, chunks: Iterable[int], count: int, step: int) -> StateParts:
        return StateParts(count, {chunk: self.updater.slices(chunk, step) for chunk in chunks})


def share_of(state: Mapping[str, Tensor], index: int, count: int) -> dict[str, Tensor]:
    """What the `index`-th of `count` peers writes of the state they all have: the largest tensors first, each
    for the peer with the least so far.
    """
    loads = [0] * count
    mine = {}
    for name in sorted(state, key=lambda name: (-state[name].nbytes, name)):
        who = loads.index(min(loads))
        loads[who] += state[name].nbytes + 1
        if who == index:
            mine[name] = state[name]
    return mine


def state_hashes(stage: Stage, state: dict[str, Tensor]) -> Hashes:
    """Of what a checkpoint would hold, and of the weights that the layers compute with. These are the masters
    themselves until an eager update has parted them, and a worker that joined later may have had none.
    """
    working = {f"working/{name}": view for name, view in stage.views(stage.working).items()}
    return settled({name: partial_hash([tensor]) for name, tensor in (state | working).items()})


def whole_tensors(state: Mapping[str, Tensor], number: int, count: int) -> StateParts:
    """One part, of tensors that are not cut."""
    slices = [
        StateSlice(name, tuple(tensor.shape), whole(tuple(tensor.shape)), tensor)
        for name, tensor in state.items()
    ]
    return StateParts(count, {number: slices})
