"""What goes wrong, as values: a storm is its spec and a list of these, and a smaller list is a smaller storm.

A fault strikes at a moment, or a while after the n-th time that something happens (`after`): uniform moments
rarely hit the few microseconds between two messages, aimed ones do. Its target is a number that is resolved
when it strikes, among those who live then; `here` means the worker that set it off.

    kill 3 at 1200 ms               node 1 for 900 ms, 40 us after sum 4
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

HERE = -1


class FaultKind(StrEnum):
    KILL = "kill"  # a worker's process, by SIGKILL
    RAISE = "raise"  # a worker raises, reports it, and ends
    NODE = "node"  # a node loses power; it is back after `span`
    RACK = "rack"  # all nodes of a rack do
    LEMON = "lemon"  # a node that dies again soon after each of its next returns
    SLOW = "slow"  # a worker's GPU is `factor` times slower for `span`
    FLAP = "flap"  # the same, on and off
    HANG = "hang"  # a worker stands still until its agent kills it
    LAG = "lag"  # all messages from and to a node take `factor` times longer
    CUT = "cut"  # a connection breaks; what was under way is lost, the transport mends it after `span`
    PART = "partition"  # a node cannot be reached by the others, nor reach them; held back, then delivered
    ONE_WAY = "one-way"  # it can be heard, but does not hear
    MUTE = "mute"  # the coordinator does not hear a node: it takes its workers for dead, and they are not
    DRAIN = "drain"  # an operator drains a node, which loses power before its workers have left
    # An agent's process is stopped; its workers keep training, and all they did is reported later.
    FREEZE = "freeze"
    REPLACE = "replace"  # an agent's process is killed; after `span` the next one takes its workers over
    SERVER = "fork-server"  # the process that makes a node's workers is killed
    SLEEP = "sleep"  # a worker sleeps in the kernel, where not even SIGKILL reaches it
    HOLE = "hole"  # a connection swallows everything, and nothing says so
    REFUSE = "refuse"  # an agent is not let in, as with a wrong token
    ELECT = "elect"  # another coordinator takes over; the old one does not know it yet
    SHARD = "shard"  # one process of a worker that has several, and is not the first of them
    UNREAD = "unread"  # what a node keeps in memory cannot be read, not even there
    START = "start"  # the next process that a node starts hangs before it reports
    DISK = "disk"  # searches, commits and saves that a node begins within `span` never end
    NOTICE = "notice"  # the nodes of a rack are announced to leave, and do
    DATA = "data-cut"  # a node's data network is dead for good; its agent is heard
    STAGE = "stage"  # the nodes of one stage lose power, all but one
    DEAF = "deaf"  # the coordinator's own network is away: it hears nobody, or nobody of one task
    HEAD = "coordinator"  # the coordinator crashes; what its journal had not synced is lost


WHO_WORKERS = (
    FaultKind.KILL,
    FaultKind.RAISE,
    FaultKind.SLOW,
    FaultKind.FLAP,
    FaultKind.HANG,
    FaultKind.CUT,
    FaultKind.SLEEP,
    FaultKind.HOLE,
    FaultKind.SHARD,
)
OF_CLUSTERS = (  # they need agents and a coordinator
    FaultKind.DRAIN,
    FaultKind.FREEZE,
    FaultKind.SERVER,
    FaultKind.SLEEP,
    FaultKind.HOLE,
    FaultKind.REFUSE,
    FaultKind.ELECT,
)
OF_HANGS = (FaultKind.START, FaultKind.DISK, FaultKind.HOLE, FaultKind.NOTICE)
OF_CUTS = (FaultKind.DATA,)
OF_AGENTS = (FaultKind.REPLACE,)
OF_LISTENER = (FaultKind.DEAF,)
OF_ROLES = (FaultKind.STAGE,)
TRIGGERS = ("interrupt", "resume", "plan", "sum", "hold", "update", "copy", "feed", "save", "start", "enter")


@dataclass(frozen=True, slots=True, kw_only=True)
class StormFault:
    what: FaultKind
    at_us: int  # from the start, or from the moment that sets it off
    target: int
    span_us: int = 0
    factor: int = 1
    after: str = ""  # one of TRIGGERS, or empty
    nth: int = 1

    @property
    def is_of_all(self) -> bool:
        """Of a coordinator that is deaf: to everybody, not to one task alone."""
        return self.target % 3 != 0

    def __str__(self) -> str:
        who = "here" if self.target == HERE else str(self.target)
        if self.what in (FaultKind.HEAD, FaultKind.ELECT):
            who = ""
        if self.what is FaultKind.DEAF:
            who = "to all" if self.is_of_all else "to one task"
        span = f" for {self.span_us / 1e3:g} ms" if self.span_us else ""
        times = f" x{self.factor}" if self.factor > 1 else ""
        when = f"{self.at_us / 1e3:g} ms after {self.after} {self.nth}" if self.after else ""
        return f"{self.what} {who}".rstrip() + span + times + (f", {when}" if when else self._moment())

    def _moment(self) -> str:
        return f" at {self.at_us / 1e3:g} ms"
