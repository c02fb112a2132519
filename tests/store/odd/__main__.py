"""Odd checkpoints through every pair of formats, judged by PyTorch and DeepSpeed.

    python -m tests.store.odd --cases 300 --seed 7
    python -m tests.store.odd --cases 300 --seed 7 --deepspeed ds/bin/python --json
    python -m tests.store.odd --case 700012:fsdp:hf:dcp          one case again

`--deepspeed`: the Python of a venv with deepspeed (and safetensors), which then writes sources and loads
targets too. Every case is printed as it ends; a failed one can be run again by its name.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.store.odd.frameworks import Frameworks
from tests.store.odd.matrix import PAIRS, CaseResult, cases, parse, run


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.store.odd",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", type=int, default=len(PAIRS), help=f"{len(PAIRS)} are every pair once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--skip", type=int, default=0, help="of the seed's cases, the first so many")
    parser.add_argument("--case", action="append", help="only this one, by its printed name")
    parser.add_argument("--deepspeed", default="", help="the Python of a venv with deepspeed")
    parser.add_argument("--folder", default=None, help="where to write; a temporary folder if not given")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    started = time.perf_counter()
    todo = [parse(text) for text in options.case or ()]
    if not todo:
        todo = cases(options.cases, options.seed, deepspeed=bool(options.deepspeed))[options.skip :]
    rows = []
    with tempfile.TemporaryDirectory(prefix="matrix-", dir=options.folder) as name:
        frameworks = Frameworks(Path(name), sys.executable, options.deepspeed or None)
        try:
            for case in todo:
                rows.append(run(case, frameworks, Path(name)))
                print(_line(rows[-1]), file=sys.stderr, flush=True)
        finally:
            frameworks.close()
    document = summary(rows, options.seed, time.perf_counter() - started)
    if options.json:
        print(json.dumps(document | {"rows": [asdict(row) for row in rows]}))
    else:
        for key, value in document.items():
            print(f"{key:10} {value}")
    return 1 if document["failures"] else 0


def summary(rows: list[CaseResult], seed: int, seconds: float) -> dict[str, Any]:
    pairs = Counter(row.case.split(":", 2)[2] for row in rows)
    judges = Counter(_kind(judge) for row in rows for judge in row.judges)
    return {
        "seed": seed,
        "cases": len(rows),
        "pairs": f"{len(pairs)} of {len(PAIRS)}",
        "outcomes": dict(Counter(row.outcome for row in rows)),
        "judges": dict(judges.most_common()),
        "failures": [f"{row.case}: {row.because}" for row in rows if row.outcome == "failed"],
        "seconds": round(seconds, 1),
    }


def _kind(judge: str) -> str:
    """Without meshes, worlds and precisions."""
    return " ".join(
        word for word in judge.split() if not word.isdigit() and word not in ("x", "fp32", "bf16", "fp16")
    )


def _line(row: CaseResult) -> str:
    because = f"  {row.because}" if row.because else ""
    return f"{row.outcome:8} {row.seconds:5.1f} s  {row.case}  [{'; '.join(row.judges)}]{because}"


if __name__ == "__main__":
    sys.exit(main())
