"""Hugging Face models on one GPU: a plain loop with autocast, eager and compiled, and one worker of Everstep.

    python bench/gpu/hf.py                              a Llama of 1.5 B parameters, all contestants in turn
    python bench/gpu/hf.py --model qwen3-moe --only plain-compiled everstep-compiled
    python bench/gpu/hf.py --profile --json             and where the time goes, by kind of kernel

Every contestant is a fresh process and trains the same number of tokens per step, with AdamW and a clipped
norm. A worker of Everstep runs the ops of its real schedule (`harness.one_worker`); its sums are strict
unless its name says otherwise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # where nothing can be installed

MODELS: dict[str, dict[str, Any]] = {
    "llama-1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "head_dim": 64,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 768,
        "num_experts": 32,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    },
}
CONTESTANTS: dict[str, dict[str, Any]] = {
    "plain": {"compile": False},
    "plain-compiled": {"compile": True},
    "everstep": {"compile": False},
    "everstep-compiled": {"compile": True},
    "everstep-compiled-fp32": {"compile": True, "accumulate": "fp32"},
    "everstep-compiled-launched": {"compile": True, "graphs": "never"},
}
KINDS = {  # of kernels, by a word in their name; the first that fits
    "attention": ("flash", "fmha", "attention", "cudnn_generated"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "splitK", "xmma"),
    "strict sums": ("add_kernel", "mean_kernel"),
    "fused": ("triton",),
    "optimizer": ("adam", "multi_tensor"),
    "embedding": ("embedding", "indexing", "sort", "Radix"),
    "copies": ("Memcpy", "Memset", "copy_kernel", "direct_copy", "CatArray"),
    "softmax": ("softmax", "nll"),
    "pointwise": ("elementwise", "vectorized"),
    "reductions": ("reduce",),
}


def contestant(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """In a fresh process: seconds per step, the peak of memory, and kernels by kind if asked for."""
    import torch

    from harness.quick_weights import quick_weights

    torch.set_num_threads(8)
    quick_weights()
    step = (_plain if name.startswith("plain") else _ours)(CONTESTANTS[name], args)
    cuda = args.device == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    began, times = time.monotonic(), []
    for number in range(1, args.steps + 1):
        wait()
        at = time.perf_counter()
        step(number)
        wait()
        times.append(time.perf_counter() - at)
    made: dict[str, Any] = {
        "contestant": name,
        "seconds per step": round(statistics.median(times[args.warmup :]), 4),
        "fastest": round(min(times[args.warmup :]), 4),
        "first step after": round(times[0], 1),
        "seconds in all": round(time.monotonic() - began, 1),
        "peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 1) if cuda else None,
        "reserved GiB": round(torch.cuda.max_memory_reserved() / 2**30, 1) if cuda else None,
    }
    if args.profile and cuda:
        made |= _profiled(lambda: (step(args.steps + 1), wait()))
    return made


def _profiled(run: Callable[[], object]) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
    kernels = [event for event in found.events() if event.device_type.name == "CUDA" and event.device_time]
    by_kind, by_name, calls = Counter[str](), Counter[str](), Counter[str]()
    for event in kernels:
        kind = next((k for k, words in KINDS.items() if any(w in event.name for w in words)), "other")
        by_kind[kind] += event.device_time
        by_name[event.name[:90]] += event.device_time
        calls[event.name[:90]] += 1
    ends = [event.time_range.end for event in kernels], [event.time_range.start for event in kernels]
    return {
        "ms between first and last kernel": round((max(ends[0]) - min(ends[1])) / 1e3, 1),
        "ms busy": round(sum(by_kind.values()) / 1e3, 1),
        "kinds": {kind: round(value / 1e3, 1) for kind, value in by_kind.most_common()},
        "kernels": [[name, round(v / 1e3, 1), calls[name]] for name, v in by_name.most_common(30)],
    }


def _plain(settings: dict[str, Any], args: argparse.Namespace) -> Callable[[int], None]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_float32_matmul_precision("high")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[args.model])).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward = torch.compile(model) if settings["compile"] else model

    def step(number: int) -> None:
        for microbatch in range(args.microbatches):
            x = tokens(args, number, microbatch).to(args.device, non_blocking=True)
            with torch.autocast(args.device, torch.bfloat16):
                loss = forward(input_ids=x, labels=x, use_cache=False).loss
            (loss / args.microbatches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _ours(settings: dict[str, Any], args: argparse.Namespace) -> Callable[[int], None]:
    import torch

    from everstep.engine import device as devices
    from everstep.engine.layers import regions
    from everstep.job.job import DataSpec, Job, ModelSpec, OptimizerSpec
    from harness.one_worker import OneWorker

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[args.model]))
        job = Job(
            model=ModelSpec(hf=folder),
            data=DataSpec(
                build="bench.gpu.hf:Batches",
                options={key: getattr(args, key) for key in ("model", "rows", "sequence")},
            ),
            optimizer=OptimizerSpec(lr=1e-4, clip=1.0),
            precision="bf16",
            microbatches=args.microbatches,
            device=args.device,
            **settings,
        )
        if job.compiles:
            regions.enable()
        if job.accumulate != "fp32" and args.device == "cuda":
            devices.exact(torch.device("cuda"))
        worker = OneWorker(job, 0, cap=args.cap)
    return lambda number: (worker.step(number), None)[1]


def tokens(args: Any, step: int, microbatch: int) -> Any:
    import torch

    draw = torch.Generator().manual_seed(1000 * step + microbatch)
    return torch.randint(0, MODELS[args.model]["vocab_size"], (args.rows, args.sequence), generator=draw)


class Batches:
    """For a job: `data.build`."""

    def __init__(self, **given: Any) -> None:
        self._given = argparse.Namespace(**given)

    def batch(self, step: int, microbatch: int) -> dict[str, Any]:
        x = tokens(self._given, step, microbatch)
        return {"input_ids": x, "labels": x}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="llama-1b")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--cap", type=int, help="microbatches a worker may hold; else as in a run")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=4, help="steps that do not count")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--profile", action="store_true", help="one more step, by kind of kernel")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for a contestant")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(contestant(args.child, args)))
        return 0
    found = []
    for name in args.only:
        command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--child", name]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=args.limit)
            row = (
                json.loads(ran.stdout.splitlines()[-1])
                if ran.returncode == 0
                else {"error": ran.stderr[-1500:]}
            )
        except subprocess.TimeoutExpired:
            row = {"error": f"not done within {args.limit:.0f} s"}
        found.append({"contestant": name, **row})
        if not args.json:
            print("  ".join(f"{key}: {value}" for key, value in found[-1].items()), flush=True)
    if args.json:
        print(json.dumps(found))
    return 0 if not any("error" in row for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
