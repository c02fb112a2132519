"""Workers of different owners as different Unix users, each in a cgroup of its own.

A submitter runs code on every node. If all workers run as the agent's user, the code of one owner can read
the secrets, logs, checkpoints and memory copies of another, and end its processes. An agent that runs as root
starts the workers of each owner as the Unix user that a table names:

    root   agent ─┬─ fork server (alice) ── workers of alice's tasks      cgroup everstep-alice
                  └─ fork server (bob)   ── workers of bob's tasks        cgroup everstep-bob

The kernel keeps users apart. What is left to us is the agent: it is root, and it opens files that a job names
(logs, checkpoints) or that a worker has written (beacons, copies). A link in such a place must not lead it to
the file of another owner. So it opens them with the rights of the task's user (`acting_as`), which the kernel
keeps for each thread. The rejected way is to compare paths and owners before each use: a link is changed
between the two.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import pwd
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.errors import UserError

OTHERS = "*"  # in the table: owners that it does not name
UMASK = 0o077
# By machine: setgroups. The system call is of one thread; the function of the C library is of all of them.
_SETGROUPS = {"x86_64": 116, "aarch64": 159}
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class UnixUser:
    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str

    def environment(self) -> dict[str, str]:
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}

    @property
    def start_folder(self) -> str:
        """Where its processes begin; that of the agent may be closed to it."""
        return self.home if Path(self.home).is_dir() else "/"

    def owns(self, pid: int) -> bool:
        """A fork server of this user may say what it likes: is this a process of its user?"""
        try:
            return os.stat(f"/proc/{pid}").st_uid == self.uid
        except OSError:
            return True  # it has ended: nothing can be done to it any more

    def make_folder(self, folder: Path) -> Path:
        """A folder of this user alone, in a folder of the agent."""
        folder.mkdir(mode=0o700, exist_ok=True)
        os.chown(folder, self.uid, self.gid, follow_symlinks=False)
        return folder


class UserTable:
    """`--users FILE`: a TOML table of owners and Unix users, read when a task comes to this node."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if os.geteuid() != 0:
            raise UserError(
                "--users needs an agent that runs as root: it starts workers of each owner as another user."
            )
        if platform.machine() not in _SETGROUPS:
            raise UserError(f"--users is not supported on {platform.machine()}.")
        self._read()

    def of(self, owner: str) -> UnixUser:
        table = self._read()
        name = table.get(owner, table.get(OTHERS))
        if name is None:
            raise UserError(
                f"--users {self._path} of this node has no Unix user for {owner or 'this owner'}; add "
                f'"{owner or OTHERS}" = "USER" to it.'
            )
        return found(name)

    def _read(self) -> dict[str, str]:
        try:
            status = self._path.stat()
            table = tomllib.loads(self._path.read_text())
        except OSError as error:
            raise UserError(f"--users {self._path} cannot be read: {error.strerror}.") from None
        except ValueError as error:
            raise UserError(f"--users {self._path} is not TOML: {error}.") from None
        if status.st_uid != 0 or status.st_mode & 0o022:
            raise UserError(
                f"--users {self._path} can be changed by others than root; run: chown root {self._path} && "
                f"chmod go-w {self._path}"
            )
        for owner, name in table.items():
            if not isinstance(name, str):
                raise UserError(f'--users {self._path}: {owner} must be the name of a Unix user, as "alice".')
            if found(name).uid == 0:
                raise UserError(
                    f"--users {self._path}: {owner} may not be root, who can read everything of every owner."
                )
        return table


def found(name: str) -> UnixUser:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise UserError(f"there is no Unix user {name} on this node; create it, or name another.") from None
    groups = tuple(os.getgrouplist(name, entry.pw_gid))
    return UnixUser(name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir)


@contextlib.contextmanager
def acting_as(user: UnixUser | None) -> Iterator[None]:
    """Files that this thread opens, makes or removes meanwhile are those that the user may open, make and
    remove. Not to be held while other work of the thread may run. None: the agent's own rights.
    """
    if user is None:
        yield
        return
    groups, group, own = os.getgroups(), _LIBC.setfsgid(-1), _LIBC.setfsuid(-1)
    _set_groups(user.groups)
    try:
        _change(_LIBC.setfsgid, user.gid, "group")
        _change(_LIBC.setfsuid, user.uid, "user")
        yield
    finally:
        _change(_LIBC.setfsuid, own, "user")
        _change(_LIBC.setfsgid, group, "group")
        _set_groups(groups)


def _change(call: Callable[[int], int], number: int, what: str) -> None:
    """These calls say nothing of a failure: -1 is no number of anybody, and only tells what is in force."""
    call(number)
    if (call(-1) ^ number) & 0xFFFFFFFF:  # it comes back as a signed number
        raise PermissionError(errno.EPERM, f"the kernel did not change the {what} of this thread to {number}")


def _set_groups(groups: Sequence[int]) -> None:
    numbers = (ctypes.c_uint32 * len(groups))(*groups)
    if _LIBC.syscall(_SETGROUPS[platform.machine()], len(groups), numbers) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"setgroups: {os.strerror(error)}")


def own_cgroup(
    user: UnixUser,
    pid: int,
    root: Path = Path("/sys/fs/cgroup"),
    membership: Path = Path("/proc/self/cgroup"),
) -> Path | None:
    """Put a process, and so all that it will fork, into the cgroup of its user, below that of the agent: an
    administrator can set limits there. None: this agent may not make cgroups, its own cgroup is outside of
    what its container shows, or there is no cgroup v2.
    """
    top = next((each for each in (root, root / "unified") if (each / "cgroup.procs").exists()), None)
    if top is None:
        return None
    try:
        lines = membership.read_text().splitlines()
        here = next(line[3:] for line in lines if line.startswith("0::"))
        group = top / here.strip("/") / f"everstep-{user.name}"
        group.mkdir(exist_ok=True)
        (group / "cgroup.procs").write_text(str(pid))
    except (OSError, StopIteration):
        return None
    return group
