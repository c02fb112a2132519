"""DeepSpeed's own side of a case: train and save, load, and its offline tools. Run by a Python that has it.

save        two steps of training, `save_checkpoint`, and what the engine then holds
load        `load_checkpoint` into an engine with other values, and what it then holds
fp32        `zero_to_fp32` of a folder for any number of ranks, without any rank
atoms       `ds_to_universal` of a folder, as above: optimizer states too (Adam's alone)
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch._dynamo  # once for all ranks
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import save_file

from tests.store.odd.model import OddModel, Spec, optimizer_of, whole
from tests.store.odd.ranks import serve

KEYS = {"adamw": ("exp_avg", "exp_avg_sq"), "momentum": ("momentum_buffer",)}


def run(job: dict[str, Any], rank: int) -> None:
    torch.set_num_threads(1)
    match job["do"]:
        case "fp32":
            _dump(job, _fp32(job), {})
            return
        case "atoms":
            _dump(job, _atoms(job), {})
            return
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would compile for minutes
    deepspeed.comm.init_distributed(dist_backend="gloo")
    engine = _engine(job)
    if job["do"] == "save":
        for _ in range(2):
            engine.backward(engine())
            engine.step()
        client = {
            "next": 3,
            "rng": torch.arange(6, dtype=torch.uint8),
            "best": float("inf"),
            "milestones": {30: 1},
        }
        engine.save_checkpoint(job["folder"], tag="global_step2", client_state=client)
    else:
        path, client = engine.load_checkpoint(job["folder"], job.get("tag"))
        assert path is not None, "nothing was loaded"
        if job.get("client"):
            assert (client["next"], client["milestones"]) == (3, {30: 1}), client["milestones"]
            assert torch.equal(client["rng"], torch.arange(6, dtype=torch.uint8))
    tensors, table = _truth(job["spec"], engine, job["stage"], job["optimizer"])
    if rank == 0:
        _dump(job, tensors, table)


def _engine(job: dict[str, Any]) -> Any:
    spec: Spec = job["spec"]
    model = OddModel(spec, zeros=job["do"] == "load", floats="float32")
    optimizer = optimizer_of(spec, model)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": job["stage"], **job.get("zero", {})},
        "bf16": {"enabled": job["precision"] == "bf16"},
        "fp16": {"enabled": job["precision"] == "fp16", "initial_scale_power": 4},
        "checkpoint": {"load_universal": job.get("universal", False)},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def _truth(
    spec: Spec, engine: Any, stage: int, optimizer: bool
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What the engine holds: fp32 masters, states, frozen weights, buffers, groups."""
    found: dict[str, torch.Tensor] = {}
    model = engine.module
    if optimizer and hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._hp_optimizer_states_linked = False  # after a load they are linked by the next step
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for row in spec["tensors"]:
        name = row["name"]
        if row["role"] == "buffer":
            found[f"model/{name}"] = whole(model.get_buffer(name))
            continue
        p = model.get_parameter(name)
        if row["role"] == "frozen" or not _count(p):
            with deepspeed.zero.GatheredParameters([p], enabled=stage == 3):
                found[f"model/{name}"] = whole(p.data)
            continue
        found[f"model/{name}"] = whole(safe_get_full_fp32_param(p)).reshape(row["shape"])
        for key in KEYS.get(spec["optimizer"], ()) if optimizer else ():
            state = safe_get_full_optimizer_state(p, key)
            found[f"optimizer/{name}/{key}"] = whole(state).reshape(row["shape"])
        step = _step(engine)
        if step is not None:
            found[f"optimizer/{name}/step"] = torch.tensor(float(step))
    for alias, name in spec["tied"].items():  # the engine has each tensor once, under its first name
        found[f"model/{alias}"] = found[f"model/{name}"].clone()
    numbers = [
        {k: list(v) if isinstance(v, tuple) else v for k, v in group.items() if k not in ("params",)}
        for group in engine.optimizer.param_groups
    ]
    table = {
        "groups": [{k: v for k, v in g.items() if isinstance(v, int | float | str | list)} for g in numbers]
    }
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    table["scale"] = getattr(scaler, "cur_scale", None)
    return found, table


def _count(p: Any) -> int:
    return int(p.ds_numel) if hasattr(p, "ds_numel") else p.numel()


def _step(engine: Any) -> Any:
    inner = engine.optimizer.optimizer
    return next((s["step"] for s in inner.state.values() if "step" in s), None)


def _fp32(job: dict[str, Any]) -> dict[str, torch.Tensor]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return {
        f"model/{name}": tensor.contiguous().clone()
        for name, tensor in get_fp32_state_dict_from_zero_checkpoint(job["folder"]).items()
    }


def _atoms(job: dict[str, Any]) -> dict[str, torch.Tensor]:
    from deepspeed.checkpoint import ds_to_universal

    source = Path(job["folder"])
    tag = (source / "latest").read_text()
    out = Path(job["truth"] + "-atoms")
    options = SimpleNamespace(
        input_folder=str(source / tag), output_folder=str(out / "u"), num_extract_workers=1,
        num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
    )  # fmt: skip
    ds_to_universal.main(options)
    found = {}
    shapes = {t["name"]: t["shape"] for t in job["spec"]["tensors"]}
    shapes |= {alias: shapes[name] for alias, name in job["spec"]["tied"].items()}
    for file in sorted((out / "u" / "zero").glob("*/*.pt")):
        value = torch.load(file, weights_only=False)
        tensor = value["param"] if isinstance(value, dict) else value
        name, key = file.parent.name, file.stem
        if key == "step":
            tensor = torch.as_tensor(float(tensor))
        else:
            tensor = tensor.flatten()[: torch.Size(shapes[name]).numel()].reshape(shapes[name])
        found[f"model/{name}" if key == "fp32" else f"optimizer/{name}/{key}"] = tensor.contiguous().clone()
    return found


def _dump(job: dict[str, Any], tensors: dict[str, torch.Tensor], table: dict[str, Any]) -> None:
    save_file(tensors, job["truth"] + ".safetensors")
    with open(job["truth"] + ".json", "w", encoding="utf-8") as out:
        json.dump(table, out)


if __name__ == "__main__":
    serve(run)
