"""Orders on their way to an agent: encoded when they are written, and without what the agent knows.

A decision about a task of thousands of workers is thousands of orders with a large part in common. So a
decision only queues them; the writer of each line encodes its own, the common part is encoded once for all
lines, and an agent that knows the facts of the epoch before gets what has changed since.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

from everstep.protocol import messages as msg
from everstep.protocol.codec import encode
from everstep.protocol.table import Json
from everstep.protocol.work import EpochFacts, FactChanges

_KEPT = 16  # encoded facts; of a task two are in use at a time
_FACTS = "facts, encoded once for all lines"


class FactTexts:
    """Facts in JSON, kept for the other lines."""

    def __init__(self) -> None:
        self._texts: OrderedDict[int, tuple[object, str]] = OrderedDict()

    def of(self, facts: EpochFacts | FactChanges) -> str:
        known = self._texts.get(id(facts))
        if known is None or known[0] is not facts:
            known = self._texts[id(facts)] = facts, _json(encode(facts))
            while len(self._texts) > _KEPT:
                self._texts.popitem(last=False)
        return known[1]


class OrderLine:
    """One line to an agent, with what its agent knows: by task, the epoch of its facts."""

    def __init__(self, known: Mapping[str, int]) -> None:
        self._known = dict(known)

    def shortened(self, order: msg.Order) -> msg.Order:
        """The order without what the agent knows. To be asked once for each order, in their turn."""
        match order:
            case msg.ResumeTask(task=task, facts=EpochFacts(epoch=epoch), news=news):
                knows = news is not None and self._known.get(task) == news.since
                self._known[task] = epoch
                return replace(order, facts=None) if knows else replace(order, news=None)
            case msg.CloseTask(task=task):
                self._known.pop(task, None)
        return order

    def text(self, action: msg.Dispatch, texts: FactTexts, **around: object) -> str:
        """As it is written, with `around` beside it."""
        said = {"number": action.number, "because": action.because, **around}
        order = self.shortened(action.order)
        if isinstance(order, msg.OlderOrder):
            return _json({**said, "order": order.data})
        if not isinstance(order, msg.ResumeTask):
            return _json({**said, "order": encode(order)})
        name, facts = ("facts", order.facts) if order.facts is not None else ("news", order.news)
        assert facts is not None
        bare = encode(replace(order, facts=None, news=None))
        whole = _json({**said, "order": {**bare, name: _FACTS}})
        return whole.replace(json.dumps(_FACTS), texts.of(facts), 1)


def _json(value: Json) -> str:
    return json.dumps(value, separators=(",", ":"))
