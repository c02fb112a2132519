"""What Slurm says, as values: hosts, nodes and jobs out of the text of `scontrol` and `squeue`.

Nothing here runs a command, so all of it is tested on text that a real Slurm has printed. Fields are asked
for by name and in an order of our own (`SQUEUE_FORMAT`): a job's name, which may hold anything, is never
among them. `scontrol show node` is read by its first `Key=`, and free text (`Reason=`) comes last in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from everstep.errors import PeerError

SQUEUE_FORMAT = "%i|%T|%N|%B|%P|%a|%q|%b|%f|%l"
MAX_HOSTS = 100_000
_KEY = re.compile(r"(?:^|\s)([A-Z][A-Za-z]*)=")
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_MARKS = "*~#!%$@^-"  # behind a state, in older versions and in sinfo
_NOTHING = frozenset({"", "(null)", "N/A", "n/a", "None", "NONE"})


class NodeUse(StrEnum):
    """What a node's state means for who trains on it."""

    USABLE = "usable"
    UNCLEAR = "unclear"  # slurmctld cannot reach its slurmd; its workers may well be training
    LEAVING = "leaving"  # its workers may run for now, and should move
    LOST = "lost"  # what runs there is dead, or will be as soon as its slurmd hears of it


_LOST = frozenset({"DOWN", "ERROR", "FUTURE", "POWERED_DOWN", "POWER_DOWN", "POWERING_DOWN"})
_LEAVING = frozenset({"DRAIN", "DRAINING", "DRAINED", "FAIL", "FAILING", "REBOOT_ISSUED", "REBOOT_REQUESTED"})
_UNCLEAR = frozenset({"NOT_RESPONDING", "NO_RESPOND", "UNKNOWN"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNode:
    name: str
    states: frozenset[str]  # ALLOCATED, DRAIN, NOT_RESPONDING, …
    address: str = ""
    reason: str = ""

    @property
    def use(self) -> NodeUse:
        if self.states & _LOST:
            return NodeUse.LOST
        if self.states & _LEAVING:
            return NodeUse.LEAVING
        return NodeUse.UNCLEAR if self.states & _UNCLEAR or not self.states else NodeUse.USABLE

    @property
    def described(self) -> str:
        """Its state as Slurm puts it, and why."""
        states = "+".join(sorted(self.states)) or "no state"
        return f"{states} ({self.reason})" if self.reason else states


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    number: str
    state: str
    nodes: tuple[str, ...] = ()
    batch_host: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    tres_per_node: str = ""
    features: str = ""
    time_limit: str = ""

    @property
    def runs(self) -> bool:
        return self.state in ("RUNNING", "SUSPENDED")

    @property
    def waits(self) -> bool:
        return self.state in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED")

    @property
    def has_batch_script(self) -> bool:
        """False once the node on which it ran has been taken out of the job."""
        return self.batch_host in self.nodes


def parse_nodes(text: str) -> dict[str, SlurmNode]:
    """Of `scontrol --oneliner show node`, by name."""
    found = {}
    for line in text.splitlines():
        fields = _fields(line)
        if name := fields.get("NodeName"):
            state_text = fields.get("State", "").upper()
            states = {state.rstrip(_MARKS) for state in state_text.split("+")}
            if "*" in state_text:
                states.add("NOT_RESPONDING")
            found[name] = SlurmNode(
                name=name,
                states=frozenset(states - {""}),
                address=_given(fields.get("NodeAddr", "")),
                reason=re.sub(r"\s*\[[^\]]*@[^\]]*\]$", "", _given(fields.get("Reason", ""))),
            )
    return found


def parse_jobs(text: str) -> list[SlurmJob]:
    """Of `squeue --noheader --format SQUEUE_FORMAT`."""
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        fields = [_given(field.strip()) for field in line.split("|")]
        if len(fields) != SQUEUE_FORMAT.count("|") + 1:
            raise PeerError(f"squeue answers {line!r}, which is not {SQUEUE_FORMAT}")
        number, state, nodes, batch_host, *rest = fields
        partition, account, qos, tres_per_node, features, time_limit = rest
        found.append(
            SlurmJob(
                number=number,
                state=state,
                nodes=tuple(expand(nodes)),
                batch_host=batch_host,
                partition=partition,
                account=account,
                qos=qos,
                tres_per_node=tres_per_node,
                features=features,
                time_limit=time_limit,
            )
        )
    return found


def expand(expression: str) -> list[str]:
    """`n[1-3,07],login` -> n1 n2 n3 n07 login, in order."""
    found: list[str] = []
    for part in _parts(expression):
        for name in _names(part):
            found.append(name)
            if len(found) > MAX_HOSTS:
                raise PeerError(f"the host list {expression[:80]!r} names more than {MAX_HOSTS} hosts")
    return found


def _names(part: str) -> Iterator[str]:
    """Of one item, whose brackets count like the digits of a number: the last one fastest."""
    inside = _BRACKETS.search(part)
    if inside is None:
        yield part
        return
    for piece in inside.group(1).split(","):
        first, _, last = piece.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise PeerError(f"{part!r} is not a host list")
        for number in range(int(first), int(last or first) + 1):
            yield from _names(f"{part[: inside.start()]}{number:0{len(first)}d}{part[inside.end() :]}")


def _parts(expression: str) -> Iterator[str]:
    """Split at the commas outside brackets."""
    yield from filter(None, re.split(r",(?![^\[]*\])", expression.strip()))


def _fields(line: str) -> dict[str, str]:
    marks = list(_KEY.finditer(line))
    ends = [mark.start() for mark in marks[1:]] + [len(line)]
    found: dict[str, str] = {}
    for mark, end in zip(marks, ends, strict=True):
        found.setdefault(mark.group(1), line[mark.end() : end].strip())
    return found


def _given(text: str) -> str:
    return "" if text in _NOTHING else text
