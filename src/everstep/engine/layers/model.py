"""A model as a table of layers: what runs where is decided later, so nothing is built here.

A layer is a name and a factory. Each worker calls the factories of its own layers only; a 7B model never
exists in one place. A tensor's logical name is "<layer>.<parameter>", the same under every shape of pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import register_parametrization
from torch.overrides import TorchFunctionMode

from everstep.engine import device as devices
from everstep.engine import keys
from everstep.engine.layers.boundary import Value
from everstep.engine.layers.regions import region
from everstep.engine.layers.shard_plan import Cut
from everstep.errors import UserError

Factory = Callable[[], nn.Module]
Loss = Callable[[Any, Any], Any]  # of (output, targets): a mean, or (sum, weight)


@region
def cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    """Mean over all positions; the last dimension of the output is the vocabulary.

    Compiled, it never holds the logits in fp32.
    """
    return nn.functional.cross_entropy(output.float().reshape(-1, output.shape[-1]), targets.reshape(-1))


@region
def token_loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy summed over the tokens that count (targets of -100 do not), and how many they are.

    With the weight the gradient of a step is that of all its tokens, however they are spread over
    microbatches.
    """
    logits, targets = output.float().reshape(-1, output.shape[-1]), targets.reshape(-1)
    return nn.functional.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum()


Run = Callable[..., Any]  # (index of a layer, function, *args, **kwargs): what a stage calls a layer with
Through = Callable[[Value, Run], Value]  # what a stage is given -> what it gives; `frame`: a module around it


def one_after_the_other(layers: range, modules: list[nn.Module], device: torch.device) -> Through:
    def through(value: Value, run: Run) -> Value:
        for index, module in zip(layers, modules, strict=True):
            value = run(index, module, value)
        return value

    return through


def anything(inputs: Value, targets: Value) -> None:
    """A model that takes whatever its first layer and its loss take."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelAssembly:
    """How layers make a stage, where it is not one after the other; what is known of them besides."""

    join: Callable[[range, list[nn.Module], torch.device], Through] = one_after_the_other
    together: tuple[tuple[str, ...], ...] = ()  # neighbours that no cut may part
    costs: Mapping[str, float] | None = None  # time of each layer; None: counted from its parameters
    recomputed: frozenset[str] | None = None  # what `recompute` is about; None: all layers but the last
    recordable: bool = (
        False  # do its layers do the same with every batch of a shape, and nothing on the host?
    )
    has_regions: bool = False  # do its layers say themselves what of them is to be compiled?
    check: Callable[[Value, Value], None] = anything  # says in a sentence what of a batch does not fit
    card: Mapping[str, Any] = field(default_factory=dict)  # what checkpoints say about the model
    shared_out: Mapping[str, int | None] = field(default_factory=dict)  # among shards, such as heads
    in_fp32: tuple[str, ...] = ()  # patterns of names that layers get in fp32 in any precision


@dataclass(frozen=True, eq=False)
class Model:
    """Layers in order, a loss of (output, targets), and pairs of logical names that are one tensor.

    A list of factories is accepted for `layers`: their names are then "0", "1", ...
    """

    layers: Mapping[str, Factory]  # name to a function that builds the nn.Module
    loss: Loss = cross_entropy  # of (output, targets): a mean, or (sum, weight) such as `token_loss`
    tied: tuple[tuple[str, str], ...] = ()  # such as (("embed.weight", "head.weight"),)
    assembly: ModelAssembly = ModelAssembly()  # for families of models, such as `everstep.hf` makes
    shard_plan: Mapping[str, str] = field(default_factory=dict)  # pattern of modules -> how shards split them

    def __post_init__(self) -> None:
        layers = self.layers
        if not isinstance(layers, Mapping):
            if not isinstance(layers, Sequence) or isinstance(layers, str):
                raise UserError(f"layers is a {type(layers).__name__}; give a dict of factories, or a list.")
            layers = {str(i): factory for i, factory in enumerate(layers)}
        if not layers:
            raise UserError("layers is empty; a model has at least one layer.")
        for name, factory in layers.items():
            if isinstance(factory, nn.Module):
                raise UserError(
                    f"layer {name!r} is a module already built; give a factory such as "
                    f"lambda: {type(factory).__name__}(...), so that only its worker builds it."
                )
            if not callable(factory):
                raise UserError(f"layer {name!r} is a {type(factory).__name__}; give a function to build it.")
        object.__setattr__(self, "layers", dict(layers))
        object.__setattr__(self, "tied", tuple((first, second) for first, second in self.tied))

    @property
    def names(self) -> list[str]:
        return list(self.layers)

    def recomputed(self, every: int) -> list[int]:
        """Of the layers that a recompute is about, one of so many; 0: none."""
        about = self.assembly.recomputed
        names = set(self.names[:-1] if about is None else about)
        return [at for at, name in enumerate(self.names) if name in names][::every] if every else []


class Slot(NamedTuple):
    """Where a parameter lies in the flat buffers of its stage."""

    offset: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.size].view(self.shape)


def trained(layer: str, module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a layer that training changes, by logical name."""
    return {f"{layer}.{name}": p for name, p in module.named_parameters() if p.requires_grad}


def every_parameter(layer: str, module: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters of a layer, frozen ones too, by logical name."""
    return {f"{layer}.{name}": p for name, p in module.named_parameters()}


def skeleton(model: Model, layer: str) -> nn.Module:
    """The layer on the meta device: its shapes without its memory."""
    with torch.device("meta"), _NoDraws():
        return built(model, layer)


_DRAWS = {
    Tensor.normal_,
    Tensor.uniform_,
    nn.init.normal_,
    nn.init.uniform_,
    nn.init.kaiming_uniform_,
}


class _NoDraws(TorchFunctionMode):
    """Weights that are not there need no values; to draw them, torch would import its compiler, for 2 s."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


def built(model: Model, layer: str) -> nn.Module:
    try:
        module = model.layers[layer]()
    except UserError:
        raise
    except Exception as error:  # the user's factory
        kind = getattr(model.layers[layer], "__name__", "")
        fix = f"; give a function without arguments: lambda: {kind}(...)" if "argument" in str(error) else ""
        raise UserError(f"layer {layer!r} cannot be built: {in_short(error)}{fix}.") from error
    if not isinstance(module, nn.Module):
        raise UserError(f"the factory of layer {layer!r} gave a {type(module).__name__}; give an nn.Module.")
    return module


def drawn(model: Model, index: int, seed: int) -> nn.Module:
    """A layer with its first values, which are a function of (seed, layer): equal wherever they are drawn."""
    devices.seed(torch.device("cpu"), keys.key(seed, keys.INIT, index))
    with torch.device("cpu"):
        return built(model, model.names[index])


def in_precision(
    module: nn.Module, dtype: torch.dtype, layer: str = "", in_fp32: Sequence[str] = ()
) -> nn.Module:
    """Parameters and kept buffers in the precision of the computation. Buffers that are not kept in
    checkpoints are tables, such as rotary frequencies: they stay as precise as they are. So does what a
    pattern of `in_fp32` names. A trained parameter of those, which lies in the precision of the computation
    already, is handed to its module in fp32.
    """
    for path, part in module.named_modules():
        tables = part._non_persistent_buffers_set
        kept = {**part._parameters, **{k: b for k, b in part._buffers.items() if k not in tables}}
        for key, tensor in kept.items():
            if tensor is None or not tensor.is_floating_point():
                continue
            name = ".".join(filter(None, (layer, path, key)))
            if dtype != torch.float32 and any(fnmatchcase(name, f"*{pattern}*") for pattern in in_fp32):
                if tensor.dtype == dtype and tensor.requires_grad:
                    register_parametrization(part, key, _InFp32(), unsafe=True)
            elif isinstance(tensor, nn.Parameter):
                tensor.data = tensor.data.to(dtype)
            else:
                part._buffers[key] = tensor.to(dtype)
    return module


class _InFp32(nn.Module):
    def forward(self, original: Tensor) -> Tensor:
        return original.float()


def in_training(module: nn.Module) -> nn.Module:
    """Training mode, but for frozen parts that were put into eval(): those stay as they are, with the dropout
    inside them.
    """
    stays = [
        part
        for part in module.modules()
        if not part.training
        and any(True for _ in part.parameters())
        and not any(p.requires_grad for p in part.parameters())
    ]
    module.train()
    for part in stays:
        part.eval()
    return module


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """All of them in eval(); after that each part in the mode it was in."""
    parts = [part for module in modules for part in module.modules()]
    modes = [part.training for part in parts]
    try:
        for part in parts:
            part.training = False
        yield
    finally:
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode


def refuse_statistics(layer: str, module: nn.Module) -> None:
    """Running statistics of norms that a forward in training mode would change."""
    for path, part in module.named_modules():
        if isinstance(part, _NormBase) and part.track_running_stats and part.training:
            where = f" in {path}" if path else ""
            raise UserError(
                f"layer {layer!r} keeps running statistics ({type(part).__name__}{where}), which no two "
                "workers would share; use LayerNorm, RMSNorm or track_running_stats=False."
            )


@contextmanager
def refusing_changed_buffers(layers: Mapping[str, nn.Module]) -> Iterator[None]:
    """A forward inside leaves the buffers that a checkpoint would have as they are; else one is named. Those
    that are not kept in checkpoints are tables, which a layer may make when it needs them.
    """
    before = {key: (buffer, _image(buffer)) for key, buffer in _kept_buffers(layers)}
    yield
    for (layer, path), buffer in _kept_buffers(layers):
        was, image = before.get((layer, path), (None, None))
        if _image(buffer) != image or (buffer.is_meta and buffer is not was):
            raise UserError(
                f"layer {layer!r} changes its buffer {path!r} in its forward, a state that no two workers "
                "would share and no checkpoint would have; compute it from the layer's input, make it a "
                "parameter, or, if it is a table, register it with persistent=False."
            )


def _kept_buffers(layers: Mapping[str, nn.Module]) -> Iterator[tuple[tuple[str, str], Tensor]]:
    for layer, module in layers.items():
        for path, part in module.named_modules():
            for key, buffer in part._buffers.items():
                if buffer is not None and key not in part._non_persistent_buffers_set:
                    yield (layer, f"{path}.{key}".removeprefix(".")), buffer


def _image(buffer: Tensor) -> int:
    """The hash of its bits; of one without memory how often it was written to."""
    if buffer.is_meta:
        return buffer._version
    return xxhash.xxh3_64_intdigest(buffer.detach().reshape(-1).view(torch.uint8).cpu().numpy().data)


def in_short(error: BaseException) -> str:
    """An exception in a few words, for the middle of a sentence."""
    first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def slots(model: Model, layers: Iterable[int], align: int = 64, cut: Cut | None = None) -> dict[str, Slot]:
    """A place for every trained parameter of some layers, each start a multiple of `align` elements. `cut`:
    for one shard's parts of them.
    """
    found: dict[str, Slot] = {}
    offset = 0
    for layer in map(model.names.__getitem__, layers):
        for name, parameter in trained(layer, skeleton(model, layer)).items():
            shape = tuple(parameter.shape)
            slot = found[name] = Slot(offset, shape if cut is None else cut.local_shape(name, shape))
            offset += -(-slot.size // align) * align
    return found


def end(table: Mapping[str, Slot], align: int = 64) -> int:
    """The length of the flat buffer that a table of slots describes."""
    return max((slot.offset + -(-slot.size // align) * align for slot in table.values()), default=0)


def parameter_count(model: Model) -> int:
    """Trained parameters; a tied pair counts once."""
    table = slots(model, range(len(model.layers)))
    second = {name for _, name in model.tied}
    return sum(slot.size for name, slot in table.items() if name not in second)


def check_tied(model: Model) -> None:
    """Tied names must exist and have one shape."""
    table: dict[str, nn.Parameter] = {}
    for layer in model.layers if model.tied else ():
        table |= every_parameter(layer, skeleton(model, layer))
    for pair in model.tied:
        for name in pair:
            if name not in table:
                raise UserError(f"tied parameter {name!r} is not in the model; names are layer.parameter.")
        shapes = [tuple(table[name].shape) for name in pair]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"tied parameters {pair[0]!r} {shapes[0]} and {pair[1]!r} {shapes[1]} "
                "differ in shape; a tied pair is one tensor."
            )


def partition(model: Model, stages: int) -> list[range]:
    """Contiguous layers for each stage, the costliest stage as cheap as it can be."""
    blocks = _blocks(model)
    if stages < 1:
        raise UserError(f"stages is {stages}; a pipeline has at least 1.")
    if stages > len(blocks):
        raise UserError(f"stages is {stages}, more stages than layers; the model has {len(blocks)} layers.")
    known = model.assembly.costs
    costs = [_cost(skeleton(model, name)) if known is None else known[name] for name in model.layers]
    parts = _balanced([math.fsum(costs[i] for i in block) for block in blocks], stages)
    return [range(blocks[part.start].start, blocks[part.stop - 1].stop) for part in parts]


def multiplications(model: Model) -> float:
    """The parameters that a token is multiplied with, all layers together; a looked-up table is not."""
    known = model.assembly.costs
    if known is not None:
        return sum(known.values())
    return sum(_cost(skeleton(model, name)) for name in model.layers)


def _blocks(model: Model) -> list[range]:
    """The layers, those that stay together as one."""
    inside = {name for group in model.assembly.together for name in group[1:]}
    starts = [index for index, name in enumerate(model.layers) if name not in inside]
    return [range(a, b) for a, b in pairwise([*starts, len(model.layers)])]


def _cost(module: nn.Module) -> float:
    """A layer's time: multiplications a token. A looked-up table is not multiplied, but it is updated."""
    tables = [part.weight for part in module.modules() if isinstance(part, nn.Embedding)]
    looked_up = {id(table) for table in tables}
    sizes = (p.numel() * (0.05 if id(p) in looked_up else 1.0) for p in module.parameters())
    return math.fsum(sizes) + 1e-3  # not `sum`: all workers cut alike, whatever their Python


def _balanced(costs: Sequence[float], parts: int) -> list[range]:
    """Least maximum, then least sum of squares, by dynamic programming over the last cut."""
    count = len(costs)
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for part in range(parts):
        then: dict[int, tuple[float, float, tuple[int, ...]]] = {}  # layers placed: maximum, squares, cuts
        for stop in range(part + 1, count - (parts - part - 1) + 1):
            then[stop] = min(
                (
                    max(worst, prefix[stop] - prefix[start]),
                    squares + (prefix[stop] - prefix[start]) ** 2,
                    (*cuts, stop),
                )
                for start, (worst, squares, cuts) in best.items()
                if start < stop
            )
        best = then
    cuts = (0, *best[count][2])
    return [range(start, stop) for start, stop in pairwise(cuts)]
