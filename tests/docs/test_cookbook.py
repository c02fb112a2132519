"""Recipes of the cookbook: every one is run by something; commands for a cluster are typed as they stand."""

import asyncio
import re
import shlex
from pathlib import Path

import pytest

from everstep.cli import main
from tests.support.served import agent, served
from tools.pages import DOCS, ROOT

SECTIONS = re.split(r"^## (.*)\n", (DOCS / "cookbook.md").read_text(), flags=re.M)[1:]
RECIPES = dict(zip(SECTIONS[::2], SECTIONS[1::2], strict=True))
RUN_BY = {  # recipes whose block is no Python: `test_blocks.py` runs those
    "Fine-tune a Llama": ("tests/cli/test_commands.py", "hf_finetune.py"),
    "A LightningModule": ("tests/launch/test_examples.py", "lightning_gpt.py"),
    "Your torchrun script": ("tests/cli/test_run_ranks.py", "torchrun_style.py"),
    "Slurm": ("Makefile", "bench.slurm"),
    "Spot machines": ("tests/docs/test_cookbook.py", "Spot machines"),
}


def test_every_recipe_is_run_by_a_test_or_a_make_target() -> None:
    others = {name for name, text in RECIPES.items() if "```python\n" not in text}
    assert others == RUN_BY.keys()
    for place, what in RUN_BY.values():
        assert what in (ROOT / place).read_text(), f"{place} no longer runs {what}"


def test_the_commands_for_spot_machines_are_understood(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    block = re.search(r"```bash\n(.*?)```", RECIPES["Spot machines"], re.S)
    assert block is not None

    async def play(address: str) -> None:
        async def beat() -> None:
            while True:
                await node.beat()
                await asyncio.sleep(0.2)

        async with agent(address, "node-3") as node:
            beats = asyncio.create_task(beat())
            for line in block[1].splitlines():
                words = [*shlex.split(line)[1:], "--address", address]
                assert await asyncio.to_thread(main.run, words) == 0, line
            beats.cancel()

    with served(tmp_path) as address:
        asyncio.run(play(address))
    assert "node-3" in "".join(capfd.readouterr())
