"""What the examples import is there."""

import ast
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools.pages import ROOT


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
