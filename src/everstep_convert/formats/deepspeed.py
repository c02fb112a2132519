"""DeepSpeed's own checkpoints, ZeRO-1, 2 and 3, with or without tensor and pipeline parallelism. Read only.

    <tag>/mp_rank_MM_model_states.pt                          ZeRO-1/2: 16-bit weights, shapes, client state
    <tag>/zero_pp_rank_D_mp_rank_MM_model_states.pt           ZeRO-3: the same without weights
    <tag>/[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt    flat fp32 weights and optimizer state
    <tag>/layer_LL[-model_TT]-model_states.pt                 pipeline: weights and buffers of a layer
    <tag>/layer_L_expert_E_mp_rank_MM_model_states.pt         MoE: weights of an expert

MM counts the tensor-parallel ranks of the first pipeline stage, then those of the second. ZeRO-1/2 lays a
group's parameters one after the other, pads the end and cuts it into equal ranges; where a parameter's
fragment lies in a rank's range is in `param_slice_mappings`, and where in the parameter follows by counting
over the ranks. ZeRO-3 cuts every parameter alone. Experts are a group of their own, divided over the ranks
that hold the same ones. Nothing is loaded: fragments become pieces of files. DeepSpeed need not be installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from everstep.errors import UserError
from everstep.layout.box import Shape, flat_range, offset_of, row_major
from everstep.layout.tensor import ITEM_BYTES
from everstep.store.stored import FilePiece, Pieces, Stored
from everstep_convert.formats import deepspeed_meta, pickles
from everstep_convert.formats.deepspeed_files import (
    EXPERTS,
    TIED,
    check_ranks,
    files_in,
    folder_of,
    global_expert,
)
from everstep_convert.formats.format import Format, Reading
from everstep_convert.formats.shards import ShardRules
from everstep_convert.formats.sidecar import begins_alike
from everstep_convert.state import TrainingState, encoded_group, equal, keyed_value
from everstep_convert.values import Encoder
from everstep_convert.woven import as_dtype, copies


@dataclass(slots=True)
class _Local:
    """What one model-parallel rank has, all of its data-parallel ranks together."""

    weights: dict[str, Stored] = field(default_factory=dict)
    states: dict[str, dict[str, Stored]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    frozen: dict[str, Stored] = field(default_factory=dict)
    buffers: dict[str, Stored] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    buffer_names: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)  # of the working weights of a pipeline's layers
    encoder: Encoder = field(default_factory=Encoder)


def read(path: str | Path, reading: Reading) -> TrainingState:
    folder = folder_of(Path(path))
    if folder is None:
        raise UserError(f"{path} has no *_optim_states.pt; give the folder of a DeepSpeed checkpoint.")
    files = files_in(folder)
    ranks = {key: pickles.load(files.models[key]) for key in sorted(files.models)}
    parts = {key: pickles.load(files.optims[key])["optimizer_state_dict"] for key in sorted(files.optims)}
    first = ranks[min(ranks)]
    tp = int((first.get("checkpoint_parallel_dimensions") or {}).get("tp_degree") or 1)
    check_ranks(folder, files.optims, parts[min(parts)].get("partition_count"))
    stages = sorted({_stage(part) for part in parts.values()})
    if len(stages) > 1:
        told = " and ".join(map(str, stages))
        raise UserError(
            f"{folder}: its optimizer files are of ZeRO stages {told}, mixed from several checkpoints."
        )
    stage = stages[0]
    state = TrainingState()
    deepspeed_meta.take(state, list(ranks.values()), list(parts.values()))
    experts = {key: pickles.load(path) for key, path in files.experts.items()}
    locals_ = []
    for mp in sorted({mp for mp, _ in files.optims}):
        held = [[one for (rank, _), one in table.items() if rank == mp] for table in (parts, ranks)]
        locals_.append(_local(stage, *held))
        _check_experts(locals_[-1], [one for (rank, *_), one in experts.items() if rank == mp])
    if files.layers:
        tied = _add_layers(locals_, {key: pickles.load(path) for key, path in files.layers.items()}, tp)
        state.meta["deepspeed"] = {**state.meta.get("deepspeed", {}), "pipeline": {"tied_layers": tied}}
    _join(state, locals_, tp, ShardRules(reading.patterns, _info(first), reading.vocab))
    for group in state.groups:
        group["params"] = experts_in_order(group["params"])
    bf16 = any(path.name.startswith("bf16_") for path in files.optims.values())
    working = "bf16" if bf16 else _precision(locals_, first)
    state.meta |= {"format": f"deepspeed zero-{stage}", "precision": working}
    return state


def _stage(optim: Any) -> int:
    stage = optim["zero_stage"]
    return int(stage if isinstance(stage, int) else stage.__dict__["args"][0])


def _local(stage: int, parts: Sequence[Any], ranks: Sequence[Any]) -> _Local:
    """`parts`, `ranks`: the optimizer and model files of all data-parallel ranks."""
    first, found = ranks[0], _Local()
    shapes = {name: tuple(s) for group in first["param_shapes"] or [] for name, s in group.items()}
    found.buffer_names = list(first.get("buffer_names") or [])
    for name in found.buffer_names if first["module"] is not None else ():
        _add_tensor(found, found.buffers, name, first["module"][name])
        others = [one["module"].get(name) for one in ranks[1:]]
        if name in found.buffers and not _all_equal([found.buffers[name], *others]):
            found.encoder.lost.append(f"buffer/{name} of other data-parallel ranks")
    found.tied = dict(first.get("shared_params") or {})
    if stage == 3:
        _read_three(found, parts, ranks, shapes)
    else:
        data_first = (first.get("ds_config") or {}).get("use_data_before_expert_parallelism", False)
        for g in range(len(parts[0]["single_partition_of_fp32_groups"])):
            _read_one(found, parts, shapes, g, bool(data_first))
        _read_module(found, first)
    return found


def _all_equal(values: Sequence[Any]) -> bool:
    return all(isinstance(one, Pieces) and equal(values[0], one) for one in values[1:])


def _add_tensor(found: _Local, into: dict[str, Stored], name: str, value: Any) -> None:
    if isinstance(value, Pieces):
        into[name] = value
    elif value is not None:
        found.encoder.lost.append(f"module.{name}")


# ZeRO-1 and 2.


def _read_one(
    found: _Local, parts: Sequence[Any], shapes: dict[str, Shape], g: int, data_first: bool
) -> None:
    bases = [part["base_optimizer_state"] for part in parts]
    numbers = [base["param_groups"][g] if isinstance(base, dict) else {} for base in bases]
    scalars = _Scalars(f"group {g}")
    all_names: list[str] = []
    for parallel, ranks in enumerate(_expert_parallel(numbers[0], parts, g, data_first)):
        names: dict[str, int] = {}
        weights: dict[str, _Fragments] = {}
        states: dict[str, dict[str, _Fragments]] = {}
        for rank in ranks:
            flat = parts[rank]["single_partition_of_fp32_groups"][g]
            mine = _group_state(parts[rank], g)
            scalars.take(found, mine, flat, rank)
            fragments = parts[rank]["param_slice_mappings"][g].items()
            for name, place in sorted(fragments, key=lambda item: item[1].get("start")):
                start, count = place.get("start"), place.get("numel")
                done = names.get(name, 0)
                shape = _shape(shapes, name)
                _add(weights, name, shape, done, flat, start, count)
                for key, tensor in mine.items():
                    if _is_flat(tensor, flat):
                        _add(states.setdefault(name, {}), key, shape, done, tensor, start, count)
                names[name] = done + count
        local = 1 + max((int(match[2]) for name in names if (match := EXPERTS.fullmatch(name))), default=-1)
        full = {name: global_expert(name, parallel * local) for name in names}
        _collect(found, shapes, full, weights, states, scalars)
        all_names += full.values()
    found.groups.append(_agreed(found, all_names, numbers, g))


def _expert_parallel(group: Any, parts: Sequence[Any], g: int, data_first: bool) -> list[list[int]]:
    """The data-parallel ranks of every expert-parallel rank: they hold its experts, as ZeRO divides them."""
    world, counts = len(parts), parts[0].get("partition_count")
    each = counts[g] if isinstance(counts, list) and group.get("moe") else world
    if not each or world % each:
        raise UserError(
            f"group {g} is divided over {each} of {world} ranks, which is not a whole part of them."
        )
    size = world // each
    if data_first:
        return [list(range(e * each, (e + 1) * each)) for e in range(size)]
    return [list(range(e, world, size)) for e in range(size)]


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
    tables = [part["optimizer_state_dict"]["param_groups"] for part in parts]
    numbers = tables[0]
    for g in range(len(numbers)):
        found.groups.append(_agreed(found, (), [table[g] for table in tables], g))
    for sub, table in enumerate(ranks[0]["param_shapes"]):
        at = 0
        weights: dict[str, _Fragments] = {}
        states: dict[str, dict[str, _Fragments]] = {}
        scalars = _Scalars(f"group {sub}")
        for name in table:
            shape = _shape(shapes, name)
            each = -(-prod(shape) // world)
            for rank, part in enumerate(parts):
                flat = part["fp32_flat_groups"][sub]
                mine = dict(part["optimizer_state_dict"]["state"].get(sub, {}))
                scalars.take(found, mine, flat, rank)
                count = max(0, min(each, prod(shape) - rank * each))
                _add(weights, name, shape, rank * each, flat, at, count)
                for key, tensor in mine.items():
                    if _is_flat(tensor, flat):
                        _add(states.setdefault(name, {}), key, shape, rank * each, tensor, at, count)
            at += each
        _collect(found, shapes, {name: name for name in table}, weights, states, scalars)
        owner = next((g for g, group in enumerate(numbers) if sub in group["params"]), 0)
        found.groups[owner]["params"] += list(table)
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
    names: Mapping[str, str],
    weights: dict[str, _Fragments],
    states: dict[str, dict[str, _Fragments]],
    scalars: _Scalars,
) -> None:
    """`names`: in the files, and in the whole model."""
    shared = scalars.agreed()
    for name, full in names.items():
        found.weights[full] = Pieces(weights[name].dtype, shapes[name], tuple(weights[name].pieces))
        found.states[full] = {
            **shared,
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


@dataclass(slots=True)
class _Scalars:
    """What all parameters of a group share: the count of steps, mostly. Every data-parallel rank has it."""

    group: str
    held: dict[str, dict[int, Stored]] = field(default_factory=dict)

    def take(self, found: _Local, state: dict[str, Any], flat: Pieces, rank: int) -> None:
        for key, value in state.items():
            if _is_flat(value, flat):
                continue
            one = keyed_value(key, value)
            if one is not None and not one[1].shape:
                self.held.setdefault(one[0], {})[rank] = one[1]
            elif f"optimizer state {key} of {self.group}" not in found.encoder.lost:
                found.encoder.lost.append(f"optimizer state {key} of {self.group}")

    def agreed(self) -> dict[str, Stored]:
        return {
            key: copies(
                f"{key.partition('#')[0]} of optimizer {self.group}",
                [f"data-parallel rank {rank}" for rank in held],
                list(held.values()),
                "the files are of several checkpoints",
            )
            for key, held in self.held.items()
        }


def _agreed(found: _Local, names: Iterable[str], tables: Sequence[Any], g: int) -> dict[str, Any]:
    """A group's numbers, which every data-parallel rank has."""
    group = encoded_group(found.encoder, names, tables[0], f"groups.{g}")
    for rank, table in enumerate(tables[1:], 1):
        if encoded_group(Encoder(), group["params"], table, f"groups.{g}") != group:
            raise UserError(
                f"optimizer group {g} has other numbers on data-parallel rank {rank} than on rank 0; the "
                "files are of several checkpoints."
            )
    return group


def _shape(shapes: dict[str, Shape], name: str) -> Shape:
    if name not in shapes:
        raise UserError(f"parameter {name!r} is in the optimizer's files and not in param_shapes.")
    return shapes[name]


def _info(first: Any) -> dict[str, Any]:
    found: dict[str, Any] = dict(first.get("universal_checkpoint_info") or {})
    return found


# Pipelines and experts.


def experts_in_order(names: Sequence[str]) -> list[str]:
    """Layer by layer, then expert by expert, whichever ranks they were on."""
    places: dict[str, int] = {}
    for name in names:
        match = EXPERTS.fullmatch(name)
        places.setdefault(match[1] if match else name, len(places))

    def key(name: str) -> tuple[int, int]:
        match = EXPERTS.fullmatch(name)
        return (places[match[1]], int(match[2])) if match else (places[name], 0)

    return sorted(names, key=key)


def _check_experts(found: _Local, files: Sequence[Any]) -> None:
    """The working weights of experts are by their number in the model: was the ranks' order understood?"""
    for held in files:
        for name, tensor in held.items():
            master = found.weights.get(name)
            if master is None:
                _add_tensor(found, found.frozen, name, tensor)
            elif not begins_alike(as_dtype(master, tensor.dtype), tensor):
                raise UserError(
                    f"the optimizer's files have other values of {name!r} than the expert's file."
                )


def _add_layers(locals_: Sequence[_Local], layers: Mapping[tuple[int, int], Any], tp: int) -> dict[str, str]:
    """A pipeline's buffers and frozen parameters are in files of layers, beside working weights. The layers
    whose weights are those of a tied module, and its key: only the values tell.
    """
    tied: dict[str, str] = {}
    for (layer, shard), held in sorted(layers.items()):
        owners = locals_[shard::tp]
        for name, tensor in held.items():
            full = f"{layer}.{name}"
            known = next((mine for mine in owners if full in mine.weights), None)
            of = next((mine for mine in owners if full in mine.buffer_names), None)
            if known is not None:
                known.kinds.append(tensor.dtype)
            elif of is not None:
                _add_tensor(of, of.buffers, full, tensor)
            elif (key := _tied_key(owners, name, tensor)) is not None:
                tied[str(layer)] = key
            elif owners:
                _add_tensor(owners[0], owners[0].frozen, full, tensor)
    return tied


def _tied_key(owners: Sequence[_Local], name: str, tensor: Stored) -> str | None:
    for mine in owners:
        for full, master in mine.weights.items():
            match = TIED.fullmatch(full)
            if match and match[2] == name and equal(as_dtype(master, tensor.dtype), tensor):
                return match[1]
    return None


def _join(state: TrainingState, locals_: Sequence[_Local], tp: int, rules: ShardRules) -> None:
    """Stages one after the other; within a stage, the tensor-parallel shards of a name made whole."""
    stages: dict[str, int] = {}  # which stage had a name first
    for stage, first in enumerate(range(0, len(locals_), tp)):
        shards = locals_[first : first + tp]
        for name in _names(mine.weights for mine in shards):
            held = {t: mine.weights[name] for t, mine in enumerate(shards) if name in mine.weights}
            made = {f"model/{name}": rules.whole(name, held, tp)}
            for key in _names(shards[t].states[name] for t in held):
                states = {t: shards[t].states[name][key] for t in held if key in shards[t].states[name]}
                made[f"optimizer/{name}/{key}"] = rules.whole(name, states, tp, key)
            _add_stage(state, made, stages.setdefault(name, stage), stage)
        for name in _names(mine.frozen for mine in shards):
            if name not in stages or name in state.frozen:
                held = {t: mine.frozen[name] for t, mine in enumerate(shards) if name in mine.frozen}
                made = {f"model/{name}": rules.whole(name, held, tp)}
                _add_stage(state, made, stages.setdefault(name, stage), stage)
                state.frozen += [] if name in state.frozen else [name]
        for mine in shards:
            for name, tensor in mine.buffers.items():
                if not equal(state.tensors.setdefault(f"buffer/{name}", tensor), tensor):
                    mine.encoder.lost.append(f"buffer/{name} of other model-parallel ranks")
            state.tied |= mine.tied
            state.lost += [name for name in mine.encoder.lost if name not in state.lost]
        state.tensors |= shards[0].encoder.tensors
        _join_groups(state, [mine.groups for mine in shards])


def _names(tables: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name in table))


def _add_stage(state: TrainingState, made: Mapping[str, Stored], before: int, stage: int) -> None:
    """A name that an earlier stage has is tied to it: the pipeline keeps the copies alike."""
    for name, stored in made.items():
        known = state.tensors.setdefault(name, stored)
        if known is not stored:
            places, cure = [f"pipeline stage {s}" for s in (before, stage)], "rename one of them"
            state.tensors[name] = copies(f"{name!r}", places, [known, stored], cure)


def _join_groups(state: TrainingState, ranks: Sequence[list[dict[str, Any]]]) -> None:
    """A stage's groups join those that have their numbers, the one at the same place first."""
    used: set[int] = set()
    for g, group in enumerate(ranks[0]):
        others = [groups[g] if g < len(groups) else {} for groups in ranks]
        if any(_numbers(other) != _numbers(group) for other in others):
            raise UserError(
                f"the tensor-parallel ranks of a stage have other numbers in optimizer group {g}."
            )
        names = _names(other["params"] for other in others)
        near = sorted(set(range(len(state.groups))) - used, key=lambda i: (i != g, i))
        into = next((i for i in near if _numbers(state.groups[i]) == _numbers(group)), len(state.groups))
        if into == len(state.groups):
            state.groups.append({**group, "params": []})
        known = set(state.groups[into]["params"])
        state.groups[into]["params"] += [name for name in names if name not in known]
        used.add(into)


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _precision(locals_: Sequence[_Local], first: Any) -> str:
    """Of the working weights: what most trained parameters are kept in."""
    trained = {name for group in first["param_shapes"] or [] for name in group}
    module = first["module"] or {}
    kinds = [module[name].dtype for name in module if name in trained and isinstance(module[name], Pieces)]
    kinds += [kind for mine in locals_ for kind in mine.kinds]
    most = max(sorted(set(kinds)), key=kinds.count, default="F32")
    return {"BF16": "bf16", "F16": "fp16"}.get(most, "fp32")


FORMAT = Format(
    name="deepspeed",
    title="DeepSpeed ZeRO-1, 2, 3",
    reads="yes, also TP (patterns or `universal_checkpoint_info`), PP and experts",
    writes="no: DeepSpeed loads `deepspeed-universal`",
    optimizer="any optimizer's",
    detects=lambda path: folder_of(path) is not None,
    read=read,
)
