"""Start the coordinator and serve until stopped; as one of several, stand by and take over."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from everstep.errors import UserError
from everstep.log import warn
from everstep.net.sockets import allow_many_files, in_url
from everstep.protocol.messages import Patience, PolicySet
from everstep.server.access import Credentials
from everstep.server.api import Api
from everstep.server.archive import Archive
from everstep.server.certificates import server_context
from everstep.server.journal import Journal, LostLeadership, SqliteJournal
from everstep.server.record import SILENCE_S
from everstep.server.term import Daemon
from everstep.server.traces import IncidentTraces
from everstep.traffic import Planner

OPEN_AGAIN_S = 1.0
NOTICES_S = 1.0  # in which agents that were told to end in the same moment say so
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    folder: Path
    host: str = "127.0.0.1"
    port: int = 7077
    token: str | None = None  # the cluster's one token, an admin's
    token_file: Path | None = None  # the same, read again when it changes
    credentials: Path | None = None  # tokens of people, programs and nodes
    etcd: tuple[str, ...] = ()
    etcd_prefix: str = "/everstep"
    etcd_token: str | None = None
    etcd_ca: Path | None = None
    etcd_cert: Path | None = None
    etcd_key: Path | None = None
    etcd_compacts: bool = True
    name: str = ""
    silence_s: float = SILENCE_S
    cert: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None  # callers are known by certificates of this authority
    is_insecure: bool = False  # beyond loopback without TLS
    otel: str = ""  # where traces of incidents go
    traffic: Callable[[], Planner] | None = None  # of each term: it plans paths between nodes
    grace_s: float = 0.0  # told to end, it serves nodes that leave for so long

    def check(self) -> None:
        given = self.token or self.token_file or self.client_ca or self.callers().has_any
        if self.host not in LOOPBACK and not given:
            raise UserError(
                f"--host {self.host} is not loopback and needs credentials; give a token by --token-file or "
                "EVERSTEP_TOKEN, or make some with everstep access add."
            )
        if (self.cert is None) != (self.key is None):
            raise UserError("--cert and --key belong together; give both or neither.")
        if self.host not in LOOPBACK and self.cert is None and not self.is_insecure:
            raise UserError(
                f"--host {self.host} is not loopback, and without TLS tokens and jobs cross the network "
                "readable; make certificates with everstep ca and give --tls DIR, or give --insecure."
            )
        if (self.etcd_cert is None) != (self.etcd_key is None):
            raise UserError("--etcd-cert and --etcd-key belong together; give both or neither.")

    def callers(self) -> Credentials:
        return Credentials(
            token=self.token,
            token_file=self.token_file,
            file=self.credentials,
            certificates=self.client_ca is not None,
            clock=time.time,
        )

    def tls(self) -> ssl.SSLContext | None:
        if self.cert is None:
            return None
        assert self.key is not None
        return server_context(self.cert, self.key, self.client_ca)

    def etcd_tls(self) -> ssl.SSLContext | None:
        """How to know etcd, and to be known by it; None for the system's own authorities."""
        if self.etcd_ca is None and self.etcd_cert is None:
            return None
        try:
            context = ssl.create_default_context(cafile=self.etcd_ca)
            if self.etcd_cert is not None:
                context.load_cert_chain(self.etcd_cert, self.etcd_key)
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(str(f) for f in (self.etcd_ca, self.etcd_cert, self.etcd_key) if f)
            raise UserError(f"what is given for etcd's TLS ({files}) cannot be used: {error}.") from None
        return context


async def serve(
    settings: ServerSettings,
    *,
    ready: Callable[[str], None] = lambda address: None,
    patience: Patience | None = None,
    told_to_end: asyncio.Event | None = None,
) -> None:
    """Until cancelled, or told to end. `ready` gets the address once it listens."""
    settings.check()
    allow_many_files()
    policy = PolicySet(patience=patience or Patience(), planned=True)
    try:
        settings.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--state {settings.folder} cannot be made: {error.strerror}; name another."
        ) from None
    journal = _journal(settings)
    daemon = Daemon(
        journal,
        folder=settings.folder,
        policy=policy,
        silence_s=settings.silence_s,
        traffic=settings.traffic,
    )
    archive = Archive(daemon.record, settings.folder)
    listeners: list[Archive | IncidentTraces] = [archive]
    if settings.otel:
        listeners.append(IncidentTraces(daemon.record, settings.otel))
    daemon.record.listeners |= {listener.hear for listener in listeners}
    api = Api(
        daemon,
        credentials=settings.callers(),
        archive=archive,
        hosts=frozenset({settings.host}),
    )
    runner = api.strangers.runner(api.app(), shutdown_timeout=1.0)
    await runner.setup()
    watching = [asyncio.create_task(api.access.watch())]
    site = web.TCPSite(runner, settings.host, settings.port, ssl_context=settings.tls(), reuse_address=True)
    try:
        try:
            await site.start()
        except OSError as error:
            raise UserError(
                f"--port {settings.port} on {settings.host} cannot be used: {error.strerror}."
            ) from None
        port = runner.addresses[0][1]
        ready(f"{'https' if settings.cert else 'http'}://{in_url(settings.host)}:{port}")
        leading = asyncio.ensure_future(_lead(daemon, journal))
        watching.append(leading)
        if told_to_end is not None:
            watching.append(
                asyncio.create_task(_end_when_told(told_to_end, daemon, leading, settings.grace_s))
            )
        await leading
    finally:
        for task in watching:
            task.cancel()
        await runner.cleanup()
        await journal.close()
        for listener in listeners:
            await asyncio.to_thread(listener.close)  # a slow collector delays only this thread


async def _end_when_told(
    told: asyncio.Event, daemon: Daemon, leading: asyncio.Future[None], grace_s: float
) -> None:
    """Agents that were told to end in the same moment leave in good order first: their tasks save their
    states.
    """
    await told.wait()
    began = time.monotonic()
    while (passed := time.monotonic() - began) < grace_s:
        nodes = daemon.record.machine.nodes.values()
        if passed > NOTICES_S and not any(node.leaves_at and node.reachable for node in nodes):
            break
        await asyncio.sleep(0.05)
    leading.cancel()


async def _lead(daemon: Daemon, journal: Journal) -> None:
    """One term after the other; between two of them this coordinator stands by."""
    await journal.open()
    while True:
        await journal.campaign()
        try:
            await daemon.lead()
        except LostLeadership as error:
            warn(f"coordinator: {error}; on standby")
            await journal.close()
            await _open_again(journal)


async def _open_again(journal: Journal) -> None:
    """Until it succeeds: what has cut this coordinator off may last, and a standby must not end."""
    while True:
        try:
            return await journal.open()
        except UserError as error:
            warn(f"coordinator: {error} Trying again.")
            await asyncio.sleep(OPEN_AGAIN_S)


def _journal(settings: ServerSettings) -> Journal:
    if not settings.etcd:
        return SqliteJournal(settings.folder / "journal.sqlite")
    from everstep.server.etcd import EtcdJournal

    return EtcdJournal(
        settings.etcd,
        prefix=settings.etcd_prefix,
        name=settings.name,
        token=settings.etcd_token,
        tls=settings.etcd_tls(),
        compacts=settings.etcd_compacts,
    )
