"""Faults of machines and networks, on machines that share nothing but a network (`harness/machines.py`).

    python -m bench.machines                      every fault once
    python -m bench.machines off cut --tries 5    some of them, several times
    python -m bench.machines --results FILE       each try is written there, and is not made again
    python -m bench.machines --clean FOLDER       losses of runs without failures are kept there, for commands
                                                  that run side by side; --tries 0: nothing else is done

Needs root; elsewhere it says why and ends with 0 if `--skip` is given. One task of 2 x 2 workers on three
machines of two slots, a coordinator on a fourth; `coordinator-lost` has three coordinators and an etcd of
three members. Faults that begin with `data-` are those of a second network, which tensors use; `hang-` are
starts that hang. For each fault: are the losses those of a failure-free run, was every microbatch counted
once, which machines were blamed, how long was the longest time without a step from the fault on, and how long
until the machine was named in an incident.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.cli.client import Client
from everstep.job.job import Job
from everstep.launch.local.api import run_job

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from harness.cluster import EVERSTEP, small_job
from harness.machines import Machines, absent, inside
from harness.switch import UserSwitch

TOKEN = "machines"
STEPS, FAULT_AT = 24, 5
# Training goes on meanwhile, and must not be over when the worker dies, or when a hung start is noticed.
LONGER = {"coordinator-lost": 90, "hang-import": 400, "hang-build": 400, "hang-connect": 150, "data-slow": 40}
LATER = {"data-slow": 15}  # a link's usual rate is known by then
NODES = ("n1", "n2", "n3")
WHOLE_RATE = 12.5e6  # bytes/s of every cable, where bandwidth is the fault
HUNG_START = """
import os
import time

from everstep.engine.datasets.data import Synthetic
from everstep.job.presets import shape


def hang(where):
    folder = os.path.dirname(os.path.abspath(__file__))
    try:
        os.rename(os.path.join(folder, where), os.path.join(folder, "hung"))
    except FileNotFoundError:
        return
    while True:
        time.sleep(1)


class Slow(Synthetic):
    def batch(self, step, microbatch):
        time.sleep(REST)
        return super().batch(step, microbatch)


def build():
    hang("build")
    return Slow(vocab=shape("gpt-tiny").vocab, sequence=32, rows=2)


hang("import")
"""
_SKEW = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
#include <sys/time.h>
static const long OFF = 30;
int clock_gettime(clockid_t id, struct timespec *at) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int rc = real(id, at);
  if (!rc && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += OFF;
  return rc;
}
time_t time(time_t *to) {
  struct timespec at;
  clock_gettime(CLOCK_REALTIME, &at);
  if (to) *to = at.tv_sec;
  return at.tv_sec;
}
int gettimeofday(struct timeval *to, void *zone) {
  struct timespec at;
  clock_gettime(CLOCK_REALTIME, &at);
  to->tv_sec = at.tv_sec;
  to->tv_usec = at.tv_nsec / 1000;
  return 0;
}
"""


@dataclass
class Scene:
    """The machines, what runs on them, and the machine that is hit."""

    machines: Machines
    coordinators: list[str]
    victim: str = ""
    more: dict[str, dict[str, str]] = field(default_factory=dict)  # environment of a machine's processes
    began: float = 0.0  # the wall time of the fault

    @property
    def client(self) -> Client:
        addresses = ",".join(f"http://{self.machines[c].address}:7077" for c in self.coordinators)
        for address in addresses.split(","):
            client = Client(address=address, token=TOKEN)
            with contextlib.suppress(Exception):
                if client.get("/v1/health")["leads"]:
                    return client
        raise ConnectionError("no coordinator leads")

    def until(self, true: Callable[[], Any], what: str, within_s: float = 180.0) -> Any:
        deadline = time.monotonic() + within_s
        while True:
            with contextlib.suppress(Exception):
                if found := true():
                    return found
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {within_s:g} s: {what}")
            time.sleep(0.1)

    def task(self) -> Any:
        return self.client.get("/v1/tasks/job")

    @property
    def data(self) -> UserSwitch:
        assert self.machines.data is not None
        return self.machines.data

    def start_agent(self, name: str, slots: int = 2) -> None:
        machine = self.machines[name]
        through = ",".join(f"http://{c}:7077" for c in self.coordinators)
        command = [*EVERSTEP, "agent", "--node", name, "--slots", str(slots)]
        command += ["--host", machine.address if self.machines.data is None else machine.data_address]
        token = {"EVERSTEP_TOKEN": TOKEN, **self.more.get(name, {})}
        machine.start([*command, "--coordinator", through], "agent.log", token)

    def start_coordinator(self, name: str, etcd: str = "") -> None:
        machine = self.machines[name]
        command = [*EVERSTEP, "coordinator", "--host", "0.0.0.0", "--port", "7077", "--insecure"]
        command += ["--name", name]
        command += ["--state", str(machine.folder / "state")] + (["--etcd", etcd] if etcd else [])
        machine.start(command, "coordinator.log", {"EVERSTEP_TOKEN": TOKEN})

    def kill_worker(self) -> None:
        self.machines[self.victim].run("kill", "-9", str(self.worker_pid()))

    def worker_pid(self) -> int:
        """Of one worker process on the victim, as that machine counts them."""
        rows = self.client.get("/v1/tasks/job/readings")["workers"]
        return int(next(row["pid"] for row in rows if row["node"] == self.victim))


def off(scene: Scene) -> None:
    scene.machines.switch_off(scene.victim)


def cut(scene: Scene, *, into: bool = True, seconds: float = 5.0) -> None:
    switch = scene.machines.switch
    switch.out[scene.victim].is_cut, switch.into[scene.victim].is_cut = True, into
    time.sleep(seconds)
    switch.heal([scene.victim])


def one_way(scene: Scene) -> None:
    cut(scene, into=False)


def returns(scene: Scene) -> None:
    """Cut until it is given up; then its late messages arrive."""
    switch = scene.machines.switch
    switch.out[scene.victim].is_cut = switch.into[scene.victim].is_cut = True

    def given_up() -> bool:
        nodes = scene.client.get("/v1/status")["nodes"]
        return any(n["node"] == scene.victim and n["state"] == "gone" for n in nodes)

    scene.until(given_up, "the node is given up")
    time.sleep(3.0)
    switch.heal([scene.victim])


def loss(scene: Scene) -> None:
    switch = scene.machines.switch
    switch.out[scene.victim].loss = switch.into[scene.victim].loss = 0.05


def delay(scene: Scene) -> None:
    switch = scene.machines.switch
    switch.out[scene.victim].delay_s = switch.into[scene.victim].delay_s = 0.1
    time.sleep(20.0)
    switch.heal([scene.victim])


def bandwidth(scene: Scene) -> None:
    switch = scene.machines.switch
    switch.out[scene.victim].bytes_per_s = switch.into[scene.victim].bytes_per_s = 0.1 * WHOLE_RATE
    time.sleep(20.0)
    switch.heal([scene.victim])


def full_disk(scene: Scene) -> None:
    """The machine's own disk is full, and then one of its workers dies."""
    fill = "dd if=/dev/zero of=/tmp/full bs=1M 2>/dev/null; true"
    scene.machines[scene.victim].run("sh", "-c", fill)
    scene.kill_worker()


def no_names(scene: Scene) -> None:
    """No name can be looked up any more, and then a worker dies."""
    for machine in scene.machines.all.values():
        machine.run("sh", "-c", "echo '127.0.0.1 localhost' > /etc/hosts")
    scene.kill_worker()


def skew(scene: Scene) -> None:
    """Its clock is 30 s ahead from the beginning; a worker of it dies."""
    scene.kill_worker()


def coordinator_lost(scene: Scene) -> None:
    """The machine of the coordinator that leads, with its member of etcd; then a worker dies."""
    leads = next(
        c
        for c in scene.coordinators
        if Client(address=f"http://{scene.machines[c].address}:7077", token=TOKEN).get("/v1/health")["leads"]
    )
    scene.machines.switch_off(leads)
    scene.coordinators.remove(leads)
    scene.until(lambda: scene.client, "another coordinator leads")
    scene.until(lambda: all(n["connected"] for n in scene.client.get("/v1/status")["nodes"]), "agents came")
    scene.kill_worker()


def data_cut(scene: Scene, *, into: bool = True) -> None:
    """For good."""
    data = scene.data
    data.out[scene.victim].is_cut, data.into[scene.victim].is_cut = True, into


def data_one_way(scene: Scene) -> None:
    data_cut(scene, into=False)


def data_slow(scene: Scene) -> None:
    """To a tenth, for good."""
    data = scene.data
    data.out[scene.victim].bytes_per_s = data.into[scene.victim].bytes_per_s = 0.1 * WHOLE_RATE


def hang_import(scene: Scene) -> None:
    """A fork server dies, then a worker; the next fork server hangs while it imports the job's code."""
    (scene.machines.shared / "import").touch()
    pid = scene.worker_pid()
    scene.machines[scene.victim].run("sh", "-c", f"kill -9 $(cut -d' ' -f4 /proc/{pid}/stat)")
    scene.kill_worker()


def hang_build(scene: Scene) -> None:
    """A worker dies; the next one hangs while it builds its data."""
    (scene.machines.shared / "build").touch()
    scene.kill_worker()


def hang_connect(scene: Scene) -> None:
    """Workers move to a machine whose data network is dead."""
    seats = {seat["node"] for seat in scene.task()["seats"]}
    spare = next(iter(set(NODES) - seats))
    leaves, scene.victim = scene.victim, spare
    data_cut(scene)
    scene.began = time.time()
    scene.client.post(f"/v1/nodes/{leaves}/drain", {"force": False})


FAULTS: dict[str, Callable[[Scene], None]] = {
    "off": off,
    "cut": cut,
    "one-way": one_way,
    "returns": returns,
    "loss": loss,
    "delay": delay,
    "bandwidth": bandwidth,
    "full-disk": full_disk,
    "no-names": no_names,
    "skew": skew,
    "coordinator-lost": coordinator_lost,
    "data-cut": data_cut,
    "data-one-way": data_one_way,
    "data-slow": data_slow,
    "hang-import": hang_import,
    "hang-build": hang_build,
    "hang-connect": hang_connect,
}
TWO_NETWORKS = ("data-cut", "data-one-way", "data-slow", "hang-connect")


def etcd(machines: Machines, names: list[str]) -> str:
    cluster = ",".join(f"{n}=http://{machines[n].address}:2380" for n in names)
    arch = {"ETCD_UNSUPPORTED_ARCH": "arm64"} if platform.machine() == "aarch64" else {}
    for name in names:
        here = machines[name]
        client, peer = f"http://{here.address}:2379", f"http://{here.address}:2380"
        options = {
            "name": name,
            "data-dir": "/tmp/etcd",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": cluster,
            "log-outputs": "stderr",
        }
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        here.start([shutil.which("etcd") or "etcd", *words], "etcd.log", arch)
    return ",".join(f"http://{machines[n].address}:2379" for n in names)


def attempt(fault: str, folder: Path, clean: dict[int, float], seed: int) -> dict[str, Any]:
    """One try: a fresh set of machines."""
    coordinators = ["c1", "c2", "c3"] if fault == "coordinator-lost" else ["c1"]
    with Machines(folder, [*coordinators, *NODES], seed, data=fault in TWO_NETWORKS) as machines:
        scene = Scene(machines, list(coordinators))
        if fault == "skew":
            scene.more["n2"] = {"LD_PRELOAD": str(_skewed(folder))}
        if fault in ("bandwidth", "data-slow"):
            switch = machines.switch if machines.data is None else machines.data
            for name in NODES:
                switch.out[name].bytes_per_s = switch.into[name].bytes_per_s = WHOLE_RATE
        endpoints = etcd(machines, coordinators) if fault == "coordinator-lost" else ""
        for name in coordinators:
            scene.start_coordinator(name, endpoints)
        scene.until(lambda: scene.client, "a coordinator leads")
        for name in NODES:
            scene.start_agent(name)
        scene.until(lambda: len(scene.client.get("/v1/status")["nodes"]) == len(NODES), "all agents joined")
        job = small_job(
            machines.shared, steps=len(clean), memory_interval=1, **variant(fault, machines.shared)
        )
        scene.client.post("/v1/tasks", {"name": "job", "job": job})
        scene.until(lambda: scene.task()["step"] >= LATER.get(fault, FAULT_AT), "training has begun")
        seats = {seat["node"] for seat in scene.task()["seats"]}
        scene.victim = "n2" if "n2" in seats else sorted(seats)[0]
        scene.began = time.time()
        FAULTS[fault](scene)

        def over() -> Any:
            task = scene.task()
            return task if task["state"] in ("finished", "failed", "cancelled") else None

        task = scene.until(over, "the task is over", within_s=300)
        # A worker's death is an incident, too: what counts is that of the start that hangs after it.
        return _judged(scene, task, clean, noticed_from_s=5.0 if fault.startswith("hang-") else 0.0)


def variant(fault: str, folder: Path, *, rest_s: float = 0.1) -> dict[str, Any]:
    """Of the small job: where a start is to hang, code of the job's own, which can, and slow data."""
    if not fault.startswith("hang-"):
        return {"microbatches": 2}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hung_start.py").write_text(f"REST = {rest_s}\n{HUNG_START}")
    return {"microbatches": 2, "data": {"build": "hung_start:build"}}


def _judged(scene: Scene, task: Any, clean: dict[int, float], *, noticed_from_s: float) -> dict[str, Any]:
    began = scene.began
    rows = {row["step"]: row for row in task["rows"]}
    times = [began, *sorted(row["at"] for row in rows.values() if row["at"] > began)]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    incidents = scene.client.get("/v1/incidents")
    nodes = scene.client.get("/v1/status")["nodes"]
    blamed = {i["node"] for i in incidents if i.get("node") and i.get("stopped_training")}
    blamed |= {n["node"] for n in nodes if n["state"] in ("isolated", "lemon", "gone")}
    named = [i["opened_at"] - began for i in incidents if i.get("node") == scene.victim]
    return {
        "state": task["state"],
        "because": task["because"],
        "losses_equal": {step: row["loss"] for step, row in rows.items()} == clean,
        "issued": task["microbatches"]["issued"],
        "committed": task["microbatches"]["committed"],
        "blamed": sorted(blamed),
        "wrongly": sorted(blamed - {scene.victim}),
        "longest_s": max(gaps, default=0.0),
        "usual_s": sorted(gaps)[len(gaps) // 2] if gaps else 0.0,
        "noticed_s": min((after for after in named if after > noticed_from_s), default=None),
        "incidents": len(incidents),
        "open": sum(i["closed_at"] is None for i in incidents),
    }


def clean_losses(folder: Path, fault: str) -> dict[int, float]:
    steps = LONGER.get(fault, STEPS)
    outcome = run_job(Job.from_dict(small_job(folder, steps=steps, **variant(fault, folder, rest_s=0.0))))
    losses = {step: row.loss for step, row in outcome.by_step().items()}
    assert len(losses) == steps, f"the run without failures has {len(losses)} of {steps} steps"
    return losses


def _skewed(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    source, made = folder / "skew.c", folder / "skew.so"
    source.write_text(_SKEW)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(made), str(source), "-ldl"], check=True)
    return made


class Results:
    """Tries that were made, in a file of one line each: a command that is cut off goes on where it was."""

    def __init__(self, file: Path | None, clean: Path | None) -> None:
        self._file, self._kept = file, clean
        lines = file.read_text().splitlines() if file is not None and file.exists() else []
        self._rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self._clean: dict[tuple[int, bool], dict[int, float]] = {}

    def of(self, fault: str) -> list[dict[str, Any]]:
        return [row for row in self._rows if row["fault"] == fault]

    def add(self, fault: str, found: dict[str, Any]) -> None:
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps({"fault": fault, **found}) + "\n")

    def losses(self, fault: str, folder: Path) -> dict[int, float]:
        """Of a run without failures."""
        key = LONGER.get(fault, STEPS), fault.startswith("hang-")
        if key not in self._clean:
            kept = self._kept and self._kept / f"{key[0]}{'-own-data' * key[1]}.json"
            if kept is not None and kept.exists():
                self._clean[key] = {int(step): loss for step, loss in json.loads(kept.read_text()).items()}
            else:
                self._clean[key] = clean_losses(folder, fault)
            if kept is not None and not kept.exists():
                kept.parent.mkdir(parents=True, exist_ok=True)
                unfinished = kept.with_suffix(f".{time.time_ns()}")
                unfinished.write_text(json.dumps(self._clean[key]))
                unfinished.replace(kept)
        return self._clean[key]


def line(fault: str, tries: list[dict[str, Any]]) -> str:
    done = [t for t in tries if "error" not in t]
    good = sum(t["losses_equal"] and t["state"] == "finished" for t in done)
    once = sum(t["issued"] == t["committed"] for t in done)
    right = sum(not t["wrongly"] for t in done)
    longest = sorted(t["longest_s"] for t in done)
    seconds = f"{longest[len(longest) // 2]:.1f} ({longest[-1]:.1f})" if longest else "-"
    noticed = sorted(t["noticed_s"] for t in done if t.get("noticed_s") is not None)
    named = f"{noticed[len(noticed) // 2]:.1f} ({noticed[-1]:.1f})" if noticed else "-"
    counts = " | ".join(f"{count}/{len(tries)}" for count in (good, once, right))
    return f"| {fault} | {len(tries)} | {counts} | {seconds} | {len(noticed)}/{len(tries)} | {named} |"


def main() -> int:
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_it_is)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"of {', '.join(FAULTS)}; none: all")
    parser.add_argument("--tries", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    parser.add_argument("--results", type=Path, help="a file of the tries that were made, and are not again")
    parser.add_argument("--clean", type=Path, help="a folder for the losses of runs without failures")
    parser.add_argument("--skip", action="store_true", help="end with 0 where there can be no machines")
    given = parser.parse_args()
    if unknown := set(given.faults) - set(FAULTS):
        parser.error(f"{sorted(unknown)[0]!r} is not a fault; choose from {', '.join(FAULTS)}.")
    if why := absent():
        print(f"no machines: {why}.", file=sys.stderr)
        return 0 if given.skip else 2
    inside(["-m", "bench.machines", *sys.argv[1:]])
    folder, chosen = (
        Path(tempfile.mkdtemp(prefix="everstep-machines-", dir="/var/tmp")),
        given.faults or FAULTS,
    )
    table = [
        "| fault | tries | same losses | counted once | no other machine blamed "
        "| longest without a step, s (worst) | machine named | after, s (worst) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    made = Results(given.results, given.clean)
    bad = 0
    for fault in chosen:
        if given.clean is not None:
            made.losses(fault, folder)
        tries = made.of(fault)[: given.tries]
        for number in range(len(tries), given.tries):
            try:
                losses = made.losses(fault, folder)
                found = attempt(fault, folder / f"{fault}-{number}", losses, given.seed + number)
            except Exception as error:  # a try that fails is a row of the table
                traceback.print_exc()
                found = {"error": str(error)}
            tries.append(found)
            made.add(fault, found)
            print(json.dumps({"fault": fault, **found}), file=sys.stderr, flush=True)
        for found in tries:
            bad += "error" in found or not found["losses_equal"] or bool(found["wrongly"])
        table.append(line(fault, tries))
        print(table[-1], flush=True)
    print("\n".join(table))
    if not given.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
