"""torchrun's command line, read as torchrun reads it: options with - or _, PET_* variables, then the script.

An option that Everstep has no use for is accepted and said once; one that would change the meaning of a run
and is not supported is refused. Everything else is `everstep run`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from everstep import log
from everstep.cli import scripts
from everstep.errors import EverstepError, UserError

# Accepted and without effect: how Everstep does it is beside them.
_UNUSED = {
    "start-method": "ranks are forked from a process that has loaded their modules; see --preload",
    "monitor-interval": "the end of a rank is seen at once",
    "event-log-handler": "events are in the coordinator's journal",
    "metrics-cfg": "metrics are at /metrics of the coordinator",
    "logs-specs": "output goes to a file per rank and to this terminal",
    "duplicate-stdout-filters": "output goes to a file per rank and to this terminal",
    "duplicate-stderr-filters": "output goes to a file per rank and to this terminal",
    "signals-to-handle": "SIGTERM, SIGINT, SIGHUP and SIGQUIT end the run, SIGUSR1 and SIGUSR2 do nothing",
}


# Launchers that start one process per node say which node it is. After the command line and PET_*.
_LAUNCHERS = (
    {"nnodes": "SKYPILOT_NUM_NODES", "node_rank": "SKYPILOT_NODE_RANK", "master_addr": "SKYPILOT_NODE_IPS"},
    {"nnodes": "OMPI_COMM_WORLD_SIZE", "node_rank": "OMPI_COMM_WORLD_RANK"},
    {"nnodes": "PMI_SIZE", "node_rank": "PMI_RANK"},
    {"node_rank": "JOB_COMPLETION_INDEX"},  # an indexed Job of Kubernetes
)


def launcher_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What the launcher of this process says of its node: the first one that is there."""
    for names in _LAUNCHERS:
        if names["node_rank"] in environment:
            found = {option: environment[name] for option, name in names.items() if name in environment}
            if found.get("nnodes") == "1":
                return {}
            if "master_addr" in found:  # a list, one per line
                found["master_addr"] = found["master_addr"].split()[0]
            return found
    return {}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists all options.")


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="python -m everstep.run",
        description="Run a torchrun-style script with torchrun's command line. Its ranks are supervised, "
        "diagnosed and restarted; over several machines they continue on those that are left.",
        epilog="Examples: python -m everstep.run --standalone --nproc-per-node 8 train.py --lr 1e-4 | "
        "python -m everstep.run --nnodes 2:4 --nproc-per-node 8 --rdzv-backend c10d "
        "--rdzv-endpoint head:29400 --rdzv-id job7 train.py",
    )
    _option(made, "--nnodes", default="1:1", help="number of nodes, or MIN:MAX")
    _option(
        made, "--nproc-per-node", "--nproc", default="1", help="ranks per node: a number, gpu, cpu or auto"
    )
    _option(made, "--rdzv-backend", default="static", help="static or c10d")
    _option(made, "--rdzv-endpoint", default="", help="HOST:PORT of the machine that runs the coordinator")
    _option(made, "--rdzv-id", default="none", help="name of the run; the same on every node")
    _option(made, "--rdzv-conf", default="", help="KEY=VALUE,…: is_host, join_timeout, last_call_timeout")
    _flag(made, "--standalone", help="one machine")
    _option(made, "--max-restarts", default="0", help="restarts after failures of ranks (torchrun's default)")
    _option(made, "--role", default="default", help="ROLE_NAME")
    _flag(made, "--module", "-m", help="the script is the name of a module")
    _flag(made, "--no-python", help="the script is a program and no Python")
    _flag(made, "--run-path", help="accepted: scripts are run in their own process")
    _option(made, "--log-dir", "--log_dir", default="", help="directory for output; runs/ if not given")
    _option(made, "--node-rank", default="", help="number of this node, for a static rendezvous")
    _option(made, "--master-addr", default="", help="host of the node with number 0")
    _option(made, "--master-port", default="", help="its port")
    _option(made, "--local-addr", default="", help="where other nodes reach this one")
    _option(made, "--numa-binding", default="", help="not supported")
    _flag(made, "--virtual-local-rank", help="every rank sees one GPU, and is local rank 0")
    _option(
        made, "--redirects", "-r", default="0", help="1 stdout, 2 stderr, 3 both: only to the rank's file"
    )
    _option(made, "--tee", "-t", default="0", help="as --redirects, and to this terminal too")
    _option(made, "--local-ranks-filter", default="", help="show the output of these local ranks: 0,1")
    _option(made, "--shutdown-timeout", default="", help="as --grace")
    own = made.add_argument_group("Everstep's own")
    _option(own, "--hang-after", default="", help="seconds without progress of any rank, then restart")
    _option(own, "--grace", default="", help="seconds from SIGTERM to SIGKILL")
    _option(own, "--snapshot-dir", default="", help="states of everstep.snapshot are also written there")
    _option(own, "--preload", default="auto", help="modules to import once and fork ranks from; or none")
    for name in _UNUSED:
        _option(made, f"--{name}", default="", help=argparse.SUPPRESS)
    made.add_argument("training_script", nargs="?", help="the script, module or program")
    made.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")
    return made


def _option(made: Any, name: str, *more: str, default: str, help: str) -> None:
    dest = name[2:].replace("-", "_")
    spelled = dict.fromkeys([name, name.replace("-", "_").replace("__", "--"), *more])
    value = os.environ.get(f"PET_{dest.upper()}") or launcher_variables(os.environ).get(dest, default)
    made.add_argument(*spelled, dest=dest, default=value, help=help)


def _flag(made: Any, name: str, *more: str, help: str) -> None:
    dest = name[2:].replace("-", "_")
    spelled = dict.fromkeys([name, name.replace("-", "_").replace("__", "--"), *more])
    is_set = os.environ.get(f"PET_{dest.upper()}", "0") not in ("", "0", "false", "False")
    made.add_argument(*spelled, dest=dest, action="store_true", default=is_set, help=help)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Words up to the script are ours. argparse is not shown the others: it takes options of the script for
    abbreviations of ours, and refuses those that could be several.
    """
    made = parser()
    for end, word in enumerate(words, start=1):
        if not word.startswith("-"):
            given = made.parse_args(words[:end])
            if given.training_script is not None:
                given.training_script_args = list(words[end:])
                return given
    made.parse_args(words)  # --help
    raise UserError("the script is missing; give its path after the options.")


def main(arguments: Sequence[str]) -> int:
    log.start()
    try:
        return run(parse(arguments))
    except UserError as error:
        log.say(f"everstep: {error}")
        return 2
    except EverstepError as error:
        log.say(f"everstep: {error}")
        return 1


def run(given: argparse.Namespace) -> int:
    for name, instead in _UNUSED.items():
        if getattr(given, name.replace("-", "_")):
            log.say(f"everstep: --{name} has no effect: {instead}.")
    if given.numa_binding:
        raise UserError("--numa-binding is not supported; remove it.")
    if given.module and given.no_python:
        raise UserError("--module and --no-python contradict each other; remove one.")
    least, most = scripts.nodes_range(given.nnodes, "--nnodes")
    command = [given.training_script, *given.training_script_args]
    is_file = not given.module and not given.no_python
    if is_file and not Path(given.training_script).is_file():
        raise UserError(f"script {given.training_script!r} is not a file.")
    ranks = scripts.count(given.nproc_per_node, "--nproc-per-node")
    run = scripts.ScriptCommand(
        command=["-m", *command] if given.module else command,
        is_program=given.no_python,
        ranks=ranks,
        least=least,
        most=most,
        max_restarts=_whole(given.max_restarts, "--max-restarts"),
        hang_after_s=_seconds(given.hang_after, "--hang-after") if given.hang_after else None,
        grace_s=_grace_s(given),
        preload=[name for name in given.preload.split(",") if name],
        log_dir=Path(given.log_dir or "runs"),
        snapshot_dir=Path(given.snapshot_dir) if given.snapshot_dir else None,
        role=given.role,
        hidden=hidden(given, ranks),
        has_own_device=given.virtual_local_rank,
    )
    if given.standalone and least > 1:
        raise UserError(f"--standalone is for one machine, and --nnodes is {given.nnodes!r}; remove one.")
    if given.standalone or most == 1:
        port = _whole(given.master_port, "--master-port") if given.master_port else 0
        return scripts.run_here(run, port=0 if given.standalone else port, as_json=False)
    return scripts.run_on_nodes(run, rendezvous(given), as_json=False)


def rendezvous(given: argparse.Namespace) -> scripts.Rendezvous:
    """Where the machines meet, and whether it is here."""
    conf = _conf(given.rdzv_conf)
    rank = given.node_rank or conf.get("rank", "")
    is_static = given.rdzv_backend == "static"
    if given.rdzv_backend not in ("static", "c10d"):
        raise UserError(
            f"--rdzv-backend is {given.rdzv_backend!r}; give c10d with --rdzv-endpoint, or static with "
            "--master-addr and --node-rank. Everstep needs no other store."
        )
    endpoint = given.rdzv_endpoint
    if is_static and not endpoint:
        endpoint = f"{given.master_addr or '127.0.0.1'}:{given.master_port or 29500}"
    if not endpoint:
        raise UserError("--rdzv-endpoint is missing; give HOST:PORT of one of the nodes.")
    if is_static and not rank:
        raise UserError("--node-rank is missing; give the number of this node, from 0.")
    is_host = conf.get("is_host", "").lower()
    return scripts.Rendezvous(
        endpoint=scripts.endpoint(endpoint, 29500 if is_static else 29400),
        run_id=given.rdzv_id if given.rdzv_id != "none" else "run",
        node_rank=_whole(rank, "--node-rank") if rank else None,
        is_endpoint=is_host in ("1", "true", "yes") if is_host else None,
        local_address=given.local_addr,
        join_timeout_s=_seconds(conf.get("join_timeout", "600"), "--rdzv-conf join_timeout"),
        last_call_s=_seconds(conf.get("last_call_timeout", "30"), "--rdzv-conf last_call_timeout"),
    )


def hidden(given: argparse.Namespace, ranks: int) -> dict[int, int]:
    """By local rank, which of its streams the terminal does not get: what is redirected, unless it is teed as
    well, and all of a rank that the filter leaves out.
    """
    redirected = _streams(given.redirects, "--redirects", ranks)
    teed = _streams(given.tee, "--tee", ranks)
    shown = given.local_ranks_filter.split(",") if given.local_ranks_filter else map(str, range(ranks))
    kept = {_whole(text, "--local-ranks-filter") for text in shown}
    found = {rank: redirected[rank] & ~teed[rank] if rank in kept else 3 for rank in range(ranks)}
    return {rank: streams for rank, streams in found.items() if streams}


def _streams(text: str, option: str, ranks: int) -> dict[int, int]:
    """3 for all ranks, or 0:1,1:2 for those named; 1 is stdout, 2 stderr, 3 both."""
    pairs = [pair.rpartition(":") for pair in (text or "0").split(",")]
    found = dict.fromkeys(range(ranks), 0)
    for rank, colon, streams in pairs:
        if streams not in ("0", "1", "2", "3") or (not colon and len(pairs) > 1):
            raise UserError(f"{option} is {text!r}; give 0, 1, 2 or 3, or RANK:NUMBER,RANK:NUMBER.")
        chosen = [_whole(rank, option)] if colon else range(ranks)
        found.update({each: int(streams) for each in chosen if each < ranks})
    return found


def _grace_s(given: argparse.Namespace) -> float:
    name = "--shutdown-timeout" if given.shutdown_timeout and not given.grace else "--grace"
    return _seconds(given.grace or given.shutdown_timeout or "5", name)


def _conf(text: str) -> dict[str, str]:
    found = {}
    for pair in filter(None, text.split(",")):
        name, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"--rdzv-conf is {text!r}; give KEY=VALUE,KEY=VALUE.")
        found[name.strip()] = value.strip()
    return found


def _whole(text: str, option: str) -> int:
    if not text.isdecimal():
        raise UserError(f"{option} is {text!r}; give a whole number.")
    return int(text)


def _seconds(text: str, option: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise UserError(f"{option} is {text!r}; give seconds.")
    return value
