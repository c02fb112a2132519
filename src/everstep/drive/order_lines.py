"""Orders on their way to an agent: encoded when they are written, and without what the agent knows.

A decision about a task of thousands of workers is thousands of orders with a large part in common. So a
decision only queues them; the writer of each line encodes its own, the common part is encoded and compressed
once for all lines, and an agent that knows the facts of the epoch before gets what has changed since. The
addresses of 16,384 workers are 0.5 MB of JSON for each of 2,048 nodes; most of it repeats.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

from everstep.errors import PeerError
from everstep.protocol import messages as msg
from everstep.protocol.codec import encode
from everstep.protocol.table import Json
from everstep.protocol.work import EpochFacts, FactChanges

_KEPT = 16  # encoded facts; of a task two are in use at a time
PACKED_FROM = 4096  # bytes of facts: shorter ones are sent as they are
MOST_UNPACKED = 64 << 20
_FACTS = "facts, encoded once for all lines"
_json = json.JSONEncoder(separators=(",", ":")).encode


class FactTexts:
    """Facts in JSON, kept for the other lines."""

    def __init__(self) -> None:
        self._texts: OrderedDict[int, tuple[object, str]] = OrderedDict()

    def of(self, facts: EpochFacts | FactChanges) -> str:
        key = id(facts)
        known = self._texts.get(key)
        if known is None or known[0] is not facts:
            known = self._texts[key] = facts, _packed(_json(encode(facts)))
            while len(self._texts) > _KEPT:
                self._texts.popitem(last=False)
        return known[1]


def _packed(text: str) -> str:
    """A JSON string instead of an object, if that is shorter."""
    if len(text) < PACKED_FROM:
        return text
    return _json(base64.b85encode(zlib.compress(text.encode(), 6)).decode())


def unpacked(order: Json) -> Json:
    """An order as it was before it was written: facts that are packed are a string."""
    if not isinstance(order, dict):
        return order
    packed = {name: text for name in ("facts", "news") if isinstance(text := order.get(name), str)}
    return {**order, **{name: _unpacked(text) for name, text in packed.items()}} if packed else order


def _unpacked(text: str) -> Json:
    try:
        unzip = zlib.decompressobj()
        whole = unzip.decompress(base64.b85decode(text), MOST_UNPACKED)
        facts: Json = json.loads(whole)
    except (ValueError, zlib.error, binascii.Error, RecursionError) as error:
        raise PeerError(f"the facts of an order cannot be read: {error}") from None
    return facts


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
        if not isinstance(order, msg.ResumeTask):
            return _json({**said, "order": encode(order)})
        name, facts = ("facts", order.facts) if order.facts is not None else ("news", order.news)
        assert facts is not None
        bare = encode(replace(order, facts=None, news=None))
        whole = _json({**said, "order": {**bare, name: _FACTS}})
        return whole.replace(f'"{_FACTS}"', texts.of(facts), 1)
