"""Megatron-LM's checkpoints: `torch_dist`, PyTorch's format with its own keys, and the legacy one. Read only.

    torch_dist   iter_0000100/{metadata.json, common.pt, .metadata, __0_0.distcp}
                 decoder.layers.<...>       all layers stacked along a first axis, or decoder.layers.7.<...>
                 optimizer.state.<key>.<model key>       fp32_param, exp_avg, exp_avg_sq
    legacy       iter_0000100/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt       by tensor, pipeline and expert;
                 an expert rank has its own experts, numbered from 0, and a copy of the rest

Legacy optimizer state is bound to the order of buffers in Megatron's memory and to the run that wrote it; it
is not read, and counts as lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from everstep.errors import UserError
from everstep.layout.box import Box
from everstep.store.index import Refused
from everstep.store.stored import Pieces, Stored
from everstep_convert.formats import dcp_files, pickles, sidecar
from everstep_convert.formats.format import Format, Reading
from everstep_convert.formats.shards import ShardRules
from everstep_convert.patterns import Pattern, Patterns
from everstep_convert.state import TrainingState
from everstep_convert.values import Encoder
from everstep_convert.woven import Woven, WovenBlock, copies

LATEST = "latest_checkpointed_iteration.txt"
_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
_STATE = re.compile(r"optimizer\.state\.(\w+)\.(.+)")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(
    r"(.*\.experts\.(?:local_experts\.(?=\d)|linear_fc[12]\.(?:weight|bias)(?=\d)))(\d+)(.*)"
)
PATTERNS = Patterns(
    (
        Pattern(match=r".*(word_embeddings|output_layer)\.weight", kind="fragment", dim=0, pad_to=1),
        Pattern(match=r".*linear_qkv\.(weight|bias)", kind="fragment", dim=0),
        Pattern(match=r"(?!.*experts\.).*linear_fc1\.(weight|bias)", kind="fragment", dim=0),
        Pattern(match=r".*shared_experts\.linear_fc1\.(weight|bias)", kind="fragment", dim=0),
        Pattern(match=r".*\.experts\..*linear_fc1\.(weight|bias)\d*", kind="fragment", dim=0),
        Pattern(match=r".*(linear_proj|linear_fc2)\.weight\d*", kind="fragment", dim=1),
        Pattern(match=r".*(linear_proj|linear_fc2)\.bias\d*", kind="replicated"),
        Pattern(match=r".*mlp\.(router\.\w+|shared_experts\.gate_weight)", kind="replicated"),
        Pattern(match=r".*(layer_norm_(weight|bias)|layernorm\.(weight|bias))", kind="replicated"),
        Pattern(match=r".*position_embeddings\.weight", kind="replicated"),
    )
)


def folder_of(path: Path) -> Path | None:
    """The iteration's folder, for it or for the folder with the file that names the newest."""
    if (path / LATEST).is_file():
        newest = (path / LATEST).read_text(encoding="utf-8").strip()
        if newest != "release" and not newest.isdigit():
            raise UserError(f"{path / LATEST} says {newest!r}, which is not an iteration.")
        path = path / (newest if newest == "release" else f"iter_{int(newest):07d}")
    is_dist = (path / "metadata.json").is_file() and dcp_files.is_one(path)
    is_legacy = path.is_dir() and any(_RANK.fullmatch(p.name) for p in path.iterdir())
    return path if is_dist or is_legacy else None


def read(path: str | Path, reading: Reading) -> TrainingState:
    folder = folder_of(Path(path))
    if folder is None:
        raise UserError(
            f"{path} has neither metadata.json nor mp_rank_…; give a Megatron checkpoint's folder."
        )
    try:
        if dcp_files.is_one(folder):
            return _read_dist(folder, reading)
        return _read_legacy(folder, reading)
    except Refused as refused:
        raise UserError(f"{path} cannot be read: {refused}.") from refused


# torch_dist.


def _read_dist(folder: Path, reading: Reading) -> TrainingState:
    saved = dcp_files.read_keys(folder)
    state, encoder = TrainingState(), Encoder()
    masters: dict[str, Stored] = {}
    for key, stored in saved.tensors.items():
        match = _STATE.fullmatch(key)
        for name, one in _by_layer(match[2] if match else key, stored):
            if match is None:
                state.tensors[f"model/{name}"] = one
            elif match[1] in ("fp32_param", "param"):
                masters[name] = one
            else:
                state.tensors[f"optimizer/{name}/{match[1]}"] = one
    for name, one in masters.items():
        state.tensors[f"model/{name}"] = one
    if saved.values:
        values = {key: encoder.encode(value, f"megatron/{key}") for key, value in saved.values.items()}
        state.meta["megatron"] = {"values": values}
    state.take(encoder)
    common = pickles.load(folder / "common.pt") if (folder / "common.pt").is_file() else {}
    _take_common(state, common, reading)
    return _stripped(state, reading.vocab)


def _by_layer(key: str, stored: Stored) -> list[tuple[str, Stored]]:
    """A tensor of all layers as one per layer; any other as it is."""
    if not key.startswith("decoder.layers.") or _LAYER.fullmatch(key) or not stored.shape:
        return [(key, stored)]
    rest = stored.shape[1:]
    axes = tuple(range(1, len(stored.shape)))
    whole = Box((0,) * len(rest), rest)
    return [
        (
            f"decoder.layers.{i}.{key.removeprefix('decoder.layers.')}",
            Woven(stored.dtype, rest, (WovenBlock(whole, stored, (i, *(0,) * len(rest)), axes),)),
        )
        for i in range(stored.shape[0])
    ]


def _take_common(state: TrainingState, common: Any, reading: Reading) -> None:
    encoder = Encoder()
    args = common.get("args")
    table = args.__dict__["state"] if isinstance(args, pickles.Opaque) else (args or {})
    groups = ((common.get("optimizer") or {}).get("optimizer") or {}).get("param_groups")
    found = {"args": table, "scheduler": common.get("opt_param_scheduler"), "param_groups": groups}
    held = {key: encoder.encode(value, f"megatron/{key}") for key, value in found.items() if value}
    if held:
        state.meta["megatron"] = {**state.meta.get("megatron", {}), **held}
    state.step = int(common.get("iteration") or 0)
    state.meta["format"] = "megatron"
    state.take(encoder)
    sidecar.guess_roles(state, reading)


def _stripped(state: TrainingState, vocab: int | None) -> TrainingState:
    """Without the rows that pad the vocabulary, if their number is known."""
    if vocab is None:
        return state
    for name, stored in state.tensors.items():
        if (
            re.search(r"(word_embeddings|output_layer)\.weight", name)
            and stored.shape
            and stored.shape[0] > vocab
        ):
            shape = (vocab, *stored.shape[1:])
            box = Box((0,) * len(shape), shape)
            axes = tuple(range(len(shape)))
            state.tensors[name] = Woven(stored.dtype, shape, (WovenBlock(box, stored, box.start, axes),))
    return state


# Legacy.


def _read_legacy(folder: Path, reading: Reading) -> TrainingState:
    files: dict[tuple[int, ...], Any] = {}  # tensor rank, and one or two more: a pipeline's, an expert's
    for path in sorted(folder.iterdir()):
        match = _RANK.fullmatch(path.name)
        if match:
            files[tuple(int(n) for n in match.groups() if n is not None)] = pickles.load(
                path / "model_optim_rng.pt"
            )
    if any("model" not in held for held in files.values()):
        raise Refused("it is of a virtual pipeline (model0, model1, …), which is not supported")
    steps = sorted({int(held.get("iteration") or 0) for held in files.values()})
    if len(steps) > 1:
        raise Refused(f"its files are of iterations {' and '.join(map(str, steps))}; give those of one")
    first = files[min(files)]
    ranks = _by_ranks(files, first)
    tp, pp, ep = (1 + max(rank[i] for rank in ranks) for i in range(3))
    if len(ranks) != tp * pp * ep:
        kinds = f"{pp} stages of {tp}" + (f" with {ep} expert-parallel ranks" if ep > 1 else "")
        raise Refused(f"it has {len(ranks)} ranks, which are not {kinds}")
    state = TrainingState()
    patterns = reading.patterns or _patterns(bool(_argument(first, "swiglu", True)), first["model"], tp)
    rules = ShardRules(patterns, vocab=reading.vocab)
    before = 0
    for stage in range(pp):
        deepest = -1
        for expert in range(ep):
            shards = [ranks[t, stage, expert]["model"] for t in range(tp)]
            names = list(dict.fromkeys(name for shard in shards for name in shard))
            local = _num_experts(names)
            for name in names:
                match = _LAYER.fullmatch(name)
                full = f"decoder.layers.{before + int(match[1])}.{match[2]}" if match else name
                full = _renumbered(full, expert * local)
                deepest = max(deepest, int(match[1]) if match else -1)
                held = {t: shard[name] for t, shard in enumerate(shards) if name in shard}
                if all(isinstance(part, Pieces) for part in held.values()):
                    made = rules.whole(name, held, tp)
                    known = state.tensors.setdefault(f"model/{full}", made)
                    if (
                        known is not made
                    ):  # in every expert rank; tied: the embedding, once more in the last stage
                        places = (
                            "an earlier rank",
                            f"stage {stage}" + (f", expert rank {expert}" if ep > 1 else ""),
                        )
                        made = copies(f"{full!r}", places, [known, made], "restore its files")
                        state.tensors[f"model/{full}"] = made
                elif any(part is not None for part in held.values()):
                    state.lost.append(f"model/{full}")
        before += deepest + 1
    _take_common(state, {key: value for key, value in first.items() if key != "optimizer"}, reading)
    state.lost += [f"legacy {key}" for key in ("optimizer", "rng_state") if first.get(key)]
    return _stripped(state, reading.vocab)


def _argument(held: Any, name: str, otherwise: Any) -> Any:
    """Of Megatron's command line."""
    args = held.get("args")
    return args.get(name, otherwise) if isinstance(args, pickles.Opaque) else otherwise


def _by_ranks(files: Mapping[tuple[int, ...], Any], first: Any) -> dict[tuple[int, int, int], Any]:
    """By tensor, pipeline and expert rank. The second number of `mp_rank_00_001` is the pipeline's, or the
    expert's where there is no pipeline: names do not say which.
    """
    pp = _argument(first, "pipeline_model_parallel_size", None)
    ep = _argument(first, "expert_model_parallel_size", 1) or 1
    tp = 1 + max(rank[0] for rank in files)
    if ep > 1 and _argument(first, "expert_tensor_parallel_size", None) not in (None, tp):
        raise Refused("its experts are split over another number of tensor-parallel ranks than the rest")
    if ep > 1 and any(re.search(r"\.experts\.weight[12]$", name) for name in first["model"]):
        raise Refused("its experts are stacked in one tensor (moe_grouped_gemm), which is not supported")
    found: dict[tuple[int, int, int], Any] = {}
    for rank, held in files.items():
        more = rank[1:]
        if len(more) == 1 and ep > 1:
            if pp is None:
                raise Refused("its files do not say whether they are of pipeline or of expert ranks")
            more = (0, more[0]) if pp == 1 else (more[0], 0)
        found[(rank[0], *more, 0, 0)[:3]] = held  # type: ignore[index]
    if len({rank[2] for rank in found}) != ep:
        raise Refused(f"it has files of {len({r[2] for r in found})} expert-parallel ranks of {ep}")
    return found


def _num_experts(names: Iterable[str]) -> int:
    """Of one rank."""
    return 1 + max((int(match[2]) for name in names if (match := _EXPERT.fullmatch(name))), default=-1)


def _renumbered(name: str, more: int) -> str:
    """An expert's tensor with its number raised; any other as it is."""
    match = _EXPERT.fullmatch(name)
    return name if match is None else f"{match[1]}{int(match[2]) + more}{match[3]}"


def _patterns(swiglu: bool, model: Any, tp: int) -> Patterns:
    """The usual ones; with SwiGLU a shard of fc1 is its part of the gate, then its part of up."""
    if not swiglu:
        return PATTERNS
    found = []
    for pattern in PATTERNS.patterns:
        if "linear_fc1" in pattern.match:
            rows = next((t.shape[0] for n, t in model.items() if re.fullmatch(pattern.match, n)), 0)
            half = rows * tp // 2
            pattern = Pattern(match=pattern.match, kind="fragment", dim=0, parts=(half, half))
        found.append(pattern)
    return Patterns(tuple(found))


FORMAT = Format(
    name="megatron",
    title="Megatron `torch_dist` and legacy",
    reads="yes, legacy with TP, PP and experts",
    writes="no: Megatron Bridge reads `hf`",
    optimizer="of `torch_dist`",
    detects=lambda path: folder_of(path) is not None,
    read=read,
)
