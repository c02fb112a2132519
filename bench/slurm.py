"""Everstep on a real Slurm: nodes are lost, the first one too, drained, returned; the job is requeued,
cancelled and submitted again; a script in place of a job loses a node and is warned.

    python -m bench.slurm                  all six, about eight minutes on 2 cores: `make slurm`
    python -m bench.slurm node first       only these

`harness/slurm_cluster.py` makes a Slurm of Debian's munged, slurmctld and four slurmd on this machine, and
takes it down afterwards. A node is killed by SIGKILL to its slurmd and to all that ran on it, and returns
when its slurmd is started again. Losses are compared with those of a clean `everstep train` by ==. A
microbatch's data take 100 ms to come, so that a run is not over before Slurm has noticed anything: what is
shown here is Slurm, not speed.

`--json` prints one document, `--transcript FILE` keeps what was said while it ran.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from everstep.job.job import load_job
from everstep.launch.client import Client
from everstep.launch.local.api import run_job
from everstep.launch.slurm.sbatch import newest
from everstep.launch.slurm.shell import SCRIPT

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from harness.slurm_cluster import SlurmCluster, missing

EVERSTEP = [sys.executable, "-m", "everstep.cli.main"]
STEPS, SHORT, INTERVAL = 200, 90, 20
PAUSE_S = 0.1
_JOB = """\
steps = {steps}
replicas = 2
stages = 2
microbatches = 2
seed = 1

[model]
preset = "gpt-tiny"

[data]
build = "unhurried:data"
pause_s = {pause_s}

[optimizer]
decay = "constant"

[checkpoint]
folder = "{folder}"
interval = {interval}
"""
_DATA = '''\
"""Text of a made-up language, which takes its time."""

import time

from everstep.engine.datasets.data import Synthetic


class Unhurried:
    def __init__(self, inner, pause_s):
        self.inner, self.pause_s = inner, pause_s

    def batch(self, step, microbatch):
        time.sleep(self.pause_s)
        return self.inner.batch(step, microbatch)


def data(pause_s):
    return Unhurried(Synthetic(vocab=256, sequence=64, rows=2, seed=1), pause_s)
'''


_SCRIPT = '''\
"""All ranks add, rank 0 writes a line per step, and saves every 20 and on SIGTERM."""

import json, os, pathlib, signal, sys, time

import torch
import torch.distributed as dist

folder, steps, told = pathlib.Path(sys.argv[1]), int(sys.argv[2]), []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
dist.init_process_group("gloo")
first = int((folder / "saved").read_text()) + 1 if (folder / "saved").exists() else 1
for step in range(first, steps + 1):
    total = torch.tensor([1.0, float(len(told))])
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        line = {"step": step, "world": int(total[0]), "at": time.time(), "job": os.environ["SLURM_JOB_ID"]}
        with open(folder / "steps", "a") as file:
            print(json.dumps(line), file=file)
        if step % 20 == 0 or total[1]:
            (folder / "saving").write_text(str(step))
            os.replace(folder / "saving", folder / "saved")
    if total[1]:
        sys.exit(0)
    time.sleep(0.1)
dist.destroy_process_group()
'''


class Stage:
    """A Slurm, a folder that its nodes share, and what is said meanwhile."""

    def __init__(self, slurm: SlurmCluster, folder: Path, say: Callable[[str], None]) -> None:
        self.slurm, self.folder, self.say = slurm, folder, say
        (folder / "unhurried.py").write_text(_DATA)

    def job_file(self, name: str, *, steps: int = STEPS, pause_s: float = PAUSE_S) -> Path:
        path = self.folder / f"{name}.toml"
        checkpoints = self.folder / f"{name}-checkpoints"
        path.write_text(_JOB.format(steps=steps, interval=INTERVAL, folder=checkpoints, pause_s=pause_s))
        return path

    @cached_property
    def clean(self) -> dict[int, float]:
        began = time.monotonic()
        outcome = run_job(load_job(self.job_file("clean", pause_s=0.0)))
        if outcome.failure is not None:
            raise RuntimeError(outcome.failure)
        rows = outcome.by_step()
        self.say(f"a clean run of {len(rows)} steps without Slurm took {time.monotonic() - began:.0f} s")
        return {step: row.loss for step, row in rows.items()}


@dataclass
class Launched:
    """One run, watched from outside."""

    stage: Stage
    name: str
    number: str
    run: Path
    steps: int
    began: float = field(default_factory=time.time)
    earlier: tuple[Path, ...] = ()  # runs of the same task that it continues

    def say(self, line: str) -> None:
        self.stage.say(f"{time.time() - self.began:6.1f} s  {line}")

    @property
    def client(self) -> Client:
        life = newest(self.run)
        return Client(address=life.place, token=life.token)

    def status(self) -> Any:
        return self.client.get("/v1/status")

    def node(self, name: str) -> Any:
        return next(node for node in self.status()["nodes"] if node["node"] == name)

    def task(self, rows: int = 1) -> Any:
        return self.client.get(f"/v1/tasks/{self.name}?rows={rows}")

    def until(self, true: Callable[[], object], what: str, within_s: float = 120.0) -> Any:
        def safely() -> object:
            try:
                return true()
            except Exception:  # no coordinator yet, or another one soon
                return None

        try:
            return self.stage.slurm.until(safely, what, within_s=within_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.words()}") from None

    def step_reached(self, step: int, within_s: float = 120.0) -> None:
        self.until(lambda: self.task()["step"] >= step, f"step {step}", within_s)

    def all_members(self) -> None:
        def all_there() -> bool:
            seats = self.task()["seats"]
            return len(seats) == 4 and all(seat["state"] == "member" for seat in seats)

        self.until(all_there, "every place is filled by a member")

    def rows(self) -> list[dict[str, Any]]:
        """Of all lives, as they were written."""
        runs = (*self.earlier, self.run)
        folders = [*(one for run in runs for one in sorted(run.glob("state-*")))]
        folders.append(self.stage.folder / "elsewhere")
        paths = [path for folder in folders for path in folder.glob(f"tasks/{self.name}.jsonl")]
        return [json.loads(line) for path in paths for line in path.read_text().splitlines()]

    def first_step_after(self, at: float) -> dict[str, Any]:
        found: dict[str, Any] = self.until(
            lambda: next((row for row in self.rows() if row["at"] > at + 0.001), None), "a step after it"
        )
        return found

    def squeue(self) -> str:
        told = self.stage.slurm.run("squeue", "--noheader", "--format=%i %j %T %N %r")
        return " | ".join(told.splitlines())

    def words(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}"
            for path in sorted([*self.run.glob("logs/*"), *self.run.glob("*.out")])
            if path.is_file()
        )

    def said_by_keepers(self) -> None:
        """What the keepers wrote down, into the transcript."""
        for path in sorted(self.run.glob("logs/keeper-*.log")):
            node = path.stem.removeprefix("keeper-")
            for line in path.read_text().splitlines():
                self.stage.say(f"    keeper of {node}, {line}")

    def finished(self) -> dict[str, Any]:
        """Until Slurm has let the job go; then what must hold of any run."""
        self.until(lambda: newest(self.run).exit_code is not None, "the task is over", 240)
        self.until(lambda: self.number not in self.squeue().split(), "Slurm has let the job go", 60)
        state = self.stage.slurm.run("scontrol", "show", "job", self.number).split("JobState=")[1].split()[0]
        losses = [(row["step"], row["loss"]) for row in self.rows()]
        wrong = sorted({step for step, loss in losses if loss != self.stage.clean[step]})
        told = {
            "exit": newest(self.run).exit_code,
            "steps_asked": self.steps,
            "slurm_state": state,
            "steps": len(dict(losses)),
            "steps_done_again": len(losses) - len(dict(losses)),
            "losses_differing": len(wrong),
        }
        self.say(
            f"finished: {told['steps']} of {self.steps} steps, {told['losses_differing']} losses differ from "
            f"the clean run's, Slurm calls the job {state}"
        )
        self.said_by_keepers()
        return told


def launch(
    stage: Stage,
    name: str,
    *,
    steps: int = STEPS,
    coordinator: str = "",
    token: str = "",
    earlier: tuple[Path, ...] = (),
) -> Launched:
    run, job_file = stage.folder / f"{name}-run{len(earlier) or ''}", stage.job_file(name, steps=steps)
    shown = ["launch", "slurm", f"{name}.toml", "--nodes", "4"]
    shown += ["--coordinator", coordinator] if coordinator else []
    words = [*shown[:2], str(job_file), *shown[3:], "--run", str(run), "--watch", "1", "--json"]
    environment = stage.slurm.environment | ({"EVERSTEP_TOKEN": token} if token else {})
    done = subprocess.run([*EVERSTEP, *words], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    number = json.loads(done.stdout)["job"]
    launched = Launched(stage, name, number, run, steps, earlier=earlier)
    return _started(stage, launched, f"everstep {' '.join(shown)}")


def sbatch(stage: Stage, name: str, *, steps: int) -> Launched:
    """The same by the plain script."""
    run, job_file = stage.folder / f"{name}-run", stage.job_file(name, steps=steps)
    given = {"EVERSTEP_RUN": str(run), "EVERSTEP": " ".join(EVERSTEP)}
    command = ["sbatch", "--parsable", "--nodes=4", f"--output={stage.folder / 'sbatch.out'}"]
    done = subprocess.run(
        [*command, str(SCRIPT), str(job_file), "--watch", "1"],
        env=stage.slurm.environment | given,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    started = Launched(stage, name, done.stdout.strip(), run, steps)
    return _started(stage, started, f"sbatch --nodes=4 examples/everstep.sbatch {name}.toml")


def _started(stage: Stage, launched: Launched, shown: str) -> Launched:
    launched.say(f"$ {shown}      job {launched.number}")
    launched.step_reached(10)
    launched.all_members()
    launched.say(f"training, step {launched.task()['step']}; {launched.squeue()}")
    return launched


# ------------------------------------------------------------------ what is shown


def lost_and_returned(stage: Stage, name: str, victim: str) -> dict[str, Any]:
    """A node loses its power, training heals, Slurm notices, the node returns and takes part."""
    one = launch(stage, name)
    leader = one.client.address[1:] and Path(one.client.address[1:]).read_text().strip()
    told: dict[str, Any] = {"victim": victim}
    step = one.task()["step"]
    killed_at = time.time()
    killed = stage.slurm.kill_node(victim)
    one.say(f"SIGKILL to node {victim}, in step {step + 1}: {', '.join(sorted(set(killed)))}")

    row = one.first_step_after(killed_at + 0.2)
    told["healed_s"] = round(row["at"] - killed_at, 2)
    now = Path(one.client.address[1:]).read_text().strip()
    moved = f"; the coordinator has moved from {leader} to {now}" if now != leader else ""
    one.say(f"healed: step {row['step']} is on record {told['healed_s']:.1f} s after the kill{moved}")
    told["coordinator_moved"] = now != leader
    one.until(lambda: one.node(victim)["state"] == "gone", f"{victim} is gone")
    one.say(f"everstep: node {victim} is gone: {one.node(victim)['because']}")

    one.until(lambda: victim not in _nodes_of(stage, one.number), "Slurm takes the node out of the job")
    told["slurm_noticed_s"] = round(time.time() - killed_at, 1)
    one.say(f"Slurm noticed {told['slurm_noticed_s']:.0f} s after the kill: {one.squeue()}")

    stage.slurm.start_node(victim)
    returned_at = time.time()
    one.say(f"slurmd of {victim} is started again")
    one.until(lambda: one.node(victim)["state"] == "up" and one.node(victim)["workers"], f"{victim} is back")
    one.say(f"everstep: node {victim} is up: {one.node(victim)['because']}; {one.squeue()}")
    one.all_members()
    told["returned_s"] = round(time.time() - returned_at, 1)
    told["step_at_return"] = one.task()["step"]
    one.say(f"its worker takes part, {told['returned_s']:.1f} s after its slurmd, step {one.task()['step']}")
    task = one.task()
    told["incidents_open"] = len(one.status()["incidents"]["open"])
    return told | one.finished() | {"before_the_end": task["step"] < STEPS}


def drained(stage: Stage) -> dict[str, Any]:
    """An administrator drains a node and gives it back; the steps of another end by themselves.

    The coordinator runs outside the job.
    """
    with _coordinator_elsewhere(stage) as (address, token):
        one = launch(stage, "drain", coordinator=address, token=token)
        drained_at = time.time()
        stage.slurm.run("scontrol", "update", "nodename=n2", "state=drain", "reason=the fan is loud")
        one.say("$ scontrol update nodename=n2 state=drain reason='the fan is loud'")
        one.until(lambda: one.node("n2")["state"] == "draining" and not one.node("n2")["workers"], "n2 empty")
        told: dict[str, Any] = {"drained_s": round(time.time() - drained_at, 1)}
        one.say(f"no worker is left on n2 after {told['drained_s']:.1f} s; {one.squeue()}")
        resumed_at = time.time()
        stage.slurm.run("scontrol", "update", "nodename=n2", "state=resume")
        one.say("$ scontrol update nodename=n2 state=resume")
        one.until(lambda: one.node("n2")["state"] == "up" and one.node("n2")["workers"], "n2 is used again")
        one.all_members()
        told["readmitted_s"] = round(time.time() - resumed_at, 1)
        one.say(f"n2 takes part again after {told['readmitted_s']:.1f} s; {one.squeue()}")

        ended_at = time.time()
        ended = stage.slurm.kill_steps("n4")
        one.say(f"SIGKILL on n4, but not to its slurmd: {', '.join(sorted(set(ended)))}")
        one.until(lambda: one.node("n4")["state"] == "gone", "n4 is gone")
        one.until(lambda: one.node("n4")["state"] == "up" and one.node("n4")["workers"], "n4 is used again")
        one.all_members()
        told["keeper_started_again_s"] = round(time.time() - ended_at, 1)
        one.say(f"n4 takes part again after {told['keeper_started_again_s']:.1f} s; {one.squeue()}")
        return told | {"before_the_end": one.task()["step"] < STEPS} | one.finished()


@contextlib.contextmanager
def _coordinator_elsewhere(stage: Stage) -> Iterator[tuple[str, str]]:
    """As on a login node; its address and its token."""
    token, folder = secrets.token_urlsafe(16), stage.folder / "elsewhere"
    with (stage.folder / "elsewhere.log").open("ab") as log:
        process = subprocess.Popen(
            [*EVERSTEP, "coordinator", "--port", "0", "--state", str(folder), "--json"],
            env=os.environ | {"EVERSTEP_TOKEN": token},
            stdout=subprocess.PIPE,
            stderr=log,
        )
    assert process.stdout is not None
    told = b""
    while not told.rstrip().endswith(b"}"):
        told += process.stdout.readline() or b"}"
    try:
        yield json.loads(told)["address"], token
    finally:
        process.terminate()
        process.wait()


def requeued(stage: Stage) -> dict[str, Any]:
    """By plain sbatch. Slurm ends the whole job and starts it again: it goes on from its checkpoint."""
    one = sbatch(stage, "requeue", steps=SHORT)
    one.step_reached(2 * INTERVAL + 5)
    at, step = time.time(), one.task()["step"]
    stage.slurm.run("scontrol", "requeue", one.number)
    one.say(f"$ scontrol requeue {one.number}      at step {step}")
    one.until(lambda: newest(one.run).attempt == 1, "its second life")
    one.until(lambda: list(one.run.glob("state-1/tasks/*.jsonl")), "a step of its second life")
    row = one.first_step_after(at + 6)
    told: dict[str, Any] = {"requeued_at_step": step, "resumed_from_step": row["step"] - 1}
    told["away_s"] = round(row["at"] - at, 1)
    one.say(
        f"goes on from the checkpoint of step {row['step'] - 1}, {told['away_s']:.0f} s after the requeue"
    )
    return told | one.finished()


def cancelled(stage: Stage) -> dict[str, Any]:
    """By SIGTERM to all nodes at once, as a time limit or a preemption ends a job; it is submitted again."""
    one = launch(stage, "cancel", steps=SHORT)
    one.step_reached(INTERVAL + 5)
    at = time.time()
    stage.slurm.run("scancel", one.number)
    one.say(f"$ scancel {one.number}")
    one.until(lambda: one.number not in stage.slurm.run("squeue", "--noheader", "--format=%i"), "it is gone")
    told: dict[str, Any] = {"left_s": round(time.time() - at, 1)}
    reached = max(row["step"] for row in one.rows())
    one.say(f"Slurm has let it go after {told['left_s']:.1f} s, at step {reached}")
    one.said_by_keepers()
    again = launch(stage, "cancel", steps=SHORT, earlier=(one.run,))
    first = again.until(
        lambda: min(r["step"] for r in again.rows() if r["at"] > again.began), "its first step"
    )
    told |= {"cancelled_at_step": reached, "resumed_from_step": first - 1, "steps_lost": reached - first + 1}
    return told | again.finished()


@dataclass
class ScriptRun:
    """The script under `everstep launch slurm`, in its folder."""

    stage: Stage
    folder: Path
    steps: int
    run: Path
    number: str = ""

    def launch(self) -> None:
        shown = ["launch", "slurm", "--nodes", "3:4", "train.py"]
        words = [*shown[:4], "--run", str(self.run), "--watch", "1", "--json", str(self.folder / "train.py")]
        words += ["--", str(self.folder), str(self.steps)]
        done = subprocess.run(
            [*EVERSTEP, *words], env=self.stage.slurm.environment, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        self.number = json.loads(done.stdout)["job"]
        self.stage.say(f"$ everstep {' '.join(shown)}      job {self.number}")

    def lines(self, since: float = 0.0) -> list[dict[str, Any]]:
        path = self.folder / "steps"
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in found if line["at"] > since]

    def until(self, true: Callable[[], object], what: str) -> Any:
        try:
            return self.stage.slurm.until(true, what, within_s=120.0)
        except TimeoutError as error:
            words = sorted([*self.run.glob("logs/*.log"), *self.run.glob("*.out")])
            said = "".join(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}\n" for path in words)
            raise TimeoutError(f"{error}\n{said}") from None

    def first(self, since: float, *, world: int) -> float:
        """When the first step of so many ranks was done."""
        found = self.until(
            lambda: next((line for line in self.lines(since) if line["world"] == world), None),
            f"a step of {world} ranks",
        )
        return float(found["at"])


def script(stage: Stage) -> dict[str, Any]:
    """A node is lost and returns; Slurm warns (--signal); the job is cancelled and submitted again."""
    folder = stage.folder / "script"
    folder.mkdir()
    (folder / "train.py").write_text(_SCRIPT)
    one = ScriptRun(stage, folder, 1500, stage.folder / "script-run")
    one.launch()
    one.first(0.0, world=4)
    one.until(lambda: one.lines()[-1]["step"] >= 25, "step 25")
    killed_at, before = time.time(), one.lines()[-1]["step"]
    killed = stage.slurm.kill_node("n3")
    stage.say(f"SIGKILL to node n3, after step {before}: {', '.join(sorted(set(killed)))}")
    one.until(lambda: any(line["step"] > before for line in one.lines(killed_at + 0.3)), "a step beyond it")
    row = next(line for line in one.lines(killed_at + 0.3) if line["step"] > before)
    again = sum(line["step"] <= before for line in one.lines(killed_at + 0.3))
    told: dict[str, Any] = {"healed_s": round(row["at"] - killed_at, 1), "script_world": row["world"]}
    stage.say(f"past it after {told['healed_s']:.1f} s with {row['world']} ranks; steps done again: {again}")
    stage.slurm.start_node("n3")
    back_at = time.time()
    told["returned_s"] = round(one.first(back_at, world=4) - back_at, 1)
    stage.say(f"four ranks again {told['returned_s']:.1f} s after its slurmd")

    warned_at = time.time()
    stage.slurm.run("scancel", "--signal=USR1", one.number)
    stage.say(f"$ scancel --signal=USR1 {one.number}      as --signal=USR1@120 does")

    def is_left() -> bool:
        last = one.lines()[-1]
        return int((folder / "saved").read_text()) == last["step"] and time.time() - last["at"] > 2

    one.until(is_left, "the script has saved its last step and does no more")
    last = one.lines()[-1]
    told |= {"left_s": round(last["at"] - warned_at, 1), "cancelled_at_step": last["step"]}
    stage.say(f"warned: step {last['step']} is saved, the last one, {told['left_s']:.1f} s after the signal")
    stage.slurm.run("scancel", one.number)
    one.until(lambda: one.number not in stage.slurm.run("squeue", "--noheader", "--format=%i"), "it is gone")
    one.until(lambda: set(stage.slurm.states().values()) == {"idle"}, "all nodes are idle again")

    resumed = ScriptRun(stage, folder, last["step"] + 60, stage.folder / "script-run1")
    resumed.launch()
    resumed_at = time.time()
    first = resumed.until(lambda: resumed.lines(resumed_at) or None, "its first step")[0]["step"]
    resumed.until(lambda: newest(resumed.run).exit_code is not None, "the task is over")
    resumed.until(
        lambda: resumed.number not in stage.slurm.run("squeue", "--noheader", "--format=%i"), "it is gone"
    )
    steps = {line["step"] for line in one.lines()}
    told |= {"resumed_from_step": first - 1, "steps_lost": last["step"] - first + 1}
    shown = stage.slurm.run("scontrol", "show", "job", resumed.number)
    told |= {"exit": newest(resumed.run).exit_code, "slurm_state": shown.split("JobState=")[1].split()[0]}
    told |= {
        "steps": len(steps),
        "steps_asked": resumed.steps,
        "steps_done_again": len(one.lines()) - len(steps),
    }
    stage.say(f"{told['steps']} of {resumed.steps} steps, Slurm calls the job {told['slurm_state']}")
    return told


def _nodes_of(stage: Stage, number: str) -> list[str]:
    from everstep.launch.slurm.slurm_text import expand

    return expand(stage.slurm.run("squeue", "--noheader", f"--jobs={number}", "--format=%N"))


SCENES: dict[str, Callable[[Stage], dict[str, Any]]] = {
    "node": lambda stage: lost_and_returned(stage, "node", "n3"),
    "first": lambda stage: lost_and_returned(stage, "first", "n1"),
    "drain": drained,
    "requeue": requeued,
    "cancel": cancelled,
    "script": script,
}


def failures(told: dict[str, dict[str, Any]]) -> list[str]:
    """What does not hold of what was promised."""
    found = []
    for name, scene in told.items():
        if scene["exit"] != 0 or scene["steps"] != scene["steps_asked"]:
            found.append(f"{name}: {scene['steps']} of {scene['steps_asked']} steps, exit {scene['exit']}")
        if scene.get("losses_differing"):
            found.append(f"{name}: {scene['losses_differing']} losses differ from the clean run's")
        if name not in ("requeue", "script") and scene["steps_done_again"]:
            found.append(f"{name}: {scene['steps_done_again']} steps were done twice")
        if scene.get("before_the_end") is False:
            found.append(f"{name}: training was over before the node was back")
    for name in ("cancel", "script"):
        if name in told and told[name]["steps_lost"]:
            found.append(f"{name}: {told[name]['steps_lost']} steps were lost")
    if "first" in told and not told["first"]["coordinator_moved"]:
        found.append("first: the coordinator was not on the first node")
    if "requeue" in told and told["requeue"]["resumed_from_step"] < INTERVAL:
        found.append("requeue: it did not go on from a checkpoint")
    return found


_ROWS = {
    "healed_s": "kill to the next step on record, s",
    "script_world": "ranks of the script without the node",
    "coordinator_moved": "the coordinator has moved",
    "slurm_noticed_s": "kill to Slurm's notice (SlurmdTimeout 5 s), s",
    "returned_s": "slurmd back to its worker takes part, s",
    "drained_s": "scontrol drain to the last worker gone, s",
    "readmitted_s": "scontrol resume to its worker takes part, s",
    "keeper_started_again_s": "keeper killed to its worker takes part, s",
    "left_s": "scancel to the end of the job; warning to the last step, s",
    "cancelled_at_step": "cancelled at step",
    "steps_lost": "steps lost",
    "requeued_at_step": "requeued at step",
    "resumed_from_step": "resumed from the checkpoint of step",
    "away_s": "requeue to the next step on record, s",
    "steps": "steps on record",
    "steps_done_again": "steps done again",
    "losses_differing": "losses that differ from a clean run's",
    "slurm_state": "what Slurm calls the job",
}


def table(told: dict[str, dict[str, Any]]) -> str:
    """One column a scene."""
    lines = [f"{'':50}" + "".join(f"{scene:>12}" for scene in told)]
    for key, words in _ROWS.items():
        if any(key in facts for facts in told.values()):
            cells = [str(facts.get(key, "-")) for facts in told.values()]
            lines.append(f"{words:50}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("scenes", nargs="*", choices=[*SCENES, []], help="default: all")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--transcript", type=Path, help="keep what was said")
    parser.add_argument("--keep", type=Path, help="keep the run's files in this folder")
    parser.add_argument("--skip", action="store_true", help="exit 0 with a reason where there is no Slurm")
    given = parser.parse_args()
    if gone := missing():
        reason = f"no {', '.join(gone)}; install munge, slurmctld, slurmd and slurm-client"
        print(f"skipped: {reason}" if given.skip else f"bench/slurm.py: {reason}.", file=sys.stderr)
        sys.exit(0 if given.skip else 2)
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, file=sys.stderr, flush=True)

    told: dict[str, dict[str, Any]] = {}
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was started is ended
    name = tempfile.mkdtemp(prefix="everstep-slurm-")  # short: the path of a Unix socket has 107 characters
    folder = Path(name)
    try:
        for part in ("slurm", "shared"):
            (folder / part).mkdir()
        with SlurmCluster(folder / "slurm") as slurm:
            version = slurm.run("sinfo", "--version")
            say(f"{version}, nodes {', '.join(slurm.nodes)}")
            stage = Stage(slurm, folder / "shared", say)
            for scene in given.scenes or SCENES:
                say(f"\n== {scene}")
                told[scene] = SCENES[scene](stage)
                slurm.until(lambda: set(slurm.states().values()) == {"idle"}, "all nodes are idle again")
    finally:
        if given.keep:
            shutil.copytree(folder / "shared", given.keep, dirs_exist_ok=True)
        if given.transcript:
            given.transcript.write_text("\n".join(lines).replace(name, "/shared") + "\n")
        shutil.rmtree(name, ignore_errors=True)
    wrong = failures(told)
    if given.json:
        print(json.dumps({"slurm": version, "scenes": told, "failures": wrong}, indent=2))
    else:
        print(table(told))
    for line in wrong:
        print(f"FAILED {line}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
