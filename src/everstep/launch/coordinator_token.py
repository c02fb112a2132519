"""The coordinator's token: given as text, by a file, or the one of this user on this machine.

Submitting a job runs code on every node, so a coordinator always has a token. Where an operator gives none,
the coordinator creates one for its own user: a file that only this user can read. Commands and agents of the
same user find it there, without any option.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from pathlib import Path

from everstep.errors import UserError
from everstep.server.access import read_token

VARIABLE = "EVERSTEP_TOKEN"


def own_file() -> Path:
    """Where the token of this user is kept."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "everstep" / "token"


def tls_place(given: Path | None) -> Path | None:
    """Certificates: as given, or those of this user, if any."""
    own = own_file().with_name("tls")
    return given if given is not None or not own.is_dir() else own


def found(token: str = "", file: Path | None = None) -> str:
    """The token for a request: as given, or from @FILE; else the file of this user, if any."""
    held = file_of(token, file)
    if held is not None:
        return read_token(held)
    if not token.strip().isprintable():
        raise UserError("the token has control characters; give it as one line, or as @FILE.")
    return token.strip()  # a variable that was made from a file may end with a line break


def file_of(token: str = "", file: Path | None = None) -> Path | None:
    """The file that `found` reads the token from; None: it was given as text, or there is none."""
    if token and file is not None:
        raise UserError("--token and --token-file are both given; give one of them.")
    if file is not None or token.startswith("@"):
        return file or Path(token[1:])
    own = own_file()
    return own if not token and own.is_file() else None


def made(token: str = "", file: Path | None = None) -> str:
    """The same for the coordinator itself; if there is none yet, it is created."""
    return found(token, file) or _make(own_file())


def _make(path: Path) -> str:
    token = secrets.token_urlsafe(24)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as writing:
            writing.write(token + "\n")
            writing.flush()
            os.fsync(writing.fileno())
        try:
            os.link(draft, path)  # never over one that another coordinator has made meanwhile
        except FileExistsError:
            token = read_token(path)
        finally:
            draft.unlink()
    except OSError as error:
        raise UserError(
            f"no token can be stored in {path} ({error.strerror}); give one by --token-file or {VARIABLE}."
        ) from None
    return token


def clean_environment() -> None:
    """Take the token out of this process's environment, so that user code neither inherits it nor reads it
    in /proc/PID/environ, which shows the memory that the process was started with.
    """
    if VARIABLE not in os.environ:
        return
    library = ctypes.CDLL(None)
    library.getenv.restype = ctypes.c_void_p
    if (place := library.getenv(VARIABLE.encode())) is not None:
        ctypes.memset(place, 0, len(ctypes.string_at(place)))
    del os.environ[VARIABLE]


def refuse_on_command_line(token: str) -> None:
    """For processes that stay: every user of the machine can read their command lines."""
    if token and not token.startswith("@") and os.environ.get(VARIABLE) != token:
        raise UserError(
            f"--token on a command line can be read by every user of this machine; give --token-file FILE, "
            f"--token @FILE or {VARIABLE}."
        )
