"""The process of a script task's worker: the keeper of all its ranks on this node, which are processes of
their own. It has no use for torch, so it starts in the time that Python needs.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everstep.core.worker.control import raised, raised_for
from everstep.errors import UserError
from everstep.job.worker_spec import WorkerSpec
from everstep.log import warn
from everstep.net.sockets import allow_many_files
from everstep.node import slot_devices
from everstep.node.fork_server import outer_environment
from everstep.node.lifeline import Lifeline
from everstep.node.line_to_agent import call_agent
from everstep.ranks import keeper


def main(given: Mapping[str, Any]) -> int:
    """The process's exit code."""
    spec = WorkerSpec.from_dict(given)
    rules = spec.ranks
    assert rules is not None, "no script task"
    allow_many_files()
    if spec.lifeline is not None:
        Lifeline(spec.lifeline).hold()  # until the end
    line, inbox = call_agent(spec), keeper.Inbox()
    line.listen(inbox)
    environment = {**outer_environment(), **rules.environment}
    if spec.devices:
        there = tuple(slot_devices.SlotDevice(*device) for device in spec.devices)
        chosen = dict.fromkeys(there[slot % len(there)].uuid for slot in spec.slots)
        environment[slot_devices.VISIBLE] = ",".join(chosen)
    settings = keeper.KeeperSettings(
        sender=spec.sender,
        rules=rules,
        host=spec.host,
        logs=Path(spec.logs),
        environment=environment,
        order=spec.order,
        secret=spec.secret,
    )
    try:
        code = keeper.keep(settings, line.say, inbox)
        line.finish()
        return code
    except BaseException as error:
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        line.say(
            raised(
                spec.sender,
                text,
                where="keeping ranks",
                traceback=traceback.format_exc(limit=50),
                raised_for=raised_for(error),
            )
        )
        warn(traceback.format_exc())
        line.finish()
        return 1
