"""A state as DeepSpeed's own checkpoint, for any ZeRO stage and any number of ranks.

This is what DeepSpeed's converter cannot do: ZeRO-1 to ZeRO-3 and back, any optimizer, every group with its
own numbers. The files are those DeepSpeed itself would have written on so many ranks, so it loads them as its
own (no `load_universal`). Every flat buffer is woven from ranges of logical tensors and streamed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from everstep.checkpoint.formats import torchfile
from everstep.checkpoint.formats.torchfile import Global, Instance
from everstep.checkpoint.parts import Progress
from everstep.checkpoint.state import Flat, State, number_of
from everstep.checkpoint.stored import Stored, as_dtype
from everstep.errors import UserError

ALIGN = 2  # DeepSpeed's nccl_start_alignment_factor
SUB_GROUP_SIZE = 1_000_000_000  # its default
VERSION = "0.19.8"
WORKING = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


def write(
    path: Path,
    state: State,
    *,
    stage: int,
    world: int,
    precision: str | None = None,
    progress: Progress = lambda count: None,
) -> None:
    """Write `<path>/<tag>/…` and `<path>/latest`."""
    if stage not in (1, 2, 3) or world < 1:
        raise UserError(f"ZeRO stage {stage} over {world} ranks is not to be had; stages are 1, 2 and 3.")
    precision = precision or state.meta.get("precision") or "fp32"
    if precision not in WORKING:
        raise UserError(f"precision {precision!r} is not one of {', '.join(WORKING)}.")
    groups = groups_of(state)
    tag = f"global_step{state.step}"
    folder = path / tag
    folder.mkdir(parents=True, exist_ok=True)
    prefix = "bf16_" if precision == "bf16" else ""
    sub_groups = _sub_groups(state, groups, world) if stage == 3 else groups
    for rank in range(world):
        name = folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        three = _three(state, groups, sub_groups, rank, world) if stage == 3 else None
        inner = three or partition_of(state, groups, rank, world, stage)
        torchfile.save(
            name,
            {"optimizer_state_dict": inner, "ds_config": {}, "ds_version": _version(state)},
            progress,
        )
    shapes = [shapes_of(state, group["params"]) for group in sub_groups]
    if stage == 3:
        for rank in range(world):
            told = model_states(state, shapes, world, WORKING[precision], rank)
            torchfile.save(folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", told, progress)
    else:
        told = model_states(state, shapes, world, WORKING[precision], None)
        torchfile.save(folder / "mp_rank_00_model_states.pt", told, progress)
    (path / "latest").write_text(tag, encoding="utf-8")


def groups_of(state: State) -> list[dict[str, Any]]:
    if not state.groups:
        raise UserError(
            "the checkpoint has no optimizer groups, which a DeepSpeed checkpoint needs; convert to hf or "
            "dcp, or save it with its optimizer."
        )
    known = state.parameters()
    for group in state.groups:
        missing = next((name for name in group["params"] if name not in known), None)
        if missing is not None:
            raise UserError(f"parameter {missing!r} is in an optimizer group and not in the checkpoint.")
    return [group for group in state.groups if group["params"]]


def _version(state: State) -> str:
    return str(state.meta.get("deepspeed_version") or VERSION)


# ZeRO-1 and 2: the whole group flat, one range a rank.


def partition_of(
    state: State, groups: list[dict[str, Any]], rank: int, world: int, stage: int
) -> dict[str, Any]:
    weights, paddings, mappings, states = [], [], [], {}
    for g, group in enumerate(groups):
        names: list[str] = group["params"]
        total = sum(prod(_weight(state, name).shape) for name in names)
        each = -(-total // (ALIGN * world)) * ALIGN
        low, high = rank * each, (rank + 1) * each
        real = max(0, min(high, total) - low)
        pieces = list(_pieces(state, names, low, high))
        weights.append(Flat("F32", tuple((_weight(state, n), first, count) for n, first, count, _ in pieces)))
        paddings.append(each - real)
        mappings.append(
            OrderedDict(
                (name, _instance("utils.tensor_fragment", "fragment_address", {"numel": count, "start": at}))
                for name, _, count, at in pieces
            )
        )
        states[g] = {
            key: Flat("F32", (*_states(state, key, pieces), (None, 0, each - real)))
            for key in _flat_keys(state, names)
        } | shared_of(state, names)
    return {
        "loss_scaler": _loss_scaler(),
        "dynamic_loss_scale": False,
        "overflow": False,
        "clip_grad": 0.0,
        "base_optimizer_state": {
            "state": {g: held for g, held in states.items() if held},
            "param_groups": [{**_numbers(group), "params": [g]} for g, group in enumerate(groups)],
        },
        "single_partition_of_fp32_groups": weights,
        "zero_stage": Instance(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), args=(stage,)),
        "group_paddings": paddings,
        "param_alignment_paddings": [[0] * len(group["params"]) for group in groups],
        "partition_count": [world] * len(groups),
        "ds_version": _version(state),
        "param_slice_mappings": mappings,
    }


def _pieces(state: State, names: list[str], low: int, high: int) -> Iterator[tuple[str, int, int, int]]:
    """(name, first element, how many, where in the rank's range) of a group's elements low..high."""
    at = 0
    for name in names:
        size = prod(_weight(state, name).shape)
        begin, end = max(low, at), min(high, at + size)
        if begin < end:
            yield name, begin - at, end - begin, begin - low
        at += size


def _states(
    state: State, key: str, pieces: list[tuple[str, int, int, int]]
) -> tuple[tuple[Stored | None, int, int], ...]:
    found = []
    for name, first, count, _ in pieces:
        stored = state.tensors.get(f"optimizer/{name}/{key}")
        found.append((None if stored is None else as_dtype(stored, "F32"), first, count))
    return tuple(found)


# ZeRO-3: every parameter cut alone.


def _three(
    state: State, groups: list[dict[str, Any]], subs: list[dict[str, Any]], rank: int, world: int
) -> dict[str, Any]:
    weights, states = [], {}
    for s, sub in enumerate(subs):
        names: list[str] = sub["params"]
        weights.append(Flat("F32", tuple(r for n in names for r in _cut(_weight(state, n), rank, world))))
        held: dict[str, Any] = {
            key: Flat(
                "F32",
                tuple(r for n in names for r in _cut_state(state, n, key, rank, world)),
            )
            for key in _flat_keys(state, names)
        }
        held |= shared_of(state, names)
        if held:
            states[s] = held
    owners = [[s for s, sub in enumerate(subs) if sub["group"] == g] for g in range(len(groups))]
    return {
        "zero_stage": Instance(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), args=(3,)),
        "loss_scaler": _loss_scaler(),
        "dynamic_loss_scale": False,
        "overflow": False,
        "partition_count": world,
        "optimizer_state_dict": {
            "state": states,
            "param_groups": [
                {**_numbers(group), "params": mine} for group, mine in zip(groups, owners, strict=True)
            ],
        },
        "fp32_flat_groups": weights,
    }


def _cut(stored: Stored, rank: int, world: int) -> list[tuple[Stored | None, int, int]]:
    size = prod(stored.shape)
    each = -(-size // world)
    count = max(0, min(each, size - rank * each))
    found: list[tuple[Stored | None, int, int]] = [(stored, rank * each, count)] if count else []
    return [*found, (None, 0, each - count)] if count < each else found


def _cut_state(
    state: State, name: str, key: str, rank: int, world: int
) -> list[tuple[Stored | None, int, int]]:
    stored = state.tensors.get(f"optimizer/{name}/{key}")
    if stored is None:
        return [(None, 0, -(-prod(_weight(state, name).shape) // world))]
    return _cut(as_dtype(stored, "F32"), rank, world)


def _sub_groups(state: State, groups: list[dict[str, Any]], world: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for g, group in enumerate(groups):
        each = {name: -(-prod(_weight(state, name).shape) // world) for name in group["params"]}
        mine: list[str] = []
        size = 0
        for place, name in enumerate(group["params"]):
            mine.append(name)
            size += each[name]
            full = size >= SUB_GROUP_SIZE and sum(each.values()) > SUB_GROUP_SIZE
            if full or place == len(group["params"]) - 1:
                found.append({"params": mine, "group": g})
                mine, size = [], 0
    return found


# Both.


def model_states(state: State, shapes: list[Any], world: int, dtype: str, rank: int | None) -> dict[str, Any]:
    """`rank`: of ZeRO-3, whose files hold no weights; None for ZeRO-1 and 2."""
    module: OrderedDict[str, Any] = OrderedDict()
    frozen: OrderedDict[str, Any] = OrderedDict()
    for name, stored in state.parameters().items():
        low = as_dtype(stored, dtype)
        module[name] = low if rank is None else Flat(dtype, ())
        if name in state.frozen:
            frozen[name] = low if rank is None else Flat(dtype, tuple(_cut(low, rank, world)))
    for name, stored in state.buffers().items():
        module[name] = stored
    for alias, name in state.tied.items():
        module.setdefault(alias, module[name])
    data = state.meta.get("data") or {}
    return {
        "module": module,
        "buffer_names": list(state.buffers()),
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": shapes_of(state, state.frozen) if frozen or rank is not None else None,
        "shared_params": dict(state.tied),
        "frozen_param_fragments": frozen if frozen or rank is not None else None,
        "lr_scheduler": state.meta.get("scheduler") if state.meta.get("client") is not None else None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": data.get("skipped_steps") or 0,
        "global_steps": state.step,
        "global_samples": data.get("global_samples") or 0,
        "dp_world_size": world,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {},
        "ds_version": _version(state),
        "everstep": {key: value for key, value in state.meta.items() if key != "client"},
        **(state.meta.get("client") or {}),
    }


def shapes_of(state: State, names: list[str]) -> OrderedDict[str, Any]:
    return OrderedDict(
        (name, Instance(Global("torch", "Size"), args=(list(_weight(state, name).shape),))) for name in names
    )


def _weight(state: State, name: str) -> Stored:
    return as_dtype(state.tensors[f"model/{name}"], "F32")


def _flat_keys(state: State, names: list[str]) -> list[str]:
    """Keys of the optimizer's tensors that are as large as the parameter."""
    found: dict[str, None] = {}
    for name in names:
        shape = state.tensors[f"model/{name}"].shape
        for key, stored in state.optimizer(name).items():
            if stored.shape == shape and (shape or key != "step"):
                found[key] = None
    return list(found)


def shared_of(state: State, names: list[str]) -> dict[str, Any]:
    """What a group has once: counts of steps. All of its parameters must agree."""
    found: dict[str, Any] = {}
    values: dict[str, float] = {}
    for name in names:
        shape = state.tensors[f"model/{name}"].shape
        for key, stored in state.optimizer(name).items():
            if stored.shape or (shape == () and key != "step"):
                continue
            value = number_of(stored)
            if values.setdefault(key, value) != value:
                raise UserError(
                    f"{key} of {name!r} is {value:g} and of others in its group {values[key]:g}; DeepSpeed "
                    "has one for a group."
                )
            plain_key, _, kind = key.partition("#")
            found[plain_key] = (int(value) if kind == "int" else value) if kind else stored
    return found


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in group.items() if key != "params"}
    return {key: tuple(value) if key == "betas" else value for key, value in found.items()}


def _loss_scaler() -> Instance:
    return _instance("runtime.fp16.loss_scaler", "LossScaler", {"cur_scale": 1.0, "dynamic": False})


def _instance(module: str, name: str, state: dict[str, Any]) -> Instance:
    return Instance(Global(f"deepspeed.{module}", name), state)
