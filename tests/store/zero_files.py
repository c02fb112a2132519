"""Raw ZeRO files of a state, as DeepSpeed writes them: what the reader of them is tried on.

DeepSpeed 0.19.8 loaded such files as its own when this was part of the converter. Any ZeRO stage over any
number of data-parallel ranks, experts dealt out over `ep` of them.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch

from everstep.layout.box import Box
from everstep.store.dtypes import Array
from everstep.store.stored import Stored, read_range
from everstep_convert.formats import deepspeed_groups, deepspeed_meta, torchfile
from everstep_convert.formats.deepspeed_files import EXPERTS, global_expert
from everstep_convert.formats.deepspeed_groups import WORKING, TrainedGroup
from everstep_convert.formats.format import Target
from everstep_convert.formats.torchfile import Global, PickledObject
from everstep_convert.state import TrainingState
from everstep_convert.woven import as_dtype

ALIGN = 2  # DeepSpeed's nccl_start_alignment_factor


class Flat:
    """Ranges of tensors (None: zeros) one after the other: (tensor, its first element, how many)."""

    def __init__(self, dtype: str, ranges: list[tuple[Stored | None, int, int]]) -> None:
        self.dtype, self.ranges = dtype, ranges
        self.shape = (sum(count for _, _, count in ranges),)

    def read(self, box: Box, out: Array) -> None:
        at, low, high = 0, box.start[0], box.start[0] + box.size[0]
        for stored, first, count in self.ranges:
            begin, end = max(low, at), min(high, at + count)
            if begin < end and stored is None:
                out[begin - low : end - low] = 0
            elif begin < end:
                read_range(stored, first + begin - at, first + end - at, out[begin - low : end - low])
            at += count


class Group:
    """A group as one rank lays it out; `keys`: of the states that are as large as their parameter."""

    def __init__(self, state: TrainingState, group: TrainedGroup) -> None:
        self.names, self.numbers, self.shared = group.names, group.numbers, group.shared
        self.weights, self.states = state.parameters(), state.optimizer()
        keys = dict.fromkeys(key for name in self.names for key in self.states[name])
        self.keys = [key for key in keys if key.partition("#")[0] not in self.shared]
        self.first: dict[str, int] = {}  # of an expert's number, as its rank counts

    def size(self, name: str) -> int:
        return prod(self.weights[name].shape)

    def of_rank(self, rank: int, world: int, ep: int) -> tuple["Group", int, int]:
        """What the rank divides with others, its place among them and their number."""
        if not self.numbers.get("moe"):
            return self, rank, world
        experts = {name: EXPERTS.fullmatch(name) for name in self.names}
        local = (1 + max(int(match[2]) for match in experts.values() if match)) // ep
        mine = object.__new__(Group)
        mine.__dict__ |= self.__dict__
        mine.names = [n for n, match in experts.items() if match and int(match[2]) // local == rank % ep]
        mine.first = dict.fromkeys(mine.names, -(rank % ep) * local)
        return mine, rank // ep, world // ep

    def called(self, name: str) -> str:
        return global_expert(name, self.first.get(name, 0))

    def tensor(self, name: str, key: str | None) -> Stored | None:
        return self.weights[name] if key is None else self.states[name].get(key)

    def flat(self, key: str | None, ranges: list[tuple[str | None, int, int]]) -> Flat:
        """Ranges of parameters by name; the buffer has the type of the first that is there."""
        found = [(None if name is None else self.tensor(name, key), first, n) for name, first, n in ranges]
        tensors = [one for name in self.names if (one := self.tensor(name, key)) is not None]
        dtype = tensors[0].dtype
        return Flat(dtype, [(one and as_dtype(one, dtype), first, n) for one, first, n in found])

    def pieces(self, low: int, high: int) -> Iterator[tuple[str, int, int, int]]:
        """(name, first element, how many, where in the range) of the group's elements low..high."""
        at = 0
        for name in self.names:
            begin, end = max(low, at), min(high, at + self.size(name))
            if begin < end:
                yield name, begin - at, end - begin, begin - low
            at += self.size(name)


def write_zero(path: Path, state: TrainingState, stage: int = 1, world: int = 1, ep: int = 1) -> None:
    """`<path>/global_stepN/…` and `<path>/latest`."""
    precision = deepspeed_groups.precision_of(state, Target(format="deepspeed-universal"))
    trained = deepspeed_groups.groups_of(state)
    groups = [Group(state, group) for group in trained]
    folder = path / f"global_step{state.step}"
    folder.mkdir(parents=True)
    prefix = "bf16_" if precision == "bf16" else ""
    for rank in range(world):
        inner = _three(groups, rank, world) if stage == 3 else _one(groups, rank, world, ep)
        inner |= {
            **deepspeed_meta.loss_scaler(state, precision),
            **deepspeed_meta.clip_grad(state),
            "zero_stage": PickledObject(
                Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), args=(stage,)
            ),
        }
        file = folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torchfile.save(file, {"optimizer_state_dict": inner, "ds_config": {}})
    held = deepspeed_groups.model_states(state, trained, WORKING[precision])
    held["everstep"]["groups"] = None
    held["dp_world_size"] = world
    shares = [group.of_rank(0, world, ep)[0] for group in groups]
    for table, group in zip(held["param_shapes"], shares, strict=True):
        kept = {group.called(name): table[name] for name in group.names}
        table.clear()
        table |= kept
    if stage != 3:
        torchfile.save(folder / "mp_rank_00_model_states.pt", held)
    for rank in range(world if stage == 3 else 0):
        file = folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        torchfile.save(file, held | _sharded(state, held, rank, world))
    _write_experts(folder, state, WORKING[precision])
    if deepspeed_groups.is_pipeline(state):
        deepspeed_groups.write_layers(folder, state, WORKING[precision], lambda count: None)
    (path / "latest").write_text(folder.name)


def _one(groups: list[Group], rank: int, world: int, ep: int) -> dict[str, Any]:
    """ZeRO-1 and 2: a group flat, one range per rank."""
    weights, mappings, states, counts = [], [], {}, []
    for g, whole in enumerate(groups):
        group, mine, over = whole.of_rank(rank, world, ep)
        total = sum(map(group.size, group.names))
        each = -(-total // (ALIGN * over)) * ALIGN
        pieces = list(group.pieces(mine * each, (mine + 1) * each))
        ranges: list[tuple[str | None, int, int]] = [(name, first, n) for name, first, n, _ in pieces]
        rest = [(None, 0, each - sum(n for _, _, n in ranges))]
        weights.append(group.flat(None, ranges))
        mappings.append(OrderedDict((group.called(name), _address(n, at)) for name, _, n, at in pieces))
        states[g] = {key: group.flat(key, ranges + rest) for key in group.keys} | group.shared
        counts.append(over)
    return {
        "base_optimizer_state": {
            "state": {g: held for g, held in states.items() if held},
            "param_groups": [{**group.numbers, "params": [g]} for g, group in enumerate(groups)],
        },
        "single_partition_of_fp32_groups": weights,
        "partition_count": counts,
        "param_slice_mappings": mappings,
    }


def _address(count: int, start: int) -> PickledObject:
    kind = Global("deepspeed.utils.tensor_fragment", "fragment_address")
    return PickledObject(kind, {"numel": count, "start": start})


def _three(groups: list[Group], rank: int, world: int) -> dict[str, Any]:
    """ZeRO-3: every parameter cut alone."""
    ranges = [
        [one for name in group.names for one in _cut(name, group.size(name), rank, world)] for group in groups
    ]
    states = {
        g: {key: group.flat(key, mine) for key in group.keys} | group.shared
        for g, (group, mine) in enumerate(zip(groups, ranges, strict=True))
    }
    return {
        "partition_count": world,
        "optimizer_state_dict": {
            "state": {g: held for g, held in states.items() if held},
            "param_groups": [{**group.numbers, "params": [g]} for g, group in enumerate(groups)],
        },
        "fp32_flat_groups": [group.flat(None, mine) for group, mine in zip(groups, ranges, strict=True)],
    }


def _cut(what: Any, size: int, rank: int, world: int) -> list[tuple[Any, int, int]]:
    """A rank's equal share of a tensor's elements, zeros where the tensor has ended."""
    each = -(-size // world)
    count = max(0, min(each, size - rank * each))
    found = [(what, rank * each, count)] if count else []
    return [*found, (None, 0, each - count)] if count < each else found


def _sharded(state: TrainingState, held: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """What differs in ZeRO-3's model files: no weights, and frozen parameters cut over the ranks."""
    buffers = {*state.buffers()}
    module = OrderedDict(
        (n, one if n in buffers else Flat(one.dtype, [])) for n, one in held["module"].items()
    )
    frozen = {
        name: Flat(one.dtype, _cut(one, prod(one.shape), rank, world))
        for name, one in (held["frozen_param_fragments"] or {}).items()
    }
    ours = held["everstep"] if rank == 0 else {**held["everstep"], "tensors": {}}
    return {"module": module, "frozen_param_fragments": frozen, "everstep": ours}


def _write_experts(folder: Path, state: TrainingState, dtype: str) -> None:
    """Working weights, a file for every expert of every layer."""
    layers: dict[str, dict[int, dict[str, Stored]]] = {}
    for name, stored in state.parameters().items():
        if match := EXPERTS.fullmatch(name):
            held = layers.setdefault(match[1], {}).setdefault(int(match[2]), {})
            held[name] = as_dtype(stored, dtype)
    for number, experts in enumerate(layers.values()):
        for expert, table in experts.items():
            torchfile.save(folder / f"layer_{number}_expert_{expert}_mp_rank_00_model_states.pt", table)


def model_parallel(root: Path, states: list[TrainingState], tp: int, world: int = 1, stage: int = 1) -> Path:
    """The files of several model-parallel ranks, each with a state of its own."""
    out = root / "mp" / f"global_step{states[0].step}"
    out.mkdir(parents=True)
    for rank, state in enumerate(states):
        write_zero(root / f"r{rank}", state, stage=stage, world=world)
        name = f"mp_rank_{rank:02d}"
        for file in (root / f"r{rank}" / f"global_step{state.step}").iterdir():
            data = file.read_bytes().replace(b"mp_rank_00", name.encode())  # torch.save has it inside too
            (out / file.name.replace("mp_rank_00", name)).write_bytes(data)
    degrees = {"pp_degree": len(states) // tp, "tp_degree": tp}
    change(
        out, "*mp_rank_*_model_states.pt", lambda told: told.update(checkpoint_parallel_dimensions=degrees)
    )
    return out


def change(folder: Path, files: str, edit: Callable[[Any], None]) -> None:
    for path in sorted(folder.glob(files)):
        told = torch.load(path, weights_only=False)
        edit(told)
        torch.save(told, path)
