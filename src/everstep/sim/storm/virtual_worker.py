"""A virtual worker's hands: what the engine does with tensors, done with symbols.

The walker decides, this obeys; the two together are a process. A payload that is asked for and not there
raises, as it would in the engine: an outbox was dropped too early.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from everstep.core.words import worker_messages as msg
from everstep.core.words.cluster_messages import NotifyWorker
from everstep.core.words.ops import Kind, Worker
from everstep.core.worker.joining import FrameUse
from everstep.core.worker.worker_state import WorkerState
from everstep.sim.storm.checkers import Checkers, Violation
from everstep.sim.storm.disk import CheckpointDisk, ShelfMemory
from everstep.sim.storm.network import VirtualLink
from everstep.sim.storm.truth import Truth, VirtualState, applied, weight
from everstep.sim.storm.virtual_chunks import VirtualChunks

_HALVES = {Kind.B: (Kind.I, Kind.W)}


class VirtualWorker:
    """One process: a walker, its payloads, its inbox."""

    def __init__(
        self,
        walker: WorkerState,
        incarnation: int,
        node: int,
        truth: Truth,
        checkers: Checkers,
        disk: CheckpointDisk,
    ) -> None:
        self.walker, self.incarnation, self.node = walker, incarnation, node
        self.me: Worker = walker.me
        self.truth, self.checkers, self.disk = truth, checkers, disk
        self.state = VirtualState(0, 0)  # what the optimizer has
        self.working = self.state  # what the layers compute with: ahead of it after an eager update
        self.chunks = VirtualChunks(self.me, walker.rules.chunks, checkers)
        self.payloads: dict[msg.Parcel, Any] = {}
        self.inputs: dict[tuple[int, Any], bool] = {}  # (step, microbatch) -> right weights so far?
        self.gradients: dict[int, list[tuple[Any, bool]]] = {}
        self.sums: dict[int, tuple[tuple[Any, bool], ...]] = {}
        self.inbox: deque[tuple[str, Any]] = deque()
        self.book: dict[Worker, int] = {}  # the incarnations it was told of
        self.links: dict[tuple[Worker, int], VirtualLink] = {}
        self.reports: VirtualLink | None = None
        self.task: msg.WorkItem | None = None
        self.told_epoch = 0
        self.alive = True
        self.hung = False
        self.moment = 0  # changes whenever it does something, as a beacon would
        self.moved_us = 0
        self.shelving = 0  # copies under way to a shelf
        self.directions: dict[int, NotifyWorker] = {}  # by epoch: what orders to go on said about states
        self.shelf: ShelfMemory | None = None
        self.arriving: dict[str, int] = {}  # the frames of a state that this joiner copies
        self.snapshot_out: Callable[[msg.Snapshot, VirtualState], None] = lambda task, state: None

    # -------------------------------------------------------------- tasks

    def do(self, task: msg.WorkItem) -> Any:
        """Run a task to its end; its answer."""
        return _DO[type(task)](self, task)

    def _compute(self, task: msg.Compute) -> None:
        working = self.chunks.weights if self.chunks.count else self.working
        op, right = task.op, working == self.truth.states[task.step - 1]
        key = (task.step, op.microbatch)
        payloads, inputs = self.payloads, self.inputs
        for kind in _HALVES.get(op.kind, (op.kind,)):
            if kind is Kind.W:
                self.gradients.setdefault(task.step, []).append((op.microbatch, inputs.pop(key)))
                continue
            right = right and (task.input is None or payloads[task.input])
            if kind is Kind.I:
                right = right and inputs[key]
            inputs[key] = right
        if task.output is not None:
            payloads[task.output] = right

    def _contribute(self, task: msg.Contribute) -> tuple[Any, ...]:
        mine = self.gradients.setdefault(task.step, [])
        weights = {microbatch: weight(task.step, microbatch) for microbatch, _ in mine}
        if self.me.stage != self.walker.rules.stages - 1:
            return (), weights
        return [(op.microbatch, 1.0) for op in self.walker.now.done if op.kind is Kind.F], weights

    def _sum_chunk(self, task: msg.SumChunk) -> tuple[float]:
        self.checkers.divisor(self.me, task.step, task.weight)
        bag = list(self.gradients[task.step])
        for part in task.parts:
            bag += self.payloads[part]
        bag.sort()
        if self.chunks.count:
            self.chunks.sum_chunks(task, tuple(bag))
        else:
            self.sums[task.step] = tuple(bag)
        first = self.me.replica == task.members[0]
        return (self.truth.squares(task.step, self.me.stage) if first else 0.0,)

    def _assemble(self, task: msg.AssembleSum) -> None:
        if self.chunks.count:
            given = [self.payloads[chunk] for chunk in task.chunks]
            self.chunks.assemble(task.step, given, self.walker.chunks.held(task.step))
            return
        for chunk in task.chunks:
            bag = self.payloads[chunk]
            if chunk.what is msg.ParcelKind.COPY:
                self.sums[task.step] = bag
            else:
                self.checkers.sums_agree(self.me, task.step, bag, self.sums[task.step])

    def _combine(self, task: msg.CombineTied) -> float:
        self.checkers.sum_is_whole(self.me, task.step, self.payloads[task.other])
        self.payload_of(task.other._replace(stage=self.me.stage))
        return self.truth.squares(task.step, self.me.stage)

    def _update(self, task: msg.Update) -> None:
        for parcel in [p for p in self.payloads if p.what is msg.ParcelKind.TIED and p.step < task.step]:
            del self.payloads[parcel]
        if self.chunks.count:
            self.chunks.update(task)
            return
        if task.keep:  # it may be undone: then another stage's update was invalid, and so is this sum
            self.checkers.sum_is_whole(self.me, task.step, self.sums[task.step])
            self.working = applied(self.state, task.step, task.scale)
            return
        self.checkers.sum_used(self.me, task.step, self.sums[task.step])
        self.state = self.working = applied(self.state, task.step, task.scale)

    def _adopt(self, task: msg.AdoptWeights) -> None:
        self.chunks.adopt({parcel.owner: self.payloads[parcel] for parcel in task.weights})
        self._agree(task.step)

    def _agree(self, step: int) -> None:
        """Sharded: the state of the whole stage, as the layers have it."""
        found = self.chunks.weights
        if found is None:
            raise Violation(f"the right state: {self.me} computes with weights of different steps")
        self.state = self.working = found

    def _load_fill(self, task: msg.LoadFill) -> None:
        self.chunks.fill(task.fill, self.payloads[task.fill])

    def _commit(self, task: msg.Commit) -> None:
        self.checkers.sum_used(self.me, task.step, self.sums[task.step])
        self.state = applied(self.state, task.step, 1.0)
        assert self.working == self.state, "a commit of something else than was computed with"

    def _undo(self, task: msg.Undo) -> None:
        assert self.working != self.state, "an undo without an eager update"
        self.working = self.state

    def _snapshot(self, task: msg.Snapshot) -> None:
        if self.chunks.count:
            self._agree(task.transfer.state_step)
        self.snapshot_out(task, self.state)

    def _apply_feed(self, task: msg.ApplyFeed) -> None:
        if self.chunks.count:
            self.state = self.working = self.payloads[task.feed]
            self.checkers.state_restored(self.me, task.step, self.state)
            self.chunks.follow(self.state)
            return
        self.checkers.sum_used(self.me, task.step, self.payloads[task.feed])
        self.state = self.working = applied(self.state, task.step, task.scale)

    def _restore(self, task: msg.Restore) -> bool:
        told = self.directions.get(self.walker.epoch)
        if told is not None and told.copies:
            assert self.shelf is not None
            shelf = told.copies[self.me.stage][0]
            state = self.shelf.get(shelf.node, task.state_step, self.me.stage)
            if state is None:
                return False
        else:
            state = self.disk.read(task.state_step, self.me.stage)
        self.checkers.state_restored(self.me, task.state_step, state)
        assert state is not None
        self.state = self.working = state
        if self.chunks.count:
            self.chunks.load(state, self.walker.chunks.held(task.state_step + 1))
        return True

    def _shelve(self, task: msg.StoreCopy) -> None:
        self.checkers.state_saved(self.me, task.state_step, self.state)
        self.chunks.saved(task.state_step, task.chunks)
        self.shelving += 1

    def _save(self, task: msg.SaveCheckpoint) -> None:
        self.checkers.state_saved(self.me, task.state_step, self.state)
        self.chunks.saved(task.state_step, task.chunks)
        self.disk.begin(task.state_step, self.me.stage)

    # -------------------------------------------------------------- commands

    def payload_of(self, parcel: msg.Parcel) -> Any:
        match parcel.what:
            case msg.ParcelKind.ACTIVATION | msg.ParcelKind.GRADIENT:
                return self.payloads[parcel]
            case msg.ParcelKind.PART:
                return tuple(self.gradients[parcel.step])
            case msg.ParcelKind.WEIGHTS | msg.ParcelKind.FILL:
                return self.chunks.weights_of(parcel)
            case msg.ParcelKind.SUM if self.chunks.count:
                holders = self.walker.chunks.holders(parcel.step)
                return self.chunks.sums_for(parcel.step, holders, parcel.owner)
            case msg.ParcelKind.FEED if self.chunks.count:
                self._agree(parcel.step)
                return self.state
            case msg.ParcelKind.SUM | msg.ParcelKind.COPY | msg.ParcelKind.FEED:
                return self.sums[parcel.step]
            case msg.ParcelKind.TIED:
                if parcel not in self.payloads:
                    self.payloads[parcel] = self.sums[parcel.step]
                return self.payloads[parcel]
        return None

    def take_state(self, transfer: msg.StateTransfer, name: str, value: int) -> None:
        """One frame of two, so that a state could be made of two transfers' halves."""
        use = self.walker.take_state(transfer)
        if use is FrameUse.DROP:
            return
        if use is FrameUse.BEGIN:
            self.arriving.clear()
        self.arriving[name] = value
        if len(self.arriving) == len(VirtualState._fields):
            self.state = self.working = VirtualState(**self.arriving)
            self.chunks.follow(self.state)
            self.arriving.clear()
            self.walker.state_arrived(transfer)

    def forget(self, command: msg.Forget) -> None:
        for parcel in command.parcels:
            self.payloads.pop(parcel, None)

    def release_gradients(self, command: msg.ReleaseGradients) -> None:
        del self.gradients[command.step]

    def drop_stashes(self, command: msg.DropStashes) -> None:
        for microbatch in command.microbatches:
            del self.inputs[command.step, microbatch]

    def release_sum(self, command: msg.ReleaseSum) -> None:
        if self.chunks.count:
            self.chunks.sums.pop(command.step)
        else:
            self.checkers.sum_used(self.me, command.step, self.sums.pop(command.step))
        self.checkers.kept(self.me, len(self.payloads), sum(step <= command.step for step, _ in self.inputs))

    def discard(self, command: msg.DiscardWork) -> None:
        first = command.from_step
        for store in (self.gradients, self.sums, self.chunks.sums):
            for step in [s for s in store if first is None or s >= first]:
                del store[step]
        self.inputs = {
            key: right for key, right in self.inputs.items() if first is not None and key[0] < first
        }


_DO: dict[type, Callable[[VirtualWorker, Any], Any]] = {
    msg.Compute: VirtualWorker._compute,
    msg.Contribute: VirtualWorker._contribute,
    msg.SumChunk: VirtualWorker._sum_chunk,
    msg.AssembleSum: VirtualWorker._assemble,
    msg.CombineTied: VirtualWorker._combine,
    msg.Update: VirtualWorker._update,
    msg.AdoptWeights: VirtualWorker._adopt,
    msg.LoadFill: VirtualWorker._load_fill,
    msg.Commit: VirtualWorker._commit,
    msg.Undo: VirtualWorker._undo,
    msg.Snapshot: VirtualWorker._snapshot,
    msg.ApplyFeed: VirtualWorker._apply_feed,
    msg.Restore: VirtualWorker._restore,
    msg.SaveCheckpoint: VirtualWorker._save,
    msg.StoreCopy: VirtualWorker._shelve,
}
