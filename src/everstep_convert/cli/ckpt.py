"""`everstep ckpt`: inspect, convert, verify, compare and prune checkpoints."""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from everstep.cli import render
from everstep.cli.render import AsJson, emit, note, parameters
from everstep.errors import UserError
from everstep_convert.cli.ckpt_text import document, progress_bar, show, size_text
from everstep_convert.formats.dialects import DIALECTS
from everstep_convert.formats.known_formats import FORMATS

if TYPE_CHECKING:
    from everstep_convert.formats.format import Reading
    from everstep_convert.patterns import Patterns
    from everstep_convert.state import TrainingState

DIFFERS = {"lost": "only in a: {name}", "added": "only in b: {name}", "type": "{name}", "value": "{name}"}
ckpt_app = typer.Typer(
    no_args_is_help=True,
    help="Universal checkpoints: inspect, convert, export, verify, diff and prune them.",
    rich_markup_mode="rich",
)
WRITTEN = [row.name for row in FORMATS.values() if row.is_written]
_KEY = re.compile(r"[A-Za-z0-9_.-]{1,100}")
PathOf = Annotated[str, typer.Argument(help="Checkpoint directory, or URL of a universal checkpoint.")]


@ckpt_app.command("inspect")
def inspect_command(
    path: PathOf,
    match: Annotated[str, typer.Option(help="Only tensors whose name matches this regular expression.")] = "",
    limit: Annotated[int, typer.Option(help="Tensors to list; 0 for all.")] = 40,
    as_json: AsJson = False,
) -> None:
    """List the tensors and parameter groups of a checkpoint of any format, and the files they are in.

    Examples:

        everstep ckpt inspect checkpoints

        everstep ckpt inspect checkpoints/step-00000100 --match 'model/.*q.*' --json
    """
    kind, state = _read(path)
    found = document(path, kind, state, match)
    if as_json:
        emit(found)
        return
    show(found, limit)


@ckpt_app.command("formats")
def formats_command(as_json: AsJson = False) -> None:
    """List the formats that can be read and written.

    Examples:

        everstep ckpt formats
    """
    columns = ("name", "title", "reads", "writes", "optimizer")
    rows = [{column: getattr(row, column) for column in columns} for row in FORMATS.values()]
    if as_json:
        emit({"formats": rows})
        return
    table = Table("--to", "format", "reads", "writes", "optimizer state")
    for row in rows:
        table.add_row(*(row[column] for column in columns))
    render.show(table)


@ckpt_app.command("convert")
def convert_command(
    source: Annotated[str, typer.Argument(help="A checkpoint of any known format.")],
    target: Annotated[str, typer.Argument(help="Directory (or URL, for universal) to write.")],
    to: Annotated[str, typer.Option(help=f"The format to write: {', '.join(WRITTEN)}.")] = "universal",
    accept: Annotated[
        list[str] | None,
        typer.Option(help="Accept a change the self-check finds, such as lost:lr_scheduler. Repeatable."),
    ] = None,
    names: Annotated[str, typer.Option(help=f"keep, {', '.join(DIALECTS)}.")] = "keep",
    precision: Annotated[str, typer.Option(help="deepspeed-universal: bf16, fp16 or fp32.")] = "",
    dtype: Annotated[str, typer.Option(help="Type of the weights, such as BF16.")] = "",
    shard_gib: Annotated[float, typer.Option(help="hf: size of a file.")] = 5.0,
    heads: Annotated[int, typer.Option(help="Attention heads, where the source does not say.")] = 0,
    kv_heads: Annotated[int, typer.Option(help="Key and value heads, if fewer.")] = 0,
    patterns: Annotated[
        Path | None, typer.Option(help="TOML: how the source is split over tensor-parallel ranks.")
    ] = None,
    to_patterns: Annotated[
        Path | None,
        typer.Option(help="TOML, deepspeed-universal: how to split it over tensor-parallel ranks."),
    ] = None,
    vocab: Annotated[int, typer.Option(help="Vocabulary size without padding.")] = 0,
    buffers: Annotated[
        list[str] | None, typer.Option(help="dcp, hf: names that are buffers, with * and ?. Repeatable.")
    ] = None,
    frozen: Annotated[
        list[str] | None, typer.Option(help="dcp, hf: names of frozen parameters, likewise.")
    ] = None,
    keys: Annotated[
        str,
        typer.Option(
            metavar="model=M,optim=O,step=S",
            help="dcp: what your script calls these three in the dict that it saves and loads (of the "
            "target, or of the source if the target is no dcp); by default as the source came with them.",
        ),
    ] = "",
    optimizer: Annotated[bool, typer.Option(help="Include the optimizer state.")] = True,
    threads: Annotated[int, typer.Option(help="Threads that read, hash and write.")] = 2,
    share: Annotated[
        str, typer.Option(metavar="I/N", help="universal: write only share I of N, such as 1/4.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Convert a checkpoint to another format. The format of the source is detected automatically.

    The result is read back and compared with the source. The command fails if anything is lost, added or
    changed in type, unless you --accept it.

    Several processes, also of several machines with a shared file system or object store, convert one
    checkpoint together: run the command once for every share. The checkpoint appears when the last share is
    written, in any order. A share that failed can be run again.

    Examples:

        everstep ckpt convert deepspeed-run/ universal/

        everstep ckpt convert checkpoints/ for-deepspeed/ --to deepspeed-universal

        everstep ckpt convert checkpoints/ llama/ --to hf --names llama --no-optimizer --dtype BF16

        everstep ckpt convert dcp-run/ universal/ --accept 'lost:lr_scheduler*'

        for i in 1 2 3 4; do everstep ckpt convert z3/ universal/ --share $i/4 & done; wait
    """
    from everstep_convert.conversion import Accepted, Reading, Target, write_state, written_format
    from everstep_convert.formats.dialects import Heads
    from everstep_convert.formats.universal import missing_shares

    if names != "keep" and names not in DIALECTS:
        raise UserError(f"--names {names} is not keep, {', '.join(DIALECTS)}.")
    if shard_gib <= 0:
        raise UserError(f"--shard-gib {shard_gib:g} must be more than 0.")
    accepted = Accepted(tuple(accept or ()))
    written_format(to)
    goal = Target(
        format=to,
        names=None if names == "keep" else names,  # type: ignore[arg-type]
        heads=Heads(heads, kv_heads or heads) if heads else None,
        patterns=_patterns(to_patterns, "--to-patterns"),
        precision=precision or None,
        dtype=dtype or None,
        shard_bytes=round(shard_gib * 2**30),
        with_optimizer=optimizer,
        threads=max(1, threads),
        share=_share(share),
        keys=_keys(keys) if to == "dcp" else (),
    )
    reading = Reading(
        patterns=_patterns(patterns),
        vocab=vocab or None,
        buffers=tuple(buffers or ()),
        frozen=tuple(frozen or ()),
        keys=_keys(keys) if to != "dcp" else (),
    )
    kind, state = _read(source, reading)
    if keys and "dcp" not in (kind, to):
        raise UserError(f"--keys is for dcp, and this converts {kind} to {to}; leave it out.")
    _require_apart(source, target, kind)
    _give_config(state, goal.format, heads, kv_heads)
    size = state.num_bytes() // (goal.share[1] if goal.share else 1)
    with progress_bar(f"{kind} to {to}", size) as advance:
        changes = write_state(target, state, goal, advance, accepted=accepted)
    for sentence in state.notes:
        note(f"note: {sentence}")
    for change in changes:
        note(f"accepted: {change}")
    missing = missing_shares(target, state.step, goal.share[1]) if goal.share else []
    result = {
        "source": source,
        "source_format": kind,
        "target": target,
        "target_format": to,
        "step": state.step,
        "tensors": len(state.tensors),
        "bytes": state.num_bytes(),
        "notes": state.notes,
        "checked": True,
        "accepted": [str(change) for change in changes],
        **({"share": share, "missing_shares": missing} if goal.share else {}),
    }
    if as_json:
        emit(result)
    elif missing:
        render.echo(f"{target}: share {share} of step {state.step}, checked; waiting for {_listed(missing)}")
    else:
        total = size_text(state.num_bytes())
        render.echo(f"{target}: {to}, step {state.step}, {len(state.tensors)} tensors, {total}, checked")


def _share(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    found = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(f"--share {text} is not I/N with I from 1 to N, such as 1/4.")
    return int(found[1]), int(found[2])


def _keys(text: str) -> tuple[tuple[str, str], ...]:
    found = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    names = [name for what, name in found.items() if name or what != "model"]
    right = len(found) == len(text.split(",")) and found.keys() <= {"model", "optim", "step"}
    if text and not (right and len(names) == len({*names}) and all(map(_KEY.fullmatch, names))):
        raise UserError(
            f"--keys {text} is not of the form model=model,optim=optimizer,step=step, with three names."
        )
    return tuple(found.items())


def _listed(missing: list[int]) -> str:
    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    return f"share{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing[:8]))}{more}"


def _require_apart(source: str, target: str, kind: str) -> None:
    """A conversion leaves its source as it is. DCP and Hugging Face are flat folders; the others keep one
    folder per step, and a new one may lie beside those.
    """
    if "://" in source or "://" in target:
        return
    here, there = Path(os.path.realpath(source)), Path(os.path.realpath(target))
    if here == there or (kind in ("dcp", "hf") and here in there.parents):
        raise UserError(f"{target} is inside the source {source}; give a folder outside of it.")


@ckpt_app.command("export")
def export_command(
    source: PathOf,
    target: Annotated[str, typer.Argument(help="Directory to write; transformers can load it.")],
    model: Annotated[
        str, typer.Option(metavar="DIR", help="Directory of the base model, if it has moved.")
    ] = "",
    prepare: Annotated[
        str,
        typer.Option(metavar="MODULE:FUNCTION", help="The function that put adapters into the model."),
    ] = "",
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Write peft's adapters alone; else they are merged.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    as_json: AsJson = False,
) -> None:
    """Export a checkpoint as a Hugging Face model directory, frozen weights included.

    Examples:

        everstep ckpt export checkpoints my-llama-tuned

        everstep ckpt export checkpoints/step-00000100 tuned --dtype bfloat16 --json

        everstep ckpt export checkpoints lora --prepare mine:with_lora --adapters
    """
    from everstep.launch.local.export import export

    made = export(
        source, target, model=model or None, prepare=prepare or None, adapters=adapters, dtype=dtype
    )
    if as_json:
        emit(asdict(made))
    else:
        render.echo(f"{made.folder}: {made.architecture}, step {made.step}, {parameters(made.parameters)}")


@ckpt_app.command("verify")
def verify_command(
    path: PathOf,
    every: Annotated[bool, typer.Option("--all", help="Verify every step, not only the newest.")] = False,
    as_json: AsJson = False,
) -> None:
    """Verify the checksums of a universal checkpoint. Exit code 1 if one differs.

    Examples:

        everstep ckpt verify checkpoints

        everstep ckpt verify checkpoints --all --json
    """
    from everstep.store import folder
    from everstep.store.places import STEP, place_of

    root, names = path, [name for _, name in place_of(path).complete()]
    if STEP.fullmatch(path.rstrip("/").rpartition("/")[2]):
        root, _, name = path.rstrip("/").rpartition("/")
        names = [name]
    if not names:
        raise UserError(f"{path} has no universal checkpoint.")
    rows: list[dict[str, Any]] = []
    for name in names if every else names[-1:]:
        try:
            found = folder.open_step(root or ".", name)
            total = sum(entry.num_bytes for entry in found.tensors.values())
            with progress_bar(name, total) as advance:
                found.verify(progress=advance)
            rows.append({"checkpoint": str(found), "ok": True, "bytes": total, "because": ""})
        except UserError as error:
            rows.append({"checkpoint": f"{root}/{name}", "ok": False, "bytes": 0, "because": str(error)})
    if as_json:
        emit({"checkpoints": rows, "ok": all(row["ok"] for row in rows)})
    else:
        for row in rows:
            render.echo(
                f"{row['checkpoint']}: {size_text(row['bytes'])} verified" if row["ok"] else row["because"]
            )
    if not all(row["ok"] for row in rows):
        raise typer.Exit(1)


@ckpt_app.command("diff")
def diff_command(a: PathOf, b: PathOf, as_json: AsJson = False) -> None:
    """Compare two checkpoints of any formats, tensor by tensor. Exit code 1 if they differ.

    Examples:

        everstep ckpt diff run-a/step-00000100 run-b/step-00000100

        everstep ckpt diff deepspeed-run/ universal/ --json
    """
    from everstep_convert.selfcheck import differences

    (_, first), (_, second) = _read(a), _read(b)
    with progress_bar("compare", first.num_bytes()) as advance:
        found = differences(first, second, progress=advance)
    rows = [{"kind": row.kind, "name": row.name, "detail": row.detail} for row in found]
    if as_json:
        emit({"a": a, "b": b, "same": not found, "tensors": len(first.tensors), "different": rows})
    for row in found if not as_json else ():
        render.echo(DIFFERS[row.kind].format(name=row.name) + (f": {row.detail}" if row.detail else ""))
    if not found and not as_json:
        render.echo(f"identical: {len(first.tensors)} tensors, {size_text(first.num_bytes())}")
    if found:
        raise typer.Exit(1)


@ckpt_app.command("prune")
def prune_command(
    root: Annotated[str, typer.Argument(help="Directory or URL with step-… checkpoints.")],
    keep: Annotated[int, typer.Option(help="Number of newest checkpoints to keep.")] = 3,
    keep_every: Annotated[int, typer.Option(help="Also keep multiples of this step; 0 for none.")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be removed, remove nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove old and incomplete checkpoints. The newest one that passes every check is always kept.

    Examples:

        everstep ckpt prune checkpoints --keep 2 --keep-every 1000 --dry-run
    """
    from everstep.store import folder

    if keep < 1 or keep_every < 0:
        raise UserError("--keep must be at least 1, and --keep-every at least 0.")
    if not folder.complete_steps(root):
        raise UserError(f"{root} has no universal checkpoint.")
    gone = folder.prune(root, keep=keep, keep_every=keep_every, dry_run=dry_run)
    left = [] if dry_run else [str(path) for path in folder.clean(root)]
    if as_json:
        kept = [step for step in folder.complete_steps(root) if not dry_run or step not in gone]
        emit({"removed": gone, "kept": kept, "half_written_removed": left, "dry_run": dry_run})
        return
    verb = "would be removed" if dry_run else "removed"
    render.echo(f"{verb}: {', '.join(map(str, gone)) or 'nothing'}")


# ------------------------------------------------------------------ reading


def _read(path: str, reading: Reading | None = None) -> tuple[str, TrainingState]:
    from everstep_convert.conversion import detect, read_state

    kind = detect(path)
    return kind, read_state(path, kind, reading)


def _patterns(path: Path | None, option: str = "--patterns") -> Patterns | None:
    if path is None:
        return None
    from everstep_convert.patterns import read_patterns

    try:
        return read_patterns(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise UserError(f"{option} {path} cannot be read: {error.strerror}.") from None


def _give_config(state: TrainingState, to: str, heads: int, kv_heads: int) -> None:
    """A Hugging Face folder needs a config.json; for our own GPT it can be made."""
    if to == "hf" and "hf_config" not in state.meta:
        from everstep_convert.formats.dialects import is_our_gpt
        from everstep_convert.formats.hf import llama_config

        if is_our_gpt(state):
            state.meta["hf_config"] = llama_config(state, heads, kv_heads)
