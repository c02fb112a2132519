"""The files of a DeepSpeed checkpoint: where they are, whose they are, and whether one is missing.

A pipeline's parameters are called by their layer (`4.up.weight`); those of a tied module
(`tied_modules.embed.weight`) are in the stage of its layer and in the last one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.errors import UserError

OPTIM = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
LAYER = re.compile(r"layer_(\d+)-(?:model_(\d+)-)?model_states\.pt")  # of a pipeline: layer, tensor rank
EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")

PIPELINE_NAME = re.compile(r"(\d+)\.(.+)")
TIED = re.compile(r"tied_modules\.([^.]+)\.(.+)")
EXPERTS = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..+)")


def global_expert(name: str, first: int) -> str:
    """A rank counts its own experts from 0; the name in the whole model."""
    match = EXPERTS.fullmatch(name)
    return f"{match[1]}{int(match[2]) + first}{match[3]}" if match else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Optimizer and model files by (model-parallel rank, data-parallel rank), layer files by (layer, tensor
    rank), files of experts by (model-parallel rank, number of the MoE layer, expert).
    """

    optims: dict[tuple[int, int], Path]
    models: dict[tuple[int, int], Path]
    layers: dict[tuple[int, int], Path]
    experts: dict[tuple[int, int, int], Path]


def folder_of(path: Path) -> Path | None:
    """The tag's folder, for it or for the folder with `latest`; None if it is not DeepSpeed's."""
    if (path / "latest").is_file():
        tag = (path / "latest").read_text(encoding="utf-8").strip()
        if "/" in tag or tag in ("", ".", ".."):
            raise UserError(f"{path / 'latest'} names {tag!r}, which is not a folder here.")
        if not (path / tag).is_dir():
            raise UserError(f"{path / 'latest'} names {tag!r}, which is not a folder here.")
        path = path / tag
    return path if path.is_dir() and any(OPTIM.fullmatch(p.name) for p in path.iterdir()) else None


def files_in(folder: Path) -> Files:
    found = Files(optims={}, models={}, layers={}, experts={})
    for path in sorted(folder.iterdir()):
        if match := OPTIM.fullmatch(path.name):
            found.optims[int(match[3]), int(match[2])] = path
        elif match := MODEL.fullmatch(path.name):
            found.models[int(match[2]), int(match[1] or 0)] = path
        elif match := LAYER.fullmatch(path.name):
            found.layers[int(match[1]), int(match[2] or 0)] = path
        elif match := EXPERT.fullmatch(path.name):
            found.experts[int(match[3]), int(match[1]), int(match[2])] = path
    if not found.models:
        raise UserError(f"{folder} holds no *_model_states.pt.")
    for mp in {mp for mp, _ in found.optims}:
        ranks = sorted(dp for rank, dp in found.optims if rank == mp)
        if ranks != list(range(len(ranks))):
            raise UserError(f"{folder}: the optimizer files of model rank {mp} are not 0 to {ranks[-1]}.")
    if any(path.name.startswith("zero_pp_rank_") for path in found.models.values()):
        _check_models(folder, found)
    return found


def _check_models(folder: Path, found: Files) -> None:
    """Of ZeRO-3, where every rank has its own: parts of frozen parameters, buffers, random states."""
    missing = sorted(found.optims.keys() - found.models.keys())
    if missing:
        mp, dp = missing[0]
        raise UserError(
            f"{folder}: zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt is missing; restore it."
        )


def check_ranks(folder: Path, optims: dict[tuple[int, int], Path], partitions: Any) -> None:
    """A parameter that only a missing rank has parts of would be taken for a frozen one."""
    counts = partitions if isinstance(partitions, list) else [partitions]
    world = max((count for count in counts if isinstance(count, int)), default=0)
    for mp in sorted({mp for mp, _ in optims}):
        found = sum(rank == mp for rank, _ in optims)
        if found < world:
            raise UserError(
                f"{folder}: the optimizer files of {found} of {world} ranks are there (model rank {mp}); "
                f"restore that of rank {found}."
            )
