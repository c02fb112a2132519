"""A new user's path, timed: clone, the README's first command, and the first failure healed on the screen.

    python -m tools.newcomer                with pip's cache as it is
    python -m tools.newcomer --cold         with an empty one
    python -m tools.newcomer --healed       end it once a failure is healed
    python -m tools.newcomer --own-model    the walk of docs/your-model.md: a Hugging Face model, healed
    python -m tools.newcomer --recipes      four recipes of docs/cookbook.md, typed as they stand
    python -m tools.newcomer --json

What is typed is read from the README, and it runs on a terminal of its own (a pty), as it would for a person:
what counts is when a line is on the screen. `make` prints each command before it runs it, which tells the
stages apart. Only what is committed takes part.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STAGES = (  # a stage ends when a line like this is on the screen; a test has the CLI print each of them
    ("make a virtual environment", re.compile(r"pip install")),
    ("install", re.compile(r"everstep demo$")),
    ("load torch, start workers, train", re.compile(r"✗ step")),
    ("heal: back at work", re.compile(r"resumed after")),
    ("a replacement joins", re.compile(r"✓ step .* is back")),
    ("run to the end and compare", re.compile(r"largest loss difference +(0: bit-identical|[\d.]+e)")),
)
HEALED = "heal: back at work"
KILL = "--kill stage=1,replica=0,step=7"
OWN_MODEL_STAGES = (
    ("make a virtual environment, install", re.compile(r"Successfully installed .*everstep")),
    ("load torch and transformers, start workers, train", re.compile(r"✗ step")),
    (HEALED, re.compile(r"resumed after")),
    ("run to the end", re.compile(r"loss .* incidents healed")),
    ("export, load in transformers", re.compile(r"tuned: LlamaForCausalLM")),
)
RECIPES = ("A vision transformer", "An optimizer of your own", "A LightningModule", "Your torchrun script")
Stages = tuple[tuple[str, re.Pattern[str]], ...]
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cold", action="store_true", help="an empty pip cache")
    parser.add_argument("--healed", action="store_true", help="end it once a failure is healed")
    parser.add_argument("--own-model", action="store_true", help="the walk of docs/your-model.md")
    parser.add_argument("--recipes", action="store_true", help="four recipes of docs/cookbook.md")
    parser.add_argument("--json", action="store_true", dest="as_json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        walk = (first_command(_readme()), STAGES)
        if options.own_model or options.recipes:
            walk = own_model_walk() if options.own_model else recipes_walk()
        told = path_of_a_newcomer(Path(folder), *walk, cold=options.cold, to_the_end=not options.healed)
    print(json.dumps(told) if options.as_json else "\n".join(lines(told)))
    sys.exit(exit_code(told))


def exit_code(told: dict[str, Any]) -> int:
    """0: a failure was healed on the screen, and every stage was seen."""
    return 0 if told["first_healed_s"] is not None and not told["missing"] else 1


def path_of_a_newcomer(
    folder: Path, command: str, awaited: Stages, *, cold: bool, to_the_end: bool
) -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    if cold:
        env["PIP_CACHE_DIR"] = str(folder / "pip-cache")
    began = time.monotonic()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "everstep")], check=True)
    stages = [{"stage": "clone", "s": time.monotonic() - began}]
    left = list(awaited)
    before, screen = time.monotonic(), deque[str](maxlen=20)
    for line in on_a_terminal(command, folder / "everstep", env):
        screen.append(line)
        while left and left[0][1].search(line):
            now = time.monotonic()
            stages.append({"stage": left.pop(0)[0], "s": now - before})
            before = now
        if not to_the_end and stages[-1]["stage"] == HEALED:
            break
    times = {stage["stage"]: stage["s"] for stage in stages}
    until = [stage["stage"] for stage in stages].index(HEALED) + 1 if HEALED in times else None
    return {
        "command": command,
        "pip_cache": "empty" if cold else cache_state(),
        "cores": os.cpu_count(),
        "installed_mb": round(_size(folder / "everstep" / ".venv") / 1e6),
        "stages": [{**stage, "s": round(float(stage["s"]), 2)} for stage in stages],
        "missing": [name for name, _ in left] if to_the_end else [],
        "screen": list(screen) if left and to_the_end else [],  # its last lines
        "first_healed_s": None
        if until is None
        else round(sum(float(stage["s"]) for stage in stages[:until]), 2),
    }


def own_model_walk() -> tuple[str, Stages]:
    """The blocks of the page that are marked as the walk, as they stand."""
    page = (ROOT / "docs" / "your-model.md").read_text()
    return "set -e\n" + "\n".join(
        re.findall(r"^```bash walk\n(.*?)^```", page, re.M | re.S)
    ), OWN_MODEL_STAGES


def recipes_walk() -> tuple[str, Stages]:
    """An install, then every recipe in turn: commands as they stand; a script is put into train.py and
    started as the page says, with a kill.
    """
    page = (ROOT / "docs" / "cookbook.md").read_text()
    typed = "set -e\npython3 -m venv .venv\n. .venv/bin/activate\npip install --no-compile '.[lightning]'\n"
    awaited = [("make a virtual environment, install", re.compile(r"Successfully installed .*everstep"))]
    for recipe in RECIPES:
        section = page.partition(f"\n## {recipe}\n")[2].partition("\n## ")[0]
        block = re.search(r"^```(python|bash)\n(.*?)^```", section, re.M | re.S)
        assert block is not None, f"docs/cookbook.md has no recipe {recipe!r}"
        if block[1] == "python":
            typed += f"cat > train.py <<'END'\n{block[2]}END\neverstep run {KILL} train.py\n"
        else:
            typed += block[2]
        typed += f"echo 'ended: {recipe}'\n"
        if recipe == RECIPES[0]:
            awaited.append((HEALED, re.compile(r"resumed after")))
        awaited.append((recipe, re.compile(f"^ended: {recipe}")))
    return typed, tuple(awaited)


def _readme() -> str:
    return (ROOT / "README.md").read_text()


def first_command(readme: str) -> str:
    """The first indented line of the README's first section with a command."""
    found = re.search(r"^    (make \w+)$", readme, re.MULTILINE)
    assert found is not None, "the README shows no command"
    return found[1]


def on_a_terminal(command: str, folder: Path, env: dict[str, str]) -> Iterator[str]:
    """Lines as they appear, without colours and cursor movements."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe("bash", ["bash", "-c", command], {**env, "TERM": "xterm-256color", "COLUMNS": "120"})
    try:
        pending = ""
        while True:
            try:
                data = os.read(terminal, 65536)
            except OSError:  # the other side has hung up
                data = b""
            if not data:
                break
            *whole, pending = re.split(r"[\r\n]+", pending + data.decode(errors="replace"))
            yield from (_ESCAPES.sub("", line).strip() for line in whole)
    finally:
        os.close(terminal)  # whoever still runs is hung up on
        if os.waitpid(pid, os.WNOHANG)[0] == 0:
            os.killpg(pid, signal.SIGTERM)  # a terminal's processes are a group, led by its first
            os.waitpid(pid, 0)


def cache_state() -> str:
    pip = shutil.which("pip") or "pip"
    told = subprocess.run([pip, "cache", "dir"], capture_output=True, text=True, check=False).stdout.strip()
    size = _size(Path(told)) if told else 0
    return f"as it was, {size / 1e6:.0f} MB"


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def lines(told: dict[str, Any]) -> list[str]:
    typed = "; ".join(told["command"].splitlines())
    out = [
        f"git clone; {typed if len(typed) < 300 else typed[:300] + ' ...'}",
        f"  {told['cores']} cores; pip's cache: {told['pip_cache']}; {told['installed_mb']} MB installed",
    ]
    total = 0.0
    for stage in told["stages"]:
        total += stage["s"]
        mark = "   <- first healed failure on the screen" if stage["stage"] == HEALED else ""
        out.append(f"  {stage['stage']:50} {stage['s']:7.2f} s {total:8.2f} s{mark}")
    out += [f"  | {line}" for line in told.get("screen", ())]
    out += [f"  never seen: {name}" for name in told["missing"]]
    return out


if __name__ == "__main__":
    main()
