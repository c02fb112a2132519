"""DeepSpeed's universal folder: a file for every state of every parameter, in two flavours that differ.

    <tag>/zero/<parameter>/{fp32,exp_avg,exp_avg_sq,...}.pt    ZeRO-1/2: {"param": tensor, …}; ZeRO-3: flat
    <tag>/zero/<parameter>/step.pt
    <tag>/zero/optimizer_state.pt
    <tag>/mp_rank_00_model_states.pt                           client state, shapes

Written so that both flavours' loaders take it: whole tensors in tables, and the model states under both
names. What cannot be helped: DeepSpeed's loaders look for Adam's keys alone, and its ZeRO-3 loader gives all
groups the numbers of the first. `deepspeed_write` has neither limit.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Any

from everstep.errors import UserError
from everstep.layout.box import row_major, whole
from everstep.store.parts import Progress
from everstep.store.stored import FilePiece, Pieces
from everstep_convert.formats import deepspeed_meta, deepspeed_write, pickles, torchfile
from everstep_convert.formats.deepspeed import frozen_of, with_empty
from everstep_convert.formats.deepspeed_files import files_in
from everstep_convert.formats.deepspeed_ranks import SplitRules, is_pipeline, model_ranks
from everstep_convert.formats.deepspeed_write import FlatGroup
from everstep_convert.formats.format import Format, Reading, Target
from everstep_convert.state import TrainingState, encoded_group, equal, keyed_value, value_of_key
from everstep_convert.values import Encoder

_ADAM = ("exp_avg", "exp_avg_sq")


def is_one(path: Path) -> bool:
    return (path / "zero" / "optimizer_state.pt").is_file() or (path / "latest_universal").is_file()


def folder_of(path: Path) -> Path:
    if (path / "latest_universal").is_file():
        tag = (path / "latest_universal").read_text(encoding="utf-8").strip()
        if "/" in tag or tag in ("", ".", ".."):
            raise UserError(f"{path / 'latest_universal'} names {tag!r}, which is not a folder here.")
        return path / tag
    return path


def read(path: str | Path, reading: Reading) -> TrainingState:
    folder = folder_of(Path(path))
    ranks = _model_states(folder)
    first = ranks[0]
    tables = [
        group for one in ranks for group in [*(one["param_shapes"] or []), one.get("frozen_param_shapes")]
    ]
    shapes = {name: tuple(s) for table in tables for name, s in (table or {}).items()}
    names = [
        list(dict.fromkeys(name for group in groups for name in group))
        for groups in zip_longest(*(one["param_shapes"] or [] for one in ranks), fillvalue={})
    ]
    state = TrainingState()
    encoder = Encoder()
    for home in sorted(p for p in (folder / "zero").iterdir() if p.is_dir()):
        for file in sorted(home.glob("*.pt")):
            _take(state, encoder, home.name, file.stem, pickles.load(file), shapes)
    optimizer = pickles.load(folder / "zero" / "optimizer_state.pt")
    held = optimizer.get("optimizer_state_dict") or {}
    groups = optimizer.get("param_groups") or held.get("param_groups") or []
    for g, (group, mine) in enumerate(zip(groups, _names(groups, names), strict=False)):
        state.groups.append(encoded_group(encoder, mine, group, f"groups.{g}"))
    deepspeed_meta.take(state, ranks, [optimizer])
    state.take(encoder)
    for one in ranks:
        _add_module(state, one)
    _add_frozen(state, folder)
    trained = {name for mine in names for name in mine}
    state.frozen = [name for name in state.parameters() if name not in trained]
    state.groups = with_empty(state, (first.get("everstep") or {}).get("groups"))
    _add_steps(state, held)
    state.meta["format"] = "deepspeed universal"
    return state


def _names(groups: list[Any], names: list[list[str]]) -> list[list[str]]:
    """The parameters of every group; ZeRO-3 lists its sub-groups by number."""
    found = []
    for group in groups:
        numbers = group.get("params")
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < len(names) for n in numbers):
            return names
        found.append([name for n in numbers for name in names[n]])
    return found


def _add_module(state: TrainingState, first: Any) -> None:
    """Buffers, and parameters that have no atoms and are whole in the module."""
    state.tied |= first.get("shared_params") or {}
    buffers = set(first.get("buffer_names") or [])
    shapes = {name: tuple(s) for name, s in (first.get("frozen_param_shapes") or {}).items()}
    for name, stored in (first.get("module") or {}).items():
        if name in buffers and isinstance(stored, Pieces):
            if not equal(state.tensors.setdefault(f"buffer/{name}", stored), stored):
                state.lost.append(f"buffer/{name} of other model-parallel ranks")
        elif name in shapes and isinstance(stored, Pieces) and stored.shape == shapes[name]:
            state.tensors.setdefault(f"model/{name}", stored)


def _add_frozen(state: TrainingState, folder: Path) -> None:
    """DeepSpeed makes no atoms of ZeRO-3's frozen parameters; the model states beside them have them."""
    files = sorted(
        (int(match[1]), path)
        for path in folder.glob("zero_pp_rank_*_model_states.pt")
        if (match := re.match(r"zero_pp_rank_(\d+)_", path.name))
    )
    ranks = [pickles.load(path) for _, path in files]
    frozen = (ranks[0].get("frozen_param_shapes") or {}) if ranks else {}
    missing = [name for name in frozen if f"model/{name}" not in state.tensors]
    if missing and ranks[0].get("dp_world_size") == len(ranks):
        for name, stored in frozen_of(ranks).items():
            state.tensors.setdefault(f"model/{name}", stored)
    lost = [name for name in frozen if f"model/{name}" not in state.tensors]
    state.lost += [f"model/{name}" for name in lost]


def _model_states(folder: Path) -> list[Any]:
    """Of every model-parallel rank; ZeRO-1 and 2 write one file for each, ZeRO-3 one for every rank."""
    models = files_in(folder).models
    return [pickles.load(models[mp, 0]) for mp in sorted({mp for mp, _ in models})]


def _take(
    state: TrainingState,
    encoder: Encoder,
    name: str,
    key: str,
    value: Any,
    shapes: dict[str, tuple[int, ...]],
) -> None:
    if isinstance(value, dict):
        value = value.get("param")
    elif isinstance(value, Pieces) and len(value.shape) == 1 and value.shape != shapes.get(name, value.shape):
        value = _reshaped(name, value, shapes[name])
    found = keyed_value(key, value)
    if found is None:
        encoder.lost.append(f"optimizer/{name}/{key}")
    else:
        state.tensors[f"model/{name}" if key == "fp32" else f"optimizer/{name}/{found[0]}"] = found[1]


def _reshaped(name: str, stored: Pieces, shape: tuple[int, ...]) -> Pieces:
    """ZeRO-3's atoms are flat; their shape is in the model states."""
    (piece,) = stored.pieces
    if prod(stored.shape) < prod(shape) or len(stored.shape) != 1:
        raise UserError(
            f"the atom of {name!r} is of shape {list(stored.shape)}, and should be {list(shape)}."
        )
    return Pieces(stored.dtype, shape, (FilePiece(whole(shape), piece.file, piece.offset, row_major(shape)),))


def _add_steps(state: TrainingState, held: Any) -> None:
    """ZeRO-3 has one count of steps for all."""
    step = next((one.get("step") for one in (held.get("state") or {}).values() if "step" in one), None)
    found = None if step is None else keyed_value("step", step)
    if found is None:
        return
    for name, states in list(state.optimizer().items()):
        if not any(key.partition("#")[0] == "step" for key in states):
            state.tensors[f"optimizer/{name}/{found[0]}"] = found[1]


def write(path: Path, state: TrainingState, target: Target, progress: Progress) -> None:
    precision = deepspeed_write.precision_of(state, target)
    working = deepspeed_write.WORKING[precision]
    target = replace(target, world=1, stage=1, ep=1)
    tag = f"global_step{state.step}_universal"
    folder = path / tag
    rules = SplitRules(state, target)
    groups = deepspeed_write.groups_of(state)
    optimizer = state.optimizer()
    for name, stored in state.parameters().items():
        home = folder / "zero" / name
        home.mkdir(parents=True, exist_ok=True)
        tags = rules.tags(name, stored)
        torchfile.save(home / "fp32.pt", {**tags, "param": stored}, progress)
        for key, value in optimizer[name].items():
            file = home / f"{key.partition('#')[0]}.pt"
            if key != "step" and "#" not in key:
                torchfile.save(file, {**tags, "param": value}, progress)
            else:
                torchfile.save(file, value_of_key(key, value), progress)
            if key.partition("#")[0] not in (*_ADAM, "step"):
                _say(state, f"DeepSpeed's universal loader does not look for {key}")
    if len(groups) > 1:
        _say(state, "DeepSpeed's ZeRO-3 universal loader gives every group the numbers of the first")
    shared = _global_state(state, groups, precision)
    torchfile.save(folder / "zero" / "optimizer_state.pt", shared, progress)
    for rank in model_ranks(state, target):
        mine = deepspeed_write.groups_of(rank.state)
        held = deepspeed_write.model_states(rank.state, mine, target, working, None)
        info = rules.info(state.parameters())
        held |= {"universal_checkpoint_info": info} if info else {}
        for start in ("", "zero_pp_rank_0_"):
            torchfile.save(folder / f"{start}mp_rank_{rank.number:02d}_model_states.pt", held, progress)
        if is_pipeline(state, target):
            deepspeed_write.write_layers(
                folder, rank, state, target, deepspeed_write.WORKING[precision], progress
            )
    for latest in ("latest_universal", "latest"):
        (path / latest).write_text(tag, encoding="utf-8")


def _say(state: TrainingState, sentence: str) -> None:
    if sentence not in state.notes:
        state.notes.append(sentence)


def _global_state(state: TrainingState, groups: list[FlatGroup], precision: str) -> dict[str, Any]:
    inner = deepspeed_write.partition_of(state, groups, 0, Target(format="deepspeed"), precision)
    numbers = inner["base_optimizer_state"]["param_groups"]
    steps = {g: dict(group.shared) for g, group in enumerate(groups)}
    kept = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", "zero_stage", "ds_version")
    return {
        **{key: inner[key] for key in kept if key in inner},
        "group_paddings": [0] * len(groups),
        "partition_count": [1] * len(groups),
        "param_groups": numbers,
        "optimizer_state_dict": {"state": steps, "param_groups": numbers},
    }


FORMAT = Format(
    name="deepspeed-universal",
    title="DeepSpeed universal folder",
    reads="yes, both flavours",
    writes="yes, for both loaders",
    optimizer="what its loaders know: Adam's",
    detects=is_one,
    read=read,
    write=write,
)
