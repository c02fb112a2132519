"""A race that is over, for the repository: a small file of it, and its table as Markdown."""

from __future__ import annotations

from math import ceil, isfinite
from typing import Any

from tools.wrap import wrapped

KEPT_EVERY = 50  # steps: of the losses
BEST_S, BEST_STEPS = 10.0, 20  # in which a system was at its best: a time that has so many steps
END = "<!-- end -->"


class NoPlace(Exception):
    """A page without the markers that a table goes between."""


def races(document: dict[str, Any]) -> list[dict[str, Any]]:
    """One for every seed."""
    return document.get("races", [document])


def joined(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Races of one model, as one document."""
    found = [race for document in documents for race in races(document)]
    return found[0] if len(found) == 1 else {"races": found}


def small(document: dict[str, Any], clean: dict[str, float]) -> dict[str, Any]:
    """What the picture and the table need; losses of every 50th step, times to a tenth of a second."""
    if "races" in document:
        return {"races": [small(each, clean) for each in document["races"]]}
    systems = {
        name: result
        | {
            "useful_at": [round(at, 1) for at in result.get("useful_at", [])],
            "losses": _some(result.get("losses", {})),
        }
        for name, result in document["systems"].items()
    }
    return {**document, "systems": systems, "clean_losses": _some(clean)}


def _some(losses: dict[str, float]) -> dict[str, float]:
    return {step: round(loss, 6) for step, loss in losses.items() if int(step) % KEPT_EVERY == 0}


def placed(page: str, document: dict[str, Any]) -> str:
    """The page with this document's table between its markers, which name the model."""
    found = races(document)
    model = found[0].get("model", {"name": "small"})["name"]
    begin = f"<!-- race {model}{', seeds' if len(found) > 1 else ''} -->"
    before, marker, rest = page.partition(begin)
    _, end, after = rest.partition(END)
    if not marker or not end:
        raise NoPlace(f"the page needs the lines {begin} and {END}; the table goes between them")
    return f"{before}{begin}\n{wrapped(markdown(document)).strip()}\n{END}{after}"


def sums(documents: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of a table: a system under each seed, and under all."""
    names = [name for name in documents[0]["systems"] if all(_ran(each, name) for each in documents)]
    seeds = [f"seed {each['seed']}: useful steps, ms" for each in documents]
    rows = [["system", *seeds, "all useful steps", "redone", "lost, s", "longest without a step, s"]]
    for name in names:
        found = [each["systems"][name] for each in documents]
        per_seed = [f"{one['useful_steps']}, {1e3 * one['healthy_step_s']:.0f}" for one in found]
        total = [sum(one[key] for one in found) for key in ("useful_steps", "redone_steps")]
        lost = sum(sum(one["lost_s"]) for one in found)
        longest = max((still for one in found for still in one["stalled_s"]), default=0.0)
        rows.append([found[0]["name"], *per_seed, *map(str, total), f"{lost:.0f}", f"{longest:.1f}"])
    return rows


def _ran(document: dict[str, Any], name: str) -> bool:
    return "useful_steps" in document["systems"].get(name, {})


def aligned(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def markdown(document: dict[str, Any]) -> str:
    if "races" in document:
        head, *rows = sums(document["races"])
        return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))
    return _one_race(document)


def _one_race(document: dict[str, Any]) -> str:
    """Most useful steps first. Per fault: seconds lost, and the longest time without a step."""
    ran = [result for result in document["systems"].values() if "useful_steps" in result]
    ran.sort(key=lambda result: -result["useful_steps"])
    kinds = [fault["kind"] for fault in ran[0]["faults"]] if ran else []
    columns = ["system", "version", "useful steps", "redone", "step, ms", "lost, s", *kinds]
    rows = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for result in ran:
        name = f"**{result['name']}**" if result["name"] == "Everstep" else result["name"]
        numbers = [f"{result['useful_steps']}", f"{result['redone_steps']}"]
        numbers += [f"{1e3 * result['healthy_step_s']:.0f}", f"{sum(result['lost_s']):.0f}"]
        faults = [
            f"{lost:.1f} ({still:.1f}){_mark(fault)}"
            for fault, lost, still in zip(
                result["faults"], result["lost_s"], result["stalled_s"], strict=True
            )
        ]
        rows.append("| " + " | ".join([name, result["version"], *numbers, *faults]) + " |")
    paces = [result["healthy_step_s"] for result in ran if isfinite(result["healthy_step_s"])]
    best_s = max([BEST_S, *(ceil(BEST_STEPS * pace) for pace in paces)])
    lost = ", ".join(
        f"{result['name']} {lost_at_best_s(result['useful_at'], document['seconds'], best_s):.0f}"
        for result in ran
    )
    rows += ["", f"Seconds lost with each system's best {best_s:.0f} s as its pace: {lost}."]
    rows += [f"- {line}" for result in ran if (line := _against_clean(result))]
    return "\n".join(rows)


def _mark(fault: dict[str, Any]) -> str:
    """`*`: ended by the operator; `†`: there was no worker for it."""
    return (r"\*" if fault.get("operator") else "") + (" †" if fault.get("missed") else "")


def _against_clean(result: dict[str, Any]) -> str:
    clean = result.get("clean")
    if clean is None:
        return ""
    before = clean["before_faults"]
    early = "" if before is None else f"; before the first fault at most {before:.1e}"
    return (
        f"{result['name']}: {clean['apart']:.1e} from the clean run at step {clean['step']}, "
        f"at most {clean['most_apart']:.1e}{early}; relaunched: {result['relaunched']}"
    )


def lost_at_best_s(useful_at: list[float], seconds: float, best_s: float = BEST_S) -> float:
    """Of all seconds, those that its useful steps would not have taken at its best pace."""
    first, most = 0, 0
    for last, at in enumerate(useful_at):
        while at - useful_at[first] > best_s:
            first += 1
        most = max(most, last - first)
    return seconds - len(useful_at) * best_s / most if most else seconds
