"""What a diagnosis found, for a picture: who waits for whom, and how fast everybody is.

Evidence in an incident is sentences, because people read it; the two kinds a picture can be made of are read
back from them here. Tests have `core` and `diagnose` say those sentences, so that one cannot change without
the other. A sentence this module does not know is shown as a sentence, and nothing more.

    worker 0:0 has waited for G[7 stage 0 0.3] for 0.41 s: ruled out   an arrow from 0:0 to its sender
    in step 9 the ops of worker 0:1 took 61 ms of its own time, usually 30 ms: 2.03 times
    ruled out: worker 0:0 (1.02 of its usual time), 1:0 (0.98 of its usual time)     a matrix of all paces
"""

from __future__ import annotations

import re
from typing import Any

from everstep.core.words.incidents import Incident

_RULED_OUT = re.compile(r"ruled out: (.+)|(.+): ruled out", re.DOTALL)
_WAITS = re.compile(r"worker (\d+:\d+) has waited for (.+) for ([\d.]+) s")
_MICROBATCH = re.compile(r"([AG])\[\d+ stage (\d+) (\d+)\.\d+")
_PEER = re.compile(r"[PSHC]\[\d+ stage (\d+) (\d+)")
_OPS = re.compile(
    r"in step (\d+) the ops of worker \d+:\d+ took ([\d.]+) ms of its own time, usually ([\d.]+) ms"
)
_OTHERS = re.compile(r"(\d+:\d+) \(([\d.]+) of its usual time\)")
_FACTOR = re.compile(r"takes ([\d.]+) times as long")


def picture(one: Incident) -> dict[str, Any]:
    """Who is suspected, who was ruled out, and what there is to draw."""
    innocent = [text for item in one.evidence if (text := ruled_out(item.text)) is not None]
    waits = [wait for text in innocent if (wait := _wait(text)) is not None]
    return {
        "suspects": [f"worker {worker}" for worker in one.workers]
        + ([f"node {one.node}"] if one.node else []),
        "ruled_out": innocent,
        "waits": waits,
        "paces": _paces(one, innocent),
        "ops": [
            {"step": int(found[1]), "took_ms": float(found[2]), "usual_ms": float(found[3])}
            for item in one.evidence
            if (found := _OPS.match(item.text))
        ],
    }


def ruled_out(text: str) -> str | None:
    """Who or what this evidence clears, if it does."""
    found = _RULED_OUT.fullmatch(text)
    return None if found is None else found[1] or found[2]


def _wait(text: str) -> dict[str, Any] | None:
    found = _WAITS.fullmatch(text)
    if found is None:
        return None
    waiter, awaits, seconds = found.groups()
    return {"waiter": waiter, "awaits": awaits, "for": _sender(awaits), "seconds": float(seconds)}


def _sender(awaits: str) -> str | None:
    """Who would send it when everybody is at home."""
    if found := _MICROBATCH.match(awaits):
        kind, stage, home = found[1], int(found[2]), found[3]
        return f"{home}:{stage - 1 if kind == 'A' else stage + 1}"
    if found := _PEER.match(awaits):
        return f"{found[2]}:{found[1]}"
    return None


def _paces(one: Incident, innocent: list[str]) -> dict[str, float]:
    """By worker, in parts of its usual time; the suspect's from the verdict."""
    slow = _FACTOR.search(one.verdict.because) if one.verdict is not None else None
    if slow is None or not one.workers or not any(item.source == "pace" for item in one.evidence):
        return {}
    found = {worker: float(pace) for text in innocent for worker, pace in _OTHERS.findall(text)}
    return found | {str(one.workers[0]): float(slow[1])}
