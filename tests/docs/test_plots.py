"""The pictures of costs and recoveries are those that the kept figures give."""

import json

import pytest

from tools import plots
from tools.pages import DOCS

FIGURES = json.loads(plots.FIGURES.read_text())


def test_every_picture_is_drawn_from_the_figures_that_are_kept() -> None:
    drawn = plots.pictures(FIGURES)
    assert {path.name for path in (DOCS / "plots").iterdir()} == set(drawn)
    stale = [name for name, text in drawn.items() if (DOCS / "plots" / name).read_text() != text]
    assert not stale, f"{stale}: run `make plots` and commit what it writes"


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_says_by_which_command_where_and_when_it_was_taken(name: str) -> None:
    kept = FIGURES[name]
    assert kept["machine"]
    assert kept["taken"].startswith("20")
    assert kept["command"] == plots.COMMANDS.get(name) or "source" in kept, "taken by another command"
    if "source" in kept:  # the bench may be gone: "measured once"
        assert (plots.ROOT / kept["source"]).is_file()


def test_a_picture_shows_each_value_and_its_spread() -> None:
    bars = [
        plots.Bar(group="a", name="x", value=2.0),
        plots.Bar(group="b", name="x", value=4.0, low=4.0, high=8.0),
        plots.Bar(group="b", name="y", value=-1.0),
    ]
    drawn = plots.svg(plots.Chart(title="T & T", unit="ms", bars=bars, line=1.0, digits=1), ["where"])
    assert all(f">{text}<" in drawn for text in ("2.0", "4.0 (8.0)", "-1.0", "a", "b", "x", "y", "where"))
    assert "T &amp; T" in drawn
    assert drawn.count("<rect") == 2 + len(bars)  # the legend
    assert drawn.count('class="whisker"') == 1
