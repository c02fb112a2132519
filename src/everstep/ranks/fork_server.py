"""How a rank's process comes to be: started as any Python is, or forked from one that has loaded torch.

Loading torch takes seconds, and after a fault all ranks wait for it. So one process per node, the fork
server, loads what the script imports (`imports_of`; `--preload` names other modules, or none) and is forked
for every rank of every life. It has the environment of the ranks, runs no operation and touches no GPU. What
cannot be shared that way is not: a module that starts a thread or initialises CUDA while it is imported is
left out, by a fork server that begins again without it; so is one that cannot be imported. What the script
imports after it has changed its environment or `sys.path`, and its own modules, are left to the ranks.

Either way a rank leads a process group of its own: its children are in it, and end with it. A dead rank
is not reaped before its group has been killed, so that no stranger can get its number in between.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.machinery
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from everstep.errors import EverstepError
from everstep.forked import ASKS_NVML, adopt_orphans, end_orphans, received_request, send_request
from everstep.ranks.rank_main import PARENT

_COMMAND = (sys.executable, "-m", "everstep.ranks.fork_server")
AUTO, NONE = "auto", "none"  # in `preload`: what the script imports; nothing
WARM_S = 120.0  # to load it, from a slow disk on a busy machine
_ORPHANS_S = 2.0  # to end them; one that waits for a broken disk does not hold the next life up
# Loaded at the first use, and as slow as torch itself: by an optimizer, by `deepspeed.initialize`.
_LATER = {
    "torch": ("torch._dynamo",),
    "deepspeed": ("deepspeed.module_inject.auto_ep_layer", "deepspeed.runtime.zero.muon.muon_optimizer"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """What a rank starts with. The file descriptors stay the caller's."""

    command: Sequence[str]  # of rank_main: the script and its arguments, or -m and a module
    environment: dict[str, str]
    stdout: int
    stderr: int
    line: int
    folder: str = ""  # where it is started; empty: here
    is_replacement: bool = False  # a parked process takes its place, if there is one


class RankProcess(Protocol):
    pid: int
    pidfd: int  # readable when it has ended

    def exit_code(self) -> int:
        """Of an ended one; negative for a signal. Does not reap it."""

    def reap(self) -> None: ...


class RankStarter(Protocol):
    def start(self, start: RankStart) -> RankProcess: ...

    @property
    def fork_store(self) -> Callable[[int], int] | None:
        """Starts `rank_store.host` on a file descriptor where torch is loaded, if anywhere; its pidfd."""

    def park(self) -> None:
        """Have a process ready for the next replacement, if that is of any use."""

    def end_orphans(self) -> None:
        """SIGKILL to what ranks that have ended left behind, as far as this starter knows it."""

    def close(self) -> None: ...


# ------------------------------------------------------------------ started


class StartedProcess:
    def __init__(self, start: RankStart) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-u", "-m", "everstep.ranks.rank_main", *start.command],
            env={**start.environment, PARENT: str(os.getpid())},
            cwd=start.folder or None,
            stdin=subprocess.DEVNULL,
            stdout=start.stdout,
            stderr=start.stderr,
            pass_fds=[start.line],
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self.pidfd = os.pidfd_open(self.pid)

    def exit_code(self) -> int:
        found = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert found is not None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def reap(self) -> None:
        self._popen.wait()
        os.close(self.pidfd)


class PlainStarter:
    fork_store = None

    def start(self, start: RankStart) -> RankProcess:
        return StartedProcess(start)

    def park(self) -> None:
        """What takes long here is to load what a script imports, and nobody knows that."""

    def end_orphans(self) -> None:
        """None is known here: these processes have an environment of their own to be found by."""

    def close(self) -> None:
        pass


# ------------------------------------------------------------------ forked


class ForkedRank:
    def __init__(self, pid: int, pidfd: int, server: socket.socket) -> None:
        self.pid, self.pidfd, self._server = pid, pidfd, server

    def exit_code(self) -> int:
        """Field 52 of /proc/PID/stat: it is not our child, so that there is nothing to wait for."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # the fork server has gone, and everything with it
            return -signal.SIGKILL
        return os.waitstatus_to_exitcode(int(fields[49]))

    def reap(self) -> None:
        with contextlib.suppress(OSError):
            self._server.send(json.dumps({"reap": self.pid}).encode())
        os.close(self.pidfd)


@dataclass(frozen=True, slots=True)
class Parked:
    """A process that waits on its line to be told which rank it is."""

    process: ForkedRank
    line: socket.socket

    def becomes(self, request: dict[str, Any], fds: Sequence[int]) -> bool:
        """False: it has died meanwhile."""
        with self.line:
            if select.select([self.process.pidfd], [], [], 0.0)[0]:
                self.process.reap()
                return False
            send_request(self.line, request, fds)
            return True


class ForkingStarter:
    """`preload`: modules to load before the first fork, each with names that it is asked for (module:name).
    `environment`: of the ranks. `is_chosen`: by a person, who is told what goes wrong.
    """

    def __init__(
        self, preload: Sequence[str], environment: Mapping[str, str], *, is_chosen: bool = True
    ) -> None:
        self._preload, self._environment, self._is_chosen = tuple(preload), environment, is_chosen
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._parked: Parked | None = None

    def open(self) -> ForkingStarter:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = json.dumps({"preload": self._preload, "is_chosen": self._is_chosen})
        said = None if self._is_chosen else subprocess.DEVNULL  # the script says it again
        with theirs:
            self._process = subprocess.Popen(
                [*_COMMAND, str(theirs.fileno()), str(os.getpid()), settings],
                env={**ASKS_NVML, **{k: v for k, v in self._environment.items() if k != "EVERSTEP_TOKEN"}},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        self._socket = ours
        return self

    def warm_up(self) -> None:
        """Wait until the modules are loaded; fails if one of them cannot be."""
        assert self._socket is not None, "the fork server is not open"
        answer = b""
        with contextlib.suppress(OSError):
            self._socket.settimeout(WARM_S)
            self._socket.send(json.dumps({"ping": True}).encode())
            answer = self._socket.recv(64)
            self._socket.settimeout(None)
        if not answer:
            raise self._failed()

    def _failed(self) -> EverstepError:
        return EverstepError(f"--preload {', '.join(self._preload)} has failed; what it said is above.")

    def start(self, start: RankStart) -> RankProcess:
        assert self._socket is not None, "the fork server is not open"
        cwd = start.folder or os.getcwd()
        request = {"command": list(start.command), "environment": start.environment, "cwd": cwd}
        fds = [start.stdout, start.stderr, start.line]
        if start.is_replacement and (parked := self._parked) is not None:
            self._parked = None
            if parked.becomes(request, fds):
                return parked.process
        return ForkedRank(*self._ask(request, fds), self._socket)

    def park(self) -> None:
        assert self._socket is not None, "the fork server is not open"
        if self._parked is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                process = ForkedRank(*self._ask({"park": True}, [theirs.fileno()]), self._socket)
            self._parked = Parked(process, ours)

    @property
    def fork_store(self) -> Callable[[int], int] | None:
        if not any(name.partition(":")[0].partition(".")[0] == "torch" for name in self._preload):
            return None
        return lambda fd: self._ask({"store": True}, [fd])[1]

    def end_orphans(self) -> None:
        assert self._socket is not None, "the fork server is not open"
        with contextlib.suppress(OSError):  # it has gone, and its ranks with it
            self._socket.send(json.dumps({"orphans": True}).encode())
            self._socket.recv(64)

    def _ask(self, request: dict[str, Any], fds: list[int]) -> tuple[int, int]:
        """A fork; its pid and pidfd."""
        assert self._socket is not None
        received: list[int] = []
        with contextlib.suppress(OSError):
            send_request(self._socket, request, fds)
            data, received, _, _ = socket.recv_fds(self._socket, 4096, 1)
        if not received:
            raise self._failed()
        return json.loads(data)["pid"], received[0]

    def close(self) -> None:
        if self._parked is not None:
            self._parked.line.close()
            os.close(self._parked.process.pidfd)
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()  # ranks die with it
            self._process.wait()


def _load(preload: Sequence[str], *, is_chosen: bool) -> None:
    """What was chosen must be there; of what a script imports, what can be shared is."""
    with contextlib.suppress(ImportError):
        import numpy  # noqa: F401 - its BLAS may start threads, and sees to them when it is forked
    threads = _num_threads()
    for number, name in enumerate(preload):
        try:
            _import(name)
        except BaseException:
            if is_chosen:
                raise
            preload = preload[:number]  # the script raises here, or has another way
            break
        if not is_chosen and (_num_threads() > threads or _has_cuda()):
            settings = {"preload": [*preload[:number], *preload[number + 1 :]], "is_chosen": False}
            os.execv(sys.executable, [*_COMMAND, sys.argv[1], sys.argv[2], json.dumps(settings)])


def _import(name: str) -> None:
    module, _, names = name.partition(":")
    loaded = importlib.import_module(module)
    for each in filter(None, names.split(",")):
        if not hasattr(loaded, each):  # a module below it, or one that loads its parts when they are used
            with contextlib.suppress(ImportError):
                importlib.import_module(f"{module}.{each}")
    for more in _LATER.get(module.partition(".")[0], ()):
        with contextlib.suppress(ImportError):
            importlib.import_module(more)


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _has_cuda() -> bool:
    return "torch.cuda" in sys.modules and bool(sys.modules["torch.cuda"].is_initialized())


def _serve(fd: int, settings: Mapping[str, Any]) -> None:
    _load(settings["preload"], is_chosen=settings["is_chosen"])
    line = socket.socket(fileno=fd)
    server = os.getpid()
    forked: set[int] = set()  # and not reaped yet
    adopt_orphans()
    while True:
        request, fds = received_request(line, 3)
        if request is None:
            return
        if "ping" in request:
            line.send(b"{}")
            continue
        if "reap" in request:
            os.waitpid(request["reap"], 0)
            forked.discard(request["reap"])
            continue
        if "orphans" in request:
            end_orphans(forked, _ORPHANS_S)
            line.send(b"{}")
            continue
        pid = os.fork()
        if pid == 0:
            line.close()
            if "store" in request:
                _host_store(fds[0], server)
            if "park" in request:
                request, fds = _told_who_it_is(fds[0], server)
            _live(request, fds, server)
        forked.add(pid)
        pidfd = os.pidfd_open(pid)
        socket.send_fds(line, [json.dumps({"pid": pid}).encode()], [pidfd])
        for each in (*fds, pidfd):
            os.close(each)


def _host_store(fd: int, server: int) -> None:
    from everstep.ranks import rank_main
    from everstep.ranks import store as rank_store

    rank_main.die_with_parent(server)
    rank_store.host(fd)
    os._exit(0)


def _told_who_it_is(fd: int, server: int) -> tuple[dict[str, Any], list[int]]:
    """In a fork that is to be a rank one day. To open a GPU takes longer than all else before a script."""
    from everstep.ranks import rank_main

    rank_main.die_with_parent(server)
    _open_gpu()
    with socket.socket(fileno=fd) as line:
        request, fds = received_request(line, 3)
    if request is None:
        os._exit(0)
    return request, fds


def _open_gpu() -> None:
    """Of several it is not known which one is wanted. Nothing random is drawn, and no library is set up whose
    settings a script may still change.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.device_count():
        return
    with contextlib.suppress(RuntimeError):
        torch.cuda.init()
        if torch.cuda.device_count() == 1:
            torch.ones(1, device="cuda")
            torch.cuda.synchronize()


def _live(request: dict[str, Any], fds: list[int], server: int) -> None:
    """A rank's whole life, in the fork. Ends as a Python process does: threads, atexit, then the code."""
    from everstep.ranks import rank_main

    stdout, stderr, line = fds
    os.setsid()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ[rank_main.LINE], os.environ[rank_main.PARENT] = str(line), str(server)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "numpy" in sys.modules:  # its global generator was copied by the fork; `random` sees to itself
        sys.modules["numpy"].random.seed()
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    rank_main.main(request["command"])
    sys.exit(0)


# ------------------------------------------------------------------ what a script imports


def imports_of(command: Sequence[str], folder: str) -> list[str]:
    """`module` or `module:name,name`, in order: installed modules that a script imports at its beginning.
    Empty: there is nothing worth loading once for all ranks.
    """
    path = script_path(command, folder)
    try:
        tree = ast.parse(path.read_bytes()) if path is not None else None
    except (OSError, SyntaxError, ValueError):  # the script says it better
        tree = None
    own = [] if path is None else [str(path.resolve().parent)]  # where Python looks first
    found = [name for name in _imports(tree) if _is_installed(name, own)] if tree is not None else []
    roots = {name.partition(":")[0].partition(".")[0] for name in found}
    return found if roots - {"everstep"} else []


def script_path(command: Sequence[str], folder: str) -> Path | None:
    if command[0] != "-m":
        return Path(folder, command[0])
    root, *rest = command[1].split(".")
    spec = importlib.machinery.PathFinder.find_spec(root, [folder, *sys.path])
    if spec is None or spec.origin is None:
        return None
    if not spec.submodule_search_locations:
        return Path(spec.origin)
    inside = Path(spec.submodule_search_locations[0], *rest)
    return inside / "__main__.py" if inside.is_dir() else inside.with_suffix(".py")


def _imports(tree: ast.Module) -> Iterator[str]:
    for statement in tree.body:
        match statement:
            case ast.Import():
                yield from (alias.name for alias in statement.names)
            case ast.ImportFrom(module=str(module), level=0) if module != "__future__":
                names = ",".join(alias.name for alias in statement.names if alias.name != "*")
                yield f"{module}:{names}" if names else module
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                pass
            case _ if any(map(_changes_surroundings, ast.walk(statement))):
                return


def _changes_surroundings(node: ast.AST) -> bool:
    """A variable that is only read is no change."""
    match node:
        case ast.Attribute(attr="path", value=ast.Name(id="sys")):
            return True
        case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()):
            return _ends_with(value, {"environ"})
        case ast.Call(func=ast.Attribute(attr=name, value=value)) if _ends_with(value, {"environ"}):
            return name not in ("get", "copy", "items", "keys", "values")
        case ast.Call(func=func):
            return _ends_with(func, {"putenv", "unsetenv", "load_dotenv"})
        case _:
            return False


def _ends_with(node: ast.AST, names: set[str]) -> bool:
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name in names
        case _:
            return False


def _is_installed(name: str, own: list[str]) -> bool:
    """Not the script's own, nor of a tree that is being worked on, nor Python's, which costs little."""
    root = name.partition(":")[0].partition(".")[0]
    if root in sys.stdlib_module_names or importlib.machinery.PathFinder.find_spec(root, own) is not None:
        return False
    spec = importlib.machinery.PathFinder.find_spec(root, sys.path)
    if spec is None or spec.origin is None:
        return False
    return root == "everstep" or bool({"site-packages", "dist-packages"} & set(Path(spec.origin).parts))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from everstep.ranks.rank_main import die_with_parent

    die_with_parent(int(sys.argv[2]))
    _serve(int(sys.argv[1]), json.loads(sys.argv[3]))
