"""What the coordinator's own troubles cost: kills, take-overs, thousands of agents.

    python -m bench.coordinator kills --times 50        SIGKILL at random moments, in recoveries too
    python -m bench.coordinator takeover --times 10     the same with etcd and a second coordinator
    python -m bench.coordinator agents --number 2000    heartbeats of that many agents on one process
    python -m bench.coordinator recovery --number 200   one task on that many agents, with etcd: seconds from
                                                        a death until all agents have their orders to resume;
                                                        then the same while the leader is killed.
                                                        --processes 8 are the agents, --etcd PATH the program

Each with --json. The exit code is 1 if a step was lost, a loss differs, an incident stays open or an agent is
declared silent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.job.job import Job
from everstep.launch.local.api import run_job
from everstep.protocol.ops import Worker

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from harness.cluster import MEASURED_POLL_S, Cluster, replayed, small_job
from harness.crowds import Crowds, allow_many_lines, parts
from harness.etcd import ABSENT, BINARY, Etcd
from harness.fake_agents import Crowd, FakeAgent


def clean_losses(folder: Path, steps: int) -> dict[int, float]:
    outcome = run_job(Job.from_dict(small_job(folder, steps=steps)))
    return {step: row.loss for step, row in outcome.by_step().items()}


def verdict(cluster: Cluster, clean: dict[int, float], steps: int) -> dict[str, Any]:
    """What must hold of a task that went through anything at all."""
    told = cluster.finished(within_s=600)
    losses = {row["step"]: row["loss"] for row in told["rows"]}
    incidents = cluster.incidents()
    return {
        "state": told["state"],
        "steps_lost": steps - len(losses),
        "microbatches": told["microbatches"],
        "max_relative_loss_difference": max(
            abs(losses.get(step, float("inf")) - loss) / abs(loss) for step, loss in clean.items()
        ),
        "incidents": len(incidents),
        "incidents_open": sum(incident["closed_at"] is None for incident in incidents),
    }


# ------------------------------------------------------------------ kills


def kills(times: int, seed: int, folder: Path, steps: int) -> dict[str, Any]:
    """Kill and restart the coordinator while workers are killed too."""
    chance = random.Random(seed)
    clean = clean_losses(folder, steps)
    worker_kills, away = 0, []
    with Cluster(folder, eager=True, poll_s=MEASURED_POLL_S) as cluster:
        cluster.start_coordinator()
        for node in "ab":
            cluster.start_agent(node, slots=2)
        cluster.nodes_up(2)
        cluster.submit(small_job(folder, steps=steps))
        cluster.step_reached(2)
        for number in range(times):
            time.sleep(chance.uniform(0.0, 0.6))
            if chance.random() < 0.4:  # then the coordinator dies somewhere in that recovery
                cluster.nodes_up(2)
                worker_kills += _kill_a_worker(cluster, chance)
                time.sleep(chance.uniform(0.0, 0.15))
            began = time.monotonic()
            cluster.kill_coordinator()
            cluster.start_coordinator()
            away.append(time.monotonic() - began)
            print(f"kill {number + 1}/{times}: back after {away[-1]:.2f} s", file=sys.stderr)
            if _over(cluster):
                break
        told = verdict(cluster, clean, steps)
        cluster.nodes_up(2)
        live = cluster.settled()
        cluster.kill_coordinator()
    again = replayed(folder / "state-first", live[0])
    if again != live:
        print(f"live {live}, replayed {again}", file=sys.stderr)
    return {
        "coordinator_kills": len(away),
        "worker_kills": worker_kills,
        "away_s": _spread(away),
        **told,
        "journal_replays_to_the_same_state": again == live,
    }


def _kill_a_worker(cluster: Cluster, chance: random.Random) -> int:
    with contextlib.suppress(Exception):
        workers = cluster.workers()
        os.kill(chance.choice(sorted(workers.values(), key=lambda w: w["worker"]))["pid"], signal.SIGKILL)
        return 1
    return 0


def _over(cluster: Cluster) -> bool:
    with contextlib.suppress(Exception):
        return bool(cluster.task()["state"] == "finished")
    return False


# ------------------------------------------------------------------ take-over


def takeover(times: int, seed: int, folder: Path, steps: int) -> dict[str, Any]:
    """Two coordinators on one etcd; the leader is killed, and started again as the one that stands by."""
    chance = random.Random(seed)
    clean = clean_losses(folder, steps)
    took = []
    with (
        Etcd(folder) as etcd,
        Cluster(folder, etcd=etcd.endpoints, eager=True, poll_s=MEASURED_POLL_S) as cluster,
    ):
        cluster.start_coordinator("first")
        cluster.start_coordinator("second", wait=False)
        for node in "ab":
            cluster.start_agent(node, slots=2)
        cluster.nodes_up(2)
        cluster.submit(small_job(folder, steps=steps))
        cluster.step_reached(2)
        for number in range(times):
            time.sleep(chance.uniform(0.0, 1.0))
            if chance.random() < 0.4:
                cluster.nodes_up(2)
                _kill_a_worker(cluster, chance)
                time.sleep(chance.uniform(0.0, 0.15))
            leader = _leader(cluster)
            began = time.monotonic()
            cluster.kill_coordinator(leader)
            cluster.until(lambda old=leader: _leader(cluster) not in (None, old), "the other one leads")
            took.append(time.monotonic() - began)
            print(f"take-over {number + 1}/{times}: {took[-1]:.2f} s", file=sys.stderr)
            cluster.start_coordinator(leader, wait=False)
            cluster.nodes_up(2)
            if _over(cluster):
                break
        return {"takeovers": len(took), "takeover_s": _spread(took), **verdict(cluster, clean, steps)}


def _leader(cluster: Cluster) -> str | None:
    for name, address in cluster.addresses.items():
        with (
            contextlib.suppress(OSError, ValueError),
            urllib.request.urlopen(f"{address}/v1/health", timeout=1) as answer,
        ):
            if json.load(answer)["leads"]:
                return name
    return None


# ------------------------------------------------------------------ many agents


async def _live(crowd: Crowd, seconds: float) -> None:
    """Their lines, with a heartbeat four times a second."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(crowd.live(), seconds)


def agents(number: int, seconds: float, folder: Path) -> dict[str, Any]:
    """The coordinator on one core, the crowd on the other."""
    allow_many_lines()
    with Cluster(folder, poll_s=MEASURED_POLL_S) as cluster:
        address = cluster.start_coordinator()
        pid = cluster.coordinators["first"].pid
        os.sched_setaffinity(pid, {0})
        os.sched_setaffinity(0, set(range(1, os.cpu_count() or 2)) or {0})
        headers = {"Authorization": f"Bearer {cluster.token}"}
        crowd = Crowd(addresses=(address,), headers=headers)
        crowd.agents = {name: FakeAgent(name, crowd, slots=8) for name in (f"n{i}" for i in range(number))}
        lines = threading.Thread(target=lambda: asyncio.run(_live(crowd, seconds + 15)), daemon=True)
        lines.start()
        client = cluster.client
        cluster.until(lambda: len(client.get("/v1/status")["nodes"]) >= number, "all have joined")
        time.sleep(3)
        began, used = time.monotonic(), _cpu_s(pid)
        states: set[str] = set()
        late = []
        while time.monotonic() - began < seconds:
            asked = time.monotonic()
            with urllib.request.urlopen(f"{address}/v1/health", timeout=10):
                late.append(time.monotonic() - asked)
            time.sleep(0.05)
        share = (_cpu_s(pid) - used) / (time.monotonic() - began)
        states = {row["state"] for row in client.get("/v1/status")["nodes"]}
        asking = urllib.request.Request(f"{address}/metrics", headers=headers)
        with urllib.request.urlopen(asking, timeout=30) as answer:
            metrics = answer.read().decode()
        lines.join()
    handled = [line for line in metrics.splitlines() if line.startswith("everstep_event_handling_")]
    return {
        "agents": number,
        "heartbeats_per_s": number * 4,
        "cpu_share_of_one_core": round(share, 3),
        "answer_ms": _spread([x * 1e3 for x in late]),
        "handling_s": {line.split("_")[-2]: float(line.split()[-1]) for line in handled},
        "states": sorted(states),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySettings:
    number: int
    times: int
    processes: int
    silence_s: float
    etcd: str | None  # the program


def recovery(given: RecoverySettings, folder: Path) -> dict[str, Any]:
    """Every agent has one worker of a task of two stages; none of them is a process."""
    allow_many_lines()
    job = small_job(folder, steps=1000, replicas=given.number // 2, stages=2)
    options = ["--silence", str(given.silence_s)]
    with (
        Etcd(folder, binary=given.etcd) as etcd,
        Cluster(folder, etcd=etcd.endpoints, options=options, poll_s=MEASURED_POLL_S) as cluster,
    ):
        cluster.start_coordinator("first")
        cluster.start_coordinator("second", wait=False)
        lines = parts(
            given.number,
            given.processes,
            addresses=tuple(cluster.addresses.values()),
            token=cluster.token,
            microbatches=given.number // 2 * job["microbatches"],
            beat_s=min(2.0, given.silence_s / 4),
        )
        with Crowds(lines) as crowds:
            cluster.until(
                lambda: len(cluster.client.get("/v1/status")["nodes"]) >= given.number, "all joined"
            )
            cluster.submit(job)
            if crowds.all_resumed(0, within_s=120.0) is None:
                raise SystemExit(f"the task did not begin within 120 s\n{cluster.logs()[-4000:]}")
            healed = [_one_recovery(cluster, crowds, given, turn) for turn in range(given.times)]
            taken_over = _one_recovery(cluster, crowds, given, given.times, leader_dies=True)
        said = "".join(log.read_text() for log in folder.glob("coordinator-*.log"))
    found = [seconds for seconds in healed if seconds is not None]
    return {
        "agents": given.number,
        "processes": given.processes,
        "deaths": given.times,
        "all_have_orders": len(found),
        "death_to_orders_s": _spread(found) if found else None,
        "with_leader_killed_s": taken_over,
        "nodes_silent": said.count(" is silent: "),
        "nodes_given_up": said.count(" is gone: "),
    }


def _one_recovery(
    cluster: Cluster, crowds: Crowds, given: RecoverySettings, turn: int, *, leader_dies: bool = False
) -> float | None:
    """Seconds from a death until all agents have orders of a later epoch. Before it, the worker that died the
    time before is back, and a step is sealed.
    """
    if not crowds.hear(lambda: crowds.is_settled(given.number), 60.0):
        raise SystemExit(f"{crowds.num_members} of {given.number} workers take part after 60 s")
    crowds.seal()
    crowds.hear(lambda: False, 0.5)
    leader = _leader(cluster) if leader_dies else None
    epoch = crowds.epoch()
    died_at = crowds.kill(Worker(1 + turn % (given.number // 2 - 1), turn % 2))
    if leader is not None:
        cluster.kill_coordinator(leader)
    resumed_at = crowds.all_resumed(epoch, within_s=60.0)
    took_s = None if resumed_at is None else round(resumed_at - died_at, 3)
    print(f"death {turn + 1}{', leader killed' if leader else ''}: {took_s} s", file=sys.stderr)
    return took_s


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 3),
        "p99": round(ordered[int(0.99 * (len(ordered) - 1))], 3),
        "max": round(ordered[-1], 3),
    }


def holds(told: dict[str, Any]) -> bool:
    if "all_have_orders" in told:
        return told["all_have_orders"] == told["deaths"] and told["with_leader_killed_s"] is not None
    if "states" in told:
        return bool(told["states"] == ["up"])
    same = told["max_relative_loss_difference"] == 0 and told.get("journal_replays_to_the_same_state", True)
    return same and told["state"] == "finished" and not told["steps_lost"] and not told["incidents_open"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["kills", "takeover", "agents", "recovery"])
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--number", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="that play the agents of recovery")
    parser.add_argument("--silence", type=float, default=1.0, help="seconds, of the coordinator in recovery")
    parser.add_argument("--logs", type=Path, help="a folder for the coordinators' logs and states")
    parser.add_argument("--etcd", metavar="PATH", help="the program for recovery, where none is installed")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if (
        given.what in ("takeover", "recovery")
        and BINARY is None
        and not (given.what == "recovery" and given.etcd)
    ):
        raise SystemExit(ABSENT)
    if not 1 <= given.processes <= given.number // 2:
        parser.error(f"--processes: {given.processes} is not from 1 to {given.number // 2}.")
    with contextlib.ExitStack() as undo:
        made = given.logs or undo.enter_context(tempfile.TemporaryDirectory(prefix="everstep-bench-"))
        folder = Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        match given.what:
            case "kills":
                told = kills(given.times, given.seed, folder, given.steps)
            case "takeover":
                told = takeover(given.times, given.seed, folder, given.steps)
            case "recovery":
                settings = RecoverySettings(
                    number=given.number,
                    times=min(given.times, 20),
                    processes=given.processes,
                    silence_s=given.silence,
                    etcd=given.etcd and str(Path(given.etcd).resolve()),
                )
                told = recovery(settings, folder)
            case _:
                told = agents(given.number, given.seconds, folder)
    if given.json:
        print(json.dumps(told, indent=2))
    else:
        for key, value in told.items():
            print(f"{key:36} {value}")
    return 0 if holds(told) else 1


if __name__ == "__main__":
    sys.exit(main())
