"""Makes what the documentation does not say by hand: the API reference, pictures, and outputs of commands.

    python -m tools.docs               everything (`make docs`; some minutes)
    python -m tools.docs api           docs/reference/api/, from the docstrings
    python -m tools.docs lifecycles    docs/reference/lifecycles.md, from the tables of transitions
    python -m tools.docs protocol      docs/reference/protocol.md, from the classes of the messages
    python -m tools.docs pictures      every picture of docs/, by the command that its page shows
    python -m tools.docs outputs PAGE  blocks marked `output` and `grep` (tools/pages.py), by their commands

What is made from code (api, lifecycles, protocol) is not in git. Pages show their commands; this only runs
them, from the repository's root. What trains or times something
comes out a little different each time, so look at the difference before you commit it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import api_reference, lifecycles, protocol
from tools.pages import DOCS, ROOT, Block, blocks, picture_commands

REFERENCE = DOCS / "reference"  # not in git


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what",
        nargs="?",
        choices=["all", "api", "lifecycles", "protocol", "pictures", "outputs"],
        default="all",
    )
    parser.add_argument("pages", nargs="*", type=Path)
    options = parser.parse_args()
    if options.what in ("all", "api"):
        for path in api_reference.write(REFERENCE / "api"):
            say(path)
    for name, page in (("lifecycles", lifecycles.page), ("protocol", protocol.page)):
        if options.what in ("all", name):
            REFERENCE.mkdir(exist_ok=True)
            (REFERENCE / f"{name}.md").write_text(page())
            say(REFERENCE / f"{name}.md")
    if options.what in ("all", "outputs"):
        for page in options.pages or sorted(DOCS.glob("*.md")):
            if made := remade(page.resolve()):
                page.write_text(made)
                say(page.resolve())
    if options.what in ("all", "pictures"):
        for picture, command in sorted(picture_commands().items()):
            if one_line(command) not in _ran:  # by its page, for its output
                printed(command)
            say(ROOT / picture)


_ran: set[str] = set()


def one_line(commands: str) -> str:
    return " ".join(commands.replace("\\\n", " ").split())


def say(path: Path) -> None:
    print(path.relative_to(ROOT), file=sys.stderr)


def remade(page: Path) -> str | None:
    """The page with its outputs made again; None if it has none."""
    source: Block | None = None
    heard: dict[int, str] = {}  # what the commands of a block print; each is run once
    changes: list[tuple[Block, str]] = []
    for block in blocks(page):
        if block.language == "bash":
            source = block
            continue
        kind, _, pattern = block.rest.partition(" ")
        if kind not in ("output", "grep"):
            continue
        assert source is not None, f"{page.name}: no commands above the block of line {block.first}"
        if source.first not in heard:
            heard[source.first] = printed(source.text)
        lines = heard[source.first].splitlines()
        if kind == "grep":
            lines = [line for line in lines if re.search(pattern, line)]
            assert lines, f"{page.name}: nothing matches {pattern!r} of line {block.first}"
        changes.append((block, "\n".join(line.rstrip() for line in lines).strip("\n")))
    if not changes:
        return None
    lines = page.read_text().splitlines()
    for block, text in reversed(changes):
        lines[block.first : block.last] = text.splitlines()
    return "\n".join(lines) + "\n"


def printed(commands: str) -> str:
    """Run as a person would, in the repository's root; both streams together."""
    print(f"+ {commands}", file=sys.stderr)
    _ran.add(one_line(commands))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-euc", commands],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "COLUMNS": "118"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise SystemExit(f"exit code {ran.returncode}: {commands}\n{ran.stdout[-3000:]}")
    return ran.stdout


if __name__ == "__main__":
    main()
