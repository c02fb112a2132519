"""The pages of docs/ as code reads them: fenced and indented blocks, commands, links, pictures.

What a fence says after its language is for us (Markdown viewers ignore it):

    ```bash               commands to copy; in the pages that `tests/docs` runs, they are run as they stand
    ```text output        all that the commands right above print; `tools/docs.py` makes it
    ```text grep PATTERN  those lines of it that match
    ```text               an excerpt: said to look like this, not made
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PICTURES = (".svg", ".png")

_FENCE = re.compile(r"^```(.*)$")
_LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")
_BESIDE = re.compile(r"(\s{2,}|\s(?=[#(─])).*$")  # beside a command: a remark, a drawing


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block: `first` and `last` are the numbers of its own lines, from 0, fences not counted."""

    page: Path
    language: str
    rest: str
    first: int
    last: int
    text: str


def pages() -> list[Path]:
    """Every page for people, the README first; not what is generated."""
    return [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
        *sorted(page for page in DOCS.rglob("*.md") if DOCS / "reference" not in page.parents),
    ]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    lines = page.read_text().splitlines()
    opened: tuple[int, str] | None = None
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if opened is None:
            opened = number, fence[1].strip()
            continue
        language, _, rest = opened[1].partition(" ")
        text = "\n".join(lines[opened[0] + 1 : number])
        found.append(
            Block(
                page=page, language=language, rest=rest.strip(), first=opened[0] + 1, last=number, text=text
            )
        )
        opened = None
    assert opened is None, f"{page.name}: the block of line {opened and opened[0] + 1} is never closed"
    return found


def commands(page: Path) -> Iterator[str]:
    """Command lines of a page, continued ones joined: of fenced blocks, and of lines indented by four."""
    lines = page.read_text().splitlines()
    inside: set[int] = set()
    for block in blocks(page):
        inside |= set(range(block.first - 1, block.last + 1))
        if block.language in ("", "bash", "sh", "console"):
            yield from _joined(block.text.splitlines())
    yield from _joined([line[4:] for i, line in enumerate(lines) if i not in inside and line[:4] == "    "])


def _joined(lines: list[str]) -> Iterator[str]:
    pending = ""
    for line in lines:
        if line.endswith("\\"):
            pending += line[:-1].strip() + " "
            continue
        whole, pending = (pending + line.strip()).removeprefix("$ "), ""
        if re.search(r"\s{2,}\d", whole):  # a row of a table of figures
            continue
        whole = _BESIDE.sub("", whole)
        if re.match(r"(\w+=\S+ )*(\.venv/bin/)?(everstep|python|make) \S", whole):
            yield whole


def links(page: Path) -> Iterator[tuple[bool, str]]:
    """(is a picture, target) of every link, outside code."""
    lines = page.read_text().splitlines()
    for block in blocks(page):
        for number in range(block.first, block.last):
            lines[number] = ""
    prose = re.sub(r"`[^`\n]*`", "", "\n".join(line for line in lines if not line.startswith("    ")))
    for bang, target in _LINK.findall(prose):
        yield bool(bang), target


def picture_commands() -> dict[str, str]:
    """Picture, or folder of pictures (seen from the repository), to the command that makes it, as a
    page shows it: in a block, or in the middle of a sentence.
    """
    found: dict[str, str] = {}
    for page in pages():
        spoken = re.findall(r"`((?:everstep|python) [^`\n]+)`", page.read_text())
        for command in [*spoken, *commands(page)]:
            for word in command.split():
                if word.startswith("docs/") and (word.endswith(PICTURES) or "." not in word):
                    found[word.rstrip("/")] = command
    return found
