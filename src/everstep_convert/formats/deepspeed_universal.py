"""DeepSpeed's universal folder: a file for every state of every parameter, in two flavours that differ.

    <tag>/zero/<parameter>/{fp32,exp_avg,exp_avg_sq,...}.pt    ZeRO-1/2: {"param": tensor, …}; ZeRO-3: flat
    <tag>/zero/<parameter>/step.pt
    <tag>/zero/optimizer_state.pt
    <tag>/mp_rank_00_model_states.pt                           client state, shapes

Written so that both flavours' loaders take it: whole tensors in tables, and the model states under both
names, as of a run of one model-parallel rank. What cannot be helped: DeepSpeed's loaders look for Adam's keys
alone, and its ZeRO-3 loader gives all groups the numbers of the first.
"""

from __future__ import annotations

import re
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Any

from everstep.errors import UserError
from everstep.layout.box import row_major, whole
from everstep.store.parts import Progress
from everstep.store.stored import FilePiece, Pieces, Stored
from everstep_convert.formats import deepspeed_groups, deepspeed_meta, pickles, torchfile
from everstep_convert.formats.deepspeed import frozen_of
from everstep_convert.formats.deepspeed_files import files_in
from everstep_convert.formats.format import Format, Reading, Target
from everstep_convert.formats.shards import carried_pattern
from everstep_convert.formats.torchfile import Global, PickledObject
from everstep_convert.patterns import Pattern
from everstep_convert.state import TrainingState, encoded_group, equal, keyed_value, value_of_key
from everstep_convert.values import Encoder, decode

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
    layers = _in_layers(folder)
    for one in ranks:
        _add_module(state, one, layers)
    _add_frozen(state, folder)
    trained = {name for mine in names for name in mine}
    state.frozen = [name for name in state.parameters() if name not in trained]
    state.groups = _with_empty(state, (first.get("everstep") or {}).get("groups"))
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


def _with_empty(state: TrainingState, written: Any) -> list[dict[str, Any]]:
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


def _in_layers(folder: Path) -> dict[str, Any]:
    """A pipeline's module, which is in files of its layers."""
    files = files_in(folder).layers
    return {
        f"{layer}.{name}": one
        for (layer, _), path in files.items()
        for name, one in pickles.load(path).items()
    }


def _add_module(state: TrainingState, first: Any, layers: dict[str, Any]) -> None:
    """Buffers, and parameters that have no atoms and are whole in the module."""
    state.tied |= first.get("shared_params") or {}
    buffers = set(first.get("buffer_names") or [])
    shapes = {name: tuple(s) for name, s in (first.get("frozen_param_shapes") or {}).items()}
    for name, stored in (first.get("module") or layers).items():
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
    precision = deepspeed_groups.precision_of(state, target)
    working = deepspeed_groups.WORKING[precision]
    tag = f"global_step{state.step}_universal"
    folder = path / tag
    rules = AtomRules(state, target)
    groups = deepspeed_groups.groups_of(state)
    optimizer = state.optimizer()
    for name, stored in state.parameters().items():
        _write_atoms(folder / "zero" / name, rules.tags(name, stored), stored, optimizer[name], progress)
        others = {key.partition("#")[0] for key in optimizer[name]} - {*_ADAM, "step"}
        for key in sorted(others):
            _say(state, f"DeepSpeed's universal loader does not look for {key}")
    if len(groups) > 1:
        _say(state, "DeepSpeed's ZeRO-3 universal loader gives every group the numbers of the first")
    shared = deepspeed_groups.optimizer_state(state, groups, precision)
    torchfile.save(folder / "zero" / "optimizer_state.pt", shared, progress)
    held = deepspeed_groups.model_states(state, groups, working)
    held |= {"universal_checkpoint_info": rules.carried} if rules.carried else {}
    for start in ("", "zero_pp_rank_0_"):
        torchfile.save(folder / f"{start}mp_rank_00_model_states.pt", held, progress)
    if deepspeed_groups.is_pipeline(state):
        deepspeed_groups.write_layers(folder, state, working, progress)
    for latest in ("latest_universal", "latest"):
        (path / latest).write_text(tag, encoding="utf-8")


def _write_atoms(
    home: Path, tags: dict[str, Any], weight: Stored, states: dict[str, Stored], progress: Progress
) -> None:
    home.mkdir(parents=True, exist_ok=True)
    torchfile.save(home / "fp32.pt", {**tags, "param": weight}, progress)
    for key, value in states.items():
        whole = key != "step" and "#" not in key
        held = {**tags, "param": value} if whole else value_of_key(key, value)
        torchfile.save(home / f"{key.partition('#')[0]}.pt", held, progress)


def _say(state: TrainingState, sentence: str) -> None:
    if sentence not in state.notes:
        state.notes.append(sentence)


class AtomRules:
    """How DeepSpeed's loaders must split a whole tensor over tensor-parallel ranks: by the patterns of the
    target, else as the source was split.
    """

    def __init__(self, state: TrainingState, target: Target) -> None:
        self._given = target.patterns
        carried = decode(state.meta.get("deepspeed_patterns") or {}, state.tensors)
        gone = ("sub_param_shard_widths", "affine_map")  # of the source's number of ranks
        self._rules = carried
        self.carried = {key: value for key, value in carried.items() if key not in gone}

    def tags(self, name: str, stored: Stored) -> dict[str, Any]:
        """What must be found with the whole tensor."""
        pattern = self._pattern(name, stored)
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
        return tags if parts is None else tags | _sub_parameters(name, stored, dim, parts)

    def _pattern(self, name: str, stored: Stored) -> Pattern | None:
        """None: nothing says how."""
        if self._given is not None:
            return self._given.of(name)
        return carried_pattern(self._rules, name, stored.shape) if self._rules else None


def _sub_parameters(name: str, stored: Stored, dim: int, parts: tuple[Any, ...]) -> dict[str, Any]:
    if not all(isinstance(part, int) for part in parts):
        raise UserError(f"{name!r} has parts that DeepSpeed's universal folder cannot say; give sizes.")
    if dim == 0 and len(parts) == 2 and parts[0] == parts[1]:
        return {"param_n_sub_params": 2}
    shape = tuple(parts if d == dim else n for d, n in enumerate(stored.shape))
    kind = Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
    row = {"patterns": [f"^{re.escape(name)}$"], "shape": shape, "partition_dim": dim}
    return {"sub_param_shape": PickledObject(kind, row)}


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
