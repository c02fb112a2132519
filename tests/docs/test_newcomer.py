"""The lines that `tools/newcomer.py` waits for are lines that the commands print: each stage, in its order.

The walk itself installs torch and takes a minute (`test_copy_paste.py`, slow). Here the same code prints the
same lines from events made by hand, so that a changed wording fails at once.
"""

import ast
import io
import subprocess
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from everstep.cli import demo
from everstep.cli.live import LiveView
from everstep.protocol import actions as act
from everstep.protocol.incidents import Incident
from everstep.protocol.ops import Worker
from everstep.protocol.work import EpochFacts, OwnOrders
from tools import newcomer
from tools.pages import ROOT

FOUND = {
    "losses_without_faults": {"1": 2.0, "2": 1.5},
    "losses": {"1": 2.0, "2": 1.5},
    "max_relative_loss_difference": 0.0,
    "microbatches": {"issued": 16, "committed": 16},
    "replayed_ops_elsewhere": 0,
    "healthy_step_ms": 20.0,
    "incidents": [],
}


def terminal() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=120, highlight=False, force_terminal=True), text


def healed_death() -> list[str]:
    """What the live view prints of a kill, a recovery and a replacement."""
    console, text = terminal()
    worker = Worker(0, 1)
    incident = Incident(
        number=1, workers=[worker], what="killed by SIGKILL", step=10, evidence_at=1.0, killed_at=0.99
    )
    incident.planned_at, incident.resumed_at = 1.01, 1.02
    with LiveView(demo.demo_job(2, 2, 50), console=console) as view:
        view("incident", incident)
        view("action", act.StartWorker(worker=worker, incarnation=2, because=""))
        view("action", resumed(worker))
    return screen(text)


def resumed(worker: Worker) -> act.ResumeWorkers:
    facts = EpochFacts(epoch=2, attempts=((0, 0),), members=())
    return act.ResumeWorkers(facts=facts, orders={worker: OwnOrders(step=15)}, because="")


def screen(text: io.StringIO) -> list[str]:
    return [newcomer._ESCAPES.sub("", line).strip() for line in text.getvalue().splitlines()]


def end_of_demo(difference: float) -> list[str]:
    console, text = terminal()
    demo._show(console, {**FOUND, "max_relative_loss_difference": difference})
    return screen(text)


def unseen(stages: newcomer.Stages, lines: list[str]) -> list[str]:
    left = list(stages)
    for line in lines:
        while left and left[0][1].search(line):
            left.pop(0)
    return [name for name, _ in left]


def test_every_stage_of_the_demo_is_a_line_that_is_printed() -> None:
    makes = subprocess.run(
        ["make", "--always-make", "--dry-run", "demo"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for difference in (0.0, 3.5e-8):
        lines = [*makes.stdout.splitlines(), *healed_death(), *end_of_demo(difference)]
        assert unseen(newcomer.STAGES, lines) == []


def test_every_stage_of_the_walk_is_a_line_that_is_printed() -> None:
    installed = "Successfully installed aiohttp-3.9 everstep-0.1.0 torch-2.13.0"  # pip's own words
    lines = [installed, *healed_death(), *prints_of_the_example()]
    assert unseen(newcomer.OWN_MODEL_STAGES, lines) == []


def test_the_recipes_are_typed_as_the_page_shows_them() -> None:
    typed, stages = newcomer.recipes_walk()
    page = (ROOT / "docs" / "cookbook.md").read_text()
    assert f"`everstep run {newcomer.KILL} train.py`" in page, "the page says how to see a recipe heal"
    assert typed.count(f"everstep run {newcomer.KILL} train.py") == 2
    assert "everstep run --nproc 2" in typed
    assert "class Patches(nn.Module):" in typed
    lines = ["Successfully installed everstep-0.2.0 torch-2.13.0", *healed_death()]
    assert unseen(stages, [*lines, *(f"ended: {recipe}" for recipe in newcomer.RECIPES)]) == []
    assert unseen(stages, lines) == list(newcomer.RECIPES)


def test_a_stage_that_never_came_is_reported_and_fails_the_walk() -> None:
    assert unseen(newcomer.STAGES, healed_death()) == [name for name, _ in newcomer.STAGES]
    told: dict[str, Any] = {
        "command": "make demo",
        "cores": 2,
        "pip_cache": "empty",
        "installed_mb": 1,
        "stages": [],
        "missing": ["install"],
    }
    assert newcomer.lines(told)[-1] == "  never seen: install"
    assert newcomer.exit_code({**told, "first_healed_s": 40.0}) == 1
    assert newcomer.exit_code({**told, "first_healed_s": 40.0, "missing": []}) == 0
    assert newcomer.exit_code({**told, "first_healed_s": None, "missing": []}) == 1


def prints_of_the_example() -> list[str]:
    """The example's own print lines, with values of a run that was killed once."""
    tree = ast.parse((ROOT / "examples" / "hf_finetune.py").read_text())
    names = {
        "losses": [5.5, 2.5],
        "result": SimpleNamespace(incidents=[{}]),
        "made": SimpleNamespace(folder="runs/tuned", architecture="LlamaForCausalLM", parameters=1000),
        "len": len,
    }
    prints = [node.value for node in tree.body if isinstance(node, ast.Expr) and _is_print(node.value)]
    return [
        str(eval(compile(ast.Expression(call.args[0]), "example", "eval"), names))
        for call in prints
        if isinstance(call, ast.Call) and isinstance(call.args[0], ast.JoinedStr)
    ]


def _is_print(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
