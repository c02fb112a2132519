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
from math import prod
from pathlib import Path
from typing import Any

from everstep.checkpoint.formats import deepspeed_write, pickles, torchfile
from everstep.checkpoint.formats.deepspeed import ENGINE_KEYS, frozen_of
from everstep.checkpoint.parts import Progress
from everstep.checkpoint.state import State, plain, scalar
from everstep.checkpoint.stored import FilePiece, Pieces, Stored, as_dtype
from everstep.errors import UserError
from everstep.layout.box import row_major, whole

_ADAM = ("exp_avg", "exp_avg_sq")


def is_one(path: Path) -> bool:
    return (path / "zero" / "optimizer_state.pt").is_file() or (path / "latest_universal").is_file()


def folder_of(path: Path) -> Path:
    if (path / "latest_universal").is_file():
        tag = (path / "latest_universal").read_text(encoding="utf-8").strip()
        if "/" in tag or tag in ("", ".", ".."):
            raise UserError(f"{path / 'latest_universal'} names {tag!r}, which is no folder here.")
        return path / tag
    return path


def read(path: Path) -> State:
    folder = folder_of(path)
    told = pickles.load(_model_file(folder))
    shapes = {name: tuple(s) for group in told["param_shapes"] or [] for name, s in group.items()}
    shapes |= {name: tuple(s) for name, s in (told.get("frozen_param_shapes") or {}).items()}
    state = State(step=int(told.get("global_steps") or 0))
    for home in sorted(p for p in (folder / "zero").iterdir() if p.is_dir()):
        for file in sorted(home.glob("*.pt")):
            _take(state, home.name, file.stem, pickles.load(file), shapes)
    optimizer = pickles.load(folder / "zero" / "optimizer_state.pt")
    held = optimizer.get("optimizer_state_dict") or {}
    groups = optimizer.get("param_groups") or held.get("param_groups") or []
    lost: list[str] = []
    names = [list(group) for group in told["param_shapes"] or []]
    for group, mine in zip(groups, names, strict=False):
        numbers = {k: plain(v, lost, k) for k, v in group.items() if k != "params"}
        state.groups.append({"params": mine, **numbers})
    _add_frozen(state, folder)
    state.frozen = [name for name in state.parameters() if not any(name in mine for mine in names)]
    _add_steps(state, held)
    client = {key: value for key, value in told.items() if key not in ENGINE_KEYS}
    state.meta = {
        **(told.get("everstep") or {}),
        "format": "deepspeed universal",
        "client": plain(client, lost, "client"),
        "deepspeed_version": str(told.get("ds_version")),
        "scheduler": plain(told.get("lr_scheduler"), lost, "lr_scheduler"),
    }
    state.notes += [f"{name} is no plain value and is left out" for name in lost]
    return state


def _add_frozen(state: State, folder: Path) -> None:
    """DeepSpeed makes no atoms of ZeRO-3's frozen parameters; the model states beside them have them."""
    files = sorted(
        (int(match[1]), path)
        for path in folder.glob("zero_pp_rank_*_model_states.pt")
        if (match := re.match(r"zero_pp_rank_(\d+)_", path.name))
    )
    told = [pickles.load(path) for _, path in files]
    frozen = (told[0].get("frozen_param_shapes") or {}) if told else {}
    missing = [name for name in frozen if f"model/{name}" not in state.tensors]
    if missing and told[0].get("dp_world_size") == len(told):
        for name, stored in frozen_of(told).items():
            state.tensors.setdefault(f"model/{name}", stored)


def _model_file(folder: Path) -> Path:
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{folder} has no model states beside zero/.")


def _take(state: State, name: str, key: str, value: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    if isinstance(value, dict):
        value = value["param"]
    if isinstance(value, int | float):
        value = scalar(float(value))
    if isinstance(value, Pieces) and name in shapes and value.shape != shapes[name] and value.shape:
        value = _reshaped(name, value, shapes[name])
    full = f"model/{name}" if key == "fp32" else f"optimizer/{name}/{key}"
    state.tensors[full] = value


def _reshaped(name: str, stored: Pieces, shape: tuple[int, ...]) -> Pieces:
    """ZeRO-3's atoms are flat; their shape is in the model states."""
    (piece,) = stored.pieces
    if prod(stored.shape) < prod(shape) or len(stored.shape) != 1:
        raise UserError(
            f"the atom of {name!r} is of shape {list(stored.shape)}, and should be {list(shape)}."
        )
    return Pieces(stored.dtype, shape, (FilePiece(whole(shape), piece.file, piece.offset, row_major(shape)),))


def _add_steps(state: State, held: Any) -> None:
    """ZeRO-3 has one count of steps for all."""
    step = next((one.get("step") for one in (held.get("state") or {}).values() if "step" in one), None)
    if step is None:
        return
    for name in state.parameters():
        if name not in state.frozen:
            state.tensors.setdefault(
                f"optimizer/{name}/step", step if isinstance(step, Pieces) else scalar(step)
            )


def write(
    path: Path, state: State, *, precision: str | None = None, progress: Progress = lambda count: None
) -> None:
    precision = precision or state.meta.get("precision") or "fp32"
    tag = f"global_step{state.step}_universal"
    folder = path / tag
    groups = deepspeed_write.groups_of(state)
    for name, stored in state.parameters().items():
        home = folder / "zero" / name
        home.mkdir(parents=True, exist_ok=True)
        _atom(home / "fp32.pt", as_dtype(stored, "F32"), progress)
        for key, value in state.optimizer(name).items():
            if key == "step":
                torchfile.save(home / "step.pt", value, progress)
            elif value.shape == stored.shape:
                _atom(home / f"{key}.pt", as_dtype(value, "F32"), progress)
            if key not in (*_ADAM, "step"):
                _say(state, f"DeepSpeed's universal loader does not look for {key}")
    if len(groups) > 1:
        _say(state, "DeepSpeed's ZeRO-3 universal loader gives every group the numbers of the first")
    torchfile.save(folder / "zero" / "optimizer_state.pt", _global_state(state, groups), progress)
    shapes = [deepspeed_write.shapes_of(state, group["params"]) for group in groups]
    told = deepspeed_write.model_states(state, shapes, 1, deepspeed_write.WORKING[precision], None)
    for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        torchfile.save(folder / file, told, progress)
    (path / "latest_universal").write_text(tag, encoding="utf-8")
    (path / "latest").write_text(tag, encoding="utf-8")


def _atom(path: Path, stored: Stored, progress: Progress) -> None:
    torchfile.save(path, {"param": stored, "cat_dim": 0}, progress)


def _say(state: State, sentence: str) -> None:
    if sentence not in state.notes:
        state.notes.append(sentence)


def _global_state(state: State, groups: list[dict[str, Any]]) -> dict[str, Any]:
    inner = deepspeed_write.partition_of(state, groups, 0, 1, 1)
    numbers = inner["base_optimizer_state"]["param_groups"]
    steps = {g: deepspeed_write.shared_of(state, group["params"]) for g, group in enumerate(groups)}
    kept = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", "zero_stage", "ds_version")
    return {
        **{key: inner[key] for key in kept},
        "group_paddings": [0] * len(groups),
        "partition_count": [1] * len(groups),
        "param_groups": numbers,
        "optimizer_state_dict": {"state": steps, "param_groups": numbers},
    }
