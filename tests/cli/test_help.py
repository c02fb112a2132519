"""What every help page shows, and the two ways to resume a task."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer

from everstep import __version__
from everstep.cli import cluster
from everstep.cli.main import command_tree


def pages(command: Any, name: str = "everstep", parent: Any = None) -> Iterator[tuple[str, Any, str]]:
    """Every command's name, itself, and its help page as printed."""
    context = typer.Context(command, info_name=name.split()[-1], parent=parent)
    yield name, command, command.get_help(context)
    for word, one in getattr(command, "commands", {}).items():
        yield from pages(one, f"{name} {word}", context)


def test_every_help_page_has_an_example_and_shows_no_type_of_a_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    seen = 0
    for name, command, page in pages(command_tree()):
        page += capsys.readouterr().out
        assert page.strip(), name
        assert "<bool>" not in page, name
        if not hasattr(command, "commands"):
            seen += 1
            assert "Example" in page, name
            assert f"{name} " in page.split("Example", 1)[1] or f"{name}\n" in page, name
            assert "--json" in page or name == "everstep launch node", name
    assert seen > 25


def test_the_version_is_printed(idle_everstep: Callable[..., Any]) -> None:
    ran = idle_everstep("--version")
    assert (ran.code, ran.out.strip()) == (0, f"everstep {__version__}")


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (("pause", "gpt"), "/v1/tasks/gpt/pause"),
        (("resume", "gpt"), "/v1/tasks/gpt/unpause"),
    ],
)
def test_a_paused_task_is_resumed_by_a_command_of_its_own(
    words: tuple[str, ...], path: str, idle_everstep: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Coordinator:
        def __init__(self, **_: Any) -> None: ...

        def post(self, where: str, given: Any = None) -> dict[str, Any]:
            asked.append(where)
            return {"task": "gpt", "state": "paused", "step": 7, "saved": {"protected": 7}}

    monkeypatch.setattr(cluster, "Client", Coordinator)
    ran = idle_everstep(*words)
    assert ran.code == 0
    assert asked == [path]
    assert (
        "task gpt is paused at step 7" if path.endswith("/pause") else "continues after step 7"
    ) in ran.err
