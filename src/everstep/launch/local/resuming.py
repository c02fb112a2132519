"""The checkpoint that a run would resume from: is it one of its model, which rows had it seen, and was its
run compiled? Asked before a worker is started.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from everstep.engine.datasets.order import RowOrder
from everstep.engine.layers.model import Model, slots
from everstep.errors import EverstepError, UserError
from everstep.job.compiling import choice_for, settled, why_unable
from everstep.job.job import Job
from everstep.launch.local.history import FIRST_ROW, MICROBATCHES, PER_MICROBATCH, History
from everstep.store import folder
from everstep.store.places import place_of


def refuse_another_model(job: Job, model: Model) -> None:
    """Names and shapes are compared, nothing is read of the tensors. A checkpoint that cannot be opened is
    no matter of this check: what it means is said when the run starts.
    """
    if job.checkpoint is None or (found := _newest(job.base, job.checkpoint.folder)) is None:
        return
    step, there = found.step, found.shapes
    tied = {name for pair in model.tied for name in pair}  # other formats keep one of a pair
    ours = slots(model, range(len(model.names)))
    for name in sorted(_trained(there) - ours.keys() - tied):
        raise UserError(
            f"checkpoint.folder {job.checkpoint.folder!r} has a checkpoint (step {step}) in which {name} was "
            "trained, and this job does not train it: its values would be lost; use another folder, or the "
            "model and the trained parameters that it was written with."
        )
    for name, slot in ours.items():
        here, kept = tuple(slot.shape), there.get(f"model/{name}")
        if kept != here and (kept is not None or name not in tied):
            found_there = "is not in it" if kept is None else f"is {_shape(kept)} there"
            raise UserError(
                f"checkpoint.folder {job.checkpoint.folder!r} has a checkpoint of another model "
                f"(step {step}): {name} {found_there} and is {_shape(here)} in this job; "
                "use another folder, or the model that it was written with."
            )


def first_row(checkpoint: Any, order: RowOrder) -> int:
    """`start` of the order in which a run continues behind the rows that it has seen. `checkpoint`: as
    `everstep.train` is given it.
    """
    where = checkpoint.get("folder") if isinstance(checkpoint, Mapping) else checkpoint
    if not isinstance(where, str | Path) or "://" in str(where):
        return 0  # no checkpoint, or one without a history beside it
    if (found := _newest(str(Path.cwd()), str(where))) is None:
        return 0
    step, before = found.step, History.at(Path.cwd() / where).earlier
    rows = before.get(PER_MICROBATCH, order.rows) * before.get(MICROBATCHES, order.microbatches)
    return int(before.get(FIRST_ROW, 0) + step * (rows - order.rows * order.microbatches))


def with_compile_settled(job: Job, microbatch: int | None = None) -> tuple[Job, tuple[str, ...]]:
    """The job as this machine will run it, and a sentence for the user where that is news. `microbatch`: its
    tokens, where a script gives the data and all have as many.
    """
    found = None if job.checkpoint is None else _newest(job.base, job.checkpoint.folder)
    unable = why_unable(job.device, {**os.environ, **job.environment})
    kept = None if found is None else found.compiled
    choice = choice_for(job, kept=kept, unable=unable, microbatch=microbatch)
    is_news = choice.because and (choice.compile or job.device != "cpu")
    return settled(job, choice, unable=unable), (str(choice),) if is_news else ()


class _Newest(NamedTuple):
    step: int
    shapes: dict[str, tuple[int, ...]]  # of its tensors
    compiled: bool | None


def _newest(base: str, where: str) -> _Newest | None:
    """The newest that can be opened."""
    root = folder.root_of(Path(base), where)
    with contextlib.suppress(OSError, EverstepError):
        for _, name in reversed(place_of(root).complete()):
            with (
                contextlib.suppress(OSError, EverstepError),
                contextlib.closing(folder.open_step(root, name)) as found,
            ):
                shapes = {name: tuple(entry.shape) for name, entry in found.tensors.items()}
                return _Newest(found.step, shapes, found.compiled)
    return None


def _trained(there: dict[str, tuple[int, ...]]) -> set[str]:
    """The parameters that the checkpoint has optimizer states of."""
    return {folder.parameter_of(name) for name in there if name.startswith("optimizer/")}


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) if shape else "one element"
