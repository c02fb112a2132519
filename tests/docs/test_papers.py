"""The pages about papers: their counts are those of their rows, and what a row names is there."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"unicron": ("U", 35), "recycle": ("R", 26), "c4": ("C", 28), "ucp": ("K", 28)}
STATES = ("full", "different", "partial", "missing")
NAMED = re.compile(r"`((?:src|tests|bench|harness|deploy)/[\w./-]+)")


def rows(paper: str) -> list[list[str]]:
    letter, _ = PAGES[paper]
    text = (ROOT / "docs" / f"paper-{paper}.md").read_text()
    lines = [line for line in text.splitlines() if re.match(rf"\| {letter}\d+ \|", line)]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize("paper", PAGES)
def test_every_mechanism_has_one_row_and_one_state(paper: str) -> None:
    letter, count = PAGES[paper]
    assert [row[0] for row in rows(paper)] == [f"{letter}{number + 1}" for number in range(count)]
    assert {row[3] for row in rows(paper)} <= set(STATES)
    assert {len(row) for row in rows(paper)} == {6}


@pytest.mark.parametrize("paper", PAGES)
def test_the_count_on_the_page_is_that_of_its_rows(paper: str) -> None:
    found = Counter(row[3] for row in rows(paper))
    said = ", ".join(f"{found[state]} {state}" for state in STATES if found[state])
    assert f"\n{said}, of {len(rows(paper))}.\n" in (ROOT / "docs" / f"paper-{paper}.md").read_text()


@pytest.mark.parametrize("paper", PAGES)
def test_what_a_row_names_is_there(paper: str) -> None:
    missing = [
        (row[0], name) for row in rows(paper) for name in NAMED.findall(row[4]) if not (ROOT / name).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("paper", PAGES)
def test_a_row_that_is_not_full_says_what_is_missing(paper: str) -> None:
    assert [row[0] for row in rows(paper) if row[3] != "full" and not row[5]] == []
