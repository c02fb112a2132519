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
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from everstep.engine import device as devices
from everstep.engine import keys
from everstep.engine.boundary import Boundary, Gradients, Value, mapped, put_together, tensors_in
from everstep.engine.data import Dataset, split
from everstep.engine.evaluation import SCORED, TRAINED, Evaluation, added
from everstep.engine.grids import Limits
from everstep.engine.held_bytes import HeldBytes
from everstep.engine.linear import Queue, contributions_of
from everstep.engine.model import (
    Model,
    Slot,
    end,
    slots,
)
from everstep.engine.shards.collectives import Collectives
from everstep.engine.shards.plan import Cut
from everstep.engine.stage_layers import build_layers
from everstep.engine.stage_loss import StageLoss
from everstep.engine.stash import Stash
from everstep.engine.sums import Accumulate, Empty, GradientSums
from everstep.errors import InternalError, UserError

Precision = Literal["fp32", "bf16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Stage:
    def __init__(
        self,
        model: Model,
        layers: range,
        *,
        data: Dataset,
        device: torch.device,
        seed: int = 0,
        precision: Precision = "fp32",
        accumulate: Accumulate = "strict",
        recompute: bool = False,
        contributions: int = 256,
        sharded: bool = False,
        empty: Empty | None = None,
        shards: Collectives | None = None,
        evaluation: Evaluation | None = None,
    ) -> None:
        """`contributions`: the microbatches of a step, or more. `empty`: where gradient buffers come from."""
        self.model, self.layers, self.data, self.device, self.seed = model, layers, data, device, seed
        self.precision, self.accumulate, self.recompute = precision, accumulate, recompute
        self.is_first, self.is_last = layers.start == 0, layers.stop == len(model.layers)
        self.shards = shards
        place = (0, 1) if shards is None else (shards.index, shards.count)
        self.cut = Cut(model.shard_plan, *place)
        self.slots: dict[str, Slot] = slots(model, layers, cut=self.cut)
        self.size = end(self.slots)
        tied = {name for pair in model.tied for name in pair}
        self.tied_names = tuple(name for name in self.slots if name in tied)
        # Masters are what the optimizer changes, working what the layers compute with; for fp32 one tensor.
        self.masters = torch.zeros(self.size, dtype=torch.float32, device=device)
        self.working = (
            self.masters
            if precision == "fp32" and not sharded
            else torch.zeros(self.size, dtype=DTYPES[precision], device=device)
        )
        self._queue: Queue = []
        self._modules, self.parameters, self._summed = build_layers(
            model,
            layers,
            seed=seed,
            slots=self.slots,
            masters=self.masters,
            working=self.working,
            queue=self._queue,
            plan=self.cut,
            shards=shards,
        )
        self.evaluation = evaluation
        self._loss = StageLoss(model, device, shards)
        self._through = model.assembly.join(layers, self._modules, device)
        again = model.assembly.recomputed
        names = (model.names[:-1] if again is None else again) if recompute else ()
        self._recomputed = {index for index in layers if model.names[index] in set(names)}
        self.sums = GradientSums(
            self.slots, self.size, kind=accumulate, contributions=contributions, device=device, empty=empty
        )
        self.limits = Limits(list(self.slots) if self.sums.is_strict else (), self.sums.grid)
        self._index: dict[Tensor, int] = {self.parameters[n]: i for i, n in enumerate(self.slots)}
        self._stashes: dict[tuple[int, int], Stash] = {}
        self._batches: dict[tuple[int, int], Any] = {}  # loaded, and not used yet: one at most
        self._evaluated: dict[tuple[int, int], list[Value]] = {}  # values for the next stage: one at most
        self._scores: dict[tuple[int, int], tuple[float, ...]] = {}
        self._losses: dict[tuple[int, int], Tensor] = {}
        self._weights: dict[tuple[int, int], float] = {}
        self._held = HeldBytes(lambda: self.working)

    # The ops.

    def load(self, step: int, microbatch: int) -> None:
        """Get the data that the forward will need, so that waiting for it is not part of the op."""
        if (self.is_first or self.is_last) and not self.closes(step):
            self._batches = {(step, microbatch): self.data.batch(step, microbatch)}

    def forward(self, step: int, microbatch: int, given: Boundary | None = None) -> Boundary | None:
        """F. What the next stage gets; None on the last stage, which keeps the loss instead."""
        if (step, microbatch) in self._stashes:
            raise InternalError(f"forward of step {step}, microbatch {microbatch} was run twice here.")
        if (step, microbatch) not in self._batches:
            self.load(step, microbatch)
        if self.evaluates(step) and (step, microbatch) not in self._evaluated:
            self.evaluate(step, microbatch, given)
        beside = self._evaluated.pop((step, microbatch), None)
        if self.closes(step):
            return self._close(step, microbatch, beside or [])
        batch = self._batches.pop((step, microbatch), None)
        inputs, targets = (None, None) if batch is None else split(batch)
        wanted, value = ({}, self._fed(inputs)) if self.is_first else self._enter(given)
        if beside is not None and not self.is_first:
            value = value[TRAINED]
        weight: Tensor | float | None = None
        with self._held.measured():
            devices.seed(self.device, self._key(step, microbatch, self.layers.start))
            value = self._through(value, partial(self._layer, step, microbatch))
            if self.is_last:
                devices.seed(self.device, self._key(step, microbatch, self.layers.stop))
                value, weight = self._loss(value, targets)
        if not self.is_last:
            boundary = Boundary.of(value if beside is None else {TRAINED: value, SCORED: beside})
            outputs = [tensor for tensor in tensors_in(value) if tensor.requires_grad]
            self._stashes[step, microbatch] = Stash(wanted, outputs)
            return boundary
        self._stashes[step, microbatch] = Stash(wanted, [value], weight)
        self._losses = {key: loss for key, loss in self._losses.items() if key[0] >= step - 1}
        self._losses[step, microbatch] = value.detach().float()
        return None

    # Evaluation, beside the forward of a step.

    def evaluates(self, step: int) -> bool:
        return self.evaluation is not None and self.evaluation.evaluates(step)

    def closes(self, step: int) -> bool:
        return self.evaluation is not None and self.evaluation.closes(step)

    @torch.no_grad()
    def evaluate(self, step: int, microbatch: int, given: Boundary | None = None) -> None:
        """The evaluation batches that travel with a microbatch; their values go to the next stage with it."""
        assert self.evaluation is not None
        before = None if given is None else self._enter(given)[1][SCORED]
        found: list[Value] = []
        for module in self._modules:
            module.eval()
        try:
            for place, number in enumerate(self.evaluation.numbers(microbatch)):
                ends = self.is_first or self.is_last
                inputs, targets = split(self.evaluation.data.batch(1, number)) if ends else (None, None)
                value = self._fed(inputs) if before is None else before[place]
                value = self._through(value, lambda index, layer, *args, **kwargs: layer(*args, **kwargs))
                if self.is_last:
                    value = self.evaluation.scores(*self._loss.to_be_scored(value, targets))
                found.append(value)
        finally:
            for module in self._modules:
                module.train()
        if self.is_last:
            self._scores = {key: scores for key, scores in self._scores.items() if key[0] >= step - 1}
            self._scores[step, microbatch] = added(found)
        self._evaluated = {(step, microbatch): [] if self.is_last else found}

    def scores(self, step: int, microbatch: int) -> tuple[float, ...]:
        """What the evaluation batches of a microbatch added up to; last stage only."""
        return self._scores.get((step, microbatch), ())

    def _close(self, step: int, microbatch: int, beside: list[Value]) -> Boundary | None:
        """The forward of a step that trains nothing: it counts 0."""
        self._stashes[step, microbatch] = Stash({}, [], 0.0)
        self._losses[step, microbatch] = torch.zeros((), device=self.device)
        return None if self.is_last else Boundary.of({TRAINED: None, SCORED: beside})

    def input_grad(self, step: int, microbatch: int, given: Gradients | None = None) -> Gradients | None:
        """I. The gradients for the previous stage; None on the first."""
        stash = self._stashes.get((step, microbatch))
        if stash is None or stash.outputs is None:
            raise InternalError(f"step {step}, microbatch {microbatch}: input gradient with no forward here.")
        self._queue.clear()
        weight = float(stash.weight if given is None else given.weight)  # type: ignore[arg-type]
        self._keep_weight(step, microbatch, weight)
        if given is None and stash.outputs:
            torch.autograd.backward(stash.outputs)
        elif given is None:
            pass  # the closing step
        elif given.tensors:
            grads = [devices.to_device(grad, self.device) for grad in given.tensors]
            torch.autograd.backward([stash.outputs[i] for i in given.of], grads)
        stash.queue, stash.outputs = self._queue.copy(), None
        self._queue.clear()
        for whole in self._summed:
            if self.shards is not None and whole.grad is not None:
                self.shards.sum(whole.grad)
        for parameter in self._index:
            if parameter.grad is not None:
                stash.others.append((parameter, parameter.grad))
                parameter.grad = None
        if self._held.weight < 0:
            self._held.weight = self._held.of(stash.for_weights())
        inputs, stash.inputs = stash.inputs, {}
        if self.is_first:
            return None
        found = {i: t.grad for i, t in enumerate(inputs.values()) if t.grad is not None}
        return Gradients(tuple(found.values()), tuple(found), weight)

    def weight_grad(self, step: int, microbatch: int) -> None:
        """W. Adds the microbatch's gradients to the buffer, and lets go of everything held for it."""
        stash = self._stashes.get((step, microbatch))
        if stash is None or stash.open:
            raise InternalError(f"step {step}, microbatch {microbatch}: weight gradient before the input's.")
        if self.sums.step not in (None, step):
            raise InternalError(f"a weight gradient of step {step} for the sums of step {self.sums.step}.")
        with torch.no_grad():
            if self.sums.is_strict:
                for parameter, product in contributions_of(stash.queue, stash.others):
                    self.sums.add(self._index[parameter], product)
                self.sums.added()
            else:
                for queued in stash.queue:
                    queued.run(self._sum_of)
                for parameter, grad in stash.others:
                    self._sum_of(parameter).add_(grad)
        del self._stashes[step, microbatch]

    def drop(self, step: int, microbatch: int) -> None:
        """Let go of a microbatch before its W, so that it leaves no trace in the gradients."""
        del self._stashes[step, microbatch]

    def loss(self, step: int, microbatch: int) -> Tensor:
        """The loss of a microbatch of this step or the one before: 0-dim, fp32, last stage only. A sum, where
        the loss has a weight.
        """
        return self._losses[step, microbatch]

    def weight(self, step: int, microbatch: int) -> float:
        """What a microbatch counts, known from its I on; 1, unless the loss says otherwise."""
        return self._weights[step, microbatch]

    def separate_weights(self) -> None:
        """From now on the layers compute with weights of their own, beside the masters."""
        self.working = self.masters.clone()
        for name, parameter in self.parameters.items():
            parameter.data = self.slots[name].of(self.working)

    def release_masters(self) -> None:
        """Sharded: the holders of chunks have them."""
        self.masters = torch.empty(0, dtype=torch.float32, device=self.device)

    # The sums of gradients.

    def take_gradients(self) -> Tensor:
        """The flat sum of all W since the sums began, as plain numbers; they begin anew."""
        values = self.sums.values()
        self.sums.restart()
        return values

    def discard(self, from_step: int | None = None) -> None:
        """Throw work away: the stashes and losses from a step on, or of all, and all sums of gradients.
        A ghost of the step before keeps its stash: it may still be asked for its I.
        """
        self._evaluated.clear()
        for table in (self._stashes, self._losses, self._weights):
            for key in [key for key in table if from_step is None or key[0] >= from_step]:
                del table[key]
        self.sums.restart()

    # What is here.

    @property
    def has_tied_pair(self) -> bool:
        """Are both halves of a tied pair here?"""
        return any(a in self.slots and b in self.slots for a, b in self.model.tied)

    def tied_part(self, flat: Tensor) -> Tensor:
        """This stage's halves of the tied pairs whose other halves are elsewhere, one after the other."""
        return torch.cat([self.slots[name].of(flat).reshape(-1) for name in self._tied_elsewhere()])

    def set_tied_part(self, flat: Tensor, part: Tensor) -> None:
        """The inverse of `tied_part`."""
        for name in self._tied_elsewhere():
            here = self.slots[name].of(flat)
            here.copy_(part[: here.numel()].view(here.shape))
            part = part[here.numel() :]

    def _tied_elsewhere(self) -> list[str]:
        return [
            name
            for pair in self.model.tied
            for name in pair
            if name in self.slots and not all(half in self.slots for half in pair)
        ]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """A flat buffer of this stage by logical name."""
        return {name: slot.of(flat) for name, slot in self.slots.items()}

    def held(self) -> list[tuple[int, int]]:
        """The (step, microbatch) that have had F and not yet W."""
        return list(self._stashes)

    def stash_bytes(self) -> int:
        """Memory held for microbatches under way: exact after I, after F as measured on the first forward."""
        total = 0
        for stash in self._stashes.values():
            total += max(self._held.forward, 0) if stash.open else self._held.of(stash.for_weights())
        return total

    @property
    def held_bytes(self) -> tuple[int, int]:
        """What a microbatch held from F to I and from I to W, when it was first measured."""
        return max(self._held.forward, 0), max(self._held.weight, 0)

    # How.

    def _fed(self, inputs: Value) -> Value:
        """A batch as the first layer gets it: on the device, numbers in the precision of the layers."""

        def fed(tensor: Tensor) -> Tensor:
            tensor = devices.to_device(tensor.detach(), self.device)
            return tensor.to(DTYPES[self.precision]) if tensor.is_floating_point() else tensor

        return mapped(fed, inputs)

    def _enter(self, given: Boundary | None) -> tuple[dict[int, Tensor], Value]:
        """What the stage before has sent, and those of its tensors that want a gradient."""
        if given is None:
            raise InternalError("a stage that is not the first was given no boundary tensor.")
        tensors = [devices.to_device(tensor.detach(), self.device) for tensor in given.tensors]
        wanted = {index: tensors[index].requires_grad_() for index in given.graded}
        return wanted, put_together(given.tree, tensors)

    def _keep_weight(self, step: int, microbatch: int, weight: float) -> None:
        if not 0 <= weight < math.inf:
            raise UserError(
                f"the loss of step {step}, microbatch {microbatch} has the weight {weight}; it must be 0 or "
                "more, such as the number of tokens that count."
            )
        self._weights = {key: known for key, known in self._weights.items() if key[0] >= step - 1}
        self._weights[step, microbatch] = weight

    def _layer(
        self, step: int, microbatch: int, index: int, layer: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        def run(*args: Any) -> Any:
            devices.seed(self.device, seed)  # inside, so that a recompute draws the same dropout
            return layer(*args, **kwargs)

        seed = self._key(step, microbatch, index)
        if index not in self._recomputed:
            return run(*args)
        self._held.keep(args, kwargs)
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)

    def _key(self, step: int, microbatch: int, layer: int) -> int:
        return keys.key(self.seed, keys.DROPOUT, step, microbatch, layer)

    def _sum_of(self, parameter: Tensor) -> Tensor:
        slot = self.sums.slots[self._index[parameter]]
        return slot.of(self.sums.flat)
