"""Ranks of a DDP script over NCCL are killed at every moment of a step, on one GPU that they share: all
losses and the weights at the end are those of the plain script, bit for bit.

    python bench/gpu/held_nccl.py                 98M on 2 ranks, a small model on 3: about 4 minutes
    python bench/gpu/held_nccl.py --quick         98M on 2 ranks only
    python bench/gpu/held_nccl.py --only kills2 --size 350m --logs DIR

Printed for each run: ms per step, peak of memory, lines that are the same, and for each kill how long the
others were held and what took that time. Without a GPU it runs over gloo, with tiny models.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # where nothing can be installed
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])

from everstep.launch.local.script_run import Ran, ScriptLaunch, ScriptRun  # noqa: E402
from everstep.protocol.messages import RankRules  # noqa: E402

SCRIPT = ROOT / "bench" / "gpu" / "held_gpt.py"
# Ranks that share a GPU talk through sockets, as between machines, in one order of additions.
FOR_ONE_GPU = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_NSOCKS_PERTHREAD": "4",
    "NCCL_SOCKET_NTHREADS": "2",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "OMP_NUM_THREADS": "2",
}
SIZES = {
    "98m": ["--layers", "12", "--width", "768"],
    "350m": ["--layers", "24", "--width", "1024", "--batch", "4"],
    "small": ["--layers", "4", "--width", "256"],
    "tiny": ["--layers", "1", "--width", "64", "--batch", "1", "--length", "64"],
}
KILLS = [  # two seconds apart at least: another process is parked meanwhile
    "1,5,in-bucket,2",
    "0,12,opt",
    "1,19,forward",
    "0,26,bucket,1",
    "1,33,after-bucket,1",
    "0,40,clip",
    "1,47,after-opt",
    "0,54,between",
]
HELD = re.compile(r"held \d+\.\d+ s.*")
Numbers = dict[tuple[str, str], set[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    name: str
    ranks: int
    size: str
    steps: int
    like: str = ""  # the run that its numbers are compared with
    is_held: bool = True
    kills: tuple[str, ...] = ()
    more: tuple[str, ...] = ()


def trials(size: str) -> list[Trial]:
    kills3 = ["2,5,in-bucket,0", *KILLS[1:7], f"2{KILLS[7][1:]}"]  # the small model has two buckets
    return [
        Trial(name="plain2", ranks=2, size=size, steps=60, is_held=False),
        Trial(name="held2", ranks=2, size=size, steps=60, like="plain2"),
        Trial(name="kills2", ranks=2, size=size, steps=60, like="plain2", kills=tuple(KILLS)),
        Trial(name="plain3", ranks=3, size="small", steps=60, is_held=False),
        Trial(name="held3", ranks=3, size="small", steps=60, like="plain3"),
        Trial(name="kills3", ranks=3, size="small", steps=60, like="plain3", kills=tuple(kills3)),
        Trial(name="plain2x8", ranks=2, size=size, steps=10, is_held=False, more=("--accumulate", "8")),
        Trial(name="held2x8", ranks=2, size=size, steps=10, like="plain2x8", more=("--accumulate", "8")),
    ]


def run(trial: Trial, logs: Path, limit_s: float) -> tuple[Ran, bytes, list[str]]:
    os.environ["HELD_KILL"] = ";".join(trial.kills)
    size = SIZES[trial.size]
    rules = RankRules(
        command=(str(SCRIPT), "--steps", str(trial.steps), *size, *trial.more),
        run_id=trial.name,
        folder=str(ROOT),
        ranks=trial.ranks,
        logs=str(logs),
        hold="auto" if trial.is_held else "off",
        copy_every=10**6,
        standby="parked",
        max_restarts=0,
    )
    output, said = io.BytesIO(), list[str]()
    late = threading.Timer(limit_s, os.kill, (os.getpid(), signal.SIGTERM))
    late.start()
    try:
        ran = ScriptRun(ScriptLaunch(rules=rules, output=output, errors=output), said.append).run()
    finally:
        late.cancel()
    return ran, output.getvalue(), said


def numbers(output: str) -> tuple[Numbers, dict[str, float]]:
    """What each rank printed, by step; what rank 0 says of itself at the end."""
    found: Numbers = {}
    about: dict[str, float] = {}
    for line in output.splitlines():
        if match := re.match(r"\[(\d+)\] (step \d+|final)(.*)", line):
            found.setdefault((match[1], match[2]), set()).add(match[3])
        elif match := re.match(r"\[0\] about (.*)", line):
            words = match[1].split()
            about = {name: float(value) for name, value in zip(words[::2], words[1::2], strict=True)}
    return found, about


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first three runs only")
    parser.add_argument("--only", nargs="*", default=[], help="these runs; what they are compared with, too")
    parser.add_argument("--size", choices=SIZES, default="98m")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds per run")
    parser.add_argument("--logs", type=Path, help="what each rank said; elsewhere a temporary folder")
    given = parser.parse_args()
    import torch

    has_gpu = torch.cuda.device_count() > 0
    os.environ.update(FOR_ONE_GPU)
    wanted = trials(given.size if has_gpu else "tiny")
    if not has_gpu:
        wanted = [tiny(each) for each in wanted]
    if given.quick:
        wanted = wanted[:3]
    if given.only:
        likes = {each.like for each in wanted if each.name in given.only}
        wanted = [each for each in wanted if each.name in given.only or each.name in likes]
    print(f"torch {torch.__version__}, python {sys.version.split()[0]}", flush=True)
    known: dict[str, Numbers] = {}
    is_well = True
    with tempfile.TemporaryDirectory() as folder:
        for trial in wanted:
            began = time.monotonic()
            ran, output, said = run(trial, given.logs or Path(folder), given.limit)
            text = output.decode(errors="replace")
            found, about = numbers(text)
            known[trial.name] = found
            expected = known.get(trial.like or trial.name, {})
            same = sum(found.get(key) == value for key, value in expected.items())
            held = [m[0] for each in ran.incidents for text_ in evidence(each) if (m := HELD.search(text_))]
            fine = (
                ran.code == 0
                and same == len(expected) > trial.steps
                and len(held) == len(trial.kills)
                and ran.restarts == 0
            )
            is_well = is_well and fine
            print(
                f"{'ok  ' if fine else 'BAD '}{trial.name}: {about.get('ms', 0):.2f} ms a step, "
                f"{about.get('million', 0):.0f}M, peak {about.get('peak_mib', 0):.0f} MiB; "
                f"{same} of {len(expected)} lines the same; {len(held)} of {len(trial.kills)} kills held; "
                f"{ran.restarts} restarts, code {ran.code}, {time.monotonic() - began:.0f} s",
                *(f"    {each}" for each in held),
                sep="\n",
                flush=True,
            )
            if not fine:
                heard = [line for line in text.splitlines() if not re.match(r"\[\d+\] step", line)]
                print(*said[-30:], *heard[-60:], sep="\n", flush=True)
    return 0 if is_well else 1


def tiny(trial: Trial) -> Trial:
    """Its only bucket is the first."""
    return replace(trial, size="tiny", kills=tuple(",".join(each.split(",")[:3]) for each in trial.kills))


def evidence(incident: object) -> list[str]:
    return [each.text for each in getattr(incident, "evidence", ())]


if __name__ == "__main__":
    sys.exit(main())
