"""What each layer holds of a microbatch, found without memory or arithmetic: on the meta device.

All layers are run forward and backward on meta tensors, with their Linears taken over as on a worker. What
autograd saves is what a stash holds from F to I; what the queue holds afterwards, what it holds from I to W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from everstep.engine.layers import attention_library
from everstep.engine.layers.boundary import Value, mapped, tensors_in
from everstep.engine.layers.linear import EmbeddingGrad, LinearGrad, Queue
from everstep.engine.layers.model import (
    Model,
    every_parameter,
    in_precision,
    skeleton,
    slots,
)
from everstep.engine.layers.taken_over import take_over
from everstep.engine.stage.kept import attention_in
from everstep.engine.stage.stage import DTYPES
from everstep.job.job import Job
from everstep.net.plane import MOST_LANES_AHEAD
from everstep.schedule.footprint import ADAM, Settings, StageFigures

Storages = dict[int, int]  # by identity, their bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFigures:
    parameters: int
    largest: int
    held_forward: float
    held_weight: float
    held_made: float  # instead of it where the whole model is one stage: gradients that I has made
    kept_input: float  # all that is held from F to I with recompute, apart from what layers before were given
    kept_beside: float  # the same, if attention alone is run again
    saves_input: bool  # is its input in `held_forward`?
    output: float  # what it gives to the next layer
    graded: float  # of it, what a gradient comes back for
    largest_held: float = 0.0  # of `held_forward`, the largest tensor
    tied: int = 0  # of its parameters, those that are one tensor with others
    workspace: float = 0.0  # of exact attention, where cuDNN's front end is installed
    keys_values: float = 0.0  # of `held_forward`, what attention reads of all tokens
    queries: float = 0.0  # of `held_forward`, what it reads of its own ones
    shared_input: float = 0.0  # of what it is given, what layers before it were given too: once per stage
    again: bool = True  # is it one that `recompute` is about?


def settings_of(job: Job, *, optimizer: float = ADAM, elementwise: bool = True) -> Settings:
    return Settings(
        precision=job.precision,
        accumulate=job.sums,
        eager=job.stages > 1 and job.optimizer.stagger != "never" and not job.optimizer.shard,
        sharded=job.optimizer.shard,
        clip=job.optimizer.clip is not None,
        average=job.optimizer.ema is not None,
        saved=_saved(job),
        optimizer=optimizer,
        elementwise=elementwise,
        replicas=job.replicas,
        exact=job.device.startswith("cuda") and job.accumulate != "fp32",
        checked_late=job.device.startswith("cuda") and job.accumulate in ("strict", "strict32"),
        recorded=job.device.startswith("cuda") and job.shards == 1 and _records(job),
        alone=job.replicas * job.stages == 1 and not job.optimizer.shard,
        offload=job.offload,
        through_host=job.device.startswith("cuda") and job.transport == "tcp",
        lanes=_lanes(job),
        in_place=_is_in_place(job),
    )


def _is_in_place(job: Job) -> bool:
    return job.device.startswith("cuda") and job.transport == "auto" and torch.cuda.device_count() == 1


def _lanes(job: Job) -> int:
    """To and from every worker of its stage, and of the adjacent ones: all, if they are few, or its own
    replica's.
    """
    if not job.device.startswith("cuda") or job.transport == "tcp" or _is_in_place(job):
        return 0
    adjacent = min(2, job.stages - 1)
    peers = job.replicas * (adjacent + 1) - 1
    return 2 * (peers if peers < MOST_LANES_AHEAD else job.replicas - 1 + adjacent)


def _records(job: Job) -> bool:
    if job.precision == "fp16" or job.virtual > 1:
        return False
    return job.graphs == "always" or (job.graphs == "auto" and not job.recompute and not job.offload)


def _saved(job: Job) -> float:
    """Replicas share the work of a checkpoint, and with sharded states that of copies in memory."""
    to_disk = 1.0 / job.replicas if job.checkpoint is not None else 0.0
    in_memory = (1.0 / job.replicas if job.optimizer.shard else 1.0) if job.copy_interval else 0.0
    return to_disk + in_memory


def layer_figures(
    model: Model, batch: tuple[Value, Value], precision: str, device: str = "cpu", *, compiled: bool = False
) -> list[LayerFigures]:
    """For a microbatch like this one. Stashes are 0 where a layer cannot be run on the meta device.

    `compiled`: layers that are compiled whole keep what matrices and attention read; what lies between may be
    made again, and is not counted.
    """
    whole = compiled and not model.assembly.has_regions
    try:
        return _run(model, batch, DTYPES[precision], on_gpu=device.startswith("cuda"), compiled=whole)
    except Exception:  # an op without a meta form; a user's mistake is the preflight's business
        pass
    return [_static(model, name) for name in model.layers]


def recompute_of(job: Job) -> int:
    """One layer of so many is run again in the backward; 0: none."""
    return job.recompute_every if job.recompute else 0


def makes_in_input_grad(job: Job) -> bool:
    """Does a stage with the whole model hold weight gradients from I to W, not what they are made of?"""
    return job.device == "cpu" and job.shards == 1 and job.accumulate.startswith("strict")


def stage_figures(
    layers: list[LayerFigures],
    part: range,
    *,
    recompute: int,
    attention_alone: bool = False,
    offload: bool = False,
    makes: bool = False,
) -> StageFigures:
    """`recompute`: one of so many of the layers that it is about. `offload` is about the same layers.
    `makes`: a stage with the whole model makes gradients in I (`makes_in_input_grad`).
    """
    here = [layers[index] for index in part]
    last = part.stop == len(layers)
    makes = makes and len(part) == len(layers)
    about = [at for at, layer in enumerate(layers) if layer.again]
    again = set(about[::recompute]) & set(part) if recompute else set()
    away = set(about) & set(part) - again if offload else set()
    of_again = [layers[at].kept_beside if attention_alone else layers[at].kept_input for at in again]
    held = sum(of_again) + (layers[min(again)].shared_input if again and not attention_alone else 0.0)
    held += sum(layers[at].held_forward for at in part if at not in again | away)
    kept = (part.start in again and not attention_alone) or here[0].saves_input or not part.start
    kept = kept and part.start not in away
    entering = 0.0 if kept or not part.start else layers[part.start - 1].output
    back = layers[part.start - 1].graded if part.start else 0.0
    whole = max(layer.held_forward for layer in here)
    beside = max((layers[at].kept_beside for at in again), default=0.0) if attention_alone else 0.0
    gradient = max(layer.largest_held for layer in here)  # of one tensor, such as the logits
    tied = sum(layer.tied for layer in here)
    both = tied == sum(layer.tied for layer in layers)  # halves of a pair; else the other one is sent
    return StageFigures(
        parameters=sum(layer.parameters for layer in here),
        largest=max(layer.largest for layer in here),
        held_forward=held + entering,
        held_weight=sum(layer.held_made if makes else layer.held_weight for layer in here),
        # Gradients: half of what a layer saved; what is made or fetched again is there besides.
        inside=max(whole * (1.0 if again or away else 0.5) - 0.5 * beside, gradient),
        sent=(0.0 if last else here[-1].output) + back,
        joined=tied // 2 if both else 3 * tied,
        workspace=max(layer.workspace for layer in here),
        host=sum(layers[at].held_forward for at in away),
        keys_values=sum(layers[at].keys_values for at in part if at not in again | away),
        keys_values_inside=max(layer.keys_values for layer in here),
        queries=sum(layers[at].queries for at in part if at not in again | away),
    )


def _static(model: Model, name: str) -> LayerFigures:
    index = model.names.index(name)
    own = slots(model, range(index, index + 1))
    sizes = [slot.size for slot in own.values()]
    tied = {name for pair in model.tied for name in pair}
    return LayerFigures(
        parameters=sum(sizes),
        tied=sum(slot.size for name, slot in own.items() if name in tied),
        largest=max(sizes, default=0),
        held_forward=0.0,
        held_weight=0.0,
        held_made=0.0,
        kept_input=0.0,
        kept_beside=0.0,
        saves_input=False,
        output=0.0,
        graded=0.0,
        again=index in model.recomputed(1),
    )


def _run(
    model: Model, batch: tuple[Value, Value], dtype: torch.dtype, *, on_gpu: bool, compiled: bool
) -> list[LayerFigures]:
    """All layers as one stage, forward and backward."""
    value, targets = (mapped(lambda t: t.to("meta"), part) for part in batch)
    value = mapped(lambda t: t.to(dtype).requires_grad_() if t.is_floating_point() else t, value)
    looks = [_Look(model, name, dtype) for name in model.layers]
    through = model.assembly.join(range(len(looks)), [look.module for look in looks], torch.device("meta"))
    at = looks[0]

    def run(index: int, layer: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal at
        at = looks[index]
        at.given = _tensors((args, kwargs))
        made = layer(*args, **kwargs)
        at.made = _tensors(made)
        return made

    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: at.saved.pack(t), lambda t: t)
    with hooks, _Fused(on_gpu, lambda *read: at.attended.append(read)):
        made = model.loss(through(value, run), targets)
    graded = [t for t in tensors_in(made[0] if isinstance(made, tuple) else made) if t.requires_grad]
    torch.autograd.backward(graded, [torch.empty_like(t) for t in graded])
    at.made = []  # the last layer gives it to no one
    seen = _Seen({}, {})
    return [look.figures(seen, on_gpu=on_gpu, compiled=compiled) for look in looks]


class _Seen(NamedTuple):
    """Of layers before: what they hold, and what they were given."""

    held: Storages
    given: Storages


class _Look:
    """What is seen of a layer while it runs."""

    def __init__(self, model: Model, name: str, dtype: torch.dtype) -> None:
        self._static = _static(model, name)
        self.module = in_precision(skeleton(model, name), dtype, name, model.assembly.in_fp32)
        self._queue: Queue = []
        take_over(self.module, self._queue)
        self._parameters = every_parameter(name, self.module).values()
        self.saved = _Saved(self.module)
        self.attended: list[tuple[Tensor, ...]] = []  # queries, keys and values of each attention
        self.given: list[Tensor] = []
        self.made: list[Tensor] = []

    def figures(self, seen: _Seen, *, on_gpu: bool, compiled: bool) -> LayerFigures:
        """After the backward. What is counted here is not counted for the next ones."""
        weights = _storages(self._parameters)
        held, beside, given = (
            {k: n for k, n in _storages(tensors).items() if k not in weights and k not in before}
            for tensors, before in (
                (self.saved.all, seen.held),
                (self.saved.beside, seen.held),
                (self.given, seen.given),
            )
        )
        others = [p.grad for p in self._parameters if p.grad is not None]

        def waiting(queue: Queue) -> Storages:
            queued = [t for entry in queue for t in entry if isinstance(t, Tensor)]
            return {k: n for k, n in _storages([*queued, *others]).items() if k not in weights}

        later = waiting(self._queue)
        made, left = list[LinearGrad | EmbeddingGrad](), Queue()
        for one in self._queue:
            is_made = isinstance(one, LinearGrad) and one.is_larger_than_made
            if not compiled and one.grad.dtype == torch.float32:  # autograd has their whole backward
                plain = isinstance(one, LinearGrad) and one.input is not None and not one.across
                is_made = is_made or plain or isinstance(one, EmbeddingGrad)
            (made if is_made else left).append(one)  # type: ignore[arg-type]
        products = sum(p.numel() * one.grad.element_size() for one in made for p in one.trained)
        if compiled:
            read = later | _storages(one for parts in self.attended for one in parts)
            held, beside = ({k: n for k, n in some.items() if k in read} for some in (held, beside))
        seen.held.update(held)
        seen.given.update(given)
        return replace(
            self._static,
            held_forward=_bytes(held),
            held_weight=_bytes(later),
            held_made=products + _bytes(waiting(left)),
            kept_input=_bytes(given),
            shared_input=_bytes({k: n for k, n in _storages(self.given).items() if k not in given}),
            kept_beside=_bytes(beside),
            saves_input=any(k in held for k in given),
            output=_bytes(_storages(self.made)),
            graded=_bytes(_storages(t for t in self.made if t.requires_grad)),
            largest_held=float(max(held.values(), default=0)),
            workspace=_workspace(self.attended) if on_gpu and attention_library.installed() else 0.0,
            keys_values=_bytes(_storages(one for _, *both in self.attended for one in both)),
            queries=_bytes(_storages(queries for queries, *_ in self.attended)),
        )


class _Saved:
    """What a layer saves for its backward, and what is left of it if its attention is run again."""

    def __init__(self, layer: nn.Module) -> None:
        self.all: list[Tensor] = []
        self.beside: list[Tensor] = []
        self._inside = 0
        for part in attention_in(layer):
            part.register_forward_pre_hook(self._enter, with_kwargs=True)
            part.register_forward_hook(self._leave)

    def pack(self, tensor: Tensor) -> Tensor:
        self.all.append(tensor)
        if not self._inside:
            self.beside.append(tensor)
        return tensor

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside += 1
        self.beside.extend(_tensors((args, kwargs)))

    def _leave(self, module: nn.Module, args: Any, made: Any) -> None:
        self._inside -= 1


class _Fused(TorchFunctionMode):
    """On the meta device attention writes its scores, and RMSNorm all that it computes in between; on a real
    one a fused kernel does not, for RMSNorm only on a GPU. A question to a mask, which has no values there,
    is answered with yes: models ask whether all tokens count and whether a row is one document.
    """

    def __init__(self, on_gpu: bool, attends: Callable[..., None]) -> None:
        """`attends`: is told queries, keys and values of each attention."""
        super().__init__()
        self._on_gpu, self._attends = on_gpu, attends

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self._attends(*args[:3])
            return _Attention.apply(*args[:3])  # type: ignore[no-untyped-call]
        if func is Tensor.__bool__ and args[0].is_meta and args[0].dtype == torch.bool:
            return True
        if self._on_gpu and func is torch.nn.functional.rms_norm and (kwargs or {}).get("weight") is not None:
            return _RMSNorm.apply(args[0], kwargs["weight"])  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads, length = query.shape[-3:-1]  # as fused kernels have it: position by position
        output = query.new_empty((*query.shape[:-3], length, heads, value.shape[-1])).transpose(-3, -2)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:2])


def _workspace(attended: list[tuple[Tensor, ...]]) -> float:
    alike = [q for q, k, _ in attended if q.ndim == 4 and q.shape == k.shape]
    sizes = [attention_library.workspace(q.shape, q.dtype) for q in alike]
    return float(max(sizes, default=0))


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _storages(tensors: Iterable[Tensor]) -> Storages:
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


def _bytes(storages: Mapping[int, int]) -> float:
    return float(sum(storages.values()))
