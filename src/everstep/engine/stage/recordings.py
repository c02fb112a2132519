"""F and I of a microbatch as recordings: one launch each, instead of one per kernel.

An eager op launches its kernels one by one, and a host often needs longer for that than a GPU to run them.
Recorded once, as a CUDA graph, they are launched together. A recording is kernels and the addresses they
read and write: the bits are those of the eager op, and each microbatch under way needs tensors of its own.

    given ──► [F] ──► outputs, the loss        copied, for they are overwritten by the next microbatch
    grads ──► [I] ──► input gradients, and what W needs: read in place by W, which stays eager

The host launches W while the device runs F and I. With strict sums a contribution may have to be made again
after W (`sums`): the tensors of a microbatch are not used for another one before that is settled.

Recorded is what needs nothing from the host: the first batches run eagerly, to see whether a layer draws
random numbers, and any later batch of another shape is eager too. After three attempts that went wrong, all
stays eager.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from everstep.engine.layers.boundary import Value, put_together, take_apart
from everstep.engine.layers.linear import Queue
from everstep.errors import UserError
from everstep.log import warn

ATTEMPTS = 3  # to record
WARM_UP = 2  # microbatches that are run eagerly first
_MARGIN = 2.5  # of memory: for a recording, and for a microbatch that is run eagerly beside it
_SPARE = 0.05  # of all memory

Run = Callable[[], list[Tensor]]  # what is recorded: its results, which a replay overwrites
Replay = Callable[[], None]
AtRest = Callable[[], AbstractContextManager[None]]


class OpRecorder(Protocol):
    def record(self, run: Run) -> tuple[list[Tensor], Replay]:
        """Its results, whose contents count once it was replayed. Recordings of one recorder are replayed
        in the order in which they were made.
        """
        ...

    def memory(self) -> tuple[int, int]:
        """Bytes that its recordings keep, and of these what does not count as allocated: what they write and
        read only between replays.
        """
        ...


@dataclass(slots=True, eq=False)
class RecordedOps:
    """F and I of one microbatch at a time, with the tensors they read and write."""

    given: list[Tensor]
    outputs: list[Tensor]
    tree: Any  # of the output
    graded: tuple[int, ...]  # outputs that a gradient comes back for
    weight: Tensor | float | None
    grads: list[Tensor]
    of: tuple[int, ...]  # which of `graded` the gradients are of
    input_grads: dict[int, Tensor]  # by number among the inputs that want one
    queue: Queue
    others: list[tuple[Tensor, Tensor]]
    forward: Replay
    backward: Replay

    def run_forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copies of the outputs; of a last stage, of the loss."""
        for here, there in zip(self.given, tensors, strict=True):
            here.detach().copy_(there.detach(), non_blocking=True)
        self.forward()
        return [output.detach().clone() for output in self.outputs]

    def run_backward(self, grads: Iterable[Tensor], of: tuple[int, ...]) -> dict[int, Tensor]:
        """Copies of the gradients of the inputs."""
        if of != self.of:
            raise UserError('a layer used other inputs than in the first batches; set graphs = "never".')
        for here, there in zip(self.grads, grads, strict=True):
            here.copy_(there, non_blocking=True)
        self.backward()
        return {index: grad.clone() for index, grad in self.input_grads.items()}


TakenOps = tuple[RecordedOps, list[Tensor]]  # with the tensors of the microbatch


@dataclass(slots=True, kw_only=True)
class Recordings:
    """Of one stage. `compute`: (value, targets) -> what the stage gives, or the loss and its weight."""

    compute: Callable[[Value, Value], tuple[Value, Tensor | float | None]]
    recorder: Callable[[], OpRecorder]
    has_room: Callable[[int], bool]  # for a recording of so many bytes, expected
    settle: Callable[[], None]  # what W has added is final from now on
    is_settled: Callable[[], bool]  # is it already?
    queue: Queue
    parameters: Collection[Tensor]
    expected_bytes: Callable[[], int]
    device: torch.device
    is_last: bool
    is_off: bool = False
    late: RecordedOps | None = None  # W has read its tensors, and may have to read them again
    of: tuple[int, ...] = ()  # of the gradients that came back last
    first_step: int | None = None  # nothing is recorded in it: its update allocates the optimizer's states
    whole_bytes: int = 0  # memory of all recordings
    idle_bytes: int = 0  # of it, what does not count as allocated
    _key: object = None
    _seen: int = 0
    _failures: int = 0
    _is_full: bool = False  # no memory for one more
    _weights_at: tuple[int, ...] = ()
    _made: list[RecordedOps] = field(default_factory=list)

    def take(
        self, step: int, value: Value, targets: Value, busy: Collection[RecordedOps], *, beside_eager: bool
    ) -> TakenOps | None:
        """For a microbatch. None: it is to be run eagerly. `beside_eager`: others have run eagerly and wait
        for their I.
        """
        if self.is_off:
            return None
        self.first_step = step if self.first_step is None else self.first_step
        may_record = step > self.first_step and not beside_eager
        tensors, tree = take_apart((value, targets))
        key = (str(tree), [(t.shape, t.dtype, t.requires_grad) for t in tensors])
        if self._key is None:
            self._key = key
        if key != self._key or any(t.device != self.device for t in tensors):
            return None  # what is copied from the host would be copied from there again
        self._seen += 1
        if self._seen <= WARM_UP:
            return None
        weights_at = tuple(parameter.data_ptr() for parameter in self.parameters)
        if weights_at != self._weights_at:
            self._made, self.late, self._weights_at = [], None, weights_at
            self.whole_bytes = self.idle_bytes = 0
        if self.late is not None and self.is_settled():
            self.late = None
        found = self._free(busy) or (self._recorded(tensors, tree) if may_record else None)
        if found is None and self.late is not None and self.late not in busy:
            self.settle()
            found, self.late = self.late, None
        return None if found is None else (found, tensors)

    @property
    def bytes_each(self) -> int:
        """Of one recording; 0: there is none."""
        return self.whole_bytes // len(self._made) if self._made else 0

    def drew(self) -> None:
        """A layer draws random numbers, from a seed that changes: that cannot be recorded."""
        self.is_off = True

    def _free(self, busy: Collection[RecordedOps]) -> RecordedOps | None:
        return next((ops for ops in self._made if ops is not self.late and ops not in busy), None)

    def _recorded(self, tensors: list[Tensor], tree: Any) -> RecordedOps | None:
        if self._is_full or not self.has_room(int(_MARGIN * self.expected_bytes())):
            self._is_full, self.is_off = True, not self._made
            return None
        recorder = self.recorder()
        try:
            self._made.append(self._record(recorder, tensors, tree))
        except Exception as error:
            self._failures += 1
            self.is_off = self._failures >= ATTEMPTS
            warn(f"attempt {self._failures} to record ops failed: {error}")
            self.queue.clear()
            self._clean()
            return None
        whole, idle = recorder.memory()
        self.whole_bytes, self.idle_bytes = self.whole_bytes + whole, self.idle_bytes + idle
        return self._made[-1]

    def _record(self, recorder: OpRecorder, tensors: list[Tensor], tree: Any) -> RecordedOps:
        given = [torch.empty_like(t).requires_grad_(t.requires_grad) for t in tensors]
        for here, there in zip(given, tensors, strict=True):
            here.detach().copy_(there.detach())
        value, targets = put_together(tree, given)
        made: dict[str, Any] = {}

        def forward() -> list[Tensor]:
            output, made["weight"] = self.compute(value, targets)
            made["outputs"], made["tree"] = take_apart(output)
            return [*made["outputs"], *([made["weight"]] if isinstance(made["weight"], Tensor) else [])]

        outputs, replay_forward = recorder.record(forward)
        weight = outputs.pop() if isinstance(made["weight"], Tensor) else made["weight"]
        graded = tuple(i for i, tensor in enumerate(made["outputs"]) if tensor.requires_grad)
        of = () if self.is_last else self.of
        grads = [torch.zeros_like(outputs[graded[i]]) for i in of]
        wanted = [tensor for tensor in given if tensor.requires_grad]
        others: list[tuple[Tensor, Tensor]] = []
        inputs: list[int] = []

        def backward() -> list[Tensor]:
            self.queue.clear()
            ends = [made["outputs"][i] for i in graded]
            torch.autograd.backward(ends if self.is_last else [ends[i] for i in of], grads or None)
            inputs[:] = [i for i, tensor in enumerate(wanted) if tensor.grad is not None]
            own = [parameter for parameter in self.parameters if parameter.grad is not None]
            others[:] = [(parameter, parameter.grad) for parameter in own if parameter.grad is not None]
            results = [_grad(wanted[i]) for i in inputs] + [grad for _, grad in others]
            results += [tensor for queued in self.queue for tensor in queued if isinstance(tensor, Tensor)]
            self._clean()
            for tensor in wanted:
                tensor.grad = None
            return results

        results, replay_backward = recorder.record(backward)
        queue = self.queue.copy()
        self.queue.clear()
        made["outputs"] = [tensor.detach() for tensor in made["outputs"]]
        return RecordedOps(
            given=given,
            outputs=[tensor.detach() for tensor in outputs],
            tree=made["tree"],
            graded=graded,
            weight=weight.detach() if isinstance(weight, Tensor) else weight,
            grads=grads,
            of=of,
            input_grads=dict(zip(inputs, results, strict=False)),
            queue=queue,
            others=others.copy(),
            forward=replay_forward,
            backward=replay_backward,
        )

    def _clean(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


class CudaRecorder:
    """CUDA graphs of one stream, in memory of their own."""

    _streams: dict[torch.device, torch.cuda.Stream] = {}  # noqa: RUF012  one per device: see record

    def __init__(self, device: torch.device) -> None:
        gc.collect()  # what is left of eager graphs belongs to another stream
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def record(self, run: Run) -> tuple[list[Tensor], Replay]:
        """On a stream of its own, the same for all: autograd then meets no work of another stream.

        Not `torch.cuda.graph`, which waits for the whole device, and so for messages of other workers.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.current_stream(self._device).synchronize()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                results = run()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return results, graph.replay

    def memory(self) -> tuple[int, int]:
        """A pool stays as large as it was while its graphs were recorded, for they use the same addresses."""
        pool = tuple(self._pool)
        every = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        segments = [segment for segment in every if tuple(segment["segment_pool_id"]) == pool]
        whole = sum(segment["total_size"] for segment in segments)
        return whole, whole - sum(segment["allocated_size"] for segment in segments)


def has_room(
    device: torch.device, limit: float | None, nbytes: int, *, at_rest: AtRest = nullcontext
) -> bool:
    """Is so much memory free, beside what this process keeps for later? `limit`: bytes it may use. `at_rest`:
    within, the device waits for no message of another worker.
    """
    if _is_free(device, limit, nbytes):
        return True
    with at_rest():
        torch.cuda.empty_cache()  # waits for the whole device
    return _is_free(device, limit, nbytes)


def _is_free(device: torch.device, limit: float | None, nbytes: int) -> bool:
    free, total = torch.cuda.mem_get_info(device)
    left = free if limit is None else min(free, limit - torch.cuda.memory_reserved(device))
    return left - _SPARE * (total if limit is None else limit) > nbytes
