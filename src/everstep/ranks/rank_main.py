"""`python -m everstep.ranks.rank_main script.py args...`: a person's script, as Python would run it, with a
line to its keeper.

What it adds to the process, and nothing else: an uncaught exception is reported with its traceback, after it
has been printed as always; a real-time signal writes the stacks of all threads to a file, in C, whatever the
script is stuck in; and once the script imports torch, a thread answers when the keeper asks for PyTorch's
record of collectives.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib.abc
import io
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn

from everstep.forked import name_process
from everstep.hold import door
from everstep.ranks import line as rank_line
from everstep.ranks.line import KeeperLine

LINE, STACKS = "EVERSTEP_RANK_LINE", "EVERSTEP_RANK_STACKS"  # gone before the script starts, as these:
SNAPSHOTS, RESTORE = "EVERSTEP_RANK_SNAPSHOTS", "EVERSTEP_RANK_RESTORE"
COPY_EVERY = "EVERSTEP_RANK_COPY_EVERY"
HELD = "EVERSTEP_RANK_HELD"  # its settings are the first question on the line
PARENT = "EVERSTEP_RANK_PARENT"  # the pid of the process that starts a rank, and with which it ends
STACKS_SIGNAL = signal.SIGRTMIN + 7  # scripts have uses of their own for SIGUSR1 and SIGUSR2
EXACT = "EVERSTEP_RANK_EXACT"
EXEC = "--exec"  # what follows is a program and no Python: it becomes this process
_MAX_TRACEBACK = 10_000  # characters; its end is what matters, and a character may take 6 bytes as JSON
_PR_SET_PDEATHSIG = 1


def answer_questions(line: KeeperLine) -> None:
    """One thread, for as long as the process lives: write what is asked for, say when it is written."""
    while (question := line.question()) is not None:
        if "record" in question:
            line.say(kind="recorded", is_written=_write_record(question["record"]))
        elif "pace" in question:
            line.say(kind="paced", is_written=_write_record(question["pace"]))
        elif "order" in question:
            door.take(question["order"])
        elif "count" in question and (entered := _entered()):
            line.say(kind="counted", entered=entered)


def _entered() -> dict[str, int]:
    """By process group: how many collectives this rank has begun. Nothing is imported for it."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        groups = dict(distributed._world.pg_names)  # type: ignore[union-attr]
        return {name: group._get_sequence_number_for_group() for group, name in groups.items()}
    except Exception:  # no group yet, or one that does not count; and these are torch's private parts
        return {}


class _TorchWatch(importlib.abc.MetaPathFinder):
    """Finds nothing; notices that the script is about to load torch."""

    def __init__(self, line: KeeperLine) -> None:
        self._line = line

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torch":
            sys.meta_path.remove(self)
            self._line.say(kind="torch")
            threading.Thread(
                target=answer_questions, args=(self._line,), name="everstep-line", daemon=True
            ).start()
        return None


def main(arguments: list[str]) -> None:
    if arguments[0] == EXEC:
        run_program(arguments[1:])
    line = attach()
    run(arguments, line)


def attach() -> KeeperLine:
    """What a keeper relies on. To be called once, before anything of the script runs."""
    if rank := os.environ.get("RANK"):
        name_process(f"rank {rank}")
    fd = os.environ.pop(LINE, None)
    stacks = os.environ.pop(STACKS, None)
    faulthandler.enable()
    if stacks is not None:
        with contextlib.suppress(OSError):  # a full disk
            file = open(stacks, "a")  # noqa: SIM115 - open as long as the process lives
            faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    die_with_parent(int(os.environ.pop(PARENT, os.getppid())))
    snapshots, restore = os.environ.pop(SNAPSHOTS, ""), os.environ.pop(RESTORE, "")
    line = rank_line.current = KeeperLine(None if fd is None else int(fd))
    line.snapshots = Path(snapshots) if snapshots else None
    line.restore_step = int(restore) if restore else None
    line.copy_every = int(os.environ.pop(COPY_EVERY, "1"))
    if os.environ.pop(HELD, "") and (first := line.question()) is not None:
        door.open_door(first["hold"], line.say)
    if os.environ.pop(EXACT, ""):
        from everstep import exact  # loads torch

        exact.install()
    if "torch" in sys.modules:
        line.say(kind="torch")
        threading.Thread(target=answer_questions, args=(line,), name="everstep-line", daemon=True).start()
    else:
        sys.meta_path.insert(0, _TorchWatch(line))
    line.say(kind="ready")
    return line


def run_program(command: list[str]) -> NoReturn:
    """It ends with its keeper, as every rank; more cannot be added to it."""
    line = os.environ.pop(LINE, None)
    for name in (STACKS, SNAPSHOTS, RESTORE, COPY_EVERY, HELD, EXACT):
        os.environ.pop(name, None)
    if line is not None:
        os.set_inheritable(int(line), False)
    die_with_parent(int(os.environ.pop(PARENT, os.getppid())))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def die_with_parent(parent: int) -> None:
    """The kernel sends SIGKILL when the process that started this one dies, however it dies; also if it has
    died already.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def run(arguments: list[str], line: KeeperLine) -> None:
    """The script (or `-m module`), then the process's exit as Python's own would be."""
    try:
        if arguments[0] == "-m":
            _run_module(arguments[1], arguments[2:])
        else:
            _run_script(arguments[0], arguments[1:])
        _end()
        line.say(kind="left")  # the process ends when its threads and its modules have; that may take long
    except SystemExit as end:
        if end.code in (None, 0):
            _end()
            line.say(kind="left")
        raise
    except BaseException as error:
        own = _own_frames(error.__traceback__)
        _report(line, error.with_traceback(own), own)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def _end() -> None:
    """Other ranks may still need answers of this one."""
    if door.current is not None:
        door.current.end()


def _run_script(path: str, arguments: list[str]) -> None:
    sys.argv = [path, *arguments]
    sys.path[0] = str(Path(path).resolve().parent)
    main_module = ModuleType("__main__")
    main_module.__dict__.update(__file__=path, __loader__=SourceFileLoader("__main__", path), __spec__=None)
    main_module.__dict__.update(__cached__=None, __builtins__=__builtins__)
    sys.modules["__main__"] = main_module  # pickles and spawned children look for the script here
    with io.open_code(str(Path(path).resolve())) as file:
        code = compile(file.read(), path, "exec")
    exec(code, main_module.__dict__)


def _run_module(name: str, arguments: list[str]) -> None:
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _own_frames(found: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames that are ours, and runpy's."""
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    own = found
    while own is not None and own.tb_frame.f_code.co_filename in ours:
        own = own.tb_next
    return own or None


def _report(line: KeeperLine, error: BaseException, frames: TracebackType | None) -> None:
    """Printed first: the reader of the report may end this process."""
    raised_at = time.monotonic()
    sys.excepthook(type(error), error, frames)
    sys.stdout.flush()
    sys.stderr.flush()
    innermost = traceback.extract_tb(frames)[-1:] if frames else []
    line.say(
        kind="raised",
        error=f"{type(error).__name__}: {error}"[:500],
        where="".join(f"{Path(f.filename).name}:{f.lineno} in {f.name}" for f in innermost)[:300],
        traceback="".join(traceback.format_exception(type(error), error, frames))[-_MAX_TRACEBACK:],
        raised_at=raised_at,
    )


def _write_record(path: str) -> bool:
    """PyTorch's flight recorder, as JSON: the collectives of this rank, and the one it is in."""
    try:
        from torch._C import _distributed_c10d as c10d

        names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # of NCCL and of every other backend
        dumps = [getattr(c10d, name)(True, False) for name in names if hasattr(c10d, name)]
        filled = [d if isinstance(d, bytes) else d.encode() for d in dumps if d and b'"entries"' in _bytes(d)]
        if not filled:
            return False
        Path(path).write_bytes(max(filled, key=len))
    except Exception:  # of torch's private parts we know nothing; without a record we have the stacks
        return False
    return True


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


if __name__ == "__main__":
    main(sys.argv[1:])
