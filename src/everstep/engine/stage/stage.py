"""What one worker computes: its layers' forward, input gradient and weight gradient of a microbatch.

The three ops of a (step, microbatch), and what is held between them:

    forward       F   activations of the graph                      held until I
    input_grad    I   inputs and output gradients of the Linears    held until W
    weight_grad   W   sums into one flat gradient buffer            held until the next step's sums begin

W alone writes to the buffer: a microbatch whose W has not run has left no trace in it. Nothing here depends
on which worker runs it or on what it ran before: weights are a function of (seed, layer), dropout of (seed,
step, microbatch, layer), data of (step, microbatch). So any host computes the same bits.

Sums of floating-point numbers depend on their order, and re-routing changes the order. `sums` has kinds of
sums that do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from everstep.engine import device as devices
from everstep.engine import keys
from everstep.engine.datasets.data import Dataset, split
from everstep.engine.layers import regions
from everstep.engine.layers.boundary import Boundary, Gradients, Value, mapped, put_together, tensors_in
from everstep.engine.layers.linear import (
    RECEIVER,
    MakingQueue,
    Queue,
    contributions_of,
)
from everstep.engine.layers.model import (
    Model,
    Slot,
    drawn,
    end,
    every_parameter,
    in_precision,
    in_training,
    refusing_changed_buffers,
    slots,
    trained,
)
from everstep.engine.layers.shard_plan import Cut
from everstep.engine.layers.taken_over import take_over
from everstep.engine.shards.collectives import Collectives
from everstep.engine.shards.layers import cut, join, refuse_unequal, sum_whole
from everstep.engine.stage.attention_again import AttentionAgain, attention_in
from everstep.engine.stage.evaluation import SCORED, TRAINED, Evaluation
from everstep.engine.stage.recordings import OpRecorder, RecordedOps, Recordings, TakenOps
from everstep.engine.stage.stage_evaluation import StageEvaluation
from everstep.engine.stage.stage_loss import StageLoss
from everstep.engine.stage.stash import Stash
from everstep.engine.stage.weight_sums import add_gradients
from everstep.engine.sums.grids import Limits
from everstep.engine.sums.rehearsal import rehearse
from everstep.engine.sums.sum_units import Accumulate
from everstep.engine.sums.sums import Empty, GradientSums
from everstep.errors import InternalError, UserError, clipped
from everstep.net import host_memory

Precision = Literal["fp32", "bf16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHECKED_STEPS = 3  # in which what all shards have whole is compared


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """What a job says of how its stages compute."""

    seed: int = 0
    precision: Precision = "fp32"
    accumulate: Accumulate = "strict"
    recompute: int = 0  # of so many layers one is run again in I; 0: none
    attention_alone: bool = False  # of those layers, only their attention is
    contributions: int = 256  # the microbatches of a step, or more
    sharded: bool = False  # the optimizer's states are


class Stage:
    def __init__(
        self,
        model: Model,
        layers: range,
        *,
        data: Dataset,
        device: torch.device,
        settings: StageSettings | None = None,
        empty: Empty | None = None,
        shards: Collectives | None = None,
        evaluation: Evaluation | None = None,
    ) -> None:
        """`empty`: where gradient buffers come from."""
        self.model, self.layers, self.data, self.device = model, layers, data, device
        settings = settings or StageSettings()
        self.seed, self._dtype = settings.seed, DTYPES[settings.precision]
        self.is_first, self.is_last = layers.start == 0, layers.stop == len(model.layers)
        self.shards = shards
        place = (0, 1) if shards is None else (shards.index, shards.count)
        self.cut = Cut(model.shard_plan, *place)
        self.slots = slots(model, layers, cut=self.cut)
        self.size = end(self.slots)
        self.masters = torch.zeros(
            self.size, dtype=torch.float32, device=device
        )  # what the optimizer changes
        is_one = settings.precision == "fp32" and not settings.sharded
        self.working = self.masters if is_one else torch.zeros(self.size, dtype=self._dtype, device=device)
        kind, most = settings.accumulate, settings.contributions
        self.sums = GradientSums(
            self.slots, self.size, kind=kind, contributions=most, device=device, empty=empty
        )
        if self.sums.is_strict and device.type == "cuda":
            rehearse(kind, device)
        self.limits = Limits(list(self.slots) if self.sums.is_strict else (), self.sums.grid)
        self.parameters: dict[str, nn.Parameter] = {}  # of the layers, by logical name
        tied = {name for pair in model.tied for name in pair}
        self.tied_names = tuple(name for name in self.slots if name in tied)
        # Not on a GPU: its recorded ops were not tried with it.
        is_whole = self.is_first and self.is_last and shards is None and device.type == "cpu"
        self._in_one = is_whole and self.sums.is_strict  # nobody waits for I
        self._queue: Queue = MakingQueue() if self._in_one else []
        self._modules: list[nn.Module] = []
        self._summed: list[nn.Parameter] = []  # whole, with a gradient from every shard
        for index in layers:
            self._build(index)
        self.evaluation = evaluation
        self._loss = StageLoss(model, device, shards)
        self._through = model.assembly.join(layers, self._modules, device)
        self._evaluation = None
        if evaluation is not None:
            loss, fed = self._loss if self.is_last else None, self._fed if self.is_first else None
            self._evaluation = StageEvaluation(
                evaluation, self._modules, self._through, loss=loss, fed=fed, seed=self._seed_evaluation
            )
        self.tied = TiedHalves(model, self.slots)
        self._recomputed = set(model.recomputed(settings.recompute)) & set(layers)
        # The number of each parameter's slot.
        self._index: dict[Tensor, int] = {self.parameters[name]: n for n, name in enumerate(self.slots)}
        self._placed_at, self._by_address = 0, dict[int, Tensor]()
        self._stashes: dict[tuple[int, int], Stash] = {}
        self._batches: dict[tuple[int, int], Any] = {}  # loaded, and not used yet: one at most
        self._numbers = MicrobatchNumbers()
        self._received: list[tuple[Tensor, int]] = []  # of the forward under way, with their versions
        self._held = HeldBytes(lambda: self.working)
        if settings.attention_alone:
            for index, module in zip(layers, self._modules, strict=True):
                for part in attention_in(module) if index in self._recomputed else ():
                    part.forward = AttentionAgain(part.forward, self._held.keep)
            self._recomputed = set()
        self.recordings: Recordings | None = None
        self._buffers_stay = False  # has a forward left them as they were? Looked at in the first one
        self._whole_checked: set[int] = set()  # steps in which parameters on all shards were compared

    def _build(self, index: int) -> None:
        """A layer, drawn on the CPU from (seed, layer), so equal everywhere. Masters and working weights get
        its first values; its weight gradients will go to the queue.
        """
        model, layer = self.model, self.model.names[index]
        module = drawn(model, index, self.seed)
        here = every_parameter(layer, module)
        for first, second in model.tied:  # the second of a pair starts with the values of the first
            if second in here:
                owner = max((name for name in model.layers if first.startswith(name + ".")), key=len)
                others = owner != layer
                source = drawn(model, model.names.index(owner), self.seed) if others else module
                here[second].data.copy_(every_parameter(owner, source)[first].data)
        cut(layer, module, self.cut)
        parameters = trained(layer, module)
        for name, parameter in parameters.items():
            master, copy = self.slots[name].of(self.masters), self.slots[name].of(self.working)
            copy.copy_(master.copy_(parameter.data))
            parameter.data = copy
        self.parameters.update(parameters)
        in_precision(module.to(self.working.device), self.working.dtype, layer, model.assembly.in_fp32)
        fused = regions.are_enabled() and self.shards is None and not model.assembly.has_regions
        in_one = self._in_one and not regions.are_enabled() and self.working.dtype == torch.float32
        take_over(module, self._queue, fused=fused, in_one=in_one)
        if self.shards is not None:
            self._summed.extend(join(layer, module, self.cut, self.shards))
        self._modules.append(in_training(module))
        if fused and "forward" not in vars(module):  # not a Linear or an Embedding by itself
            module.forward = regions.compiled(f"layer {layer!r}", module.forward)

    def record(self, recorder: Callable[[], OpRecorder], has_room: Callable[[int], bool]) -> None:
        """From now on F and I are recorded, where they can be."""
        self.recordings = Recordings(
            compute=self._computed,
            recorder=recorder,
            has_room=has_room,
            settle=lambda: self.sums.settle(),
            is_settled=lambda: self.sums.is_settled,
            queue=self._queue,
            parameters=list(self._index),
            expected_bytes=lambda: max(0, self._held.forward) + max(0, self._held.weight),
            device=self.device,
            is_last=self.is_last,
        )

    # The ops.

    def load(self, step: int, microbatch: int) -> None:
        """Get the data that the forward will need, so that waiting for it is not part of the op."""
        if (self.is_first or self.is_last) and self.trains(step):
            self._batches = {(step, microbatch): self.data.batch(step, microbatch)}

    def forward(self, step: int, microbatch: int, given: Boundary | None = None) -> Boundary | None:
        """F. What the next stage gets; None on the last stage, which keeps the loss instead."""
        if self._buffers_stay or not self.trains(step):
            return self._forward(step, microbatch, given)
        layers = {self.model.names[i]: module for i, module in zip(self.layers, self._modules, strict=True)}
        if (frame := getattr(self._through, "frame", None)) is not None:
            layers[type(frame).__name__] = frame
        with refusing_changed_buffers(layers):
            made = self._forward(step, microbatch, given)
        self._buffers_stay = True
        return made

    def _forward(self, step: int, microbatch: int, given: Boundary | None) -> Boundary | None:
        if (step, microbatch) in self._stashes:
            raise InternalError(f"forward of step {step}, microbatch {microbatch} was run twice here.")
        if (step, microbatch) not in self._batches:
            self.load(step, microbatch)
        beside: list[Value] | None = None
        if self._evaluation is not None and self.evaluates(step):
            if not self._evaluation.is_done((step, microbatch)):
                self.evaluate(step, microbatch, given)
            beside = self._evaluation.take((step, microbatch))
        if not self.trains(step):
            return self._close(step, microbatch, beside or [])
        batch = self._batches.pop((step, microbatch), None)
        inputs, targets = (None, None) if batch is None else split(batch)
        wanted, value = ({}, self._fed(inputs)) if self.is_first else self._enter(given)
        if beside is not None and not self.is_first:
            value = value[TRAINED]
        self._receive()
        # What a recording gives goes to the next stage as it is, with nothing beside it.
        if beside is None or self.is_last:
            found = self._take_recorded(step, value, targets)
            if found is not None:
                return self._forward_recorded(step, microbatch, *found, targets)
        weight: Tensor | float | None = None
        with self._held.measured():
            devices.seed(self.device, self._key(step, microbatch, self.layers.start))
            value = self._through(value, partial(self._layer, step, microbatch))
            self._refuse_changes("the model")
            self._received = []
            if self.is_last:
                devices.seed(self.device, self._key(step, microbatch, self.layers.stop))
                value, weight = self._loss(value, targets)
        self._refuse_no_gradients()
        if not self.is_last:
            boundary = Boundary.of(value if beside is None else {TRAINED: value, SCORED: beside})
            outputs = [tensor for tensor in tensors_in(value) if tensor.requires_grad]
            self._stashes[step, microbatch] = Stash(wanted, outputs)
            return boundary
        self._stashes[step, microbatch] = Stash(wanted, [value], weight)
        self._numbers.keep_loss(step, microbatch, value.detach().float())
        return None

    def _refuse_no_gradients(self) -> None:
        """A loop of torch would raise in its backward pass; here nothing would be trained from now on."""
        if not torch.is_grad_enabled():
            torch.set_grad_enabled(True)
            here = ", ".join(str(self.model.names[index]) for index in self.layers)
            raise UserError(
                f"a layer of {clipped(here, 200)}, or the loss, switched gradients off and not on again; "
                "use `with torch.no_grad():` instead of torch.set_grad_enabled(False)."
            )

    def _computed(self, value: Value, targets: Value) -> tuple[Value, Tensor | float | None]:
        """Without random numbers, so without seeds."""
        value = self._through(value, lambda index, layer, *args, **kwargs: layer(*args, **kwargs))
        return self._loss(value, targets) if self.is_last else (value, None)

    def _take_recorded(self, step: int, value: Value, targets: Value) -> TakenOps | None:
        if self.recordings is None or self.recordings.is_off:
            return None
        busy = [stash.recorded for stash in self._stashes.values() if stash.recorded is not None]
        eager = any(stash.open and stash.recorded is None for stash in self._stashes.values())
        there = self._loss.there(targets) if self.is_last else None
        return self.recordings.take(step, value, there, busy, beside_eager=eager)

    def _forward_recorded(
        self, step: int, microbatch: int, ops: RecordedOps, tensors: list[Tensor], targets: Value
    ) -> Boundary | None:
        outputs = ops.run_forward(tensors)
        stash = self._stashes[step, microbatch] = Stash({}, outputs, ops.weight, recorded=ops)
        if not self.is_last:
            return Boundary(tuple(outputs), ops.tree, ops.graded)
        if (weight := self._loss.weight_on_host(targets)) is not None:
            stash.weight = weight
        self._numbers.keep_loss(step, microbatch, outputs[0].float())
        return None

    # Evaluation, beside the forward of a step.

    def evaluates(self, step: int) -> bool:
        return self.evaluation is not None and self.evaluation.evaluates(step)

    def trains(self, step: int) -> bool:
        """Not the step that only evaluates: none of its microbatches counts."""
        return self.evaluation is None or not self.evaluation.closes(step)

    def _checks_whole(self, step: int) -> bool:
        """Once in each of the first steps: what is split by heads may have equal gradients in one of them."""
        if len(self._whole_checked) >= CHECKED_STEPS or step in self._whole_checked or not self.trains(step):
            return False
        self._whole_checked.add(step)
        return True

    def evaluate(self, step: int, microbatch: int, given: Boundary | None = None) -> None:
        """The evaluation batches that travel with a microbatch; their values go to the next stage with it."""
        assert self._evaluation is not None
        before = None if self.is_first else self._enter(given)[1][SCORED]
        self._evaluation.run((step, microbatch), before)
        self._refuse_changes("the model")
        self._received = []

    def scores(self, step: int, microbatch: int) -> tuple[float, ...]:
        """What the evaluation batches of a microbatch added up to; last stage only."""
        return () if self._evaluation is None else self._evaluation.scores((step, microbatch))

    def _close(self, step: int, microbatch: int, beside: list[Value]) -> Boundary | None:
        """The forward of a microbatch that trains nothing: it counts 0."""
        self._stashes[step, microbatch] = Stash({}, [], 0.0)
        self._numbers.keep_loss(step, microbatch, torch.zeros((), device=self.device))
        return None if self.is_last else Boundary.of({TRAINED: None, SCORED: beside})

    def input_grad(self, step: int, microbatch: int, given: Gradients | None = None) -> Gradients | None:
        """I. The gradients for the previous stage; None on the first."""
        stash = self._stashes.get((step, microbatch))
        if stash is None or stash.outputs is None:
            raise InternalError(f"step {step}, microbatch {microbatch}: input gradient with no forward here.")
        self._queue.clear()
        self._receive()
        weight = float(stash.weight if given is None else given.weight)  # type: ignore[arg-type]
        self._numbers.keep_weight(step, microbatch, weight)
        if stash.recorded is not None:
            return self._input_grad_recorded(stash, stash.recorded, given, weight)
        devices.seed(self.device, keys.key(self.seed, keys.BACKWARD, step, microbatch, self.layers.start))
        if given is None and stash.outputs:
            torch.autograd.backward(stash.outputs)
        elif given is None:
            pass  # it trains nothing
        elif given.tensors:
            grads = [host_memory.to_device(grad, self.device) for grad in given.tensors]
            torch.autograd.backward([stash.outputs[i] for i in given.of], grads)
            if self.recordings is not None:
                self.recordings.of = given.of
        stash.queue, stash.outputs = self._queue.copy(), None
        self._queue.clear()
        sum_whole(self._summed, self.shards)
        for parameter in self._index:
            if parameter.grad is not None:
                stash.others.append((parameter, parameter.grad))
                parameter.grad = None
        if self._held.weight < 0 and self.trains(step):
            self._held.weight = self._held.of(stash.for_weights())
        inputs, stash.inputs = stash.inputs, {}
        if self.is_first:
            return None
        found = {i: t.grad for i, t in enumerate(inputs.values()) if t.grad is not None}
        return Gradients(tuple(found.values()), tuple(found), weight)

    def _input_grad_recorded(
        self, stash: Stash, ops: RecordedOps, given: Gradients | None, weight: float
    ) -> Gradients | None:
        grads = [host_memory.to_device(grad, self.device) for grad in given.tensors] if given else []
        found = ops.run_backward(grads, given.of if given else ())
        stash.queue, stash.others, stash.outputs = ops.queue, ops.others, None
        return None if self.is_first else Gradients(tuple(found.values()), tuple(found), weight)

    def weight_grad(
        self,
        step: int,
        microbatch: int,
        seen: Callable[[str, Tensor], None] | None = None,
    ) -> None:
        """W. Adds the microbatch's gradients to the buffer, and lets go of everything held for it. `seen` is
        told the gradient of each parameter.
        """
        stash = self._stashes.get((step, microbatch))
        if stash is None or stash.open:
            raise InternalError(f"step {step}, microbatch {microbatch}: weight gradient before the input's.")
        if self.sums.step not in (None, step):
            raise InternalError(f"a weight gradient of step {step} for the sums of step {self.sums.step}.")
        with torch.no_grad():
            if self.shards is not None and self._checks_whole(step):
                made = {
                    self._index[parameter]: product
                    for parameter, product in contributions_of(stash.queue, stash.others)
                }
                whole = {
                    n: made[i]() for i, n in enumerate(self.slots) if i in made and not self.cut.is_split(n)
                }
                refuse_unequal(whole, self.shards)
            told = None if seen is None else self._named(seen)
            add_gradients(self.sums, self._index, stash, told)
        if self.recordings is not None:
            self.recordings.late = stash.recorded if self.sums.is_strict else None
        del self._stashes[step, microbatch]

    def contributions(self, step: int, microbatch: int, seen: Callable[[str, Tensor], None]) -> None:
        """What W would add, parameter by parameter; the sums stay as they are."""
        stash, told = self._stashes[step, microbatch], self._named(seen)
        with torch.no_grad():
            for parameter, product in contributions_of(stash.queue, stash.others):
                told(self._index[parameter], product())

    def _named(self, seen: Callable[[str, Tensor], None]) -> Callable[[int, Tensor], None]:
        names = list(self.slots)
        return lambda slot, made: seen(names[slot], made)

    def drop(self, step: int, microbatch: int) -> None:
        """Let go of a microbatch before its W, so that it leaves no trace in the gradients."""
        del self._stashes[step, microbatch]

    def loss(self, step: int, microbatch: int) -> Tensor:
        """The loss of a microbatch of this step or the one before: 0-dim, fp32, last stage only. A sum, where
        the loss has a weight.
        """
        return self._numbers.losses[step, microbatch]

    def weight(self, step: int, microbatch: int) -> float:
        """What a microbatch counts, known from its I on; 1, unless the loss says otherwise."""
        return self._numbers.weights[step, microbatch]

    def separate_weights(self) -> None:
        """From now on the layers compute with weights of their own, beside the masters."""
        self.working = self.masters.clone()
        for name, parameter in self.parameters.items():
            parameter.data = self.slots[name].of(self.working)

    def release_masters(self) -> None:
        """Sharded: the holders of chunks have them."""
        self.masters = torch.empty(0, dtype=torch.float32, device=self.device)

    # The sums of gradients, and what of the state goes with them.

    def updated(self, step: int, peaks: list[int]) -> None:
        """What the next step is computed with follows from this one."""
        self.limits.follow(step, peaks)

    def beside(self, step: int) -> dict[str, Tensor]:
        """What the state after a step holds besides weights and optimizer."""
        return {f"extra/grid/{name}": torch.tensor(n) for name, n in self.limits.state(step).items()}

    def load_beside(self, step: int, state: Mapping[str, Tensor]) -> None:
        """The inverse of `beside`."""
        names = [name for name in self.slots if f"extra/grid/{name}" in state]
        self.limits.load(step, {name: int(state[f"extra/grid/{name}"]) for name in names})

    def take_gradients(self) -> Tensor:
        """The flat sum of all W since the sums began, as plain numbers; the sums start over."""
        values = self.sums.values()
        self.sums.restart()
        return values

    def discard(self, from_step: int | None = None) -> None:
        """Throw work away: the stashes and losses from a step on, or of all, and all sums of gradients.
        A ghost of the step before keeps its stash: it may still be asked for its I.
        """
        if self._evaluation is not None:
            self._evaluation.clear()
        for key in [key for key in self._stashes if from_step is None or key[0] >= from_step]:
            del self._stashes[key]
        self._numbers.discard(from_step)
        self.sums.restart()

    # What is here.

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """A flat buffer of this stage by logical name."""
        return {name: slot.of(flat) for name, slot in self.slots.items()}

    def held(self) -> list[tuple[int, int]]:
        """The (step, microbatch) that have had F and not yet W."""
        return list(self._stashes)

    def stash_bytes(self) -> int:
        """Of microbatches under way: exact after I, after F as first measured. Of recordings: all."""
        total = 0 if self.recordings is None else self.recordings.whole_bytes
        for stash in (stash for stash in self._stashes.values() if stash.recorded is None):
            total += max(self._held.forward, 0) if stash.open else self._held.of(stash.for_weights())
        return total

    @property
    def held_bytes(self) -> tuple[int, int]:
        """What a microbatch held from F to I and from I to W, when it was first measured, or recorded."""
        least = 0 if self.recordings is None else self.recordings.bytes_each
        return max(self._held.forward, least), max(self._held.weight, least)

    # How.

    def _receive(self) -> None:
        """What compiled layers queue from now on is this stage's."""
        if self._placed_at != self.working.data_ptr():
            self._placed_at = self.working.data_ptr()
            self._by_address = {one.data_ptr(): one for one in self._index if one.numel()}
        RECEIVER.queue, RECEIVER.at = self._queue, self._by_address

    def _fed(self, inputs: Value) -> Value:
        """A batch as the first layer gets it: on the device, numbers in the precision of the layers. A copy:
        what a layer does to it in place is not done to the data.
        """

        def fed(tensor: Tensor) -> Tensor:
            there = host_memory.to_device(tensor.detach(), self.device)
            dtype = self._dtype if there.is_floating_point() else there.dtype
            return there.to(dtype, copy=there.device == tensor.device)

        return mapped(fed, inputs)

    def _enter(self, given: Boundary | None) -> tuple[dict[int, Tensor], Value]:
        """What the stage before has sent, and those of its tensors that want a gradient."""
        if given is None:
            raise InternalError("a stage that is not the first was given no boundary tensor.")
        tensors = [host_memory.to_device(tensor.detach(), self.device) for tensor in given.tensors]
        self._received = [(tensor, tensor._version) for tensor in tensors]
        wanted = {index: tensors[index].requires_grad_() for index in given.graded}
        return wanted, put_together(given.tree, tensors)

    def _layer(
        self, step: int, microbatch: int, index: int, layer: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        def run(*args: Any) -> Any:
            devices.seed(self.device, seed)  # inside, so that a recompute draws the same dropout
            made = layer(*args, **kwargs)
            if self.recordings is not None and devices.has_drawn(self.device, seed):
                self.recordings.drew()
            self._refuse_changes(f"layer {self.model.names[index]!r}")
            return made

        seed = self._key(step, microbatch, index)
        if index not in self._recomputed:
            return run(*args)
        self._held.keep(args, kwargs)
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)

    def _refuse_changes(self, by: str) -> None:
        """Of what the stage before has sent: this worker, or another one, may have to read it again."""
        if any(tensor._version != version for tensor, version in self._received):
            raise UserError(changed_in_place(by))

    def _seed_evaluation(self, number: int) -> None:
        devices.seed(self.device, keys.key(self.seed, keys.EVALUATION, number, self.layers.start))

    def _key(self, step: int, microbatch: int, layer: int) -> int:
        return keys.key(self.seed, keys.DROPOUT, step, microbatch, layer)


def changed_in_place(by: str) -> str:
    return (
        f"{by} changes a tensor in place that the layer before gives, such as a mask; a worker that takes "
        "over would get the changed one: make a new tensor, such as x = x * y instead of x *= y."
    )


class MicrobatchNumbers:
    """The loss of each microbatch and what it counts, of this step and the one before."""

    def __init__(self) -> None:
        self.losses: dict[tuple[int, int], Tensor] = {}  # by step and microbatch
        self.weights: dict[tuple[int, int], float] = {}

    def keep_loss(self, step: int, microbatch: int, loss: Tensor) -> None:
        self.losses = {key: known for key, known in self.losses.items() if key[0] >= step - 1}
        self.losses[step, microbatch] = loss

    def keep_weight(self, step: int, microbatch: int, weight: float) -> None:
        if not 0 <= weight < math.inf:
            raise UserError(
                f"the loss of step {step}, microbatch {microbatch} has the weight {weight}; it must be 0 or "
                "more, such as the number of tokens that count."
            )
        self.weights = {key: known for key, known in self.weights.items() if key[0] >= step - 1}
        self.weights[step, microbatch] = weight

    def discard(self, from_step: int | None) -> None:
        for key in [key for key in self.losses if from_step is None or key[0] >= from_step]:
            del self.losses[key]
        for key in [key for key in self.weights if from_step is None or key[0] >= from_step]:
            del self.weights[key]


class TiedHalves:
    """A stage's halves of tied pairs whose other halves are on another stage: in and out of a flat buffer."""

    def __init__(self, model: Model, slots: Mapping[str, Slot]) -> None:
        both = [pair for pair in model.tied if all(half in slots for half in pair)]
        self.has_pair = bool(both)  # are both halves of a pair here?
        self._elsewhere = [
            slots[name] for pair in model.tied if pair not in both for name in pair if name in slots
        ]

    def part(self, flat: Tensor) -> Tensor:
        """The halves that are here, one after the other."""
        return torch.cat([slot.of(flat).reshape(-1) for slot in self._elsewhere])

    def set_part(self, flat: Tensor, part: Tensor) -> None:
        """The inverse of `part`."""
        for slot in self._elsewhere:
            here = slot.of(flat)
            here.copy_(part[: here.numel()].view(here.shape))
            part = part[here.numel() :]


class HeldBytes:
    """What a microbatch holds between its ops, in bytes: measured once, on the first one. `weights`: the flat
    buffer of the stage's weights, which are held anyway.
    """

    def __init__(self, weights: Callable[[], Tensor]) -> None:
        self._weights = weights
        self._kept: list[Tensor] = []
        self.forward = self.weight = -1  # from F to I, from I to W; not measured yet

    def measured(self) -> AbstractContextManager[Any]:
        """For a forward: what it keeps for its backward is counted, if it has not been yet."""
        return nullcontext() if self.forward >= 0 else _Counted(self)

    def keep(self, *values: Any) -> None:
        """A recomputed layer keeps these, and nothing else."""
        if self.forward < 0:
            self._kept.extend(leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))

    def counted(self) -> None:
        self.forward = self.of(self._kept)
        self._kept.clear()

    def of(self, tensors: Iterable[Tensor]) -> int:
        """Memory of the storages behind some tensors, the weights' own left out."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        storages.pop(self._weights().untyped_storage().data_ptr(), None)
        return sum(storages.values())


class _Counted(saved_tensors_hooks):
    def __init__(self, held: HeldBytes) -> None:
        self._held = held
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._held.keep(tensor := tensor.detach())
        return tensor

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self._held.counted()
