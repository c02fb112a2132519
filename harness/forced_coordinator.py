"""A coordinator whose planner can be made to take an option that it did not choose; for `bench/choices.py`.

    python -m harness.forced_coordinator FILE coordinator --port 0 ...

While FILE is there, the tasks it names have one option only: {"t": {"workers": 3, "shape": "1x3"}}; an empty
shape: the task does not train. All others get the best that is then left. Without FILE it is the coordinator.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from everstep.cli.main import main
from everstep.drive import thinking
from everstep.plan import ask
from everstep.plan.allocate import best_split
from everstep.plan.answer import Decision
from everstep.plan.option import NEVER
from everstep.plan.options import Options
from everstep.plan.weigh import compact

plain_think, plain_choose = ask.think, ask.choose


def limited(options: Options, wanted: dict[str, Any]) -> Options | None:
    """Only the option of this shape with so many workers; None: there is none now."""
    layers = []
    for layer in options.layers:
        worth = np.full_like(layer.worth, NEVER)
        for index in range(len(worth)):
            option = options.written_out(layer, index)
            shape = compact(option) if option.workers and option.shape is not None else ""
            if (option.workers, shape) == (wanted["workers"], wanted["shape"]):
                worth[index] = layer.worth[index]
        layers.append(replace(layer, worth=worth))
    if not any((layer.worth > NEVER).any() for layer in layers):
        return None
    return Options(options.task, options.situation, options.horizon, tuple(layers))


def forced(decision: Decision, wanted: dict[str, Any]) -> Decision:
    every = dict(decision.options)
    for name in wanted.keys() & every.keys():
        every[name] = limited(every[name], wanted[name]) or every[name]
    cluster = decision.period.cluster
    room = cluster.capacity // cluster.unit
    if sum(int(options.units[0]) for options in every.values()) > room:
        return decision
    split = best_split([(o.units, o.worth) for o in every.values()], room)
    choices = {n: every[n].choice(units) for n, units in zip(every, split.units, strict=True)}
    return replace(decision, options=every, choices=choices)


def run(file: Path) -> None:
    def think(asked: ask.PlanQuestion) -> Decision:
        decision = plain_think(asked)
        return forced(decision, json.loads(file.read_text())) if file.exists() else decision

    def choose(*given: Any, **more: Any) -> Any:
        """What was prepared is what the planner would do."""
        return plain_choose(*given, **(more | {"ready": None} if file.exists() else more))

    ask.think, thinking.choose = think, choose
    sys.argv = ["everstep", *sys.argv[2:]]
    main()


if __name__ == "__main__":
    run(Path(sys.argv[1]))
