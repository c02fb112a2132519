"""What it costs to operate a cluster: notices, upgrades, a coordinator that is away, encryption.

    python -m bench.operate                       every line
    python -m bench.operate notices away          some of them
    python -m bench.operate --json

    notices      SIGTERM, and notices of 30 s and 2 s, to train, agent and coordinator
    away         the coordinator is away for --away seconds; two workers die meanwhile. Without a second one,
                 and with one that stands by (needs etcd)
    ports        every port that a cluster listens on, called without credentials
    encryption   steps and recoveries over TCP: plain, authenticated, encrypted
    tests        what tests show: roles, two Unix users, a capture, 20 replacements of an agent, an upgrade
                 across a protocol change, alerts, traces

The exit code is 1 if a line does not hold. `python -m bench.slurm` has the same for a Slurm job.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import heal
from everstep.job.job import Job, NetSpec
from everstep.launch.local.api import run_job
from everstep.node.fork_server import ForkServer
from everstep.store.folder import complete_steps
from harness import etcd as etcds
from harness.cluster import EVERSTEP, Cluster, descendants, small_job

COMPARED = 30
TESTS = {
    "matrix of roles and calls": "tests/server/test_access.py",
    "two Unix users": "tests/node/test_unix_users.py",
    "capture of a run": "tests/server/test_wiretap.py",
    "agent replaced 20 times": "tests/node/test_agent_replaced.py",
    "upgrade across a protocol change": "tests/node/test_upgrade.py",
    "promtool, Prometheus, Alertmanager": "tests/server/test_alerts.py",
    "trace for Perfetto": "tests/server/test_traces.py",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    what: str
    holds: bool
    found: dict[str, Any]

    def __str__(self) -> str:
        found = ", ".join(f"{name} {value}" for name, value in self.found.items())
        return f"{'holds' if self.holds else 'FAILS':6} {self.what:44} {found}"


def steps_once(rows: list[Any]) -> bool:
    return [row["step"] for row in rows] == list(range(1, len(rows) + 1))


def same_losses(job: dict[str, Any], rows: list[Any]) -> bool:
    known = {row["step"]: row["loss"] for row in rows}
    clean = run_job(Job.from_dict({**job, "steps": COMPARED, "checkpoint": None})).by_step()
    return all(known.get(step) == clean[step].loss for step in range(1, COMPARED + 1))


# ------------------------------------------------------------------ notices


def notices(folder: Path) -> Iterator[Line]:
    yield _train_is_told_to_end(folder / "train")
    for name, grace, notice in (
        ("SIGTERM", 30.0, ""),
        ("notice of 30 s", 0.0, "30"),
        ("notice of 2 s", 0.0, "2"),
    ):
        yield _node_leaves(folder / re.sub(r"\W", "-", name), name, grace, notice)
    yield _coordinator_is_told_to_end(folder / "coordinator")


def _train_is_told_to_end(folder: Path) -> Line:
    folder.mkdir()
    (folder / "job.toml").write_text(
        'replicas = 2\nstages = 1\nmicrobatches = 4\nsteps = 100000\nlog = "log"\n'
        '[model]\npreset = "gpt-tiny"\n[data]\nkind = "synthetic"\n'
        '[checkpoint]\nfolder = "kept"\ninterval = 100000\n'
    )
    with (folder / "out").open("wb") as out:
        run = subprocess.Popen([*EVERSTEP, "train", str(folder / "job.toml")], stdout=out, stderr=out)

    def done() -> int:
        files = list((folder / "log").glob("*.jsonl"))
        return sum(len(file.read_text().splitlines()) for file in files)

    _until(lambda: done() >= 10, "it trains")
    began = time.monotonic()
    run.terminate()
    code = run.wait(120)
    took_s, saved = time.monotonic() - began, max(complete_steps(folder / "kept"), default=0)
    steps = [json.loads(row).get("step", 0) for f in (folder / "log").glob("*.jsonl") for row in f.open()]
    lost = max(steps, default=0) - saved
    found = {"exit code": code, "steps lost": lost, "seconds": round(took_s, 1)}
    return Line(what="SIGTERM to everstep train", holds=code == 143 and lost == 0, found=found)


def _node_leaves(folder: Path, name: str, grace: float, notice: str) -> Line:
    """All of a stage is on this node, so its state must be somewhere else before it leaves."""
    folder.mkdir()
    job = small_job(folder, steps=100_000, replicas=1, stages=2, optimizer={"decay": "constant"})
    job["checkpoint"] = {"folder": str(folder / "kept"), "interval": 100_000}
    file = folder / "notice"
    with Cluster(folder) as cluster:
        cluster.start_coordinator()
        cluster.start_agent("a", slots=1)
        cluster.start_agent("b", slots=1, grace=grace, more=("--notice-file", str(file)))
        cluster.nodes_up(2)
        cluster.submit(job)
        cluster.step_reached(10)
        agent, began, code, left_s = cluster.agents["b"], time.monotonic(), None, None
        if notice:
            file.write_text(notice)
            while left_s is None and time.monotonic() < began + float(notice):
                if cluster.task()["state"] != "running":
                    left_s = time.monotonic() - began
                time.sleep(0.05)
            cluster.signal_node("b", signal.SIGKILL)  # the machine is taken away
        else:
            agent.terminate()
            code, left_s = agent.wait(120), time.monotonic() - began
        told = cluster.task()
        reached, protected = max(row["step"] for row in told["rows"]), told["saved"]["protected"]
        cluster.start_agent("c", slots=1)
        cluster.step_reached(max(reached + 5, COMPARED))
        rows = cluster.task()["rows"]
    lost = max(0, reached - protected)
    after = "not in time" if left_s is None else f"{left_s:.1f}"
    found = {"exit code": code, "left after s": after, "steps lost": lost, "of": reached}
    holds = (lost == 0 or float(notice or grace) <= 2) and code in (None, 143) and same_losses(job, rows)
    return Line(what=f"{name} to an agent that has a whole stage", holds=holds, found=found)


def _train_on_two(cluster: Cluster, job: dict[str, Any]) -> None:
    for node in "ab":
        cluster.start_agent(node, slots=2)
    cluster.nodes_up(2)
    cluster.submit(job)


def _coordinator_is_told_to_end(folder: Path) -> Line:
    folder.mkdir()
    job = small_job(folder, steps=100_000, optimizer={"decay": "constant"})
    with Cluster(folder) as cluster:
        cluster.start_coordinator()
        _train_on_two(cluster, job)
        cluster.step_reached(10)
        before, began = cluster.workers(), time.monotonic()
        cluster.coordinators["first"].terminate()
        code = cluster.coordinators["first"].wait(60)
        took_s = time.monotonic() - began
        cluster.start_coordinator()
        cluster.nodes_up(2)
        cluster.step_reached(COMPARED)
        rows = cluster.task()["rows"]
        stays = {w: r["pid"] for w, r in cluster.workers().items()} == {
            w: r["pid"] for w, r in before.items()
        }
    found = {"exit code": code, "seconds": round(took_s, 1), "steps lost": 0 if steps_once(rows) else "some"}
    found["workers stayed"] = stays
    holds = code == 143 and stays and steps_once(rows) and same_losses(job, rows)
    return Line(what="SIGTERM to the coordinator", holds=holds, found=found)


# ------------------------------------------------------------------ a coordinator that is away


def away(folder: Path, away_s: float) -> Iterator[Line]:
    yield _two_deaths(folder / "alone", away_s, stands_by=False)
    if etcds.BINARY is None:
        print(f"left out: a second coordinator stands by ({etcds.ABSENT})", file=sys.stderr)
        return
    yield _two_deaths(folder / "stands-by", away_s, stands_by=True)


def _two_deaths(folder: Path, away_s: float, *, stands_by: bool) -> Line:
    """The leader is killed and comes back later; two workers die after a fifth and half of that time."""
    folder.mkdir()
    job = small_job(folder, steps=1_000_000, optimizer={"decay": "constant"})
    with ExitStack() as held:
        endpoints = held.enter_context(etcds.Etcd(folder)).endpoints if stands_by else ()
        cluster = held.enter_context(Cluster(folder, etcd=endpoints, eager=True, poll_s=0.02))
        cluster.start_coordinator("first")
        if stands_by:
            cluster.start_coordinator("second", wait=False)
        _train_on_two(cluster, job)
        cluster.all_members()
        cluster.step_reached(5)
        victims = [row["pid"] for worker, row in cluster.workers().items() if worker in ("0:0", "1:1")]
        cluster.kill_coordinator("first")
        began, healed = time.monotonic(), list[float]()
        for share, victim in zip((0.2, 0.5), victims, strict=True):
            time.sleep(max(0.0, began + share * away_s - time.monotonic()))
            died = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            if stands_by:
                cluster.nodes_up(2)
                cluster.all_members()
                healed.append(time.monotonic() - died)
        time.sleep(max(0.0, began + away_s - time.monotonic()))
        back = time.monotonic()
        cluster.start_coordinator("first", wait=not stands_by)
        if not stands_by:
            cluster.nodes_up(2)
            cluster.all_members()
            healed.append(time.monotonic() - back)
        reached = max(row["step"] for row in cluster.task()["rows"])
        cluster.step_reached(max(reached + 3, COMPARED))
        rows = cluster.task()["rows"]
    by = "the one that stood by, after each death" if stands_by else "the first one, after its return"
    found = {"healed by": by, "seconds": [round(one, 1) for one in healed], "steps once": steps_once(rows)}
    what = f"coordinator away for {away_s:g} s, two deaths"
    return Line(what=what, holds=steps_once(rows) and same_losses(job, rows), found=found)


# ------------------------------------------------------------------ ports


def ports(folder: Path) -> Iterator[Line]:
    """What answers to strangers, and with what."""
    job = small_job(folder, steps=1_000_000, transport="tcp", memory_interval=2)
    with Cluster(folder) as cluster:
        cluster.start_coordinator()
        _train_on_two(cluster, job)
        cluster.step_reached(5)
        owners = [*cluster.coordinators.values(), *cluster.agents.values()]
        pids = {pid for one in owners for pid in (one.pid, *descendants(one.pid))}
        open_ports = sorted(_listening(pids))
        answers = [answer for port in open_ports for answer in _strangers_answers(port)]
        before = cluster.task()["step"]
        cluster.step_reached(before + 5)  # and none of it has hurt
    told = [one for one in answers if one]
    yield Line(
        what="every listening port, called without credentials",
        holds=len(open_ports) >= 7 and not told,
        found={"ports": len(open_ports), "calls": len(answers), "answered": told or "none"},
    )


def _listening(pids: set[int]) -> set[int]:
    inodes = set[str]()
    for pid in pids:
        for number in Path(f"/proc/{pid}/fd").glob("*"):
            target = os.readlink(number) if number.is_symlink() else ""
            inodes |= set(re.findall(r"socket:\[(\d+)\]", target))
    found = set[int]()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in Path(table).read_text().splitlines()[1:]:
            words = row.split()
            if words[3] == "0A" and words[9] in inodes:
                found.add(int(words[1].rpartition(":")[2], 16))
    return found


def _strangers_answers(port: int) -> Iterator[str]:
    """For each call: what it gave away; empty: nothing."""
    for method, path in (
        ("GET", "/v1/status"),
        ("POST", "/v1/tasks"),
        ("GET", "/metrics"),
        ("GET", "/job/1/x"),
    ):
        yield _asked(port, method, path)
    for garbage in (b"\0" * 64, b"\x80\x04K\x01." * 20, b'{"hello": {"node": "a"}}\n'):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as line:
            line.settimeout(1.0)
            line.sendall(garbage)
            try:
                said = line.recv(1 << 12)
            except OSError:
                said = b""
        is_refusal = said.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400")) or len(said) <= 64  # a challenge
        yield "" if is_refusal else f"port {port} answered {said[:40]!r}"


def _asked(port: int, method: str, path: str) -> str:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
    try:
        line.request(method, path, body=b"{}" if method == "POST" else None)
        status = line.getresponse().status
    except (OSError, http.client.HTTPException):
        return ""  # it speaks no HTTP, and hung up or waits for a proof
    finally:
        line.close()
    return "" if status in (400, 401, 403, 404, 405) else f"{method} {path} on port {port}: {status}"


# ------------------------------------------------------------------ encryption


def encryption(kills: int, preset: str) -> Iterator[Line]:
    server = ForkServer().start()
    try:
        for name, net in (
            ("plain", NetSpec(authenticate="never")),
            ("authenticated", NetSpec(authenticate="always")),
            ("encrypted", NetSpec(encrypt=True)),
        ):
            told = heal.measure(2, 2, kills, preset, server, 0, transport="tcp", net=net)
            found = {"step ms": told["healthy_step_ms"], "first op ms": told["first_op_ms"]}
            once = told["microbatches"]["issued"] == told["microbatches"]["committed"]
            yield Line(what=f"steps and recoveries over TCP, {preset}, {name}", holds=once, found=found)
    finally:
        server.close()


# ------------------------------------------------------------------ tests


def tests(folder: Path) -> Iterator[Line]:
    root = Path(__file__).parents[1]
    for what, path in TESTS.items():
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "--slow", path],
            cwd=root,
            capture_output=True,
            text=True,
        )
        told = (done.stdout.strip().splitlines() or ["nothing"])[-1].strip("= ")
        found = {"pytest": told, "seconds": round(time.monotonic() - began)}
        yield Line(what=what, holds=done.returncode == 0 and "passed" in told, found=found)


def _until(true: Callable[[], bool], what: str, within_s: float = 240.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {within_s:g} s: {what}")
        time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ("notices", "away", "ports", "encryption", "tests")
    parser.add_argument("lines", nargs="*", help=", ".join(known), metavar="LINE")
    parser.add_argument("--away", type=float, default=60.0, help="seconds")
    parser.add_argument("--kills", type=int, default=8, help="for encryption")
    parser.add_argument("--preset", default="gpt-tiny", help="the model, for encryption")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if unknown := set(given.lines) - set(known):
        parser.error(f"{', '.join(sorted(unknown))} is not known; choose from {', '.join(known)}")
    made: list[Line] = []
    with tempfile.TemporaryDirectory(prefix="everstep-operate-") as name:
        parts: dict[str, Callable[[Path], Iterator[Line]]] = {
            "notices": notices,
            "away": lambda folder: away(folder, given.away),
            "ports": ports,
            "encryption": lambda folder: encryption(given.kills, given.preset),
            "tests": tests,
        }
        for part in given.lines or known:
            folder = Path(name, part)
            folder.mkdir()
            for line in parts[part](folder):
                made.append(line)
                print(line, file=sys.stderr if given.json else sys.stdout, flush=True)
    if given.json:
        print(json.dumps([asdict(line) for line in made], indent=1))
    return 0 if all(line.holds for line in made) else 1


if __name__ == "__main__":
    sys.exit(main())
