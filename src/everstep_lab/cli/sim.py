"""`everstep sim storm`: thousands of random storms around the real recovery, by seed."""

from __future__ import annotations

import gc
import json
import secrets
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everstep.cli.render import AsJson
from everstep.errors import UserError

if TYPE_CHECKING:
    from everstep_lab.storm import StormKind

sim_app = typer.Typer(
    no_args_is_help=True, help="Run fault storms in the deterministic simulator (for tests)."
)
SHOWN = 3  # failing seeds printed in full
TAIL = 40  # lines of their transcripts


@sim_app.callback()
def sim() -> None:
    """Run fault storms in the deterministic simulator. To compare policies see `everstep simulate`."""


@sim_app.command("storm")
def storm_command(
    seeds: Annotated[
        str, typer.Option(help="Range first:end, end excluded; one seed; or fresh:N, N seeds drawn now.")
    ] = "0:1000",
    keep: Annotated[str, typer.Option(help="Only these faults of the seed, by number, such as 0,3.")] = "",
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Simulate the whole coordinator with agents and detectors.")
    ] = False,
    moves: Annotated[
        bool, typer.Option("--moves", help="As --cluster, with memory copies and changes of shape.")
    ] = False,
    sharded: Annotated[
        bool,
        typer.Option("--sharded", help="Shard the optimizer states of each stage over its replicas."),
    ] = False,
    groups: Annotated[
        bool, typer.Option("--groups", help="As --cluster, with workers of two or three processes (shards).")
    ] = False,
    votes: Annotated[
        bool, typer.Option("--votes", help="As --cluster, with replicas that check each other's numbers.")
    ] = False,
    flips: Annotated[
        bool, typer.Option("--flips", help="No other faults: one worker computes or holds a wrong number.")
    ] = False,
    corruption: Annotated[
        bool,
        typer.Option(
            "--corruption", help="As --cluster, with votes and a machine that computes wrong numbers."
        ),
    ] = False,
    spikes: Annotated[
        bool, typer.Option("--spikes", help="As --cluster; steps with a NaN are computed again.")
    ] = False,
    hangs: Annotated[
        bool,
        typer.Option("--hangs", help="As --cluster, with starts, disks and copies that never end."),
    ] = False,
    cuts: Annotated[
        bool,
        typer.Option("--cuts", help="As --cluster, with a node whose data network alone is dead."),
    ] = False,
    plans: Annotated[
        bool,
        typer.Option("--plans", help="As --cluster, with a planner that changes its mind, pauses, cancels."),
    ] = False,
    agents: Annotated[
        bool,
        typer.Option("--agents", help="As --cluster, with agents that are replaced under their workers."),
    ] = False,
    tasks: Annotated[
        bool, typer.Option("--tasks", help="As --cluster, beside other tasks; half of them with --plans.")
    ] = False,
    virtual: Annotated[
        bool,
        typer.Option("--virtual", help="As --cluster, with workers that run several parts of the model."),
    ] = False,
    roles: Annotated[
        bool,
        typer.Option("--roles", help="As --plans, with workers that move to a stage that lost most of its."),
    ] = False,
    crowded: Annotated[
        bool,
        typer.Option("--crowded", help="As --cluster, with several replicas of a stage on each node."),
    ] = False,
    transcript: Annotated[
        bool, typer.Option("--transcript", help="Print every event, in virtual time.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Inject random faults into a simulated cluster that runs the real decisions.

    Each seed is one storm: it determines shape, network and faults. Invariants are checked after every event.
    The faults end after a while, and training must then finish. A failing seed is reduced to few faults and
    printed with the command that replays it.

    Examples:

        everstep sim storm --seeds 0:1000

        everstep sim storm --seeds 0:500 --cluster

        everstep sim storm --seeds 0:500 --moves

        everstep sim storm --seeds 0:500 --sharded --cluster

        everstep sim storm --seeds 0:500 --flips

        everstep sim storm --seeds 0:500 --corruption

        everstep sim storm --seeds 0:500 --hangs

        everstep sim storm --seeds 0:500 --cuts

        everstep sim storm --seeds 0:500 --plans

        everstep sim storm --seeds 0:500 --agents

        everstep sim storm --seeds 0:500 --tasks

        everstep sim storm --seeds 0:500 --virtual

        everstep sim storm --seeds 0:500 --roles

        everstep sim storm --seeds 0:500 --crowded

        everstep sim storm --seeds fresh:200 --cluster

        everstep sim storm --seeds 17 --transcript

        everstep sim storm --seeds 583 --keep 0,3 --transcript
    """
    from everstep_lab.storm import draw_storm, is_of_cluster, run_storm

    alone = [groups, votes, flips, corruption, spikes, hangs, cuts, plans, agents, tasks, virtual, roles]
    alone.append(crowded)
    kind = _kind(cluster=cluster, moves=moves, sharded=sharded, alone=alone)
    first, last = _range(seeds)
    kept = _numbers(keep)
    if (transcript or kept is not None) and last != first + 1:
        raise UserError("--transcript and --keep look at one storm; give one seed, as in --seeds 17.")
    if transcript or kept is not None:
        raise typer.Exit(_show_one(first, kept, transcript, as_json, kind))
    gc.disable()  # millions of small objects and no cycle worth the look
    began = time.process_time()
    failed, events, deaths, incidents, moved = [], 0, 0, 0, 0
    digest = 0
    with bar(last - first, quiet=as_json) as advance:
        for seed in range(first, last):
            report = run_storm(draw_storm(seed, kind), cluster=is_of_cluster(kind))
            events += report.events
            deaths += report.deaths
            incidents += report.incidents
            moved += report.roles
            digest = (digest * 31 + int(report.hash, 16)) % (1 << 64)
            if report.violation is not None:
                failed.append((seed, report.violation))
            if seed % 500 == 499:
                gc.collect()
            advance()
    spent = time.process_time() - began
    gc.enable()
    result = {
        "seeds": [first, last],
        "passed": last - first - len(failed),
        "failed": [{"seed": s, "violation": v, "replay": _replay(s, kind)} for s, v in failed],
        "events": events,
        "deaths": deaths,
        "incidents": incidents,
        "changes_of_stage": moved,
        "cpu_seconds": round(spent, 2),
        "seeds_per_second": round((last - first) / max(spent, 1e-9), 1),
        "hash": f"{digest:016x}",
    }
    if as_json:
        print(json.dumps(result))
    else:
        _tell(result, failed, kind)
    if failed:
        raise typer.Exit(1)


def _show_one(
    seed: int, kept: tuple[int, ...] | None, transcript: bool, as_json: bool, kind: StormKind
) -> int:
    from everstep_lab.storm import draw_storm, is_of_cluster, run_storm

    spec = draw_storm(seed, kind)
    if kept is not None:
        if any(not 0 <= i < len(spec.faults) for i in kept):
            raise UserError(
                f"--keep names a fault that seed {seed} does not have; it has {len(spec.faults)}."
            )
        spec = spec.keep(kept)
    report = run_storm(spec, record=transcript, cluster=is_of_cluster(kind))
    if as_json:
        fields = {name: getattr(report, name) for name in report.__dataclass_fields__}
        print(json.dumps(fields | {"spec": spec.lines()}))
    else:
        print("\n".join([*spec.lines(), *report.transcript]))
        print(f"hash {report.hash}; {report.violation or 'passed'}")
    return 0 if report.violation is None else 1


def _tell(result: dict[str, Any], failed: list[tuple[int, str]], kind: StormKind) -> None:
    first, last = result["seeds"]
    print(
        f"seeds {first}:{last}: {result['passed']} passed, {len(failed)} failed; {result['events']} events, "
        f"{result['deaths']} deaths, {result['incidents']} incidents, "
        f"{result['changes_of_stage']} changes of stage; {result['cpu_seconds']} s of one core, "
        f"{result['seeds_per_second']} seeds/s; hash {result['hash']}"
    )
    for seed, _ in failed[:SHOWN]:
        _tell_failure(seed, kind)
    for seed, violation in failed[SHOWN:]:
        print(f"seed {seed}: {violation[:160]}\n  {_replay(seed, kind)}")


def _tell_failure(seed: int, kind: StormKind) -> None:
    from everstep_lab.storm import draw_storm, is_of_cluster, run_storm
    from everstep_lab.storm.shrink import shrink

    spec = draw_storm(seed, kind)
    few = shrink(spec, cluster=is_of_cluster(kind))
    report = run_storm(spec.keep(few), record=True, cluster=is_of_cluster(kind))
    print("\n".join(["", *spec.keep(few).lines()]))
    print("\n".join(line[:200] for line in report.transcript[-TAIL:]))
    print(f"seed {seed}: {report.violation}")
    print(f"replay: {_replay(seed, kind)}")
    print(f"with {len(few)} of its {len(spec.faults)} faults: {_replay(seed, kind, few)}")


def _replay(seed: int, kind: StormKind, few: tuple[int, ...] | None = None) -> str:
    kept = "" if few is None else f" --keep {','.join(map(str, few))}"
    flags = "".join(f" --{word}" for word in kind.split("-") if word)
    return f"everstep sim storm --seeds {seed}{kept}{flags} --transcript"


def _kind(*, cluster: bool, moves: bool, sharded: bool, alone: list[bool]) -> StormKind:
    """`alone`: groups, votes and so on, each of which draws its storm by itself."""
    if any(alone):
        kinds: tuple[StormKind, ...] = (
            *("groups", "votes", "flips", "corruption", "spikes", "hangs", "cuts", "plans", "agents"),
            "tasks",
            "virtual",
            "roles",
            "crowded",
        )
        chosen = kinds[alone.index(True)]
        if moves or sharded or sum(alone) > 1:
            raise UserError(
                f"--{chosen} draws sharded states and copies by itself: leave out --moves, --sharded and the "
                "like."
            )
        return chosen
    if sharded:
        return "sharded-moves" if moves else "sharded-cluster" if cluster else "sharded"
    return "moves" if moves else "cluster" if cluster else ""


def _range(text: str) -> tuple[int, int]:
    parts = text.split(":")
    if parts[0] == "fresh" and len(parts) == 2 and parts[1].isdigit() and int(parts[1]):
        first = secrets.randbelow(1 << 40)
        return first, first + int(parts[1])
    if not all(p.isdigit() for p in parts) or len(parts) > 2:
        raise UserError(f"--seeds {text!r} is not of the form 0:1000, 17 or fresh:100.")
    first, last = int(parts[0]), int(parts[-1]) + (len(parts) == 1)
    if last <= first:
        raise UserError(f"--seeds {text!r} holds no seed; the second number must be larger.")
    return first, last


def _numbers(text: str) -> tuple[int, ...] | None:
    if not text:
        return None
    if not all(p.strip().isdigit() for p in text.split(",")):
        raise UserError(f"--keep {text!r} is not a list of fault numbers such as 0,3.")
    return tuple(int(p) for p in text.split(","))


class bar:
    """A progress bar on stderr, where that is a terminal."""

    def __init__(self, total: int, *, quiet: bool, title: str = "storms") -> None:
        self.total, self.title = total, title
        self.quiet = quiet or not sys.stderr.isatty()

    def __enter__(self) -> Any:
        if self.quiet:
            return lambda: None
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        self.progress = Progress(
            self.title, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True)
        )
        self.progress.start()
        task = self.progress.add_task(self.title, total=self.total)
        return lambda: self.progress.advance(task)

    def __exit__(self, *_: object) -> None:
        if not self.quiet:
            self.progress.stop()
