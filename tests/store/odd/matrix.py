"""Odd checkpoints through every pair of formats, with the frameworks themselves as judges.

A case is a seed and a pair of formats A, B. A framework writes a checkpoint of an odd model and says what it
holds (the truth); we convert it to A, and A to B; then

    our reader      reads B, and everything must be as the truth says, dtype and bytes
    the framework   loads B and says what it then holds, which must be the truth again

What a format cannot hold is known beforehand (`_refusal`): a state without groups, two counts of steps in a
group. Any other refusal or difference is a failure.
"""

from __future__ import annotations

import itertools
import random
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.errors import EverstepError, UserError
from everstep_convert.conversion import Accepted, Reading, Target, read_state, write_state
from everstep_convert.state import TrainingState
from tests.store.odd.frameworks import (
    DEEPSPEED,
    TORCH,
    Frameworks,
    Judgement,
    by_deepspeed,
    by_torch,
    with_buffers,
)
from tests.store.odd.judges import (
    Truth,
    compare,
    elements,
    hf_folder,
    tensor_of,
    universal_parts,
)
from tests.store.odd.model import draw
from tests.store.odd.ranks import RankFailed

FORMATS = ("universal", "hf", "dcp", "deepspeed-universal")
PAIRS = list(itertools.product(FORMATS, FORMATS))
FAILURES = (
    EverstepError,
    RankFailed,
    AssertionError,
    OSError,
    LookupError,
    ValueError,
    TypeError,
    RuntimeError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`source`: who writes the checkpoint: torch (plain, dtensor, fsdp) or deepspeed."""

    seed: int
    source: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.seed}:{self.source}:{self.a}:{self.b}"


def parse(text: str) -> Case:
    """A case as it was printed."""
    seed, source, a, b = text.split(":")
    return Case(seed=int(seed), source=source, a=a, b=b)


@dataclass(slots=True, kw_only=True)
class CaseResult:
    case: str
    outcome: str  # exact, refused, or failed
    because: str = ""
    judges: list[str] = field(default_factory=list)
    seconds: float = 0.0


def cases(count: int, seed: int, *, deepspeed: bool) -> list[Case]:
    """Pairs in turn, sources by chance; the same seed gives the same cases."""
    sources = ["plain", "dtensor", "fsdp", "plain"] + (["deepspeed", "deepspeed"] if deepspeed else [])
    chance = random.Random(f"matrix {seed}")
    order = list(PAIRS)
    chance.shuffle(order)
    return [
        Case(seed=seed * 100_000 + i, source=chance.choice(sources), a=a, b=b)
        for i, (a, b) in zip(range(count), itertools.cycle(order), strict=False)
    ]


def run(case: Case, frameworks: Frameworks, root: Path) -> CaseResult:
    started = time.perf_counter()
    folder = root / f"case-{case.seed}"
    folder.mkdir()
    result = CaseResult(case=str(case), outcome="exact")
    try:
        _CaseRun(case, frameworks, folder, result).run()
    except FAILURES as error:
        result.outcome, result.because = "failed", f"{type(error).__name__}: {error}"[:600]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result.seconds = time.perf_counter() - started
    return result


class _CaseRun:
    def __init__(self, case: Case, frameworks: Frameworks, folder: Path, result: CaseResult) -> None:
        self.case, self.frameworks, self.folder, self.result = case, frameworks, folder, result
        self.chance = random.Random(f"case {case.seed}")
        flavour = {"plain": "torch", "deepspeed": "deepspeed"}.get(case.source, "sharded")
        self.spec = draw(case.seed, flavour)
        self.precision = "fp32"

    def run(self) -> None:
        source = self.folder / "source"
        truth, table = self._written(source)
        truth = with_buffers(self.spec, truth)
        state = read_state(source, reading=self._reading())
        compare(state, truth, table, self.spec, exact=True)
        _require(not state.lost, f"the reader lost {state.lost}")
        path = source
        for i, kind in enumerate((self.case.a, self.case.b)):
            state = read_state(path, reading=self._reading() if path == source else None)
            path = self.folder / f"{i}-{kind}"
            if not self._convert(state, path, kind):
                return
        compare(read_state(path), truth, table, self.spec, exact=True)
        self.result.judges += self._judged(path, truth, table)

    # The source.

    def _written(self, path: Path) -> tuple[Truth, dict[str, Any]]:
        job: dict[str, Any] = {"do": "save", "spec": self.spec, "folder": str(path), "optimizer": True}
        job["truth"] = str(self.folder / "truth")
        if self.case.source == "deepspeed":
            self.precision = self.chance.choice(["fp32", "fp32", "bf16", "fp16"])
            stage, world = self.chance.choice([1, 2, 3]), self.chance.choice([1, 2, 3])
            zero = {"sub_group_size": 40} if stage == 3 and self.chance.random() < 0.3 else {}
            job |= {"stage": stage, "precision": self.precision, "zero": zero}
            self.result.judges.append(f"written by DeepSpeed zero-{stage} x {world} {self.precision}")
            return self.frameworks.run(DEEPSPEED, job, world)
        plain = self.case.source == "plain"
        mesh = [1, 1] if plain else self.chance.choice([[2, 1], [1, 2], [2, 2], [3, 1]])
        flatten = self.chance.random() < 0.5
        job |= {"style": self.case.source, "mesh": mesh, "flatten": flatten}
        self.result.judges.append(f"written by torch {self.case.source} {mesh[0]} x {mesh[1]}")
        return self.frameworks.run(TORCH, job, mesh[0] * mesh[1])

    def _reading(self) -> Reading:
        """The roles that a DCP folder does not tell; a user would name them."""
        if self.case.source == "deepspeed":
            return Reading()
        names = {
            role: tuple(t["name"] for t in self.spec["tensors"] if t["role"] == role)
            for role in ("buffer", "frozen")
        }
        return Reading(buffers=names["buffer"], frozen=names["frozen"])

    # The conversions.

    def _target(self, kind: str) -> Target:
        threads, shard = self.chance.choice([1, 2]), self.chance.choice([1, 200, 5 << 30])
        return Target(format=kind, shard_bytes=shard, threads=threads, precision=self.precision)

    def _convert(self, state: TrainingState, into: Path, kind: str) -> bool:
        """False: refused, as it should be."""
        target = self._target(kind)
        if refusal := _refusal(state, kind):
            said = _refused(into, state, target, Accepted(("lost:*", "added:*", "type:*")))
            _require(refusal in said, f"{kind} should be refused for {refusal!r}, and said {said!r}")
            self.result.outcome, self.result.because = "refused", said[:200]
            return False
        changes = write_state(into, state, target)
        _require(not changes, f"{kind} changed {changes}")
        return True

    # The judges.

    def _judged(self, path: Path, truth: Truth, table: dict[str, Any]) -> list[str]:
        match self.case.b:
            case "hf":
                hf_folder(path, self.spec, truth)
                return ["safetensors"]
            case "universal":
                universal_parts(path, truth, self.spec)
                return ["safetensors"]
        given = Judgement(
            frameworks=self.frameworks,
            spec=self.spec,
            path=path,
            scratch=self.folder,
            chance=self.chance,
            source=self.case.source,
            precision=self.precision,
            truth=truth,
            table=table,
            all_groups=len(read_state(path).groups) == len(self.spec["groups"]),
        )
        return by_torch(given) if self.case.b == "dcp" else by_deepspeed(given)


def _refused(into: Path, state: TrainingState, target: Target, accepted: Accepted) -> str:
    """What it says; empty if it is written."""
    try:
        write_state(into, state, target, accepted=accepted)
    except UserError as error:
        left = [path for path in into.parent.glob(f"{into.name}*") if any(path.iterdir())]
        _require(not left, f"it was refused, and {left} are there")
        return str(error)
    return ""


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise AssertionError(sentence)


def _refusal(state: TrainingState, kind: str) -> str:
    """What DeepSpeed cannot hold of this state."""
    if kind != "deepspeed-universal":
        return ""
    if not state.groups:
        return "no optimizer groups"
    known, optimizer = state.parameters(), state.optimizer()
    for group in state.groups:
        names = [name for name in group["params"] if elements(known[name])]
        steps = {float(tensor_of(s)) for n in names for k, s in optimizer[n].items() if k.startswith("step")}
        if len(steps) > 1:
            return "DeepSpeed keeps one per group"
    return ""
