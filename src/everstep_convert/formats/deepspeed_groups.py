"""What DeepSpeed's files hold beside atoms: the optimizer's groups, the model states, a pipeline's layers.

trained      in a group and not empty
frozen       any other parameter: whole in the module
buffers      whole in the module, as they are
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from everstep.errors import UserError
from everstep.store.parts import Progress
from everstep.store.stored import Stored
from everstep_convert.formats import deepspeed_meta, torchfile
from everstep_convert.formats.deepspeed_files import EXPERTS, PIPELINE_NAME, TIED
from everstep_convert.formats.format import Target
from everstep_convert.formats.torchfile import Global, PickledObject
from everstep_convert.state import TrainingState, group_numbers, number_of, value_of_key
from everstep_convert.values import tensors_in
from everstep_convert.woven import as_dtype

WORKING = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


def precision_of(state: TrainingState, target: Target) -> str:
    precision = target.precision or state.meta.get("precision") or "fp32"
    precision = "bf16" if precision == "fp8" else precision  # of its weights
    if precision not in WORKING:
        raise UserError(f"precision {precision!r} is not one of {', '.join(WORKING)}; give --precision.")
    return str(precision)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedGroup:
    """A group's parameters that have elements; `shared`: what they have once, such as the count of steps."""

    names: list[str]
    numbers: dict[str, Any]
    shared: dict[str, Any]


def groups_of(state: TrainingState) -> list[TrainedGroup]:
    if not state.groups:
        raise UserError(
            "the checkpoint has no optimizer groups, which a DeepSpeed checkpoint needs; convert to hf or "
            "dcp, or save it with its optimizer."
        )
    known, optimizer = state.parameters(), state.optimizer()
    found: list[TrainedGroup] = []
    for group in state.groups:
        missing = next((name for name in group["params"] if name not in known), None)
        if missing is not None:
            raise UserError(f"parameter {missing!r} is in an optimizer group and not in the checkpoint.")
        names = [name for name in group["params"] if prod(known[name].shape)]
        if names:
            shared = _shared_values(names, _shared_keys(names, known, optimizer), optimizer)
            numbers = group_numbers(group, state.tensors)
            found.append(TrainedGroup(names=names, numbers=numbers, shared=shared))
    if not found:
        raise UserError("no optimizer group has a parameter with elements, which DeepSpeed needs.")
    return found


def _shared_keys(
    names: list[str], known: Mapping[str, Stored], optimizer: Mapping[str, dict[str, Stored]]
) -> set[str]:
    """Keys that a group has once. For a parameter without dimensions a state of its shape looks like one:
    then the other parameters decide, or the key's name.
    """
    kinds: dict[str, set[str]] = {}
    for name in names:
        for key, stored in optimizer[name].items():
            like = stored.shape == known[name].shape
            kind = "many" if stored.shape else "either" if like else "once"
            kinds.setdefault(key, set()).add(kind)
    return {
        key
        for key, found in kinds.items()
        if "many" not in found and ("once" in found or key == "step" or "#" in key)
    }


def _shared_values(
    names: list[str], keys: set[str], optimizer: Mapping[str, dict[str, Stored]]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    values: dict[str, float] = {}
    for name in names:
        for key in keys & set(optimizer[name]):
            stored = optimizer[name][key]
            value = number_of(stored)
            if values.setdefault(key, value) != value:
                raise UserError(
                    f"{key} of {name!r} is {value:g} and {values[key]:g} for others in its group; DeepSpeed "
                    "keeps one per group."
                )
            found[key.partition("#")[0]] = value_of_key(key, stored)
    return found


def optimizer_state(state: TrainingState, groups: list[TrainedGroup], precision: str) -> dict[str, Any]:
    """What DeepSpeed's loaders need of the optimizer beside the atoms."""
    numbers = [{**group.numbers, "params": [g]} for g, group in enumerate(groups)]
    shared = {g: group.shared for g, group in enumerate(groups)}
    return {
        **deepspeed_meta.loss_scaler(state, precision),
        **deepspeed_meta.clip_grad(state),
        "zero_stage": PickledObject(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), args=(1,)),
        "ds_version": deepspeed_meta.version_of(state),
        "group_paddings": [0] * len(groups),
        "partition_count": [1] * len(groups),
        "param_groups": numbers,
        "optimizer_state_dict": {"state": shared, "param_groups": numbers},
    }


def model_states(state: TrainingState, groups: list[TrainedGroup], dtype: str) -> dict[str, Any]:
    """Of one model-parallel rank, which has the whole model; `dtype`: of the working weights."""
    trained = {name for group in groups for name in group.names}
    module: OrderedDict[str, Any] = OrderedDict()
    for name, stored in state.parameters().items():
        if EXPERTS.fullmatch(name) is None:
            module[name] = as_dtype(stored, dtype) if name in trained else stored
    frozen = OrderedDict((name, one) for name, one in state.parameters().items() if name not in trained)
    module |= state.buffers()
    for alias, name in state.tied.items():
        module.setdefault(alias, module[name])
    experts = _expert_counts(state)
    return {
        "module": None if is_pipeline(state) else module,
        "buffer_names": list(state.buffers()),
        "optimizer": None,
        "param_shapes": [_shapes(state, group.names) for group in groups],
        "frozen_param_shapes": _shapes(state, list(frozen)) if frozen else None,
        "shared_params": dict(state.tied),
        "frozen_param_fragments": frozen or None,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        **({"num_experts": list(experts.values())} if experts else {}),
        **deepspeed_meta.model_keys(state, _without_place(state, trained), _odd_groups(state, trained)),
    }


def _expert_counts(state: TrainingState) -> dict[str, int]:
    """The MoE layers by what their experts' names begin with, and how many each has."""
    found: dict[str, int] = {}
    for name in state.parameters():
        if match := EXPERTS.fullmatch(name):
            found[match[1]] = max(found.get(match[1], 0), int(match[2]) + 1)
    return found


def _without_place(state: TrainingState, trained: set[str]) -> dict[str, Stored]:
    """Tensors that DeepSpeed has no place for: others than those in its own values, and optimizer state of
    parameters that it leaves out of the optimizer.
    """
    inside = tensors_in(state.meta.get("deepspeed"))
    found = {name: stored for name, stored in state.others().items() if name not in inside}
    for parameter, states in state.optimizer().items():
        if parameter not in trained:
            found |= {f"optimizer/{parameter}/{key}": stored for key, stored in states.items()}
    return found


def _odd_groups(state: TrainingState, trained: set[str]) -> list[dict[str, Any]] | None:
    """All groups, if some have parameters that DeepSpeed leaves out of them, or none at all."""
    odd = any(not group["params"] or not trained.issuperset(group["params"]) for group in state.groups)
    return state.groups if odd else None


def _shapes(state: TrainingState, names: list[str]) -> OrderedDict[str, Any]:
    known = state.parameters()
    return OrderedDict(
        (name, PickledObject(Global("torch", "Size"), args=(list(known[name].shape),))) for name in names
    )


# Pipelines, whose parameters are called by their layer.


def is_pipeline(state: TrainingState) -> bool:
    return "pipeline" in (state.meta.get("deepspeed") or {})


def write_layers(folder: Path, state: TrainingState, dtype: str, progress: Progress) -> None:
    """Working weights and buffers, a file for every layer; a tied module's are in each of its layers."""
    ties = state.meta["deepspeed"]["pipeline"].get("tied_layers") or {}
    trained = {name for group in state.groups for name in group["params"]}
    layers: dict[int, OrderedDict[str, Stored]] = {}
    for name, stored in {**state.parameters(), **state.buffers()}.items():
        kept = as_dtype(stored, dtype) if name in trained else stored
        match, tied = PIPELINE_NAME.fullmatch(name), TIED.fullmatch(name)
        if match is not None:
            layers.setdefault(int(match[1]), OrderedDict())[match[2]] = kept
        elif tied is not None:
            for layer in (int(layer) for layer, key in ties.items() if key == tied[1]):
                layers.setdefault(layer, OrderedDict())[tied[2]] = kept
    for layer, table in layers.items():
        torchfile.save(folder / f"layer_{layer:02d}-model_states.pt", table, progress)
