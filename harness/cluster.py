"""A cluster of real processes on this machine: a coordinator, agents, tasks; for benchmarks and tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from everstep.cli.client import Client
from everstep.core.cluster.snapshot import digest
from everstep.server.journal import JournalEntry, SqliteJournal
from everstep.server.term import Daemon

MEASURED_POLL_S = 0.02  # where what is waited for is also timed
CLOSE_S = 60.0  # a busy machine takes its time; an agent that is killed leaves its folder to the next one
GUARD = """while read -r pid && [ "$pid" != ended ]; do pids="$pids $pid"; done
[ "$pid" = ended ] || { kill -CONT $pids; kill $pids; sleep 10; kill -KILL $pids; } 2>/dev/null"""
ROOT = Path(__file__).parents[1]
EVERSTEP = [sys.executable, "-m", "everstep.cli.main"]


class Cluster:
    """Everything it starts, it ends. Files lie under `folder`."""

    def __init__(
        self,
        folder: Path,
        *,
        etcd: Sequence[str] = (),
        token: str = "harness",
        eager: bool = False,
        token_file: bool = False,
        program: Sequence[str] = EVERSTEP,
        options: Sequence[str] = (),
        poll_s: float = 0.1,
    ) -> None:
        """`eager`: no node is suspected, however often its workers are killed. `token_file`: the token is
        given by a file, so that it can be changed. `program`, `options`: of coordinators. `poll_s`: between
        two questions; each takes milliseconds of the cores that training needs.
        """
        self.folder, self.etcd, self.token, self.eager = folder, etcd, token, eager
        self.log_folder = folder
        self.preload = ""  # a library that agents and their workers load before all others
        self.program, self.options, self.poll_s = program, options, poll_s
        self.token_file = folder / "token" if token_file else None
        self.set_token(token)
        self.coordinators: dict[str, subprocess.Popen[bytes]] = {}
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.addresses: dict[str, str] = {}
        self._guard = subprocess.Popen(
            ["bash", "-c", GUARD], stdin=subprocess.PIPE, start_new_session=True, bufsize=0
        )

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def set_token(self, token: str) -> None:
        self.token = token
        if self.token_file is not None:
            draft = self.token_file.with_suffix(".new")
            draft.touch(mode=0o600)
            draft.write_text(token)
            draft.replace(self.token_file)

    def close(self) -> None:
        everyone = [*self.agents.values(), *self.coordinators.values()]
        for process in everyone:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in everyone:
            try:
                process.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._tell_guard("ended")
        self._guard.wait()

    def _tell_guard(self, word: object) -> None:
        """A process of its own, which ends what was started when this one dies without closing."""
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(f"{word}\n".encode())

    # -------------------------------------------------------------- starting and killing

    def start_coordinator(self, name: str = "first", *, port: int = 0, wait: bool = True) -> str:
        """Again on its old port, if it ran before."""
        if name in self.addresses:
            port = int(self.addresses[name].rpartition(":")[2])
        command = [*self.program, "coordinator", "--port", str(port), "--json", "--name", name]
        if self.eager:
            command += ["--restarts-per-node", "1000000"]
        command += [*self.options, *self._token_option()]
        command += ["--state", str(self.folder / f"state-{'shared' if self.etcd else name}")]
        if self.etcd:
            command += ["--etcd", ",".join(self.etcd)]
        log = (self.log_folder / f"coordinator-{name}.log").open("ab")
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, env=self._environment(), start_new_session=True
        )
        self.coordinators[name] = process
        self._tell_guard(process.pid)
        assert process.stdout is not None
        told = b""
        while not told.rstrip().endswith(b"}"):
            line = process.stdout.readline()
            if not line:
                raise RuntimeError((self.log_folder / f"coordinator-{name}.log").read_text()[-2000:])
            told += line
        self.addresses[name] = json.loads(told)["address"]
        if wait:
            self.until(lambda: _healthy(self.addresses[name]), "the coordinator leads")
        return self.addresses[name]

    def start_agent(
        self,
        node: str,
        *,
        slots: int,
        through: str | None = None,
        grace: float = 0.0,
        host: str = "",
        more: Sequence[str] = (),
    ) -> None:
        coordinators = through or ",".join(self.addresses.values())
        command = [*EVERSTEP, "agent", "--node", node, "--slots", str(slots), "--coordinator", coordinators]
        command += ["--grace", f"{grace:g}", *(["--host", host] if host else []), *more]
        command += self._token_option()
        log = (self.log_folder / f"agent-{node}.log").open("ab")
        environment = self._environment() | ({"LD_PRELOAD": self.preload} if self.preload else {})
        self.agents[node] = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        self._tell_guard(self.agents[node].pid)

    def kill_coordinator(self, name: str = "first") -> None:
        self.coordinators[name].kill()
        self.coordinators[name].wait()

    def signal_node(self, node: str, number: int) -> None:
        """To the agent and everything below it: what a node's death or freeze is to the others."""
        for pid in [*descendants(self.agents[node].pid), self.agents[node].pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _environment(self) -> dict[str, str]:
        given = {"EVERSTEP_TOKEN": self.token} if self.token and self.token_file is None else {}
        return {**os.environ, "OMP_NUM_THREADS": "1"} | given

    def _token_option(self) -> list[str]:
        return [] if self.token_file is None else ["--token-file", str(self.token_file)]

    # -------------------------------------------------------------- asking

    @property
    def client(self) -> Client:
        """Of the only coordinator, or of the one that leads."""
        known = list(self.addresses.values())
        address = known[0] if len(known) == 1 else next(one for one in known if _healthy(one))
        return Client(address=address, token=self.token)

    def submit(self, job: dict[str, Any], name: str = "job", **more: Any) -> Any:
        return self.client.post("/v1/tasks", {"name": name, "job": job, **more})

    def task(self, name: str = "job") -> Any:
        return self.client.get(f"/v1/tasks/{name}")

    def incidents(self) -> list[Any]:
        found: list[Any] = self.client.get("/v1/incidents")
        return found

    def workers(self, name: str = "job") -> dict[str, Any]:
        """By worker: its node, pid and beacon."""
        return {row["worker"]: row for row in self.client.get(f"/v1/tasks/{name}/readings")["workers"]}

    def losses(self, name: str = "job") -> dict[int, float]:
        rows = self.task(name)["rows"]
        return {row["step"]: row["loss"] for row in rows}

    def until(self, true: Callable[[], Any], what: str, *, within_s: float = 120.0) -> Any:
        """Ask again and again, with a deadline; what it said when it was true."""
        deadline = time.monotonic() + within_s
        while True:
            with contextlib.suppress(Exception):
                if (told := true()) not in (None, False):
                    return told
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {within_s:g} s: {what}\n{self.logs()}")
            time.sleep(self.poll_s)

    def nodes_up(self, number: int) -> None:
        def up() -> bool:
            nodes = self.client.get("/v1/status")["nodes"]
            return sum(node["state"] == "up" and node["connected"] for node in nodes) >= number

        self.until(up, f"{number} nodes are up")

    def all_members(self, name: str = "job") -> None:
        """Every place is filled by a worker that takes part."""

        def all_there() -> bool:
            task = self.task(name)
            there = [seat for seat in task["seats"] if seat["state"] == "member"]
            return len(there) == task["places"]

        self.until(all_there, "every place is filled by a member")

    def step_reached(self, step: int, name: str = "job", *, within_s: float = 180.0) -> None:
        self.until(lambda: self.task(name)["step"] >= step, f"step {step} of {name}", within_s=within_s)

    def finished(self, name: str = "job", *, within_s: float = 240.0) -> Any:
        def over() -> Any:
            told = self.task(name)
            return told if told["state"] in ("finished", "failed", "cancelled") else None

        return self.until(over, f"{name} is over", within_s=within_s)

    def settled(self) -> tuple[int, str]:
        """Entries in the journal and the state's hash, once nothing is added any more."""
        last: list[Any] = [None]

        def same_twice() -> Any:
            now = self.client.get("/v1/digest")
            same, last[0] = now == last[0], now
            time.sleep(0.3)
            return (now["journal"], now["digest"]) if same else None

        found: tuple[int, str] = self.until(same_twice, "the journal has stopped growing")
        return found

    def logs(self) -> str:
        """What one wants to see when something did not come true."""
        with contextlib.suppress(Exception):
            names = [task["task"] for task in self.client.get("/v1/status")["tasks"]]
            state = [{**self.task(name), "rows": [], "readings": self.workers(name)} for name in names]
            return f"{json.dumps(state, indent=1)}\n{self._logs()}"
        return self._logs()

    def _logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.log_folder.glob("*.log"))
        )


class _Beginning(SqliteJournal):
    """A journal without the entries that came after this number."""

    def __init__(self, path: Path, upto: int) -> None:
        super().__init__(path)
        self._upto = upto

    async def entries(self, after: int = 0) -> list[JournalEntry]:
        return [entry for entry in await super().entries(after) if entry.number <= self._upto]


def replayed(folder: Path, upto: int) -> tuple[int, str]:
    """The same of a journal that nobody has open, read from the beginning up to this entry: more may have
    been written between the last look at a coordinator and its end.
    """

    async def read() -> tuple[int, str]:
        journal = _Beginning(folder / "journal.sqlite", upto)
        await journal.open()
        daemon = Daemon(journal, folder=folder, say=lambda line: None)
        term = await daemon.begin()
        term.close()
        await journal.close()
        return term.driver.number, digest(term.machine)

    return asyncio.run(read())


def _healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/v1/health", timeout=2) as answer:
            return bool(json.load(answer)["leads"])
    except (OSError, ValueError):
        return False


def descendants(pid: int) -> Iterator[int]:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield from descendants(int(child))
        yield int(child)


def small_job(folder: Path, *, steps: int, replicas: int = 2, stages: int = 2, **more: Any) -> dict[str, Any]:
    """A job of a fraction of a second a step."""
    return {
        "base": str(folder),
        "replicas": replicas,
        "stages": stages,
        "microbatches": 4,
        "steps": steps,
        "model": {"preset": "gpt-tiny"},
        "data": {"kind": "synthetic"},
        **more,
    }


def paced_job(folder: Path, *, steps: int, rest_s: float = 0.05, **more: Any) -> dict[str, Any]:
    """A small job whose steps take as long, but compute next to nothing: for scenes in which training goes on
    beside what is tried. `rest_s`: so long takes the data of each microbatch.
    """
    options = {"preset": "gpt-tiny", "rows": 1, "rest_s": rest_s, "sequence": 16}
    data = {"build": "harness.slow_data:SlowSynthetic", "rows": 1, "sequence": 16, "options": options}
    return small_job(folder, steps=steps, data=data, **more) | {"base": str(ROOT)}
