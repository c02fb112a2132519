"""`everstep agent`."""

from __future__ import annotations

import ipaddress
import os
import socket
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from everstep import log, traffic
from everstep.cli import render
from everstep.cli.client import DEFAULT_ADDRESS
from everstep.cli.coordinator import Signalled, until_signalled
from everstep.errors import UserError
from everstep.net.sockets import listening

if TYPE_CHECKING:
    from everstep.protocol.messages import CheckResult


def agent_command(
    coordinator: Annotated[
        str,
        typer.Option(
            envvar="EVERSTEP_ADDRESS",
            help="Address of the coordinator, or @FILE that contains it; separate several by commas.",
        ),
    ] = DEFAULT_ADDRESS,
    node: Annotated[str, typer.Option(help="Name of this node.", show_default="the host name")] = "",
    slots: Annotated[
        int, typer.Option(min=0, help="Number of workers this node can run.", show_default="GPUs, or CPUs")
    ] = 0,
    host: Annotated[
        str,
        typer.Option(
            help="Address at which workers of other nodes reach this node, of the network that carries "
            "their data; IPv4, IPv6 or a name."
        ),
    ] = "127.0.0.1",
    bind: Annotated[
        str,
        typer.Option(
            help="Address of this machine at which its workers listen, where --host is not one of its own: "
            "behind NAT, or a container's published address. 0.0.0.0 or :: for all.",
            show_default="--host",
        ),
    ] = "",
    rack: Annotated[
        str,
        typer.Option(
            help="Name of its rack, or of whatever shares power or a switch. Copies of states go to another "
            "rack, and the page shows nodes by rack.",
            show_default=False,
        ),
    ] = "",
    token: Annotated[
        str,
        typer.Option(
            envvar="EVERSTEP_TOKEN",
            help="Token of this node or of the cluster, as @FILE.",
            show_default="~/.config/everstep/token",
        ),
    ] = "",
    token_file: Annotated[Path | None, typer.Option(help="File that contains the token, mode 600.")] = None,
    ca: Annotated[
        Path | None,
        typer.Option(
            "--tls",
            "--ca",
            envvar="EVERSTEP_TLS",
            help="For https: directory of everstep ca issue node, or a CA certificate.",
            show_default="~/.config/everstep/tls, if it is there",
        ),
    ] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Directory for the output of workers.")] = None,
    fabric_ports: Annotated[
        str,
        typer.Option(
            metavar="FIRST-LAST",
            help="Source ports, such as 24000-27999, by which workers follow the paths that a coordinator "
            "with --fabric plans, and move off links that fail.",
            show_default=False,
        ),
    ] = "",
    notice_file: Annotated[
        Path | None,
        typer.Option(
            help="File that says when this machine will be taken away: 120, 2min, or the JSON of a spot "
            "notice. Its workers then move or leave in time."
        ),
    ] = None,
    cloud: Annotated[
        str,
        typer.Option(
            help="aws, gcp or azure: ask its metadata service for spot and maintenance notices, and leave in "
            "time.",
            show_default=False,
        ),
    ] = "",
    notice_on_signal: Annotated[
        float,
        typer.Option(
            min=0,
            help="On SIGUSR1: this machine will be taken away in so many seconds, as Slurm says with "
            "--signal=USR1@120.",
            show_default="SIGUSR1 is ignored",
        ),
    ] = 0.0,
    grace: Annotated[
        float,
        typer.Option(
            min=0,
            help="On SIGTERM: seconds for the workers to leave with their state safe; a second signal ends "
            "the agent at once.",
        ),
    ] = 25.0,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Directory of this agent alone, such as /run/everstep: its workers then outlive it, and the "
            "next agent with the same directory takes them over.",
            show_default="none: workers end with the agent",
        ),
    ] = None,
    replace_: Annotated[
        bool,
        typer.Option(
            "--replace", help="With --state: take over from the agent that is running there, as SIGUSR2 does."
        ),
    ] = False,
    alone: Annotated[
        float,
        typer.Option(
            min=1, help="With --state: seconds after which workers without an agent end themselves."
        ),
    ] = 120.0,
    users: Annotated[
        Path | None,
        typer.Option(
            help="TOML file of owners and Unix users (docs/access.md): the workers of each owner run as "
            "another user, in a cgroup of their own. Needs root.",
            show_default="all workers run as the user of the agent",
        ),
    ] = None,
    beat: Annotated[
        float,
        typer.Option(min=0.05, help="Seconds between heartbeats; increase it for thousands of nodes."),
    ] = 0.25,
    probe_port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            help="Answer GET /startup (it has joined once), /ready (it is connected) and /live on this port "
            "of --host, for the probes of Kubernetes.",
            show_default="none",
        ),
    ] = 0,
    job_files: Annotated[
        Path | None,
        typer.Option(
            help="Directory in which dcgm-exporter reads which task is on which GPU "
            "(--hpc-job-mapping-dir): a file per GPU.",
            show_default="none",
        ),
    ] = None,
    check: Annotated[
        bool | None,
        typer.Option(
            "--check/--no-check",
            help="Run `everstep check` first (at most 20 s), and do not join if a check fails; then other "
            "nodes measure the network to this one before it gets workers. --no-check skips all checks.",
            show_default="limits, clock and hardware errors, which takes no time",
        ),
    ] = None,
    check_command: Annotated[
        list[str] | None,
        typer.Option(
            "--check-command",
            metavar="COMMAND",
            help="A check of your own, with --check and whenever the node is checked again. Repeatable.",
        ),
    ] = None,
    log_format: Annotated[render.LogFormat, render.LOG_FORMAT] = render.LogFormat.TEXT,
    log_level: Annotated[render.LogLevel, render.LOG_LEVEL] = render.LogLevel.INFO,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print name, slots and pid as JSON, then run.")
    ] = False,
) -> int:
    """Run the agent of this node. It starts workers for the coordinator and monitors them.

    If the connection breaks or the coordinator rejects the token, the workers keep training and the agent
    retries. It reads a token file again at each attempt. SIGTERM drains the node, then the agent ends.
    With --state, an agent that crashes, or gets SIGUSR2, leaves its workers training: start it again within
    --alone seconds, for example with a new version.

    [bold]Examples[/bold]

      everstep agent --slots 2

      everstep agent --coordinator https://head:7077 --node n1 --host 10.0.0.7 --tls n1

      everstep agent --node h1 --host 10.1.1.2 --fabric-ports 24000-27999

      everstep agent --coordinator https://head:7077 --tls n1 --cloud aws

      everstep agent --coordinator https://head:7077 --tls n1 --state /run/everstep --replace

      everstep agent --coordinator https://head:7077 --tls n1 --check --check-command "dcgmi diag -r 1"
    """
    log.start(form=log_format.value, level=log_level)
    from everstep.launch import coordinator_token
    from everstep.node.agent import Agent, AgentSettings
    from everstep.node.cloud_notice import CloudNotice
    from everstep.server.certificates import client_context
    from everstep.store.unix_users import UserTable

    coordinator_token.refuse_on_command_line(token)
    coordinator_token.clean_environment()
    node, slots = node or socket.gethostname(), slots or default_slots()
    settings = AgentSettings(
        node=node,
        slots=slots,
        coordinators=tuple(filter(None, coordinator.split(","))),
        host=host,
        bind=bind,
        token=lambda: coordinator_token.found(token, token_file),
        tls=lambda: client_context(coordinator_token.tls_place(ca)),
        words=log_dir,
        beat_s=beat,
        grace_s=grace,
        notice=notice_file,
        cloud=cloud,
        probe_port=probe_port,
        state=state,
        alone_s=alone,
        rack=rack,
        job_files=job_files,
        users=None if users is None else UserTable(users),
        traffic=traffic.package().at_node(fabric_ports, slots) if fabric_ports else None,
    )
    settings.token(), settings.tls()  # report unreadable files now
    if cloud:
        CloudNotice(cloud, log.warn)
    if not settings.coordinators:
        raise UserError(f"--coordinator is empty; give an address such as {DEFAULT_ADDRESS}.")
    check_host(host, settings.coordinators, bind=bind)
    if job_files is not None and not (job_files.is_dir() and os.access(job_files, os.W_OK)):
        raise UserError(f"--job-files {job_files} is not a directory that this user can write to; make it.")
    others = tuple(word for text in check_command or () for word in ("--command", text))
    if check is not False:
        found = _checked(others, slots) if check else _checked_quickly(slots)
        settings = replace(settings, checks=found, other_checks=others, checks_network=bool(check))
    if as_json:
        render.emit({"node": settings.node, "slots": settings.slots, "pid": os.getpid()})

    async def run(signalled: Signalled) -> None:
        agent = Agent(settings)
        signalled.gently = agent.leave
        if state is not None:
            signalled.replaced = agent.hand_over
        if notice_on_signal:
            signalled.warned = lambda: agent.notice(notice_on_signal, "SIGUSR1")
        agent.warm_up()
        await agent.run()

    if state is None:
        if replace_:
            raise UserError("--replace needs --state, the directory of the agent that is to be replaced.")
        return until_signalled(run)
    from everstep.node.agent_record import held

    with held(state, replace=replace_, shared=users is not None):
        return until_signalled(run)


def check_host(host: str, coordinators: Sequence[str], *, bind: str = "") -> None:
    """Refuse an address at which workers of other nodes could not reach this one. Unreachable workers start,
    and then all wait for each other.
    """
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        of = "" if bind else " of this machine"
        raise UserError(f"--host {host} is not an address{of}: {error.strerror}.") from None
    if any(ipaddress.ip_address(address.partition("%")[0]).is_unspecified for address in found):
        raise UserError(
            f"--host {host} is not an address that others can reach; give that of a network card."
        )
    option, listens = ("--bind", bind) if bind else ("--host", host)
    try:
        listening(listens).close()
    except OSError as error:
        others = "" if bind else ", or --bind with one if others reach this node at another address"
        raise UserError(
            f"{option} {listens} cannot be bound on this machine ({_why(error)}); give the address of "
            f"one of its network cards{others}."
        ) from None
    remote = [address for address in coordinators if not address.startswith("@") and not _is_here(address)]
    if remote and all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found):
        means = "" if host in found else f" (it means {', '.join(sorted(found))})"
        raise UserError(
            f"--host {host} is loopback{means}, and the coordinator {remote[0]} is on another machine: other "
            "nodes could not reach this node's workers. Give --host the address of a network card."
        )


def _why(error: OSError) -> str:
    return str(error.strerror) if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)


def _is_here(coordinator: str) -> bool:
    """Is this address loopback? A name that cannot be looked up now is tried again later, and is not."""
    name = urlsplit(coordinator if "//" in coordinator else f"//{coordinator}").hostname or ""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def _checked(others: Sequence[str], slots: int) -> tuple[CheckResult, ...]:
    """All of them. A node that fails one does not join, unless other slots than those of a GPU are left."""
    from everstep.node.checks import checked_apart

    found = _at_slots(checked_apart(others), slots)
    for one in found:
        if one.state != "passed":
            log.warn(f"check {one.check}: {one.state}: {one.says}")
    failed = [one for one in found if one.state == "failed"]
    lost = {slot for one in failed for slot in one.slots}
    if len(lost) == slots or not all(one.slots for one in failed):
        texts = "; ".join(f"{one.check} ({one.says})" for one in failed)
        raise UserError(f"this node does not join, because it fails: {texts}.")
    return found


def _checked_quickly(slots: int) -> tuple[CheckResult, ...]:
    from everstep.node.checks import QUICK, Probe, results, run_checks

    found = run_checks(Probe(Path(tempfile.gettempdir())), only=QUICK)
    for one in found:
        if one.state == "failed":
            log.warn(f"check {one.check}: {one.says}")
    return _at_slots(results(map(asdict, found)), slots)


def _at_slots(found: Iterable[CheckResult], slots: int) -> tuple[CheckResult, ...]:
    from everstep.node.checks import at_slots
    from everstep.node.slot_devices import DevicesUnknownError, NodeDevices

    results = tuple(found)
    try:
        devices = NodeDevices().find() if any(one.gpu for one in results) else ()
    except DevicesUnknownError:
        devices = ()
    return at_slots(results, devices, slots)


def default_slots() -> int:
    """One per GPU or MIG instance; without any, one per CPU."""
    from everstep.node.slot_devices import DevicesUnknownError, found

    try:
        return len(found()) or os.cpu_count() or 1
    except DevicesUnknownError as error:
        raise UserError(f"{error} Repair the driver, or give --slots.") from None
