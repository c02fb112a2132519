"""Ways to hold less between F and I, on one worker: peak memory, time per microbatch, and are bits the same?

    python bench/gpu/kept.py                              gpt-1b with 6 layers, one row of 16384 tokens
    python bench/gpu/kept.py --sequence 65536 --depth 4   a long row
    python bench/gpu/kept.py --device cpu --preset gpt-tiny --sequence 256 --depth 2

One JSON line per way. `equal`: the loss and all gradients have the bits of the first way that fits.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also when run by path

import torch
import xxhash

from everstep.engine import device as devices
from everstep.engine.datasets.data import Synthetic
from everstep.engine.layers.gpt import gpt
from everstep.engine.prepare.figures import layer_figures, stage_figures
from everstep.engine.stage.stage import Stage, StageSettings
from everstep.job.presets import shape as named_shape
from harness.quick_weights import quick_weights

GIB = 2.0**30
WAYS: dict[str, dict[str, Any]] = {
    "all kept": {},
    "attention again": {"recompute": 1, "attention_alone": True},
    "every other layer again": {"recompute": 2},
    "every other layer again, the others on the host": {"recompute": 2, "offload": True},
    "on the host": {"offload": True},
    "all layers again": {"recompute": 1},
}


def way(name: str, given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    model = gpt(given.preset, depth=given.depth, context=given.sequence)
    vocab = named_shape(given.preset).vocab
    data = Synthetic(vocab=vocab, sequence=given.sequence, rows=given.rows, seed=1)
    precision = "bf16" if device.type == "cuda" else "fp32"
    layers = range(len(model.layers))
    figures = stage_figures(
        layer_figures(model, data.batch(1, 0), precision, device.type),
        layers,
        **{"recompute": 0, **WAYS[name]},
    )
    settings = StageSettings(precision=precision, **WAYS[name])
    stage = Stage(model, layers, data=data, device=device, settings=settings)
    cuda = device.type == "cuda"
    times = []
    for microbatch in range(given.microbatches):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        began = time.monotonic()
        stage.forward(1, microbatch)
        if cuda:
            torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before if cuda else 0
        stage.input_grad(1, microbatch)
        peak = torch.cuda.max_memory_allocated() - before if cuda else 0
        stage.weight_grad(1, microbatch)
        if cuda:
            torch.cuda.synchronize()
        times.append(time.monotonic() - began)
    bits = xxhash.xxh3_64()
    for microbatch in range(given.microbatches):
        bits.update(stage.loss(1, microbatch).cpu().numpy().tobytes())
    bits.update(stage.take_gradients().cpu().numpy().tobytes())
    return {
        "way": name,
        "held_gib": held / GIB,
        "measured_gib": stage.held_bytes[0] / GIB,
        "model_gib": figures.held_forward / GIB,
        "host_gib": figures.host / GIB,
        "peak_above_weights_gib": peak / GIB,
        "ms_per_microbatch": 1e3 * min(times),
        "bits": bits.hexdigest(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--preset", default="gpt-1b")
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--sequence", type=int, default=16384)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=3)
    parser.add_argument("--ways", default=",".join(WAYS), help="of them, separated by commas")
    given = parser.parse_args()
    device = devices.pick(given.device)
    devices.exact(device)
    quick_weights()
    first, equal = "", True
    for name in [name for name in WAYS if name in given.ways]:
        try:
            row = way(name, given, device)
        except torch.OutOfMemoryError:
            row = {"way": name, "fits": False}
        if "bits" in row:
            first = first or row["bits"]
            equal &= row["bits"] == first
            row["equal"] = row.pop("bits") == first
        print(json.dumps(row), flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
