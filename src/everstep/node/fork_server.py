"""A process that has imported torch once and forks a worker whenever one is needed.

Importing torch takes seconds; forking takes milliseconds. So a dead worker is back before a step or two have
passed, and a test can afford real processes. The fork server runs no torch op and never touches CUDA: what is
forked after that would be broken.

It hands out a pidfd with each child and does not reap a child before it is asked to, so that the exit code
can be read. When its owner goes away, it ends its children and itself; or it waits for the next owner for a
while (`node.agent_record`), so that the exit code of a worker that dies meanwhile is known. If it dies
itself, its children live on, and its owner starts another one.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import secrets
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from everstep import log
from everstep.errors import EverstepError, UserError
from everstep.forked import (
    ASKS_NVML,
    adopt_orphans,
    children_of,
    end_orphans,
    leave_to_owner,
    reap_orphans,
    received_request,
    send_request,
)
from everstep.log import warn
from everstep.procfs import born, end_leftovers, wait_status
from everstep.protocol.codec import decode
from everstep.protocol.messages import Sender
from everstep.store.owned_folders import remove_all_left
from everstep.store.unix_users import UMASK, UnixUser, own_cgroup
from everstep.store.unix_users import found as unix_user

WARM_S = 300.0  # to load torch, from a slow disk on a busy machine
ANSWER_S = 20.0  # to fork
OWNER_GONE_S = 10.0  # for a process that was killed to be gone
ORPHANS_S = 2.0  # to end daemons; one that waits for a broken disk holds nothing up
OOM_SCORE = 500  # of workers, from -1000 to 1000: the kernel ends the process with the most first
# torch's optimizers import torch._dynamo in their first step: 2 s, better spent once, before the forks.
_TRAINING = (
    "torch",
    "numpy",
    "safetensors.torch",
    "xxhash",
    "everstep.node.worker",
    "everstep.engine.layers.gpt",
    "torch._dynamo",
    "encodings.idna",  # by the first look-up of an address
)
_KEEPING = ("everstep.node.keep_ranks",)

# A worker needs the memory it frees a moment later, so it keeps it. Giving it back and faulting it in again
# took 8 % of a step with mimalloc, which aarch64 builds of torch use. Others use glibc, which by itself gives
# back the top of its heap, and whatever it has mapped for large tensors; the kernel took 15 % of a step.
ALLOCATOR = {
    "MIMALLOC_PURGE_DELAY": "-1",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the most that every glibc takes
}


OUTER_THREADS = "EVERSTEP_OUTER_THREADS"  # OMP_NUM_THREADS as the agent has it


def outer_environment() -> dict[str, str]:
    """In a worker: the environment of its agent, for processes that are not workers."""
    kept = {name: value for name, value in os.environ.items() if ALLOCATOR.get(name) != value}
    threads = kept.pop(OUTER_THREADS, "")
    del kept["OMP_NUM_THREADS"]
    return kept | ({"OMP_NUM_THREADS": threads} if threads else {})


class ForkedProcess(NamedTuple):
    pid: int
    pidfd: int
    server: int = 1  # which of the owner's fork servers made it
    born: int = 0  # its start time


class ForkServerDied(EverstepError):
    """Another one may do better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lasting:
    """For a fork server that waits for another owner when this one is gone."""

    folder: Path  # for its socket
    alone_s: float  # it ends its children and itself after so long without one
    keep: tuple[int, ...] = ()  # file numbers that stay open as long as it or a child of it lives
    user: str = ""  # "NAME-": of the Unix user it runs as

    def sockets(self) -> tuple[socket.socket, socket.socket]:
        """The owner's, and the one at which the server is called."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = str(self.folder / f"fork-{self.user}{secrets.token_hex(4)}")
        listener.bind(path)
        listener.listen(4)
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.connect(path)
        return ours, listener


class InheritedServer:
    """A fork server of an owner that is gone, with the children that it still has. It makes no more of them:
    its code may be of the version before.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.children = path, dict[Sender, int]()
        name = path.name.removeprefix("fork-").rpartition("-")[0]
        self.user = unix_user(name) if name else None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def ask(self) -> bool:
        """Who are its children? False: it is gone too."""
        try:
            self._socket.connect(str(self.path))
            self._socket.send(b'{"children": true}')
        except OSError:
            self.path.unlink(missing_ok=True)
            self._socket.close()
            return False
        return True

    def answers(self, within_s: float = WARM_S) -> bool:
        """False: not yet. It may still load torch, and has no children then."""
        try:
            self._socket.settimeout(within_s)
            told = json.loads(self._socket.recv(1 << 20) or b'{"children": []}')
        except OSError:
            return False
        self.children = {
            decode(Sender, sender): pid
            for pid, sender in told["children"]
            if self.user is None or self.user.owns(pid)
        }
        return True

    def reap(self, child: ForkedProcess) -> None:
        """And let it end with the last one."""
        try:
            self._socket.settimeout(1.0)
            self._socket.send(json.dumps({"reap": child.pid}).encode())
        except OSError:
            end_leftovers(child.pid, child.born)
        os.close(child.pidfd)
        self.children = {sender: pid for sender, pid in self.children.items() if pid != child.pid}
        if not self.children:
            self.close()

    def close(self) -> None:
        """It ends its children and itself."""
        with contextlib.suppress(OSError):
            self._socket.send(b'{"end": true}')
        self.let_go()
        self.path.unlink(missing_ok=True)

    @property
    def is_open(self) -> bool:
        return self._socket.fileno() >= 0

    def let_go(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)  # a thread may wait in `answers`, and the process for it
        self._socket.close()


class ForkServer:
    """The owner's side. `threads`: of each worker's tensor ops; some libraries read it only as they are
    loaded. `preload`: modules that workers will want besides; one that cannot be imported is left to them.
    `trains` off: it forks keepers of ranks, which need no torch. `answer_s`: after so long without an answer
    it counts as hung. `user`: as whom it and its children run; None: as its owner.
    `python`: the command that starts it, if not this interpreter; it must keep open files and be seen by its
    own process number, as Apptainer and Enroot do.
    """

    def __init__(
        self,
        *,
        threads: int = 1,
        preload: tuple[str, ...] = (),
        trains: bool = True,
        answer_s: float = ANSWER_S,
        lasts: Lasting | None = None,
        user: UnixUser | None = None,
        python: tuple[str, ...] = (),
    ) -> None:
        self._lasts, self.user, self._python = lasts, user, python
        self._threads, self._preload, self.answer_s = threads, preload, answer_s
        self._always = _TRAINING if trains else _KEEPING
        self.warm = False
        self.number = 0  # of servers started so far
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # one question at a time, from whatever thread

    def start(self) -> ForkServer:
        lasts = self._lasts
        if lasts is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        else:
            ours, theirs = lasts.sockets()
        alone_s, keep = (0.0, ()) if lasts is None else (lasts.alone_s, lasts.keep)
        command = [*(self._python or (sys.executable,)), "-m", "everstep.node.fork_server"]
        command += [str(theirs.fileno()), f"{alone_s:g}"]
        command += [",".join(self._always), *self._preload]
        threads = {
            OUTER_THREADS: os.environ.get("OMP_NUM_THREADS", ""),
            "OMP_NUM_THREADS": str(self._threads),
        }
        env = {**ALLOCATOR, **ASKS_NVML, **os.environ, **threads}
        env.pop("EVERSTEP_TOKEN", None)  # user code must not be able to submit jobs
        become: dict[str, Any] = {}
        if (user := self.user) is not None:
            env |= user.environment()
            become = {"user": user.uid, "group": user.gid, "extra_groups": user.groups}
            become |= {"umask": UMASK, "cwd": user.start_folder}
        try:
            self._process = subprocess.Popen(
                command, env=env, pass_fds=[theirs.fileno(), *keep], stdin=subprocess.DEVNULL, **become
            )
        except OSError as error:
            ours.close()
            theirs.close()
            raise UserError(
                f"python {shlex.join(self._python)!r} cannot be started on this node: {error.strerror}."
            ) from None
        if user is not None and own_cgroup(user, self._process.pid) is None:
            warn(f"workers of {user.name} run in the cgroup of the agent, which may not make one for them")
        theirs.close()
        self._socket = ours
        self.warm = False
        self.number += 1
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None, "the fork server is not started"
        return self._process.pid

    def replace(self) -> None:
        """Start another one, unless the one there is lives."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            if self._socket is not None:
                self._socket.close()
            self.start()

    def warm_up(self) -> None:
        """Wait until torch is loaded. A spawn before that waits as well."""
        self._ask({"ping": True}, WARM_S)
        self.warm = True

    def spawn(self, spec: dict[str, Any], *, output: Path) -> ForkedProcess:
        """Fork a worker. Its stdout and stderr go to the file `output`."""
        data, fds = self._ask({"spawn": spec, "output": str(output)}, self.answer_s if self.warm else WARM_S)
        pid: int = json.loads(data)["pid"]
        if self.user is not None and not self.user.owns(pid):
            raise ForkServerDied(f"the fork server of {self.user.name} named a process of another user")
        return ForkedProcess(pid, fds[0], self.number, born(pid))

    def reap(self, child: ForkedProcess) -> None:
        """A child of an earlier server was reaped by the system."""
        is_gone = child.server != self.number or self._socket is None
        if self._socket is not None and not is_gone:
            try:
                self._socket.send(json.dumps({"reap": child.pid}).encode(), socket.MSG_DONTWAIT)
            except BlockingIOError:  # it reaps them all when its owner goes
                pass
            except OSError:
                is_gone = True
        if is_gone:
            end_leftovers(child.pid, child.born)
        os.close(child.pidfd)

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.send(b'{"end": true}', socket.MSG_DONTWAIT)
            self._socket.close()
        if self._process is not None:
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:  # it is still loading torch, on a busy machine
                self._process.kill()
                self._process.wait()

    def _ask(self, request: dict[str, Any], within_s: float) -> tuple[bytes, list[int]]:
        with self._lock:
            assert self._socket is not None, "the fork server is not started"
            try:
                self._socket.settimeout(within_s)
                send_request(self._socket, request)
                data, fds, _, _ = socket.recv_fds(self._socket, 4096, 1)
            except TimeoutError:  # stopped, or hung: its late answer would be another request's
                self.warm = False
                assert self._process is not None
                self._process.kill()
                raise ForkServerDied(f"the fork server has not answered for {within_s:g} s") from None
            except OSError:
                data, fds = b"", []
            if not data:
                self.warm = False
                hint = f"; is everstep installed for {shlex.join(self._python)}?" if self._python else ""
                raise ForkServerDied(f"the fork server {self._end()}; its last words are on stderr{hint}")
            return data, fds

    def _end(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "does not answer"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def exit_reason(pid: int) -> str:
    """Why a child that is not reaped yet has ended, in words."""
    status = wait_status(pid)
    if status is None:
        return "ended"
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exited with code {os.WEXITSTATUS(status)}"


# ------------------------------------------------------------------ the fork server itself


def serve(fd: int, always: list[str], preload: list[str], alone_s: float = 0.0) -> bool:
    """True: until its owner told it to end. False: the owner was killed."""
    gc.disable()  # imports make many objects and little garbage: looking for it takes a fifth of the time
    for name in always:
        importlib.import_module(name)
    for name in preload:
        with contextlib.suppress(Exception):  # a worker that needs it will say what is wrong
            importlib.import_module(name)
    gc.freeze()  # a worker's collections pass over what was imported, and leave its pages shared
    gc.enable()
    sock = socket.socket(fileno=fd)
    others = set(children_of(os.getpid()))  # whoever called this may have some
    children: dict[int, Any] = {}  # by number: which worker it is
    is_told = False
    while not is_told:
        owner = sock
        if alone_s:
            sock.settimeout(alone_s)
            try:
                owner, _ = sock.accept()
            except TimeoutError:
                break
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the owner was killed meanwhile
            is_told = _answer(owner, sock, children, others)
        if not alone_s:
            break
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _end_session(pid)
    _wait_dead(children)  # until then what they have started has another parent
    end_orphans(others | children.keys(), ORPHANS_S)
    return is_told


def _wait_dead(children: Iterable[int]) -> None:
    """They were killed; one that hangs in the kernel is not waited for."""
    deadline = time.monotonic() + ORPHANS_S
    for pid in children:
        with contextlib.suppress(ChildProcessError):
            while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                if time.monotonic() > deadline:
                    return
                time.sleep(0.002)


def _tidy_up(owner: int) -> None:
    """Remove what an owner that was killed has left in memory and in the folder for temporary files, once it
    is gone: its pidfd says so after its locks are free. Of workers, too, which have the locks of a store.
    """
    select.select([owner], [], [], OWNER_GONE_S)
    os.closerange(3, 1 << 16)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    remove_all_left()


def _end_session(worker: int) -> None:
    """Whatever a worker has started (loaders, uploads) ends with it: it leads a session. Its number is still
    its own, because it was not reaped yet. A daemon, which has left the session, ends with the last worker of
    this fork server: whose it was cannot be said.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)


def _answer(sock: socket.socket, door: socket.socket, children: dict[int, Any], others: set[int]) -> bool:
    """Until the owner closes its end. True: it said that no other will come."""
    while (request := received_request(sock)[0]) is not None:
        reap_orphans(others | children.keys())
        if "end" in request:
            return True
        if "children" in request:
            sock.send(json.dumps({"children": list(children.items())}).encode())
            continue
        if "ping" in request:
            sock.send(b"{}")
            continue
        if "reap" in request:
            _end_session(request["reap"])
            with contextlib.suppress(ChildProcessError):
                os.waitpid(request["reap"], 0)
            children.pop(request["reap"], None)
            if not children:
                end_orphans(others, ORPHANS_S)
            continue
        pid = os.fork()
        if pid == 0:
            sock.close()
            door.close()
            _live(request["spawn"], request["output"])
        children[pid] = request["spawn"].get("sender")
        pidfd = os.pidfd_open(pid)
        try:
            socket.send_fds(sock, [json.dumps({"pid": pid}).encode()], [pidfd])
        finally:
            os.close(pidfd)
    return False


def go_first(score: Path = Path("/proc/self/oom_score_adj")) -> None:
    """When memory runs out, the kernel ends a worker and not the agent: a worker is replaced, with the agent
    all workers of its node end. To raise one's own score needs no privilege.
    """
    with contextlib.suppress(OSError, ValueError):
        if int(score.read_text()) < OOM_SCORE:
            score.write_text(str(OOM_SCORE))


def _live(spec: dict[str, Any], output: str) -> None:
    """The child's whole life."""
    code = 1
    try:
        os.setsid()
        leave_to_owner()
        go_first()
        words = log.append_to(Path(output))
        os.dup2(words, 1)
        os.dup2(words, 2)
        log.start(form="text")
        kind = "worker" if spec.get("ranks") is None else "keep_ranks"
        code = importlib.import_module(f"everstep.node.{kind}").main(spec)
    except BaseException:
        warn(traceback.format_exc())
    finally:
        with contextlib.suppress(BaseException):  # what comes back from here goes on as the fork server
            sys.stdout.flush()
            log.flush()
        os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides when this ends
    leave_to_owner()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a scheduler's warning is for the owner
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    owner = os.pidfd_open(os.getppid())
    adopt_orphans()
    if not serve(int(sys.argv[1]), sys.argv[3].split(","), sys.argv[4:], float(sys.argv[2])):
        _tidy_up(owner)
    os._exit(0)  # with torch loaded, the interpreter's own end takes a second, and the owner waits for it
