"""`everstep diagnose`: from a directory of dumps or traces to a verdict with its evidence.

This module reads files and prints; `everstep.diagnose` decides. It needs neither torch nor a GPU, because
dumps are rarely read on the machine that wrote them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from everstep.cli import render
from everstep.cli.render import AsJson
from everstep.errors import UserError

if TYPE_CHECKING:
    from everstep.diagnose import Analysis, Diagnosis

_MOST_BYTES = 1 << 30
_SHOWN = 8


def diagnose_command(
    path: Annotated[
        Path, typer.Argument(help="A dump, or a directory of dumps, rings or traces of one job.")
    ],
    pull: Annotated[
        list[str] | None,
        typer.Option(
            help="First ask a running rank for its records and save them to PATH. HOST:PORT, or the socket "
            "of its worker server. Repeat it for each rank, in order of rank."
        ),
    ] = None,
    as_json: AsJson = False,
    pictures: Annotated[
        Path | None,
        typer.Option(help="Write delay matrix, wait graph and timeline as SVG into this directory."),
    ] = None,
    png: Annotated[
        bool, typer.Option("--png", help="With --pictures: also write PNG (extra `plot`).")
    ] = False,
) -> None:
    """Find the hung or slow rank or link from records of communication.

    Reads PyTorch Flight Recorder dumps (pickle and JSON), NCCL Inspector and RAS files, Everstep's own rings,
    and tables of operations (parquet). Unusable files are listed and skipped.

    [bold]Examples[/bold]

      everstep diagnose /tmp/traces

      everstep diagnose dumps/ --pictures out/ --png

      everstep diagnose trace.parquet --json

      everstep diagnose now/ --pull /run/job/rank_0 --pull /run/job/rank_1
    """
    if pull:
        _pull(path, pull)
    analysis = _analyse(path, Console(stderr=True))
    if pictures is not None:
        _draw(analysis, pictures, png)
    if as_json:
        sys.stdout.write(json.dumps(analysis.diagnosis.document()) + "\n")
    else:
        _show(analysis.diagnosis)


def _pull(folder: Path, addresses: list[str]) -> None:
    from everstep.node import pulled_records

    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; with --pull give a directory for the records.")
    for address in addresses:
        if not address.startswith("/") and not address.rpartition(":")[2].isdecimal():
            raise UserError(f"--pull {address!r} is neither HOST:PORT nor the path of a Unix socket.")
    answers = pulled_records.pull(dict(enumerate(addresses)))
    try:
        pulled_records.save(answers, folder, world_size=len(addresses))
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}.") from None


def _analyse(path: Path, messages: Console) -> Analysis:
    from everstep.diagnose import UnusableFileError, analyse, read
    from everstep.diagnose.sources import PARQUET

    files = _files(path)
    parts, tables, unusable = [], {}, []
    statuses: list[tuple[int, str, bytes]] = []  # of RAS, by their time: two of them tell what stands still
    with Progress(console=messages, transient=True) as bar:
        for file in bar.track(files, description="reading"):
            name = str(file.relative_to(path)) if path.is_dir() else file.name
            try:
                content = _content(file)
                if content.startswith(PARQUET):
                    tables[name] = _columns(content)
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
    analysis = analyse(parts, tables)
    analysis.diagnosis.unusable = unusable + analysis.diagnosis.unusable
    if not parts and not tables:
        first = f"; {unusable[0][0]}: {unusable[0][1]}" if unusable else ""
        raise UserError(f"{path} contains no usable dump or trace{first}.")
    return analysis


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise UserError(f"{path} not found; give a dump or a directory of dumps.")
    if path.is_file():
        return [path]
    files = sorted(f for f in path.rglob("*") if f.is_file() and not f.name.startswith("."))
    if not files:
        raise UserError(f"{path} is empty; give a directory with dumps, rings or traces.")
    return files


def _content(file: Path) -> bytes:
    from everstep.diagnose import UnusableFileError

    try:
        if file.stat().st_size > _MOST_BYTES:
            raise UnusableFileError("larger than 1 GiB")
        return file.read_bytes()
    except OSError as error:
        raise UnusableFileError(f"it cannot be read: {error.strerror}") from None


def _columns(content: bytes) -> dict[str, Any]:
    from everstep.diagnose import UnusableFileError

    try:
        from pyarrow import ArrowException, BufferReader
        from pyarrow.parquet import read_table
    except ImportError:
        raise UnusableFileError("parquet needs pyarrow: pip install pyarrow") from None
    try:
        table = read_table(BufferReader(content))
    except (ArrowException, OSError) as error:
        raise UnusableFileError(f"truncated or not parquet ({str(error).splitlines()[0][:80]})") from None
    return {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}


def _draw(analysis: Analysis, folder: Path, png: bool) -> None:
    import everstep.diagnose.pictures as pictures

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.all_of(analysis).items():
            (folder / f"{name}.svg").write_text(pictures.svg(picture))
            if png:
                (folder / f"{name}.png").write_bytes(pictures.png(picture))
    except OSError as error:
        raise UserError(f"--pictures {folder} cannot be written: {error.strerror}.") from None


def _show(diagnosis: Diagnosis) -> None:
    from everstep.diagnose.finding import ranks_text

    console = Console(highlight=False)
    if not diagnosis.incidents:
        console.print("No rank and no link stands out: no incident.", style="green")
    for finding in diagnosis.incidents:
        console.print(f"[bold red]{finding.syndrome}[/], {finding.where}: {finding.because}", soft_wrap=True)
        if finding.suspects:
            table = Table("suspect", "node", "confidence", "evidence")
            for suspect in finding.suspects[:_SHOWN]:
                who = f"rank {suspect.rank}" + (f" → {suspect.peer}" if suspect.peer is not None else "")
                table.add_row(who, suspect.node, f"{suspect.confidence:.2f}", suspect.evidence)
            render.show(table)
        if len(finding.suspects) > _SHOWN:
            console.print(f"and {len(finding.suspects) - _SHOWN} more suspects; --json has them all.")
        if finding.victims:
            console.print(f"victims: rank {ranks_text(finding.victims)}", soft_wrap=True)
        for out in finding.ruled_out[:_SHOWN]:
            console.print(f"ruled out: {out.what}: {out.because}", style="dim", soft_wrap=True)
    for imbalance in diagnosis.imbalances:
        console.print(f"[yellow]not a fault[/], {imbalance.kind}: {imbalance.because}", soft_wrap=True)
    for note in diagnosis.notes:
        console.print(f"note: {note}", style="dim", soft_wrap=True)
    for name, why in diagnosis.unusable:
        console.print(f"left out: {name}: {why}", style="dim", soft_wrap=True)
