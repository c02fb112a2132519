"""What the self-check at the end of a conversion costs: with and without it, in turns, in one run.

    python bench/selfcheck.py                    0.1, 0.5 and 2 GB, five pairs of formats
    python bench/selfcheck.py --gib 0.1 --json

A row: seconds without and with (medians of the turns), their ratio, and the share of the source that is read
once more for the comparison (0: all of it is hashed on its way into the target).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.checkpoint import weights, with_moments
from everstep.convert.conversion import Target, read_state, write_state
from everstep.convert.state import TrainingState
from everstep.store import dtypes
from everstep.store.ranges import LocalFile
from everstep.store.stored import Held

PAIRS = {
    "universal to dcp": ("universal", Target(format="dcp")),
    "universal to zero-1 x 4": ("universal", Target(format="deepspeed", stage=1, world=4)),
    "universal to zero-3 x 8": ("universal", Target(format="deepspeed", stage=3, world=8)),
    "zero-3 x 8 to universal": ("zero-3", Target(format="universal")),
    "dcp to hf": ("dcp", Target(format="hf")),
}
SOURCES = {
    "universal": Target(format="universal"),
    "zero-3": Target(format="deepspeed", stage=3, world=8),
    "dcp": Target(format="dcp"),
}


def made(gib: float) -> TrainingState:
    parameters = weights(gib)
    tensors = {
        n: Held(dtypes.name_of(t.dtype), dtypes.array_of(t)) for n, t in with_moments(parameters).items()
    }
    tensors = {n: t for n, t in tensors.items() if n.startswith(("model/", "optimizer/"))}
    group = {"params": sorted(parameters), "lr": 1e-3, "weight_decay": 0.0}
    return TrainingState(step=7, tensors=tensors, groups=[group])


def converted(source: Path, target: Path, goal: Target, *, check: bool) -> tuple[float, int]:
    """Seconds, and bytes read of the source."""
    reads: list[int] = []
    old = LocalFile.read

    def counted(self: LocalFile, offset: int, out: memoryview) -> None:
        if source in self.path.parents:
            reads.append(len(out))
        old(self, offset, out)

    os.sync()
    LocalFile.read = counted  # type: ignore[method-assign]
    try:
        began = time.perf_counter()
        write_state(target, read_state(source), goal, check=check)
        return time.perf_counter() - began, sum(reads)
    finally:
        LocalFile.read = old  # type: ignore[method-assign]
        shutil.rmtree(target, ignore_errors=True)


def measured(gib: float, turns: int, root: Path) -> dict[str, Any]:
    state = made(gib)
    for name, goal in SOURCES.items():
        write_state(root / name, state, goal, check=False)
    size = state.num_bytes()
    del state
    rows = {}
    for pair, (source, goal) in PAIRS.items():
        found: dict[bool, list[tuple[float, int]]] = {False: [], True: []}
        for _ in range(turns):
            for check in (False, True):
                found[check].append(converted(root / source, root / "out", goal, check=check))
        without, with_it = (statistics.median(s for s, _ in found[check]) for check in (False, True))
        rows[f"{gib:g} GiB, {pair}"] = {
            "without_s": round(without, 3),
            "with_s": round(with_it, 3),
            "ratio": round(with_it / without, 2),
            "read_again": round((found[True][0][1] - found[False][0][1]) / size, 3),
        }
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", default="0.1,0.5,2")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    for gib in map(float, args.gib.split(",")):
        with tempfile.TemporaryDirectory(prefix="selfcheck-", dir=args.folder) as name:
            found = measured(gib, args.turns, Path(name))
        rows |= found
        if not args.json:
            for key, row in found.items():
                print(f"{key:36} " + "  ".join(f"{k} {v}" for k, v in row.items()), flush=True)
    if args.json:
        print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
