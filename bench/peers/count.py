"""Lines a user writes for the same job, by trainer: code without blank lines, comments and docstrings.

    python bench/peers/count.py              the table
    python bench/peers/count.py --run        run every script first, on CPU (torchrun for DDP and HF Trainer)
    python bench/peers/count.py --json

The scripts are in lines/; what they share (models, data sets) is in lines/shared.py and is not counted, so
what is counted is what a trainer asks for: loop, evaluation, logging, checkpoints, resuming, export. A
statement over several lines counts once, so that wide and narrow formatting are equal; lines are given too.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import tokenize
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "lines"
JOBS = {
    "char": "character model: validation, CSV log, checkpoints, resume, samples",
    "finetune": "fine-tune a Llama: masked tokens, checkpoints, resume, export",
    "loop": "own model: validation with a metric, EMA, rate function, clip, early stop, resume",
}
TRAINERS = {
    "everstep": "Everstep",
    "ddp": "torchrun + DDP",
    "hf_trainer": "HF Trainer",
    "lightning": "Lightning",
}
NOT_HERE = {"torchft": "0.2.0 is built from Rust crates, which could not be downloaded here: not tried"}
_LAUNCH = {
    "everstep": ["-m", "everstep.cli.main", "run", "--no-web", "--every", "1000"],
    "ddp": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "hf_trainer": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "lightning": [],
}
_QUIET = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    """Lines with code on them."""
    inside: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _QUIET:
            inside |= set(range(token.start[0], token.end[0] + 1))
    return len(inside - docstring_lines(text))


def docstring_lines(text: str) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            first = node.body[0]
            found |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return found


def statements(text: str) -> int:
    """Statements and headers of blocks, docstrings left out."""
    skipped = docstring_lines(text)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    return sum(node.lineno not in skipped for node in nodes)


def run(job: str, trainer: str, steps: int, limit_s: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="everstep-lines-") as folder:
        script = str(HERE / f"{job}_{trainer}.py")
        command = [sys.executable, *_LAUNCH[trainer], script, folder, str(steps)]
        began = time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": _path()}
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=environment)
        except subprocess.TimeoutExpired:
            return {
                "job": job,
                "trainer": trainer,
                "code": None,
                "last": "ran out of time",
                "seconds": limit_s,
            }
    last = (ended.stdout if ended.returncode == 0 else ended.stderr).strip().splitlines()[-1:]
    seconds = round(time.monotonic() - began, 1)
    return {
        "job": job,
        "trainer": trainer,
        "code": ended.returncode,
        "last": "".join(last),
        "seconds": seconds,
    }


def _path() -> str:
    source = Path(__file__).resolve().parents[2] / "src"
    return os.pathsep.join([str(source), str(HERE), os.environ.get("PYTHONPATH", "")])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--only", default="", help="scripts whose name contains this")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--limit", type=int, default=600, help="seconds for a script")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    ran = []
    for job in JOBS:
        for trainer in TRAINERS:
            if given.run and given.only in f"{job}_{trainer}":
                ran.append(run(job, trainer, given.steps, given.limit))
                print(" ".join(f"{value}" for value in ran[-1].values()), file=sys.stderr, flush=True)
    texts = {(j, t): (HERE / f"{j}_{t}.py").read_text() for j in JOBS for t in TRAINERS}
    counts = {
        job: {
            t: {"lines": code_lines(texts[job, t]), "statements": statements(texts[job, t])} for t in TRAINERS
        }
        for job in JOBS
    }
    if given.json:
        print(json.dumps({"counts": counts, "not_here": NOT_HERE, "ran": ran}))
    else:
        print(f"| job | {' | '.join(TRAINERS.values())} |")
        print(f"|---|{'---|' * len(TRAINERS)}")
        for job, told in JOBS.items():
            cells = [f"{counts[job][t]['lines']} ({counts[job][t]['statements']})" for t in TRAINERS]
            print(f"| {told} | {' | '.join(cells)} |")
        print("\nlines of code (statements); " + "; ".join(f"{n}: {why}" for n, why in NOT_HERE.items()))
    return 1 if any(one["code"] != 0 for one in ran) else 0


if __name__ == "__main__":
    sys.exit(main())
