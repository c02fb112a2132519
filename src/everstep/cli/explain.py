"""`everstep explain`: the table of error kinds, and the timeline of one incident from evidence to remedy."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from everstep.cli import render
from everstep.cli.client import DEFAULT_ADDRESS, Address, Ca, Client, Token
from everstep.cli.render import AsJson, Console
from everstep.core.faults.remedies import REMEDIES, first_remedy
from everstep.core.faults.severity import MEANINGS, TABLE, ErrorKind, Severity
from everstep.core.faults.symptoms import SYMPTOMS
from everstep.core.faults.xids import XIDS
from everstep.errors import PeerError, UserError
from everstep.protocol.durations import span

_STYLES = {Severity.SEV1: "bold red", Severity.SEV2: "yellow", Severity.SEV3: "green"}


def explain_command(
    what: Annotated[
        str,
        typer.Argument(
            help="The number of an incident, `event:NUMBER`, `plan`, or `severities`. Without it, recent "
            "incidents are listed.",
            metavar="WHAT",
            show_default=False,
        ),
    ] = "",
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    patterns: Annotated[
        bool, typer.Option("--patterns", help="With `severities`: also list the patterns of each error kind.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List recent incidents, or explain one: evidence, verdict and remedies, with times and reasons.

    `event:NUMBER` shows a recent event, and what the coordinator did about it. `plan` shows the planner's
    last decision: what each task could have done, with numbers,
    and why the chosen option won; `plan:EVENT` an earlier one.

    [bold]Examples[/bold]

      everstep explain

      everstep explain 7

      everstep explain event:1234

      everstep explain plan

      everstep explain severities

      everstep explain severities --patterns
    """
    if not what:
        found = Client(address=address, token=token, ca=ca).get(f"/v1/incidents?last={LISTED}")
        _emit({"incidents": found}) if as_json else _show_incidents(found)
    elif what == "severities":
        document = severities_document()
        _emit(document) if as_json else _show_severities(with_patterns=patterns)
    elif what.startswith("event:") and what.removeprefix("event:").isdecimal():
        client = Client(address=address, token=token, ca=ca)
        document = client.get(f"/v1/events/{what.removeprefix('event:')}")
        _emit(document) if as_json else _show_event(document)
    elif what == "plan" or (what.startswith("plan:") and what.removeprefix("plan:").isdecimal()):
        plans = Client(address=address, token=token, ca=ca).get("/v1/plans")
        document = pick_plan(plans, what)
        _emit(document) if as_json else show_plan(document)
    elif what.isdecimal():
        document = fetch_incident(int(what), Client(address=address, token=token, ca=ca))
        _emit(document) if as_json else _show_incident(document)
    else:
        raise UserError(
            f"{what!r} cannot be explained; give the number of an incident (everstep explain lists them), "
            "event:NUMBER, plan or severities."
        )


def _emit(document: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


# The table of severities


def severities_document() -> dict[str, Any]:
    return {
        "severities": {str(severity): first_remedy(severity) for severity in Severity},
        "remedies": [
            {
                "remedy": rule.name,
                "severity": str(rule.severity),
                "kinds": sorted(map(str, rule.kinds)),
                "because": rule.helps,
            }
            for rule in REMEDIES
        ],
        "kinds": [
            {
                "kind": str(kind),
                "severity": str(severity),
                "meaning": MEANINGS[kind],
                "patterns": [
                    {"pattern": s.pattern.pattern, "from": s.origin, "sources": sorted(s.sources)}
                    for s in SYMPTOMS
                    if s.kind is kind
                ],
                "xids": [number for number, (of_kind, _) in XIDS.items() if of_kind is kind],
            }
            for kind, severity in TABLE.items()
        ],
        "xids": {
            str(number): {"kind": str(kind), "meaning": meaning} for number, (kind, meaning) in XIDS.items()
        },
    }


def _show_severities(*, with_patterns: bool) -> None:
    console = Console(highlight=False)
    table = Table(
        Column("severity"),
        Column("kind", no_wrap=True),
        "what it is",
        Column("Xid", max_width=16),
        box=SIMPLE,
    )
    for kind, severity in TABLE.items():
        xids = _ranges(number for number, (of_kind, _) in XIDS.items() if of_kind is kind)
        table.add_row(Text(str(severity), style=_STYLES[severity]), str(kind), MEANINGS[kind], xids)
    render.show(table)
    for severity in Severity:
        console.print(Text(str(severity), style=_STYLES[severity]), f"{first_remedy(severity)};", end=" ")
    console.print("if a remedy does not help, a more severe one follows.")
    if with_patterns:
        render.show(_pattern_table())


def _pattern_table() -> Table:
    table = Table("kind", "pattern, first match wins", "from")
    before: ErrorKind | None = None
    for symptom in SYMPTOMS:
        name = "" if symptom.kind is before else str(symptom.kind)
        table.add_row(name, escape(symptom.pattern.pattern), symptom.origin)
        before = symptom.kind
    return table


# The incidents of the last time, newest last: the one that is asked for is near the prompt

LISTED = 10


def _show_incidents(incidents: Sequence[Mapping[str, Any]]) -> None:
    if not incidents:
        print("no incidents")
        return
    rows = []
    for one in incidents:
        opened, closed = one.get("opened_at"), one.get("closed_at")
        where = [one.get("task") or "", f"node {one['node']}" if one.get("node") else ""]
        workers = " ".join(map(str, one.get("workers") or ()))
        took = "open" if closed is None else f"closed after {_offset(closed - (opened or closed))[1:]}"
        at = "" if opened is None else _clock(opened)
        rows.append((str(one["number"]), at, " ".join(filter(None, where)), workers, took, one["what"]))
    table = Table("incident", "opened", "where", "workers", "state", "what", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    render.show(table)
    print(f"everstep explain {incidents[-1]['number']} tells one of them in full")


# The timeline of an incident


def fetch_incident(number: int, client: Client) -> dict[str, Any]:
    """The incident as the coordinator reports it, a JSON object."""
    document = client.get(f"/v1/incidents/{number}")
    if not isinstance(document, dict) or not isinstance(document.get("number"), int):
        raise PeerError(f"{client.address} is not a coordinator: its answer is not an incident")
    return document


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentMoment:
    at: float
    what: str  # evidence, verdict, remedy, outcome, note, closed
    text: str
    event: int = 0  # its number; 0: not known


_RANKS = {"evidence": 0, "verdict": 1, "remedy": 2, "note": 3, "closed": 4}


def story(document: Mapping[str, Any]) -> list[IncidentMoment]:
    """Everything that has a time, in order; what happened at one time, in the order of cause and effect."""
    moments = list(_moments(document))
    return sorted(moments, key=lambda moment: (moment.at, _RANKS[moment.what]))


def _moments(document: Mapping[str, Any]) -> Iterator[IncidentMoment]:
    evidence = document.get("evidence") or []
    remedies = document.get("remedies") or []
    for seen in evidence:
        yield IncidentMoment(
            at=seen["at"], what="evidence", text=f"{seen['source']}: {seen['text']}", event=_event(seen)
        )
    if verdict := document.get("verdict"):
        text = f"{verdict['kind']}, {_severity(verdict['severity'])}: {verdict['because']}"
        yield IncidentMoment(
            at=_verdict_at(document, verdict), what="verdict", text=text, event=_event(verdict)
        )
    for remedy in remedies:
        outcome = f" ({remedy['outcome']})" if remedy.get("outcome") else " (in progress)"
        yield IncidentMoment(
            at=remedy["at"],
            what="remedy",
            text=f"{remedy['what']}{outcome}: {remedy['because']}",
            event=_event(remedy),
        )
    for note in document.get("timeline") or []:
        yield IncidentMoment(at=note["at"], what="note", text=note["because"])
    if document.get("closed_at") is not None:
        yield IncidentMoment(at=document["closed_at"], what="closed", text="the incident is closed")


def _event(part: Mapping[str, Any]) -> int:
    return int(part.get("event") or 0)


def _verdict_at(document: Mapping[str, Any], verdict: Mapping[str, Any]) -> float:
    """If the verdict has no time: that of the last evidence before the first remedy."""
    if verdict.get("at") is not None:
        return float(verdict["at"])
    first_remedy = min((remedy["at"] for remedy in document.get("remedies") or []), default=float("inf"))
    seen = [each["at"] for each in document.get("evidence") or [] if each["at"] <= first_remedy]
    return float(max(seen, default=document.get("opened_at") or 0.0))


def _severity(value: int | str) -> str:
    return f"SEV{value}" if isinstance(value, int) else value


def _show_incident(document: Mapping[str, Any]) -> None:
    try:
        moments = story(document)
        lines = list(_header(document))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PeerError(f"this version cannot read incident {document['number']}: {error!r}") from None
    console = Console(highlight=False)
    for line in lines:
        console.print(line, soft_wrap=True)
    began = min((moment.at for moment in moments), default=0.0)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right", style="cyan", no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True, style="dim")
    for moment in moments:
        event = f"event:{moment.event}" if moment.event else ""
        table.add_row(_offset(moment.at - began), moment.what, Text(moment.text), event)
    render.show(table)


def _show_event(event: Mapping[str, Any]) -> None:
    """An event, and what followed from it."""
    console = Console(highlight=False)
    heading = f"event {event['event']}, {_clock(event['at'])}: {event['text']}"
    console.print(Text(heading, style="bold"), soft_wrap=True)
    for action in event["actions"]:
        console.print(Text(f"  → {action['text']}: {action['because']}"), soft_wrap=True)


def _header(document: Mapping[str, Any]) -> Iterator[Text]:
    workers = ", ".join(str(worker) for worker in document.get("workers") or [])
    places = [f"task {document['task']}"] if document.get("task") else []
    places += [f"node {document['node']}"] if document.get("node") else []
    places += [f"worker {workers}"] if workers else []
    yield Text(f"incident {document['number']}: {document.get('what') or 'unnamed'}", style="bold")
    if places:
        yield Text(", ".join(places))
    opened, closed = document.get("opened_at"), document.get("closed_at")
    if opened is not None:
        state = f"closed after {_offset(closed - opened)[1:]}" if closed is not None else "still open"
        yield Text(f"opened {_clock(opened)}, {state}", style="dim")


def _clock(at: float) -> str:
    """A time of day where it can be one; a clock of another kind is shown as it is."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at > 1e9 else f"at {at:.3f} s"


def _offset(seconds: float) -> str:
    return f"+{seconds * 1e3:,.0f} ms" if seconds < 100 else f"+{seconds:,.1f} s"


# ------------------------------------------------------------------
# A decision of the planner as text: what each task could have done, and why the chosen option won.


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
    render.show(table)
    console.print(
        Text("earns, pays and behind: weighted work of one worker until the next expected event", style="dim")
    )


def worker_time(seconds: float) -> str:
    """Work of one worker: 12 worker-h."""
    for size, word in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if abs(seconds) >= 1.5 * size:
            return f"{seconds / size:.3g} {word}"
    return f"{seconds:.3g} s"


def _ranges(numbers: Iterable[int]) -> str:
    """`0-3, 7`: numbers as people write them."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
