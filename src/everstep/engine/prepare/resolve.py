"""From a job's words to the things they name: the model, the data, the optimizer.

`module:function` is looked up in the job file's folder, then in the working folder, then where Python looks.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from everstep.engine.datasets.data import Dataset, Synthetic, evaluated_on, of_job
from everstep.engine.datasets.table_rows import table
from everstep.engine.datasets.tokens import tokens
from everstep.engine.layers.model import Model, in_short, slots, token_loss
from everstep.engine.prepare.context import StartedInImportError, importing
from everstep.engine.stage.evaluation import Evaluation, Metric
from everstep.engine.state.optimizer import OptimizerFactory, adamw, torch_optimizer
from everstep.engine.state.optimizer_state import Named
from everstep.engine.state.schedules import Rate, rate_of
from everstep.errors import UserError
from everstep.job.code import verify
from everstep.job.job import Job
from everstep.job.presets import MODELS, SMALLEST, closest


def resolve(name: str, where: str, base: str | Path = ".") -> Callable[..., Any]:
    """The function that `module:function` names; `where` is the key of the job that named it."""
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise UserError(f'{where} is {name!r}; write it as "module:function".')
    if module_name == "__main__":
        raise UserError(
            f"{where} is {name!r}, and every worker has another __main__; move {function_name} to a file of "
            f'its own, mine.py, and write "mine:{function_name}".'
        )
    for folder in (str(Path.cwd()), str(Path(base).resolve())):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    module = _imported(module_name, name, where)
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if function is None:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(
            f"{where} {name!r}: module {module_name!r} has no {function_name!r}; "
            f"{closest(function_name, names)}"
        )
    if not callable(function):
        raise UserError(f"{where} {name!r} is a {type(function).__name__}; it must be a function.")
    return function


def _imported(module_name: str, name: str, where: str) -> ModuleType:
    """The user's module, run for the first time. It may be a script that also trains: not here, and it does
    not see the words of this command line.
    """
    words = sys.argv
    sys.argv = words[:1]
    try:
        with importing():
            return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(f"{where} {name!r} imports {error.name!r}, which is not installed.") from error
        raise UserError(
            f"{where} {name!r}: there is no module {error.name!r} beside the job file, "
            "in the working folder or installed."
        ) from None
    except (StartedInImportError, SystemExit) as error:
        what = f"calls {error}" if isinstance(error, StartedInImportError) else "ends Python"
        raise UserError(
            f"{where} {name!r}: module {module_name!r} {what} while it is imported"
            f'{_line(error, module_name)}; put that behind if __name__ == "__main__", which only runs when '
            "the file is started as a script."
        ) from None
    except Exception as error:
        raise UserError(
            f"{where} {name!r} cannot be imported: {in_short(error)}{_line(error, module_name)}."
        ) from error
    finally:
        sys.argv = words


def _line(error: BaseException, module_name: str) -> str:
    """Where the module was, for the middle of a sentence."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_globals.get("__name__") == module_name]
    return f" (line {lines[-1]})" if lines else ""


def _of_job(job: Job, name: str, where: str) -> Callable[..., Any]:
    """What the job's own code names: of the code that was packed, where it was."""
    if job.code is None:
        return resolve(name, where, job.base)
    verify(job.path(job.code).resolve())
    return resolve(name, where, job.path(job.code))


def model_of(job: Job) -> Model:
    spec = job.model
    if spec.hf is not None:
        return _hugging_face(job, dict(spec.options))
    if spec.build is None:
        form = spec.shape()
        assert form is not None
        module, _, function = MODELS[spec.preset or SMALLEST].build.partition(":")
        model: Model = getattr(importlib.import_module(module), function)(form)
        data = [job.data, *([] if job.evaluation is None else [job.evaluation.data])]
        counts = any(spec.pack or spec.document_end is not None for spec in data)  # not every target
        return replace(model, loss=token_loss) if counts else model
    made = _call(_of_job(job, spec.build, "model.build"), "model.build", spec.options)
    return made if isinstance(made, Model) else Model(layers=made)


def _hugging_face(job: Job, options: dict[str, Any]) -> Model:
    from everstep.engine.hf.model import hf

    prepare = options.pop("prepare", None)
    if prepare is not None:
        options["prepare"] = _of_job(job, prepare, "model.prepare")
    assert job.model.hf is not None
    return hf(job.path(job.model.hf), **options)


def data_of(job: Job, *, evaluated: int | None = None) -> Dataset:
    """`evaluated`: the data of an evaluation, of so many batches."""
    spec, language = job.data, job.language()
    if spec.build is not None:
        made = _call(_of_job(job, spec.build, "data.build"), "data.build", spec.options)
        if not callable(getattr(made, "batch", None)):
            raise UserError(
                f"data.build {spec.build!r} gave a {type(made).__name__} without "
                "batch(step, microbatch); return an object that has it."
            )
        dataset: Dataset = of_job(made, job) if evaluated is None else evaluated_on(made, job, evaluated)
        return dataset
    sequence = spec.sequence or (language[1] if language is not None else None)
    if sequence is None and (spec.kind != "table" or spec.pack):
        raise UserError("data.sequence is missing; a model of your own needs the length of a row.")
    if spec.kind == "table":
        assert spec.path is not None
        source = table(
            job.path(spec.path),
            columns=spec.columns,
            rows=spec.rows,
            pack=sequence if spec.pack else None,
            shuffle=spec.shuffle,
        )
        return source.for_job(job)
    assert sequence is not None
    if spec.kind == "tokens":
        assert spec.path is not None
        packed = tokens(
            job.path(spec.path),
            sequence=sequence,
            rows=spec.rows,
            token=spec.token,
            document_end=spec.document_end,
            shuffle=spec.shuffle,
        )
        return packed.for_job(job)
    return Synthetic(
        vocab=language[0] if language is not None else 256, sequence=sequence, rows=spec.rows, seed=job.seed
    )


def evaluation_of(
    job: Job, data: Dataset | None = None, metrics: Mapping[str, Metric] | None = None
) -> Evaluation | None:
    """What a job says of evaluation; a script gives its own metrics, and its data as its user gave it."""
    spec = job.evaluation
    if spec is None:
        return None
    if data is None:
        data = data_of(replace(job, data=spec.data), evaluated=spec.batches)
        metrics = {name: _metric(name, job) for name in spec.metrics}
    else:
        data = evaluated_on(data, job, spec.batches)
    return Evaluation(
        data=data,
        every=spec.every,
        batches=spec.batches,
        steps=job.steps,
        microbatches=job.microbatches_in_step,
        metrics={name.rpartition(":")[2]: metric for name, metric in (metrics or {}).items()},
    )


def _metric(name: str, job: Job) -> Metric:
    return _of_job(job, name, "evaluation.metrics")


def optimizer_of(job: Job) -> OptimizerFactory:
    spec = job.optimizer
    if spec.name is not None:
        return torch_optimizer(spec.name, {"lr": spec.lr, **spec.changed(), **spec.options})
    if spec.build is None:
        return adamw(lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay)
    build = _of_job(job, spec.build, "optimizer.build")
    return lambda named: _call(build, "optimizer.build", spec.options, named)


def parameters_of(model: Model, layers: range) -> Named:
    """Each one zero, seen through its shape."""
    found = slots(model, layers).items()
    return [(name, nn.Parameter(torch.zeros(()).expand(slot.shape))) for name, slot in found]


def tried_optimizer(
    build: OptimizerFactory, model: Model, layers: range, named: Named | None = None
) -> torch.optim.Optimizer:
    """Made for some layers' parameters, `named`."""
    named = parameters_of(model, layers) if named is None else named
    try:
        made = build(named)
    except UserError:
        raise
    except Exception as error:  # the user's function
        where = ", ".join(repr(model.names[index]) for index in (layers[0], layers[-1])[: len(layers)])
        raise UserError(
            f"the optimizer cannot be made for layers {where}: {in_short(error)}; each stage makes its own, "
            "of the (name, parameter) pairs of its layers."
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise UserError(f"optimizer.build gave a {type(made).__name__}; return a torch.optim.Optimizer.")
    for group in made.param_groups:
        if not isinstance(group.get("lr"), int | float | torch.Tensor):
            raise UserError(
                f"{type(made).__name__} has a group whose lr is {group.get('lr')!r}; give it a number, which "
                "schedules multiply."
            )
    closure, sparse = inspect.signature(made.step).parameters.get("closure"), torch.optim.SparseAdam
    if isinstance(made, sparse) or (closure is not None and closure.default is closure.empty):
        why = "needs sparse gradients" if isinstance(made, sparse) else "needs a closure"
        raise UserError(
            f"{type(made).__name__} {why}, which a pipeline does not do; use another one, such as AdamW."
        )
    return made


def refuse_untied(model: Model, parts: Sequence[range], build: OptimizerFactory) -> None:
    """The halves of a tied pair are parameters of their own: one step must do the same to both."""
    tied = {name for pair in model.tied for name in pair}
    groups: dict[str, dict[str, Any]] = {}
    for part in parts:
        named = parameters_of(model, part)
        here = {id(p): name for name, p in named if name in tied}
        for group in tried_optimizer(build, model, part, named).param_groups if here else ():
            numbers = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups |= {here[id(p)]: numbers for p in group["params"] if id(p) in here}
    for a, b in [pair for pair in model.tied if groups.keys() & set(pair)]:
        one, other = groups.get(a, {}), groups.get(b, {})
        for key in [key for key in {**one, **other} if one.get(key) != other.get(key)]:
            raise UserError(
                f"tied parameters {a} and {b} are one tensor, and the optimizer has {key} = {one.get(key)} "
                f"for the first and {other.get(key)} for the second; put both into groups with equal values."
            )


def base_rate(job: Job, model: Model, optimizer: OptimizerFactory | None = None) -> float:
    """What a schedule multiplies: the rate of the optimizer's first group. `optimizer`: given by a script."""
    spec = job.optimizer
    if optimizer is None and spec.build is None:
        return float(spec.options.get("lr", spec.lr))
    made = tried_optimizer(optimizer or optimizer_of(job), model, range(len(model.layers)))
    return float(made.param_groups[0]["lr"])


def schedule_of(
    job: Job, model: Model, given: Any = None, optimizer: OptimizerFactory | None = None
) -> Rate | None:
    """What multiplies the rate at every step, where it is not the job's own `warmup` and `decay`.

    `given` and `optimizer`: by a script.
    """
    spec = job.optimizer
    if given is None and spec.schedule is None:
        return None
    schedule: Any = spec.schedule if given is None else given
    if given is None and ":" in str(schedule):
        schedule = _of_job(job, str(schedule), "optimizer.schedule")
    lr = base_rate(job, model, optimizer)
    return rate_of(schedule, lr=lr or 1.0, steps=job.steps, options=spec.schedule_options)


def callbacks_of(job: Job) -> list[Any]:
    """Those that a job file names."""
    return [_call(_of_job(job, name, "callbacks"), f"callbacks {name!r}", {}) for name in job.callbacks]


def _call(function: Callable[..., Any], where: str, options: dict[str, Any], *given: Named) -> Any:
    try:
        return function(*given, **options)
    except UserError:
        raise
    except Exception as error:  # the user's function
        raise UserError(f"{where} raised {in_short(error)}.") from error
