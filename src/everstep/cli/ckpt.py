"""`everstep ckpt`: look into checkpoints, convert them, check them, compare them, throw old ones away."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from everstep.cli.render import emit, note
from everstep.errors import UserError

if TYPE_CHECKING:
    from everstep.checkpoint.state import State
    from everstep.layout.patterns import Patterns

ckpt_app = typer.Typer(
    no_args_is_help=True,
    help="Universal checkpoints: inspect, convert, verify, diff and prune them.",
    rich_markup_mode="rich",
)
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
FORMAT_HELP = "universal, hf, dcp, deepspeed, deepspeed-universal, megatron or megatron-legacy."
PathOf = Annotated[str, typer.Argument(help="A checkpoint's folder, or a URL of universal ones.")]


@ckpt_app.command("inspect")
def inspect_command(
    path: PathOf,
    match: Annotated[str, typer.Option(help="Only tensors whose name matches this expression.")] = "",
    limit: Annotated[int, typer.Option(help="Tensors to list; 0 for all.")] = 40,
    as_json: AsJson = False,
) -> None:
    """What is in a checkpoint of any kind: tensors, groups, and who holds what.

    Examples:

        everstep ckpt inspect checkpoints

        everstep ckpt inspect checkpoints/step-00000100 --match 'model/.*q.*' --json
    """
    kind, state = _read(path)
    told = _document(path, kind, state, match)
    if as_json:
        emit(told)
        return
    _show(told, limit)
    for line in _picture(path, kind):
        Console(highlight=False).print(line, soft_wrap=True)


@ckpt_app.command("convert")
def convert_command(
    source: Annotated[str, typer.Argument(help="A checkpoint of any kind we know.")],
    target: Annotated[str, typer.Argument(help="The folder (or URL, for universal) to write.")],
    to: Annotated[str, typer.Option(help=f"The kind to write: {FORMAT_HELP}")] = "universal",
    names: Annotated[str, typer.Option(help="keep, llama, everstep or megatron.")] = "keep",
    stage: Annotated[int, typer.Option(help="deepspeed: ZeRO stage.")] = 1,
    world: Annotated[int, typer.Option(help="deepspeed: number of ranks.")] = 1,
    tp: Annotated[int, typer.Option(help="megatron-legacy: tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(help="megatron-legacy: pipeline stages.")] = 1,
    precision: Annotated[str, typer.Option(help="deepspeed: bf16, fp16 or fp32.")] = "",
    dtype: Annotated[str, typer.Option(help="hf: type of the weights, such as BF16.")] = "",
    heads: Annotated[int, typer.Option(help="Attention heads, where the source does not say.")] = 0,
    kv_heads: Annotated[int, typer.Option(help="Key and value heads, if fewer.")] = 0,
    patterns: Annotated[
        Path | None, typer.Option(help="TOML: how parameters lie over tensor-parallel ranks.")
    ] = None,
    vocab: Annotated[int, typer.Option(help="The vocabulary's real size, to strip its padding.")] = 0,
    optimizer: Annotated[bool, typer.Option(help="With the optimizer's state.")] = True,
    threads: Annotated[int, typer.Option(help="Threads that read, hash and write.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Convert a checkpoint; what it is is found out by looking at it.

    Examples:

        everstep ckpt convert deepspeed-run/ universal/

        everstep ckpt convert universal/ z3/ --to deepspeed --stage 3 --world 4

        everstep ckpt convert checkpoints/ llama/ --to hf --names llama --no-optimizer --dtype BF16
    """
    from everstep.checkpoint.convert import Target, write_state
    from everstep.checkpoint.formats.dialects import DIALECTS, Heads

    if names != "keep" and names not in DIALECTS:
        raise UserError(f"--names {names} is not keep, {', '.join(DIALECTS)}.")
    goal = Target(
        format=to,  # type: ignore[arg-type]
        names=None if names == "keep" else names,  # type: ignore[arg-type]
        heads=Heads(heads, kv_heads or heads) if heads else None,
        stage=stage,
        world=world,
        tp=tp,
        pp=pp,
        precision=precision or None,
        dtype=dtype or None,
        with_optimizer=optimizer,
        threads=max(1, threads),
    )
    kind, state = _read(source, _patterns(patterns), vocab or None)
    _give_config(state, goal.format, heads, kv_heads)
    with _bar(f"{kind} to {to}", state.num_bytes()) as advance:
        write_state(target, state, goal, advance)
    for sentence in state.notes:
        note(f"note: {sentence}")
    told = {
        "source": source,
        "source_format": kind,
        "target": target,
        "target_format": to,
        "step": state.step,
        "tensors": len(state.tensors),
        "bytes": state.num_bytes(),
        "notes": state.notes,
    }
    if as_json:
        emit(told)
    else:
        size = _size(state.num_bytes())
        print(f"{target}: {to}, step {state.step}, {len(state.tensors)} tensors, {size}")


@ckpt_app.command("verify")
def verify_command(
    path: PathOf,
    every: Annotated[bool, typer.Option("--all", help="Every step of a folder, not the newest.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every byte of a universal checkpoint and compare it with its hash. Exit code 1 if one differs.

    Examples:

        everstep ckpt verify checkpoints

        everstep ckpt verify checkpoints --all --json
    """
    from everstep.checkpoint import folder
    from everstep.checkpoint.places import STEP, place_of

    root, names = path, [name for _, name in place_of(path).complete()]
    if STEP.fullmatch(path.rstrip("/").rpartition("/")[2]):
        root, _, name = path.rstrip("/").rpartition("/")
        names = [name]
    if not names:
        raise UserError(f"{path} holds no universal checkpoint.")
    rows: list[dict[str, Any]] = []
    for name in names if every else names[-1:]:
        try:
            found = folder.open_step(root or ".", name)
            total = sum(entry.num_bytes for entry in found.tensors.values())
            with _bar(name, total) as advance:
                found.verify(progress=advance)
            rows.append({"checkpoint": str(found), "ok": True, "bytes": total, "because": ""})
        except UserError as error:
            rows.append({"checkpoint": f"{root}/{name}", "ok": False, "bytes": 0, "because": str(error)})
    if as_json:
        emit({"checkpoints": rows, "ok": all(row["ok"] for row in rows)})
    else:
        for row in rows:
            print(f"{row['checkpoint']}: {_size(row['bytes'])} as written" if row["ok"] else row["because"])
    if not all(row["ok"] for row in rows):
        raise typer.Exit(1)


@ckpt_app.command("diff")
def diff_command(a: PathOf, b: PathOf, as_json: AsJson = False) -> None:
    """Compare two checkpoints of any kinds, tensor by tensor. Exit code 1 if they differ.

    Examples:

        everstep ckpt diff run-a/step-00000100 run-b/step-00000100

        everstep ckpt diff deepspeed-run/ universal/ --json
    """
    from everstep.checkpoint.compare import compare

    (_, first), (_, second) = _read(a), _read(b)
    with _bar("compare", first.num_bytes()) as advance:
        told = compare(first, second, advance)
    if as_json:
        emit({"a": a, "b": b, **told})
    else:
        _show_difference(told)
    if not told["same"]:
        raise typer.Exit(1)


@ckpt_app.command("prune")
def prune_command(
    root: Annotated[str, typer.Argument(help="A folder or URL with step-… checkpoints.")],
    keep: Annotated[int, typer.Option(help="How many of the newest stay.")] = 3,
    keep_every: Annotated[int, typer.Option(help="Multiples of this step stay too; 0 for none.")] = 0,
    dry_run: Annotated[bool, typer.Option(help="Only say what would go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove old checkpoints, and what crashes left. The newest that passes every check always stays.

    Examples:

        everstep ckpt prune checkpoints --keep 2 --keep-every 1000 --dry-run
    """
    from everstep.checkpoint import folder

    if keep < 1 or keep_every < 0:
        raise UserError("--keep must be at least 1, and --keep-every at least 0.")
    if not folder.complete_steps(root):
        raise UserError(f"{root} holds no universal checkpoint.")
    gone = folder.prune(root, keep=keep, keep_every=keep_every, dry_run=dry_run)
    left = [] if dry_run else [str(path) for path in folder.clean(root)]
    if as_json:
        kept = [step for step in folder.complete_steps(root) if not dry_run or step not in gone]
        emit({"removed": gone, "kept": kept, "half_written_removed": left, "dry_run": dry_run})
        return
    verb = "would go" if dry_run else "removed"
    print(f"{verb}: {', '.join(map(str, gone)) or 'nothing'}")


# ------------------------------------------------------------------ how


def _read(path: str, patterns: Patterns | None = None, vocab: int | None = None) -> tuple[str, State]:
    from everstep.checkpoint.convert import detect, read_state

    kind = detect(path)
    return kind, read_state(path, kind, patterns=patterns, vocab=vocab)


def _patterns(path: Path | None) -> Patterns | None:
    if path is None:
        return None
    from everstep.layout.patterns import read_patterns

    try:
        return read_patterns(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise UserError(f"--patterns {path} cannot be read: {error.strerror}.") from None


def _give_config(state: State, to: str, heads: int, kv_heads: int) -> None:
    """A Hugging Face folder wants a config.json; ours can be made from what we know of our own GPT."""
    if to == "hf" and "hf_config" not in state.meta:
        from everstep.checkpoint.formats.dialects import dialect_of
        from everstep.checkpoint.formats.llama_config import config_of

        if dialect_of(state) == "everstep":
            state.meta["hf_config"] = config_of(state, heads, kv_heads)


@contextlib.contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """On stderr, and only on a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn(what),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def _document(path: str, kind: str, state: State, match: str) -> dict[str, Any]:
    from everstep.checkpoint.stored import num_bytes

    try:
        wanted = re.compile(match)
    except re.error as error:
        raise UserError(f"--match {match!r} is no regular expression: {error}.") from None
    tensors = [
        {"name": name, "dtype": stored.dtype, "shape": list(stored.shape), "bytes": num_bytes(stored)}
        for name, stored in state.tensors.items()
        if not match or wanted.search(name)
    ]
    return {
        "path": path,
        "format": kind,
        "step": state.step,
        "bytes": state.num_bytes(),
        "parameters": sum(num_bytes(s) // _item(s) for s in state.parameters().values()),
        "groups": state.groups,
        "tied": state.tied,
        "frozen": state.frozen,
        "meta": state.meta,
        "notes": state.notes,
        "tensors": tensors,
        "parts": _parts(path, kind),
    }


def _item(stored: Any) -> int:
    from everstep.layout.layout import ITEM_BYTES

    return ITEM_BYTES[stored.dtype]


def _parts(path: str, kind: str) -> list[dict[str, Any]]:
    """Who holds what: the files of a universal checkpoint and their slices."""
    if kind != "universal":
        return []
    from everstep.checkpoint.formats.universal import find

    found = find(path)
    rows: dict[str, dict[str, Any]] = {
        file: {"file": file, "bytes": size, "slices": []} for file, size in found.index.files.items()
    }
    for name, entry in found.tensors.items():
        for one in entry.slices:
            rows[one.file]["slices"].append(
                {"tensor": name, "start": list(one.box.start), "size": list(one.box.size)}
            )
    return list(rows.values())


def _picture(path: str, kind: str) -> list[str]:
    if kind != "universal":
        return []
    from everstep.checkpoint.formats.universal import find
    from everstep.layout.picture import draw

    lines = draw(find(path).layout())
    return ["", "who holds what (a column is a tensor, or several; a full block is all of it):", *lines]


def _show(told: dict[str, Any], limit: int) -> None:
    console = Console(highlight=False)
    console.print(
        f"{told['path']}: {told['format']}, step {told['step']}, {told['parameters']:,} parameters, "
        f"{_size(told['bytes'])} in {len(told['tensors'])} tensors",
        soft_wrap=True,
    )
    for i, group in enumerate(told["groups"]):
        numbers = ", ".join(f"{k}={v}" for k, v in group.items() if k != "params" and v is not None)
        console.print(f"group {i}: {len(group['params'])} parameters, {numbers}", soft_wrap=True)
    for name, other in told["tied"].items():
        console.print(f"tied: {name} is {other}")
    if told["frozen"]:
        console.print(f"frozen: {', '.join(told['frozen'])}", soft_wrap=True)
    table = Table("tensor", "dtype", "shape", "size")
    rows = told["tensors"]
    for row in rows[: limit or None]:
        table.add_row(row["name"], row["dtype"], " x ".join(map(str, row["shape"])), _size(row["bytes"]))
    console.print(table)
    if limit and len(rows) > limit:
        console.print(f"… and {len(rows) - limit} more; --limit 0 lists all.")
    for sentence in told["notes"]:
        note(f"note: {sentence}")


def _show_difference(told: dict[str, Any]) -> None:
    for side in ("only_in_a", "only_in_b"):
        for name in told[side]:
            print(f"{side.replace('_', ' ')}: {name}")
    for row in told["different"]:
        print(f"{row['tensor']}: {row['because']}")
    for sentence in told["elsewhere"]:
        print(sentence)
    if told["same"]:
        print(f"the same: {told['equal']} tensors, {_size(told['bytes'])}")


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
