"""Attention with the same bits every time: which kernels have it, and what each costs.

    python bench/gpu/attention.py                  as in gpt-1b: 8 rows, 16 heads of 128, 2048 long
    python bench/gpu/attention.py --rows 8 --heads 16 --size 64 --length 1024 --json

    sdpa            what torch chooses by itself, and by itself under `use_deterministic_algorithms`
    cudnn           cuDNN's kernels, called by their own name; backward with or without room for all of dP
    cudnn + flash   cuDNN's forward, flash attention's exact backward

Each way runs in a process of its own, for cuDNN reads its limit once. `differing` counts backward passes, of
`--repeats`, that gave other bits than the first while another stream kept the device busy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

WAYS = ("sdpa", "sdpa exact", "cudnn", "cudnn with room", "cudnn + flash", "efficient exact")
LIMIT = "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT"  # bytes; -1: none


def measure(given: argparse.Namespace) -> dict[str, Any]:
    import torch
    from torch import Tensor
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    aten = torch.ops.aten
    if given.way not in ("sdpa", "cudnn"):
        torch.use_deterministic_algorithms(True)
    draw = torch.Generator("cuda").manual_seed(1)
    shape = (given.rows, given.length, given.heads, given.size)
    q, k, v, grad = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=draw).transpose(1, 2)
        for _ in range(4)
    )

    def cudnn_forward() -> tuple[Any, ...]:
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)

    def flash_backward(made: tuple[Any, ...]) -> tuple[Tensor, ...]:
        out, lse, cq, ck, mq, mk, seed, offset, _ = made
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.reshape(lse.shape[:3]), cq, ck, mq, mk, 0.0, True, seed, offset
        )

    def sdpa_forward() -> Any:
        ours = [t.detach().requires_grad_() for t in (q, k, v)]
        if "cudnn" in given.way:
            return aten._scaled_dot_product_cudnn_attention(*ours, None, True, 0.0, True, False)[0], ours
        if given.way.startswith("efficient"):
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                return F.scaled_dot_product_attention(*ours, is_causal=True), ours
        return F.scaled_dot_product_attention(*ours, is_causal=True), ours

    def sdpa_backward(made: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(made[0], made[1], grad, retain_graph=True)

    forward: Callable[[], Any] = sdpa_forward
    backward: Callable[[Any], tuple[Tensor, ...]] = sdpa_backward
    if "flash" in given.way:
        forward, backward = cudnn_forward, flash_backward

    def timed(run: Callable[[], Any]) -> float:
        for _ in range(3):
            run()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(given.times):
            run()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / given.times

    made = forward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    reference = backward(made)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    found: dict[str, Any] = {"way": given.way, "backward_mib": round(peak / 2**20)}
    found |= {"forward_ms": round(timed(forward), 3), "backward_ms": round(timed(lambda: backward(made)), 3)}
    beside, busy = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    differing = other_out = 0
    for number in range(given.repeats):
        with torch.cuda.stream(beside):
            for _ in range(number % 7):
                torch.mm(busy, busy)
        other_out += not torch.equal(forward()[0], made[0])
        differing += any(not torch.equal(a, b) for a, b in zip(backward(made), reference, strict=True))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        backward(forward())
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)[:6]
    names = [(row.key[:70], round(row.self_device_time_total / 1e3, 3)) for row in rows]
    wide = [t[:1, :2].double().detach().requires_grad_() for t in (q, k, v)]
    torch.use_deterministic_algorithms(False)
    truth = F.scaled_dot_product_attention(*wide, is_causal=True)
    true_grads = torch.autograd.grad(truth, wide, grad[:1, :2].double())
    pairs = zip(reference, true_grads, strict=True)
    errors = [float(f"{float((a[:1, :2] - b).abs().max() / b.abs().max()):.1e}") for a, b in pairs]
    versions = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    found |= {"differing": differing, "other_out": other_out, "errors": errors, "kernels": names}
    return found | versions


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    numbers = {"rows": 8, "heads": 16, "size": 128, "length": 2048, "times": 20, "repeats": 40}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", default=",".join(WAYS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        sys.stdin.readline()  # until it is its turn
        print(json.dumps(measure(given)), flush=True)
        return 0
    waiting = []
    for way in given.only.split(","):
        environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        if "with room" in way:
            environment[LIMIT] = "-1"
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        pipe = subprocess.PIPE
        waiting.append((way, subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)))
    rows = []
    for way, process in waiting:
        began = time.monotonic()
        said, _ = process.communicate("go\n", timeout=120)
        lines = [line for line in said.splitlines() if line.startswith("{")]
        rows.append(json.loads(lines[-1]) if lines else {"way": way, "failed": process.returncode})
        print(json.dumps(rows[-1]), f"{time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    if given.json:
        print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
