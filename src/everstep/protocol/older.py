"""What the version before (protocol 3) said in other words.

It told every worker everything of an epoch in a `NotifyWorker` with a `ResumeStep`, and paused and started
workers one by one. JSON in and out: only what differs is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from everstep.protocol import messages as msg
from everstep.protocol.actions import InterruptWorkers
from everstep.protocol.codec import encode
from everstep.protocol.ops import Worker
from everstep.protocol.table import Document
from everstep.protocol.work import EpochFacts, OwnOrders, StateDirections

# A field that version does not know it leaves out. One of this version that is taken for it, as in an upgrade
# to the next, needs all of them: whether a step is voted on, all workers must decide alike.
_OWN = tuple(field.name for field in fields(OwnOrders))
_COMMON = tuple(field.name for field in fields(EpochFacts) if field.name != "book")
_STATES = tuple(field.name for field in fields(StateDirections))


def order_of_protocol_3(order: Document) -> Document:
    """An order that a coordinator or a journal of that version has, as it is said now."""
    words = order.get("words")
    if order.get("is") != "NotifyWorker" or not isinstance(words, dict) or words.get("is") != "ResumeStep":
        return order
    resume = words["order"]
    own = {name: resume[name] for name in _OWN if name in resume}
    own["steady"] = own.get("steady") or ""
    own["lists"] = [[step, ops or ""] for step, ops in own.get("lists", ())]
    facts = {"votes_from": None} | {name: resume[name] for name in _COMMON if name in resume}
    facts["book"] = [[worker, [host, port]] for worker, host, port in order.get("book", ())]
    states = {name: order[name] for name in _STATES if name in order}
    return {
        "is": "ResumeTask",
        "task": order["task"],
        "facts": {"is": "EpochFacts", **facts},
        "news": None,
        "workers": [[order["worker"], {"is": "OwnOrders", **own}, {"is": "StateDirections", **states}]],
    }


def orders_for_protocol_3(order: msg.Order) -> Sequence[msg.Order]:
    """An order as an agent of that version understands it: one for each worker."""
    match order:
        case msg.StartProcesses():
            return order.starts
        case msg.InterruptTask():
            words = InterruptWorkers(workers=order.workers, epoch=order.epoch, because=order.because)
            return [msg.NotifyWorker(task=order.task, worker=w, words=words) for w in order.workers]
        case msg.ResumeTask(facts=EpochFacts() as facts):
            return [msg.OlderOrder(data=_resume_words(order.task, facts, *one)) for one in order.workers]
        case _:
            return [order]


def _resume_words(
    task: str, facts: EpochFacts, worker: Worker, own: OwnOrders, states: StateDirections
) -> Document:
    common, mine, about = encode(facts), encode(own), encode(states)
    members = [
        {**row, "live": [list(live) for live in members.live]}
        for row, members in zip(common["members"], facts.members, strict=True)
    ]
    resume = {name: common[name] for name in _COMMON} | {name: mine[name] for name in _OWN}
    words = {
        "is": "ResumeStep",
        "worker": encode(worker),
        "order": {"is": "Resume", **resume, "members": members},
        "because": "",
    }
    book = [[encode(peer), *address] for peer, address in facts.book.items()]
    notice = {"is": "NotifyWorker", "task": task, "worker": encode(worker), "words": words, "book": book}
    return notice | {name: about[name] for name in _STATES}
