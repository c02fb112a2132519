"""Training across the testbed, steered by `everstep agent --fabric`, while a spine's cable dies or is cut.

python bench/fabric_train.py                 cable dead in mid-run (root)
python bench/fabric_train.py --harm cut
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from harness.steered_training import main

if __name__ == "__main__":
    sys.exit(main())
