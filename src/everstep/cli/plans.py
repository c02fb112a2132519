"""A decision of the planner as text: what each task could have done, and why the chosen option won."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from everstep.errors import PeerError, UserError
from everstep.plan.explain import span


def pick_plan(plans: Any, what: str) -> dict[str, Any]:
    """`plan`: the newest; `plan:EVENT`: the one that this event brought."""
    if not isinstance(plans, list) or not all(isinstance(plan, dict) for plan in plans):
        raise PeerError("the coordinator's answer is not a list of plans")
    if not plans:
        raise UserError("the planner has decided nothing yet; submit a task first.")
    if what == "plan":
        return dict(plans[0])
    number = int(what.removeprefix("plan:"))
    for plan in plans:
        if plan["event"] == number:
            return dict(plan)
    known = ", ".join(str(plan["event"]) for plan in plans[:8])
    raise UserError(f"event {number} brought no plan, or one of long ago; recent ones: {known}.")


def show_plan(plan: Mapping[str, Any]) -> None:
    console = Console(highlight=False)
    console.print(Text(f"plan of event {plan['event']}: {plan['because']}", style="bold"), soft_wrap=True)
    if plan["prepared"]:
        console.print(Text("the answer had been prepared before the event", style="dim"))
    table = Table(
        Column("task", no_wrap=True),
        "option",
        Column("workers", justify="right"),
        Column("throughput", justify="right"),
        Column("change", justify="right"),
        Column("earns", justify="right"),
        Column("pays", justify="right"),
        Column("behind", justify="right"),
        "because",
        box=SIMPLE,
    )
    before = ""
    for option in plan["weighed"]:
        name = option["task"] if option["task"] != before else ""
        before = option["task"]
        table.add_row(
            name,
            Text(("→ " if option["chosen"] else "  ") + option["what"]),
            str(option["workers"]),
            f"{option['throughput']:.2f}",
            span(option["transition_s"]) if option["transition_s"] else "",
            worker_time(option["earns"]),
            worker_time(option["pays"]) if option["pays"] else "",
            worker_time(option["behind"]) if option["behind"] else "",
            Text(option["because"]),
            style="bold" if option["chosen"] else "",
        )
    console.print(table)
    console.print(
        Text("earns, pays and behind: weighted work of one worker until the next expected event", style="dim")
    )


def worker_time(seconds: float) -> str:
    """Work of one worker: 12 worker-h."""
    for size, word in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if abs(seconds) >= 1.5 * size:
            return f"{seconds / size:.3g} {word}"
    return f"{seconds:.3g} s"
