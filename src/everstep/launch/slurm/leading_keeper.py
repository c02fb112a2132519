"""What the leading keeper does beside keeping: it gives the task, watches Slurm, and ends the job.

All of it may be done twice, by a leader and by the one that follows it: a task is given only if it is not
there, spares are found by asking Slurm for their name, and what was drained for Slurm's sake is in the run's
folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from everstep.errors import EverstepError, UserError
from everstep.launch.client import Client
from everstep.launch.slurm import node_rules
from everstep.launch.slurm import shell as slurm
from everstep.launch.slurm.run import Run
from everstep.launch.slurm.slurm_text import SlurmJob

if TYPE_CHECKING:
    from everstep.launch.slurm.slurm_keeper import SlurmKeeperSettings

LOOK_EVERY_S = 1.0
AGAIN_FIRST_S, AGAIN_MOST_S = 60.0, 600.0  # between two starts of one node's keeper
_OVER = ("finished", "failed", "cancelled")


class Leader:
    def __init__(
        self, settings: SlurmKeeperSettings, run: Run, *, address: str, say: Callable[[str], None]
    ) -> None:
        self.settings, self.run, self.address, self.say = settings, run, address, say
        self._clients = [
            Client(address=one, token=run.token, ca=settings.ca) for one in address.split(",") if one
        ]
        self.client = self._clients[0]
        self._published = False
        self._complained = ""
        self._look_at = self._watch_at = 0.0
        self._away_since: dict[str, float] = {}
        self._start_after: dict[str, tuple[float, float]] = {}  # when, and how long to wait the next time
        self._asked, self._asked_at = 0, -1e9
        self._steps: list[subprocess.Popen[bytes]] = []

    def turn(self, now: float) -> None:
        """Every now and then; nothing here may end the keeper, whose agent is at work."""
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        status = self._status()
        if status is None:
            return  # it starts, or is started again
        try:
            self._serve(status, now)
            self._complained = ""
        except EverstepError as error:
            if str(error) != self._complained:  # once, and not every second for as long as it lasts
                self.say(str(error))
            self._complained = str(error)

    def _status(self) -> Any:
        """Of whichever coordinator leads, where there are several."""
        for client in [self.client, *self._clients]:
            with contextlib.suppress(EverstepError):
                status = client.get("/v1/status")
                self.client = client
                return status
        return None

    def _serve(self, status: Any, now: float) -> None:
        if not self._published:
            self.run.publish(self.address)
            self._published = True
        task = next((t for t in status["tasks"] if t["task"] == self.task), None)
        if task is None:
            self._give()
        elif task["state"] in _OVER:
            self._finish(task)
        elif now >= self._watch_at:
            self._watch_at = now + self.settings.watch_s
            self._watch(status, now)

    def close(self) -> None:
        for step in self._steps:
            if step.poll() is None:
                step.terminate()

    # -------------------------------------------------------------- the task

    @property
    def task(self) -> str:
        return self.settings.job_file.stem

    def _give(self) -> None:
        try:
            submitted = self.client.post("/v1/tasks", {"name": self.task, **self._body()})
        except UserError as error:
            self.say(f"the task cannot be submitted: {error}")
            self.run.end(2)
            return
        self.say(f"task {self.task} is {submitted['state']}: {submitted['because']}")

    def _body(self) -> dict[str, Any]:
        from everstep.job.job import load_job

        file = self.settings.job_file
        if file.suffix == ".json":  # a script
            return {"ranks": json.loads(file.read_text())}
        return {"job": load_job(file).to_dict()}

    def _finish(self, task: Any) -> None:
        self.say(f"task {self.task} is {task['state']}: {task['because']}")
        for spare in slurm.jobs_named(self.spares_name):
            slurm.cancel(spare.number)
        job = slurm.job(self.settings.job)
        of_script = (task.get("script") or {}).get("exit_code") or 1
        self.run.end(0 if task["state"] == "finished" else of_script)
        if job is not None and not job.has_batch_script:
            # No process is left to end the job by ending; what it says of itself then is CANCELLED.
            self.say(f"job {job.number} lost its batch script with node {job.batch_host}: it is cancelled")
            slurm.cancel(job.number)

    # -------------------------------------------------------------- Slurm

    @property
    def spares_name(self) -> str:
        return f"everstep-{self.settings.job}-{self.settings.attempt}"

    def _watch(self, status: Any, now: float) -> None:
        job = slurm.job(self.settings.job)
        if job is None or not job.runs:
            return  # it is being ended; so are we
        spares = slurm.jobs_named(self.spares_name)
        members = {
            node["node"]: node_rules.AllocatedNode(state=node["state"], connected=node["connected"])
            for node in status["nodes"]
        }
        self._note_who_is_away(job.nodes, members, now)
        ours = [*job.nodes, *(node for spare in spares for node in spare.nodes)]
        view = node_rules.View(
            wanted=self.run.wanted,
            job=job,
            nodes=slurm.nodes(ours),
            spares=spares,
            members=members,
            drained=self.run.drained,
            away_s={node: now - since for node, since in self._away_since.items()},
            asked=self._asked,
            asked_s_ago=now - self._asked_at,
        )
        for action in node_rules.decide(view):
            self._carry_out(action, job, now)
        self._steps = [step for step in self._steps if step.poll() is None]

    def _note_who_is_away(
        self, nodes: tuple[str, ...], members: dict[str, node_rules.AllocatedNode], now: float
    ) -> None:
        away = [node for node in nodes if node not in members or not members[node].connected]
        self._away_since = {node: self._away_since.get(node, now) for node in away}

    def _carry_out(self, action: node_rules.Action, job: SlurmJob, now: float) -> None:
        match action:
            case node_rules.DrainNode(node=node):
                self.say(f"drains {node}: {action.because}")
                self.run.remember_drained(self.run.drained | {node})
                self.client.post(f"/v1/nodes/{node}/drain")
            case node_rules.ReadmitNode(node=node):
                self.say(f"readmits {node}: {action.because}")
                self.client.post(f"/v1/nodes/{node}/readmit")
                self.run.remember_drained(self.run.drained - {node})
            case node_rules.StartKeeper(node=node):
                self._start_keeper(node, action.because, now)
            case node_rules.AskForNodes(count=count):
                self._ask_for(count, action.because, job, now)
            case node_rules.GiveBack(job=number):
                self.say(f"cancels the request {number}: {action.because}")
                slurm.cancel(number)

    def _start_keeper(self, node: str, because: str, now: float) -> None:
        at, wait = self._start_after.get(node, (0.0, AGAIN_FIRST_S))
        if now < at:
            return
        self._start_after[node] = (now + wait, min(wait * 2, AGAIN_MOST_S))
        self.say(f"restarts the keeper of {node}: {because}")
        command = [sys.executable, "-m", "everstep.cli.main", "launch", "node", *self._same_run()]
        command += ["--rank", str(self.run.wanted)]
        log = self.run.logs / f"step-{node}.log"
        self._steps.append(slurm.start_step(self.settings.job, node, command, log))

    def _ask_for(self, count: int, because: str, job: SlurmJob, now: float) -> None:
        options = [*node_rules.like(job), "--nodes=1", f"--job-name={self.spares_name}", "--no-requeue"]
        options += [f"--output={self.run.logs / 'spare-%j.out'}"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SLURMD_"))}
        environment |= {"EVERSTEP_RUN": str(self.run.folder)}
        environment |= {k: v for k, v in os.environ.items() if k == "SLURM_CONF"}
        arguments = [*self._same_run()[2:], "--spare-of", self.settings.job]
        arguments += ["--attempt", str(self.settings.attempt)]
        for _ in range(count):
            number = slurm.submit(options, arguments, environment)
            self._asked, self._asked_at = self._asked + 1, now
            self.say(f"asks Slurm for a node, by job {number}: {because}")

    def _same_run(self) -> list[str]:
        settings = self.settings
        options = ["--run", str(self.run.folder), "--port", str(settings.port)]
        options += ["--watch", f"{settings.watch_s:g}"]
        options += ["--slots", str(settings.slots)] if settings.slots_given else []
        options += ["--coordinator", settings.coordinator] if settings.coordinator else []
        options += ["--ca", str(settings.ca)] if settings.ca else []
        options += ["--interface", settings.interface] if settings.interface else []
        return [*options, str(settings.job_file)]
