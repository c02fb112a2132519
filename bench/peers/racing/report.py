"""A race that is over, for the repository: a small file of it, and its table as Markdown."""

from __future__ import annotations

from typing import Any

KEPT_EVERY = 50  # steps: of the losses
BEST_S = 10.0  # seconds in which a system was at its best


def small(document: dict[str, Any], clean: dict[str, float]) -> dict[str, Any]:
    """What the picture and the table need; losses of every 50th step, times to a tenth of a second."""
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


def markdown(document: dict[str, Any]) -> str:
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
    lost = ", ".join(
        f"{result['name']} {lost_at_best_s(result['useful_at'], document['seconds']):.0f}" for result in ran
    )
    rows += ["", f"Seconds lost with each system's best {BEST_S:.0f} s as its pace: {lost}."]
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


def lost_at_best_s(useful_at: list[float], seconds: float) -> float:
    """Of all seconds, those that its useful steps would not have taken at its best pace."""
    first, most = 0, 0
    for last, at in enumerate(useful_at):
        while at - useful_at[first] > BEST_S:
            first += 1
        most = max(most, last - first)
    return seconds - len(useful_at) * BEST_S / most if most else seconds
