"""Training across the testbed, steered, while a spine's cable dies or is cut to a tenth.

    python -m tests.fabric.steered_training                 cable dead in mid-run (root)
    python -m tests.fabric.steered_training --harm cut
    python -m tests.fabric.steered_training --seeds 20 --rate 40    healthy: one run per seed of the hashes
    python -m tests.fabric.steered_training --seeds 20 --rate 40 --unsteered

A host with an agent for each replica, a coordinator in the first; every step's reduce crosses the spines.
Everything is the real program: coordinator, agents, workers, their links. The cable is the busiest one of
leaf 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from everstep.cli.client import Client
from everstep.errors import EverstepError
from everstep_fabric.document import routes_from, topology_document
from everstep_fabric.routing import Routing
from tests.fabric import fabric_testbed
from tests.fabric.fabric_testbed import Testbed

JOB = """
steps = {steps}
replicas = {replicas}
stages = {stages}
microbatches = 2
seed = 1
transport = "tcp"
log = "{folder}/log"
[model]
preset = "gpt-tiny"
depth = 4
[data]
kind = "synthetic"
rows = 2
[optimizer]
lr = 1e-2
clip = 1.0
"""

DURING_S = 10.0  # after the harm
WELL = 1.25  # times the usual step before it

TOKEN = "testbed"
CONTROL = "10.99.0.1"
ADDRESS = f"http://{CONTROL}:7077"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--harm", choices=("dead", "cut", "none"), default="dead")
    parser.add_argument("--dead", type=int, default=0, help="a spine whose cable to leaf 2 is dead all along")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--at", type=int, default=40, help="the step at which it happens")
    parser.add_argument("--seeds", type=int, default=0, help="a run of --steps for each, nothing harmed")
    parser.add_argument("--stages", type=int, default=2, choices=(1, 2, 4))
    parser.add_argument("--replicas", type=int, default=2, choices=(2, 3, 4), help="one on each host")
    parser.add_argument("--planes", type=int, default=1, choices=(1, 2), help="ports of a host")
    parser.add_argument("--unsteered", action="store_true", help="workers that know nothing of the fabric")
    parser.add_argument("--rate", type=float, default=40.0, help="Mbit/s of a cable")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for the run")
    parser.add_argument("--json", action="store_true", dest="as_json")
    args = parser.parse_args([word for word in sys.argv[1:] if not word.startswith("--inside")])
    reason = fabric_testbed.why_not()
    if reason is not None:
        print(f"steered training: {reason}.", file=sys.stderr)
        return 2
    fabric_testbed.move_into_own_namespaces()
    testbed = Testbed(leaves=args.replicas, spines=4, rate_mbit=args.rate, planes=args.planes)
    with testbed.up(), tempfile.TemporaryDirectory() as folder:
        testbed.seed(1)
        if args.dead:
            testbed.kill(2, args.dead)
        table = train(testbed, Path(folder), args)
    if args.as_json:
        print(json.dumps(table))
    else:
        for key, value in table.items():
            print(f"{key}: {value}")
    return 0 if table["finished"] else 1


def train(testbed: Testbed, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    (folder / "fabric.json").write_text(json.dumps(topology_document(testbed.topology())))
    shape = {"replicas": args.replicas, "stages": args.stages}
    (folder / "job.toml").write_text(JOB.format(steps=args.steps, folder=folder, **shape))
    control_network(testbed.leaves)
    everstep = [sys.executable, "-m", "everstep.cli.main"]
    state = ["--state", str(folder / "state")]
    words = ["coordinator", "--host", CONTROL, "--insecure", *state]
    words += ["--fabric", str(folder / "fabric.json")]
    running = [start("h1", [*everstep, *words])]
    try:
        for number in range(1, testbed.leaves + 1):
            words = [
                "agent",
                "--coordinator",
                ADDRESS,
                "--node",
                f"h{number}",
                "--slots",
                str(args.stages),
            ]
            words += ["--host", testbed.host(number), *(["--bind", "0.0.0.0"] if args.planes > 1 else [])]
            if not args.unsteered:
                words += ["--fabric-ports", "24000-27999"]
            running.append(start(f"h{number}", [*everstep, *words]))
        work = each_seed if args.seeds else follow
        return testbed.inside("h1", lambda: work(testbed, folder, everstep, args))
    finally:
        for process in reversed(running):
            process.send_signal(signal.SIGINT)
        for process in reversed(running):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def control_network(hosts: int) -> None:
    """Clusters have another network for control; a dead spine is not to take the coordinator along."""
    calls = ["-n h1 link add m0 type bridge", f"-n h1 addr add {CONTROL}/24 dev m0", "-n h1 link set m0 up"]
    for number in range(2, hosts + 1):
        calls += [
            f"-n h1 link add m{number} type veth peer name m0 netns h{number}",
            f"-n h1 link set m{number} master m0 up",
            f"-n h{number} addr add 10.99.0.{number}/24 dev m0",
            f"-n h{number} link set m0 up",
        ]
    for call in calls:
        subprocess.run(["ip", *call.split()], check=True)


def follow(testbed: Testbed, folder: Path, everstep: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Submit once both nodes are there; look at the step again and again; do the harm on the way."""
    client = Client(address=ADDRESS, token=TOKEN)
    wait_for(
        lambda: sum(node["connected"] for node in client.get("/v1/status")["nodes"]) == testbed.leaves, 120.0
    )
    if args.dead:  # the agents find it without being told
        wait_for(lambda: is_known_dead(client.get("/v1/routes"), f"s{args.dead}>l2"), 60.0)
    words = ["submit", str(folder / "job.toml"), "--address", ADDRESS, "--token", TOKEN]
    start("h1", [*everstep, *words]).wait()
    seen: list[tuple[float, int]] = []  # when each step was first seen done
    harmed, deadline, task, routes = None, time.monotonic() + args.limit, None, None
    while time.monotonic() < deadline:
        task = client.get("/v1/status")["tasks"][0]
        routes = client.get("/v1/routes") or routes
        if not seen or task["step"] > seen[-1][1]:
            seen.append((time.monotonic(), task["step"]))
        if task["step"] >= args.steps:
            break
        if harmed is None and args.harm != "none" and task["step"] >= args.at:
            spine = busiest_spine()
            if args.harm == "dead":
                testbed.kill(2, spine)
            else:
                testbed.cut(2, spine, testbed.rate_mbit / 10)
            harmed = time.monotonic()
        time.sleep(0.02)
    spines = sorted(planned_spines(routes_from(routes)))
    return {"planned_spines": spines, **summary(folder, seen, harmed, client.get("/v1/status"), args)}


def each_seed(
    testbed: Testbed, folder: Path, everstep: list[str], args: argparse.Namespace
) -> dict[str, Any]:
    """One task after the other on the healthy fabric, each with other hashes; of each the second half."""
    client = Client(address=ADDRESS, token=TOKEN)
    wait_for(
        lambda: sum(node["connected"] for node in client.get("/v1/status")["nodes"]) == testbed.leaves, 120.0
    )
    steps_s = []
    for seed in range(1, args.seeds + 1):
        testbed.seed(seed)
        name = f"seed-{seed}"
        words = ["submit", str(folder / "job.toml"), "--name", name, "--address", ADDRESS, "--token", TOKEN]
        start("h1", [*everstep, *words]).wait()
        wait_for(lambda name=name: client.get(f"/v1/tasks/{name}")["state"] == "finished", args.limit)
        rows = client.get(f"/v1/tasks/{name}")["rows"][args.steps // 2 :]
        steps_s.append((rows[-1]["at"] - rows[0]["at"]) / (len(rows) - 1))
        print(f"seed {seed}: {steps_s[-1]:.3f} s per step", file=sys.stderr, flush=True)
    return {
        "finished": True,
        "steered": not args.unsteered,
        "mean_step_s": statistics.fmean(steps_s),
        "median_step_s": statistics.median(steps_s),
        "worst_step_s": max(steps_s),
        "steps_s": steps_s,
    }


def is_known_dead(routes: dict[str, Any] | None, link: str) -> bool:
    return routes is not None and routes["fabric"]["condition"].get(link) == 0.0


def wait_for(done: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(EverstepError):
            if done():
                return
        if time.monotonic() > deadline:
            raise RuntimeError("the agents did not come up in time")
        time.sleep(0.5)


def planned_spines(routing: Routing) -> set[int]:
    """The spines by which the plan sends what leaves h1."""
    used = [
        routing.topology.links[link].receiver
        for number, flow in enumerate(routing.flows)
        if flow.source[0] == "h1"
        for link in routing.path(number)[1:-1]
    ]
    return {int(name[1:].partition("p")[0]) for name in used if name.startswith("s")}


def spine_bytes(leaf: str = "l1") -> dict[int, int]:
    """What each cable out of a leaf has carried."""
    command = ["ip", "-n", leaf, "-s", "-j", "link"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    sent = {row["ifname"]: row["stats64"]["tx"]["bytes"] for row in json.loads(shown.stdout)}
    return {int(name[1:]): count for name, count in sent.items() if name[0] == "s"}


def busiest_spine() -> int:
    sent = spine_bytes()
    return max(sent, key=lambda spine: sent[spine])


def start(host: str, command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["ip", "netns", "exec", host, *command],
        stdout=subprocess.DEVNULL,
        stderr=sys.stderr,
        env=os.environ | {"EVERSTEP_TOKEN": TOKEN},
    )


def summary(
    folder: Path,
    seen: list[tuple[float, int]],
    harmed: float | None,
    status: dict[str, Any],
    args: argparse.Namespace,
) -> dict[str, Any]:
    words = [
        line
        for path in sorted((folder / "log").glob("*.log"))
        for line in path.read_text(errors="replace").splitlines()
        if "moved:" in line or "kernel's port" in line
    ]
    gaps = [(b[0], (b[0] - a[0]) / (b[1] - a[1])) for a, b in pairwise(seen) if a[1] > 2]
    before = [gap for at, gap in gaps if harmed is None or at < harmed]
    after = [gap for at, gap in gaps if harmed is not None and at >= harmed]
    during = [gap for at, gap in gaps if harmed is not None and harmed <= at < harmed + DURING_S]
    usual = statistics.median(before) if before else 0.0
    well = [at for at, gap in gaps if harmed is not None and at >= harmed and gap <= WELL * usual]
    task = status["tasks"][0]
    return {
        "finished": task["step"] >= args.steps,
        "spine_bytes": spine_bytes(),
        "plane_bytes": [
            sum(spine_bytes(leaf).values()) for leaf in ("l1", *(["l1p1"] if args.planes > 1 else []))
        ],
        "steered": not args.unsteered,
        "harm": args.harm,
        "step_before_s": statistics.median(before) if before else None,
        "steps_during_s": statistics.median(during) if during else None,
        "well_again_after_s": min(well) - harmed if harmed is not None and well else None,
        "longest_step_after_s": max(after, default=None),
        "last_steps_s": statistics.median(after[-20:]) if after else None,
        "steps_done": task["step"],
        "microbatches": task["microbatches"],
        "epoch": task["epoch"],
        "incidents": status["incidents"]["total"],
        "said": words,
    }


if __name__ == "__main__":
    sys.exit(main())
