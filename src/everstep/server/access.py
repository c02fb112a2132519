"""Access control: who a caller is, and what each role may call.

`CALLS` is the whole HTTP interface, one row per call, with the roles that may make it. The routes, the
checks, the table in docs/access.md and the test of role × call are derived from it.

    viewer      reads: status, incidents, logs, metrics, the page
    submitter   reads, submits tasks and changes its own; a submitted job runs code on every node
    node        connects as the agent of ONE node, the one it is named after, and may do nothing else
    admin       everything

A caller shows a token or, over TLS, a certificate of the cluster's CA. Tokens are kept as hashes in one file:

    ROLE NAME sha256:DIGEST [until SECONDS-SINCE-1970]
    ROLE NAME revoked                                    certificates of that name are refused

The file is read again when it changes. What is no longer in it ends at once, also for lines that are open.
A name can have several tokens, so that a token is replaced without a moment in which neither is valid.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from everstep.errors import UserError
from everstep.job.tables import shown
from everstep.log import warn
from everstep.protocol.messages import AN_OPERATOR

MAX_TOKEN = 4096
MAX_FILE = 16 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


class Role(StrEnum):
    VIEWER = "viewer"
    SUBMITTER = "submitter"
    NODE = "node"
    ADMIN = "admin"


READERS = frozenset({Role.VIEWER, Role.SUBMITTER, Role.ADMIN})
SUBMITTERS = frozenset({Role.SUBMITTER, Role.ADMIN})
AGENTS = frozenset({Role.NODE, Role.ADMIN})
ADMINS = frozenset({Role.ADMIN})
EVERYONE: frozenset[Role] = frozenset()  # no credential is needed


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCall:
    method: str
    path: str
    handler: str  # method of `Api`
    roles: frozenset[Role]
    does: str  # may not ...
    own: bool = False  # a submitter: its own tasks only
    standby: bool = False  # also answered by a coordinator that does not lead


def _call(method: str, path: str, handler: str, roles: frozenset[Role], does: str, **more: bool) -> ApiCall:
    return ApiCall(method=method, path=path, handler=handler, roles=roles, does=does, **more)


CALLS = (
    _call("GET", "/", "page", EVERYONE, "load the page"),
    _call("GET", "/web/{file}", "page", EVERYONE, "load the page"),
    _call("GET", "/v1/health", "health", EVERYONE, "ask for health"),
    _call("GET", "/v1/ready", "ready", EVERYONE, "ask for readiness"),
    _call("GET", "/v1/status", "status", READERS, "read the status"),
    _call("GET", "/v1/agent", "agent", AGENTS, "connect as an agent"),
    _call("POST", "/v1/tickets", "ticket", READERS, "open the page"),
    _call("GET", "/v1/watch", "watch", READERS, "watch the cluster"),
    _call("GET", "/v1/news", "news", READERS, "read decisions"),
    _call("GET", "/v1/plans", "plans", READERS, "read plans"),
    _call("GET", "/v1/routes", "routes", READERS, "read routes"),
    _call("GET", "/v1/digest", "digest", READERS, "read the digest"),
    _call("GET", "/v1/audit", "audit", READERS, "read who did what"),
    _call("GET", "/v1/history", "history", READERS, "read the history"),
    _call("GET", "/v1/report", "report", READERS, "read the report"),
    _call("GET", "/v1/queue", "queue", READERS, "read the queue"),
    _call("GET", "/v1/events/{number}", "event", READERS, "read events"),
    _call("GET", "/v1/incidents", "incidents", READERS, "read incidents"),
    _call("GET", "/v1/incidents/{number}", "incident", READERS, "read incidents"),
    _call("POST", "/v1/tasks", "submit", SUBMITTERS, "submit tasks"),
    _call("GET", "/v1/tasks/{task}", "task", READERS, "read tasks"),
    _call("GET", "/v1/tasks/{task}/logs", "logs", READERS, "read logs"),
    _call("GET", "/v1/tasks/{task}/readings", "readings", READERS, "read tasks"),
    _call("GET", "/v1/tasks/{task}/trace", "trace", READERS, "read tasks"),
    _call("GET", "/v1/tasks/{task}/stacks", "stacks", READERS, "read tasks"),
    _call("POST", "/v1/tasks/{task}/{verb:cancel}", "task_verb", SUBMITTERS, "cancel a task", own=True),
    _call("POST", "/v1/tasks/{task}/{verb:pause}", "task_verb", SUBMITTERS, "pause a task", own=True),
    _call("POST", "/v1/tasks/{task}/{verb:unpause}", "task_verb", SUBMITTERS, "resume a task", own=True),
    _call("POST", "/v1/tasks/{task}/{verb:resize}", "task_verb", SUBMITTERS, "resize a task", own=True),
    _call("POST", "/v1/tasks/{task}/{verb:release}", "task_verb", SUBMITTERS, "release a task", own=True),
    _call("POST", "/v1/tasks/{task}/{verb:update}", "task_verb", SUBMITTERS, "update a task", own=True),
    _call("POST", "/v1/tasks/{task}/{verb:reshape}", "task_verb", SUBMITTERS, "reshape a task", own=True),
    _call("POST", "/v1/tasks/{task}/{verb}", "no_task_verb", READERS, "change tasks"),
    _call("GET", "/v1/nodes/{node}", "node", READERS, "read nodes"),
    _call("POST", "/v1/nodes/{node}/{verb:drain}", "node_verb", ADMINS, "drain a node"),
    _call("POST", "/v1/nodes/{node}/{verb:readmit}", "node_verb", ADMINS, "readmit a node"),
    _call("POST", "/v1/nodes/{node}/{verb:notice}", "node_verb", ADMINS, "announce that a node leaves"),
    _call("POST", "/v1/nodes/{node}/{verb}", "no_node_verb", READERS, "change nodes"),
    _call("GET", "/metrics", "metrics", READERS, "read metrics", standby=True),
)


def plain_path(call: ApiCall) -> str:
    """As callers write it."""
    return re.sub(r"{verb:([a-z]+)}", r"\1", call.path)


def verbs(handler: str) -> list[str]:
    """The verbs of a handler, as its paths name them."""
    return [c.path.rpartition("{verb:")[2].rstrip("}") for c in CALLS if c.handler == handler]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """`digest`: of the token that was shown; empty for a certificate."""

    role: Role
    name: str = ""
    digest: str = ""

    @property
    def words(self) -> str:
        """For sentences and for the journal."""
        return self.name or AN_OPERATOR

    def refusal(self, call: ApiCall, owner: str | None = None) -> str:
        """Why it may not make this call; empty if it may. `owner`: of the task that it is about."""
        if call.roles and self.role not in call.roles:
            needed = " or ".join(role for role in Role if role in call.roles)
            return f"{self.role} {self.words} may not {call.does}: this needs the role {needed}."
        if call.own and self.role is Role.SUBMITTER and owner is not None and owner != self.name:
            return (
                f"submitter {self.words} may not {call.does} of {owner or AN_OPERATOR}; only its own tasks."
            )
        return ""


CALLER: ContextVar[Caller] = ContextVar("caller")  # of the request that is being answered


def named_caller(role: str, name: str) -> Caller | None:
    """The caller that a certificate names; None if these are not a role and a name of ours."""
    is_ours = role in {*Role} and _NAME.fullmatch(name)
    return Caller(role=Role(role), name=name) if is_ours else None


# ------------------------------------------------------------------ files that only their user can read


def read_private(path: Path, what: str, most: int = MAX_TOKEN) -> str:
    """The text of a file with secrets."""
    try:
        mode = path.stat().st_mode
        with path.open("rb") as file:
            text = file.read(most + 1).decode("utf-8-sig")  # as some editors begin a file
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"{what} {path} cannot be read: {reason}.") from None
    if stat.S_IMODE(mode) & 0o077:
        raise UserError(f"{what} {path} can be read by other users; run: chmod 600 {path}")
    if len(text) > most:
        raise UserError(f"{what} {path} has more than {most} characters.")
    return text.strip()


def write_private(path: Path, text: str) -> None:
    """Whole or not at all, and never readable by others."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as writing:
            writing.write(text)
            writing.flush()
            os.fsync(writing.fileno())
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None


def read_token(path: Path) -> str:
    text = read_private(path, "the token file")
    if not text or not text.isprintable():
        raise UserError(f"the token file {path} must contain one line of at most {MAX_TOKEN} characters.")
    return text


# ------------------------------------------------------------------ the credentials file


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    role: Role
    name: str
    digest: str  # empty: certificates of this name are revoked
    until: float | None = None

    def line(self) -> str:
        what = f"sha256:{self.digest}" if self.digest else "revoked"
        return f"{self.role} {self.name} {what}" + ("" if self.until is None else f" until {self.until:.0f}")


def digest_of(token: str) -> str:
    """A hash without salt: a token is random and long, so there is no dictionary of them."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def parse_credentials(text: str, where: str) -> list[Credential]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        match words:
            case [role, name, "revoked"]:
                digest, until = "", None
            case [role, name, token] if re.fullmatch(r"sha256:[0-9a-f]{64}", token):
                digest, until = token[7:], None
            case [role, name, token, "until", when] if re.fullmatch(r"sha256:[0-9a-f]{64}", token):
                digest, until = token[7:], _moment(when, where, number)
            case _:
                raise UserError(
                    f"line {number} of {where} is not of the form ROLE NAME sha256:DIGEST; write it with "
                    "everstep access add."
                )
        found.append(Credential(role=role_of(role), name=checked_name(name), digest=digest, until=until))
    return found


def _moment(text: str, where: str, number: int) -> float:
    if not text.isascii() or not text.isdecimal() or len(text) > 12:
        raise UserError(f"line {number} of {where}: until {shown(text)} is not seconds since 1970.")
    return float(text)


def role_of(text: str) -> Role:
    if text not in {*Role}:
        raise UserError(f"role is {shown(text)}; give one of {', '.join(Role)}.")
    return Role(text)


def checked_name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise UserError(f"name is {shown(text)}; give 1 to 64 letters, digits, dots, dashes, _ and @.")
    return text


class CredentialsFile:
    """As an operator changes it; the coordinator reads what is written here."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = read_private(path, "the credentials file", MAX_FILE) if path.exists() else ""
        self.credentials = parse_credentials(text, str(path))

    def add(self, role: Role, name: str) -> str:
        """A new token."""
        others = {one.role for one in self.credentials if one.name == name and one.digest} - {role}
        if others:
            raise UserError(
                f"{name} is a {min(others)} already; choose another name, or remove that one first."
            )
        token = secrets.token_urlsafe(32)
        self.credentials.append(Credential(role=role, name=name, digest=digest_of(token)))
        return token

    def rotate(self, name: str, until: float) -> str:
        """A new token; the old ones are valid until then."""
        olds = [one for one in self._named(name) if one.digest]
        if not olds:
            raise UserError(f"{name} has no token in {self.path}; give it one with everstep access add.")
        self.credentials = [
            replace(one, until=min(until, one.until or until)) if one in olds else one
            for one in self.credentials
        ]
        return self.add(olds[0].role, name)

    def remove(self, name: str) -> int:
        gone = self._named(name)
        if not gone:
            raise UserError(f"{name} is not in {self.path}; everstep access list shows who is.")
        self.credentials = [one for one in self.credentials if one not in gone]
        return len(gone)

    def revoke(self, role: Role, name: str) -> None:
        """No token and no certificate of this role and name is accepted."""
        self.credentials = [one for one in self.credentials if (one.role, one.name) != (role, name)]
        self.credentials.append(Credential(role=role, name=name, digest=""))

    def is_of(self, name: str, file: Path) -> bool:
        """Does the file hold a token of this name?"""
        try:
            digest = digest_of(read_token(file))
        except UserError:
            return False
        return any(one.digest == digest for one in self._named(name))

    def _named(self, name: str) -> list[Credential]:
        return [one for one in self.credentials if one.name == name]

    def write(self, now: float) -> None:
        """Tokens that are no longer valid are left out."""
        kept = [one for one in self.credentials if one.until is None or one.until > now]
        head = "# Who may call this coordinator; change it with: everstep access\n"
        write_private(self.path, head + "".join(f"{one.line()}\n" for one in kept))


# ------------------------------------------------------------------ what the coordinator knows


class Credentials:
    """Who shows a token or a certificate. `token`: the one of the cluster, which is an admin's.

    `is_open`: no credential is needed; every client that reaches the port may call.
    """

    def __init__(
        self,
        *,
        token: str | None = None,
        token_file: Path | None = None,
        file: Path | None = None,
        certificates: bool = False,
        clock: Callable[[], float],
        warn: Callable[[str], None] = warn,
    ) -> None:
        self._token_file, self._file, self._clock, self._warn = token_file, file, clock, warn
        self.is_open = token is None and token_file is None and file is None and not certificates
        self._fixed = [] if token is None else [_admin(token)]
        self._of_token_file: list[Credential] = []
        self._of_file: list[Credential] = []
        self._seen: dict[Path, Any] = {}
        self._by_digest: Mapping[str, Credential] = {}
        self._revoked: frozenset[tuple[Role, str]] = frozenset()
        self._refresh(strict=True)

    @property
    def has_any(self) -> bool:
        return bool(self._by_digest)

    def refresh(self) -> bool:
        """Read again what has changed on disk; did something? What cannot be read leaves all as it is."""
        return self._refresh(strict=False)

    def _refresh(self, *, strict: bool) -> bool:
        changed = strict
        for path, take in ((self._token_file, self._take_token), (self._file, self._take_file)):
            if path is None:
                continue
            mark = _mark(path)
            if mark == self._seen.get(path, ()):
                continue
            self._seen[path] = mark
            try:
                take(path)
            except UserError as error:
                if strict:
                    raise
                self._warn(f"coordinator: {error} The credentials stay as they were.")
            else:
                changed = True
        if changed:
            every = [*self._fixed, *self._of_token_file, *self._of_file]
            self._by_digest = {one.digest: one for one in every if one.digest}
            self._revoked = frozenset((one.role, one.name) for one in every if not one.digest)
        return changed

    def _take_token(self, path: Path) -> None:
        self._of_token_file = [_admin(read_token(path))]

    def _take_file(self, path: Path) -> None:
        text = read_private(path, "the credentials file", MAX_FILE) if path.exists() else ""
        self._of_file = parse_credentials(text, str(path))

    def of_token(self, token: str) -> Caller | None:
        digest = digest_of(token)
        one = self._by_digest.get(digest)
        if one is None or (one.until is not None and one.until <= self._clock()):
            return None
        return Caller(role=one.role, name=one.name, digest=digest)

    def of_certificate(self, subject: Iterable[Iterable[tuple[str, str]]]) -> Caller | None:
        """`subject`: of a certificate that the CA has signed: organizational unit is the role, common name
        the name.
        """
        parts = {key: value for group in subject for key, value in group}
        caller = named_caller(parts.get("organizationalUnitName", ""), parts.get("commonName", ""))
        return caller if caller is not None and self.is_valid(caller) else None

    def is_valid(self, caller: Caller) -> bool:
        """Still: its token may have been removed or may have expired since."""
        if caller.digest:
            one = self._by_digest.get(caller.digest)
            return one is not None and (one.until is None or one.until > self._clock())
        return (caller.role, caller.name) not in self._revoked


def _admin(token: str) -> Credential:
    return Credential(role=Role.ADMIN, name="", digest=digest_of(token))


def _mark(path: Path) -> Any:
    """Another one whenever the file is: it is replaced, not written over."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size, found.st_mode


def matrix() -> list[tuple[str, dict[Role, str]]]:
    """Each call with yes, own or no for each role; the calls that need a credential."""

    def cell(call: ApiCall, role: Role) -> str:
        if role not in call.roles:
            return "no"
        return "own" if call.own and role is Role.SUBMITTER else "yes"

    return [
        (" ".join((c.method, plain_path(c))), {role: cell(c, role) for role in Role})
        for c in CALLS
        if c.roles and not c.handler.startswith("no_")
    ]
