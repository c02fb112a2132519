"""A job or a script on a Ray cluster: one agent per Ray node, the coordinator as a named actor.

    this command ──► placement group, STRICT_SPREAD: the least number of nodes, each with its slots
         │     ├───► actor "everstep-NAME": the coordinator, on the node of this command
         │     └───► an actor per bundle: the agent of that node; and one on every further node up to the most
         └──watches: nodes that Ray drains become notices, new nodes get an agent; it ends with the task

If a Ray node is lost, so is its agent: the coordinator heals the task as it does everywhere. Ray starts the
agent of a lost bundle again where it finds another node. If this command ends, everything ends.

What ranks and workers print, agents print, and Ray shows it here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.errors import EverstepError, UserError
from everstep.launch.client import Client
from everstep.launch.script_nodes import OVER, Followed, Told, told_of
from everstep.node.agent import Agent, AgentSettings
from everstep.server.serve import ServerSettings, serve

LOOK_S = 0.5
FOLLOW_S = 0.25
NAMESPACE = "everstep"
RAY_VERSION = "ray>=2.40"

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RayLaunch:
    task: dict[str, Any]  # as the API takes it: name, and job or ranks
    least: int  # nodes
    most: int
    slots: int  # per node
    address: str = "auto"  # of the Ray cluster
    uses_gpus: bool | None = None  # None: if the Ray cluster has some
    wait_s: float = 600.0  # for Ray to have the nodes
    grace_s: float = 25.0

    @property
    def name(self) -> str:
        return str(self.task["name"])


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlace:
    """What an agent's actor is told; where it is, Ray says."""

    coordinator: str
    token: str
    slots: int
    grace_s: float
    order: int


def node_name(ray_id: str) -> str:
    return f"ray-{ray_id[:12]}"


# ------------------------------------------------------------------ actors


class CoordinatorActor:
    async def begin(self, host: str, token: str) -> str:
        """Its address, once it listens."""
        listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._folder = tempfile.TemporaryDirectory(prefix="everstep-ray-")
        settings = ServerSettings(
            folder=Path(self._folder.name),
            host=host,
            port=0,
            token=token,
            is_insecure=True,  # as the rest of Ray's traffic
        )
        self._serving = asyncio.create_task(serve(settings, ready=listening.set_result))
        either: set[asyncio.Future[Any]] = {self._serving, listening}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not listening.done():
            await self._serving
        return await listening

    async def end(self) -> None:
        self._serving.cancel()
        with contextlib.suppress(asyncio.CancelledError, EverstepError):
            await self._serving
        self._folder.cleanup()


class AgentActor:
    """Ray may start it again, on this node or on another: it joins as that node then."""

    def __init__(self, place: AgentPlace) -> None:
        ray = _ray()
        self._place = place
        self._node = ray.get_runtime_context().get_node_id()
        self._host = ray.util.get_node_ip_address()
        self._agent: Agent | None = None
        self._ended = asyncio.Event()

    async def node(self) -> str:
        return str(self._node)

    async def serve(self) -> None:
        """Until told to leave."""
        place = self._place
        with tempfile.TemporaryDirectory(prefix="everstep-ray-") as words:
            self._agent = Agent(
                AgentSettings(
                    node=node_name(self._node),
                    slots=place.slots,
                    coordinators=(place.coordinator,),
                    host=self._host,
                    token=lambda: place.token,
                    words=Path(words),
                    grace_s=place.grace_s,
                    order=place.order,
                )
            )
            followed = Followed(Path(words), sys.stdout.buffer)
            following = asyncio.create_task(_follow(followed))
            try:
                await self._agent.run()
            finally:
                following.cancel()
                followed.look()
                self._ended.set()

    async def leave(self, because: str) -> None:
        if self._agent is not None:
            self._agent.leave(because)
            await self._ended.wait()


async def _follow(followed: Followed) -> None:
    while True:
        followed.look()
        await asyncio.sleep(FOLLOW_S)


# ------------------------------------------------------------------ this command


class RayRun:
    """`run` is called once, and blocks until the task has ended."""

    def __init__(self, launch: RayLaunch, note: Note) -> None:
        self.launch, self._note = launch, note
        self._ray: Any = None
        self._group: Any = None
        self._coordinator: Any = None
        self._client: Client | None = None
        self._agents: dict[int, Any] = {}  # by order
        self._serving: dict[int, Any] = {}  # by order: what its actor promises
        self._noticed: set[str] = set()

    def run(self) -> dict[str, Any]:
        """The task, as it ended."""
        self._ray = ray = _ray()
        try:
            ray.init(address=self.launch.address, namespace=NAMESPACE, log_to_driver=True)
        except ConnectionError as error:
            raise UserError(
                f"--address {self.launch.address}: no Ray cluster answers ({str(error).splitlines()[0]}); "
                "start one with ray start --head, or give the address of one."
            ) from None
        try:
            return self._run()
        finally:
            self._close()
            ray.shutdown()

    def _run(self) -> dict[str, Any]:
        launch, ray = self.launch, self._ray
        token, name = secrets.token_hex(32), f"everstep-{launch.name}"
        here = ray.get_runtime_context().get_node_id()
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False)
        try:
            self._coordinator = (
                ray.remote(CoordinatorActor)
                .options(name=name, num_cpus=0, scheduling_strategy=affinity)
                .remote()
            )
        except ValueError:
            raise UserError(
                f"task {launch.name} runs on this Ray cluster already (actor {name}); give another --name."
            ) from None
        address = ray.get(self._coordinator.begin.remote(ray.util.get_node_ip_address(), token))
        self._note(f"coordinator: {address}, actor {name}")
        client = self._client = Client(address=address, token=token)
        self._reserve()
        for order in range(launch.least):
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=order
            )
            self._start_agent(order, address, token, strategy, restarts=-1)
        client.post("/v1/tasks", launch.task)
        told = Told()
        while True:
            task: dict[str, Any] = client.get(f"/v1/tasks/{launch.name}")
            told, lines = told_of(client, task, told)
            for line in lines:
                self._note(line)
            if task["state"] in OVER:
                self._note(f"task {launch.name} is {task['state']}: {task['because']}")
                return task
            self._pass_notices(client)
            self._tend_agents(address, token)
            time.sleep(LOOK_S)

    @property
    def _bundle(self) -> dict[str, float]:
        uses_gpus = self.launch.uses_gpus
        if uses_gpus is None:
            uses_gpus = self._ray.cluster_resources().get("GPU", 0) > 0
        slots = float(self.launch.slots)
        return {"GPU": slots, "CPU": 1.0} if uses_gpus else {"CPU": slots}

    def _reserve(self) -> None:
        launch, ray = self.launch, self._ray
        bundle = self._bundle
        self._group = ray.util.placement_group([bundle] * launch.least, strategy="STRICT_SPREAD")
        if not self._group.wait(launch.wait_s):
            wanted = " and ".join(f"{number:g} {what}" for what, number in bundle.items())
            raise UserError(
                f"Ray has not given {launch.least} nodes with {wanted} each within {launch.wait_s:g} s; "
                "give fewer --nodes or --nproc-per-node, or a longer --wait."
            )

    def _start_agent(self, order: int, address: str, token: str, strategy: Any, *, restarts: int) -> None:
        launch, bundle = self.launch, self._bundle
        place = AgentPlace(
            coordinator=address, token=token, slots=launch.slots, grace_s=launch.grace_s, order=order
        )
        options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
        actor = self._ray.remote(AgentActor).options(
            **options,
            scheduling_strategy=strategy,
            max_restarts=restarts,
            max_task_retries=restarts,  # it serves again where it is started again
            max_concurrency=4,
        )
        self._agents[order] = agent = actor.remote(place)
        self._serving[order] = agent.serve.remote()

    def _tend_agents(self, address: str, token: str) -> None:
        """Nodes beyond the least that are there, up to the most, get an agent each."""
        launch, ray = self.launch, self._ray
        for order, serving in list(self._serving.items()):
            if ray.wait([serving], timeout=0)[0]:
                with contextlib.suppress(Exception):  # its node is lost; the coordinator sees that
                    ray.get(serving)
                del self._serving[order], self._agents[order]
        if len(self._agents) >= launch.most:
            return
        joined = {node["node"] for node in self._get("/v1/status")["nodes"] if node["connected"]}
        free = ray._private.state.available_resources_per_node()
        for node in ray.nodes():
            ray_id = node["NodeID"]
            has_room = all(free.get(ray_id, {}).get(what, 0) >= n for what, n in self._bundle.items())
            if not node["Alive"] or node_name(ray_id) in joined or not has_room or ray_id in self._draining():
                continue
            strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(ray_id, soft=False)
            order = next(n for n in range(launch.least, 1 << 30) if n not in self._agents)
            self._note(f"Ray node {ray_id[:12]} can take part")
            self._start_agent(order, address, token, strategy, restarts=0)
            return  # one per look: what it takes is not free at the next

    def _draining(self) -> dict[str, int]:
        found: dict[str, int] = self._ray._private.state.state.get_draining_nodes()
        return found

    def _pass_notices(self, client: Client) -> None:
        """Ray says which nodes it will take away, and when."""
        for ray_id, deadline_ms in self._draining().items():
            if ray_id in self._noticed:
                continue
            self._noticed.add(ray_id)
            left_s = max(0.0, deadline_ms / 1e3 - time.time()) if deadline_ms else self.launch.grace_s
            with contextlib.suppress(EverstepError):  # none of ours
                client.post(f"/v1/nodes/{node_name(ray_id)}/notice", {"leaves_in_s": round(left_s, 1)})
                self._note(f"Ray takes node {ray_id[:12]} away in {left_s:.0f} s")

    def _get(self, path: str) -> Any:
        assert self._client is not None
        return self._client.get(path)

    def _close(self) -> None:
        """What was started ends, in whatever state this is."""
        ray = self._ray
        leaving = [agent.leave.remote("the run is over") for agent in self._agents.values()]
        with contextlib.suppress(Exception):
            ray.wait(leaving, num_returns=len(leaving), timeout=self.launch.grace_s)
        for agent in self._agents.values():
            with contextlib.suppress(Exception):
                ray.kill(agent)
        if self._coordinator is not None:
            with contextlib.suppress(Exception):
                ray.get(self._coordinator.end.remote(), timeout=10)
            ray.kill(self._coordinator)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)


def _ray() -> Any:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise UserError(f"Ray is not installed here; pip install '{RAY_VERSION}'.") from None
    return ray
