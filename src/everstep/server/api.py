"""HTTP and WebSocket on one port. `access.CALLS` lists the calls and who may make them;
docs/control-plane.md describes them.

Every call but /v1/health and the dashboard's files, which hold no data, needs a credential, if there are any.
Without any the coordinator listens on loopback only, and a browser page of another origin is refused all the
same, as is a Host that is not ours: a web page must not be able to talk to a coordinator behind its reader's
back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from aiohttp import web

from everstep.core.cluster.node import Node
from everstep.core.cluster.node_states import NodeState
from everstep.core.cluster.retention import MOST_CLOSED
from everstep.core.cluster.task import OVER, Task
from everstep.errors import EverstepError, InternalError, PeerError, UserError
from everstep.net.strangers import StrangerLimit
from everstep.outbound import OURS
from everstep.protocol import messages as msg
from everstep.protocol.ops import parse_worker
from everstep.schedule.task_scheduler import TaskScheduler
from everstep.server import report, requests, step_timeline, views, waiting
from everstep.server.access import CALLER, CALLS, ApiCall, Caller, Credentials, Role, verbs
from everstep.server.archive import Archive
from everstep.server.journal import LostLeadership
from everstep.server.metrics import ClusterMetrics
from everstep.server.pages import PROTOCOL, TICKET_S, Pages, Tickets
from everstep.server.record import ClusterRecord
from everstep.server.viewers import Viewers

MAX_BODY = 1 << 20
MAX_LOG = 1 << 20
MAX_VIEWERS = 200
FRESH_S = 0.25  # so long an answer of the nodes serves all who look at a task
STACKS_S = 15.0  # for a node to read all its workers
CREDENTIALS_S = 1.0  # between two looks at the credential files
VIEWER_PING_S = 20.0  # a closed laptop must not keep its place
Named = TypeVar("Named")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AgentLines(Protocol):
    """The lines to nodes."""

    routes: Any  # over the fabric; None: none are planned

    @property
    def nodes(self) -> set[str]:
        """Those that are connected now."""

    async def ask(self, node: str, question: dict[str, Any], *, within_s: float = 5.0) -> Any: ...

    async def serve(self, request: web.Request) -> web.WebSocketResponse: ...


class Served(Protocol):
    """What is behind the API: a coordinator, or a run on one machine. LostLeadership: not at the moment."""

    @property
    def record(self) -> ClusterRecord: ...

    @property
    def lines(self) -> AgentLines: ...

    @property
    def schedulers(self) -> Mapping[str, TaskScheduler]: ...

    async def handle(self, event: msg.ClusterEvent) -> None:
        """Something has happened; returns when it is durable and carried out."""

    async def digest(self) -> tuple[int, str]:
        """The number of the last event that was handled, and the hash of the state after it."""


class Api:
    def __init__(
        self,
        served: Served,
        *,
        credentials: Credentials,
        archive: Archive | None = None,
        hosts: frozenset[str] = frozenset(),
    ) -> None:
        """`hosts`: names this server may be called by, beside loopback's; any if there are credentials."""
        self.served, self.record, self.strangers = served, served.record, StrangerLimit()
        self.access = AccessControl(credentials, hosts)
        self._archive = archive
        self._asked: dict[tuple[str, str], tuple[float, asyncio.Future[dict[str, Any]]]] = {}
        self._calls: dict[web.AbstractResource | None, dict[str, ApiCall]] = {}
        self.metrics = ClusterMetrics(self.record)
        self._viewers = 0
        self._pages, self._tickets = Pages(), Tickets()
        self._dashboards = Viewers(self.record, self._connected)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard])
        app.on_response_prepare.append(_sign)
        for call in CALLS:
            handler = getattr(self, f"_{call.handler}")
            add = app.router.add_get if call.method == "GET" else app.router.add_post
            self._calls.setdefault(add(call.path, handler).resource, {})[call.method] = call
        return app

    # -------------------------------------------------------------- who may ask

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.path in ("/v1/health", "/v1/ready"):
                return await handler(request)
            self.access.check_origin(request)
            if self._pages.has(request.path):
                return await handler(request)
            caller = self._tickets.take(request) if request.path == "/v1/watch" else None
            caller = caller or self.access.caller(request)
            CALLER.set(caller)
            self.strangers.know(request)
            if not self.record.leads and not self._answers_standing_by(request):
                return _refuse(503, "this coordinator is starting, or stands by for another; try again.")
            if refusal := self._refusal(request, caller):
                return _refuse(403, refusal)
            with self.access.in_flight(request, caller):
                return await handler(request)
        except (UserError, PeerError) as error:
            return _refuse(400, str(error))
        except LostLeadership as error:
            return _refuse(503, str(error))
        except EverstepError as error:
            return _refuse(500, str(error))
        except ConnectionResetError:  # the caller has hung up before it was answered
            return web.Response(status=408)

    def _called(self, request: web.Request) -> ApiCall | None:
        """None: its path or method is not in the table."""
        method = "GET" if request.method == "HEAD" else request.method
        return self._calls.get(request.match_info.route.resource, {}).get(method)

    def _answers_standing_by(self, request: web.Request) -> bool:
        call = self._called(request)
        return call is not None and call.standby

    def _refusal(self, request: web.Request, caller: Caller) -> str:
        """Why this caller may not; empty if it may. A path that is not in the table answers 404 to all."""
        call = self._called(request)
        if call is None:
            return ""
        task = self.record.machine.tasks.get(request.match_info.get("task", ""))
        return caller.refusal(call, None if task is None else task.request.owner)

    def _connected(self) -> set[str]:
        """The nodes that are connected now."""
        return self.served.lines.nodes if self.record.leads else set()

    # -------------------------------------------------------------- asking

    async def _page(self, request: web.Request) -> web.StreamResponse:
        return await self._pages.serve(request)

    async def _health(self, request: web.Request) -> web.Response:
        found = {"ok": True, "leads": self.record.leads, "needs_token": not self.access.is_open}
        return web.json_response(found)

    async def _ready(self, request: web.Request) -> web.Response:
        """For a load balancer: of several coordinators only the one that leads takes calls."""
        return web.json_response({"leads": self.record.leads}, status=200 if self.record.leads else 503)

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(views.status(self.record, self._connected(), time.time()))

    async def _node(self, request: web.Request) -> web.Response:
        return web.json_response(views.node(self.record, self._named_node(request), self._connected()))

    async def _news(self, request: web.Request) -> web.Response:
        return web.json_response(list(self.record.news))

    async def _plans(self, request: web.Request) -> web.Response:
        """The planner's `last` decisions, with the alternatives it weighed; the newest first."""
        return web.json_response(self.record.newest_plans(requests.last(request)))

    async def _routes(self, request: web.Request) -> web.Response:
        """The paths of all workers' flows over the fabric, as agents have them; null without --fabric."""
        return web.json_response(self.served.lines.routes)

    async def _digest(self, request: web.Request) -> web.Response:
        """A hash of the whole state: two coordinators that have read the same journal agree on it."""
        number, found = await self.served.digest()
        return web.json_response({"digest": found, "journal": number})

    async def _audit(self, request: web.Request) -> web.Response:
        """What people have asked for, and who; the newest first."""
        return web.json_response(list(reversed(self.record.audit))[: requests.last(request)])

    async def _report(self, request: web.Request) -> web.Response:
        """`?since_s=N`: where the time of the tasks went in the last N seconds."""
        since_s = requests.whole(request.query.get("since_s", str(7 * 86_400)), "since_s")
        return web.json_response(report.document(self.record, since_s, time.time()))

    async def _queue(self, request: web.Request) -> web.Response:
        return web.json_response(waiting.document(self.record))

    async def _history(self, request: web.Request) -> web.Response:
        """`?text=T&since_s=N&last=N`: incidents and tasks that are over, the newest first."""
        if self._archive is None:
            return _refuse(404, "this coordinator keeps no archive.")
        since = time.time() - requests.whole(request.query.get("since_s", str(30 * 86_400)), "since_s")
        text, last = request.query.get("text", "")[:200], requests.last(request) or 1000
        found = await asyncio.to_thread(
            lambda: self._archive.search(text=text, since=since, last=min(last, 10_000))  # type: ignore[union-attr]
        )
        return web.json_response(found)

    async def _event(self, request: web.Request) -> web.Response:
        """An event of the recent past, and what followed from it."""
        text = request.match_info["number"]
        told = self.record.recent.get(requests.whole(text, "event"))
        if told is None:
            return _refuse(404, f"event {text} is not known, or too long ago.")
        return web.json_response(views.event(self.record, told))

    async def _incidents(self, request: web.Request) -> web.Response:
        """`?last=N`: only those. `?after=NUMBER`, `?task=T`: only later ones, only those of a task."""
        after, task = requests.whole(request.query.get("after", "0"), "after"), request.query.get("task")
        every = self.record.machine.log.incidents
        found = [one for one in every if one.number > after and task in (None, one.task)]
        if (count := requests.last(request)) is not None:
            found = found[-count:]
        return web.json_response([views.incident(self.record, one) for one in found])

    async def _incident(self, request: web.Request) -> web.Response:
        text = request.match_info["number"]
        for one in (one for one in self.record.machine.log.incidents if str(one.number) == text):
            return web.json_response(views.incident(self.record, one))
        forgotten = self.record.machine.log.forgotten
        if text.isdecimal() and 0 < int(text[:18]) <= forgotten.last:
            if self._archive is not None:
                archived = await asyncio.to_thread(self._archive.incident, int(text[:18]))
                if archived is not None:
                    return web.json_response(archived)
            return _refuse(
                404, f"incident {text} is closed and no longer kept: the last {MOST_CLOSED} closed ones are."
            )
        return _refuse(404, f"there is no incident {text!r}; everstep explain lists recent ones.")

    async def _task(self, request: web.Request) -> web.Response:
        """`?rows=N`: only so many of its last steps. `?after=STEP`: only the steps behind it."""
        rows = requests.whole(request.query["rows"], "rows") if "rows" in request.query else None
        after = requests.whole(request.query.get("after", "0"), "after")
        return web.json_response(views.task(self.record, self._named_task(request), rows=rows, after=after))

    async def _logs(self, request: web.Request) -> web.Response:
        task = self._named_task(request)
        worker = parse_worker(request.query.get("worker", "0:0"))
        most = min(MAX_LOG, requests.whole(request.query.get("bytes", "16384"), "bytes"))
        question = {"what": "log", "task": task.name, "worker": str(worker), "bytes": most}
        if "from" in request.query:
            question["from"] = requests.whole(request.query["from"], "from")
        seat = task.seats.get(worker)
        nodes = sorted(self._may_have_logs(task)) if seat is None else [seat.node]
        found = await newest_log(self.served.lines, nodes, question)
        if isinstance(found, str):
            return _refuse(404, f"there is no log of worker {worker} of {task.name}: {found}")
        answer = {"task": task.name, "worker": str(worker), "node": found["node"], "state": task.state}
        return web.json_response(answer | {"text": found["text"], "next": found["next"]})

    def _may_have_logs(self, task: Task) -> set[str]:
        """Nodes that have had workers of it; if their agents were started anew, any node."""
        known = self.record.machine.nodes
        there = self.served.lines.nodes
        return {node for node in there if node in known and task.name in known[node].opened} or there

    async def _readings(self, request: web.Request) -> web.Response:
        """What every worker of a task does right now, from its node's shared memory."""
        return await self._rows_of_nodes(request, {"what": "readings"})

    async def _stacks(self, request: web.Request) -> web.Response:
        """Where every worker of a task is in its code right now."""
        return await self._rows_of_nodes(request, {"what": "stacks"}, within_s=STACKS_S)

    async def _rows_of_nodes(
        self, request: web.Request, question: dict[str, Any], within_s: float = 5.0
    ) -> web.Response:
        """Agents are asked once, however many look: those who ask while an answer is on its way, or is fresh,
        get the same.
        """
        task, now = self._named_task(request), time.monotonic()
        self._asked = {
            one: (at, answer)
            for one, (at, answer) in self._asked.items()
            if not answer.done() or now - at < FRESH_S
        }
        about = task.name, question["what"]
        if about not in self._asked:
            self._asked[about] = now, asyncio.ensure_future(self._ask_nodes(task, question, within_s))
        answers = await asyncio.shield(self._asked[about][1])  # one who hangs up does not end it for others
        rows = [
            row | {"node": node}
            for node, answer in answers.items()
            if isinstance(answer, list)
            for row in answer
        ]
        return web.json_response({"task": task.name, "workers": rows})

    async def _ask_nodes(self, task: Task, question: dict[str, Any], within_s: float = 5.0) -> dict[str, Any]:
        """The answers of the nodes that have workers of this task, about these workers; of those that do not
        answer, why.
        """
        workers: dict[str, set[str]] = {}
        for worker, seat in task.seats.items():
            workers.setdefault(seat.node, set()).add(str(worker))
        nodes = sorted(workers.keys() & self.served.lines.nodes)
        asked = (
            self.served.lines.ask(node, question | {"task": task.name}, within_s=within_s) for node in nodes
        )
        answers = zip(nodes, await asyncio.gather(*asked, return_exceptions=True), strict=True)
        return {node: _about(workers[node], answer) for node, answer in answers}

    async def _trace(self, request: web.Request) -> web.Response:
        """`?first=A&last=B`: the ops of these steps, and what workers sent each other."""
        task = self._named_task(request)
        first, last = (requests.whole(request.query.get(key, "1"), key) for key in ("first", "last"))
        answers = await self._ask_nodes(task, {"what": "trace", "first": first, "last": last})
        scheduler = self.served.schedulers.get(task.name)
        return web.json_response(
            {
                "task": task.name,
                "first": first,
                "last": last,
                "workers": step_timeline.traced(scheduler, answers),
            }
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.text(), content_type="text/plain")

    async def _ticket(self, request: web.Request) -> web.Response:
        """For a browser's WebSocket, which cannot carry the token: opens one /v1/watch within seconds."""
        return web.json_response({"ticket": self._tickets.issue(CALLER.get()), "valid_s": TICKET_S})

    async def _agent(self, request: web.Request) -> web.WebSocketResponse:
        return await self.served.lines.serve(request)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        """Everything that happens, as it happens; with `?as=page` the picture and what changes in it."""
        if self._viewers >= MAX_VIEWERS:
            return _refuse(503, f"{MAX_VIEWERS} viewers are connected already.")
        line = web.WebSocketResponse(
            max_msg_size=1 << 16, timeout=1.0, heartbeat=VIEWER_PING_S, protocols=(PROTOCOL,)
        )
        await line.prepare(request)
        self._viewers += 1
        try:
            if request.query.get("as") == "page":
                await self._dashboards.show(line, self.may(CALLER.get()))
            else:
                await self._tell_all(line)
        finally:
            self._viewers -= 1
        return line

    def may(self, caller: Caller) -> tuple[str, ...]:
        """What the page offers this reader. What a submitter asks about another's task is refused then."""
        node = ("drain", "readmit") if caller.role is Role.ADMIN else ()
        return (*node, "cancel") if caller.role in (Role.ADMIN, Role.SUBMITTER) else ()

    async def _tell_all(self, line: web.WebSocketResponse) -> None:
        """A viewer that reads too slowly misses some, and sees how many."""
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(maxsize=1000)
        missed = 0

        def listen(news: dict[str, Any]) -> None:
            nonlocal missed
            if queue.full():
                missed += 1
            else:
                queue.put_nowait(news)

        self.record.listeners.add(listen)
        gone = asyncio.create_task(_until_closed(line))
        try:
            await line.send_str(
                _json({"kind": "status", **views.status(self.record, self._connected(), time.time())})
            )
            while not gone.done():
                news = asyncio.create_task(queue.get())
                await asyncio.wait({news, gone}, return_when=asyncio.FIRST_COMPLETED)
                if news.done():
                    await line.send_str(_json({**news.result(), "missed": missed}))
                else:
                    news.cancel()
        except ConnectionError:
            pass
        finally:
            gone.cancel()
            self.record.listeners.discard(listen)

    # -------------------------------------------------------------- doing

    async def _submit(self, request: web.Request) -> web.Response:
        given, tasks = await requests.body(request), self.record.machine.tasks
        nodes = self.record.machine.nodes.values()
        submitted = requests.submission(given, known=tasks, owner=CALLER.get().words, nodes=nodes)
        await self.served.handle(submitted)
        task = self.record.machine.tasks[submitted.task]
        return web.json_response(views.task(self.record, task), status=201)

    async def _task_verb(self, request: web.Request) -> web.Response:
        task, verb = self._named_task(request), request.match_info["verb"]
        by = CALLER.get().words
        event: msg.ClusterEvent
        match verb:
            case "cancel":
                event = msg.CancelRequested(task=task.name, by=by)
            case "pause":
                if not task.request.has_checkpoints and not task.is_script:
                    raise UserError(
                        f"task {task.name} keeps no checkpoints, so it cannot be paused; cancel it."
                    )
                event = requests.pause(await requests.body(request), task.name, by=by)
            case "unpause":
                event = msg.UnpauseRequested(task=task.name, by=by)
            case "resize":
                workers = requests.workers(await requests.body(request), task)
                event = msg.ResizeRequested(task=task.name, workers=workers, by=by)
            case "release":
                event = msg.ResizeReleased(task=task.name, by=by)
            case "reshape":
                slots = [n.slots for n in self.record.machine.nodes.values() if n.state is NodeState.UP]
                event = requests.reshape(task, await requests.body(request), slots=slots, by=by)
            case "update":
                event = requests.update(task, await requests.body(request), by=by)
            case _:
                raise InternalError(f"no task verb {verb}")
        if task.state in OVER:
            command = {"unpause": "resume", "release": "resize", "reshape": "resize"}.get(verb, verb)
            raise UserError(f"task {task.name} is {task.state}; {command} is not possible.")
        await self.served.handle(event)
        return web.json_response(views.task(self.record, task))

    async def _node_verb(self, request: web.Request) -> web.Response:
        node, verb = self._named_node(request), request.match_info["verb"]
        given, by = await requests.body(request), CALLER.get().words
        event: msg.ClusterEvent
        match verb:
            case "drain":
                event = requests.drain(given, node, self.record.machine.roster, by=by)
            case "readmit":
                event = msg.ReadmitRequested(node=node.name, by=by)
            case "notice":
                event = requests.notice(given, node, by=by)
            case _:
                raise InternalError(f"no node verb {verb}")
        await self.served.handle(event)
        return web.json_response({"node": node.name, "state": node.state, "because": node.because})

    async def _no_task_verb(self, request: web.Request) -> web.Response:
        return _refuse(404, _unknown(request, "task_verb"))

    async def _no_node_verb(self, request: web.Request) -> web.Response:
        return _refuse(404, _unknown(request, "node_verb"))

    def _named_task(self, request: web.Request) -> Task:
        return _named("task", request, self.record.machine.tasks)

    def _named_node(self, request: web.Request) -> Node:
        return _named("node", request, self.record.machine.nodes)


async def _until_closed(line: web.WebSocketResponse) -> None:
    async for _ in line:
        pass


def _json(document: Any) -> str:
    return json.dumps(document, separators=(",", ":"))


async def _sign(request: web.Request, answer: web.StreamResponse) -> None:
    """A client believes no other program that listens at this address."""
    answer.headers[OURS] = "coordinator"


def _refuse(status: int, sentence: str) -> web.Response:
    return web.json_response({"error": sentence}, status=status)


def _unknown(request: web.Request, handler: str) -> str:
    known = verbs(handler)
    return f"{request.match_info['verb']!r} is not {', '.join(known[:-1])} or {known[-1]}."


def _named(kind: str, request: web.Request, known: Mapping[str, Named]) -> Named:
    name = request.match_info[kind]
    if name not in known:
        names = requests.known_names(f"{kind}s", known)
        raise web.HTTPNotFound(
            text=_json({"error": f"{kind} {name!r} not found; {names}."}),
            content_type="application/json",
        )
    return known[name]


# Who calls, and whether the call comes from a page of ours. A page of another origin is refused in any case,
# and without credentials a Host that is not ours: a web page must not talk to a coordinator unnoticed.


class AccessControl:
    def __init__(self, credentials: Credentials, hosts: frozenset[str]) -> None:
        """`hosts`: names this server may be called by, beside loopback's; any if there are credentials."""
        self._credentials, self._hosts = credentials, hosts
        self._in_flight: dict[int, tuple[web.Request, Caller]] = {}

    @property
    def is_open(self) -> bool:
        """No credential is needed."""
        return self._credentials.is_open

    def caller(self, request: web.Request) -> Caller:
        """Who this is, by its token or else by its certificate. One that shows both may have found the token
        of another coordinator in its home.
        """
        if self._credentials.is_open:
            return Caller(role=Role.ADMIN)
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        tls = request.get_extra_info("ssl_object")
        found = None
        if token and scheme == "Bearer":
            found = self._credentials.of_token(token)
        if found is None and tls is not None and (shown := tls.getpeercert()):
            found = self._credentials.of_certificate(shown.get("subject", ()))
        if found is None:
            raise web.HTTPUnauthorized(
                text=json.dumps(
                    {"error": "the token is missing or wrong; give it by --token or EVERSTEP_TOKEN."}
                ),
                content_type="application/json",
            )
        return found

    @contextlib.contextmanager
    def in_flight(self, request: web.Request, caller: Caller) -> Iterator[None]:
        self._in_flight[id(request)] = request, caller
        try:
            yield
        finally:
            del self._in_flight[id(request)]

    async def watch(self) -> None:
        """Until cancelled: read credentials again that have changed, and end the lines of those who lost
        theirs.
        """
        while True:
            await asyncio.sleep(CREDENTIALS_S)
            await asyncio.to_thread(self._credentials.refresh)
            for request, caller in list(self._in_flight.values()):
                if request.transport is not None and not self._credentials.is_valid(caller):
                    request.transport.close()

    def check_origin(self, request: web.Request) -> None:
        origin = request.headers.get("Origin")
        host = request.headers.get("Host", "")
        try:
            asking = None if origin is None else urlsplit(origin).netloc
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            raise UserError("the Host or Origin header is not an address.") from None
        if asking is not None and asking != host:
            raise web.HTTPForbidden(text=f"a page of {origin} may not talk to this coordinator")
        ours = {"localhost", "127.0.0.1", "::1"} | self._hosts
        if self._credentials.is_open and name not in ours:
            raise web.HTTPForbidden(text=f"{name!r} is not a name of this coordinator")


def _about(workers: Collection[str], answer: Any) -> Any:
    """What a node says of its own workers; of others it knows nothing."""
    if isinstance(answer, dict):
        return {worker: found for worker, found in answer.items() if worker in workers}
    if isinstance(answer, list):
        return [row for row in answer if isinstance(row, dict) and str(row.get("worker")) in workers]
    return answer


# ------------------------------------------------------------------
# Which node has what a worker printed last. Of a worker without a slot any more, any node may have it.


class NodeQuestions(Protocol):
    async def ask(self, node: str, question: dict[str, Any]) -> Any: ...


async def newest_log(
    lines: NodeQuestions, nodes: Sequence[str], question: dict[str, Any]
) -> dict[str, Any] | str:
    """The answer that was written last, with its node; or why there is none."""
    answers = await asyncio.gather(*(lines.ask(node, question) for node in nodes), return_exceptions=True)
    found = [
        {"text": text, "at": at, "next": after, "node": node}
        for node, answer in zip(nodes, answers, strict=True)
        if isinstance(answer, dict)
        and isinstance(text := answer.get("text"), str)
        and isinstance(at := answer.get("at"), int | float)
        and isinstance(after := answer.get("next"), int)
    ]
    if found:
        return max(found, key=lambda one: (one["at"], one["node"]))
    return next((str(a.get("error")) for a in answers if isinstance(a, dict)), "its node is not connected")
