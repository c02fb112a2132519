"""DeepSpeed as oracle: train there, convert here, resume there under another stage and number of ranks.

    python -m venv ds && ds/bin/pip install 'torch>=2.11,<2.14' deepspeed
    python bench/peers/deepspeed_oracle.py --python ds/bin/python

Every row: DeepSpeed trains six steps on two ranks and saves after three; we convert the checkpoint to
universal and on to DeepSpeed's own files for another stage and world; DeepSpeed loads these and runs the last
three steps. `apart` is the largest difference of their losses from those of the run that was not interrupted.
`theirs` does the same with DeepSpeed's own `ds_to_universal`, where `--theirs` is given.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from everstep.convert.conversion import Target, read_state, write_state

HERE = Path(__file__).parent
SAVE_AT, STEPS, WORLD = 3, 6, 2
LIMIT = 1e-5  # of the losses, in fp32


@dataclass(frozen=True)
class Case:
    stage: int
    to_stage: int
    to_world: int
    optimizer: str = "adamw"
    precision: str = "fp32"
    frozen: bool = True

    @property
    def source(self) -> tuple[Any, ...]:
        return (self.stage, self.optimizer, self.precision, self.frozen)


CASES = [
    *(Case(a, b, w) for a in (1, 2, 3) for b, w in ((1, 3), (2, 1), (3, 4))),
    Case(1, 3, 3, "sgd"),
    Case(2, 2, 4, "sgd"),
    Case(3, 1, 1, "sgd"),
    Case(1, 2, 2, precision="bf16"),
    Case(1, 1, 1, precision="bf16"),
    Case(3, 3, 1, precision="bf16"),
    Case(1, 3, 2, precision="bf16"),
]


class Oracle:
    def __init__(self, python: str, root: Path) -> None:
        self.python, self.root = python, root
        self.runs = 0
        self._server = subprocess.Popen(
            [python, str(HERE / "deepspeed_train.py")],
            env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()

    def run(self, world: int, *options: Any) -> dict[str, Any] | str:
        """One DeepSpeed job; its losses, or the last line of what it said when it failed."""
        self.runs += 1
        out = self.root / f"run-{self.runs}.json"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        logs = [self.root / f"run-{self.runs}-{rank}.log" for rank in range(world)]
        job = {
            "arguments": [*map(str, options), "--out", str(out)],
            "logs": [str(log) for log in logs],
            "environment": {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "WORLD_SIZE": str(world),
            },
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        while not (line := self._server.stdout.readline()).startswith('{"codes"'):
            assert line, "the DeepSpeed process is gone"
        codes = json.loads(line)["codes"]
        if any(codes):
            said = logs[0].read_text(errors="replace").strip().splitlines()
            return next((line for line in reversed(said) if "Error" in line), said[-1] if said else "?")
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    def train(self, case: Case) -> tuple[Path, dict[str, Any]]:
        folder = self.root / "-".join(map(str, case.source))
        told = folder.with_suffix(".json")
        if not told.exists():
            found = self.run(WORLD, *_options(case, case.stage), "--folder", folder, "--save-at", SAVE_AT)
            assert isinstance(found, dict), found
            told.write_text(json.dumps(found))
        return folder, json.loads(told.read_text())

    def ours(self, case: Case) -> dict[str, Any]:
        folder, before = self.train(case)
        middle, target = self.root / f"u-{self.runs}", self.root / f"c-{self.runs}"
        write_state(middle, read_state(folder / f"global_step{SAVE_AT}"), Target(format="universal"))
        goal = Target(format="deepspeed", stage=case.to_stage, world=case.to_world)
        write_state(target, read_state(middle), goal)
        after = self.run(case.to_world, *_options(case, case.to_stage), "--load", target)
        return _compared(before, after)

    def theirs(self, case: Case) -> dict[str, Any]:
        folder, before = self.train(case)
        tag = f"global_step{SAVE_AT}_universal"
        if not (folder / tag).exists():
            convert = [
                self.python, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state",
                "--input_folder", str(folder / f"global_step{SAVE_AT}"), "--output_folder", str(folder / tag),
            ]  # fmt: skip
            ran = subprocess.run(
                convert,
                env=os.environ | {"DS_ACCELERATOR": "cpu"},
                capture_output=True,
                text=True,
                check=False,
            )
            if ran.returncode:
                shutil.rmtree(folder / tag, ignore_errors=True)
                return {"apart": None, "error": ran.stderr.strip().splitlines()[-1], "groups_kept": None}
        options = [*_options(case, case.to_stage), "--load", folder, "--tag", tag, "--universal"]
        return _compared(before, self.run(case.to_world, *options))


def _options(case: Case, stage: int) -> list[Any]:
    options = ["--stage", stage, "--optimizer", case.optimizer, "--precision", case.precision]
    return [*options, "--steps", STEPS, *(["--frozen"] if case.frozen else [])]


def _compared(before: dict[str, Any], after: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(after, str):
        return {"apart": None, "error": after, "groups_kept": None}
    steps = [str(step) for step in range(SAVE_AT, STEPS)]
    assert list(after["losses"]) == steps, after
    apart = max(abs(before["losses"][step] - after["losses"][step]) for step in steps)
    return {"apart": apart, "error": None, "groups_kept": before["groups"] == after["groups"]}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="the Python of a venv with deepspeed")
    parser.add_argument("--theirs", action="store_true", help="also with DeepSpeed's own converter")
    parser.add_argument("--from-stage", type=int, help="only cases that start there")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="oracle-") as name:
        oracle = Oracle(options.python, Path(name))
        for case in CASES:
            if options.from_stage not in (None, case.stage):
                continue
            row = {**asdict(case), **oracle.ours(case)}
            if options.theirs:
                row["theirs"] = oracle.theirs(case)
            rows.append(row)
            print(_line(row), file=sys.stderr, flush=True)
        oracle.close()
    exact = [row for row in rows if row["precision"] == "fp32"]
    ok = all(row["apart"] is not None and row["apart"] <= LIMIT and row["groups_kept"] for row in exact)
    document = {"rows": rows, "limit": LIMIT, "ok": ok}
    if options.json:
        print(json.dumps(document))
    else:
        print("\n".join(_line(row) for row in rows))
        print(f"every fp32 row within {LIMIT:g}, groups kept: {ok}")
    return 0 if ok else 1


def _line(row: dict[str, Any]) -> str:
    what = f"{row['optimizer']:5} {row['precision']} ZeRO-{row['stage']} x {WORLD} -> "
    ours = f"{what}ZeRO-{row['to_stage']} x {row['to_world']}  apart {_told(row)}"
    return ours if "theirs" not in row else f"{ours}   theirs: {_told(row['theirs'])}"


def _told(row: dict[str, Any]) -> str:
    if row["apart"] is None:
        return f"failed: {row['error'][:60]}"
    return f"{row['apart']:.1e} groups {'kept' if row['groups_kept'] else 'LOST'}"


if __name__ == "__main__":
    sys.exit(main())
