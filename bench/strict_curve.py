"""Loss curves of one training under every kind of sum, on real English text.

    python bench/strict_curve.py                          gpt-1m, 300 steps, a table
    python bench/strict_curve.py --steps 600 --plot curve.svg --json

The text is Python's own language reference (`pydoc_data.topics`), byte by byte: real prose, the same on every
machine with the same Python. All runs have the same weights and batches. "fp32, backwards" adds the same
microbatches in the opposite order: what it differs from "fp32" is what rounding alone does to a curve.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

import torch

from everstep.engine.keys import DATA, draws, key
from everstep.engine.layers.gpt import gpt
from everstep.engine.stage.stage import Stage
from everstep.engine.state.optimizer import Updater, adamw
from everstep.engine.worker.step_tensors import StepTensors
from everstep.job import presets
from everstep.protocol.ops import Worker
from everstep.protocol.work import AssembleSum, SumChunk
from harness.one_worker import OnTheDevice

RUNS = {
    "fp32": ("fp32", False),
    "fp32, backwards": ("fp32", True),
    "fp64": ("fp64", False),
    "strict": ("strict", False),
    "strict, backwards": ("strict", True),
    "strict32": ("strict32", False),
    "strict32, backwards": ("strict32", True),
}
CLIP = 1.0


class Prose:
    """Windows of the text; the last tenth is for validation, as microbatches of step 0."""

    def __init__(self, rows: int, sequence: int) -> None:
        text = "\n".join(pydoc_data.topics.topics.values()).encode()
        self._tokens = torch.tensor(list(text), dtype=torch.int64)
        self.rows, self.sequence = rows, sequence
        self.bytes = len(text)

    def batch(self, step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        cut = self.bytes * 9 // 10
        low, high = (cut, self.bytes) if step == 0 else (0, cut)
        words = draws(key(0, DATA, step, microbatch), self.rows)
        starts = [low + int(word) % (high - low - self.sequence - 1) for word in words]
        windows = torch.stack([self._tokens[s : s + self.sequence + 1] for s in starts])
        return windows[:, :-1], windows[:, 1:]


def train(
    kind: str, backwards: bool, args: argparse.Namespace, data: Prose, tell: Any
) -> tuple[list[float], float, int]:
    """The loss of every step, that of validation after the last, and how many sums were promoted."""
    form = presets.shape(args.preset, vocab=256, context=args.sequence)
    model = gpt(**{name: getattr(form, name) for name in ("vocab", "width", "heads", "hidden", "depth")})
    stage = Stage(
        model,
        range(len(model.layers)),
        data=data,
        device=torch.device(args.device),
        precision=args.precision,
        accumulate=kind,
        contributions=args.microbatches,
    )
    updater = Updater(stage, adamw(lr=args.lr), lambda step: min(1.0, step / 20))
    tensors = StepTensors(
        Worker(0, 0),
        stage,
        updater,
        replicas=1,
        borrowed=lambda tensor: False,
        shared=OnTheDevice(stage.device),
    )
    losses, promoted = [], 0
    order = range(args.microbatches)
    for step in range(1, args.steps + 1):
        for microbatch in reversed(order) if backwards else order:
            stage.forward(step, microbatch)
            stage.input_grad(step, microbatch)
            stage.weight_grad(step, microbatch)
        promoted += stage.sums.num_promoted
        squares = sum(tensors.sum_chunk(SumChunk(step, (0,), (), args.microbatches)))
        tensors.assemble(AssembleSum(step, (0,), ()))
        scale = min(1.0, CLIP / squares**0.5)
        updater.apply(step, tensors.sum_of(step), scale)
        tensors.updated(step)
        tensors.release_sum(step)
        losses.append(statistics.fmean(float(stage.loss(step, m)) for m in order))
        tell(f"{kind}{', backwards' if backwards else ''}: step {step}, loss {losses[-1]:.4f}")
    validation = []
    for microbatch in range(32):
        stage.forward(0, microbatch)
        validation.append(float(stage.loss(0, microbatch)))
        stage.discard()
    return losses, statistics.fmean(validation), promoted


def summary(curves: dict[str, Any], reference: str) -> list[dict[str, Any]]:
    rows = []
    for name, (losses, validation, promoted, seconds) in curves.items():
        apart = [abs(a - b) for a, b in zip(losses, curves[reference][0], strict=True)]
        tenth = max(1, len(losses) // 10)
        rows.append(
            {
                "sums": name,
                "first": losses[0],
                "last_tenth": statistics.fmean(losses[-tenth:]),
                "validation": validation,
                "mean_difference": statistics.fmean(apart),
                "largest_difference": max(apart),
                "promoted_sums": promoted,
                "seconds_per_step": seconds / len(losses),
            }
        )
    return rows


def plot(curves: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6))
    for name, (losses, *_) in curves.items():
        above.plot(losses, label=name, linewidth=0.8)
        below.plot([a - b for a, b in zip(losses, curves["fp32"][0], strict=True)], linewidth=0.6)
    above.set_ylabel("loss")
    above.legend()
    below.set_ylabel("loss - that of fp32")
    below.set_xlabel("step")
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="gpt-1m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--only", nargs="*", default=[], choices=[*RUNS])
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.device != "cpu":
        torch.use_deterministic_algorithms(True)
    data = Prose(args.rows, args.sequence)
    curves: dict[str, Any] = {}
    for name in args.only or RUNS:
        began = time.monotonic()
        made = train(*RUNS[name], args, data, lambda line: print(line, file=sys.stderr, end="\r"))
        curves[name] = (*made, time.monotonic() - began)
    rows = summary(curves, next(iter(curves)))
    if args.plot:
        plot(curves, args.plot)
    if args.json:
        print(
            json.dumps(
                {"bytes_of_text": data.bytes, "rows": rows, "curves": {n: c[0] for n, c in curves.items()}}
            )
        )
        return 0
    print(
        f"{args.preset}, {args.steps} steps of {args.microbatches} microbatches of {args.rows} x "
        f"{args.sequence} bytes, {args.precision} on {args.device}; {data.bytes / 1e3:.0f} kB of prose"
    )
    print(
        f"{'sums':22} {'last tenth':>10} {'validation':>10} {'|difference| mean, largest':>28} "
        f"{'promoted':>9} {'s/step':>7}"
    )
    for row in rows:
        print(
            f"{row['sums']:22} {row['last_tenth']:10.5f} {row['validation']:10.5f} "
            f"{row['mean_difference']:14.2e} {row['largest_difference']:13.2e} {row['promoted_sums']:9} "
            f"{row['seconds_per_step']:7.3f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
