"""Every Python and TOML block of a page, and every example of a docstring, is executed.

A block that trains is run up to the moment at which workers would be started: its arguments, model, data,
loss and optimizer are really checked, which takes milliseconds. `--slow` trains it, with fewer steps, and
runs the blocks that need transformers or Lightning.
"""

from __future__ import annotations

import doctest
import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from everstep.job.job import Job
from everstep.launch.local import api
from everstep.store import unix_users
from everstep_fabric.document import topology_from
from everstep_lab.study.request import from_document
from tools.pages import DOCS, ROOT, Block, blocks, pages

TEXT = """
import numpy, torch
from torch import nn
numpy.arange(20000, dtype="uint16").__mod__(50).tofile("train.bin")
numpy.arange(20000, dtype="uint16").__mod__(50).tofile("val.bin")
layers = [lambda: nn.Embedding(50, 8), lambda: nn.Linear(8, 50)]
"""
LLAMA = """
import os, peft, torch, transformers
if not os.path.isdir("my-llama"):
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64)
    sizes |= dict(num_attention_heads=2)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained("my-llama")
def batch(step, microbatch):
    draw = torch.Generator().manual_seed(1000 * step + microbatch)
    rows = torch.randint(64, (2, 16), generator=draw)
    return {"input_ids": rows, "labels": rows}
import everstep
"""
# What a page has told its reader before a block, by (page, number of its Python block).
BEFORE = {
    ("cookbook.md", 0): TEXT,
    ("cookbook.md", 2): "",
    ("cookbook.md", 3): "",
    ("cookbook.md", 4): "",
    ("own-model.md", 0): "",
    ("own-script.md", 0): "import everstep, torch\nsteps, model = 2, torch.nn.Linear(2, 2)\n"
    "optimizer = torch.optim.AdamW(model.parameters())\n",
    ("schedules.md", 0): "",
    (
        "tensor-parallel.md",
        0,
    ): "import everstep\nfrom torch import nn\nlayers = {'q_proj': lambda: nn.Linear(8, 8)}\n",
    ("tensor-parallel.md", 1): "import everstep\nfrom torch import nn\n"
    "layers = {'q_proj': lambda: nn.Linear(8, 8)}\n",
    ("the-loop.md", 0): TEXT,
    ("the-loop.md", 1): "",
    ("your-data.md", 0): TEXT,
    ("your-data.md", 1): "import everstep, numpy\n"
    "for name in ('web', 'code'): numpy.zeros(20_000, dtype='uint16').tofile(name + '.bin')\n",
    ("your-data.md", 2): "",
    ("your-model.md", 2): "import everstep\n",
    ("your-model.md", 3): "from torch import nn\n",
}
BEFORE_SLOW = {
    ("diagnosis.md", 0): "rank, world_size = 0, 1\n",  # its server answers as long as the process lives
    ("lightning.md", 0): (ROOT / "examples" / "lightning_gpt.py")
    .read_text()
    .split("torch.manual_seed(1)")[0]
    .replace("Path(__file__)", f"Path({str(ROOT / 'examples' / 'a')!r})")
    + "LitGpt = Gpt\n",
    ("cookbook.md", 1): LLAMA,
    ("your-model.md", 0): LLAMA,
    ("your-model.md", 1): LLAMA,
}


def of_language(language: str) -> dict[tuple[str, int], Block]:
    """Blocks of the pages that people write; those of docs/api are signatures."""
    written = [page for page in pages() if page.parent != DOCS / "api"]
    return {
        (page.name, number): block
        for page in written
        for number, block in enumerate(block for block in blocks(page) if block.language == language)
    }


PYTHON = of_language("python")


def test_every_python_block_is_executed() -> None:
    assert PYTHON.keys() == BEFORE.keys() | BEFORE_SLOW.keys()


class WouldStart(Exception):
    """All is checked; the next thing would be to start workers."""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    monkeypatch.setattr(
        api, "launch", api.LocalLaunch(script=[str(path)], page=lambda wanted: api.own_page(False))
    )

    def started(*given: Any, **settings: Any) -> None:
        raise WouldStart

    monkeypatch.setattr(api, "run_with_callbacks", started)
    return path


@pytest.mark.parametrize("place", BEFORE, ids=lambda place: f"{place[0]}-{place[1]}")
def test_a_python_block_runs(place: tuple[str, int], script: Path) -> None:
    text = PYTHON[place].text
    try:
        exec(
            compile(BEFORE[place] + text, f"{place[0]}, Python block {place[1]}", "exec"),
            {"__name__": "page"},
        )
    except WouldStart:
        assert "everstep.train(" in text
    else:
        assert "everstep.train(" not in text, "it should have come to the point where workers start"


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", [place for place in PYTHON if "everstep.train(" in PYTHON[place].text or place in BEFORE_SLOW]
)
def test_a_python_block_trains(place: tuple[str, int], tmp_path: Path) -> None:
    text = (BEFORE | BEFORE_SLOW)[place] + PYTHON[place].text
    text = re.sub(r"\b(steps|epochs)=\d+", "steps=4", text)
    text = re.sub(r"\[(1000|60|40)\]", "[4]", text).replace("model.predict(...)", "print(model)")
    (tmp_path / "train.py").write_text(text + "\n__import__('os')._exit(0)" * (place[0] == "diagnosis.md"))
    trains = re.search(r"everstep\.(train|fit)\(", text)
    command = [sys.executable, "-m", "everstep.cli.main", "run", "--no-web"] if trains else [sys.executable]
    ran = subprocess.run(
        [*command, "train.py"], cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert not trains or "4 of 4 steps" in ran.stderr


def read_users(path: Path) -> object:
    if os.geteuid() != 0:
        return tomllib.loads(path.read_text())
    with mock.patch.object(unix_users, "found", lambda name: unix_users.UnixUser(name, 1000, 1000, (), "/")):
        return unix_users.UserTable(path)


SERVERS_OWN = {("access.md", 0): read_users}
JOB = {"model": {"preset": "gpt-tiny"}, "data": {"kind": "synthetic"}}


@pytest.mark.parametrize("place", of_language("toml"), ids=lambda place: f"{place[0]}-{place[1]}")
def test_a_toml_block_is_read_as_the_commands_read_it(place: tuple[str, int], tmp_path: Path) -> None:
    page, _ = place
    table = tomllib.loads(of_language("toml")[place].text)
    if page == "fabric.md":
        topology = topology_from(table)
        assert topology.links
    elif place in SERVERS_OWN:
        path = tmp_path / "table.toml"
        path.write_text(of_language("toml")[place].text)
        path.chmod(0o600)
        assert SERVERS_OWN[place](path)
    elif page == "simulator.md":
        from_document(table, "study")
    else:
        (tmp_path / "my-llama").mkdir()
        for name in ("train.bin", "val.bin"):
            np.arange(9999, dtype="uint16").tofile(tmp_path / name)
        (tmp_path / "my-llama" / "config.json").write_text("{}")
        Job.from_dict({"base": str(tmp_path), **JOB, **table})


def with_examples() -> list[str]:
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        if ">>> " in path.read_text():
            found.append(".".join(path.relative_to(ROOT / "src").with_suffix("").parts))
    return found


@pytest.mark.parametrize("module", with_examples())
def test_the_examples_of_docstrings_are_right(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted
    assert result.failed == 0
