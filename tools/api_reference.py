"""docs/reference/api/: what a user may import, from docstrings, signatures and the comments beside fields.

`PAGES` says what is public. Whatever stands there must have a docstring (`tests/docs`). Annotations are
strings in every module of ours, so they are shown as written, on every version of Python.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

# Page: (its title, what it is for, {module: names}); no names: the module's __all__.
PAGES: dict[str, tuple[str, str, dict[str, tuple[str, ...]]]] = {
    "train": (
        "Training a model of your own",
        "[Your own model in 15 lines](../../own-model.md) shows it at work.",
        {
            "everstep": (
                "train",
                "fit",
                "Result",
                "Model",
                "hf",
                "token_loss",
                "load",
                "export",
                "EverstepError",
                "UserError",
            ),
            "everstep.engine.datasets.data": ("Dataset",),
        },
    ),
    "job": (
        "A job file, as Python",
        "The same keys as in [the job file](../../job-file.md).",
        {
            "everstep.job.job": (
                "load_job",
                "Job",
                "ModelSpec",
                "DataSpec",
                "OptimizerSpec",
                "CheckpointSpec",
            )
        },
    ),
    "checkpoint": (
        "Checkpoints: read, write, convert",
        "What is in the files: [the checkpoint format](../../checkpoint-format.md).",
        {
            "everstep.store.folder": (
                "open_checkpoint",
                "newest_valid",
                "complete_steps",
                "write_part",
                "write_slices",
                "commit",
                "prune",
                "clean",
            ),
            "everstep.store.reader": ("Checkpoint",),
            "everstep_convert.conversion": ("detect", "read_state", "write_state"),
            "everstep_convert.formats.format": ("Reading", "Target", "Format"),
            "everstep_convert.selfcheck": ("Accepted", "Change", "differences"),
        },
    ),
}
_MADE = "<!-- made by `python -m tools.docs api` from the docstrings; changes here are lost -->"
_WIDTH = 100


def write(folder: Path) -> list[Path]:
    """Write every page; those that are no longer wanted go."""
    made = rendered()
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.md"):
        if path.name not in made:
            path.unlink()
    for name, text in made.items():
        (folder / name).write_text(text)
    return [folder / name for name in made]


def rendered() -> dict[str, str]:
    """File name to text."""
    index = ["# API", "", _MADE, "", "What a program may import. Everything else may change at any time.", ""]
    made = {}
    for name, (title, about, modules) in PAGES.items():
        made[f"{name}.md"] = _page(title, about, modules)
        shown = ", ".join(
            f"`{symbol}`" for module, names in modules.items() for symbol in _names(module, names)
        )
        index.append(f"- [{title}]({name}.md): {shown}")
    made["README.md"] = "\n".join([*index, ""])
    return made


def public() -> Iterator[tuple[str, Any]]:
    """Every symbol that the pages show, by its dotted name."""
    for _, _, modules in PAGES.values():
        for module, names in modules.items():
            for name in _names(module, names):
                yield f"{module}.{name}", getattr(import_module(module), name)


def _names(module: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return names or tuple(import_module(module).__all__)


def _page(title: str, about: str, modules: dict[str, tuple[str, ...]]) -> str:
    parts = [f"# {title}", _MADE, about]
    for module, names in modules.items():
        loaded = import_module(module)
        parts.append(f"## {module}")
        if len(modules) == 1 or not names:
            parts.append(prose(loaded.__doc__ or ""))
        parts += [_symbol(module, name, getattr(loaded, name)) for name in _names(module, names)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _symbol(module: str, name: str, thing: Any) -> str:
    parts = [f"### {name}"]
    if not inspect.isclass(thing) and not inspect.isfunction(thing):  # a constant, or a name for a type
        return "\n\n".join([*parts, f"```python\n{module}.{name} = {thing!r}\n```"])
    if inspect.isclass(thing):
        parts += _class(module, name, thing)
    else:
        parts += [_code(f"{module}.{name}", thing), prose(inspect.getdoc(thing) or "")]
    return "\n\n".join(part for part in parts if part)


def _class(module: str, name: str, thing: type) -> Iterator[str]:
    yield f"```python\nfrom {module} import {name}\n```"
    yield prose(own_doc(thing))
    if issubclass(thing, enum.Enum):
        notes = field_notes(thing)
        rows = [
            f"| `{member.name}` | `{member.value!r}` | {notes.get(member.name, '')} |" for member in thing
        ]
        yield "\n".join(["| member | value | |", "|---|---|---|", *rows])
        return
    if dataclasses.is_dataclass(thing) or hasattr(thing, "_fields"):
        yield _fields(thing)
    shown = getattr(thing, "__dataclass_fields__", {})
    for key, member in vars(thing).items():
        if key.startswith("_") or key in shown:
            continue
        doc = inspect.getdoc(getattr(thing, key))
        if isinstance(member, property | cached_property):
            getter = member.fget if isinstance(member, property) else member.func
            yield f"`.{key}` → `{_returns(getter)}`" + (f": {doc}" if doc else "")
        elif isinstance(member, classmethod | staticmethod) or inspect.isfunction(member):
            yield _code(f"{name}.{key}", getattr(thing, key))
            yield prose(doc or "")


def own_doc(thing: Any) -> str:
    """What its author wrote: no docstring of a parent, none that a dataclass makes up."""
    doc = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
    made_up = inspect.isclass(thing) and (doc or "").startswith(f"{thing.__name__}(")
    return "" if made_up else inspect.cleandoc(doc or "")


def _fields(thing: type) -> str:
    notes = field_notes(thing)
    rows = []
    if dataclasses.is_dataclass(thing):
        for one in dataclasses.fields(thing):
            if not one.name.startswith("_"):
                rows.append((one.name, str(one.type), _default(one)))
    else:
        defaults = getattr(thing, "_field_defaults", {})
        for key in thing._fields:  # type: ignore[attr-defined]
            default = f"`{defaults[key]!r}`" if key in defaults else ""
            rows.append((key, _written(thing.__annotations__[key]), default))
    if not rows:
        return ""
    titles = ("field", "type", "default", "meaning")
    table = [(f"`{name}`", f"`{kind}`", default, notes.get(name, "")) for name, kind, default in rows]
    kept = [n for n in range(4) if n < 2 or any(row[n] for row in table)]  # no column without a word in it
    lines = [titles, ("---",) * 4, *(tuple(_cell(cell) for cell in row) for row in table)]
    return "\n".join(f"| {' | '.join(row[n] for n in kept)} |" for row in lines)


def _cell(text: str) -> str:
    """A bar would end the cell of a table."""
    return text.replace("|", "\\|")


def _default(one: dataclasses.Field[Any]) -> str:
    if one.default is not dataclasses.MISSING:
        value = one.default
        if dataclasses.is_dataclass(value):
            return f"`{type(value).__name__}(…)`"
        return f"`{value.__name__}`" if callable(value) else f"`{value!r}`"
    if one.default_factory is not dataclasses.MISSING:
        made = one.default_factory()
        return f"`{made!r}`" if isinstance(made, dict | list | tuple | set) else "made"
    return ""


def field_notes(thing: type) -> dict[str, str]:
    """The comment beside or below each field: where this code explains its fields."""
    try:
        source = textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):
        return {}
    lines = source.splitlines()
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    notes = {}
    for node in body.body:
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        if not isinstance(target, ast.Name) or node.end_lineno is None:
            continue
        rest = lines[node.end_lineno - 1].encode()[node.end_col_offset or 0 :].decode()
        if "#" in rest:
            notes[target.id] = rest.partition("#")[2].strip()
    return notes


def _written(annotation: Any) -> str:
    return str(getattr(annotation, "__forward_arg__", annotation))


def _returns(function: Callable[..., Any] | None) -> str:
    return str(getattr(function, "__annotations__", {}).get("return", ""))


def _code(name: str, function: Callable[..., Any]) -> str:
    """The signature, one argument a line where it is long."""
    signature = inspect.signature(function)
    shown, seen_star = [], False
    for one in signature.parameters.values():
        if one.name in ("self", "cls"):
            continue
        if one.kind is one.KEYWORD_ONLY and not seen_star:
            shown.append("*")
            seen_star = True
        seen_star = seen_star or one.kind is one.VAR_POSITIONAL
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        text = f"{stars}{one.name}"
        if one.annotation is not one.empty:
            text += f": {one.annotation}"
        if one.default is not one.empty:
            default = one.default
            value = "…" if callable(default) or " at 0x" in repr(default) else repr(default)
            text += f" = {value}" if ":" in text else f"={value}"
        shown.append(text)
    result = (
        f" -> {signature.return_annotation}" if signature.return_annotation is not signature.empty else ""
    )
    whole = f"{name}({', '.join(shown)}){result}"
    if len(whole) > _WIDTH:
        whole = f"{name}(\n" + "".join(f"    {one},\n" for one in shown) + f"){result}"
    return f"```python\n{whole}\n```"


_ENTRY = re.compile(r"^(\S[\w.,()*/` -]{0,40}?)\s{2,}(\S.*)$")


def prose(doc: str) -> str:
    """A docstring as Markdown: lists of `name   meaning` become lists, indented blocks stay code."""
    out: list[str] = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(doc)):
        lines = paragraph.splitlines()
        if not lines:
            continue
        if all(line.startswith("    ") for line in lines):
            out.append("```text\n" + textwrap.dedent(paragraph) + "\n```")
        elif entries := _entries(lines):
            out.append("\n".join(f"- `{name.strip('`')}`: {meaning}" for name, meaning in entries))
        else:
            out.append(paragraph)
    return "\n\n".join(out)


def _entries(lines: list[str]) -> list[tuple[str, str]] | None:
    """`name   meaning`, with meanings that go on in the lines below, all the way down."""
    found: list[tuple[str, str]] = []
    for line in lines:
        if (entry := _ENTRY.match(line)) is not None:
            found.append((entry[1].strip(), entry[2]))
        elif found and line.startswith("    "):
            found[-1] = found[-1][0], f"{found[-1][1]} {line.strip()}"
        else:
            return None
    return found
