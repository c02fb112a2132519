"""The pictures of costs and recoveries are those that the kept figures give."""

import json
import re
from collections.abc import Iterator

import pytest

from tools import plots
from tools.pages import DOCS

FIGURES = json.loads(plots.FIGURES.read_text())
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


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


@pytest.mark.parametrize("name", [name for name, kept in FIGURES.items() if "source" in kept])
def test_a_figure_that_was_written_down_has_the_numbers_of_its_page(name: str) -> None:
    kept = FIGURES[name]
    wanted = set(numbers(kept["found"]))
    places = re.split(r"\n(?=- |#|\n)", (plots.ROOT / kept["source"]).read_text())
    assert any(wanted <= {float(n.replace(",", "")) for n in _NUMBER.findall(place)} for place in places)


def numbers(found: object) -> Iterator[float]:
    match found:
        case dict():
            yield from (n for value in found.values() for n in numbers(value))
        case list():
            yield from (n for value in found for n in numbers(value))
        case int() | float():
            yield float(found)


def test_pages_say_what_the_figures_and_the_race_say() -> None:
    """docs/why.md said 1.02 where the picture below it said 1.01."""
    race = json.loads(plots.RACE.read_text())
    why, readme = (DOCS / "why.md").read_text(), (plots.ROOT / "README.md").read_text()
    assert "\n".join(plots.costs(FIGURES)) in why, "run `make plots` and commit what it writes"
    for said in plots.against_others(race, FIGURES):
        assert said in " ".join(why.split())
    assert plots.standstills(race) in " ".join(readme.split())
    rows = {row.split("|")[1].strip(" *"): row.strip("*| ") for row in readme.splitlines() if row[:1] == "|"}
    pauses = {name: pause for name, pause in plots.pauses(race, FIGURES).items() if name in rows}
    assert {name: rows[name].split("|")[-1].strip(" *") for name in pauses} == {
        name: f"{pause}&nbsp;s" for name, pause in pauses.items()
    }
    assert len(pauses) == 5


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
