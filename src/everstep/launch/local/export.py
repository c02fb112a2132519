"""A checkpoint for other programs: a plain state dict, or a folder that transformers loads.

A checkpoint holds what was trained. What was frozen is where training took it from: the folder of the base
model, or the seed; a folder for transformers has it all. Adapters are merged into the weights they adapt, or
written alone.
The whole model passes through memory once.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from everstep.engine.hf.model import Family
from everstep.engine.hf.source import config_of, folder_of, quietly
from everstep.engine.layers.model import Model, drawn
from everstep.engine.prepare.context import refuse_in_import
from everstep.engine.prepare.resolve import resolve
from everstep.errors import UserError
from everstep.store.folder import find
from everstep.store.reader import Checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BESIDE = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written."""

    folder: str
    step: int
    architecture: str
    parameters: int
    from_checkpoint: int  # tensors that were trained
    from_base: int  # tensors that were frozen


def load(path: str | Path, *, ema: bool = False) -> dict[str, Tensor]:
    """The weights of a checkpoint by their names, as `state_dict()` has them: all that was trained.

    `path` is a folder of checkpoints, of which the newest is read, or one step's folder. `ema`: their running
    average, where the run has kept one.
    """
    checkpoint = find(path)
    try:
        return _weights(checkpoint, ema=ema)
    finally:
        checkpoint.close()


def export(
    path: str | Path,
    to: str | Path,
    *,
    model: Model | str | Path | None = None,
    prepare: Callable[[Any], Any] | str | None = None,
    adapters: bool = False,
    dtype: str = "float32",
    ema: bool = False,
) -> Exported:
    """Write a checkpoint of a Hugging Face model as `save_pretrained` would, tokenizer files and all.

    model       the folder of the base model, where it is not where it was; or what `everstep.hf` gave
    prepare     the function that `everstep.hf` was given, or "module:function"; a job file's is known
    adapters    write peft's adapters alone, for `PeftModel.from_pretrained`; else they are merged into the
                weights
    dtype       of the weights: float32, as they were trained, bfloat16 or float16
    ema         the running average of the weights, where the run has kept one
    """
    refuse_in_import("everstep.export")
    if dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}; use one of {', '.join(DTYPES)}.")
    final = Path(to)
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise UserError(f"{str(to)!r} is not empty; give a new folder.")
    checkpoint = find(path)
    try:
        family, made = _family(checkpoint, model, prepare)
        weights = _weights(checkpoint, ema=ema)
        whole, frozen = _filled(family, made, weights, int(checkpoint.meta["seed"]))
        step = checkpoint.step
    finally:
        checkpoint.close()
    whole = whole.to(DTYPES[dtype])
    if not adapters:
        _merge_adapters(whole, family)
    partial = final.with_name(final.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        if adapters:
            count = _save_adapters(whole, partial, family)
        else:
            with quietly():
                whole.save_pretrained(partial)
            count = sum(p.numel() for p in whole.parameters())
            if family.folder is not None:
                _copy_beside(family.folder.path, partial)
        if final.exists():
            final.rmdir()
        os.rename(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(
        folder=str(final),
        step=step,
        architecture=type(whole).__name__,
        parameters=count,
        from_checkpoint=len(weights),
        from_base=frozen,
    )


def _weights(checkpoint: Checkpoint, *, ema: bool = False) -> dict[str, Tensor]:
    prefix = "extra/ema/" if ema else "model/"
    names = [name for name in checkpoint.tensors if name.startswith(prefix)]
    if ema and not names:
        raise UserError("the checkpoint holds no average of the weights; train with ema = 0.999 to have one.")
    return {name.removeprefix(prefix): tensor for name, tensor in checkpoint.read(names).items()}


def _family(
    checkpoint: Checkpoint, given: Model | str | Path | None, prepare: Callable[[Any], Any] | str | None
) -> tuple[Family, Model]:
    meta: Mapping[str, Any] = checkpoint.meta
    told = meta.get("model")
    if prepare is None and isinstance(told, Mapping):  # by a job file
        prepare = told.get("prepare")
    if isinstance(prepare, str):
        prepare = resolve(prepare, "prepare", Path.cwd())
    if isinstance(given, Model):
        made = given
    elif "hf_config" not in meta:
        raise UserError(
            f"{checkpoint} is not of a Hugging Face model; everstep.load reads its weights, and "
            "everstep ckpt convert writes other formats."
        )
    else:
        folder = given or _folder_there(meta)
        config = config_of(dict(meta["hf_config"]), {})
        made = Family(config, None if folder is None else folder_of(folder), prepare).model()
    maker = getattr(made.assembly.join, "__self__", None)
    if not isinstance(maker, Family):
        raise UserError("model is not one that everstep.hf gave; give its folder, or leave it out.")
    return maker, made


def _folder_there(meta: Mapping[str, Any]) -> str | None:
    """The folder that training started from, if it did and if that is still there."""
    there = meta.get("hf_folder")
    return there if there is not None and Path(there).is_dir() else None


def _filled(family: Family, made: Model, weights: dict[str, Tensor], seed: int) -> tuple[Any, int]:
    """The whole model with its values; how many tensors were not trained."""
    whole = family.empty()
    left = dict(weights)
    frozen = 0
    for index, name in enumerate(made.layers):
        module = drawn(made, index, seed)
        for key, parameter in module.named_parameters():
            if (value := left.pop(f"{name}.{key}", None)) is not None:
                parameter.data = value.reshape(parameter.shape)
            else:
                frozen += 1
        _place(whole, name, module)
    if left:
        raise UserError(
            f"the checkpoint has {next(iter(left))!r}, which the model does not have; if it was trained with "
            "prepare, give it: everstep ckpt export ... --prepare module:function, or "
            "everstep.export(..., prepare=...)."
        )
    return whole, frozen


def _merge_adapters(whole: Any, family: Family) -> None:
    """peft's adapters become part of the weights they adapt."""
    for name, module in list(whole.named_modules()):
        if hasattr(module, "merge") and hasattr(module, "get_base_layer"):
            module.merge()
            _place(whole, name, module.get_base_layer())
    if own := sorted(set(whole.state_dict()) - set(family.bare.state_dict())):
        raise UserError(
            f"{own[0]} is not a parameter of a {type(whole).__name__} and cannot be merged into one; read "
            "the weights with everstep.load."
        )
    whole.tie_weights()


def _save_adapters(whole: Any, to: Path, family: Family) -> int:
    """As peft saves them; how many numbers they have."""
    configs = getattr(whole, "peft_config", None)
    if not configs:
        raise UserError("the model has no adapters of peft; leave adapters out to export all of it.")
    import peft

    name, config = next(iter(configs.items()))
    found = peft.get_peft_model_state_dict(whole, adapter_name=name)
    to.mkdir(parents=True)
    # The names that they have in a PeftModel, in which the model is one part of two.
    values = {f"base_model.model.{key}": value.contiguous() for key, value in found.items()}
    save_file(values, to / "adapter_model.safetensors", metadata={"format": "pt"})
    base = None if family.folder is None else str(family.folder.path)
    told = copy.copy(config)
    told.base_model_name_or_path, told.inference_mode = base or config.base_model_name_or_path, True
    told.save_pretrained(str(to))
    return sum(value.numel() for value in values.values())


def _place(whole: nn.Module, name: str, module: nn.Module) -> None:
    path, _, last = name.rpartition(".")
    (whole.get_submodule(path) if path else whole)._modules[last] = module


def _copy_beside(source: Path, target: Path) -> None:
    for pattern in _BESIDE:
        for path in source.glob(pattern):
            if path.is_file() and not (target / path.name).exists():
                shutil.copy2(path, target / path.name)
