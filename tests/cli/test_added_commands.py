"""Commands that other packages add (`everstep.commands`): one that is broken breaks no other."""

from importlib.metadata import EntryPoint

import pytest

from everstep.cli import main


@pytest.mark.parametrize("value", ["nowhere.at_all:command", "everstep.cli.main:no_such_command"])
def test_a_command_that_cannot_be_loaded_says_so_and_the_others_work(
    value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [EntryPoint(name="broken", value=value, group="everstep.commands")]
    monkeypatch.setattr(main, "entry_points", lambda group: entries)
    assert main.run(["--help"]) == 0
    assert main.run(["broken"]) == 2
    assert "everstep broken cannot be loaded" in capsys.readouterr().err
