"""A state as DeepSpeed's own checkpoint, for any ZeRO stage and any number of ranks.

DeepSpeed's converter cannot do this: ZeRO-1 to ZeRO-3 and back, any optimizer, every group with its own
numbers. The files are those DeepSpeed itself writes on so many ranks, so it loads them as its own (no
`load_universal`). Every flat buffer is made of ranges of logical tensors and streamed.

    trained      in a group and not empty: the flat buffers, in the source's own type if a group has one
    frozen       any other parameter: whole in the module (ZeRO-1, 2), cut over the ranks (ZeRO-3)
    buffers      whole in the module, as they are
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from everstep.errors import UserError
from everstep.store.parts import Progress
from everstep.store.stored import Stored
from everstep_convert.formats import deepspeed_meta, torchfile
from everstep_convert.formats.deepspeed_ranks import (
    EXPERTS,
    LAYER,
    TIED,
    ModelRank,
    SplitRules,
    global_expert,
    is_pipeline,
    model_ranks,
    tied_layers,
)
from everstep_convert.formats.format import Target
from everstep_convert.formats.torchfile import Global, PickledObject
from everstep_convert.state import TrainingState, group_numbers, number_of, value_of_key
from everstep_convert.values import tensors_in
from everstep_convert.woven import Flat, as_dtype

ALIGN = 2  # DeepSpeed's nccl_start_alignment_factor
SUB_GROUP_SIZE = 1_000_000_000  # its default
WORKING = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
Ranges = list[tuple[Stored | None, int, int]]  # of a flat buffer: a tensor or zeros, first element, how many


def write(path: Path, state: TrainingState, target: Target, progress: Progress) -> None:
    """Write `<path>/<tag>/…` and `<path>/latest`."""
    stage, world, precision = target.stage, target.world, precision_of(state, target)
    if stage not in (1, 2, 3) or min(world, target.tp, target.pp, target.ep) < 1:
        raise UserError(f"ZeRO stage {stage} over {world} ranks is impossible; --stage is 1, 2 or 3.")
    if world % target.ep or (target.ep > 1 and stage == 3):
        raise UserError(
            f"{target.ep} expert-parallel ranks need ZeRO stage 1 or 2 and --world a multiple of it."
        )
    tag = f"global_step{state.step}"
    folder = path / tag
    folder.mkdir(parents=True, exist_ok=True)
    prefix = "bf16_" if precision == "bf16" else ""
    info = SplitRules(state, target).info(state.parameters())
    told = {"universal_checkpoint_info": info} if info else {}
    for rank in model_ranks(state, target):
        mp, mine = f"mp_rank_{rank.number:02d}", rank.state
        groups = groups_of(mine)
        subs = _sub_groups(groups, world) if stage == 3 else groups
        for dp in range(world):
            if stage == 3:
                inner = _three(mine, groups, subs, dp, world, precision)
            else:
                inner = partition_of(mine, groups, dp, target, precision)
            name = folder / f"{prefix}zero_pp_rank_{dp}_{mp}_optim_states.pt"
            version = deepspeed_meta.version_of(mine)
            whole = {"optimizer_state_dict": inner, "ds_config": {}, "ds_version": version}
            torchfile.save(name, whole, progress)
        for dp in range(world if stage == 3 else 1):
            name = folder / (f"zero_pp_rank_{dp}_" * (stage == 3) + f"{mp}_model_states.pt")
            held = model_states(mine, subs, target, WORKING[precision], dp if stage == 3 else None)
            torchfile.save(name, held | told, progress)
        _write_experts(folder, mp, mine, WORKING[precision], progress)
        if is_pipeline(state, target):
            write_layers(folder, rank, state, target, WORKING[precision], progress)
    (path / "latest").write_text(tag, encoding="utf-8")


def write_layers(
    folder: Path, rank: ModelRank, state: TrainingState, target: Target, dtype: str, progress: Progress
) -> None:
    """Working weights and buffers, a file for every layer."""
    ties = tied_layers(state)
    trained = {name for group in rank.state.groups for name in group["params"]}
    layers: dict[int, dict[str, Stored]] = {}
    for name, stored in {**rank.state.parameters(), **rank.state.buffers()}.items():
        kept = as_dtype(stored, dtype) if name in trained else stored
        match, tied = LAYER.fullmatch(name), TIED.fullmatch(name)
        if match is not None:
            layers.setdefault(int(match[1]), {})[match[2]] = kept
        elif tied is not None:
            for layer in (layer for layer, key in ties.items() if key == tied[1]):
                layers.setdefault(layer, {})[tied[2]] = kept
    for layer, table in layers.items():
        shard = f"-model_{rank.shard:02d}" if target.tp > 1 else ""
        torchfile.save(folder / f"layer_{layer:02d}{shard}-model_states.pt", OrderedDict(table), progress)


def _write_experts(folder: Path, mp: str, state: TrainingState, dtype: str, progress: Progress) -> None:
    """Working weights, a file for every expert of every layer."""
    for number, (prefix, count) in enumerate(expert_layers(state).items()):
        for expert in range(count):
            held = {
                name: as_dtype(stored, dtype)
                for name, stored in state.parameters().items()
                if name.startswith(f"{prefix}{expert}.")
            }
            torchfile.save(folder / f"layer_{number}_expert_{expert}_{mp}_model_states.pt", held, progress)


def precision_of(state: TrainingState, target: Target) -> str:
    precision = target.precision or state.meta.get("precision") or "fp32"
    precision = "bf16" if precision == "fp8" else precision  # of its weights
    if precision not in WORKING:
        raise UserError(f"precision {precision!r} is not one of {', '.join(WORKING)}; give --precision.")
    return str(precision)


# What is in the flat buffers.


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatGroup:
    """A group's trained parameters, or a part of them. `flat`: keys as large as the parameter, with types."""

    number: int
    names: list[str]
    numbers: dict[str, Any]
    dtype: str
    weights: Mapping[str, Stored]
    states: Mapping[str, Mapping[str, Stored]]
    flat: Mapping[str, str]
    shared: Mapping[str, Any]
    first: Mapping[str, int] = field(default_factory=dict)  # of an expert's number, as its rank counts

    def called(self, name: str) -> str:
        return global_expert(name, self.first.get(name, 0))

    def size(self, name: str) -> int:
        return prod(self.weights[name].shape)

    def tensor(self, name: str, key: str | None) -> Stored | None:
        """The weight (no key) or a state, in the type of the flat buffer."""
        if key is None:
            return as_dtype(self.weights[name], self.dtype)
        stored = self.states[name].get(key)
        return None if stored is None else as_dtype(stored, self.flat[key])


def groups_of(state: TrainingState) -> list[FlatGroup]:
    if not state.groups:
        raise UserError(
            "the checkpoint has no optimizer groups, which a DeepSpeed checkpoint needs; convert to hf or "
            "dcp, or save it with its optimizer."
        )
    known, optimizer = state.parameters(), state.optimizer()
    found: list[FlatGroup] = []
    for group in state.groups:
        missing = next((name for name in group["params"] if name not in known), None)
        if missing is not None:
            raise UserError(f"parameter {missing!r} is in an optimizer group and not in the checkpoint.")
        names = [name for name in group["params"] if prod(known[name].shape)]
        if names:
            found.append(_flat_group(state, len(found), group, names, known, optimizer))
    if not found:
        raise UserError("no optimizer group has a parameter with elements, which DeepSpeed needs.")
    return found


def _flat_group(
    state: TrainingState,
    number: int,
    group: dict[str, Any],
    names: list[str],
    known: Mapping[str, Stored],
    optimizer: Mapping[str, dict[str, Stored]],
) -> FlatGroup:
    flat, shared = _keys(names, known, optimizer)
    numbers = group_numbers(group, state.tensors)
    return FlatGroup(
        number=number,
        names=names,
        numbers=numbers,
        dtype=_one_type({known[name].dtype for name in names}),
        weights=known,
        states={name: optimizer[name] for name in names},
        flat={
            key: _one_type({optimizer[name][key].dtype for name in names if key in optimizer[name]})
            for key in flat
        },
        shared=_shared_values(names, shared, optimizer),
    )


def _one_type(types: set[str]) -> str:
    """A flat buffer has one type: theirs if they agree, else one that holds them all."""
    return next(iter(types)) if len(types) == 1 else "F64" if types & {"F64", "I64"} else "F32"


def _keys(
    names: list[str], known: Mapping[str, Stored], optimizer: Mapping[str, dict[str, Stored]]
) -> tuple[list[str], set[str]]:
    """Keys as large as the parameters, and keys that a group has once, such as the count of steps. A key that
    is now this, now that, or neither, has no place. For a parameter without dimensions both look the same:
    then the other parameters decide, or the key's name.
    """
    kinds: dict[str, set[str]] = {}
    for name in names:
        for key, stored in optimizer[name].items():
            if stored.shape == known[name].shape:
                kind = "full" if stored.shape else "either"
            else:
                kind = "neither" if stored.shape else "once"
            kinds.setdefault(key, set()).add(kind)
    once = {
        key
        for key, found in kinds.items()
        if found <= {"once", "either"} and ("once" in found or key == "step" or "#" in key)
    }
    return [key for key, found in kinds.items() if found <= {"full", "either"} and key not in once], once


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


# ZeRO-1 and 2: the whole group flat, one range per rank.


def partition_of(
    state: TrainingState, groups: list[FlatGroup], rank: int, target: Target, precision: str
) -> dict[str, Any]:
    weights, paddings, mappings, states, counts, alignments = [], [], [], {}, [], []
    for g, whole in enumerate(groups):
        group, mine, world = _expert_share(whole, rank, target)
        total = sum(group.size(name) for name in group.names)
        each = -(-total // (ALIGN * world)) * ALIGN
        real = max(0, min((mine + 1) * each, total) - mine * each)
        pieces = list(_pieces(group, mine * each, (mine + 1) * each))
        weights.append(Flat(group.dtype, _ranges(group, None, pieces)))
        paddings.append(each - real)
        mappings.append(
            OrderedDict((group.called(name), _address(count, at)) for name, _, count, at in pieces),
        )
        states[g] = {
            key: Flat(dtype, (*_ranges(group, key, pieces), (None, 0, each - real)))
            for key, dtype in group.flat.items()
        } | dict(group.shared)
        counts.append(world)
        alignments.append([0] * len(group.names))
    return {
        **deepspeed_meta.loss_scaler(state, precision),
        **deepspeed_meta.clip_grad(state),
        "base_optimizer_state": {
            "state": {g: held for g, held in states.items() if held},
            "param_groups": [{**group.numbers, "params": [g]} for g, group in enumerate(groups)],
        },
        "single_partition_of_fp32_groups": weights,
        "zero_stage": _stage(target.stage),
        "group_paddings": paddings,
        "param_alignment_paddings": alignments,
        "partition_count": counts,
        "ds_version": deepspeed_meta.version_of(state),
        "param_slice_mappings": mappings,
    }


def expert_layers(state: TrainingState) -> dict[str, int]:
    """The MoE layers by what their experts' names begin with, and how many each has."""
    found: dict[str, int] = {}
    for name in state.parameters():
        if match := EXPERTS.fullmatch(name):
            found[match[1]] = max(found.get(match[1], 0), int(match[2]) + 1)
    return found


def _expert_share(group: FlatGroup, rank: int, target: Target) -> tuple[FlatGroup, int, int]:
    """What of a group a data-parallel rank divides with others, its place among them, and how many they are:
    the experts of its expert-parallel rank, or all.
    """
    if not group.numbers.get("moe"):
        return group, rank, target.world
    counts: dict[str, int] = {}
    for name in group.names:
        if match := EXPERTS.fullmatch(name):
            counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    parallel = rank % target.ep
    mine, first = [], {}
    for name in group.names:
        match = EXPERTS.fullmatch(name)
        if match is None or counts[match[1]] % target.ep:
            raise UserError(f"the experts of {name!r} are not a multiple of --ep {target.ep}.")
        local = counts[match[1]] // target.ep
        if int(match[2]) // local == parallel:
            mine.append(name)
            first[name] = -parallel * local
    return replace(group, names=mine, first=first), rank // target.ep, target.world // target.ep


def _pieces(group: FlatGroup, low: int, high: int) -> Iterator[tuple[str, int, int, int]]:
    """(name, first element, how many, where in the rank's range) of a group's elements low..high."""
    at = 0
    for name in group.names:
        size = group.size(name)
        begin, end = max(low, at), min(high, at + size)
        if begin < end:
            yield name, begin - at, end - begin, begin - low
        at += size


def _ranges(group: FlatGroup, key: str | None, pieces: list[tuple[str, int, int, int]]) -> Any:
    return tuple((group.tensor(name, key), first, count) for name, first, count, _ in pieces)


# ZeRO-3: every parameter cut alone.


def _three(
    state: TrainingState,
    groups: list[FlatGroup],
    subs: list[FlatGroup],
    rank: int,
    world: int,
    precision: str,
) -> dict[str, Any]:
    weights = [Flat(sub.dtype, _cut_all(sub, None, rank, world)) for sub in subs]
    states = {
        s: {key: Flat(dtype, _cut_all(sub, key, rank, world)) for key, dtype in sub.flat.items()}
        | dict(sub.shared)
        for s, sub in enumerate(subs)
    }
    owners = [[s for s, sub in enumerate(subs) if sub.number == group.number] for group in groups]
    return {
        "zero_stage": _stage(3),
        **deepspeed_meta.loss_scaler(state, precision),
        "partition_count": world,
        "optimizer_state_dict": {
            "state": {s: held for s, held in states.items() if held},
            "param_groups": [
                {**group.numbers, "params": mine} for group, mine in zip(groups, owners, strict=True)
            ],
        },
        "fp32_flat_groups": weights,
    }


def _cut_all(group: FlatGroup, key: str | None, rank: int, world: int) -> Any:
    return tuple(
        one for name in group.names for one in _cut(group.tensor(name, key), group.size(name), rank, world)
    )


def _cut(stored: Stored | None, size: int, rank: int, world: int) -> Ranges:
    """A rank's equal share of a tensor's elements, zeros where the tensor has ended."""
    each = -(-size // world)
    count = max(0, min(each, size - rank * each))
    found: Ranges = [(stored, rank * each, count)] if count else []
    return [*found, (None, 0, each - count)] if count < each else found


def _sub_groups(groups: list[FlatGroup], world: int) -> list[FlatGroup]:
    """DeepSpeed cuts large groups; a sub-group is closed by the parameter that fills it."""
    found: list[FlatGroup] = []
    for group in groups:
        each = {name: -(-group.size(name) // world) for name in group.names}
        large = sum(each.values()) > SUB_GROUP_SIZE
        names: list[str] = []
        size = 0
        for name in group.names:
            names.append(name)
            size += each[name]
            if (large and size >= SUB_GROUP_SIZE) or name == group.names[-1]:
                found.append(replace(group, names=names))
                names, size = [], 0
    return found


# Both.


def model_states(
    state: TrainingState, groups: list[FlatGroup], target: Target, dtype: str, rank: int | None
) -> dict[str, Any]:
    """`rank`: of ZeRO-3, whose files hold no weights; None for ZeRO-1 and 2."""
    world, experts = target.world, expert_layers(state)
    trained = {name for group in groups for name in group.names}
    module: OrderedDict[str, Any] = OrderedDict()
    frozen: OrderedDict[str, Any] = OrderedDict()
    for name, stored in state.parameters().items():
        kept = as_dtype(stored, dtype) if name in trained else stored
        if EXPERTS.fullmatch(name) is None:
            module[name] = kept if rank is None else Flat(kept.dtype, ())
        if name not in trained:
            size = prod(stored.shape)
            mine = Flat(stored.dtype, tuple(_cut(stored, size, rank or 0, world)))
            frozen[name] = stored if rank is None else mine
    module |= state.buffers()
    for alias, name in state.tied.items():
        module.setdefault(alias, module[name])
    others = {} if rank else _without_place(state, trained)
    shares = [_expert_share(group, 0, target)[0] for group in groups]
    return {
        "module": None if is_pipeline(state, target) else module,
        "buffer_names": list(state.buffers()),
        "optimizer": None,
        "param_shapes": [
            OrderedDict(
                zip(map(group.called, group.names), shapes_of(state, group.names).values(), strict=True)
            )
            for group in shares
        ],
        "frozen_param_shapes": shapes_of(state, list(frozen)) if frozen or rank is not None else None,
        "shared_params": dict(state.tied),
        "frozen_param_fragments": frozen if frozen or rank is not None else None,
        "dp_world_size": world,
        "mp_world_size": target.pp * target.tp,
        "checkpoint_parallel_dimensions": {"pp_degree": target.pp, "tp_degree": target.tp},
        **({"num_experts": list(experts.values())} if experts else {}),
        **deepspeed_meta.model_keys(state, others, _odd_groups(state, trained)),
    }


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


def shapes_of(state: TrainingState, names: list[str]) -> OrderedDict[str, Any]:
    known = state.tensors
    return OrderedDict(
        (name, PickledObject(Global("torch", "Size"), args=(list(known[f"model/{name}"].shape),)))
        for name in names
    )


def _stage(stage: int) -> PickledObject:
    return PickledObject(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), args=(stage,))


def _address(count: int, start: int) -> PickledObject:
    kind = Global("deepspeed.utils.tensor_fragment", "fragment_address")
    return PickledObject(kind, {"numel": count, "start": start})
