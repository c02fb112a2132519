"""What every page promises: its commands exist, its links lead somewhere, its pictures can be made again."""

import dataclasses
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from everstep.cli.main import build_app
from everstep.job.job import CheckpointSpec, DataSpec, Job, ModelSpec, OptimizerSpec
from tools.pages import DOCS, ROOT, commands, links, pages

PAGES = pages()
named = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


@pytest.fixture(scope="module")
def app() -> Any:
    return typer.main.get_command(build_app())


@named
def test_every_command_of_a_page_can_be_parsed(page: Path, app: Any) -> None:
    for line in commands(page):
        words = shlex.split(re.split(r"\s(?:[|>&;]|2>)", line)[0], comments=True)
        while "=" in words[0]:  # EVERSTEP_TOKEN=... before a command
            words.pop(0)
        if not words[0].endswith("everstep") or "..." in words:  # the reader is to think of the rest
            continue
        parse(app, words[1:], line)


@named
def test_every_command_in_a_sentence_can_be_parsed(page: Path, app: Any) -> None:
    """Abbreviated ones ("everstep submit …") must at least name commands and options that exist."""
    for line in re.findall(r"`(everstep [^`\n]+)`", page.read_text()):
        line = re.split(r"\s(?:[|>&;…]|2>)", line)[0]
        words = shlex.split(line)[1:]
        if not words or not re.fullmatch(r"-?[a-z-]+", words[0]):  # `everstep.train`, "everstep …"
            continue
        command = app
        while words and words[0] in getattr(command, "commands", {}):
            command, words = command.commands[words[0]], words[1:]
        assert command is not app or words[0].startswith("-"), f"{line}: there is no everstep {words[0]}"
        known = {option for parameter in command.params for option in parameter.opts} | {"-h", "--help"}
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        script = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
        assert {flag for flag in flags if words.index(flag) < script} <= known, line


_FILES = re.compile(r"`([\w./]+/[\w./]*\.(?:py|js|toml|yaml|service|sbatch))`")


@named
def test_every_file_a_page_names_is_there(page: Path) -> None:
    roots = [ROOT, DOCS, ROOT / "src", ROOT / "src" / "everstep", ROOT / "src" / "everstep_lab"]
    missing = [
        name for name in _FILES.findall(page.read_text()) if not any((root / name).exists() for root in roots)
    ]
    assert missing == []


def parse(app: Any, words: list[str], line: str) -> None:
    """As the command line does, up to where the command would run."""
    command, context = app, app.make_context("everstep", list(words), resilient_parsing=True)
    while hasattr(command, "commands"):
        assert words, f"{line}: which command?"
        assert words[0] in command.commands, f"{line}: there is no everstep {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    try:
        command.make_context(command.name, list(words), parent=context)
    except Exception as error:  # of whichever click typer brings
        told = getattr(error, "format_message", None)
        pytest.fail(f"{line}: {told() if told else error!r}")


@named
def test_every_program_a_page_names_is_there(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in commands(page):
        words = line.split()
        if words[0].endswith("python") and words[1].startswith(("bench/", "examples/")):
            assert (ROOT / words[1]).is_file(), line
        if words[0] == "make":
            assert words[1] in targets, line


@named
def test_no_link_is_dead(page: Path) -> None:
    for _, target in links(page):
        if re.match(r"\w+://|#|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve()
        assert found.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(found), f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_can_be_reached_from_the_list_of_pages() -> None:
    linked = {(DOCS / target.partition("#")[0]).resolve() for _, target in links(DOCS / "README.md")}
    assert set(DOCS.glob("*.md")) - {DOCS / "README.md"} <= linked


def test_every_key_of_a_job_is_in_the_page_about_it() -> None:
    page = (DOCS / "job-file.md").read_text()
    for spec in (Job, ModelSpec, DataSpec, OptimizerSpec, CheckpointSpec):
        keys = {field.name for field in dataclasses.fields(spec)} - {"options", "base", "code"}
        missing = {key for key in keys if f"`{key}`" not in page and f"`[{key}]`" not in page}
        assert not missing, f"docs/job-file.md says nothing of {sorted(missing)}"


def test_no_page_names_a_folder_of_somebodys_machine() -> None:
    home = os.path.expanduser("~")
    for page in PAGES:
        assert f"{home}/" not in page.read_text(), page.name
        assert not re.search(r"(?<![\w.<])/(home|root|Users)/\w", page.read_text()), page.name
