"""From what was seen to a judgement: its kind, its severity, and what is wrong, with a quote.

`kinds.py` has the kinds with their severities, `symptoms.py` the texts that show them, `xids.py` the numbers
of NVIDIA's driver. `judge` never raises. Unknown text is an abnormal exit or an exception in user code where
a process ended or raised. A line of the kernel or of a log that matches nothing is `other`, and no evidence:
most lines are harmless.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from everstep.core.faults.kinds import KINDS, ErrorKind, Severity
from everstep.core.faults.symptoms import SYMPTOMS
from everstep.core.faults.xids import XID_LINE, XIDS, kind_of_xid

__all__ = ["MEANINGS", "TABLE", "ErrorKind", "Judgement", "Severity", "Source", "judge", "known"]

Source = Literal["exit", "exception", "silence", "progress", "kernel", "log"]
TABLE: dict[ErrorKind, Severity] = {kind: row.severity for kind, row in KINDS.items()}
MEANINGS: dict[ErrorKind, str] = {kind: row.meaning for kind, row in KINDS.items()}

# What a source means when its text matches nothing.
_OTHERWISE: dict[str, ErrorKind] = {
    "exit": ErrorKind.ABNORMAL_EXIT,
    "exception": ErrorKind.USER_CODE,
    "silence": ErrorKind.LOST_CONNECTION,
    "progress": ErrorKind.TASK_HANG,
}
_MAX_TEXT = 64 << 10
_MAX_QUOTE = 160
# Lines that are also written in successful runs: warnings of c10d, NCCL's own log.
_CHATTER = re.compile(r"\[[WI](?:\d{4})? [^\n]{0,80}\.(?:cpp|cc|hpp):\d+\]|NCCL INFO")
_CHATTER_WITHIN = 200  # characters from the beginning of a line


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    kind: ErrorKind
    severity: Severity
    because: str  # what is wrong, with a quote of what was matched; neither severity nor remedy


def judge(source: Source, text: str) -> Judgement:
    """What `text`, seen by `source`, means. Silence and missing progress need no text."""
    if source not in ("silence", "progress"):
        if len(text) > _MAX_TEXT:  # causes are at the beginning, the last output at the end
            text = text[: _MAX_TEXT // 2] + "\n" + text[-_MAX_TEXT // 2 :]
        found = _worst_xid(text) or _first_symptom(source, _without_chatter(text))
        if found is not None:
            return _judgement(*found)
    return _judgement(_OTHERWISE.get(source, ErrorKind.OTHER), _first_line(text))


def known(kind: ErrorKind, because: str) -> Judgement:
    """A fault whose kind needs no guessing from text."""
    return Judgement(kind=kind, severity=TABLE[kind], because=because)


def _worst_xid(text: str) -> tuple[ErrorKind, str] | None:
    found = [(kind_of_xid(int(m[1]), m[0]), int(m[1]), m[0]) for m in XID_LINE.finditer(text)]
    if not found:
        return None
    kind, number, line = min(found, key=lambda each: TABLE[each[0]])
    _, meaning = XIDS.get(number, (kind, ""))
    return kind, f"{line} [{meaning}]" if meaning else line


def _without_chatter(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not _CHATTER.search(line, 0, _CHATTER_WITHIN))


def _first_symptom(source: str, text: str) -> tuple[ErrorKind, str] | None:
    for symptom in SYMPTOMS:
        if source in symptom.sources and (match := symptom.pattern.search(text)):
            return symptom.kind, match[0]
    return None


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _judgement(kind: ErrorKind, words: str) -> Judgement:
    severity = TABLE[kind]
    quote = words.strip() if len(words) <= _MAX_QUOTE else words[: _MAX_QUOTE - 1].strip() + "…"
    because = f'{MEANINGS[kind]} ("{quote}")' if quote else MEANINGS[kind]
    return Judgement(kind=kind, severity=severity, because=because)
