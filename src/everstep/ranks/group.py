"""The ranks of one machine: their processes, their output, their lines, and the store they meet in.

One thread, one selector. It wakes up for: a pidfd (a rank has ended: no polling), a rank's line (it has
raised, it loads torch), and the rendezvous socket (a connection that was not announced). What has happened
goes to `happened` as words; what to do about it is decided there.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from everstep.errors import PeerError, UserError
from everstep.protocol.codec import decode
from everstep.protocol.held import RankWord
from everstep.ranks import looks as rank_looks
from everstep.ranks import store as rank_store
from everstep.ranks import words
from everstep.ranks.environment import MARK, RankPlace, rank_environment
from everstep.ranks.fork_server import RankStart, RankStarter
from everstep.ranks.line import MAX_MESSAGE_BYTES
from everstep.ranks.output import OutputStream, Pump
from everstep.ranks.rank_main import LINE, STACKS
from everstep.ranks.running_rank import RunningRank
from everstep.stack_text import STACKS_FILE

_MOST_SWEEPS = 10

Happened = Callable[[words.Event], None]


class RankGroup:
    def __init__(
        self,
        command: Sequence[str],
        starter: RankStarter,
        *,
        happened: Happened,
        output: BinaryIO,
        errors: BinaryIO,
        environment: Mapping[str, str] | None = None,
        folder: str = "",
        hidden: Mapping[int, int] | None = None,
    ) -> None:
        """`environment`: what ranks inherit, if not that of this process. `hidden`: see RankRules."""
        self.ranks: dict[int, RunningRank] = {}
        self.selector = selectors.DefaultSelector()
        self._command, self._starter, self._happened = tuple(command), starter, happened
        self._output, self._errors = output, errors
        self._environment, self._folder, self._hidden = environment, folder, hidden or {}
        self._pump = Pump()
        self._store = rank_store.StoreHost(starter.fork_store)
        self._listener: socket.socket | None = None
        self._private: Mapping[str, str] = {}
        self._oom_kills = 0
        self._locks: set[Path] = set()  # that ranks held when they were told to end
        self._marks: set[bytes] = set()  # what the environments of this life's processes have, and no others

    def open(self) -> None:
        self._pump.start()

    def close(self) -> None:
        """End every process, whatever happened."""
        for rank in self.ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, signal.SIGKILL)
            rank.line.close()
        self._end_daemons()
        self.stop_listening()
        self._store.close()
        self._starter.close()
        self._pump.close()
        self.selector.close()

    # -------------------------------------------------------------- starts

    def start(self, places: Iterable[RankPlace], private: Mapping[str, str] | None = None) -> dict[int, int]:
        """By rank: its pid. `private`: variables for `rank_main`."""
        self._private = private or {}
        self._oom_kills = rank_looks.oom_kills()
        self._marks.clear()
        return {place.rank: self.start_one(place) for place in places}

    def park(self) -> None:
        self._starter.park()

    def start_one(self, place: RankPlace, *, is_replacement: bool = False) -> int:
        """Also in the middle of a life, in place of one that is gone; its pid."""
        assert place.rank not in self.ranks, "a second process of one rank"
        with contextlib.suppress(OSError):  # a full disk; its output is shown all the same
            place.folder.mkdir(parents=True, exist_ok=True)
        return self._start(place, is_replacement=is_replacement)

    def _start(self, place: RankPlace, *, is_replacement: bool) -> int:
        hidden = self._hidden.get(place.local_rank, 0)
        stdout = OutputStream(place.rank, place.folder / "stdout.log", None if hidden & 1 else self._output)
        stderr = OutputStream(place.rank, place.folder / "stderr.log", None if hidden & 2 else self._errors)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        private = {LINE: str(theirs.fileno()), STACKS: str(place.folder / STACKS_FILE), **self._private}
        inherited = os.environ if self._environment is None else self._environment
        own = rank_environment(place, inherited)
        self._marks.add(f"{MARK}={own[MARK]}".encode())
        process = self._starter.start(
            RankStart(
                command=self._command,
                environment={**own, **private},
                stdout=stdout.writer,
                stderr=stderr.writer,
                line=theirs.fileno(),
                folder=self._folder,
                is_replacement=is_replacement,
            )
        )
        theirs.close()
        for stream in (stdout, stderr):
            stream.started()
            self._pump.add(stream)
        rank = RunningRank(process=process, line=ours, stdout=stdout, stderr=stderr, folder=place.folder)
        self.ranks[place.rank] = rank
        self.selector.register(process.pidfd, selectors.EVENT_READ, (place.rank, "exited"))
        self.selector.register(ours, selectors.EVENT_READ, (place.rank, "line"))
        return process.pid

    # -------------------------------------------------------------- the store

    def listen(self, address: str, port: int) -> tuple[str, int]:
        """A fresh socket for a fresh store; its address."""
        self.stop_listening()
        if port:
            self._store.close()  # the store of the life before holds this very port
        try:
            self._listener = rank_store.listen(address, port)
        except OSError as error:
            raise UserError(
                f"port {port} on {address} cannot be used for the rendezvous of the ranks "
                f"({error.strerror}); leave --rdzv-port (torchrun: --master-port) out for a free one."
            ) from None
        self.selector.register(self._listener, selectors.EVENT_READ, (-1, "connection"))
        return address, self._listener.getsockname()[1]

    def serve_store(self) -> None:
        """Hand the socket over, once a life."""
        if self._listener is not None and self._listener.fileno() in self.selector.get_map():
            self.selector.unregister(self._listener)
            self._store.serve(self._listener)

    def stop_listening(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(KeyError):
                self.selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    # -------------------------------------------------------------- what has happened

    def take(self, rank: int, what: str) -> None:
        """An event of the selector: its data."""
        match what:
            case "connection":
                self.serve_store()
            case "line" if rank in self.ranks:
                self._hear(rank)
            case "exited" if rank in self.ranks:
                self._bury(rank)

    def _hear(self, number: int) -> None:
        rank = self.ranks[number]
        try:
            data = rank.line.recv(MAX_MESSAGE_BYTES)
            message = json.loads(data) if data else None
        except BlockingIOError:
            return
        except (OSError, ValueError):
            message = None
        if not isinstance(message, dict):  # closed, or not ours: its exit is seen anyway
            with contextlib.suppress(KeyError):
                self.selector.unregister(rank.line)
            return
        match message.get("kind"):
            case "torch":
                rank.has_torch = True
                self.serve_store()
            case "recorded":
                rank.is_recorded = True
            case "left":
                self._happened(words.RankLeft(rank=number))
            case "paced":
                is_written = bool(message.get("is_written"))
                self._happened(words.RankRecorded(rank=number, is_written=is_written))
            case "counted" if isinstance(entered := message.get("entered"), dict):
                rank.entered = {name: number for name, number in entered.items() if isinstance(number, int)}
            case "progress" if isinstance(step := message.get("step"), int):
                tokens = message.get("tokens")
                self._happened(
                    words.StepSeen(
                        rank=number,
                        step=step,
                        tokens=tokens if isinstance(tokens, int) else None,
                        is_saved=bool(message.get("saved")),
                    )
                )
            case "snapshot" | "snapshot_failed" if isinstance(step := message.get("step"), int):
                self._happened(
                    words.RankHandedOver(
                        rank=number,
                        step=step,
                        name=str(message.get("name", "")),
                        size=int(message.get("size", 0)),
                        hash=str(message.get("hash", "")),
                        failed=str(message.get("because", "")),
                    )
                )
            case "held":
                with contextlib.suppress(PeerError):  # not ours
                    word = decode(RankWord, message.get("word"))
                    if word.rank == number:  # a rank speaks for itself only
                        self._happened(words.HeldRankSaid(rank=number, word=word))
            case "raised":
                self._happened(
                    words.RankRaised(
                        rank=number,
                        error=str(message.get("error", "an exception")),
                        where=str(message.get("where", "")),
                        traceback=str(message.get("traceback", "")),
                        raised_at=_number(message.get("raised_at")),
                    )
                )

    def _bury(self, number: int) -> None:
        """A rank has ended: what it said, what is left of its process group, then the event."""
        rank = self.ranks[number]
        while number in self.ranks and self._has_words(rank):
            self._hear(number)
        code = rank.process.exit_code()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.process.pid, signal.SIGKILL)
        for stream in (rank.stdout, rank.stderr):
            stream.take()
        for source in (rank.line, rank.process.pidfd):
            with contextlib.suppress(KeyError):
                self.selector.unregister(source)
        rank.line.close()
        rank.process.reap()
        del self.ranks[number]
        if not self.ranks:
            self._end_daemons()
            for lock in self._locks:
                lock.unlink(missing_ok=True)
            self._locks.clear()
        # Written by torchelastic's @record; the rank's own report, if there is one, has come before.
        recorded = rank.recorded_error() if code != 0 else None
        if recorded is not None:
            error, traceback = recorded
            self._happened(words.RankRaised(rank=number, error=error, traceback=traceback))
        self._happened(
            words.RankExited(
                rank=number,
                code=code,
                reason=self._reason(code),
                words=rank.stderr.tail(),
            )
        )

    def _end_daemons(self) -> None:
        """What ranks have started outside their process groups ends with the last of them."""
        self._starter.end_orphans()
        for _ in range(_MOST_SWEEPS):  # one that is being killed may have forked meanwhile
            found = rank_looks.started_with(self._marks)
            for pid in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if not found:
                return

    def _has_words(self, rank: RunningRank) -> bool:
        with selectors.DefaultSelector() as look:
            look.register(rank.line, selectors.EVENT_READ)
            if not look.select(0):
                return False
        try:
            return bool(rank.line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def _reason(self, code: int) -> str:
        if code >= 0:
            return f"exited with code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        by_kernel = code == -signal.SIGKILL and rank_looks.oom_kills() > self._oom_kills
        return f"killed by {name}" + (" (the kernel has run out of memory)" if by_kernel else "")

    # -------------------------------------------------------------- looks and signals

    def look_at_families(self) -> None:
        """A rank may leave all work to its children."""
        for rank in self.ranks.values():
            rank.family_cpu_s = rank_looks.family_cpu_s(rank.process.pid)

    def ask_for_counts(self) -> None:
        for rank in self.ranks.values():
            if rank.has_torch:
                rank.ask(count=True)

    def ask_for_paces(self, folder: Path) -> set[int]:
        """Of ranks that have a process group: these will answer."""
        asked = {number: rank for number, rank in self.ranks.items() if rank.entered}
        for number, rank in asked.items():
            rank.ask(pace=str(folder / f"pace_rank_{number}.json"))
        return set(asked)

    def looks(self) -> dict[int, words.Look]:
        return {number: found for number, rank in self.ranks.items() if (found := rank.look()) is not None}

    def signal(self, ranks: Iterable[int], name: str) -> None:
        """The whole group of each. A stopped process hears nothing but SIGKILL."""
        for number in ranks:
            if (rank := self.ranks.get(number)) is None:
                continue
            found = rank.look()
            is_stopped = found is not None and found.state in "Tt"
            wanted = signal.SIGKILL if is_stopped else signal.Signals[name]
            self._locks |= rank_looks.build_locks(rank.process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, wanted)


def rank_folder(logs: Path, run_id: str, life: int, rank: int) -> Path:
    """As torchrun names them; lives count from 0 here."""
    return logs / run_id / f"attempt_{life}" / str(rank)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
