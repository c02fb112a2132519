"""Every scenario file says what happens; `--rewrite` writes what comes of its commands anew."""

from pathlib import Path

import pytest

from tests.core.scenario import performed

FILES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_scenario_runs_as_it_is_written(path: Path, request: pytest.FixtureRequest) -> None:
    text = performed(path.read_text())
    if request.config.getoption("--rewrite"):
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} says otherwise; --rewrite if the change is meant"
    assert "completed all" in text, "a scenario ends with the task"
