"""Examples run by one command each, and heal."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.mark.slow
def test_a_character_model_is_evaluated_the_same_with_a_kill() -> None:
    command = [sys.executable, "-m", "everstep.cli.main", "run", "--no-web"]
    script = [str(EXAMPLES / "char_gpt.py"), "--steps", "12"]
    losses = []
    for kills in ([], ["--kill", "stage=1,replica=0,step=7,op=F1"]):
        ran = subprocess.run(
            [*command, *kills, *script], capture_output=True, text=True, timeout=300, check=True
        )
        found = re.search(r"evaluation loss ([\d.]+), incidents (\d)", ran.stdout)
        assert found is not None
        losses.append(found[1])
        assert int(found[2]) == len(kills) // 2
    assert losses[0] == losses[1]
