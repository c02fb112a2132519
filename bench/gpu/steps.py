"""Step times on one GPU: a plain torch loop, and Everstep in several shapes that share the GPU.

    python bench/gpu/steps.py                        gpt-350m: plain loop, 1 x 1, 2 x 1, 2 x 2
    python bench/gpu/steps.py --preset gpt-1b --microbatches 4 --shapes 1x1 \\
        --job '{"compile": true}' '{"compile": true, "accumulate": "fp32"}'
    python bench/gpu/steps.py --hf llama-1b --rows 4 --microbatches 4 --shapes 1x1
    python bench/gpu/steps.py --hf config.json --json

All train the same number of microbatches per step on the same data. The plain loop is a process of its own,
eager and compiled: fp32 masters, bf16 compute, fused AdamW, clipped norm. Everstep is what a job gives.
Memory is that of the GPU above what was in use before. Under MPS (`--mps`) processes that share the GPU run
at the same time; without it they take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # where nothing can be installed

from everstep.job.job import Job  # noqa: E402
from everstep.job.presets import flops_per_token, shape  # noqa: E402
from everstep.launch.local.run import LocalTask  # noqa: E402
from everstep.node.fork_server import ForkServer  # noqa: E402
from harness.mps import mps  # noqa: E402

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


class Batches:
    """Of a Hugging Face model, for a job (`data.build`) and for the plain loop."""

    def __init__(self, *, vocab: int, rows: int, sequence: int) -> None:
        self._vocab, self._shape = vocab, (rows, sequence)

    def batch(self, step: int, microbatch: int) -> dict[str, Any]:
        import torch

        draw = torch.Generator().manual_seed(1000 * step + microbatch)
        x = torch.randint(0, self._vocab, self._shape, generator=draw)
        return {"input_ids": x, "labels": x}


def batches_of(spec: dict[str, Any]) -> dict[str, Any]:
    return {"vocab": spec["hf"]["vocab_size"], "rows": spec["rows"], "sequence": spec["sequence"]}


def plain_loop(spec: dict[str, Any]) -> dict[str, Any]:
    """What a careful person writes."""
    import torch

    torch.set_float32_matmul_precision("high")
    step = (_hf_loop if spec["hf"] else _preset_loop)(spec)
    wait = torch.cuda.synchronize if spec["device"] == "cuda" else lambda: None
    times, losses = [], []
    for number in range(1, spec["steps"] + 1):
        began = time.monotonic()
        losses.append(step(number))
        wait()
        times.append(time.monotonic() - began)
    return {"times": times, "losses": losses, "first_step_after_s": round(times[0], 1)}


def _hf_loop(spec: dict[str, Any]) -> Callable[[int], float]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(spec["device"]):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec["hf"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    forward = torch.compile(model) if spec["compile"] else model
    data = Batches(**batches_of(spec))

    def step(number: int) -> float:
        total = 0.0
        for microbatch in range(spec["microbatches"]):
            given = {
                k: t.to(spec["device"], non_blocking=True) for k, t in data.batch(number, microbatch).items()
            }
            with torch.autocast(spec["device"], torch.bfloat16):
                loss = forward(**given, use_cache=False).loss
            (loss / spec["microbatches"]).backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(total) / spec["microbatches"]

    return step


def _preset_loop(spec: dict[str, Any]) -> Callable[[int], float]:
    import copy

    import torch
    from torch import nn

    from everstep.engine.datasets.data import Synthetic
    from everstep.engine.layers.gpt import gpt
    from everstep.engine.layers.model import built
    from everstep.engine.state.optimizer import adamw

    form = shape(spec["preset"])
    model = gpt(spec["preset"])
    with torch.device(spec["device"]):  # a large model's weights take long to draw on the host
        masters = [built(model, name) for name in model.layers]
    layers: list[Any] = [copy.deepcopy(layer).bfloat16() for layer in masters]
    named = [(f"{i}.{n}", p) for i, layer in enumerate(masters) for n, p in layer.named_parameters()]
    working = [p for layer in layers for p in layer.parameters()]
    optimizer = adamw(lr=3e-4)(named)

    def tail(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(layers[-1](x).float().flatten(0, -2), y.flatten())

    if spec["compile"]:
        layers[1:-1] = [torch.compile(layer) for layer in layers[1:-1]]
        tail = torch.compile(tail)  # type: ignore[assignment]
    data = Synthetic(vocab=form.vocab, sequence=form.context, rows=spec["rows"])
    sums = [torch.zeros_like(p) for _, p in named]

    def step(number: int) -> float:
        total = []
        for microbatch in range(spec["microbatches"]):
            x, y = (t.to(spec["device"], non_blocking=True) for t in data.batch(number, microbatch))
            for layer in layers[:-1]:
                x = layer(x)
            loss = tail(x, y)
            loss.backward()
            with torch.no_grad():
                torch._foreach_add_(sums, [p.grad for p in working])
            for p in working:
                p.grad = None
            total.append(loss.detach())
        torch._foreach_div_(sums, spec["microbatches"])
        norm = torch.nn.utils.get_total_norm(sums)
        torch._foreach_mul_(sums, torch.clamp(1.0 / norm, max=1.0))
        for (_, p), g in zip(named, sums, strict=True):
            p.grad = g
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(working, [p.detach() for _, p in named])
            torch._foreach_zero_(sums)
        return float(torch.stack(total).mean())

    return step


def everstep_run(spec: dict[str, Any], server: ForkServer, folder: Path) -> dict[str, Any]:
    replicas, stages = map(int, spec["shape"].split("x"))
    model: dict[str, Any] = {"preset": spec["preset"]}
    data: dict[str, Any] = {"kind": "synthetic", "rows": spec["rows"]}
    if spec["hf"]:
        (folder / "config.json").write_text(json.dumps(spec["hf"]))
        model = {"hf": str(folder)}
        data = {"build": "bench.gpu.steps:Batches", "options": batches_of(spec)}
    job = Job.from_dict(
        {
            "model": model,
            "data": data,
            "steps": spec["steps"],
            "replicas": replicas,
            "stages": stages,
            "microbatches": spec["microbatches"] // replicas,
            "precision": "bf16",
            "device": spec["device"],
            "optimizer": {"decay": "constant"},
            **spec["job"],
        }
    )
    rows: list[Any] = []
    began = time.monotonic()
    first_s = 0.0

    def watch(kind: str, what: Any) -> None:
        nonlocal first_s
        if kind == "step":
            first_s = first_s or time.monotonic() - began
            rows.append(what)
            print(f"  step {what.step} {what.seconds:.3f} s", file=sys.stderr, flush=True)
        elif kind == "tick" and time.monotonic() - began > spec["limit"]:
            raise RuntimeError(f"{len(rows)} steps in {spec['limit']:.0f} s")

    outcome = LocalTask(replace(job, base=str(ROOT)), fork_server=server, watch=watch).run()
    for incident in outcome.incidents:  # its steps are no measure of speed
        evidence = "; ".join(f"{one.source}: {one.text}" for one in incident.evidence)
        about = f"{incident.workers} in step {incident.step}, {incident.what}; {incident.label}; {evidence}"
        print(f"  incident: {about}\n{incident.traceback}", file=sys.stderr, flush=True)
    if outcome.failure is not None:
        raise RuntimeError(outcome.failure)
    times, losses = [row.seconds for row in rows], [row.loss for row in rows]
    return {"times": times, "losses": losses, "first_step_after_s": round(first_s, 1)}


def plain_run(spec: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own, so that nothing is left on the GPU."""
    command = [sys.executable, __file__, "--spec", json.dumps(spec)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=spec["limit"], check=False)
    if ran.returncode:
        raise RuntimeError(ran.stderr)
    made: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return made


@contextmanager
def peak_gib() -> Iterator[list[float]]:
    """The most memory of the GPU in use, above what was in use before; nothing where there is no GPU."""
    found: list[float] = []
    over = threading.Event()

    def used() -> float:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return max(map(float, subprocess.run(command, capture_output=True, text=True).stdout.split()))

    def sample() -> None:
        before = used()
        while not over.wait(0.2):
            found[:] = [max(*found, (used() - before) / 1024)] if found else [0.0]

    thread = threading.Thread(target=sample, daemon=True)
    if Path("/proc/driver/nvidia").exists():
        thread.start()
    yield found
    over.set()
    if thread.ident:
        thread.join()


def figures(spec: dict[str, Any], run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    with peak_gib() as peak:
        try:
            found = run()
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            return {"what": spec["what"], "failed": str(error)[-300:]}
    step_s = statistics.median(found["times"][spec["warmup"] :])
    form = shape(spec["preset"])
    tokens = spec["rows"] * spec["microbatches"] * (spec["sequence"] if spec["hf"] else form.context)
    flops = 0.0 if spec["hf"] else flops_per_token(form) * tokens
    return {
        "what": spec["what"],
        "step_s": round(step_s, 4),
        "mean_s": round(statistics.fmean(found["times"][spec["warmup"] :]), 4),
        "tokens_per_s": round(tokens / step_s),
        "tflops": round(flops / step_s / 1e12, 1),
        "peak_gib": round(peak[0], 1) if peak else None,
        "first_step_after_s": found["first_step_after_s"],
        "first_loss": found["losses"][0],
        "last_loss": found["losses"][-1],
        "times": [round(one, 3) for one in found["times"]],
    }


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--preset", default="gpt-350m")
    parser.add_argument("--hf", metavar="NAME|FILE", help=f"{', '.join(MODELS)}, or a config.json")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=2048, help="of a Hugging Face model")
    parser.add_argument("--microbatches", type=int, default=8, help="of the whole step")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--shapes", nargs="*", default=["1x1", "2x1", "2x2"])
    parser.add_argument("--plain", nargs="*", choices=["eager", "compiled"], default=["eager", "compiled"])
    parser.add_argument("--job", nargs="*", default=["{}"], help="keys of the job, as JSON; several: in turn")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds, of one contestant")
    parser.add_argument("--mps", action="store_true", help="start MPS, and stop it at the end")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--spec", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.spec:
        print(json.dumps(plain_loop(json.loads(args.spec))))
        return 0
    names = ("preset", "rows", "sequence", "microbatches", "steps", "warmup", "device", "limit")
    same = {name: getattr(args, name) for name in names}
    same["hf"] = args.hf and (MODELS.get(args.hf) or json.loads(Path(args.hf).read_text()))
    rows = []
    with (
        mps(args.mps),
        closing(ForkServer().start()) as server,  # one for all: it loads torch once
        tempfile.TemporaryDirectory() as folder,
    ):
        for how in args.plain:
            spec = {**same, "what": f"plain loop, {how}", "compile": how == "compiled"}
            rows.append(figures(spec, lambda spec=spec: plain_run(spec)))
            print(rows[-1], file=sys.stderr if args.json else sys.stdout, flush=True)
        for text in args.job:
            for form in args.shapes:
                spec = {**same, "what": f"everstep {form} {text}", "shape": form, "job": json.loads(text)}
                rows.append(figures(spec, lambda spec=spec: everstep_run(spec, server, Path(folder))))
                print(rows[-1], file=sys.stderr if args.json else sys.stdout, flush=True)
    if args.json:
        print(json.dumps({**same, "mps": args.mps, "rows": rows}))
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sys.exit(main())
