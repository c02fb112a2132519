"""A virtual worker: the real `WorkerControl`, with symbols where the engine has tensors.

Buffers are cells that sends refer to, as the engine's sends borrow tensors: what a receiver gets is what the
cell holds when the message arrives. The rules of who may write to a cell are the engine's own
(`core.worker.buffers`); without them a queued message would change on its way, and a checker would see it.

A payload that is asked for and not there raises, as it would in the engine: an outbox was dropped too early.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

from everstep.core.worker.buffers import Buffers
from everstep.core.worker.control import WorkerControl
from everstep.core.worker.joining import FrameUse
from everstep.core.worker.rules import TaskRules
from everstep.core.worker.worker_state import WorkerState
from everstep.protocol import work
from everstep.protocol.messages import (
    SAVING,
    FailedRead,
    Sender,
    WorkerReport,
)
from everstep.protocol.ops import Kind
from everstep.protocol.parcels import Parcel, ParcelKind, StateTransfer
from everstep.protocol.work import PeerAddress
from tests.storms.checkers import Violation
from tests.storms.network import MENDING, VirtualLink
from tests.storms.scene import Scene
from tests.storms.shard_group import VirtualGroup
from tests.storms.truth import (
    Cell,
    VirtualState,
    VirtualSum,
    applied,
    spoiled,
    weight,
)
from tests.storms.virtual_chunks import VirtualChunks


class VirtualWorker:
    """One process."""

    def __init__(
        self,
        sender: Sender,
        rules: TaskRules,
        *,
        node: int,
        address: PeerAddress,
        scene: Scene,
    ) -> None:
        state = WorkerState(sender.worker, rules, incarnation=sender.incarnation)
        self.control = WorkerControl(sender, state, MENDING)
        self.worker_state = self.control.state
        self.sender, self.me, self.incarnation = sender, sender.worker, sender.incarnation
        self.node, self.address = node, address
        self.truth, self.checkers = scene.truth, scene.checkers
        self.disk, self.memory = scene.disk, scene.memory
        self.failed_reads: tuple[FailedRead, ...] | None = None  # of a state it has just loaded from memory
        self.state = VirtualState(0, 0)  # what the optimizer has
        self.working = self.state  # what the layers compute with: ahead of it after an eager update
        self.chunks = VirtualChunks(self.me, rules.chunks, scene.checkers)
        self.payloads: dict[Parcel, Any] = {}
        self.gathered: dict[Parcel, Any] = {}  # parts of its node
        self.inputs: dict[
            tuple[int, Any, int], bool
        ] = {}  # (step, microbatch, part) -> right weights so far?
        self.made: dict[tuple[int, Any], tuple[bool, ...]] = {}  # what a voted microbatch was computed from
        self.gradients = Cell([])  # of the step it is in
        self.summed = 0  # sharded: the step whose gradients these are
        self.released = 0  # the step whose gradients may be written over
        self.buffers: Buffers[Cell] = Buffers(
            borrowed=self._is_borrowed, new=Cell, copy=lambda cell: Cell(cell.value)
        )
        self.sums: dict[int, Cell] = {}
        self.arriving: dict[str, int] = {}  # the frames of a state that this joiner copies
        self.inbox: deque[Any] = deque()
        self.links: dict[PeerAddress, VirtualLink] = {}
        self.answered: set[PeerAddress] = set()  # since the link to them broke last
        self.slots = frozenset({0})
        self.group: VirtualGroup | None = None  # if it has shards: the others
        self.lost_shard = 0  # the one whose end ended it
        self.task: work.WorkItem | None = None
        self.began_us = 0  # when the task was begun
        self.flip = scene.spec.flip if scene.spec.flip and scene.spec.flip.worker == self.me else None
        self.is_flipped = self.flip is not None
        self.num_wrong = 0
        self.spike = scene.spec.spike if scene.spec.spike and scene.spec.spike.worker == self.me else None
        self.alive = True
        self.hung = False
        self.asleep = False  # in the kernel, where no signal reaches it
        self.is_stuck = False  # it hangs before it has reported
        self.doomed = False  # killed in its sleep
        self.leaving = False
        self.woken = False
        self.alarm_us: int | None = None
        self.writing = 0  # checkpoints and copies under way
        self.moment = 0  # changes whenever its beacon does
        self.moved_us = 0
        self.doing = "a snapshot of a peer's state"  # as the engine's beacon shows first
        self.busy = False

    def started(self) -> WorkerReport:
        """What it reports when it is up."""
        return self.control.started(self.address).report

    def _is_borrowed(self, cell: Cell) -> bool:
        return any(item[2] is cell for link in self.links.values() for item in link.queue)

    def show(self, now_us: int, moment: int, *, busy: bool, doing: str) -> None:
        """What its beacon shows, if that is news."""
        if self.control.shows(busy=busy, doing=doing):
            self.moment, self.moved_us, self.busy, self.doing = moment, now_us, busy, doing

    # -------------------------------------------------------------- tasks

    def do(self, task: work.WorkItem) -> Any:
        """Run a task to its end; its answer."""
        return _DO[type(task)](self, task)

    def _compute(self, task: work.Compute) -> dict[str, str] | None:
        working = self.chunks.weights if self.chunks.count else self.working
        op, right = task.op, working == self.truth.states[task.step - 1]
        flipped = self.flip is not None and self.flip.strikes(task.step, op.microbatch, self.incarnation)
        if task.hashed:
            given = () if task.input is None else (self.payloads[task.input],)
            self.made[task.step, op.microbatch] = (*self.made.pop((task.step, op.microbatch), ()), *given)
        right = right and not flipped
        if flipped and self.checkers.bad is not None:
            self.checkers.bad_at = (self.node, self.slots)
        key = (task.step, op.microbatch, op.stage)
        payloads, inputs = self.payloads, self.inputs
        if op.kind is Kind.W:
            right = inputs.pop(key) and right
            assert op.microbatch is not None
            self._gradients(task.step).value.append((op.microbatch, right))
        else:
            right = right and (task.input is None or payloads[task.input])
            if op.kind is Kind.I:
                right = right and inputs[key]
            inputs[key] = right
        if task.output is not None:
            payloads[task.output] = right
        if not task.hashed or op.kind is not Kind.W:
            return None
        return _made(working, self.made.pop((task.step, op.microbatch)), self._wrongness(flipped))

    def _wrongness(self, flipped: bool) -> int:
        """What is wrong in what it makes: the same each time, or something else."""
        if not flipped:
            return 0
        self.num_wrong += 1
        return 1 if self.flip is None or self.flip.steady else self.num_wrong

    def _hash_state(self, task: work.HashState) -> dict[str, str]:
        if self.flip is not None and self.flip.strikes(task.step, None, self.incarnation):
            self.flip = None
            self.state = self.working = VirtualState(self.state.step, self.state.chain ^ 1)
        return {"weights": str(self.chunks.weights if self.chunks.count else self.state)}

    def _recompute(self, task: work.Recompute) -> list[dict[str, str]]:
        """A flip is planted in what one worker makes of a microbatch the first time."""
        working = self.chunks.weights if self.chunks.count else self.working
        given = self._inputs(task.step, task.microbatch, task.replay)
        flip = self.flip
        again = flip is not None and flip.lasting
        wrong = again and flip is not None and flip.strikes(task.step, task.microbatch, self.incarnation)
        return [_made(working, given, self._wrongness(wrong)) for _ in range(task.runs)]

    def _inputs(self, step: int, microbatch: Any, replay: Parcel | None) -> tuple[bool, ...]:
        if replay is not None:
            found: tuple[bool, ...] = self.payloads[replay]
            return found
        name, stage = self.worker_state.mail.name, self.me.stage
        kinds = (ParcelKind.ACTIVATION, ParcelKind.GRADIENT)
        names = [name(kind, step, stage, microbatch) for kind in kinds]
        return tuple(self.payloads[each] for each in names if each in self.payloads)

    def _contribute(self, task: work.Contribute) -> tuple[Any, ...]:
        now, last = self.worker_state.now, self.worker_state.rules.stages - 1
        weights = {microbatch: weight(task.step, microbatch) for microbatch in now.accumulated()}
        if last != self.me.stage:
            return (), weights
        done = [op.microbatch for op in now.done if op.kind is Kind.F and op.stage == last]
        losses = dict.fromkeys(done, 1.0)
        spike = self.spike
        if spike is not None and spike.microbatch in losses and spike.step == task.step:
            losses[spike.microbatch], self.spike = math.nan, None
        return list(losses.items()), weights

    def _gather(self, task: work.GatherParts) -> None:
        parts = [tuple(self._gradients(task.step).value), *(self.payloads[part] for part in task.parts)]
        self.gathered[task.into] = tuple(one for part in parts for one in part)

    def _sum_chunk(self, task: work.SumChunk) -> tuple[float]:
        self.checkers.divisor(self.me, task.step, task.weight)
        bag = list(self._gradients(task.step).value)
        for part in task.parts:
            bag += self.payloads[part]
        bag.sort()
        if self.chunks.count:
            self.chunks.sum_chunks(task, tuple(bag))
        else:
            self._sum(task.step).value = VirtualSum(tuple(bag))
        first = self.me.replica == task.routes.members[0]
        return (self.truth.squares(task.step, self.me.stage) if first else 0.0,)

    def _assemble(self, task: work.AssembleSum) -> None:
        if self.chunks.count:
            shares = [self.payloads[chunk] for chunk in task.chunks]
            self.chunks.assemble(task.step, shares, self.worker_state.chunks.held(task.step))
            return
        self.gathered.clear()
        mine = self._sum(task.step)
        for chunk in task.chunks:
            given: VirtualSum = self.payloads[chunk]
            self.checkers.sum_is_as_reduced(self.me, task.step, given.combined)
            if chunk.what is ParcelKind.COPY:
                mine.value = given
            else:
                self.checkers.sums_agree(self.me, task.step, given.bag, mine.value.bag)

    def _sum(self, step: int) -> Cell:
        if step not in self.sums:
            self.sums[step] = self.buffers.take()
        return self.sums[step]

    def _combine(self, task: work.CombineTied) -> float:
        self.checkers.sum_is_whole(self.me, task.step, self.payloads[task.other].bag)
        self.outgoing(task.other._replace(stage=self.me.stage))
        cell = self.sums[task.step] = self.buffers.writable(self.sums[task.step])
        cell.value = VirtualSum(cell.value.bag, combined=True)
        return self.truth.squares(task.step, self.me.stage)

    def _update(self, task: work.Update) -> None:
        for parcel in [p for p in self.payloads if p.what is ParcelKind.TIED and p.step < task.step]:
            del self.payloads[parcel]
        if self.chunks.count:
            self.chunks.update(task)
            return
        used = self.sums[task.step].value
        self.checkers.sum_is_combined(self.me, task.step, used.combined)
        if task.keep:  # it may be undone: then another stage's update was invalid, and so is this sum
            self.checkers.sum_is_whole(self.me, task.step, used.bag)
            self.working = self._applied(task.step, task.scale, used)
        else:
            self.checkers.sum_used(self.me, task.step, used.bag)
            self.state = self.working = self._applied(task.step, task.scale, used)
        self._begin_gradients()

    def _applied(self, step: int, scale: float | None, used: VirtualSum) -> VirtualState:
        found = applied(self.state, step, scale)
        is_right = self.checkers.bad is None or used.bag == self.truth.whole_sum
        return found if is_right else spoiled(found, step)

    def _adopt(self, task: work.AdoptWeights) -> None:
        self.chunks.adopt({parcel.owner: self.payloads[parcel] for parcel in task.weights})
        self._agree(task.step)

    def _agree(self, step: int) -> None:
        """Sharded: the state of the whole stage, as the layers have it."""
        found = self.chunks.weights
        if found is None:
            raise Violation(f"the right state: {self.me} computes with weights of different steps")
        self.state = self.working = found

    def _load_fill(self, task: work.LoadFill) -> None:
        self.chunks.fill(task.fill, self.payloads[task.fill])

    def _gradients(self, step: int) -> Cell:
        if self.chunks.count and step != self.summed:  # not every worker makes an update there
            self._begin_gradients()
            self.summed = step
        self.checkers.gradients_used(self.me, step, self.released)
        return self.gradients

    def _begin_gradients(self) -> None:
        """In the same buffer, unless a send still reads from it."""
        self.released = 0
        if self.buffers.is_borrowed(self.gradients):
            self.gradients = Cell([])
        else:
            self.gradients.value = []

    def _commit(self, task: work.Commit) -> None:
        used = self.sums[task.step].value
        self.checkers.sum_used(self.me, task.step, used.bag)
        self.state = self._applied(task.step, 1.0, used)
        assert self.working == self.state, "a commit of something else than was computed with"

    def _undo(self, task: work.Undo) -> None:
        assert self.working != self.state, "an undo without an eager update"
        self.working = self.state

    def _snapshot(self, task: work.Snapshot) -> VirtualState:
        if self.chunks.count:
            self._agree(task.transfer.state_step)
        return self.state

    def _apply_feed(self, task: work.ApplyFeed) -> None:
        if self.chunks.count:
            self.state = self.working = self.payloads[task.feed]
            self.checkers.state_restored(self.me, task.step, self.state)
            self.chunks.follow(self.state)
            return
        given: VirtualSum = self.payloads[task.feed]
        self.checkers.sum_is_combined(self.me, task.step, given.combined)
        self.checkers.sum_used(self.me, task.step, given.bag)
        self.state = self.working = self._applied(task.step, task.scale, given)

    def _restore(self, task: work.Restore) -> bool:
        if self.control.directions.copies:
            given = self.me, self.worker_state.mail.order.epoch, task.state_step
            state, self.failed_reads = self.memory.load(*given, self.control.directions)
            if state is None:
                return False
        else:
            state = self.disk.read(task.state_step, self.me.stage)
        self.checkers.state_restored(self.me, task.state_step, state)
        assert state is not None
        self.state = self.working = state
        self._begin_gradients()
        if self.chunks.count:
            self.chunks.load(state, self.worker_state.chunks.held(task.state_step + 1))
        return True

    def _shelve(self, task: work.StoreCopy) -> None:
        if not self.is_flipped:  # what is written of a wrong state must never be read
            self.checkers.state_saved(self.me, task.state_step, self.state)
        self.chunks.saved(task.state_step, task.chunks)

    def _save(self, task: work.SaveCheckpoint) -> None:
        if not self.is_flipped:  # what is written of a wrong state must never be read
            self.checkers.state_saved(self.me, task.state_step, self.state)
        self.chunks.saved(task.state_step, task.chunks)
        self.disk.begin(task.state_step, self.me.stage)

    def take_state(self, transfer: StateTransfer, name: str, value: int) -> None:
        """One frame of two, so that a state could be made of two transfers' halves."""
        use = self.worker_state.joiner.take_state(transfer)
        if use is FrameUse.DROP:
            return
        if use is FrameUse.BEGIN:
            self.arriving.clear()
        self.arriving[name] = value
        if len(self.arriving) == len(VirtualState._fields):
            whole = VirtualState(**self.arriving)
            self.arriving.clear()
            if self.group is None:
                self.load_state(transfer, whole)
            elif self.group.slices.own_state(transfer, whole):
                self.load_state(transfer, self.group.slices.take_state(transfer))

    def load_state(self, transfer: StateTransfer, state: VirtualState) -> None:
        """All of it is here, on every shard."""
        self.state = self.working = state
        self._begin_gradients()
        self.chunks.follow(self.state)
        self.worker_state.joiner.state_arrived(transfer)
        if self.group is not None:
            self.group.loaded(transfer)

    # -------------------------------------------------------------- commands

    def outgoing(self, parcel: Parcel) -> Any:
        """What is sent under this name: a value that never changes, or a cell that might."""
        match parcel.what:
            case ParcelKind.ACTIVATION | ParcelKind.GRADIENT:
                return self.payloads[parcel]
            case ParcelKind.PART:
                return self.gathered.get(parcel) or self._gradients(parcel.step)
            case ParcelKind.REPLAY if parcel.microbatch is not None:
                return self._inputs(parcel.step, parcel.microbatch, None)
            case ParcelKind.WEIGHTS | ParcelKind.FILL:
                return self.chunks.weights_of(parcel)
            case ParcelKind.SUM if self.chunks.count:
                holders = self.worker_state.chunks.holders(parcel.step)
                return self.chunks.sums_for(parcel.step, holders, parcel.owner)
            case ParcelKind.FEED if self.chunks.count:
                self._agree(parcel.step)
                return self.state
            case ParcelKind.SUM | ParcelKind.COPY | ParcelKind.FEED:
                return self.sums[parcel.step]
            case ParcelKind.TIED:
                if parcel not in self.payloads:
                    self.payloads[parcel] = self.sums[parcel.step].value
                return self.payloads[parcel]
        return None

    def forget(self, command: work.Forget) -> None:
        for parcel in command.parcels:
            self.payloads.pop(parcel, None)

    def release_gradients(self, command: work.ReleaseGradients) -> None:
        """The engine uses the buffer again when the next step's gradients begin; from now on it might."""
        self.released = command.step

    def drop_stashes(self, command: work.DropStashes) -> None:
        for microbatch, part in command.places:
            del self.inputs[command.step, microbatch, part]

    def release_sum(self, command: work.ReleaseSum) -> None:
        if self.chunks.count:
            self.chunks.sums.pop(command.step)
        else:
            cell = self.sums.pop(command.step)
            self.checkers.sum_used(self.me, command.step, cell.value.bag)
            self.buffers.give_back(cell)
        self.checkers.kept(self.me, len(self.payloads), sum(key[0] <= command.step for key in self.inputs))

    def discard(self, command: work.DiscardWork) -> None:
        first = command.from_step
        self.made.clear()
        for store in (self.sums, self.chunks.sums):
            for step in [s for s in store if first is None or s >= first]:
                del store[step]
        self._begin_gradients()
        self.inputs = {
            key: right for key, right in self.inputs.items() if first is not None and key[0] < first
        }

    # -------------------------------------------------------------- looking at it

    def summary(self) -> str:
        """In words, for the report of a storm that does not end."""
        if self.leaving:
            return SAVING
        return f"{self.worker_state.next()}{' paused' if self.worker_state.paused else ''}"


def _made(working: Any, given: tuple[bool, ...], wrong: int) -> dict[str, str]:
    return {"output": f"{working} {given} {wrong}"}


def what_arrives(payload: Any) -> Any:
    """The contents of a message at the moment its last byte leaves the sender's buffer."""
    if type(payload) is not Cell:
        return payload
    value = payload.value
    return tuple(value) if type(value) is list else value


_DO: dict[type, Callable[[VirtualWorker, Any], Any]] = {
    work.Compute: VirtualWorker._compute,
    work.HashState: VirtualWorker._hash_state,
    work.Recompute: VirtualWorker._recompute,
    work.Contribute: VirtualWorker._contribute,
    work.GatherParts: VirtualWorker._gather,
    work.SumChunk: VirtualWorker._sum_chunk,
    work.AssembleSum: VirtualWorker._assemble,
    work.CombineTied: VirtualWorker._combine,
    work.Update: VirtualWorker._update,
    work.AdoptWeights: VirtualWorker._adopt,
    work.LoadFill: VirtualWorker._load_fill,
    work.Commit: VirtualWorker._commit,
    work.Undo: VirtualWorker._undo,
    work.Snapshot: VirtualWorker._snapshot,
    work.ApplyFeed: VirtualWorker._apply_feed,
    work.Restore: VirtualWorker._restore,
    work.SaveCheckpoint: VirtualWorker._save,
    work.StoreCopy: VirtualWorker._shelve,
}
CARRY_OUT: dict[type, Callable[[VirtualWorker, Any], None]] = {
    work.Forget: VirtualWorker.forget,
    work.ReleaseGradients: VirtualWorker.release_gradients,
    work.DropStashes: VirtualWorker.drop_stashes,
    work.ReleaseSum: VirtualWorker.release_sum,
    work.ReleaseChunks: lambda process, command: process.chunks.release(command.chunks),
    work.DiscardWork: VirtualWorker.discard,
}
