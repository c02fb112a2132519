"""One worker process as its agent sees it: its states, and how long each may last."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum

from everstep.protocol.codec import decode, encode
from everstep.protocol.lifecycle import move
from everstep.protocol.messages import Sender, StartProcess
from everstep.protocol.table import Document


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLimits:
    """How long to wait for what, in seconds."""

    finish_s: float = 5.0  # for a worker asked to finish, before it is ordered to leave
    save_s: float = 600.0  # the same, while it writes its last state and no byte is written
    leave_s: float = 20.0  # for a worker ordered to leave, before it is killed
    kill_s: float = 30.0  # for a killed process to go, before it is given up as stuck
    commit_s: float = 10.0  # for a coordinator to order the commit of what is written, before it is done here
    commit_alone_s: float = 1.0  # the same, once it is known that no coordinator does
    spawn_tries: int = 3  # of one start, each with a new fork server
    look_s: float = 0.03  # a beacon younger than this is not asked about
    ask_kernel_s: float = 0.1  # in one op for so long: what has its process been doing?


class ProcessState(StrEnum):
    STARTING = "starting"  # its fork server was asked for it
    RUNNING = "running"  # it was made; soon it calls
    ENDING = "ending"  # asked to finish what it has in hand, or ordered to leave
    KILLED = "killed"  # SIGKILL was sent, or will be as soon as it is made
    STUCK = "stuck"  # it outlives SIGKILL: reported as ended, and its slot stays taken
    DEAD = "dead"  # it has died, and the kernel is clearing up


_S = ProcessState
PROCESS: dict[ProcessState, frozenset[ProcessState]] = {
    _S.STARTING: frozenset({_S.RUNNING, _S.KILLED, _S.DEAD}),
    _S.RUNNING: frozenset({_S.ENDING, _S.KILLED, _S.DEAD}),
    _S.ENDING: frozenset({_S.ENDING, _S.KILLED, _S.DEAD}),
    _S.KILLED: frozenset({_S.STUCK, _S.DEAD}),
    _S.STUCK: frozenset({_S.DEAD}),
    _S.DEAD: frozenset(),
}
ALIVE = (_S.RUNNING, _S.ENDING)


@dataclass(slots=True)
class Process:
    order: StartProcess
    state: ProcessState = ProcessState.STARTING
    is_up: bool = False  # the fork server has made it: it can be killed
    tries: int = 1
    deadline: float | None = None
    closed_at: float = 0.0
    gently: bool = False  # while ending: asked to finish, not yet ordered to leave
    unanswered: list[float] = field(
        default_factory=list
    )  # when the orders were sent that it has not taken yet
    resumed_at: float | None = None  # when it was last told to work; None: it was told to pause since
    has_begun: bool = False  # it has done something since
    raised: str = ""  # why it will end, in its own words
    carriers: dict[str, str] = field(default_factory=dict)  # by peer: the transport of tensors to it
    doing: str = ""  # what its beacon showed last
    moment: int = 0  # and when it wrote that
    moved_at: float = 0.0  # when that last changed
    was_stuck: bool = False  # reported as ended while it was not: when it is, its slot is free
    may_save: bool = False  # its end may wait until its state is written
    facts_epoch: int = 0  # the last epoch whose facts it was told
    pid: int = 0
    born: int = 0  # its start time: another process may get its number later

    @property
    def sender(self) -> Sender:
        return Sender(self.order.task, self.order.worker, self.order.incarnation)

    def image(self) -> Document:
        """What the next agent must know of it; the rest is seen again at the first look."""
        return {name: encode(getattr(self, name)) for name in _KEPT}

    @classmethod
    def of_image(cls, image: Document) -> Process:
        found = decode(cls, {"is": cls.__name__, **image})
        return found

    def become(self, state: ProcessState) -> None:
        self.state = move(PROCESS, self.state, state, f"process {self.sender.worker} of {self.sender.task}")


_SEEN = ("carriers", "doing", "moment", "moved_at")
_KEPT = tuple(each.name for each in fields(Process) if each.name not in _SEEN)
