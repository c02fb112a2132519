"""The coordinator's token: given as text, by a file, or the one of this user on this machine.

Submitting a job runs code on every node, so a coordinator always has a token. Where an operator gives none,
the coordinator creates one for its own user: a file that only this user can read. Commands and agents of the
same user find it there, without any option.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from everstep.errors import UserError

VARIABLE = "EVERSTEP_TOKEN"
MAX_TOKEN = 4096


def own_file() -> Path:
    """Where the token of this user is kept."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "everstep" / "token"


def found(token: str = "", file: Path | None = None) -> str:
    """The token for a request: as given, or from @FILE; else the file of this user, if any."""
    if token and file is not None:
        raise UserError("--token and --token-file are both given; give one of them.")
    if file is not None or token.startswith("@"):
        return read(file or Path(token[1:]))
    if token:
        return token
    own = own_file()
    return read(own) if own.is_file() else ""


def made(token: str = "", file: Path | None = None) -> str:
    """The same for the coordinator itself; if there is none yet, it is created."""
    return found(token, file) or _make(own_file())


def read(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        text = path.read_text(errors="strict")[: MAX_TOKEN + 1].strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"the token file {path} cannot be read: {reason}.") from None
    if stat.S_IMODE(mode) & 0o077:
        raise UserError(f"the token file {path} can be read by other users; run: chmod 600 {path}")
    if not text or len(text) > MAX_TOKEN or not text.isprintable():
        raise UserError(f"the token file {path} must contain one line of at most {MAX_TOKEN} characters.")
    return text


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
            token = read(path)
        finally:
            draft.unlink()
    except OSError as error:
        raise UserError(
            f"no token can be stored in {path} ({error.strerror}); give one by --token-file or {VARIABLE}."
        ) from None
    return token


def clean_environment() -> None:
    """Take the token out of this process's environment: user code must not inherit it."""
    with contextlib.suppress(KeyError):
        del os.environ[VARIABLE]
