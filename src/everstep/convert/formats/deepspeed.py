"""DeepSpeed's own checkpoints, ZeRO-1, 2 and 3, with and without tensor or pipeline parallelism. Reading.

    <tag>/mp_rank_MM_model_states.pt                          ZeRO-1/2: 16-bit weights, shapes, client state
    <tag>/zero_pp_rank_D_mp_rank_MM_model_states.pt           ZeRO-3: the same without weights
    <tag>/[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt    flat fp32 weights and optimizer state

ZeRO-1/2 lays a group's parameters one after the other, pads the end and cuts it into equal ranges; where a
parameter's fragment lies in a rank's range is in `param_slice_mappings`, and where in the parameter follows
by counting over the ranks. ZeRO-3 cuts every parameter alone. Nothing is loaded: fragments become pieces of
files. DeepSpeed need not be installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from everstep.convert.formats import deepspeed_meta, deepspeed_write, pickles
from everstep.convert.formats.deepspeed_files import LAYER, check_ranks, files_in, folder_of
from everstep.convert.formats.format import Format, Reading
from everstep.convert.formats.shards import ShardRules
from everstep.convert.state import TrainingState, encoded_group, keyed_value
from everstep.convert.values import Encoder
from everstep.errors import UserError
from everstep.layout.box import Shape, flat_range, offset_of, row_major
from everstep.layout.layout import ITEM_BYTES
from everstep.store.stored import FilePiece, Pieces, Stored


@dataclass(slots=True)
class _Local:
    """What one model-parallel rank has, all of its data-parallel ranks together."""

    weights: dict[str, Stored] = field(default_factory=dict)
    states: dict[str, dict[str, Stored]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    frozen: dict[str, Stored] = field(default_factory=dict)
    buffers: dict[str, Stored] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    encoder: Encoder = field(default_factory=Encoder)


def read(path: str | Path, reading: Reading) -> TrainingState:
    folder = folder_of(Path(path))
    if folder is None:
        raise UserError(f"{path} has no *_optim_states.pt; give the folder of a DeepSpeed checkpoint.")
    optims, models, layers = files_in(folder)
    ranks = [pickles.load(models[key]) for key in sorted(models)]
    first = ranks[0]
    tp = int((first.get("checkpoint_parallel_dimensions") or {}).get("tp_degree") or 1)
    optim = pickles.load(optims[min(optims)])["optimizer_state_dict"]
    check_ranks(folder, optims, optim.get("partition_count"))
    stage = _stage(optim)
    locals_ = [_local(stage, mp, optims, models) for mp in sorted({mp for mp, _ in optims})]
    if layers:
        _add_layers(locals_, layers, tp)
    rules = ShardRules(reading.patterns, _info(first), reading.vocab)
    state = TrainingState(step=int(first.get("global_steps") or 0))
    deepspeed_meta.take(state, ranks, optim)
    _join(state, locals_, tp, rules)
    state.groups = with_empty(state, (first.get("everstep") or {}).get("groups"))
    bf16 = any(name.name.startswith("bf16_") for name in optims.values())
    state.meta |= {"format": f"deepspeed zero-{stage}", "precision": "bf16" if bf16 else _precision(first)}
    return state


def with_empty(state: TrainingState, written: Any) -> list[dict[str, Any]]:
    """Groups as we wrote them: DeepSpeed has no place for parameters without elements in them."""
    found = [list(group["params"]) for group in state.groups]
    if not isinstance(written, list):
        return state.groups
    named = [[n for n in group["params"] if n not in state.frozen] for group in written]
    if [names for names in named if names] != [names for names in found if names]:
        return state.groups
    known = {tuple(group["params"]): group for group in state.groups}
    groups = [
        {**known.get(tuple(names), group), "params": group["params"]}
        for names, group in zip(named, written, strict=True)
    ]
    inside = {name for group in groups for name in group["params"]}
    state.frozen = [name for name in state.frozen if name not in inside]
    return groups


def _stage(optim: Any) -> int:
    stage = optim["zero_stage"]
    return int(stage if isinstance(stage, int) else stage.__dict__["args"][0])


def _local(
    stage: int, mp: int, optims: dict[tuple[int, int], Path], models: dict[tuple[int, int], Path]
) -> _Local:
    parts = [pickles.load(optims[key])["optimizer_state_dict"] for key in sorted(optims) if key[0] == mp]
    ranks = [pickles.load(models[key]) for key in sorted(models) if key[0] == mp]
    first, found = ranks[0], _Local()
    shapes = {name: tuple(s) for group in first["param_shapes"] or [] for name, s in group.items()}
    for name in first.get("buffer_names") or []:
        _add_tensor(found, found.buffers, name, first["module"][name])
    found.tied = dict(first.get("shared_params") or {})
    if stage == 3:
        _read_three(found, parts, ranks, shapes)
    else:
        _read_one(found, parts, shapes)
        _read_module(found, first)
    return found


def _add_tensor(found: _Local, into: dict[str, Stored], name: str, value: Any) -> None:
    if isinstance(value, Pieces):
        into[name] = value
    elif value is not None:
        found.encoder.lost.append(f"module.{name}")


# ZeRO-1 and 2.


def _read_one(found: _Local, parts: Sequence[Any], shapes: dict[str, Shape]) -> None:
    for g in range(len(parts[0]["single_partition_of_fp32_groups"])):
        names: dict[str, int] = {}
        weights: dict[str, _Fragments] = {}
        states: dict[str, dict[str, _Fragments]] = {}
        scalars: dict[str, Stored] = {}
        for part in parts:
            flat = part["single_partition_of_fp32_groups"][g]
            mine = _group_state(part, g)
            scalars |= _scalars(found, mine, flat, g)
            fragments = part["param_slice_mappings"][g].items()
            for name, place in sorted(fragments, key=lambda item: item[1].get("start")):
                start, count = place.get("start"), place.get("numel")
                done = names.get(name, 0)
                shape = _shape(shapes, name)
                _add(weights, name, shape, done, flat, start, count)
                for key, tensor in mine.items():
                    if _is_flat(tensor, flat):
                        _add(states.setdefault(name, {}), key, shape, done, tensor, start, count)
                names[name] = done + count
        _collect(found, shapes, names, weights, states, scalars)
        base = parts[0]["base_optimizer_state"]
        numbers = base["param_groups"][g] if isinstance(base, dict) else {}
        found.groups.append(encoded_group(found.encoder, names, numbers, f"groups.{g}"))


def _group_state(part: Any, g: int) -> dict[str, Any]:
    base = part["base_optimizer_state"]
    if isinstance(base, list):  # an elastic checkpoint: a lean state for each group, one count of steps
        step = part.get("base_optimizer_state_step")
        return {**base[g], **({} if step is None else {"step": step})}
    return dict(base["state"].get(base["param_groups"][g]["params"][0], {}))


def _read_module(found: _Local, first: Any) -> None:
    known = {*found.weights, *found.buffers, *found.tied}
    for name, tensor in (first["module"] or {}).items():
        if name not in known:
            _add_tensor(found, found.frozen, name, tensor)


# ZeRO-3.


def _read_three(found: _Local, parts: Sequence[Any], ranks: Sequence[Any], shapes: dict[str, Shape]) -> None:
    world = len(parts)
    numbers = parts[0]["optimizer_state_dict"]["param_groups"]
    for g, group in enumerate(numbers):
        found.groups.append(encoded_group(found.encoder, (), group, f"groups.{g}"))
    for sub, table in enumerate(ranks[0]["param_shapes"]):
        at = 0
        names: dict[str, int] = {}
        weights: dict[str, _Fragments] = {}
        states: dict[str, dict[str, _Fragments]] = {}
        scalars: dict[str, Stored] = {}
        for name in table:
            shape = _shape(shapes, name)
            each = -(-prod(shape) // world)
            for rank, part in enumerate(parts):
                flat = part["fp32_flat_groups"][sub]
                mine = dict(part["optimizer_state_dict"]["state"].get(sub, {}))
                scalars |= _scalars(found, mine, flat, sub)
                count = max(0, min(each, prod(shape) - rank * each))
                _add(weights, name, shape, rank * each, flat, at, count)
                for key, tensor in mine.items():
                    if _is_flat(tensor, flat):
                        _add(states.setdefault(name, {}), key, shape, rank * each, tensor, at, count)
            names[name] = prod(shape)
            at += each
        _collect(found, shapes, names, weights, states, scalars)
        owner = next((g for g, group in enumerate(numbers) if sub in group["params"]), 0)
        found.groups[owner]["params"] += list(names)
    found.frozen |= frozen_of(ranks)


def frozen_of(ranks: Sequence[Any]) -> dict[str, Stored]:
    """The frozen parameters, each cut over the ranks' model states."""
    found: dict[str, Stored] = {}
    for name, size in (ranks[0].get("frozen_param_shapes") or {}).items():
        shape = tuple(size)
        each = -(-prod(shape) // len(ranks))
        pieces = []
        for rank, one in enumerate(ranks):
            tensor = one["frozen_param_fragments"][name]
            count = max(0, min(each, prod(shape) - rank * each))
            pieces += _ranged(shape, rank * each, tensor, 0, count)
        found[name] = Pieces(ranks[0]["frozen_param_fragments"][name].dtype, shape, tuple(pieces))
    return found


# Both.


@dataclass(slots=True)
class _Fragments:
    """One tensor's elements as they are gathered from the ranks' flat buffers."""

    dtype: str
    pieces: list[FilePiece] = field(default_factory=list)


def _add(
    table: dict[str, _Fragments], key: str, shape: Shape, at: int, flat: Pieces, start: int, count: int
) -> None:
    one = table.setdefault(key, _Fragments(flat.dtype))
    if one.dtype != flat.dtype:
        raise UserError(
            f"{flat.pieces[0].file}: {key} is of {flat.dtype} here and of {one.dtype} in other ranks."
        )
    one.pieces.extend(_ranged(shape, at, flat, start, count))


def _collect(
    found: _Local,
    shapes: dict[str, Shape],
    names: Iterable[str],
    weights: dict[str, _Fragments],
    states: dict[str, dict[str, _Fragments]],
    scalars: dict[str, Stored],
) -> None:
    for name in names:
        found.weights[name] = Pieces(weights[name].dtype, shapes[name], tuple(weights[name].pieces))
        found.states[name] = {
            **scalars,
            **{
                key: Pieces(p.dtype, shapes[name], tuple(p.pieces)) for key, p in states.get(name, {}).items()
            },
        }


def _ranged(shape: Shape, position: int, flat: Pieces, start: int, count: int) -> list[FilePiece]:
    """Elements position.. of a parameter, which are elements start.. of a flat tensor in a file."""
    if count == 0:  # a rank beyond the end of a small parameter; its position means nothing
        return []
    (piece,) = flat.pieces
    if start < 0 or start + count > flat.shape[0] or position + count > prod(shape):
        raise UserError(f"{piece.file}: a fragment lies outside its partition; the checkpoint is damaged.")
    item, strides = ITEM_BYTES[flat.dtype], row_major(shape)
    return [
        FilePiece(
            box, piece.file, piece.offset + (start + offset_of(box.start, strides) - position) * item, strides
        )
        for box in flat_range(shape, position, position + count)
    ]


def _is_flat(value: Any, like: Pieces) -> bool:
    return isinstance(value, Pieces) and len(value.shape) == 1 and value.shape[0] >= like.shape[0]


def _scalars(found: _Local, state: dict[str, Any], flat: Pieces, group: int) -> dict[str, Stored]:
    """What all parameters of a group share: the count of steps, mostly."""
    shared: dict[str, Stored] = {}
    for key, value in state.items():
        if _is_flat(value, flat):
            continue
        one = keyed_value(key, value)
        if one is not None and not one[1].shape:
            shared[one[0]] = one[1]
        elif f"optimizer state {key} of group {group}" not in found.encoder.lost:
            found.encoder.lost.append(f"optimizer state {key} of group {group}")
    return shared


def _shape(shapes: dict[str, Shape], name: str) -> Shape:
    if name not in shapes:
        raise UserError(f"parameter {name!r} is in the optimizer's files and not in param_shapes.")
    return shapes[name]


def _info(first: Any) -> dict[str, Any]:
    found: dict[str, Any] = dict(first.get("universal_checkpoint_info") or {})
    return found


def _add_layers(locals_: list[_Local], layers: Sequence[Path], tp: int) -> None:
    """Pipeline engines keep 16-bit weights by layer; those without masters are frozen parameters."""
    for path in layers:
        match = LAYER.fullmatch(path.name)
        assert match is not None
        for name, tensor in pickles.load(path).items():
            full = f"{int(match[1])}.{name}"
            owners = [mine for rank, mine in enumerate(locals_) if rank % tp == int(match[2])]
            if owners and not any(full in mine.weights for mine in owners):
                owners[0].frozen.setdefault(full, tensor)


def _join(state: TrainingState, locals_: Sequence[_Local], tp: int, rules: ShardRules) -> None:
    """Stages one after the other; within a stage, the tensor-parallel shards of a name made whole."""
    for first in range(0, len(locals_), tp):
        shards = locals_[first : first + tp]
        for name in shards[0].weights:
            if f"model/{name}" in state.tensors:
                continue  # tied over stages: the first stage's copy is the one
            state.tensors[f"model/{name}"] = rules.whole(name, [mine.weights[name] for mine in shards])
            for key in shards[0].states[name]:
                values = [mine.states[name][key] for mine in shards]
                one = values[0] if not values[0].shape else rules.whole(name, values)
                state.tensors[f"optimizer/{name}/{key}"] = one
        for name in shards[0].frozen:
            if f"model/{name}" not in state.tensors:
                state.tensors[f"model/{name}"] = rules.whole(name, [mine.frozen[name] for mine in shards])
                state.frozen.append(name)
        for name, tensor in shards[0].buffers.items():
            state.tensors[f"buffer/{name}"] = tensor
        state.tied |= shards[0].tied
        state.take(shards[0].encoder)
        for g, group in enumerate(shards[0].groups):
            if g < len(state.groups):
                known = set(state.groups[g]["params"])
                state.groups[g]["params"] += [name for name in group["params"] if name not in known]
            else:
                state.groups.append(group)


def _precision(first: Any) -> str:
    """Of the working weights: what most trained parameters are kept in."""
    trained = {name for group in first["param_shapes"] or [] for name in group}
    module = first["module"] or {}
    kinds = [module[name].dtype for name in module if name in trained and isinstance(module[name], Pieces)]
    most = max(sorted(set(kinds)), key=kinds.count, default="F32")
    return {"BF16": "bf16", "F16": "fp16"}.get(most, "fp32")


FORMAT = Format(
    name="deepspeed",
    title="DeepSpeed ZeRO-1, 2, 3",
    reads="yes, also TP (patterns or `universal_checkpoint_info`) and PP",
    writes="yes, any stage and world; TP = PP = 1",
    optimizer="any optimizer's",
    detects=lambda path: folder_of(path) is not None,
    read=read,
    write=deepspeed_write.write,
)
