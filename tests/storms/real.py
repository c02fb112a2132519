"""A storm on real processes: everything of a cluster is killed or stopped at random while tasks train.

    python -m tests.storms.real --seed 7 --minutes 5
    python -m tests.storms.real --seed 7 --minutes 5 --json

One machine: a coordinator, three agents with three slots each, fork servers, and one task of each of three
kinds at a time, of different weights and shapes. From the seed are drawn: kills and stops of workers, agents,
whole nodes, fork servers and the coordinator; SIGTERM of agents, starts that hang; drains, pauses, resizes,
cancels, a new token; full disks of checkpoints and of logs, storage that hangs, an older journal put back.
After the given minutes everything is undone and the tasks have time to finish. Then it is checked:

    finished      every task that no one cancelled
    losses        of every step, to the last bit those of a run without failures
    rows          every step is in the task's step log, the last time with the loss above
    microbatches  as many committed as issued
    journal       read from the beginning it gives the coordinator's state
    left behind   no process, no shared memory, no temporary folder, no half-written checkpoint

Exit code 1 if one of them does not hold; the folder with all logs is then kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from everstep.job.job import Job
from everstep.launch.local.api import run_job

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also when run by path

from harness.cluster import MEASURED_POLL_S, Cluster, replayed, small_job
from tests.storms.real_faults import (
    GRACE_S,
    LOG_BYTES,
    NODES,
    SLOTS,
    STRIKES,
    JobKind,
    Storm,
    hung_storage,
    small_disk,
)

MARK = "EVERSTEP_STORM_MARK"
OWN_MOUNTS = "EVERSTEP_STORM_MOUNTS"
SHARED = Path("/dev/shm")
BEGAN = time.monotonic()
END_S = 25.0  # to check everything and to end
Say = Callable[[str], None]
CleanLosses = Callable[[], dict[str, dict[int, float]]]


def kinds(folder: Path, steps: int) -> dict[str, JobKind]:
    data = {"kind": "synthetic", "rows": 1, "sequence": 32}

    def job(replicas: int, stages: int, **more: Any) -> dict[str, Any]:
        made = small_job(folder, steps=steps, replicas=replicas, stages=stages)
        return made | {"data": data, "microbatches": 4 // replicas, **more}

    every = {"checkpoint": {"folder": "unset", "interval": 5, "keep": 2}}
    found = (
        JobKind(name="heavy", weight=4, job=job(2, 2, memory_interval=3, **every)),
        JobKind(name="middle", weight=2, job=job(2, 1, seed=1, **every)),
        JobKind(name="light", weight=1, job=job(1, 2, seed=2, **every)),
    )
    return {kind.name: kind for kind in found}


def clean_losses(kind: JobKind) -> dict[int, float]:
    outcome = run_job(Job.from_dict({**kind.job, "checkpoint": None}))
    return {step: row.loss for step, row in outcome.by_step().items()}


def all_clean_losses(steps: int, file: Path | None) -> dict[str, dict[int, float]]:
    """By kind of task. From the file, where there is one of as many steps; else it is written."""
    if file is not None and file.exists():
        known = json.loads(file.read_text())
        if known["steps"] == steps:
            return {kind: {int(s): x for s, x in rows.items()} for kind, rows in known["losses"].items()}
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for kind in kinds(Path(name), steps).values():
            _say(f"clean run of {kind.name} ...")
            found[kind.name] = clean_losses(kind)
    if file is not None:
        unfinished_file = file.with_suffix(f".{os.getpid()}")
        unfinished_file.write_text(json.dumps({"steps": steps, "losses": found}))
        unfinished_file.replace(file)
    return found


def marked() -> list[int]:
    """The processes that were started, directly or not, by this program."""
    wanted = f"{MARK}={os.environ[MARK]}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int(path.name) != os.getpid() and wanted in (path / "environ").read_bytes().split(b"\0"):
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                found += [int(path.name)] if state != "Z" else []
        except OSError:
            continue
    return found


def shared_memory() -> set[str]:
    """Only where it is our own: another storm beside this one has its segments there too."""
    if OWN_MOUNTS not in os.environ:
        return set()
    return {path.name for path in SHARED.glob("everstep*")} if SHARED.is_dir() else set()


def check_tasks(storm: Storm, clean: dict[str, dict[int, float]], state: Path) -> dict[str, list[str]]:
    wrong: dict[str, list[str]] = {"finished": [], "losses": [], "microbatches": [], "rows": []}
    for name, kind in storm.submitted.items():
        try:
            told = storm.cluster.client.get(f"/v1/tasks/{name}")
        except Exception as error:
            if name not in storm.cancelled:
                wrong["finished"].append(f"{name}: not known any more: {error}")
            continue
        losses = {row["step"]: row["loss"] for row in told["rows"]}
        if name not in storm.cancelled and told["state"] != "finished":
            wrong["finished"].append(f"{name}: {told['state']}: {told['because']}")
        is_whole = name not in storm.cancelled | storm.put_back
        if told["rows_lost"]:
            storm.rows_lost[name] = told["rows_lost"]
        lost = {step for first, last in told["rows_lost"] for step in range(first, last + 1)}
        if is_whole and set(losses) != set(clean[kind]) - lost:  # reports that were lost with their node
            wrong["rows"].append(f"{name}: rows of {len(losses)} of {len(clean[kind])} steps")
        apart = [step for step, loss in losses.items() if loss != clean[kind][step]]
        if apart:
            wrong["losses"].append(f"{name}: losses of steps {apart[:5]} are not those of the clean run")
        if told["microbatches"]["issued"] != told["microbatches"]["committed"]:
            wrong["microbatches"].append(f"{name}: microbatches {told['microbatches']}")
        restored = name in storm.put_back
        wrong["rows"] += check_rows(name, state / "tasks" / f"{name}.jsonl", losses, restored=restored)
    return wrong


def check_rows(name: str, path: Path, losses: dict[int, float], *, restored: bool) -> list[str]:
    """`restored`: to an older journal, so that the log has rows of which it does not know, and attempts are
    counted again from where it was.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    logged = {row["step"]: row["loss"] for row in lines}  # of a step done again the last line counts
    keys = [(row["step"], row["attempt"]) for row in lines]
    same = losses.items() <= logged.items() if restored else logged == losses
    wrong = [] if same else [f"{name}: the step log lacks rows, or has others"]
    twice = sorted({key for key in keys if keys.count(key) > (2 if restored else 1)})
    return wrong + ([f"{name}: rows of (step, attempt) {twice[:5]} are there twice"] if twice else [])


def left_behind(storm: Storm, before: set[str], temporary: Path) -> list[str]:
    deadline = time.monotonic() + 20
    while marked() and time.monotonic() < deadline:
        time.sleep(0.2)
    wrong = [f"process {pid}: {_command(pid)}" for pid in marked()]
    wrong += [f"/dev/shm/{name}" for name in sorted(shared_memory() - before)]
    wrong += [f"temporary {path.name}" for path in temporary.glob("everstep*")]
    wrong += [str(path.relative_to(storm.disk)) for path in storm.disk.rglob("*.partial")]
    return wrong


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:100]
    except OSError:
        return "?"


def run(
    arguments: argparse.Namespace, seed: int, folder: Path, clean_losses_of: CleanLosses, say: Say
) -> dict[str, Any]:
    jobs = kinds(folder, arguments.steps)
    before, temporary = shared_memory(), folder / "tmp"
    temporary.mkdir()
    os.environ["TMPDIR"] = str(temporary)
    wrong: dict[str, list[str]] = {}
    with (
        small_disk(folder / "disk") as may_fill,
        small_disk(folder / "logs", LOG_BYTES) as may_fill_logs,
        Cluster(folder, eager=True, token_file=True, poll_s=MEASURED_POLL_S) as cluster,
    ):
        if OWN_MOUNTS not in os.environ:
            say("/dev/shm is shared with other programs: what is left there is not checked")
        say(f"seed {seed}; the disk of checkpoints can {'' if may_fill else 'not '}be filled")
        storm = Storm(cluster, seed, folder / "disk", jobs, say)
        cluster.log_folder, cluster.preload = folder / "logs", hung_storage(folder)
        possible = {"disk": may_fill, "log disk": may_fill_logs, "storage": bool(cluster.preload)}
        storm._taken |= {what for what, is_possible in possible.items() if not is_possible}
        cluster.start_coordinator()
        for node in NODES:
            cluster.start_agent(node, slots=SLOTS, grace=GRACE_S)
        cluster.nodes_up(len(NODES))
        seconds = storm_s(arguments)
        storm.rage(seconds, arguments.every)
        say("calm: everything is undone, tasks finish ...")
        storm.calm()
        names = [name for name in storm.submitted if name not in storm.cancelled]
        for name, text in unfinished(cluster, names, arguments.patience).items():
            (folder / f"stuck-{name}.txt").write_text(text)
        state = folder / "state-first"
        clean = clean_losses_of()  # by now another process may have made them
        wrong = check_tasks(storm, clean, state)
        incidents = cluster.incidents()
        settled = cluster.settled()
        cluster.kill_coordinator()
        again = replayed(state, settled[0])
        wrong["journal"] = [f"it gives {again}, the coordinator had {settled}"] if again != settled else []
        cluster.close()
        wrong["left behind"] = left_behind(storm, before, temporary)
    counts: dict[str, int] = {}
    for each in storm.happenings:
        counts[each.what] = counts.get(each.what, 0) + 1
    return {
        "seed": seed,
        "minutes": round(seconds / 60, 2),
        "faults": sum(count for what, count in counts.items() if what in STRIKES),
        "counts": counts,
        "tasks": len(storm.submitted),
        "cancelled": len(storm.cancelled),
        "steps": sum(len(clean[kind]) for name, kind in storm.submitted.items() if name in names),
        "incidents": len(incidents),
        "journal": settled[0],
        "rows_lost": storm.rows_lost,
        "checks": {check: "holds" if not found else f"fails {len(found)}" for check, found in wrong.items()},
        "wrong": [f"{check}: {text}" for check, found in wrong.items() for text in found],
    }


def storm_s(arguments: argparse.Namespace) -> float:
    """How long faults last: shorter, where all must be over in time."""
    seconds: float = arguments.minutes * 60
    if arguments.total:
        seconds = min(seconds, arguments.total - arguments.patience - END_S - (time.monotonic() - BEGAN))
    return max(10.0, seconds)


def unfinished(cluster: Cluster, names: list[str], within_s: float) -> dict[str, str]:
    """What is known of the tasks that do not finish in time; they have that time together."""
    deadline, found = time.monotonic() + within_s, {}
    for name in names:
        try:
            cluster.finished(name, within_s=max(1.0, deadline - time.monotonic()))
        except TimeoutError as error:
            found[name] = str(error)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--seed", type=int, nargs="*", default=[1], help="one storm after the other; none: clean runs only"
    )
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="of faults; tasks then have time to finish"
    )
    parser.add_argument("--every", type=float, default=3.0, help="mean seconds between two faults")
    parser.add_argument("--steps", type=int, default=60, help="of every task")
    parser.add_argument("--patience", type=float, default=240.0, help="seconds for the tasks to finish")
    parser.add_argument(
        "--total", type=float, default=0.0, help="seconds; cuts the minutes to be over by then"
    )
    parser.add_argument("--keep", action="store_true", help="keep the folder with all logs")
    parser.add_argument("--clean", type=Path, help="a file that keeps the losses of the clean runs")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    _take_own_mounts()
    clean = partial(all_clean_losses, arguments.steps, arguments.clean)
    if not arguments.seed or arguments.clean is None:
        losses = clean()
        clean = partial(dict, losses)
    reports = [storm(arguments, seed, clean) for seed in arguments.seed]
    if arguments.json:
        print(json.dumps(reports))
    for report in () if arguments.json else reports:
        for key, value in report.items():
            print(f"{key:12}  {value}")
    return 1 if any(report["wrong"] for report in reports) else 0


def storm(arguments: argparse.Namespace, seed: int, clean: CleanLosses) -> dict[str, Any]:
    os.environ[MARK] = f"{os.getpid()}-{time.time_ns()}"
    os.environ.pop("TMPDIR", None)
    folder = Path(tempfile.mkdtemp(prefix="storm-real-", dir="/tmp"))
    report = run(arguments, seed, folder, clean, _say)
    if report["wrong"] or arguments.keep:
        report["folder"] = str(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    _say(json.dumps(report))
    return report


def _take_own_mounts() -> None:
    """Root gets a /dev/shm of its own, so that what other programs leave there is not taken for ours; and a
    loopback of its own, where the port of a killed coordinator stays free until it is started again.
    """
    if OWN_MOUNTS in os.environ or os.geteuid() != 0 or not shutil.which("unshare"):
        return
    own = ["unshare", "--mount", *(["--net"] if shutil.which("ip") else [])]
    if subprocess.run([*own, "true"], capture_output=True).returncode == 0:
        os.environ[OWN_MOUNTS] = "1"
        mount = 'mount -t tmpfs tmpfs /dev/shm; [ ! "$(command -v ip)" ] || ip link set lo up; exec "$@"'
        here = [sys.executable, os.path.abspath(__file__), *sys.argv[1:]]
        os.execvp("unshare", [*own, "sh", "-c", mount, "sh", *here])


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
