"""Sentences that pages quote are the ones that the decisions say today; numbers and names may differ."""

from __future__ import annotations

import io
import re
from pathlib import Path

from everstep.launch.local.script_run import ScriptLaunch, ScriptRun
from everstep.protocol.messages import RankRules
from tools.pages import DOCS, blocks

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
ENTRY = re.compile(r" *\+\d+ ms +(evidence|verdict|remedy) +(.*)")
PLAIN = [
    (r"\b\d[FIW]\d+\.\d+\b", "OP"),
    (r"\b[A-Z]\[[^\]]*\]", "PARCEL"),
    (r"\b\d+:\d+\b", "W"),
    (r"\bworkers? W(, W)* waits?\b", "OTHERS wait"),
    (r"\bworkers? W(, W)*( of \w+)? on another node waits?\b", "OTHERS elsewhere wait"),
    (r"\bnode [a-z]\b", "node N"),
    (r"\b\d+(\.\d+)? (ms|s)\b", "TIME"),
]


def plain(text: str) -> str:
    for pattern, word in PLAIN:
        text = re.sub(pattern, word, text)
    return text


def quoted(page: str) -> set[str]:
    """Evidence, verdicts and remedies of the incidents that a page shows, without wrapping."""
    found = []
    for block in blocks(DOCS / page):
        for line in block.text.splitlines() if block.language == "text" else ():
            line = re.sub(r"\s+event:\d+$", "", line.rstrip())
            if entry := ENTRY.match(line):
                found.append([entry[1], entry[2]])
            elif found and re.match(r" {12,}\S", line):
                found[-1][1] += f" {line.strip()}"
            elif found and line.strip():
                found.append(["", ""])
    return {plain(f"{kind} {text}") for kind, text in found if kind}


def said() -> set[str]:
    """The same of every incident whose golden transcript the coordinator's tests hold."""
    found = set()
    for path in GOLDEN.glob("*.txt"):
        for line in path.read_text().splitlines():
            if entry := re.match(r"  evidence [\d.]+ (.*)", line):
                found.add(plain(f"evidence {entry[1]}"))
            elif entry := re.match(r"  verdict  (SEV\d) ([^:]*): (.*)", line):
                found.add(plain(f"verdict {entry[2]}, {entry[1]}: {entry[3]}"))
            elif entry := re.match(r"  remedy   [\d.]+ (.*) \[(.*)\]: (.*)", line):
                found.add(plain(f"remedy {entry[1]} ({entry[2]}): {entry[3]}"))
    return found


def test_the_incidents_of_the_page_say_what_incidents_say() -> None:
    shown = quoted("reading-an-incident.md")
    assert len(shown) >= 6
    assert shown <= said(), shown - said()


def test_the_page_about_scripts_quotes_what_a_run_says(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(
        "import os, time\nfirst = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "if first and os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\nif first: time.sleep(600)"
    )
    rules = RankRules(command=("s.py",), run_id="x", folder=str(tmp_path), ranks=2, logs=str(tmp_path))
    lines: list[str] = []
    run = ScriptRun(ScriptLaunch(rules=rules, output=io.BytesIO(), errors=io.BytesIO()), lines.append)
    assert run.run().code == 0
    page = [line for block in blocks(DOCS / "own-script.md") for line in block.text.splitlines()]
    shown = {re.sub(r"\s+", " ", plain(line)) for line in page if line.startswith("everstep: ")}
    assert len(shown) == 3
    assert shown <= {re.sub(r"\s+", " ", plain(line)) for line in lines}, shown
