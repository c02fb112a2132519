"""The `everstep` command: a table of commands, and the one place where errors become sentences.

Exit codes: 0 done, 1 the run failed, 2 the input is wrong, 130 stopped by Ctrl-C, 143 by SIGTERM. Commands
that train import torch only after they have read their arguments, so `--help` and most errors are quick.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer

from everstep import log
from everstep.errors import EverstepError, UserError

_COMMANDS = {  # name: module and function, or a typer app of subcommands
    "demo": "everstep.cli.demo:demo_command",
    "train": "everstep.cli.train:train_command",
    "run": "everstep.cli.run:run_command",
    "coordinator": "everstep.cli.coordinator:coordinator_command",
    "agent": "everstep.cli.agent:agent_command",
    "submit": "everstep.cli.cluster:submit_command",
    "status": "everstep.cli.cluster:status_command",
    "queue": "everstep.cli.cluster:queue_command",
    "drain": "everstep.cli.cluster:drain_command",
    "check": "everstep.cli.check:check_command",
    "notice": "everstep.cli.cluster:notice_command",
    "cancel": "everstep.cli.cluster:cancel_command",
    "pause": "everstep.cli.cluster:pause_command",
    "resume": "everstep.cli.cluster:resume_command",
    "update": "everstep.cli.cluster:update_command",
    "resize": "everstep.cli.cluster:resize_command",
    "logs": "everstep.cli.cluster:logs_command",
    "access": "everstep.cli.access:access_app",
    "ca": "everstep.cli.ca:ca_app",
    "track": "everstep.cli.track:track_command",
    "trace": "everstep.cli.trace:trace_command",
    "stacks": "everstep.cli.inside:stacks_command",
    "collect": "everstep.cli.inside:collect_command",
    "report": "everstep.cli.report:report_command",
    "history": "everstep.cli.report:history_command",
    "audit": "everstep.cli.access:audit_command",
    "explain": "everstep.cli.explain:explain_command",
    "launch": "everstep.cli.launch:launch_app",
}
_USUAL_COMMANDS = {  # of other systems, and what they are called here
    "kill": "everstep cancel ends a task",
    "stop": "everstep cancel ends a task, everstep pause keeps it",
    "delete": "everstep cancel ends a task",
    "scancel": "everstep cancel ends a task",
    "tasks": "everstep status lists nodes and tasks",
    "jobs": "everstep status lists nodes and tasks",
    "nodes": "everstep status lists nodes and tasks",
    "list": "everstep status lists nodes and tasks",
    "ps": "everstep status lists nodes and tasks",
    "squeue": "everstep queue lists the tasks that wait, everstep status all of them",
    "readmit": "everstep drain NODE --readmit undoes a drain",
    "undrain": "everstep drain NODE --readmit undoes a drain",
    "incidents": "everstep explain lists recent incidents",
    "start": "everstep train runs a job here, everstep submit on a cluster",
    "sbatch": "everstep submit queues a task, everstep launch slurm starts one under Slurm",
    "torchrun": "everstep run --nproc N runs a script as torchrun does",
    "worker": "everstep agent starts a node's workers",
    "dashboard": "everstep coordinator serves it and prints its address",
    "export": "it is everstep ckpt export",
    "convert": "it is everstep ckpt convert",
}
# Entry points: the packages beside this one add their commands here, and so can others.
_ADDED = "everstep.commands"
_SETTINGS = {"run": {"allow_interspersed_args": False}}  # what follows the script belongs to the script


def build_app(first: str | None = None) -> typer.Typer:
    """The app. If `first` names a command, only that command is loaded."""
    app = typer.Typer(
        name="everstep",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Training that heals itself: no microbatch is lost, no step is repeated, "
        "and the losses are those of a failure-free run.",
    )

    @app.callback()  # makes the app a group, also while it has one command
    def everstep(
        version: Annotated[
            bool,
            typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit."),
        ] = False,
    ) -> None: ...

    places = _COMMANDS | {entry.name: entry.value for entry in entry_points(group=_ADDED)}
    for name, place in places.items():
        if first in places and first != name:
            continue
        command = _loaded(place) if name in _COMMANDS else _added(name, place)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, context_settings=_SETTINGS.get(name))(command)
    return app


def _loaded(place: str) -> Any:
    module, name = place.split(":")
    return getattr(import_module(module), name)


def _added(name: str, place: str) -> Any:
    """One of another package. If that is broken or gone, the other commands still work."""
    try:
        return _loaded(place)
    except (ImportError, AttributeError) as error:
        because = f"everstep {name} cannot be loaded: {error}. Install the package that it is from again."

        def broken() -> None:
            raise UserError(because)

        broken.__doc__ = "Cannot be loaded."
        return broken


def command_tree(first: str | None = None) -> Any:
    """The commands, with help pages that print no type beside a flag."""
    tree = typer.main.get_command(build_app(first))
    pending: list[Any] = [tree]
    while pending:
        command = pending.pop()
        pending.extend(getattr(command, "commands", {}).values())
        context = typer.Context(command, help_option_names=["-h", "--help"])
        for parameter in (*command.params, command.get_help_option(context)):
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
    return tree


def _version(wanted: bool) -> None:
    if wanted:
        from everstep import __version__

        print(f"everstep {__version__}")
        raise typer.Exit


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = command_tree(*given[:1])(args=given, prog_name="everstep", standalone_mode=False)
        return _say("stopped; no process is left running.", 130) if code == 130 else int(code or 0)
    except UserError as error:
        return _say(str(error), 2)
    except EverstepError as error:
        return _say(str(error), 1)
    except BrokenPipeError:  # the reader of our output has exited, as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if (place := _given_place(error, given)) is None:
            raise
        return _say(f"{place} cannot be used: {error.strerror or error}.", 2)
    except (KeyboardInterrupt, typer.Abort):  # which of the three it is depends on typer's version
        return _say("stopped; no process is left running.", 130)
    except Exception as error:
        if not hasattr(error, "format_message"):  # then it is a usage error, by whichever click typer brings
            raise
        message = error.format_message()
        if (usual := _USUAL_COMMANDS.get(next(iter(given), ""))) is not None:
            message = f"No such command {given[0]!r}; {usual}."
        command = getattr(getattr(error, "ctx", None), "command_path", None) or "everstep"
        option, ours = (getattr(error, name, None) or "" for name in ("option_name", "possibilities"))
        if option and command == "everstep run" and not get_close_matches(option, ours, cutoff=0.8):
            message = f"No such option: {option}; options of the script follow its name: train.py {option}"
        stop = "" if message.endswith((".", "?")) else "."
        return _say(f"{message}{stop} Try {command} --help." if message else "", 2)


def _given_place(error: OSError, given: Sequence[str]) -> str | None:
    """What of a command line the system refused: a path, or something in it; of a checkpoint, a URL."""
    if error.filename is None:
        return next((one for one in given if "://" in one and given[0] == "ckpt"), None)
    path = str(error.filename)
    return path if any(one and (path == one or path.startswith(f"{one}/")) for one in given) else None


def main() -> None:
    code = run()
    if (error := log.lost_output()) is not None:
        code = _say(f"stdout could not be written: {error.strerror}.", code or 1)
    sys.exit(code)


def _say(sentence: str, code: int) -> int:
    if sentence:
        log.say(f"everstep: {sentence}", level=logging.ERROR if code in (1, 2) else logging.INFO)
    return code


if __name__ == "__main__":
    main()
