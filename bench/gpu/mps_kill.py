"""Does the SIGKILL of one process on a GPU end the others on it? Plain torch, nothing of Everstep.

    python bench/gpu/mps_kill.py              without MPS: processes take turns on the GPU
    python bench/gpu/mps_kill.py --mps        as clients of one MPS server, which is started and ended
    python bench/gpu/mps_kill.py --mps --tries 3 --json

In each try two bystanders multiply matrices, each by itself, and check their results. A third process is
killed while it is idle, while it multiplies, or while one long kernel of it is on the device. Then the
bystanders have some seconds to show that they go on, and a new process has to be able to start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

WHEN = ("idle", "busy", "long kernel")
GOES_ON_S = 4.0


def bystander() -> None:
    """A line per 50 products; ends with its first error."""
    import torch

    draw = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(1024, 1024, device="cuda", generator=draw)
    reference = torch.mm(x, x)
    torch.cuda.synchronize()
    print("ready", flush=True)
    while True:
        same = torch.stack([torch.mm(x, x).eq(reference).all() for _ in range(50)]).all()
        print(f"{time.monotonic()} {bool(same)}", flush=True)
        time.sleep(0.02)


def victim(when: str) -> None:
    import torch

    x = torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    print("ready", flush=True)
    if when == "long kernel":
        torch.cuda._sleep(60 * 1_500_000_000)  # about a minute of cycles
        print("launched", flush=True)
        torch.cuda.synchronize()
    while when == "busy":
        for _ in range(50):
            torch.mm(x, x)
        torch.cuda.synchronize()
    time.sleep(600)


def started(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def attempt(when: str) -> dict[str, Any]:
    others = [started("--as", "bystander") for _ in range(2)]
    killed = started("--as", "victim", "--when", when)
    everyone = [*others, killed]
    try:
        for process in everyone:
            if line_of(process) != "ready":
                return {"when": when, "failed": process.communicate()[1][-300:]}
        if when == "long kernel":
            line_of(killed)
        time.sleep(0.5)
        now = time.monotonic()
        killed.kill()
        killed.wait()
        time.sleep(GOES_ON_S)
        codes = [process.poll() for process in others]
        for process in others:
            process.send_signal(signal.SIGTERM)
        said = [process.communicate(timeout=20) for process in others]
        rows = [[line.split() for line in out.splitlines() if " " in line] for out, _ in said]
        after = [[row for row in one if float(row[0]) > now + 1.0] for one in rows]
        errors = [err.strip().splitlines()[-1][:200] for _, err in said if "Error" in err]
        return {
            "when": when,
            "bystanders_alive": [code is None for code in codes],
            "products_after": [50 * len(one) for one in after],
            "all_right": all(row[1] == "True" for one in rows for row in one),
            "errors": errors,
            "new_process_starts": _starts(),
        }
    finally:
        for process in everyone:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def _starts() -> bool:
    with started("--as", "bystander") as fresh:
        found = line_of(fresh) == "ready"
        fresh.kill()
    return found


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--mps", action="store_true")
    parser.add_argument("--tries", type=int, default=1)
    parser.add_argument("--when", default=",".join(WHEN))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--as", dest="role", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role == "bystander":
        bystander()
    if given.role == "victim":
        victim(given.when)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that MPS is ended
    if given.mps:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    rows = []
    try:
        for number in range(given.tries):
            for when in given.when.split(","):
                row = {"mps": given.mps, "try": number + 1, **attempt(when)}
                rows.append(row)
                print(json.dumps(row), file=sys.stderr if given.json else sys.stdout, flush=True)
    finally:
        if given.mps:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False)
            _show_log()
    if given.json:
        print(json.dumps(rows))
    return 0


def _show_log() -> None:
    """What the MPS server had to say about clients that ended."""
    place = os.path.join(os.environ.get("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps"), "server.log")
    with contextlib.suppress(OSError), open(place) as log:
        print(*log.read().splitlines()[-25:], sep="\n", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
