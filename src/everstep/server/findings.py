"""What a diagnosis found, for a picture: who waits for whom, and how fast each worker is.

It is made of the facts behind the evidence of an incident (`protocol.facts`), not of its sentences.
"""

from __future__ import annotations

from typing import Any

from everstep.protocol.facts import OpsTook, PacesSeen, WorkerWaits
from everstep.protocol.incidents import Incident


def picture(one: Incident) -> dict[str, Any]:
    """Who is suspected, who was ruled out, and what there is to draw."""
    facts = [item.fact for item in one.evidence if item.fact is not None]
    return {
        "suspects": [f"worker {worker}" for worker in one.workers]
        + ([f"node {one.node}"] if one.node else []),
        "ruled_out": [item.clears for item in one.evidence if item.clears],
        "waits": [
            {
                "waiter": str(fact.worker),
                "awaits": fact.awaits,
                "for": None if fact.sender is None else str(fact.sender),
                "seconds": round(fact.seconds, 2),
            }
            for fact in facts
            if isinstance(fact, WorkerWaits)
        ],
        "paces": {
            str(worker): round(pace, 2)
            for fact in facts
            if isinstance(fact, PacesSeen)
            for worker, pace in fact.paces.items()
        },
        "ops": [
            {
                "step": fact.step,
                "took_ms": round(fact.took_s * 1e3, 1),
                "usual_ms": round(fact.usual_s * 1e3, 1),
            }
            for fact in facts
            if isinstance(fact, OpsTook)
        ],
    }
