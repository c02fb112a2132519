"""What DeepSpeed's checkpoints hold besides tensors, both ways: client state, scheduler, loss scaler, counts.

They are kept under meta["deepspeed"], encoded. The run's configuration (`ds_config`) is not state and is not
carried over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from everstep.errors import UserError
from everstep.store.stored import Stored, read_all
from everstep_convert.formats import pickles
from everstep_convert.formats.torchfile import Global, PickledObject
from everstep_convert.state import TrainingState, equal
from everstep_convert.values import Encoder, decode

VERSION = "0.19.8"
ENGINE_KEYS = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config",
    "ds_version", "checkpoint_parallel_dimensions", "universal_checkpoint_info", "num_experts",
    "everstep",
}  # fmt: skip
_CARRIED = ("lr_scheduler", "data_sampler", "random_ltd")
_COUNTERS = ("global_samples", "skipped_steps")
_SCALERS = ("LossScaler", "DynamicLossScaler")
_SCALER_MODULE = "deepspeed.runtime.fp16.loss_scaler"
_SCALER_KEYS = ("dynamic_loss_scale", "overflow")
_DYNAMIC = {  # as DeepSpeed starts an fp16 run that has not said otherwise
    "cur_scale": 65536.0, "dynamic": True, "cur_iter": 0, "last_overflow_iter": -1, "scale_factor": 2.0,
    "scale_window": 1000, "min_scale": 1, "delayed_shift": 2, "cur_hysteresis": 2,
    "consecutive_hysteresis": False, "raise_error_at_min_scale": False, "dtype": {"$dtype": "F16"},
}  # fmt: skip


def take(state: TrainingState, ranks: Sequence[Any], optims: Sequence[Any] = ()) -> None:
    """`ranks`, `optims`: the model and optimizer states of every rank. What all should have alike is taken
    from the first; a rank that has it otherwise is named among what is lost.
    """
    encoder = Encoder()
    first = ranks[0]
    steps = sorted({int(one.get("global_steps") or 0) for one in ranks})
    if len(steps) > 1:
        raise UserError(f"its files are of steps {' and '.join(map(str, steps))}; give those of one step.")
    state.step = steps[0]
    ours = first.get("everstep")
    table = dict(ours) if isinstance(ours, dict) and isinstance(ours.get("meta"), dict) else {}
    state.meta |= table.get("meta", {})
    state.tensors |= table.get("tensors", {})
    found: dict[str, Any] = {}
    for key in _CARRIED:
        if first.get(key) is not None:
            found[key] = encoder.encode(first[key], key)
    found |= {key: first[key] for key in _COUNTERS if type(first.get(key)) is int and first[key]}
    client = _client(first)
    if client:
        found["client"] = encoder.encode(client, "client")
    for rank, other in enumerate(ranks[1:], 1):
        told = {"client": (_client(other), client)}
        told |= {key: ({key: other.get(key)}, {key: first.get(key)}) for key in (*_CARRIED, *_COUNTERS)}
        encoder.lost += [f"{key} of rank {rank}" for key, pair in told.items() if _differs(*pair)]
    if optims:
        found |= _scaler(optims[0], encoder)
        if optims[0].get("clip_grad"):
            found["clip_grad"] = optims[0]["clip_grad"]
        for rank, other in enumerate(optims[1:], 1):
            if _differs(
                *(_scaler(one, Encoder()) | {"clip": one.get("clip_grad")} for one in (other, optims[0]))
            ):
                encoder.lost.append(f"loss_scaler of rank {rank}")
    elsewhere = table.get("deepspeed")
    if isinstance(elsewhere, dict):
        found = {**elsewhere, **found}
    if found:
        state.meta["deepspeed"] = found
    info = first.get("universal_checkpoint_info")
    if isinstance(info, dict) and info:
        state.meta["deepspeed_patterns"] = Encoder(opened=_opened).encode(info, "patterns")
    state.meta["deepspeed_version"] = str(first.get("ds_version"))
    state.take(encoder)


def _client(model_states: Any) -> dict[str, Any]:
    return {str(key): value for key, value in model_states.items() if key not in ENGINE_KEYS}


def _opened(value: Any) -> Any:
    """Objects of DeepSpeed's (`SubparamShape`) as tables."""
    return value.__dict__["state"] if isinstance(value, pickles.Opaque) else value


def _differs(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Do ranks disagree? Their tensors lie in files of their own, and are compared by value."""
    first, second = Encoder(), Encoder()
    if first.encode(a, "") != second.encode(b, ""):
        return True
    return any(not equal(first.tensors[name], second.tensors[name]) for name in first.tensors)


def _scaler(optim: Any, encoder: Encoder) -> dict[str, Any]:
    scaler = optim.get("loss_scaler")
    if not isinstance(scaler, pickles.Opaque) or scaler.name not in _SCALERS:
        return {}
    held = encoder.encode(scaler.__dict__["state"], "loss_scaler")
    if held == _DYNAMIC or (scaler.name == "LossScaler" and held.get("cur_scale") == 1.0):
        return {}  # as a run starts with
    numbers = {key: encoder.encode(optim[key], key) for key in _SCALER_KEYS if optim.get(key)}
    return {"loss_scaler": {"class": scaler.name, "state": held}, **numbers}


def version_of(state: TrainingState) -> str:
    return str(state.meta.get("deepspeed_version") or VERSION)


def loss_scaler(state: TrainingState, precision: str) -> dict[str, Any]:
    """The keys of an optimizer file that say how losses are scaled."""
    held = state.meta.get("deepspeed") or {}
    scaler = held.get("loss_scaler")
    if scaler is None and precision == "fp16":
        ours = next((s for name, s in state.tensors.items() if name.startswith("extra/loss_scale/")), None)
        scale = {} if ours is None else {"cur_scale": float(read_all(ours).view(np.float64))}
        scaler = {"class": "DynamicLossScaler", "state": {**_DYNAMIC, **scale}}
    dynamic = scaler is not None and scaler["class"] == "DynamicLossScaler"
    name, table = (scaler["class"], scaler["state"]) if scaler else ("LossScaler", {})
    inside = decode(table, state.tensors) or {"cur_scale": 1.0, "dynamic": False}
    return {
        "loss_scaler": PickledObject(Global(_SCALER_MODULE, name), inside),
        "dynamic_loss_scale": bool(held.get("dynamic_loss_scale", dynamic)),
        "overflow": bool(held.get("overflow", False)),
    }


def clip_grad(state: TrainingState) -> dict[str, Any]:
    """Only if it is known: DeepSpeed takes the checkpoint's number for its own, and 0 would end clipping."""
    held = state.meta.get("deepspeed") or {}
    return {"clip_grad": held["clip_grad"]} if "clip_grad" in held else {}


def model_keys(state: TrainingState, kept: Mapping[str, Stored], groups: list[Any] | None) -> dict[str, Any]:
    """The keys of a model file besides the model; `kept`: tensors that have no other place."""
    held = state.meta.get("deepspeed") or {}
    client = decode(held.get("client") or {}, state.tensors)
    table = {
        key: value for key, value in state.meta.items() if key not in ("deepspeed", "deepspeed_patterns")
    }
    ours = clip_grad(state) | ({"pipeline": held["pipeline"]} if "pipeline" in held else {})
    return {
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        **{key: decode(held[key], state.tensors) for key in _CARRIED if key in held},
        **{key: held.get(key, 0) for key in _COUNTERS},
        "global_steps": state.step,
        "ds_config": {},
        "ds_version": version_of(state),
        "everstep": {"meta": table, "groups": groups, "tensors": dict(kept), "deepspeed": ours},
        **client,
    }
