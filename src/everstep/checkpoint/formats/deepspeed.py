"""DeepSpeed's own checkpoints, ZeRO-1, 2 and 3, with and without tensor or pipeline parallelism. Reading.

    <tag>/mp_rank_MM_model_states.pt                          ZeRO-1/2: 16-bit weights, shapes, client state
    <tag>/zero_pp_rank_D_mp_rank_MM_model_states.pt           ZeRO-3: the same without weights
    <tag>/[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt    flat fp32 weights and optimizer state

ZeRO-1/2 lays a group's parameters one after the other, pads the end and cuts it into equal ranges; where a
parameter's fragment lies in a rank's range is in `param_slice_mappings`, and where in the parameter follows
by counting over the ranks. ZeRO-3 cuts every parameter alone. Nothing is loaded: fragments become pieces of
files. Deepspeed is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from everstep.checkpoint.formats import pickles
from everstep.checkpoint.formats.shards import Rules
from everstep.checkpoint.state import State, plain, scalar
from everstep.checkpoint.stored import FilePiece, Pieces, Stored
from everstep.errors import UserError
from everstep.layout.box import Shape, flat_range, offset_of, row_major
from everstep.layout.layout import ITEM_BYTES
from everstep.layout.patterns import Patterns

OPTIM = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
ENGINE_KEYS = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config",
    "ds_version", "checkpoint_parallel_dimensions", "universal_checkpoint_info", "num_experts",
    "everstep",
}  # fmt: skip


@dataclass(slots=True)
class _Local:
    """What one model-parallel rank has, all of its data-parallel ranks together."""

    weights: dict[str, Stored] = field(default_factory=dict)
    states: dict[str, dict[str, Stored]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    frozen: dict[str, Stored] = field(default_factory=dict)
    buffers: dict[str, Stored] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)


def folder_of(path: Path) -> Path | None:
    """The tag's folder, for it or for the folder with `latest`; None if this is no DeepSpeed checkpoint."""
    if (path / "latest").is_file():
        tag = (path / "latest").read_text(encoding="utf-8").strip()
        if "/" in tag or tag in ("", ".", ".."):
            raise UserError(f"{path / 'latest'} names {tag!r}, which is no folder here.")
        path = path / tag
    return path if path.is_dir() and any(OPTIM.fullmatch(p.name) for p in path.iterdir()) else None


def read(path: Path, patterns: Patterns | None = None, vocab: int | None = None) -> State:
    folder = folder_of(path)
    if folder is None:
        raise UserError(f"{path} holds no *_optim_states.pt; is it the folder of a DeepSpeed checkpoint?")
    optims, models, layers = _files(folder)
    first = pickles.load(models[min(models)])
    tp = int((first.get("checkpoint_parallel_dimensions") or {}).get("tp_degree") or 1)
    ranks = sorted({mp for mp, _ in optims})
    stage = _stage(pickles.load(optims[min(optims)]))
    locals_ = [_local(stage, mp, optims, models) for mp in ranks]
    if layers:
        _add_layers(locals_, layers, tp)
    rules = Rules(patterns, _info(first), vocab)
    state = State(step=int(first.get("global_steps") or 0))
    _join(state, locals_, tp, rules)
    precision = "bf16" if any(name.name.startswith("bf16_") for name in optims.values()) else None
    _tell(state, first, stage, precision or _precision(first))
    return state


def _files(folder: Path) -> tuple[dict[tuple[int, int], Path], dict[tuple[int, int], Path], list[Path]]:
    """Optimizer and model files by (model-parallel rank, data-parallel rank), and layer files."""
    optims: dict[tuple[int, int], Path] = {}
    models: dict[tuple[int, int], Path] = {}
    layers = []
    for path in sorted(folder.iterdir()):
        if match := OPTIM.fullmatch(path.name):
            optims[int(match[3]), int(match[2])] = path
        elif match := MODEL.fullmatch(path.name):
            models[int(match[2]), int(match[1] or 0)] = path
        elif LAYER.fullmatch(path.name):
            layers.append(path)
    if not models:
        raise UserError(f"{folder} holds no *_model_states.pt.")
    for mp in {mp for mp, _ in optims}:
        found = sorted(dp for rank, dp in optims if rank == mp)
        if found != list(range(len(found))):
            raise UserError(f"{folder}: the optimizer files of model rank {mp} are not 0 to {found[-1]}.")
    return optims, models, layers


def _stage(optim: Any) -> int:
    told = optim["optimizer_state_dict"]["zero_stage"]
    return int(told if isinstance(told, int) else told.__dict__["args"][0])


def _local(
    stage: int, mp: int, optims: dict[tuple[int, int], Path], models: dict[tuple[int, int], Path]
) -> _Local:
    parts = [pickles.load(optims[key])["optimizer_state_dict"] for key in sorted(optims) if key[0] == mp]
    told = [pickles.load(models[key]) for key in sorted(models) if key[0] == mp]
    found = _Local()
    shapes = {name: tuple(s) for group in told[0]["param_shapes"] or [] for name, s in group.items()}
    if stage == 3:
        _read_three(found, parts, told, shapes)
    else:
        _read_one(found, parts, shapes)
        _read_module(found, told[0])
    for name in told[0].get("buffer_names") or []:
        found.buffers[name] = told[0]["module"][name]
    found.tied = dict(told[0].get("shared_params") or {})
    return found


# ZeRO-1 and 2.


def _read_one(found: _Local, parts: Sequence[Any], shapes: dict[str, Shape]) -> None:
    for g in range(len(parts[0]["single_partition_of_fp32_groups"])):
        names: dict[str, int] = {}
        weights: dict[str, list[FilePiece]] = {}
        states: dict[str, dict[str, list[FilePiece]]] = {}
        scalars: dict[str, Stored] = {}
        for part in parts:
            flat = part["single_partition_of_fp32_groups"][g]
            mine = _group_state(part["base_optimizer_state"], g)
            scalars |= _scalars(mine)
            fragments = part["param_slice_mappings"][g].items()
            for name, place in sorted(fragments, key=lambda item: item[1].get("start")):
                start, count = place.get("start"), place.get("numel")
                done = names.get(name, 0)
                shape = _shape(shapes, name)
                weights.setdefault(name, []).extend(_ranged(shape, done, flat, start, count))
                for key, tensor in mine.items():
                    if _is_flat(tensor, flat):
                        pieces = states.setdefault(name, {}).setdefault(key, [])
                        pieces.extend(_ranged(shape, done, tensor, start, count))
                names[name] = done + count
        _collect(found, shapes, names, weights, states, scalars)
        base = parts[0]["base_optimizer_state"]
        numbers = base["param_groups"][g] if isinstance(base, dict) else {}
        found.groups.append(_group(names, numbers))


def _group_state(base: Any, g: int) -> dict[str, Any]:
    if isinstance(base, list):  # an elastic checkpoint: a lean state for each group
        return dict(base[g])
    return dict(base["state"].get(base["param_groups"][g]["params"][0], {}))


def _read_module(found: _Local, told: Any) -> None:
    buffers = set(told.get("buffer_names") or [])
    for name, tensor in (told["module"] or {}).items():
        if (
            name not in found.weights
            and name not in buffers
            and name not in (told.get("shared_params") or {})
        ):
            found.frozen[name] = tensor


# ZeRO-3.


def _read_three(found: _Local, parts: Sequence[Any], told: Sequence[Any], shapes: dict[str, Shape]) -> None:
    world = len(parts)
    numbers = parts[0]["optimizer_state_dict"]["param_groups"]
    for group in numbers:
        found.groups.append(_group({}, group))
    for sub, table in enumerate(told[0]["param_shapes"]):
        at = 0
        names: dict[str, int] = {}
        weights: dict[str, list[FilePiece]] = {}
        states: dict[str, dict[str, list[FilePiece]]] = {}
        scalars: dict[str, Stored] = {}
        for name in table:
            shape = _shape(shapes, name)
            each = -(-prod(shape) // world)
            for rank, part in enumerate(parts):
                flat = part["fp32_flat_groups"][sub]
                mine = dict(part["optimizer_state_dict"]["state"].get(sub, {}))
                scalars |= _scalars(mine)
                count = max(0, min(each, prod(shape) - rank * each))
                weights.setdefault(name, []).extend(_ranged(shape, rank * each, flat, at, count))
                for key, tensor in mine.items():
                    if _is_flat(tensor, flat):
                        pieces = states.setdefault(name, {}).setdefault(key, [])
                        pieces.extend(_ranged(shape, rank * each, tensor, at, count))
            names[name] = prod(shape)
            at += each
        _collect(found, shapes, names, weights, states, scalars)
        owner = next((g for g, group in enumerate(numbers) if sub in group["params"]), 0)
        found.groups[owner]["params"] += list(names)
    found.frozen |= frozen_of(told)


def frozen_of(told: Sequence[Any]) -> dict[str, Stored]:
    """The frozen parameters, each cut over the ranks' model states."""
    found: dict[str, Stored] = {}
    for name, size in (told[0].get("frozen_param_shapes") or {}).items():
        shape = tuple(size)
        each = -(-prod(shape) // len(told))
        pieces = []
        for rank, one in enumerate(told):
            tensor = one["frozen_param_fragments"][name]
            count = max(0, min(each, prod(shape) - rank * each))
            pieces += _ranged(shape, rank * each, tensor, 0, count)
        found[name] = Pieces(told[0]["frozen_param_fragments"][name].dtype, shape, tuple(pieces))
    return found


# Both.


def _collect(
    found: _Local,
    shapes: dict[str, Shape],
    names: Iterable[str],
    weights: dict[str, list[FilePiece]],
    states: dict[str, dict[str, list[FilePiece]]],
    scalars: dict[str, Stored],
) -> None:
    for name in names:
        found.weights[name] = Pieces("F32", shapes[name], tuple(weights[name]))
        found.states[name] = {
            **scalars,
            **{key: Pieces("F32", shapes[name], tuple(p)) for key, p in states.get(name, {}).items()},
        }


def _ranged(shape: Shape, position: int, flat: Pieces, start: int, count: int) -> list[FilePiece]:
    """Elements position.. of a parameter, which are elements start.. of a flat tensor in a file."""
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


def _scalars(state: dict[str, Any]) -> dict[str, Stored]:
    """What all parameters of a group share: the count of steps, mostly."""
    found: dict[str, Stored] = {}
    for key, value in state.items():
        if isinstance(value, Pieces) and not value.shape:
            found[key] = value
        elif isinstance(value, bool):
            continue
        elif isinstance(value, int):
            found[f"{key}#int"] = scalar(value, "I64")
        elif isinstance(value, float):
            found[f"{key}#float"] = scalar(value, "F64")
    return found


def _group(names: Iterable[str], numbers: dict[str, Any]) -> dict[str, Any]:
    lost: list[str] = []
    rest = {key: plain(value, lost) for key, value in numbers.items() if key != "params"}
    return {"params": list(names), **rest}


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


def _join(state: State, locals_: Sequence[_Local], tp: int, rules: Rules) -> None:
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
        for g, group in enumerate(shards[0].groups):
            if g < len(state.groups):
                known = set(state.groups[g]["params"])
                state.groups[g]["params"] += [name for name in group["params"] if name not in known]
            else:
                state.groups.append(group)


def _precision(first: Any) -> str:
    kinds = {t.dtype for t in (first["module"] or {}).values() if isinstance(t, Pieces)}
    return {"BF16": "bf16", "F16": "fp16"}.get(next(iter(kinds), "F32"), "fp32")


def _tell(state: State, first: Any, stage: int, precision: str) -> None:
    lost: list[str] = []
    client = {key: value for key, value in first.items() if key not in ENGINE_KEYS}
    state.meta = {
        **(first.get("everstep") or {}),
        "format": f"deepspeed zero-{stage}",
        "precision": precision,
        "client": plain(client, lost, "client"),
        "scheduler": plain(first.get("lr_scheduler"), lost, "lr_scheduler"),
        "data": {
            "global_samples": plain(first.get("global_samples"), lost, "global_samples"),
            "skipped_steps": plain(first.get("skipped_steps"), lost, "skipped_steps"),
        },
        "deepspeed_version": str(first.get("ds_version")),
    }
    state.notes += [f"{name} is no plain value and is left out" for name in lost]
