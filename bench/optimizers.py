"""Optimizers from PyPI with real workers: is each run, to the bit, a plain loop of torch?

    python bench/optimizers.py                  those that are installed, 2 x 2 and 2 x 1
    python bench/optimizers.py prodigy soap     these
    python bench/optimizers.py --json

Each is run clean, with one worker killed, and killed as a whole and resumed from its checkpoint. The number
is the largest difference of a loss (relative) or of a last weight to those of the plain loop; 0 is every bit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from harness import foreign_optimizers
from harness.optimizer_runs import compared, job_of
from harness.sweep import Sweep


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[[], *foreign_optimizers.PACKAGES])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = []
    sweep = Sweep()
    base = Path(foreign_optimizers.__file__).parent
    for name in given.names or foreign_optimizers.PACKAGES:
        package = foreign_optimizers.PACKAGES[name]
        for stages in (2, 1):
            row = {"optimizer": name, "package": package, "shape": f"2 x {stages}"}
            if importlib.util.find_spec(package) is None:
                row["skipped"] = f"{package} is not installed"
            else:
                row |= compared(job_of(f"foreign_optimizers:{name}", base, stages=stages), sweep)
            rows.append(row)
            if not given.json:
                said = row.get("skipped") or row.get("refused")
                numbers = [f"{key} {row.get(key)}" for key in ("clean", "healed", "resumed")]
                print(f"{name:18} {row['shape']}  {said or ', '.join(numbers)}", flush=True)
    sweep.close()
    if given.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
