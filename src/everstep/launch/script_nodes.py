"""A torchrun-style script on several machines, started on each of them by the same command.

The machine of the rendezvous endpoint runs a coordinator there, every machine an agent, and whichever comes
first submits the script. From then on it is a script task as any other: lives, incidents, explain, the page.

    machine A (the endpoint)   coordinator ◄── agent ──► keeper ──► ranks
    machine B                                  agent ──► keeper ──► ranks

The command ends with the task, on every machine; SIGTERM on one machine takes that one out, after its ranks
had their time to save. If the endpoint's machine is lost, so is the run, as with torchrun; a coordinator of
its own (`everstep submit --script`) does not have this limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from everstep.errors import EverstepError, UserError
from everstep.launch import coordinator_token
from everstep.launch.client import Client
from everstep.log import say, warn
from everstep.net.sockets import family_of, in_url
from everstep.node.agent import Agent, AgentSettings
from everstep.server.serve import LOOPBACK, ServerSettings, serve
from everstep.store.owned_folders import temporary_folder

AWAY_S = 60.0  # without a coordinator, after which a machine gives up
LOOK_S = 0.5
SAID_AFTER_S = 5.0  # of waiting for the endpoint
FAREWELL_S = 10.0  # the endpoint waits so long for the others to hear the end
OVER = ("finished", "failed", "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRun:
    """This machine's part of a run."""

    run_id: str
    endpoint: tuple[str, int]
    is_endpoint: bool | None  # None: the first of this machine that comes
    order: int | None  # of this machine among all; None: as they come, the endpoint first
    host: str  # where other machines reach this one; empty: found out
    token: str
    ranks: dict[str, Any]  # the table of the script task
    output: BinaryIO
    grace_s: float = 25.0
    join_timeout_s: float = 600.0  # for a coordinator to be there

    @property
    def name(self) -> str:
        """Of the task."""
        safe = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in self.run_id)
        return (safe.lstrip("._-") or "run")[:63]


class RunOnNodes:
    def __init__(self, run: NodeRun) -> None:
        self.run = run
        self.document: Any = None  # of the task, as it ended
        self.agent: Agent | None = None
        self._server: asyncio.Task[None] | None = None
        self._left = ""

    def leave(self, because: str) -> None:
        """This machine goes: its ranks may save, the others continue if they are enough."""
        self._left = because
        if self.agent is not None:
            self.agent.leave(because)

    async def go(self) -> int:
        """Until the task is over; the exit code."""
        with temporary_folder("everstep-script-") as folder:
            try:
                return await self._go(folder)
            finally:
                if self._server is not None:
                    self._server.cancel()
                    with contextlib.suppress(asyncio.CancelledError, EverstepError):
                        await self._server

    async def _go(self, folder: Path) -> int:
        run = self.run
        leads = await self._serve(folder / "state")
        client = Client(address=self._address(leads), token=run.token)
        if not await self._is_there(client):
            return 143
        order = run.order if run.order is not None else int(not leads)
        words = folder / "words"
        words.mkdir()
        self.agent = Agent(
            AgentSettings(
                node=f"{socket.gethostname()}-{os.getpid()}",
                slots=run.ranks["ranks"],
                coordinators=(client.address,),
                host=run.host or _address_towards(*run.endpoint),
                token=lambda: run.token,
                words=words,
                grace_s=run.grace_s,
                order=order,
            ),
            say=lambda text: None,
        )
        self.agent.warm_up(trains=False)
        agent = asyncio.create_task(self.agent.run())
        followed = Followed(words, run.output)
        try:
            await self._submit(client)
            await self._until_over(client, agent, followed)
            if leads:
                await self._farewell(client)
        finally:
            agent.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await agent
            followed.look()
        if self.document is None:
            return 143 if self._left else 1
        return 0 if self.document["state"] == "finished" else self.document["script"]["exit_code"] or 1

    def _address(self, leads: bool) -> str:
        host, port = self.run.endpoint
        return f"http://{in_url(_loopback(host) if leads else host)}:{port}"

    async def _serve(self, folder: Path) -> bool:
        """Is the coordinator here?"""
        run = self.run
        host, port = run.endpoint
        if run.is_endpoint is False:
            return False
        listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        settings = ServerSettings(
            folder=folder,
            host=_loopback(host) if host in LOOPBACK else _everywhere(host),
            port=port,
            token=run.token,
            is_insecure=True,  # as torchrun's rendezvous
        )
        serving = asyncio.create_task(serve(settings, ready=listening.set_result))
        either: set[asyncio.Future[Any]] = {serving, listening}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if listening.done():
            self._server = serving
            say(f"coordinator: http://{in_url(host)}:{port}")
            return True
        if run.is_endpoint:
            reason = str(serving.exception()).rstrip(".").rpartition(": ")[2]
            raise UserError(
                f"the rendezvous endpoint {in_url(host)}:{port} cannot be used ({reason}); give another port."
            ) from None
        serving.exception()  # another one of this machine has come first
        return False

    async def _is_there(self, client: Client) -> bool:
        """Waits for the coordinator. False: this machine is to leave before that."""
        began, has_said = time.monotonic(), False
        while not self._left:
            try:
                if (await asyncio.to_thread(client.get, "/v1/health"))["leads"]:
                    return True
                missing = f"the coordinator at {client.address} does not lead"
            except EverstepError as error:
                missing = str(error)
            waited_s, most_s = time.monotonic() - began, self.run.join_timeout_s
            if waited_s > most_s:
                raise UserError(
                    f"no coordinator answers at the rendezvous endpoint {client.address} after "
                    f"{most_s:g} s: {missing}"
                )
            if waited_s > SAID_AFTER_S and not has_said:
                has_said = True
                say(f"waiting up to {most_s:g} s for the rendezvous endpoint: {missing}")
            await asyncio.sleep(LOOK_S)
        return False

    async def _submit(self, client: Client) -> None:
        """All machines do; the first one is heard."""
        name = self.run.name
        try:
            await asyncio.to_thread(
                client.post, "/v1/tasks", {"name": name, "ranks": self.run.ranks | {"run_id": name}}
            )
        except UserError as error:
            if "already" not in str(error):
                raise

    async def _until_over(self, client: Client, agent: asyncio.Task[None], followed: Followed) -> None:
        heard_at, told = time.monotonic(), Told()
        while not agent.done():
            followed.look()
            try:
                task = await asyncio.to_thread(client.get, f"/v1/tasks/{self.run.name}")
                heard_at = time.monotonic()
            except EverstepError as error:
                if time.monotonic() - heard_at > AWAY_S:
                    warn(f"the coordinator is gone: {error}")
                    return
                await asyncio.sleep(LOOK_S)
                continue
            told, lines = await asyncio.to_thread(told_of, client, task, told)
            for line in lines:
                say(line)
            if task["state"] in OVER:
                self.document = task
                if self._server is None:  # else the coordinator has said so here
                    say(f"task {task['task']} is {task['state']}: {task['because']}")
                return
            await asyncio.sleep(LOOK_S)
        agent.result()

    async def _farewell(self, client: Client) -> None:
        until = time.monotonic() + FAREWELL_S
        while time.monotonic() < until:
            nodes = (await asyncio.to_thread(client.get, "/v1/status"))["nodes"]
            if sum(bool(node["connected"]) for node in nodes) <= 1:
                return
            await asyncio.sleep(0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What people have read so far."""

    life: str = ""
    suspicion: str = ""
    incident: int = 0  # the last one


def told_of(client: Client, task: Any, told: Told) -> tuple[Told, list[str]]:
    """What has been told then; the lines to tell."""
    script = task["script"]
    if script is None:
        return told, []
    lines, number = [], told.incident
    for new in sorted(each for each in task["incidents"] if each > told.incident):
        incident = client.get(f"/v1/incidents/{new}")
        if incident["verdict"] is None:
            break
        number = new
        because = "" if incident["stopped_training"] else f": {incident['verdict']['because']}"
        lines.append(f"incident {new}: {incident['what']}{because}")
    suspicion = script.get("suspicion", "")
    if suspicion and suspicion != told.suspicion:
        lines.append(f"{suspicion}. Nothing is ended.")
    life = told.life
    if script["world"]:
        life = f"life {script['life']}: {script['world']} ranks on {len(script['groups'])} nodes"
    lines += [life] if life != told.life else []
    return Told(life=life, suspicion=suspicion, incident=number), lines


class Followed:
    """What keepers write here, passed on as it comes."""

    def __init__(self, folder: Path, output: BinaryIO) -> None:
        self._folder, self._output = folder, output
        self._read: dict[Path, int] = {}

    def look(self) -> None:
        for path in sorted(self._folder.glob("*.log")):
            with contextlib.suppress(OSError), path.open("rb") as file:
                begin = self._read.get(path, 0)
                if begin > os.fstat(file.fileno()).st_size:
                    begin = 0  # it was trimmed
                file.seek(begin)
                data = file.read()
                self._read[path] = begin + len(data)
                self._output.write(data)
                self._output.flush()


def token_of_run(endpoint: tuple[str, int], given: str = "") -> str:
    """What the machines of a run know each other by. It must be a secret: whoever has it and reaches the port
    runs code. So it is never made from what a command line shows.
    """
    found = coordinator_token.found(given)
    if found or endpoint[0] in LOOPBACK:  # all of one user on one machine
        return found or coordinator_token.made()
    where, name = f"{in_url(endpoint[0])}:{endpoint[1]}", coordinator_token.VARIABLE
    raise UserError(
        f"the machines of a run over {where} need a secret, or whoever reaches it runs code on them; set "
        f"{name} to the same on all of them (made by openssl rand -hex 32), or write it into "
        f"{coordinator_token.own_file()} (mode 600)."
    )


def is_here(host: str) -> bool:
    """Is this a name or an address of this machine?"""
    if host in ("localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn()):
        return True
    try:
        wanted = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    for address in wanted:
        family = socket.AF_INET6 if ":" in str(address) else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as trial, contextlib.suppress(OSError):
            trial.bind((str(address), 0))  # only an address of this machine can be bound
            return True
    return False


def _address_towards(host: str, port: int) -> str:
    """The address of this machine on the way to that one."""
    with socket.socket(_family(host), socket.SOCK_DGRAM) as trial:
        try:
            trial.connect((host, port))
        except OSError:
            return _loopback(host)
        return str(trial.getsockname()[0])


def _family(host: str) -> socket.AddressFamily:
    """IPv6 where the endpoint has no other address."""
    found = {family_of(host)}
    with contextlib.suppress(OSError):
        found = {socket.AddressFamily(info[0]) for info in socket.getaddrinfo(host, None)}
    return socket.AF_INET if socket.AF_INET in found else socket.AF_INET6


def _everywhere(host: str) -> str:
    return "::" if _family(host) == socket.AF_INET6 else "0.0.0.0"


def _loopback(host: str) -> str:
    """Of the endpoint's machine itself."""
    return "::1" if _family(host) == socket.AF_INET6 else "127.0.0.1"
