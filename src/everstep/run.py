"""`python -m everstep.run`: torchrun's command line, unchanged."""

from __future__ import annotations

import sys

from everstep.cli.torchrun import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
