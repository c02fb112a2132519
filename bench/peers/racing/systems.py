"""How each system is started: its processes, which node they stand for, and where its settings are from.

A part with a node number is ended when that node is lost and started again when the node returns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from harness.race_models import MODELS, chosen
from harness.race_trace import NODES, PER_NODE, WORKERS

RACERS = Path(__file__).parents[1] / "racers"
PYTHON = sys.executable
BEATS = ", ".join(f"{model.beat_s:g} s ({model.name} model)" for model in MODELS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    command: list[str]
    node: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    memory: tuple[str, ...] = ()  # globs of what is in its node's memory and is lost with it


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    name: str  # as in tables
    package: str | None  # whose version is written down
    parts: Callable[[Path, int], list[Part]]  # of the race's folder, and the first of ten free ports
    settings: str
    rejoins: bool = True  # whether a part that is started again can take part; if not, all start together


def _racer(name: str) -> str:
    return str(RACERS / name)


def _everstep(folder: Path, port: int) -> list[Part]:
    command, token = [PYTHON, "-m", "everstep.cli.main"], {"EVERSTEP_TOKEN": "race"}
    address = f"http://127.0.0.1:{port}"
    state = str(folder / "state")
    head = [*command, "coordinator", "--port", str(port), "--state", state, "--restarts-per-node", "1000000"]
    agent = [*command, "agent", "--slots", str(PER_NODE), "--coordinator", address]
    submit = [PYTHON, _racer("everstep_submit.py"), address, state]
    return [
        Part(name="coordinator", command=head, env=token),
        *(
            Part(name=f"agent-{n}", command=[*agent, "--node", f"n{n}"], node=n, env=token)
            for n in range(NODES)
        ),
        Part(name="submit", command=submit, env=token),
    ]


def _torchrun(folder: Path, port: int) -> list[Part]:
    # last_call_timeout: how long a group that is large enough waits for more nodes; 30 s as it comes.
    options = ["--nnodes", "1:2", "--nproc-per-node", str(PER_NODE), "--max-restarts", "1000"]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "race"]
    options += [
        "--rdzv-conf",
        "last_call_timeout=5",
        "--local-addr",
        "127.0.0.1",
        "--monitor-interval",
        "0.1",
    ]
    command = [PYTHON, "-m", "torch.distributed.run", *options, _racer("ddp.py")]
    # With the agents' store shared, workers of a new round met addresses of the last one, and hung.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return [Part(name=f"agent-{n}", command=command, node=n, env=env) for n in range(NODES)]


def _everstep_run(folder: Path, port: int) -> list[Part]:
    """torchrun's command line and torchrun's script, nothing changed in it."""
    options = ["--nnodes", "1:2", "--nproc-per-node", str(PER_NODE), "--max-restarts", "1000"]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "race"]
    options += ["--local-addr", "127.0.0.1", "--hang-after", "10"]
    command = [PYTHON, "-m", "everstep.run", *options]
    where = [
        ["--rdzv-conf", f"last_call_timeout=5,is_host={'true' if n == 0 else 'false'}"] for n in range(NODES)
    ]
    return [
        Part(name=f"agent-{n}", command=[*command, *where[n], _racer("ddp.py")], node=n) for n in range(NODES)
    ]


def _nvrx_in_job(folder: Path, port: int) -> list[Part]:
    # Of MIN:MAX nodes MIN train and the rest are spares; there is none here.
    options = ["--nnodes", "2", "--nproc-per-node", str(PER_NODE), "--max-restarts", "1000"]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "race"]
    options += ["--monitor-interval", "0.1"]
    options += ["--ft-rank-heartbeat-timeout", f"{chosen().beat_s:g}"]
    options += ["--ft-initial-rank-heartbeat-timeout", "40"]
    options += ["--ft-workload-check-interval", "1", "--workers-stop-timeout", "5"]
    command = [PYTHON, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher", *options]
    # It refuses two launchers of one address.
    address = {n: ["--local-addr", f"127.0.0.{n + 1}"] for n in range(NODES)}
    script = [_racer("ddp.py"), "--beat"]
    return [Part(name=f"agent-{n}", command=[*command, *address[n], *script], node=n) for n in range(NODES)]


def _nvrx(folder: Path, port: int) -> list[Part]:
    # Without LOCAL_RANK: with it the wrapper checks a GPU of that number before every restart.
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORKERS)}
    return [
        Part(
            name=f"rank-{rank}",
            command=[PYTHON, _racer("nvrx.py")],
            node=rank // PER_NODE,
            env={**where, "RANK": str(rank), "RACE_SLOT": str(rank)},
        )
        for rank in range(WORKERS)
    ]


def _dlrover(folder: Path, port: int) -> list[Part]:
    head = [PYTHON, "-m", "dlrover.python.master.main", "--platform", "local", "--job_name", f"race{port}"]
    head += ["--port", str(port), "--node_num", str(NODES)]
    options = ["--nnodes", "1:2", "--nproc_per_node", str(PER_NODE), "--max_restarts", "1000"]
    options += [
        "--rdzv-conf",
        "join_timeout=600,lastcall_timeout=5,pend_timeout=3600",
        "--monitor-interval",
        "0.1",
    ]
    options += ["--save-at-breakpoint", "--training-port", str(port + 5)]
    command = [PYTHON, "-m", "dlrover.trainer.torch.main", *options, _racer("flash.py")]
    common = {"DLROVER_MASTER_ADDR": f"127.0.0.1:{port}", "NODE_NUM": str(NODES), "POD_IP": "127.0.0.1"}
    agents = [
        Part(
            name=f"agent-{n}",
            command=command,
            node=n,
            # Sockets and shared memory are named after the job: two nodes on one host need two names.
            env={**common, "NODE_ID": str(n), "NODE_RANK": str(n), "ELASTIC_JOB_NAME": f"race{port}n{n}"},
            memory=(f"/dev/shm/*race{port}n{n}*", f"/tmp/ckpt_sock/race{port}n{n}"),
        )
        for n in range(NODES)
    ]
    return [Part(name="master", command=head, env=common), *agents]


def _ray(folder: Path, port: int) -> list[Part]:
    here = ["--node-ip-address", "127.0.0.1", "--num-cpus", str(PER_NODE), "--block", "--disable-usage-stats"]
    here += ["--object-store-memory", "100000000"]
    ray = [PYTHON, "-m", "ray.scripts.scripts", "start", *here]
    again = ["bash", "-c", 'for i in $(seq 60); do "$@"; sleep 1; done', "-"]  # until the head is up
    # Its sockets' paths may have 107 characters.
    head = [
        *ray,
        "--head",
        "--port",
        str(port),
        "--include-dashboard",
        "false",
        "--temp-dir",
        f"/tmp/ray{port}",
    ]
    env = {"RACE_RAY": f"127.0.0.1:{port}", "RAY_TMPDIR": f"/tmp/ray{port}"}
    # Polled every 0.5 s (2); a worker that does not answer for 10 s (600) is lost; 120 s to start (60).
    env |= {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5", "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "10"}
    env |= {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "120"}
    return [
        Part(name="node-0", command=head, node=0, env=env, memory=(f"/tmp/ray{port}",)),
        Part(name="node-1", command=[*again, *ray, "--address", f"127.0.0.1:{port}"], node=1, env=env),
        Part(name="driver", command=[PYTHON, _racer("ray_train.py")], env=env),
    ]


def _torchft(folder: Path, port: int) -> list[Part]:
    script = _racer("torchft_train.py")
    head = Part(name="lighthouse", command=[PYTHON, script, "--lighthouse"], env={"RACE_PORT": str(port)})
    launch = [PYTHON, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "1"]
    launch += ["--max-restarts", "1000", "--monitor-interval", "0.1"]
    groups = [
        Part(
            name=f"group-{slot}",
            command=[*launch, "--master-port", str(port + 1 + slot), script],
            node=slot // PER_NODE,
            env={"RACE_SLOT": str(slot), "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"},
        )
        for slot in range(WORKERS)
    ]
    return [head, *groups]


SYSTEMS = {
    "everstep": System(
        name="Everstep",
        package=None,
        parts=_everstep,
        settings="coordinator, two agents; detection as it comes",
    ),
    "everstep-run": System(
        name="everstep run",
        package=None,
        parts=_everstep_run,
        settings="torchrun's script and command line; nnodes 1:2, hang after 10 s, gloo timeout 10 s",
    ),
    "torchrun": System(
        name="torchrun",
        package="torch",
        parts=_torchrun,
        settings="nnodes 1:2, last_call_timeout 5 s, monitor interval 0.1 s, gloo timeout 10 s",
    ),
    "torchft": System(
        name="torchft",
        package="torchft",
        parts=_torchft,
        settings="two groups of one worker, lighthouse as in its README, timeouts 10 s",
    ),
    "nvrx": System(
        name="NVRx in-process",
        package="nvidia-resiliency-ext",
        parts=_nvrx,
        settings=f"intervals 100 ms, soft timeout {BEATS}, hard timeout 3 s later; lost ranks do not return",
        rejoins=False,
    ),
    "nvrx-job": System(
        name="NVRx ft_launcher",
        package="nvidia-resiliency-ext",
        parts=_nvrx_in_job,
        settings=f"heartbeat timeout {BEATS}, workers stop timeout 5 s, nnodes 2",
    ),
    "dlrover": System(
        name="DLRover",
        package="dlrover",
        parts=_dlrover,
        settings="local master, two agents; flash checkpoint in memory after every step",
    ),
    "ray": System(
        name="Ray Train",
        package="ray",
        parts=_ray,
        settings="two Ray nodes, elastic 1 to 2 workers, max_failures -1, health check 0.5 s, timeouts 10 s",
    ),
}
