"""Hugging Face folders: safetensors under the model's own names, config.json beside them.

    config.json                            kept as it is, given back as it was
    model.safetensors                      or model-00001-of-00003.safetensors with …index.json
    optimizer.safetensors                  ours: optimizer/<parameter>/<key>, when the state has one
    everstep.safetensors                   ours: other tensors by their full names
    everstep.json                          ours: step, groups, tied, buffers, meta

Tied weights are in such a folder once: the second name is missing, and config.json says so.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from everstep.errors import UserError
from everstep.store.index import PART_NAME, Refused, no_duplicates
from everstep.store.parts import CHUNK_BYTES, Progress, header, plan_whole, write_file
from everstep.store.ranges import LocalFile
from everstep.store.reader import safetensors_in
from everstep.store.stored import Stored, num_bytes
from everstep_convert.formats import sidecar
from everstep_convert.formats.format import Format, Reading, Target
from everstep_convert.state import TrainingState, equal

OURS = ("optimizer.safetensors", "everstep.safetensors")
_TIES = {  # model_type: (the name that is missing when tied, the name that is there)
    "llama": ("lm_head.weight", "model.embed_tokens.weight"),
    "gpt2": ("lm_head.weight", "transformer.wte.weight"),
}


def is_one(path: Path) -> bool:
    return (path / "model.safetensors").is_file() or (path / "model.safetensors.index.json").is_file()


WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")


def read(path: str | Path, reading: Reading) -> TrainingState:
    folder = Path(path)
    try:
        state = _read(folder, reading)
    except Refused as refused:
        raise UserError(f"{path} cannot be read: {refused}.") from refused
    config = _json(folder / "config.json")
    if config is not None:
        state.meta["hf_config"] = config
        _find_tie(state, config)
    return state


def _read(path: Path, reading: Reading) -> TrainingState:
    state = TrainingState()
    listed = _listed(path)
    names = dict.fromkeys(listed.values() if listed is not None else ["model.safetensors"])
    surplus = sorted(p.name for p in path.iterdir() if WEIGHTS.fullmatch(p.name) and p.name not in names)
    if surplus:
        there = "model.safetensors" if listed is None else "the files of model.safetensors.index.json"
        raise Refused(f"{surplus[0]} is there beside {there}; move away what is not of this checkpoint")
    for name in names:
        for key, stored in _tensors(path, name).items():
            if f"model/{key}" in state.tensors:
                raise Refused(f"tensor {key!r} is in two files")
            state.tensors[f"model/{key}"] = stored
    lost = next((key for key in listed or () if f"model/{key}" not in state.tensors), None)
    if lost is not None:
        raise Refused(f"model.safetensors.index.json names tensor {lost!r}, which is in no file")
    for name in OURS:
        if (path / name).is_file():
            state.tensors |= _tensors(path, name)
    ours = _json(path / "everstep.json")
    if ours is not None:
        sidecar.apply(state, ours)
    else:
        sidecar.guess_roles(state, reading)
    return state


def _listed(path: Path) -> dict[str, str] | None:
    """The file of each tensor, as the index has it; None: there is no index."""
    index = _json(path / "model.safetensors.index.json")
    if index is None:
        return None
    listed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(listed, dict):
        raise Refused("model.safetensors.index.json has no table weight_map")
    wrong = next((f for f in listed.values() if not isinstance(f, str) or not PART_NAME.fullmatch(f)), None)
    if wrong is not None:
        raise Refused(f"model.safetensors.index.json names {wrong!r}, which is not a file of this folder")
    return listed


def _tensors(path: Path, name: str) -> dict[str, Stored]:
    if not (path / name).is_file():
        raise Refused(f"{name} is missing")
    return safetensors_in(LocalFile(path / name), name)


def _json(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}.") from None


def _find_tie(state: TrainingState, config: dict[str, Any]) -> None:
    pair = _TIES.get(str(config.get("model_type")))
    if pair is None or not config.get("tie_word_embeddings", pair == _TIES["gpt2"]):
        return
    missing, there = pair
    if f"model/{there}" not in state.tensors:  # saved from the inner model, without its prefix
        there = there.partition(".")[2]
    if f"model/{missing}" not in state.tensors and f"model/{there}" in state.tensors:
        state.tied[missing] = there


def write(path: Path, state: TrainingState, target: Target, progress: Progress) -> None:
    config = state.meta.get("hf_config")
    model = {**state.parameters(), **state.buffers()}
    _drop_tied(model, state, config)
    shards = _shards(model, target.shard_bytes)
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        total = sum(num_bytes(stored) for stored in model.values())
        where = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        _write_json(
            path / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where}
        )
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(path / name, shard, target.threads, progress)
    optimizer = {name: stored for name, stored in state.tensors.items() if name.startswith("optimizer/")}
    for name, tensors in zip(OURS, (optimizer, state.others()), strict=True):
        if tensors:
            write_safetensors(path / name, tensors, target.threads, progress)
    if config is not None:
        _write_json(path / "config.json", config)
    _write_json(path / "everstep.json", sidecar.table_of(state, without=["hf_config"]))


def write_safetensors(path: Path, tensors: dict[str, Stored], threads: int, progress: Progress) -> None:
    slices = plan_whole(tensors)
    head, places, total = header(slices, {"format": "pt"})
    with open(path, "wb", buffering=0) as out:
        write_file(out, head, slices, places, threads, CHUNK_BYTES, progress)
        out.truncate(total)


def _drop_tied(model: dict[str, Stored], state: TrainingState, config: Any) -> None:
    """The second name of a tied pair is not written, if it is the same tensor indeed."""
    pair = _TIES.get(str((config or {}).get("model_type")))
    if pair is None or not config.get("tie_word_embeddings", pair == _TIES["gpt2"]):
        return
    second, first = pair
    if second in model and first in model:
        if not equal(model[second], model[first]):
            raise UserError(f"config.json ties {second!r} to {first!r}, and their values differ; untie them.")
        del model[second]


def _shards(model: dict[str, Stored], limit: int) -> list[dict[str, Stored]]:
    found: list[dict[str, Stored]] = [{}]
    size = 0
    for name, stored in model.items():
        if size and size + num_bytes(stored) > limit:
            found.append({})
            size = 0
        found[-1][name] = stored
        size += num_bytes(stored)
    return found


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


FORMAT = Format(
    name="hf",
    title="Hugging Face safetensors",
    reads="yes, also sharded",
    writes="yes, also sharded",
    optimizer="in a file of ours beside it",
    detects=is_one,
    read=read,
    write=write,
)


def llama_config(state: TrainingState, heads: int = 0, kv_heads: int = 0) -> dict[str, Any]:
    """The config.json of our GPT as a Llama: the same arithmetic, so transformers can run what we trained."""
    shapes = {name: stored.shape for name, stored in state.parameters().items()}
    card = state.meta.get("model") or {}
    query = heads or int(card.get("heads") or 0)
    if not query:
        raise UserError("the checkpoint does not say how many heads the model has; give --heads.")
    vocab, width = shapes["embed.tokens.weight"]
    size = width // query
    embed, head = (state.tensors[f"model/{n}"] for n in ("embed.tokens.weight", "head.logits.weight"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": shapes["blocks.0.mlp.gate.weight"][0],
        "num_hidden_layers": sum(name.endswith(".attention.q.weight") for name in shapes),
        "num_attention_heads": query,
        "num_key_value_heads": kv_heads or shapes["blocks.0.attention.k.weight"][0] // size,
        "head_dim": size,
        "max_position_embeddings": int(card.get("context") or 2048),
        "rms_norm_eps": 1e-6,
        "rope_theta": float(card.get("rope_base") or 10_000.0),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": bool(card.get("tied")) and equal(embed, head),
        "torch_dtype": "float32",
    }
