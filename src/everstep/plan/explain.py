"""Why this plan: a sentence for the log, and what each task could have done instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everstep.plan.options import Decision, Kind, Option, TaskAsked
from everstep.protocol.durations import span
from everstep.protocol.messages import WeighedOption

MOST_TASKS = 16  # whose alternatives are shown
SAID = 6  # tasks in the sentence
VERBS = {
    Kind.KEEP: "keeps its workers",
    Kind.DROP: "drops workers",
    Kind.GROW: "gets more workers",
    Kind.SPREAD: "moves workers between stages",
    Kind.RESHAPE: "changes shape",
}


def sentence(decision: Decision, later: str = "") -> str:
    """`later`: what changes if nothing else happens."""
    tasks = {name: options.task for name, options in decision.options.items()}
    choices = decision.choices
    changed = [name for name, choice in choices.items() if _is_news(tasks[name], choice)]
    parts = [_said(tasks[name], choices[name]) for name in changed[:SAID]]
    if len(changed) > SAID:
        parts.append(f"{len(changed) - SAID} more tasks change")
    if not changed:
        parts = (
            ["nothing changes now"]
            if later
            else ["nothing changes, because no move would earn back its cost"]
        )
    elif len(changed) < len(choices):
        parts.append("the others keep what they have")
    if (pays_s := _pays_after(tasks, choices)) is not None:
        parts.append(f"the move has paid for itself after {span(pays_s)}")
    return f"{'; '.join([*parts, later] if later else parts)}."


def _is_news(task: TaskAsked, choice: Option) -> bool:
    return choice.kind is not Kind.KEEP and (task.today is not None or choice.workers > 0)


def _said(task: TaskAsked, choice: Option) -> str:
    name, today = task.name, task.today
    if today is None or (choice.kind is Kind.START and not today.workers):
        return f"{name} starts on {_workers(choice.workers)}, {shape_of(choice)}"
    count = f"{today.workers} → {choice.workers} workers"
    if choice.kind is Kind.STOP:
        if today.throughput <= 0 or today.workers < task.least:
            return f"{name} has too few workers ({today.workers}), and others may take their slots"
        return f"{name} stops ({count})"
    if choice.kind is Kind.START:
        return f"{name} gets what it lacks to train as {shape_of(choice)} ({count})"
    share = f", {choice.throughput / today.throughput:.0%} of its throughput" if today.throughput else ""
    to = f" to {shape_of(choice)}" if choice.kind is Kind.RESHAPE else ""
    return f"{name} {VERBS[choice.kind]}{to} ({count}{share})"


def _pays_after(tasks: Mapping[str, TaskAsked], choices: Mapping[str, Option]) -> float | None:
    """Against leaving everything as it is."""
    rate = sum(
        tasks[name].weight * (choice.throughput - today.throughput)
        for name, choice in choices.items()
        if (today := tasks[name].today) is not None
    )
    paid = sum(choice.pays for choice in choices.values())
    return paid / rate if rate > 0 and paid > 0 else None


def weighed(decision: Decision) -> tuple[WeighedOption, ...]:
    """The chosen option of each task first, then the others that it has while all other tasks get what they
    get: the best of each kind, the best kind first.
    """
    names = sorted(decision.choices, key=lambda name: decision.choices[name].kind is Kind.KEEP)
    return tuple(row for name in names[:MOST_TASKS] for row in _of_task(decision, name))


def _of_task(decision: Decision, name: str) -> Sequence[WeighedOption]:
    options, chosen = decision.options[name], decision.choices[name]
    rows = options.each_kind(chosen.units + decision.spare)
    best = max(worth for _, worth in rows)
    others = sorted((row for row in rows if row[0].kind is not chosen.kind), key=lambda row: -row[1])
    task = options.task
    return [
        _row(task, chosen, 0.0, _why_best(task, chosen, decision.running_s), is_chosen=True),
        *(
            _row(task, other, best - worth, _why_not(task, chosen, other, decision.running_s))
            for other, worth in others
        ),
    ]


def _row(
    task: TaskAsked, option: Option, behind: float, because: str, *, is_chosen: bool = False
) -> WeighedOption:
    return WeighedOption(
        task=task.name,
        what=named(task, option),
        workers=option.workers,
        shape=shape_of(option) if option.workers else "",
        throughput=option.throughput,
        transition_s=option.transition_s,
        earns=option.earns,
        pays=option.pays,
        behind=max(0.0, behind),
        chosen=is_chosen,
        because=because,
    )


def shape_of(option: Option) -> str:
    return str(option.shape)


def named(task: TaskAsked, option: Option) -> str:
    today = task.today
    match option.kind:
        case Kind.KEEP:
            assert today is not None
            places = today.shape.replicas * today.shape.stages
            return "continue unchanged" if today.workers >= places else "continue with rerouting"
        case Kind.GROW | Kind.START if today is not None and option.shape == today.shape:
            missing = option.workers - today.workers
            return f"fill {missing} empty place{'s' if missing > 1 else ''}"
        case Kind.DROP:
            return f"continue with {_workers(option.workers)}"
        case Kind.SPREAD:
            return "move workers to the stages that lack most"
        case Kind.STOP:
            return "wait" if today is None or today.throughput <= 0 else "pause"
        case _ if today is not None:
            return f"change shape to {shape_of(option)}"
        case _:
            return f"start on {_workers(option.workers)}"


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _why_best(task: TaskAsked, option: Option, running_s: float) -> str:
    if option.kind is Kind.KEEP:
        expected = f"{span(running_s)}, the expected time to the next event"
        return f"no change would earn back its cost within {expected}"
    if option.kind is Kind.STOP:
        return "the slots earn more elsewhere, or there are not enough for one worker per stage"
    gain = task.weight * (option.throughput - (task.today.throughput if task.today is not None else 0.0))
    if gain <= 0:
        return "its slots earn more in other tasks"
    return f"pays for itself after {span(option.pays / gain)}; expected to hold for {span(running_s)}"


def _why_not(task: TaskAsked, chosen: Option, other: Option, running_s: float) -> str:
    """Which term decided."""
    if other.kind is Kind.STOP:
        return f"{task.name} would stop"
    reward = other.earns - chosen.earns
    if reward < 0:
        share = -reward / chosen.earns
        more = ", and it costs more" if other.pays > chosen.pays else ""
        return f"it would train {share:.{1 if share < 0.095 else 0}%} slower{more}"
    if reward > 0:
        after_s = (other.pays - chosen.pays) * running_s / reward
        return f"it would pay after {span(after_s)}, and the next event is expected in {span(running_s)}"
    return "it earns no more and costs more"
