"""`everstep.fit`: a LightningModule, trained by workers that recover.

The module's own hooks say everything: training_step and validation_step what a step computes,
configure_optimizers how it is updated, train_dataloader and val_dataloader (or a datamodule's, or loaders
that are given) on what. Its Trainer is not used: what it does is the work of the launcher and the workers.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from everstep.engine.datasets.rows import Rows, rows, seeded
from everstep.engine.datasets.stream import Stream, stream
from everstep.engine.layers.model import evaluating, refuse_statistics, refusing_changed_buffers
from everstep.engine.lightning import hooks
from everstep.engine.lightning.model import CARD, WHOLE, LightningProgram, give_up_values, write_values
from everstep.engine.prepare import context
from everstep.errors import UserError
from everstep.launch.local import api
from everstep.launch.local.arguments import refuse_unknown, shape_of_call
from everstep.launch.local.data_needs import steps_of
from everstep.launch.local.export import load
from everstep.log import say, warn
from everstep.store.folder import complete_steps

_SAID_ELSEWHERE = {  # arguments of `everstep.train` that the module or the call of `fit` has in another form
    "model": "the first argument",
    "data": "train_dataloaders or a datamodule",
    "eval_data": "val_dataloaders or a datamodule",
    "loss": "what training_step returns",
    "optimizer": "configure_optimizers",
    "schedule": "configure_optimizers",
    "metrics": "self.log in validation_step",
    "stages": "1: a module is trained whole, by replicas",
}


def fit(
    module: Any,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    datamodule: Any = None,
    *,
    replicas: int = 1,
    microbatches: int = 1,
    steps: int | None = None,
    epochs: float | None = None,
    checkpoint: Any = None,
    **settings: Any,
) -> api.Result:
    """Train a LightningModule on `replicas` workers; afterwards it has the trained weights.

    module               any with automatic optimization and one optimizer
    train_dataloaders    as for `Trainer.fit`: else those of `datamodule`, else those of the module. A batch
                         of the loader is a microbatch
    microbatches         batches per replica and step, as `accumulate_grad_batches`
    steps, epochs        how long; one of them
    settings             as for `everstep.train`: clip, precision, ema, seed, device, eval_every (after every
                         epoch if not given), eval_batches, callbacks, page
    """
    context.refuse_in_import("everstep.fit")
    for name in settings:
        if name in _SAID_ELSEWHERE:
            raise UserError(f"{name} is not an argument of everstep.fit; here it is {_SAID_ELSEWHERE[name]}.")
    refuse_unknown(settings, list(inspect.signature(api.train).parameters), "everstep.fit")
    unused = hooks.check(module)
    here = context.current_worker()
    owner = datamodule if datamodule is not None else module
    if here is None and hasattr(owner, "prepare_data"):
        owner.prepare_data()
    for part in (datamodule, module):
        if part is not None:
            part.setup("fit")
    module.configure_model()
    data = _data(train_dataloaders, "train_dataloader", datamodule, module)
    tested = _data(val_dataloaders, "val_dataloader", datamodule, module, wanted=False)
    if data is None:
        raise UserError("everstep.fit found no training data; give train_dataloaders or a datamodule.")
    if here is not None:
        card = here.job.model.card[CARD]
        program = LightningProgram(module, Path(card["start"]), here.job.steps)
        give_up_values(module)
        shape = {"replicas": 1, "microbatches": here.job.microbatches_in_step}
        names = tuple(here.job.evaluation.metrics) if here.job.evaluation else ()
        _train(program, data, tested, names, _steps_in_epoch(data, shape), {})
    shape = {"replicas": replicas, "stages": 1, "microbatches": microbatches}
    shape = shape_of_call(shape, api.overrides())
    if shape["stages"] > 1:
        raise UserError(
            f"stages is {shape['stages']}, and a LightningModule is trained whole, by replicas; leave stages "
            "out, or give its layers to everstep.train."
        )
    if (steps is None) == (epochs is None):
        raise UserError(
            "everstep.fit needs steps or epochs, one of them: everstep.fit(module, epochs=3, ...)."
        )
    count = steps or steps_of(data, epochs, shape, checkpoint)
    in_epoch = _steps_in_epoch(data, shape)
    if tested is not None and in_epoch is not None:
        settings.setdefault("eval_every", in_epoch)
    batches = shape["replicas"] * shape["microbatches"]
    say(f"{count} steps of {batches} batch{'es' * (batches > 1)} of the loader each")
    if unused:
        say(f"not called: {', '.join(unused)}")
    with tempfile.TemporaryDirectory(prefix="everstep-fit-") as folder:
        start = Path(folder) / "start.safetensors"
        write_values(module, start)
        with _tried(module):
            program = LightningProgram(module, start, count)
            hooks.StepCalls(module, count).train(_first(data))
            names = _metrics(module, tested, count)
        kept = checkpoint or {"folder": str(Path(folder) / "checkpoints"), "interval": count}
        more = {**settings, **shape, "steps": count, "checkpoint": kept}
        result = _train(program, data, tested, names, in_epoch, more)
        root = kept["folder"] if isinstance(kept, dict) else kept
        weights, last, saved = load(root), max(result.losses, default=0), complete_steps(root)[-1]
        if saved < last:
            warn(f"the state of step {last} is not saved; the module has the weights of step {saved}")
    module.load_state_dict(
        {name.removeprefix(f"{WHOLE}."): value for name, value in weights.items()}, strict=False
    )
    return result


def _train(
    program: LightningProgram,
    data: Any,
    tested: Any,
    names: tuple[str, ...],
    steps_in_epoch: int | None,
    settings: dict[str, Any],
) -> api.Result:
    evaluation: dict[str, Any] = {}
    if tested is not None:
        evaluation = {"eval_data": tested, "metrics": {name: _Logged(name) for name in names}}
    return api.train(
        model=program.model(),
        data=data,
        optimizer=program.optimizer,
        schedule=program.rate(steps_in_epoch),
        **evaluation,
        **settings,
    )


class _Logged:
    """A metric: what validation_step has logged under a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, output: Any, targets: Any) -> Any:
        return output["logged"][self.name]


@contextmanager
def _tried(module: Any) -> Iterator[None]:
    """Steps of the module here, in the launcher, which leave no trace in it and none in its buffers."""
    kept = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    refuse_statistics(type(module).__name__, module)
    try:
        with seeded(0), refusing_changed_buffers({type(module).__name__: module}):
            yield
    finally:
        for buffer, value in kept:
            buffer.detach().copy_(value)
        for part in module.modules():
            for name in ("log", "log_dict"):
                part.__dict__.pop(name, None)
            if "_trainer" in part.__dict__:
                part.__dict__["_trainer"] = None


def _metrics(module: Any, tested: Any, steps: int) -> tuple[str, ...]:
    """The names of what validation_step logs."""
    if tested is None:
        return ()
    with evaluating([module]), torch.no_grad():
        return tuple(hooks.StepCalls(module, steps).evaluate(_first(tested))["logged"])


# ------------------------------------------------------------------ data


def _data(given: Any, hook: str, datamodule: Any, module: Any, wanted: bool = True) -> Rows | Stream | None:
    """A loader, as data of ours; None where there is none."""
    if given is not None and hasattr(given, hook):  # a datamodule in the first place, as Trainer.fit takes it
        given = getattr(given, hook)()
    for owner in (datamodule, module):
        if given is None and owner is not None and (wanted or _defines(owner, hook)):
            given = getattr(owner, hook)() if _defines(owner, hook) else None
    if given is None or (not wanted and not _defines(module, "validation_step")):
        return None
    if isinstance(given, dict | list | tuple):
        raise UserError(f"{hook} gives several loaders; everstep.fit takes one.")
    if not isinstance(given, DataLoader):
        return stream(_Batches(given))
    ordinary = isinstance(given.sampler, RandomSampler | SequentialSampler) and given.batch_size is not None
    if isinstance(given.dataset, IterableDataset) or not ordinary:
        return stream(_Batches(given))
    return rows(
        given.dataset,
        rows=given.batch_size or 1,
        shuffle=isinstance(given.sampler, RandomSampler),
        collate=_Collated(given.collate_fn),
    )


def _defines(owner: Any, hook: str) -> bool:
    """Does a class of the user's define this hook?"""
    kinds = type(owner).__mro__
    return any(hook in vars(kind) for kind in kinds if not kind.__module__.startswith(_THEIRS))


_THEIRS = ("lightning.", "pytorch_lightning.")


class _Collated:
    """A batch goes whole to the first stage and, for its size, to the last."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, given: list[Any]) -> dict[str, Any]:
        return {"batch": self.collate(given)}


class _Batches:
    """A loader whose batches go whole; with its state, where it has one."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"batch": batch} for batch in self.loader)


def _first(data: Rows | Stream) -> Any:
    if isinstance(data, Rows):
        return data.batch(1, 0)["batch"]
    return next(iter(data.source.source))["batch"]


def _steps_in_epoch(data: Any, shape: dict[str, int]) -> int | None:
    return steps_of(data, 1, shape, 0) if isinstance(data, Rows) else None
