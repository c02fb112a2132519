"""`everstep diagnose`: from a directory of dumps to a verdict with its evidence.

It needs neither torch nor a GPU, because dumps are rarely read on the machine that wrote them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from everstep.cli import render
from everstep.cli.render import AsJson, Console
from everstep.errors import UserError
from everstep.stack_text import STACKS_FILE, Frame, main_frames, of_script
from everstep_diagnose import Diagnosis, UnusableFileError, analyse, read
from everstep_diagnose.case import Mixed, mixed
from everstep_diagnose.finding import ranks_text

_MOST_BYTES = 1 << 30
_SHOWN = 8


def diagnose_command(
    path: Annotated[Path, typer.Argument(help="A dump, or a directory of dumps and rings of one job.")],
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FOLDER",
            help="Of several jobs in PATH, read only this folder inside it. Repeatable.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the hung or slow rank or link from records of communication.

    Reads PyTorch Flight Recorder dumps (pickle and JSON), NCCL Inspector and RAS files, and Everstep's own
    rings; and stacks of ranks of everstep run. Unusable files are listed and skipped.

    [bold]Examples[/bold]

      everstep diagnose /tmp/traces

      everstep diagnose runs/ --only attempt_1
    """
    diagnosis = _diagnosed(path, only or [], Console(stderr=True))
    if as_json:
        sys.stdout.write(json.dumps(diagnosis.document()) + "\n")
    else:
        _show(diagnosis)


def _diagnosed(path: Path, only: list[str], messages: Console) -> Diagnosis:
    for place in only:
        if not (path / place).resolve().is_relative_to(path.resolve()):
            raise UserError(f"--only {place} is not inside {path}.")
    files = [file for place in only or [""] for file in _files(path / place)]
    parts, unusable = [], []
    places: dict[int, Frame] = {}  # of ranks whose stacks are there
    statuses: list[tuple[int, str, bytes]] = []  # of RAS, by their time: two of them tell what stands still
    with Progress(console=messages, transient=True) as bar:
        for file in bar.track(files, description="reading"):
            name = str(file.relative_to(path)) if path.is_dir() else file.name
            try:
                content = _content(file)
                if file.name == STACKS_FILE and file.parent.name.isdecimal():
                    if (frame := of_script(main_frames(content.decode(errors="replace")))) is not None:
                        places[int(file.parent.name)] = frame
                    continue
                modified_ns = file.stat().st_mtime_ns
                part = read(name, content, modified_ns=modified_ns)
                if part.form == "ras":
                    statuses.append((modified_ns, name, content))
                else:
                    parts.append(part)
            except UnusableFileError as why:
                unusable.append((name, str(why)))
    if statuses:
        *earlier, (_, name, content) = sorted(statuses)
        parts.append(read(name, content, before=earlier[-1][2] if earlier else None))
    if (found := mixed(parts)) is not None:
        raise UserError(_which(path, found))
    if not parts:
        first = f"; {unusable[0][0]}: {unusable[0][1]}" if unusable else ""
        raise UserError(f"{path} contains no usable dump{first}.")
    diagnosis = analyse(parts)
    diagnosis.unusable = unusable
    suspects = {one.rank for finding in diagnosis.incidents for one in finding.suspects[:_SHOWN]}
    diagnosis.notes += [
        f"rank {rank} is at {places[rank]} in its last stacks" for rank in sorted(suspects & places.keys())
    ]
    return diagnosis


def _which(path: Path, found: Mixed) -> str:
    """Two jobs are asked about, not mixed."""
    if len(found.folders) == 1:
        sizes = " and ".join(map(str, found.sizes))
        return (
            f"{path / found.folders[0]} has files of rank {found.rank} from jobs of {sizes} ranks; put those "
            "of one job into a folder of their own."
        )
    listed = ", ".join(found.folders[:_SHOWN]) + (" ..." if len(found.folders) > _SHOWN else "")
    return (
        f"{path} has files of rank {found.rank} in {len(found.folders)} folders ({listed}): of several jobs, "
        f"or of several attempts at one. Choose with --only {found.folders[0]}."
    )


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise UserError(f"{path} not found; give a dump or a directory of dumps.")
    if path.is_file():
        return [path]
    files = sorted(f for f in path.rglob("*") if f.is_file() and not f.name.startswith("."))
    if not files:
        raise UserError(f"{path} is empty; give a directory with dumps or rings.")
    return files


def _content(file: Path) -> bytes:
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise UnusableFileError("larger than 1 GiB")
        return file.read_bytes()
    except OSError as error:
        raise UnusableFileError(f"it cannot be read: {error.strerror}") from None


def _show(diagnosis: Diagnosis) -> None:
    console = Console(highlight=False)
    if not diagnosis.incidents:
        console.print("No rank and no link stands out: no incident.", style="green")
    for finding in diagnosis.incidents:
        said = escape(f", {finding.where}: {finding.because}")
        console.print(f"[bold red]{finding.syndrome}[/]{said}", soft_wrap=True)
        if finding.suspects:
            table = Table("suspect", "node", "confidence", "evidence")
            for suspect in finding.suspects[:_SHOWN]:
                who = f"rank {suspect.rank}" + (f" → {suspect.peer}" if suspect.peer is not None else "")
                node, evidence = escape(suspect.node), escape(suspect.evidence)
                table.add_row(who, node, f"{suspect.confidence:.2f}", evidence)
            render.show(table)
        if len(finding.suspects) > _SHOWN:
            console.print(f"and {len(finding.suspects) - _SHOWN} more suspects; --json has them all.")
        if finding.victims:
            console.print(f"victims: rank {ranks_text(finding.victims)}", soft_wrap=True)
        for out in finding.ruled_out[:_SHOWN]:
            console.print(escape(f"ruled out: {out.what}: {out.because}"), style="dim", soft_wrap=True)
    for imbalance in diagnosis.imbalances:
        said = escape(f", {imbalance.kind}: {imbalance.because}")
        console.print(f"[yellow]not a fault[/]{said}", soft_wrap=True)
    for note in diagnosis.notes:
        console.print(escape(f"note: {note}"), style="dim", soft_wrap=True)
    for name, why in diagnosis.unusable:
        console.print(escape(f"left out: {name}: {why}"), style="dim", soft_wrap=True)
