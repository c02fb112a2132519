"""DeepSpeed's own side of a case: train and save, or load. Run by a Python that has it.

save        two steps of training, `save_checkpoint`, and what the engine then holds
load        `load_checkpoint` into an engine with other values, and what it then holds
"""

from __future__ import annotations

import json
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


def _dump(job: dict[str, Any], tensors: dict[str, torch.Tensor], table: dict[str, Any]) -> None:
    save_file(tensors, job["truth"] + ".safetensors")
    with open(job["truth"] + ".json", "w", encoding="utf-8") as out:
        json.dump(table, out)


if __name__ == "__main__":
    serve(run)
