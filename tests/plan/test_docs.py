"""Tables in docs/planner.md are what the commands print: no figure is typed in."""

from __future__ import annotations

from pathlib import Path

from tools.planner_tables import errors, mixes, show, summary_of_errors

DOC = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()


def test_the_error_of_every_published_row_is_the_commands() -> None:
    assert show(errors()) in DOC
    assert summary_of_errors() in DOC


def test_the_mixes_are_the_commands() -> None:
    assert show(mixes()) in DOC
