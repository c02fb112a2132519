"""How grave an error is: one table from kind to severity, and one function from what was seen to a judgement.

    SEV1  leave the node: it is isolated, and the cluster plans again
    SEV2  restart the worker: it comes back from a live replica
    SEV3  retry in place: it may pass

A remedy that fails escalates to the next graver one, so a judgement need not be sure, only a good first try:
too mild costs one failed remedy, too grave costs a node. Where both are thinkable, the table has the milder
one. The kinds and severities of Unicron's table are kept; what it does not name answers the same question:
who must go for the error to go?

`judge` never raises. Text that nobody knows is an abnormal exit or an exception in user code where a process
ended or raised. A line of the kernel or of a log that matches nothing is `other`, and no evidence at all:
most lines are harmless.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from everstep.core.faults.symptoms import SYMPTOMS, XID_LINE, XIDS, ErrorKind, kind_of_xid

__all__ = ["MEANINGS", "REMEDIES", "TABLE", "ErrorKind", "Judgement", "Severity", "Source", "judge"]

Source = Literal["exit", "exception", "silence", "progress", "kernel", "log"]


class Severity(IntEnum):
    SEV1 = 1
    SEV2 = 2
    SEV3 = 3

    def __str__(self) -> str:
        return self.name


SEV1, SEV2, SEV3 = Severity

REMEDIES: dict[Severity, str] = {
    SEV1: "isolate the node and plan again",
    SEV2: "restart the worker",
    SEV3: "retry in place",
}

TABLE: dict[ErrorKind, Severity] = {
    ErrorKind.ECC: SEV1,
    ErrorKind.NVLINK: SEV1,
    ErrorKind.DMA_MAPPING: SEV1,
    ErrorKind.GPU_DRIVER: SEV1,
    ErrorKind.GPU_LOST: SEV1,
    ErrorKind.HOST_HARDWARE: SEV1,
    ErrorKind.STORAGE: SEV1,
    ErrorKind.NODE_TAKEN: SEV1,
    ErrorKind.LOST_CONNECTION: SEV1,
    ErrorKind.ECC_CONTAINED: SEV2,
    ErrorKind.ILLEGAL_MEMORY_ACCESS: SEV2,
    ErrorKind.DEVICE_ASSERT: SEV2,
    ErrorKind.CUDA: SEV2,
    ErrorKind.XID: SEV2,
    ErrorKind.GPU_OUT_OF_MEMORY: SEV2,
    ErrorKind.HOST_OUT_OF_MEMORY: SEV2,
    ErrorKind.DISK_FULL: SEV2,
    ErrorKind.TASK_HANG: SEV2,
    ErrorKind.DATA: SEV2,
    ErrorKind.USER_CODE: SEV2,
    ErrorKind.KILLED: SEV2,
    ErrorKind.CRASH: SEV2,
    ErrorKind.ABNORMAL_EXIT: SEV2,
    ErrorKind.OTHER: SEV2,
    ErrorKind.ECC_CORRECTED: SEV3,
    ErrorKind.NVLINK_NONFATAL: SEV3,
    ErrorKind.NCCL_TIMEOUT: SEV3,
    ErrorKind.LINK_FLAPPING: SEV3,
    ErrorKind.CONNECTION_REFUSED: SEV3,
    ErrorKind.CONNECTION_RESET: SEV3,
    ErrorKind.OTHER_NETWORK: SEV3,
    ErrorKind.SLOW_WORKER: SEV3,
    ErrorKind.SLOW_LINK: SEV3,
}

MEANINGS: dict[ErrorKind, str] = {
    ErrorKind.ECC: "memory of a GPU has an error it cannot correct",
    ErrorKind.NVLINK: "a link between GPUs has failed",
    ErrorKind.DMA_MAPPING: "a device reached for memory that is not mapped for it",
    ErrorKind.GPU_DRIVER: "the driver or the firmware of a GPU no longer works",
    ErrorKind.GPU_LOST: "a GPU no longer answers on its bus",
    ErrorKind.HOST_HARDWARE: "memory, processor or bus of the host has failed",
    ErrorKind.STORAGE: "a disk of the node cannot be read or written",
    ErrorKind.NODE_TAKEN: "the cluster's scheduler takes the node away",
    ErrorKind.LOST_CONNECTION: "nothing is heard from the node",
    ErrorKind.ECC_CONTAINED: "an ECC error that hit only one process",
    ErrorKind.ILLEGAL_MEMORY_ACCESS: "a kernel read or wrote outside its memory",
    ErrorKind.DEVICE_ASSERT: "a kernel's assertion failed, mostly an index out of range",
    ErrorKind.CUDA: "a CUDA call or kernel failed",
    ErrorKind.XID: "the GPU driver reports something this table does not know",
    ErrorKind.GPU_OUT_OF_MEMORY: "a GPU has too little free memory",
    ErrorKind.HOST_OUT_OF_MEMORY: "the host, or the worker's share of it, has too little free memory",
    ErrorKind.DISK_FULL: "a disk or a quota is full",
    ErrorKind.TASK_HANG: "an op makes no progress",
    ErrorKind.DATA: "training data could not be read",
    ErrorKind.USER_CODE: "the program raised",
    ErrorKind.KILLED: "someone sent SIGKILL, maybe the kernel for want of memory",
    ErrorKind.CRASH: "native code crashed",
    ErrorKind.ABNORMAL_EXIT: "the process ended before its work was done",
    ErrorKind.OTHER: "no known pattern",
    ErrorKind.ECC_CORRECTED: "memory had errors, and they were corrected",
    ErrorKind.NVLINK_NONFATAL: "a link between GPUs had an error and goes on",
    ErrorKind.NCCL_TIMEOUT: "a collective waited for somebody for too long",
    ErrorKind.LINK_FLAPPING: "a network link went down, and may be up again",
    ErrorKind.CONNECTION_REFUSED: "nobody listens at the other end",
    ErrorKind.CONNECTION_RESET: "the other end closed a connection",
    ErrorKind.OTHER_NETWORK: "the network failed in another way",
    ErrorKind.SLOW_WORKER: "a worker takes longer for the same work than it did, or than its peers do",
    ErrorKind.SLOW_LINK: "messages between two workers take longer than they did, or than elsewhere",
}

# What a source means when its text matches nothing.
_OTHERWISE: dict[str, ErrorKind] = {
    "exit": ErrorKind.ABNORMAL_EXIT,
    "exception": ErrorKind.USER_CODE,
    "silence": ErrorKind.LOST_CONNECTION,
    "progress": ErrorKind.TASK_HANG,
}
_MAX_TEXT = 64 << 10
_MAX_QUOTE = 160
# Lines that are written on the way to success: warnings of c10d, what NCCL tells of itself.
_CHATTER = re.compile(r"\[[WI](?:\d{4})? [^\n]{0,80}\.(?:cpp|cc|hpp):\d+\]|NCCL INFO")
_CHATTER_WITHIN = 200  # characters from the beginning of a line


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    kind: ErrorKind
    severity: Severity
    because: str  # one sentence that quotes what was matched


def judge(source: Source, text: str) -> Judgement:
    """What `text`, seen by `source`, is a sign of. Silence and missing progress speak for themselves."""
    if source not in ("silence", "progress"):
        if len(text) > _MAX_TEXT:  # causes stand at the beginning, the last words at the end
            text = text[: _MAX_TEXT // 2] + "\n" + text[-_MAX_TEXT // 2 :]
        found = _worst_xid(text) or _first_symptom(source, _without_chatter(text))
        if found is not None:
            return _judgement(*found)
    return _judgement(_OTHERWISE.get(source, ErrorKind.OTHER), _first_line(text))


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
    said = f'"{quote}" is read as {kind}' if quote else f"Nothing was said, which is read as {kind}"
    return Judgement(
        kind=kind,
        severity=severity,
        because=f"{said} ({MEANINGS[kind]}): {severity}, {REMEDIES[severity]}.",
    )
