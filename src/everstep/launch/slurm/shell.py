"""Slurm's commands. Each is bounded in time; what they print is understood in `words`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from everstep.errors import EverstepError, UserError
from everstep.launch.slurm.slurm_text import SQUEUE_FORMAT, SlurmJob, SlurmNode, parse_jobs, parse_nodes
from everstep.log import append_to

COMMAND_S = 30.0
SCRIPT = Path(str(files("everstep.launch.slurm") / "everstep.sbatch"))


class SlurmFailed(EverstepError):
    """A command of Slurm's did not do what it was asked to."""


def nodes(names: Sequence[str]) -> dict[str, SlurmNode]:
    """Those that Slurm knows; it says nothing of others."""
    return parse_nodes(_ask("scontrol", "--oneliner", "show", "node", ",".join(names))) if names else {}


def job(number: str) -> SlurmJob | None:
    """None once Slurm has forgotten it."""
    try:
        found = parse_jobs(
            _ask("squeue", "--noheader", f"--format={SQUEUE_FORMAT}", f"--jobs={number}", "--states=all")
        )
    except SlurmFailed as error:
        if "Invalid job id" in str(error):
            return None
        raise
    return found[0] if found else None


def jobs_named(name: str) -> list[SlurmJob]:
    """Those that wait or run."""
    return parse_jobs(_ask("squeue", "--noheader", f"--format={SQUEUE_FORMAT}", f"--name={name}"))


def submit(options: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """The script of this package, with these options for sbatch; the job's number."""
    answer = _ask("sbatch", "--parsable", *options, str(SCRIPT), *arguments, environment=environment)
    match = re.match(r"(\d+)", answer)
    if match is None:
        raise SlurmFailed(f"sbatch answers {answer.strip()!r}, which is not a job's number")
    return match.group(1)


def cancel(number: str) -> None:
    _ask("scancel", number)


def start_step(number: str, node: str, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """A step of its own on one node of a job that has others running."""
    step = ["srun", f"--jobid={number}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}"]
    words = append_to(log)
    try:
        return subprocess.Popen([*step, *command], stdin=subprocess.DEVNULL, stdout=words, stderr=words)
    finally:
        os.close(words)


def _ask(*command: str, environment: Mapping[str, str] | None = None) -> str:
    if shutil.which(command[0]) is None:
        raise UserError(f"{command[0]} is not available on this machine; run this where Slurm is installed.")
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_S,
            stdin=subprocess.DEVNULL,
            env=dict(os.environ if environment is None else environment),
        )
    except subprocess.TimeoutExpired:
        raise SlurmFailed(f"{command[0]} did not answer within {COMMAND_S:g} s") from None
    if done.returncode:
        raise SlurmFailed(f"{command[0]}: {' '.join((done.stderr or done.stdout).split())[:300]}")
    return done.stdout
