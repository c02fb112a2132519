"""Options of `everstep submit --script` and `everstep run`: how many ranks and nodes a script gets."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from everstep.errors import UserError


def nodes_range(text: str, option: str) -> tuple[int, int]:
    """`4`, or `2:4` for at least 2 and at most 4, as torchrun reads it."""
    least, colon, most = text.partition(":")
    if not least.isdecimal() or (colon and not most.isdecimal()):
        raise UserError(f"{option} is {text!r}; give a number of nodes, or MIN:MAX.")
    low, high = int(least), int(most or least)
    if not 1 <= low <= high:
        raise UserError(f"{option} is {text!r}; give MIN from 1, and MAX at least MIN.")
    return low, high


def count(text: str, option: str) -> int:
    """A number of ranks, as torchrun reads it: also gpu, cpu or auto, for those of this machine."""
    if text in ("gpu", "auto"):
        import torch

        if found := torch.cuda.device_count():
            return found
        if text == "gpu":
            raise UserError(f"{option} is gpu, but torch finds no GPU; give a number.")
    if text in ("cpu", "auto"):
        return len(os.sched_getaffinity(0))
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{option} is {text!r}; give a number from 1, gpu or cpu.")
    return int(text)


def environment(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise UserError(f"--env is {pair!r}; give NAME=VALUE.")
        found[name] = value
    return found


class Standby(StrEnum):
    PARKED = "parked"
    NONE = "none"


def hold_choice(hold: bool | None) -> str | None:
    return None if hold is None else "on" if hold else "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCommand:
    """A script as a command line describes it: `run --nproc`, torchrun's, `submit --script`."""

    command: list[str]
    ranks: int  # per node
    least: int = 1  # nodes
    most: int = 1
    is_program: bool = False
    max_restarts: int = 3
    hang_after_s: float | None = None
    grace_s: float = 5.0
    preload: list[str] | None = None
    log_dir: Path | None = None
    snapshot_dir: Path | None = None
    hold: str | None = None
    unit: int | None = None
    copy_every: int | None = None
    standby: Standby | None = None
    exact: bool = False
    role: str = "default"
    hidden: dict[int, int] = field(default_factory=dict)
    has_own_device: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = (("--max-restarts", self.max_restarts, 0), ("--grace", self.grace_s, 0))
        more = (("--unit", self.unit, 1), ("--copy-every", self.copy_every, 1))
        for option, value, least in (*limits, *more, ("--hang-after", self.hang_after_s, 1)):
            if value is not None and not value >= least:
                raise UserError(f"{option} is {value:g}; give at least {least:g}.")

    def table(self, **more: Any) -> dict[str, Any]:
        """Of a script task, as the API takes it; what is None is left to its default."""
        given = {
            "ranks": self.ranks,
            "least": self.least,
            "most": self.most,
            "is_program": self.is_program,
            "max_restarts": self.max_restarts,
            "hang_after_s": self.hang_after_s,
            "grace_s": self.grace_s,
            "preload": self.preload,
            "logs": None if self.log_dir is None else str(self.log_dir.resolve()),
            "hold": self.hold,
            "unit": self.unit,
            "copy_every": self.copy_every,
            "standby": None if self.standby is None else str(self.standby),
            "exact": self.exact,
            "role": self.role,
            "hidden": self.hidden,
            "has_own_device": self.has_own_device,
            "snapshots": None if self.snapshot_dir is None else str(self.snapshot_dir.resolve()),
            "environment": self.environment,
            **more,
        }
        chosen = {name: value for name, value in given.items() if value is not None}
        return {"command": list(self.command), "folder": str(Path.cwd()), **chosen}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    endpoint: tuple[str, int]
    run_id: str
    node_rank: int | None = None
    is_endpoint: bool | None = None
    local_address: str = ""
    join_timeout_s: float = 600.0
    last_call_s: float = 30.0


def endpoint(text: str, default_port: int) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    is_bare = text.count(":") > 1 and not text.startswith("[")  # an address of IPv6
    if not colon or is_bare or text.endswith("]"):
        host, port = text, str(default_port)
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"--rdzv-endpoint is {text!r}; give HOST:PORT.")
    plain = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if set("[]/@ ") & set(plain) or (":" in plain and not _is_ip6(plain)):
        raise UserError(f"--rdzv-endpoint is {text!r}; give HOST:PORT, or [HOST]:PORT with an IPv6 address.")
    return plain, int(port)


def _is_ip6(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.IPv6Address(text))
    return False


def refuse_folders(run: ScriptCommand) -> None:
    """Those of its logs and snapshots, if no file can be made there. Said here, because ranks would only say
    it in the middle of training.
    """
    for option, folder in (("--log-dir", run.log_dir), ("--snapshot-dir", run.snapshot_dir)):
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):
                    pass
        except OSError as error:
            raise UserError(
                f"{option} {folder} cannot be written: {error.strerror}; give another directory."
            ) from None


def run_here(run: ScriptCommand, *, port: int, as_json: bool) -> int:
    """All ranks on this machine."""
    refuse_folders(run)
    from everstep.cli import render
    from everstep.launch.local import script_run
    from everstep.protocol.codec import decode
    from everstep.protocol.messages import RankRules

    table = run.table(run_id=script_run.run_id(), port=port)
    rules: RankRules = decode(RankRules, {"is": "RankRules", **table})
    output = sys.stderr.buffer if as_json else sys.stdout.buffer
    launch = script_run.ScriptLaunch(rules=rules, output=output)
    ran = script_run.ScriptRun(launch, render.note).run()
    if as_json:
        render.emit(script_run.document(launch, ran))
    render.note(script_run.summary(launch, ran))
    return ran.code


def run_on_nodes(run: ScriptCommand, at: Rendezvous, *, as_json: bool) -> int:
    """This machine's part of a run over several."""
    refuse_folders(run)
    from everstep.cli import render
    from everstep.cli.coordinator import Signalled, until_signalled
    from everstep.launch import coordinator_token, script_nodes

    is_endpoint = at.is_endpoint
    if is_endpoint is None and at.node_rank is not None:
        is_endpoint = at.node_rank == 0
    elif is_endpoint is None and not script_nodes.is_here(at.endpoint[0]):
        is_endpoint = False
    here = script_nodes.RunOnNodes(
        script_nodes.NodeRun(
            run_id=at.run_id,
            endpoint=at.endpoint,
            is_endpoint=is_endpoint,
            order=at.node_rank,
            host=at.local_address,
            token=script_nodes.token_of_run(at.endpoint, os.environ.get(coordinator_token.VARIABLE, "")),
            ranks=run.table(join_s=at.last_call_s),
            output=sys.stderr.buffer if as_json else sys.stdout.buffer,
            grace_s=run.grace_s + 5.0,
            join_timeout_s=at.join_timeout_s,
        )
    )
    coordinator_token.clean_environment()
    codes: list[int] = []

    async def go(signalled: Signalled) -> None:
        signalled.gently = here.leave
        codes.append(await here.go())

    code = until_signalled(go) or (codes[0] if codes else 1)
    if as_json and here.document is not None:
        render.emit(here.document)
    return code
