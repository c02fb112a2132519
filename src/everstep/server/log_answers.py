"""Which node has what a worker printed last. Of a worker without a slot any more, any node may have it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol


class NodeQuestions(Protocol):
    async def ask(self, node: str, question: dict[str, Any]) -> Any: ...


async def newest_log(
    lines: NodeQuestions, nodes: Sequence[str], question: dict[str, Any]
) -> dict[str, Any] | str:
    """The answer that was written last, with its node; or why there is none."""
    answers = await asyncio.gather(*(lines.ask(node, question) for node in nodes), return_exceptions=True)
    found = [
        answer | {"node": node}
        for node, answer in zip(nodes, answers, strict=True)
        if isinstance(answer, dict) and "text" in answer
    ]
    if found:
        return max(found, key=lambda one: (one["at"], one["node"]))
    return next((str(a.get("error")) for a in answers if isinstance(a, dict)), "its node is not connected")
