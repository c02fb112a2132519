"""What each model-parallel rank of a DeepSpeed run holds: tensor-parallel shards of pipeline stages.

    rank MM = stage * tp + shard

A pipeline's parameters are called by their layer (`4.up.weight`); those of a tied module
(`tied_modules.embed.weight`) are in the stage of its layer and in the last one. How a parameter is split over
tensor-parallel ranks is said by the patterns of the target, else by those that the source came with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

from everstep.errors import UserError
from everstep.layout.box import Shape, offset_of, row_major
from everstep.layout.tensor import Tensor
from everstep.store.stored import Stored
from everstep_convert.formats.format import Target
from everstep_convert.formats.shards import AFFINE_VERSION, carried_pattern, cut_for
from everstep_convert.formats.torchfile import Global, PickledObject
from everstep_convert.patterns import Pattern, Patterns
from everstep_convert.state import TrainingState
from everstep_convert.values import decode

LAYER = re.compile(r"(\d+)\.(.+)")
TIED = re.compile(r"tied_modules\.([^.]+)\.(.+)")
EXPERTS = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..+)")
_VERSION = 0.4


def global_expert(name: str, first: int) -> str:
    """A rank counts its own experts from 0; the name in the whole model."""
    match = EXPERTS.fullmatch(name)
    return f"{match[1]}{int(match[2]) + first}{match[3]}" if match else name


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRank:
    """`state`: what this rank has, under the names and in the shapes that it has there."""

    number: int
    shard: int
    state: TrainingState


def model_ranks(state: TrainingState, target: Target) -> list[ModelRank]:
    rules = SplitRules(state, target)
    found = []
    for stage, names in enumerate(_stages(state, target)):
        for shard in range(target.tp):
            mine = rules.shard_of(_only(state, names), shard)
            found.append(ModelRank(number=stage * target.tp + shard, shard=shard, state=mine))
    return found


def is_pipeline(state: TrainingState, target: Target) -> bool:
    return target.pp > 1 or "pipeline" in (state.meta.get("deepspeed") or {})


# Stages.


def tied_layers(state: TrainingState) -> dict[int, str]:
    """The layers that hold a tied module's weights, and its key."""
    held = ((state.meta.get("deepspeed") or {}).get("pipeline") or {}).get("tied_layers") or {}
    return {int(layer): str(key) for layer, key in held.items()}


def _stages(state: TrainingState, target: Target) -> list[set[str] | None]:
    """The names of every stage; None: all."""
    if target.pp == 1:
        return [None]
    if target.stage != 1:
        raise UserError(f"DeepSpeed's pipelines know ZeRO stage 1, not {target.stage}; give --stage 1.")
    ties = tied_layers(state)
    homes = {key: layer for layer, key in sorted(ties.items(), reverse=True)}
    layers: dict[str, int] = {}
    sizes = dict.fromkeys(ties, 0)
    for name, stored in {**state.buffers(), **state.parameters()}.items():
        layer, tied = LAYER.fullmatch(name), TIED.fullmatch(name)
        if layer is not None:
            layers[name] = int(layer[1])
        elif tied is not None:
            layers[name] = homes.get(tied[1], 0)
        else:
            raise UserError(f"parameter {name!r} is not named by a pipeline's layer; give --pp 1.")
        sizes[layers[name]] = sizes.get(layers[name], 0) + prod(stored.shape)
    starts = target.stage_starts or _balanced(sizes, target.pp)
    if len(starts) != target.pp or list(starts) != sorted(set(starts)) or starts[0] != 0:
        raise UserError(f"--stage-starts {list(starts)} are not {target.pp} layers, rising from 0 on.")
    if not target.stage_starts:
        told = ", ".join(map(str, starts))
        state.notes.append(f"pipeline stages begin at layers {told}; --stage-starts gives others")
    found: list[set[str] | None] = []
    for stage, (low, high) in enumerate(pairwise((*starts, 1 << 60))):
        last = stage == target.pp - 1
        found.append({n for n, at in layers.items() if low <= at < high or (last and TIED.fullmatch(n))})
    return found


def _balanced(sizes: Mapping[int, int], stages: int) -> tuple[int, ...]:
    """The starts of stages whose largest is smallest."""
    layers = sorted(sizes)
    if len(layers) < stages:
        raise UserError(f"{len(layers)} layers cannot be divided into {stages} pipeline stages; change --pp.")
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}  # of the first so many layers
    for count in range(1, stages + 1):
        before, best = best, {}
        for end in range(count, len(layers) + 1):
            tries = []
            for cut_at, (largest, cuts) in before.items():
                if cut_at < end:
                    size = sum(sizes[at] for at in layers[cut_at:end])
                    tries.append((max(largest, size), (*cuts, layers[cut_at])))
            best[end] = min(tries)
    return (0, *best[len(layers)][1][1:])


def _only(state: TrainingState, names: set[str] | None) -> TrainingState:
    if names is None:
        return state
    tensors = {}
    for full, stored in state.tensors.items():
        kind, _, name = full.partition("/")
        of = name.rpartition("/")[0] if kind == "optimizer" else name
        if kind not in ("model", "buffer", "optimizer") or of in names:
            tensors[full] = stored
    groups = [{**group, "params": [n for n in group["params"] if n in names]} for group in state.groups]
    return replace(
        state,
        tensors=tensors,
        groups=[group for group in groups if group["params"]],
        frozen=[name for name in state.frozen if name in names],
        tied={alias: name for alias, name in state.tied.items() if name in names},
    )


# Tensor-parallel shards.


class SplitRules:
    """How parameters are split over the target's tensor-parallel ranks."""

    def __init__(self, state: TrainingState, target: Target) -> None:
        self._given: Patterns | None = target.patterns
        self._carried = decode(state.meta.get("deepspeed_patterns") or {}, state.tensors)
        self.tp = target.tp

    def pattern(self, name: str, stored: Stored) -> Pattern | None:
        """None: nothing says how."""
        if self._given is not None:
            return self._given.of(name)
        return carried_pattern(self._carried, name, stored.shape) if self._carried else None

    def _required(self, name: str, stored: Stored) -> Pattern:
        found = self.pattern(name, stored)
        if found is None:
            raise UserError(
                f"nothing says how {name!r} is split over {self.tp} tensor-parallel ranks; give "
                "--to-patterns."
            )
        return found

    def shard_of(self, state: TrainingState, rank: int) -> TrainingState:
        if self.tp == 1:
            return state
        known = state.parameters()
        tensors: dict[str, Stored] = {}
        left: set[str] = set()
        for full, stored in state.tensors.items():
            kind, _, name = full.partition("/")
            of = name.rpartition("/")[0] if kind == "optimizer" else name
            if kind in ("model", "optimizer") and of in known:
                pattern = self._required(of, known[of])
                if pattern.kind == "unique" and rank:
                    left.add(of)
                    continue
                if pattern.kind == "fragment" and stored.shape == known[of].shape:
                    stored = cut(pattern, of, stored, rank, self.tp)
            tensors[full] = stored
        groups = [{**g, "params": [name for name in g["params"] if name not in left]} for g in state.groups]
        frozen = [name for name in state.frozen if name not in left]
        return replace(state, tensors=tensors, groups=groups, frozen=frozen)

    def info(self, parameters: Mapping[str, Stored]) -> dict[str, Any]:
        """DeepSpeed's `universal_checkpoint_info`: what its converter needs to know of these shards."""
        if self.tp == 1:
            gone = ("sub_param_shard_widths", "affine_map")  # of another number of ranks
            return {key: value for key, value in self._carried.items() if key not in gone}
        found: dict[str, Any] = {
            "universal_checkpoint_version": _VERSION,
            "tp_replicated_parameter_patterns": [],
            "parameter_to_average_patterns": [],
            "parameter_with_row_parallelism_patterns": [],
            "vocabulary_parameter_patterns": [],
            "parameter_with_sub_params": [],
            "sub_param_shard_widths": {},
            "affine_map": {"version": AFFINE_VERSION, "params": {}},
        }
        for name, stored in parameters.items():
            self._tell(found, f"^{re.escape(name)}$", name, stored)
        return found

    def _tell(self, found: dict[str, Any], exact: str, name: str, stored: Stored) -> None:
        pattern = self._required(name, stored)
        if pattern.kind != "fragment":
            key = "parameter_to_average" if pattern.kind == "average" else "tp_replicated_parameter"
            found[f"{key}_patterns"].append(exact)
            return
        split, *more = pattern.split_over(self.tp)
        dim = split.dim or 0
        if pattern.pads_rows:
            found["vocabulary_parameter_patterns"].append(exact)
            if found.setdefault("original_vocab_size", stored.shape[0]) != stored.shape[0]:
                raise UserError(f"{name!r} is padded, and is not as long as the other padded parameters.")
        if not more and split.parts is not None and all(isinstance(part, int) for part in split.parts):
            shape: list[Any] = list(stored.shape)
            shape[dim] = tuple(split.parts)
            found["parameter_with_sub_params"].append(
                {"patterns": [exact], "shape": shape, "partition_dim": dim}
            )
            found["sub_param_shard_widths"][exact] = [
                [part // self.tp + (i < part % self.tp) for i in range(self.tp)]
                for part in split.parts
                if isinstance(part, int)
            ]
        elif more or split.parts is not None or split.experts is not None or dim > 1:
            found["affine_map"]["params"][exact] = _affine(pattern, name, stored.shape, self.tp)
        elif dim == 1:
            found["parameter_with_row_parallelism_patterns"].append(exact)

    def tags(self, name: str, stored: Stored) -> dict[str, Any]:
        """What DeepSpeed's loader must find with the whole tensor to split it."""
        pattern = self.pattern(name, stored)
        if pattern is None or pattern.kind != "fragment":
            return {"cat_dim": 0}
        split, *more = pattern.splits or pattern.split_over(1)
        dim = split.dim or 0
        tags: dict[str, Any] = {"cat_dim": dim}
        if more:
            raise UserError(f"{name!r} is split along several dimensions; DeepSpeed's folder knows one.")
        if pattern.pads_rows:
            tags["vocab_tensor"] = True
        if split.experts is not None and split.dim is None:
            tags |= {"is_expert_param": True, "ep_num_experts": split.experts}
        parts = split.parts
        if split.experts is not None and split.dim == 0:
            parts = (stored.shape[0] // split.experts,) * split.experts
        if parts is not None:
            if not all(isinstance(part, int) for part in parts):
                raise UserError(
                    f"{name!r} has parts that DeepSpeed's universal folder cannot say; give sizes."
                )
            if dim == 0 and len(parts) == 2 and parts[0] == parts[1]:
                return {"cat_dim": 0, "param_n_sub_params": 2}
            shape = tuple(tuple(parts) if d == dim else n for d, n in enumerate(stored.shape))
            kind = Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
            tags["sub_param_shape"] = PickledObject(
                kind, {"patterns": [f"^{re.escape(name)}$"], "shape": shape, "partition_dim": dim}
            )
        return tags


def cut(pattern: Pattern, name: str, stored: Stored, rank: int, count: int) -> Stored:
    tensor = Tensor(name=name, shape=stored.shape, dtype=stored.dtype)
    return cut_for(pattern.shards(tensor, count)[rank], stored)


def _affine(pattern: Pattern, name: str, shape: Shape, count: int) -> dict[str, Any]:
    shards = pattern.shards(Tensor(name=name, shape=shape), count)
    holders: dict[Any, list[int]] = {}
    for rank, shard in enumerate(shards):
        for box, _ in shard.blocks:
            holders.setdefault(box, []).append(rank)
    ranks = {}
    for rank, shard in enumerate(shards):
        whole, local = row_major(shape), row_major(shard.shape)
        pieces = [
            {
                "shape": list(box.size),
                "source": [offset_of(box.start, whole), list(whole)],
                "dest": [offset_of(corner, local), list(local)],
                "locations": holders[box],
            }
            for box, corner in shard.blocks
        ]
        ranks[rank] = {"shard_shape": list(shard.shape), "pieces": pieces}
    return {"logical_shape": list(shape), "ranks": ranks}
