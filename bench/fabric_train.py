"""Training across the testbed, steered by the coordinator's plan, while a spine's cable dies or is cut; or on
the healthy fabric, over many seeds of the switches' hashes.

python bench/fabric_train.py                 cable dead in mid-run (root)
python bench/fabric_train.py --harm cut
python bench/fabric_train.py --seeds 20 --stages 4 --steps 16              and with --unsteered
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from harness.steered_training import main

if __name__ == "__main__":
    sys.exit(main())
