"""docs/papers.md: every mechanism has a row and a state, and the symbol that a row names is defined there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "papers.md").read_text()
COUNTS = {"U": 35, "R": 26, "C": 28, "K": 28}
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in re.findall(r"^\| [URCK]\d+ .*$", PAGE, re.M)
]


def test_every_mechanism_has_one_row() -> None:
    assert [row[0] for row in ROWS] == [f"{x}{n + 1}" for x, count in COUNTS.items() for n in range(count)]
    assert len(PAGE.encode()) <= 14 << 10


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_has_a_state_and_names_a_symbol_that_is_there(row: list[str]) -> None:
    state = re.split(r"[:,]", row[2])[0]
    assert state.split()[0] in ("full", "different", "partial", "missing")
    assert state.startswith("full") or ":" in row[2] or state == "missing", "a gap is named"
    if not row[3]:
        assert state == "missing"
        return
    module, symbol = row[3].strip("`").split(":")
    inside = module if module.startswith("everstep") else f"everstep.{module}"
    tree = ast.parse((ROOT / "src" / f"{inside.replace('.', '/')}.py").read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    assert symbol in names, f"{inside} defines no {symbol}"
