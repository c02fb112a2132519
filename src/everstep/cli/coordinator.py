"""`everstep coordinator`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from everstep import log, traffic
from everstep.cli import render
from everstep.errors import UserError

SAME_SIGNAL_S = 1.0


def coordinator_command(
    host: Annotated[
        str, typer.Option(help="Address to listen on; other than loopback needs a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free port.")
    ] = 7077,
    state: Annotated[Path, typer.Option(help="Directory of the journal.")] = Path("everstep-state"),
    token: Annotated[
        str,
        typer.Option(
            envvar="EVERSTEP_TOKEN",
            help="An admin's token, as @FILE; a submitted job runs code on every node.",
            show_default="created in ~/.config/everstep/token",
        ),
    ] = "",
    token_file: Annotated[
        Path | None, typer.Option(help="File that contains the token, mode 600; read again when it changes.")
    ] = None,
    credentials: Annotated[
        Path | None,
        typer.Option(
            help="File of everstep access: tokens by role and name, read again when it changes.",
            show_default="STATE/credentials",
        ),
    ] = None,
    fabric: Annotated[
        Path | None,
        typer.Option(
            help="Fabric file (docs/fabric.md). The traffic of all tasks is planned over its paths; agents "
            "with --fabric-ports follow the plan."
        ),
    ] = None,
    etcd: Annotated[
        str,
        typer.Option(
            help="Endpoints of etcd, comma-separated. The journal is kept there, and a standby "
            "coordinator takes over when this one fails."
        ),
    ] = "",
    etcd_prefix: Annotated[str, typer.Option(help="Key prefix in etcd.")] = "/everstep",
    etcd_ca: Annotated[Path | None, typer.Option(help="For https: the CA certificate of etcd.")] = None,
    etcd_cert: Annotated[Path | None, typer.Option(help="Client certificate for etcd.")] = None,
    etcd_key: Annotated[Path | None, typer.Option(help="Key of --etcd-cert.")] = None,
    etcd_token: Annotated[
        str,
        typer.Option(envvar="EVERSTEP_ETCD_TOKEN", help="Authentication token for etcd.", show_default=False),
    ] = "",
    etcd_compact: Annotated[
        bool,
        typer.Option(help="Compact the whole etcd after a snapshot; switch it off for an etcd you share."),
    ] = True,
    name: Annotated[
        str, typer.Option(help="Name of this coordinator among several.", show_default=False)
    ] = "",
    cert: Annotated[Path | None, typer.Option(help="TLS certificate file.")] = None,
    key: Annotated[Path | None, typer.Option(help="TLS key file.")] = None,
    tls: Annotated[
        Path | None,
        typer.Option(
            envvar="EVERSTEP_TLS",
            help="Directory of everstep ca issue coordinator: instead of --cert and --key; callers are known "
            "by certificates of the same CA.",
            show_default=False,
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond loopback without TLS: on a network of your own.")
    ] = False,
    silence: Annotated[
        float,
        typer.Option(
            min=0.2,
            help="Seconds without a heartbeat before a node is silent.",
            rich_help_panel="Timeouts and limits",
        ),
    ] = 1.0,
    restarts_per_node: Annotated[
        int,
        typer.Option(
            min=0,
            help="Restarts of one worker per hour before its node is suspected.",
            rich_help_panel="Timeouts and limits",
        ),
    ] = 2,
    isolation: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds a suspected node stays isolated.", rich_help_panel="Timeouts and limits"
        ),
    ] = 600.0,
    otel: Annotated[
        str,
        typer.Option(
            envvar="OTEL_EXPORTER_OTLP_ENDPOINT",
            help="OTLP/HTTP endpoint for traces of incidents (extra: otel).",
            show_default=False,
            rich_help_panel="Monitoring",
        ),
    ] = "",
    grace: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="On SIGTERM: time for agents that were told to end in the same moment, as a scheduler does "
            "that ends a job, to leave with the states of their tasks saved.",
        ),
    ] = 0.0,
    log_format: Annotated[render.LogFormat, render.LOG_FORMAT] = render.LogFormat.TEXT,
    log_level: Annotated[render.LogLevel, render.LOG_LEVEL] = render.LogLevel.INFO,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the address as JSON once it listens.")
    ] = False,
) -> int:
    """Run the coordinator of a cluster. Agents connect to it and you submit tasks to it.

    It writes every event to its journal before it acts. It can crash and restart without stopping training.

    [bold]Examples[/bold]

      everstep coordinator

      everstep coordinator --host 0.0.0.0 --tls everstep-ca/issued/coordinator

      everstep coordinator --etcd http://10.0.0.1:2379,http://10.0.0.2:2379
    """
    log.start(form=log_format.value, level=log_level)
    from everstep.launch import coordinator_token
    from everstep.protocol.messages import Patience
    from everstep.server.serve import LOOPBACK, ServerSettings, serve
    from everstep.server.term import keep_collections_short

    if tls is not None and (cert or key):
        raise UserError("--tls and --cert or --key are both given; give --tls, or --cert and --key.")
    client_ca = None
    if tls is not None:
        cert, key, client_ca = tls / "cert.pem", tls / "key.pem", tls / "ca.pem"
    coordinator_token.refuse_on_command_line(token)
    given = (
        coordinator_token.made(token, token_file)
        if host in LOOPBACK
        else coordinator_token.found(token, token_file)
    )
    held = coordinator_token.file_of(token, token_file)
    coordinator_token.clean_environment()
    settings = ServerSettings(
        folder=state,
        host=host,
        port=port,
        token=given or None if held is None else None,
        token_file=held,
        credentials=credentials or state / "credentials",
        etcd=tuple(filter(None, etcd.split(","))),
        etcd_prefix=etcd_prefix,
        etcd_token=etcd_token or None,
        etcd_compacts=etcd_compact,
        etcd_ca=etcd_ca,
        etcd_cert=etcd_cert,
        etcd_key=etcd_key,
        name=name or f"{socket.gethostname()}:{port}",
        silence_s=silence,
        cert=cert,
        key=key,
        client_ca=client_ca,
        is_insecure=insecure,
        otel=otel,
        traffic=None if fabric is None else traffic.package().planner(fabric),
        grace_s=grace,
    )
    settings.check()

    def ready(address: str) -> None:
        render.note(f"coordinator: {address}")
        if sys.stderr.isatty():  # in a log the token would be there for all who read it
            render.note(f"dashboard: {address}/#token={given}" if given else f"dashboard: {address}")
        else:
            render.note(f"dashboard: {address}, with the token " + (f"in {held}" if held else "you gave"))
        if as_json:
            render.emit({"address": address, "state": str(state)})

    patience = Patience(
        restarts_per_node=restarts_per_node,
        restarts_per_place=max(3, restarts_per_node),
        isolation_s=isolation,
    )
    keep_collections_short()

    async def served(signalled: Signalled) -> None:
        told_to_end = asyncio.Event()
        if grace:
            signalled.gently = lambda because: told_to_end.set()
        await serve(settings, ready=ready, patience=patience, told_to_end=told_to_end)

    return until_signalled(served)


@dataclass(slots=True)
class Signalled:
    """What a first SIGINT or SIGTERM does, if the process is not to end at once; and what SIGUSR1 and SIGUSR2
    do.
    """

    gently: Callable[[str], None] | None = None
    warned: Callable[[], None] = lambda: None
    replaced: Callable[[], None] = lambda: None


def until_signalled(work: Callable[[Signalled], Coroutine[Any, Any, None]]) -> int:
    """Run until SIGINT, SIGTERM, SIGQUIT or SIGHUP (not under nohup); 128 and its number then. A scheduler
    may send one and the same twice.
    """

    async def main() -> int:
        loop, signalled = asyncio.get_running_loop(), Signalled()
        job = asyncio.ensure_future(work(signalled))
        first: tuple[int, float] | None = None

        def end(number: int) -> None:
            nonlocal first
            if first is None:
                first = number, loop.time()
                if signalled.gently is not None:
                    return signalled.gently(f"its agent was told to end by {signal.Signals(number).name}")
            elif signalled.gently is not None and loop.time() - first[1] < SAME_SIGNAL_S:
                return None
            job.cancel()
            return None

        hangup = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, *hangup):
            loop.add_signal_handler(number, end, number)
        # Slurm's --signal=USR1@120 reaches every process of a job; by default it would end them.
        loop.add_signal_handler(signal.SIGUSR1, lambda: signalled.warned())
        loop.add_signal_handler(signal.SIGUSR2, lambda: signalled.replaced())
        with contextlib.suppress(asyncio.CancelledError):
            await job
        return 128 + first[0] if first is not None else 0

    return asyncio.run(main())
