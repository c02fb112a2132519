"""A virtual worker's chunks: what `virtual_worker` does where optimizer states are sharded.

A chunk's state is a chain of its own, and so are the working weights of a chunk. So an update that was missed
or made twice, a guard that differs from its owner, and weights of another step are all seen at once.
"""

from __future__ import annotations

from everstep.protocol import work
from everstep.protocol.ops import Worker
from everstep.protocol.parcels import Parcel, ParcelKind
from tests.storms.checkers import Checkers, Violation
from tests.storms.truth import Bag, VirtualState, applied

ChunkSums = dict[int, Bag]


class VirtualChunks:
    def __init__(self, me: Worker, count: int, checkers: Checkers) -> None:
        self.me, self.count, self.checkers = me, count, checkers
        self.states: dict[int, VirtualState] = {}
        self.working = [VirtualState(0, 0)] * count
        self.sums: dict[int, ChunkSums] = {}  # by step

    @property
    def weights(self) -> VirtualState | None:
        """What the layers compute with; None: a mixture, or not what a chunk's state says."""
        agree = len(set(self.working)) == 1 and all(s == self.working[0] for s in self.states.values())
        return self.working[0] if agree else None

    # -------------------------------------------------------------- the reduce

    def sum_chunks(self, task: work.SumChunk, bag: Bag) -> None:
        self.sums[task.step] = dict.fromkeys(task.chunks, bag)

    def sums_for(self, step: int, holders: tuple[tuple[int, ...], ...], receiver: int) -> ChunkSums:
        """Of the chunks that this worker owns, those that the receiver holds."""
        mine = [c for c, row in enumerate(holders) if row[0] == self.me.replica and receiver in row]
        return {chunk: self.sums[step][chunk] for chunk in mine}

    def assemble(self, step: int, given: list[ChunkSums], held: list[int]) -> None:
        for sums in given:
            for chunk, bag in sums.items():
                if chunk in self.sums[step]:
                    raise Violation(f"one owner: {self.me} is given chunk {chunk} of step {step} twice")
                self.sums[step][chunk] = bag
        if missing := set(held) - self.sums[step].keys():
            raise Violation(f"every chunk: {self.me} holds chunks {sorted(missing)} without their sums")
        for bag in self.sums[step].values():
            self.checkers.sum_is_whole(self.me, step, bag)

    # -------------------------------------------------------------- updates and states

    def update(self, task: work.Update) -> None:
        for chunk in task.chunks:
            self.checkers.sum_used(self.me, task.step, self.sums[task.step][chunk])
            if self.states[chunk].step != task.step - 1:
                raise Violation(f"one update: chunk {chunk} at {self.me} is not of step {task.step - 1}")
            self.states[chunk] = self.working[chunk] = applied(self.states[chunk], task.step, task.scale)

    def adopt(self, weights: dict[int, VirtualState]) -> None:
        for chunk, state in weights.items():
            self.working[chunk] = state

    def weights_of(self, parcel: Parcel) -> VirtualState:
        state = self.states[parcel.owner] if parcel.what is ParcelKind.FILL else self.working[parcel.owner]
        if state.step != parcel.step:
            raise Violation(f"{parcel} from {self.me} holds what is of step {state.step}")
        return state

    def fill(self, parcel: Parcel, state: VirtualState) -> None:
        self.checkers.state_restored(self.me, parcel.step, state)
        self.states[parcel.owner] = self.working[parcel.owner] = state

    def load(self, state: VirtualState, held: list[int]) -> None:
        self.states = dict.fromkeys(held, state)
        self.working = [state] * self.count

    def follow(self, state: VirtualState) -> None:
        """A joiner has the working weights of a peer, and no chunk."""
        self.states.clear()
        self.working = [state] * self.count

    def saved(self, step: int, chunks: tuple[int, ...]) -> None:
        for chunk in chunks:
            self.checkers.state_saved(self.me, step, self.states[chunk])

    def release(self, chunks: tuple[int, ...]) -> None:
        for chunk in chunks:
            del self.states[chunk]
