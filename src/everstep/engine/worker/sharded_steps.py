"""What a worker's loop does with sharded states, in the place of one optimizer for the whole stage."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from everstep.core.worker.chunks import Chunks
from everstep.core.worker.control import StateDirections
from everstep.engine.state.sharded import ShardedUpdater
from everstep.engine.worker.ports import Ports
from everstep.engine.worker.step_tensors import StepTensors
from everstep.net import host_memory
from everstep.protocol import work


class ShardedSteps:
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

    def store(self, task: work.StoreCopy, ports: Ports, directions: StateDirections) -> None:
        slices = {chunk: self.updater.slices(chunk, task.state_step) for chunk in task.chunks}
        count = len(self.updater.ranges)
        ports.copy_chunks(task.state_step, task.attempt, task.leaving, count, slices, directions)

    def save(self, task: work.SaveCheckpoint, ports: Ports) -> None:
        groups = self.updater.groups(task.state_step)
        slices = {chunk: self.updater.slices(chunk, task.state_step) for chunk in task.chunks}
        ports.save_chunks(task.state_step, task.attempt, task.count, slices, groups)
