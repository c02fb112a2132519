"""Programs of the tree that a page, the Makefile or a docstring names start from a fresh clone.

From the root of the tree, with nothing on the path but the installed package; examples import what is there.
"""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import everstep
from tools.pages import ROOT, pages

_COMMAND = re.compile(r"(?:python3?|\$\(PY\)) ((?:-m )?(?:bench|tools)[\w./]*\w)")
_FILE = re.compile(r"\b((?:bench|tools)/[\w/]+\.py)\b")


def documented() -> list[str]:
    """`bench/x.py` and `-m bench.x` of every page, of the Makefile, and of the docstrings of programs."""
    texts = [page.read_text() for page in pages()]
    texts += [(ROOT / name).read_text() for name in ("Makefile", ".ci/run")]
    sources = [path for room in ("bench", "tools", "harness") for path in (ROOT / room).rglob("*.py")]
    texts += [ast.get_docstring(ast.parse(path.read_text())) or "" for path in sources]
    inner = {str(path.relative_to(ROOT)) for path in sources if "ArgumentParser" not in path.read_text()}
    named = {name for text in texts for name in _FILE.findall(text)} - inner
    return sorted(named | {word for text in texts for word in _COMMAND.findall(text)})


def test_every_program_that_is_named_starts_from_a_fresh_clone() -> None:
    words = documented()
    assert len(words) > 20
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ask_for_help.py"))],
        input=json.dumps(words),
        env={**os.environ, "PYTHONPATH": str(Path(everstep.__file__).parents[1])},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    told = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [row["word"] for row in told] == words
    failed = [(row["word"], row["code"], row["said"][-300:]) for row in told if row["code"] != 0]
    assert failed == []
    assert [row["word"] for row in told if "usage:" not in row["said"].lower()] == []


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_what_an_example_imports_is_there(example: Path) -> None:
    """Of other packages only that they are there: some take ten seconds to import."""
    for node in ast.walk(ast.parse(example.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
            assert [name for name in modules if find_spec(name.partition(".")[0]) is None] == []
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert find_spec(node.module.partition(".")[0]) is not None, node.module
            if node.module.partition(".")[0] in ("everstep", "torch", *sys.stdlib_module_names):
                module = importlib.import_module(node.module)
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert missing == [], f"{node.module} has no {missing}"
