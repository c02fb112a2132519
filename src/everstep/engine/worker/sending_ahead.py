"""When a worker sends pieces of its parts ahead (`parts_ahead`), and to whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from everstep.core.worker.control import WorkerControl
from everstep.engine.stage.weight_sums import Begins, Finished
from everstep.engine.telemetry.recorder import WorkerRecorder
from everstep.engine.telemetry.signs import WorkerSigns
from everstep.engine.worker.step_tensors import StepTensors
from everstep.net.courier import Courier
from everstep.net.links import Address
from everstep.protocol import work
from everstep.protocol.ops import Kind, Worker
from everstep.protocol.parcels import Parcel


class SendingAhead:
    def __init__(
        self,
        control: WorkerControl,
        tensors: StepTensors,
        courier: Courier,
        signs: WorkerSigns,
        recorder: WorkerRecorder | None,
        address: Callable[[tuple[str, int]], Address],
    ) -> None:
        self._control, self._tensors, self._courier = control, tensors, courier
        self._signs, self._recorder, self._address = signs, recorder, address

    def during(self, task: work.Compute) -> Begins | None:
        """For a W that is about to run. Only after the last one of a step its sums are final."""
        ahead, state = self._tensors.ahead, self._control.state
        ahead.clear()
        is_last = len(state.now.todo) > 1 and state.now.todo[-2].kind is Kind.R
        if task.ghost or not is_last:
            return None
        members = state.mail.peers(task.step)
        parts = [
            (parcel, self._tensors.stretches(parcel, members))
            for parcel in state.reduction.parts_to_come(state.now)
            if (to := self._to(parcel)) is not None and self._courier.sends_beside(to)
        ]
        if not parts:
            return None

        def post(parcel: Parcel, facts: Any, tensor: Tensor) -> None:
            to = self._to(parcel)
            assert to is not None
            self._courier.post(to, parcel.what, parcel, facts, (tensor,))
            if self._recorder is not None:
                self._recorder.sent(parcel, parcel.owner, parcel.stage, tensor.nbytes)
            self._signs.maybe_die(task.step, str(task.op)[len(str(parcel.stage)) :], "sending")

        def begins(slots: set[int]) -> Finished:
            return ahead.begin(self._tensors.stage.sums, parts, slots, post)

        return begins

    def link_broke(self, address: tuple[str, int]) -> None:
        """What was under way there is lost, and the whole part will be sent again."""
        book = self._control.book
        gone = {worker for worker, at in book.items() if at == address}
        self._tensors.ahead.lost(lambda parcel: Worker(parcel.owner, parcel.stage) in gone)

    def _to(self, parcel: Parcel) -> Address | None:
        at = self._control.book.get(Worker(parcel.owner, parcel.stage))
        return None if at is None else self._address(at)
