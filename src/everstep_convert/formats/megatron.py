"""Megatron-LM's checkpoints: `torch_dist`, which is PyTorch's format with its own keys, and the legacy one.

    torch_dist   iter_0000100/{metadata.json, common.pt, .metadata, __0_0.distcp}
                 decoder.layers.<...>       all layers stacked along a first axis, or decoder.layers.7.<...>
                 optimizer.state.<key>.<model key>       fp32_param, exp_avg, exp_avg_sq
    legacy       iter_0000100/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt       by tensor, pipeline and expert;
                 an expert rank has its own experts, numbered from 0, and a copy of the rest

Counts of steps, groups and whatever else Megatron has no key for are in `common.pt` (legacy: in the first
rank's file) under "everstep". Legacy optimizer state is bound to the order of buffers in Megatron's memory
and to the run that wrote it; it is neither read nor written, and counts as lost.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from everstep.errors import UserError
from everstep.layout.box import Box
from everstep.layout.tensor import Tensor
from everstep.store.index import Refused
from everstep.store.parts import Progress
from everstep.store.stored import Pieces, Stored
from everstep_convert.formats import dcp_files, pickles, sidecar, torchfile
from everstep_convert.formats.format import Format, Reading, Target
from everstep_convert.formats.shards import ShardRules, cut_for
from everstep_convert.formats.torchfile import Global, PickledObject
from everstep_convert.patterns import Pattern, Patterns
from everstep_convert.state import TrainingState
from everstep_convert.values import Encoder, decode, tensors_in
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
    ours = common.get("everstep")
    if isinstance(ours, dict):
        sidecar.apply(state, ours.get("table"))
        state.tensors |= ours.get("tensors") or {}
    else:
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


def write_dist(path: Path, state: TrainingState, target: Target, progress: Progress) -> None:
    """Layers stacked, masters as fp32_param; `fully_reshardable`'s keys, so that any shape can load it."""
    folder = path / f"iter_{state.step:07d}"
    keys: dict[str, Any] = {}
    stacks: dict[str, dict[int, Stored]] = {}
    kept = _without_place(state)
    for name, stored in state.tensors.items():
        key = _dist_key(name)
        match = re.fullmatch(r"(.*)decoder\.layers\.(\d+)\.(.+)", key)
        if name.startswith("optimizer/") and not stored.shape:
            kept[name] = stored  # counts of steps
        elif match and name not in kept:
            stacks.setdefault(f"{match[1]}decoder.layers.{match[3]}", {})[int(match[2])] = stored
        elif name not in kept:
            keys[key] = stored
    for key, layers in stacks.items():
        keys |= _stacked(key, layers)
    if any(key.startswith("optimizer.state.") for key in keys):
        keys |= {
            f"optimizer.state.fp32_param.{k}": v for k, v in keys.items() if not k.startswith("optimizer.")
        }
    values = (state.meta.get("megatron") or {}).get("values") or {}
    keys |= {key: decode(value, state.tensors) for key, value in values.items()}
    dcp_files.write_keys(folder, keys, progress)
    torchfile.save(folder / "common.pt", _common(state, kept), progress)
    backend = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    (folder / "metadata.json").write_text(json.dumps(backend), encoding="utf-8")
    (path / LATEST).write_text(str(state.step), encoding="utf-8")


def _without_place(state: TrainingState) -> dict[str, Stored]:
    """Tensors that Megatron has no key for, less those that are inside its own values."""
    inside = tensors_in(state.meta.get("megatron"))
    return {name: stored for name, stored in state.others().items() if name not in inside}


def _dist_key(name: str) -> str:
    kind, _, rest = name.partition("/")
    if kind == "optimizer":
        parameter, _, key = rest.rpartition("/")
        return f"optimizer.state.{key}.{parameter}"
    return rest


def _stacked(key: str, layers: dict[int, Stored]) -> dict[str, Stored]:
    """The layers as one tensor; a key for each, where they are not alike."""
    count = 1 + max(layers)
    kinds = {(stored.dtype, stored.shape) for stored in layers.values()}
    if len(layers) != count or len(kinds) != 1:
        before, _, after = key.rpartition("decoder.layers.")
        return {f"{before}decoder.layers.{i}.{after}": stored for i, stored in layers.items()}
    rest = layers[0].shape
    axes = tuple(range(len(rest) + 1))
    blocks = tuple(
        WovenBlock(Box((i, *(0,) * len(rest)), (1, *rest)), _Lifted(layers[i]), (0,) * (len(rest) + 1), axes)
        for i in range(count)
    )
    return {key: Woven(layers[0].dtype, (count, *rest), blocks)}


class _Lifted:
    """A tensor with a first axis of one."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self.dtype, self.shape = stored.dtype, (1, *stored.shape)

    def read(self, box: Box, out: Any) -> None:
        self._stored.read(Box(box.start[1:], box.size[1:]), out[0, ...])


def _common(state: TrainingState, kept: Mapping[str, Stored]) -> dict[str, Any]:
    held = state.meta.get("megatron") or {}
    args, scheduler, groups = (
        decode(held.get(key), state.tensors) for key in ("args", "scheduler", "param_groups")
    )
    found: dict[str, Any] = {
        "args": PickledObject(Global("argparse", "Namespace"), dict(args or {})),
        "checkpoint_version": 3.0,
        "iteration": state.step,
        "opt_param_scheduler": scheduler,
        "everstep": {"table": sidecar.table_of(state, without=["megatron"]), "tensors": dict(kept)},
    }
    return {**found, "optimizer": {"optimizer": {"param_groups": groups}}} if groups else found


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
    ours = (first.get("everstep") or {}).get("ranks") or {}
    pp = ours.get("pp", _argument(first, "pipeline_model_parallel_size", None))
    ep = ours.get("ep", _argument(first, "expert_model_parallel_size", 1)) or 1
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


def write_legacy(path: Path, state: TrainingState, target: Target, progress: Progress) -> None:
    folder = path / f"iter_{state.step:07d}"
    tp, pp, ep = target.tp, target.pp, target.ep
    parameters = {**state.parameters(), **state.buffers()}
    layers = 1 + max((int(m[1]) for n in parameters if (m := _LAYER.fullmatch(n))), default=-1)
    if layers % pp:
        raise UserError(f"{layers} layers do not divide into {pp} pipeline stages; change --pp.")
    experts = _num_experts(parameters)
    if ep > 1 and (not experts or experts % ep):
        raise UserError(f"{experts} experts do not divide into {ep} expert-parallel ranks; change --ep.")
    args = (state.meta.get("megatron") or {}).get("args") or {}
    patterns = _patterns(bool(args.get("swiglu", True)), parameters, 1)
    for stage in range(pp):
        here = _stage(parameters, stage, pp, layers // pp)
        for expert, rank in itertools.product(range(ep), range(tp)):
            mine = _of_expert_rank(here, expert, experts // ep)
            model = {name: _shard(patterns, name, stored, rank, tp) for name, stored in mine.items()}
            suffix = (f"_{stage:03d}" if pp > 1 else "") + (f"_{expert:03d}" if ep > 1 else "")
            place = folder / f"mp_rank_{rank:02d}{suffix}"
            place.mkdir(parents=True, exist_ok=True)
            common = _common(state, {} if stage or rank or expert else _without_place(state))
            common["everstep"]["ranks"] = {"pp": pp, "ep": ep}
            torchfile.save(place / "model_optim_rng.pt", {**common, "model": model}, progress)
    (path / LATEST).write_text(str(state.step), encoding="utf-8")


def _stage(parameters: dict[str, Stored], stage: int, pp: int, per: int) -> dict[str, Stored]:
    found = {}
    for name, stored in parameters.items():
        match = _LAYER.fullmatch(name)
        if match:
            if int(match[1]) // per == stage:
                found[f"decoder.layers.{int(match[1]) % per}.{match[2]}"] = stored
        elif (stage == 0) if name.startswith("embedding.") else (stage == pp - 1):
            found[name] = stored
    return found


def _of_expert_rank(tensors: dict[str, Stored], rank: int, each: int) -> dict[str, Stored]:
    """Its own experts, numbered from 0, and all that is not an expert's."""
    found = {}
    for name, stored in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None or int(match[2]) // each == rank:
            found[_renumbered(name, -rank * each)] = stored
    return found


def _shard(patterns: Patterns, name: str, stored: Stored, rank: int, tp: int) -> Stored:
    if tp == 1:
        return stored
    pattern = patterns.of(name)
    tensor = Tensor(name=name, shape=stored.shape, dtype=stored.dtype)
    return cut_for(pattern.shards(tensor, tp)[rank], stored)


FORMAT = Format(
    name="megatron",
    title="Megatron `torch_dist`",
    reads="yes",
    writes="yes, `fully_reshardable` keys",
    optimizer="yes",
    detects=lambda path: folder_of(path) is not None,
    read=read,
    write=write_dist,
)
LEGACY = Format(
    name="megatron-legacy",
    title="Megatron legacy",
    reads="yes, TP, PP and experts",
    writes="yes, TP, PP and experts",
    optimizer="no",
    read=read,
    write=write_legacy,
)
