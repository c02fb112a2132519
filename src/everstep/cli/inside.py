"""`everstep stacks` and `everstep collect`."""

from __future__ import annotations

import io
import json
import platform
import re
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from everstep import __version__
from everstep.cli import render
from everstep.cli.client import DEFAULT_ADDRESS, Address, Ca, Client, Token
from everstep.cli.render import AsJson, Console
from everstep.errors import EverstepError, UserError
from everstep.launch.client import in_path

LOG_BYTES = 1 << 16
MOST_LOGS = 64
DEFAULT_ARCHIVE = Path("everstep-collect.tar.gz")
# What looks like a credential, in what workers print and in command lines: its value is replaced.
_NAMES = r"(?:token|secret|passw(?:or)?d|passphrase|(?:api|access|private)[_-]?key|credential)s?"
_OF_NEXT = re.compile(rf"-[\w-]*?{_NAMES}", re.IGNORECASE)  # a word of a command line; the next one is it
_OF_VALUE = re.compile(rf"(?:.*[_\-.])?{_NAMES}", re.IGNORECASE)  # a key, or a variable
_SECRETS = (
    re.compile(rf"(?i)({_NAMES}[\"']?\s*[=:]\s*[\"']?)[^\s\"',;]+"),
    re.compile(rf"(?i)((?:^|\s)-[\w-]*?{_NAMES}\s+)[^\s\"',;]+"),
    re.compile(r"(?i)(bearer\s+)[\w.~+/=-]{6,}"),
    re.compile(r"()\b(?:hf_|sk-|ghp_|glpat-|xox[abp]-|AKIA)[\w-]{8,}"),
    re.compile(r"(://[^/\s:@]*:)[^/\s@]+(?=@)"),
)


def stacks_command(
    task: Annotated[str, typer.Argument(help="Name of the task.")],
    full: Annotated[bool, typer.Option("--full", help="Print every thread, not the main one only.")] = False,
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """Show where every worker of a task is in its code. Workers in the same place are shown together.

    Training continues. Where py-spy is installed on a node, C++ frames are shown too.

    [bold]Examples[/bold]

      everstep stacks llama-8b

      everstep stacks llama-8b --full
    """
    client = Client(address=address, token=token, ca=ca)
    document: dict[str, Any] = client.get(f"/v1/tasks/{in_path(task)}/stacks")
    if as_json:
        render.emit(document)
        return 0
    console = Console(highlight=False)
    groups = grouped(document["workers"], full=full)
    if not groups:
        raise UserError(f"task {task} has no workers now; everstep status shows its state.")
    for text, workers in groups:
        names = ", ".join(workers[:8]) + (f" and {len(workers) - 8} more" if len(workers) > 8 else "")
        noun = "worker" if len(workers) == 1 else "workers"
        console.print(f"[bold]{len(workers)} {noun}[/bold] ({escape(names)}):")
        console.print(text + "\n", markup=False)
    return 0


def grouped(workers: list[Mapping[str, Any]], *, full: bool = False) -> list[tuple[str, list[str]]]:
    """Stacks with the workers that have them; the rarest first: others are where most are."""
    found: dict[str, list[str]] = {}
    for worker in workers:
        text = worker.get("text") or f"  no stack: {worker.get('error', 'no answer')}"
        found.setdefault(text if full else main_thread(text), []).append(worker["worker"])
    return sorted(found.items(), key=lambda pair: len(pair[1]))


def main_thread(text: str) -> str:
    """The frames of the main thread, innermost first, without addresses."""
    parts = re.split(r"\n\s*\n|(?=^Thread )|(?=^Current thread )", text, flags=re.MULTILINE)
    blocks = [block for block in parts if block.strip()]
    mains = [block for block in blocks if "MainThread" in block] or blocks[-1:]
    lines = [line.rstrip() for line in mains[0].splitlines()] if mains else []
    heads = re.compile(r"(Thread|Current thread|Process) ")
    return "\n".join(line for line in lines if line and not heads.match(line))


def collect_command(
    out: Annotated[Path, typer.Option("--out", "-o", help="Archive to write.")] = DEFAULT_ARCHIVE,
    logs: Annotated[bool, typer.Option(help="Include the end of every worker's log.")] = True,
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """Collect what is needed to look into a problem: one archive, without credentials.

    Status, tasks, incidents, decisions, metrics, stacks and the ends of logs. Tokens, passwords and keys in
    logs are replaced. Look through it before you give it away: logs are what your code prints.

    [bold]Example[/bold]

      everstep collect -o problem.tar.gz
    """
    client = Client(address=address, token=token, ca=ca)
    status = client.get("/v1/status")
    files = {
        "versions.json": _document({"everstep": __version__, "python": platform.python_version()}),
        "status.json": _document(redacted(status, token)),
    }
    missing: list[str] = []

    def ask(name: str, path: str) -> Any:
        try:
            found = client.get(path)
        except EverstepError as error:
            missing.append(f"{name}: {error}")
            return None
        files[name] = _document(redacted(found, token))
        return found

    for name in ("news", "plans", "audit", "incidents", "digest"):
        ask(f"{name}.json", f"/v1/{name}")
    ask("report.json", f"/v1/report?since_s={7 * 86_400}")
    try:
        files["metrics.txt"] = client.text("/metrics")
    except EverstepError as error:
        missing.append(f"metrics.txt: {error}")
    for row in status["tasks"]:
        task = row["task"]
        whole = ask(f"tasks/{row['task']}.json", f"/v1/tasks/{in_path(task)}?rows=500") or {"seats": []}
        if row["state"] in ("running", "stalled"):
            ask(f"tasks/{row['task']}-stacks.json", f"/v1/tasks/{in_path(task)}/stacks")
        for seat in whole["seats"][:MOST_LOGS] if logs else ():
            where = f"/v1/tasks/{in_path(task)}/logs?worker={seat['worker']}&bytes={LOG_BYTES}"
            ask(f"logs/{row['task']}-{seat['worker'].replace(':', '-')}.json", where)
    if missing:
        files["missing.txt"] = "\n".join(missing) + "\n"
    _pack(out, files)
    render.note(f"{out}: {len(files)} files" + (f"; {len(missing)} could not be read" if missing else ""))
    if as_json:
        render.emit({"file": str(out), "files": sorted(files), "missing": missing})
    return 0


def _document(value: Any) -> str:
    return json.dumps(value, indent=1)


def redacted(value: Any, token: str = "") -> Any:
    """A document without what looks like a credential in one of its texts."""
    match value:
        case dict():
            return {
                key: "[removed]"
                if isinstance(item, str) and item and _OF_VALUE.fullmatch(str(key))
                else redacted(item, token)
                for key, item in value.items()
            }
        case [str(name), str()] if _OF_VALUE.fullmatch(name):  # a variable as a pair
            return [name, "[removed]"]
        case list():
            named = [False, *(isinstance(word, str) and _OF_NEXT.fullmatch(word) for word in value)]
            return [
                "[removed]" if is_value and isinstance(item, str) else redacted(item, token)
                for item, is_value in zip(value, named, strict=False)
            ]
        case str():
            text = value.replace(token, "[removed]") if token else value
            for pattern in _SECRETS:
                text = pattern.sub(r"\1[removed]", text)
            return text
    return value


def _pack(out: Path, files: Mapping[str, str]) -> None:
    try:
        with tarfile.open(out, "w:gz") as archive:
            for name, text in sorted(files.items()):
                data = text.encode()
                entry = tarfile.TarInfo(f"everstep-collect/{name}")
                entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
                archive.addfile(entry, io.BytesIO(data))
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}.") from None
