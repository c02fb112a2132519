"""What a worker and its agent say to each other: JSON behind a length, over a Unix socket.

Ops, workers and microbatches travel in their text form; nothing is pickled.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from everstep.core.words.ops import Microbatch, Op, parse_op
from everstep.core.words.worker_messages import Ledger, Members, Parcel, ParcelKind, Place, Resume, TellSealed
from everstep.errors import PeerError

MAX_MESSAGE = 256 << 20
_LENGTH = struct.Struct("<I")


def pack(message: Mapping[str, Any]) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Bytes in, messages out."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > MAX_MESSAGE:
                raise PeerError(f"a message of {length} bytes is more than the {MAX_MESSAGE} allowed")
            if len(self._bytes) < _LENGTH.size + length:
                return
            body = bytes(self._bytes[_LENGTH.size : _LENGTH.size + length])
            del self._bytes[: _LENGTH.size + length]
            message = json.loads(body)
            if not isinstance(message, dict):
                raise PeerError("a message is not a JSON object")
            yield message


def receive(sock: socket.socket) -> Iterator[dict[str, Any]]:
    """Messages from a blocking socket, until it closes."""
    unpacker = Unpacker()
    while data := sock.recv(1 << 16):
        yield from unpacker.feed(data)


# ------------------------------------------------------------------ core's values in JSON's terms


def ops_out(ops: tuple[Op, ...]) -> str:
    return " ".join(map(str, ops))


def ops_in(text: str) -> tuple[Op, ...]:
    return tuple(parse_op(word) for word in text.split())


def hosts_out(hosts: Mapping[Place, int]) -> list[list[int]]:
    return [[*microbatch, stage, host] for (microbatch, stage), host in hosts.items()]


def hosts_in(rows: list[list[int]]) -> dict[Place, int]:
    return {(Microbatch(home, number), stage): host for home, number, stage, host in rows}


def ledger_out(ledger: Ledger) -> dict[str, Any]:
    return {
        "step": ledger.step,
        "done": ops_out(ledger.done),
        "done_before": ops_out(ledger.done_before),
        "joining": ledger.joining,
        "holding": [
            [p.what, p.attempt, p.step, p.stage, *(p.microbatch or (-1, -1))] for p in ledger.holding
        ],
    }


def ledger_in(table: Mapping[str, Any]) -> Ledger:
    holding = tuple(
        Parcel(ParcelKind(what), attempt, step, stage, Microbatch(home, number))
        for what, attempt, step, stage, home, number in table["holding"]
    )
    return Ledger(
        step=table["step"],
        done=ops_in(table["done"]),
        done_before=ops_in(table["done_before"]),
        holding=holding,
        joining=table["joining"],
    )


def resume_out(order: Resume) -> dict[str, Any]:
    return {
        "epoch": order.epoch,
        "attempts": order.attempts,
        "step": order.step,
        "rewind": order.rewind,
        "restore": order.restore,
        "until": order.until,
        "lists": {step: ops_out(ops) for step, ops in order.lists.items()},
        "steady": ops_out(order.steady),
        "hosts": {step: hosts_out(h) for step, h in order.hosts.items()},
        "steady_hosts": hosts_out(order.steady_hosts),
        "members": [[m.from_step, m.live, m.rounds] for m in order.members],
        "ghosts": [[step, *microbatch] for step, microbatch in sorted(order.ghosts)],
        "give": list(order.give.items()),
        "feeds": list(order.feeds.items()),
        "shares": order.shares,
        "awaits": sorted(order.awaits),
    }


def resume_in(table: Mapping[str, Any]) -> Resume:
    return Resume(
        epoch=table["epoch"],
        attempts=tuple((first, attempt) for first, attempt in table["attempts"]),
        step=table["step"],
        rewind=table["rewind"],
        restore=table["restore"],
        until=table["until"],
        lists={int(step): ops_in(text) for step, text in table["lists"].items()},
        steady=ops_in(table["steady"]),
        hosts={int(step): hosts_in(rows) for step, rows in table["hosts"].items()},
        steady_hosts=hosts_in(table["steady_hosts"]),
        members=tuple(
            Members(first, tuple(map(tuple, live)), tuple(rounds)) for first, live, rounds in table["members"]
        ),
        ghosts=frozenset((step, Microbatch(home, number)) for step, home, number in table["ghosts"]),
        give={step: tuple(peers) for step, peers in table["give"]},
        feeds=dict(table["feeds"]),
        awaits=frozenset(table["awaits"]),
        shares=tuple((step, stage, share) for step, stage, share in table["shares"]),
    )


def sealed_out(sealed: TellSealed) -> dict[str, Any]:
    return {
        "step": sealed.step,
        "attempt": sealed.attempt,
        "microbatches": sealed.microbatches,
        "executed": sealed.executed,
        "losses": [[*m, loss] for m, loss in sealed.losses],
        "sum_of_squares": sealed.sum_of_squares,
    }


def losses_in(rows: list[list[Any]]) -> tuple[tuple[Microbatch, float], ...]:
    return tuple((Microbatch(int(home), int(number)), float(loss)) for home, number, loss in rows)
