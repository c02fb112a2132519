"""Paragraphs and list items of a page, wrapped. Code, tables, headings and quotes stay as they are."""

from __future__ import annotations

import re

WIDTH = 100  # columns

_WORD = re.compile(r"(?:`[^`]*`|!?\[[^\]]*\]\([^)]*\)|\S)+")  # code and links are not broken
_ITEM = re.compile(r" *(?:[-*]|\d+\.) +")
_AS_IT_IS = ("#", "|", "<", ">")


def wrapped(page: str) -> str:
    """The page, with every paragraph wrapped that has a line wider than WIDTH."""
    made: list[str] = []
    for paragraph, lines in _paragraphs(page.split("\n")):
        wide = paragraph and max(map(len, lines)) > WIDTH
        made += _wrap(lines) if wide else lines
    return "\n".join(made)


def _paragraphs(lines: list[str]) -> list[tuple[bool, list[str]]]:
    """Runs of lines, and whether each is a paragraph or an item of a list."""
    found: list[tuple[bool, list[str]]] = []
    fenced = inside = False
    for line in lines:
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        item = _ITEM.match(line) is not None
        code = line.startswith("    ") and not inside and not item
        if fence or fenced or code or not line.strip() or line.startswith(_AS_IT_IS):
            inside = False
            found.append((False, [line]))
        elif item or not inside:
            inside = True
            found.append((True, [line]))
        else:
            found[-1][1].append(line)
    return found


def _wrap(lines: list[str]) -> list[str]:
    item = _ITEM.match(lines[0])
    first = item[0] if item else ""
    words = _WORD.findall(" ".join([lines[0][len(first) :], *lines[1:]]))
    made = [first + words[0]]
    for word in words[1:]:
        if len(made[-1]) + 1 + len(word) > WIDTH:
            made.append(" " * len(first) + word)
        else:
            made[-1] += f" {word}"
    return made
