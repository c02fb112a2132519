"""`everstep simulate`: weeks of a cluster under the policies of several systems, in seconds."""

from __future__ import annotations

import gzip
import json
import sys
import tomllib
import zlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everstep.cli.render import AsJson
from everstep.errors import UserError

if TYPE_CHECKING:
    from everstep_lab.study.request import Request


def simulate_command(
    study: Annotated[Path | None, typer.Argument(help="Study file (TOML); options override it.")] = None,
    trace: Annotated[
        str,
        typer.Option(
            help="trace-a, trace-b, llama3, c4, poisson, or a file: InfiniteHBD's faults, spot events, "
            "Parcae's segments, counts of nodes, Titan; "
            "see docs/simulator.md."
        ),
    ] = "",
    policies: Annotated[str, typer.Option(help="Policies, comma-separated, or all.")] = "",
    nodes: Annotated[int | None, typer.Option(help="Number of nodes.")] = None,
    slots: Annotated[int | None, typer.Option(help="GPUs per node.")] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU type: A100, A800, H100 or H200.")] = None,
    stack: Annotated[
        str | None, typer.Option(help="Throughput model: megatron, megatron-2022, llama3 ...")
    ] = None,
    mix: Annotated[str, typer.Option(help="Task mix 1 to 5 of six tasks each; see docs/simulator.md.")] = "",
    task: Annotated[list[str] | None, typer.Option(help="Task as model or model:weight. Repeatable.")] = None,
    rate: Annotated[
        str, typer.Option(help="For poisson: failures per 1,000 node-days, or a name such as llama3.")
    ] = "",
    mtbf_hours: Annotated[
        float | None, typer.Option(help="For poisson: hours between failures of the cluster.")
    ] = None,
    days: Annotated[float | None, typer.Option(help="Length of the simulation in days.")] = None,
    repair_hours: Annotated[str, typer.Option(help="Range of repair times, such as 4:72.")] = "",
    checkpoint_minutes: Annotated[
        float | None, typer.Option(help="Minutes between checkpoints on disk.")
    ] = None,
    spares: Annotated[int | None, typer.Option(help="Nodes held back as spares.")] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Number of random runs; more give a narrower confidence interval.")
    ] = None,
    ablation: Annotated[
        bool, typer.Option("--ablation", help="Everstep with one mechanism removed at a time.")
    ] = False,
    vary: Annotated[
        str, typer.Option(help="Sweep over a parameter, such as spares=0,1,2,4 or mtbf-hours=1,4,24.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Simulate a cluster under several recovery policies and compare their goodput.

    Every policy gets the same failures, the same first allocation and the same throughput model (see
    `everstep plan`). Goodput is the accumulated weighted achieved FLOPs (WAF), in per cent of a failure-free
    run; the other columns show where the rest is lost.

    Examples:

        everstep simulate --trace trace-a --policies all

        everstep simulate --trace poisson --rate llama3 --nodes 128 --days 90 --mix 5

        everstep simulate --trace poisson --vary mtbf-hours=1,2,4,8,24 --policies megatron,unicron,everstep

        everstep simulate --trace trace-b --ablation --seeds 20

        everstep simulate --trace infinitehbd.json --nodes 400 --task gpt3-175b --gpu H100 --stack llama3
    """
    flags = {
        "trace": trace or None,
        "policies": tuple(p.strip() for p in policies.split(",") if p.strip()) or None,
        "nodes": nodes,
        "slots": slots,
        "gpu": gpu,
        "stack": stack,
        "mix": mix or None,
        "tasks": tuple(task) if task else None,
        "rate": rate or None,
        "mtbf_hours": mtbf_hours,
        "days": days,
        "repair_hours": _pair(repair_hours),
        "checkpoint_minutes": checkpoint_minutes,
        "spares": spares,
        "seeds": seeds,
        "ablation": ablation or None,
    }
    request = _request(study, {name: value for name, value in flags.items() if value is not None})
    if vary:
        _sweep(request, vary, as_json)
    else:
        _one(request, as_json)


def _request(study: Path | None, flags: dict[str, Any]) -> Request:
    from everstep_lab.study.request import Request, from_document

    request = Request()
    if study is not None:
        try:
            request = from_document(tomllib.loads(study.read_text()), str(study))
        except OSError as error:
            raise UserError(f"{study} cannot be read: {error.strerror}.") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{study} is not TOML: {error}.") from None
    request = replace(request, **flags)
    path = Path(request.trace)
    if path.suffix in (".csv", ".gz", ".json", ".txt", ".log") or path.is_file():
        if study is not None and "trace" not in flags:
            path = study.parent / path
        request = replace(request, text=_read(path), trace=path.name)
    return request


def _read(path: Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (EOFError, zlib.error):
        raise UserError(f"{path} is cut or damaged: it cannot be decompressed.") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file.") from None


def _run(request: Request, *, quiet: bool) -> tuple[Any, Any, Any]:
    from everstep_lab.cli.progress import bar
    from everstep_lab.study.study import run_study

    traces = request.traces()
    setup = request.setup(traces[0])
    chosen = request.chosen()
    with bar(len(traces) * len(chosen), quiet=quiet, title="runs") as advance:
        return traces[0], setup, run_study(setup, traces, chosen, advance=advance)


def _one(request: Request, as_json: bool) -> None:
    from everstep_lab.study.report import document, table_lines

    trace, setup, summaries = _run(request, quiet=as_json)
    found = document(trace, setup, summaries)
    print(json.dumps(found) if as_json else "\n".join(table_lines(found)))


def _sweep(request: Request, vary: str, as_json: bool) -> None:
    from everstep_lab.study.report import document, sweep_lines

    name, _, values = vary.partition("=")
    if not values:
        raise UserError(f"--vary {vary!r} is not of the form spares=0,1,2,4.")
    rows = {}
    for value in values.split(","):
        varied = request.varied(name, value.strip())
        rows[value.strip()] = document(*_run(varied, quiet=as_json))
        if not as_json and sys.stderr.isatty():
            print(f"{name} = {value} done", file=sys.stderr)
    print(json.dumps({"vary": name, "rows": rows}) if as_json else "\n".join(sweep_lines(name, rows)))


def _pair(text: str) -> tuple[float, float] | None:
    if not text:
        return None
    try:
        low, high = (float(x) for x in text.split(":"))
    except ValueError:
        raise UserError(f"--repair-hours {text!r} is not of the form 4:72.") from None
    return low, high
