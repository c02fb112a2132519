"""The checkpoint that a run would resume from: is it one of its model, and which rows had it seen? Asked
before a worker is started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everstep.engine.datasets.order import RowOrder
from everstep.engine.layers.model import Model, slots
from everstep.errors import EverstepError, UserError
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
    step, there = found
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
    step, before = found[0], History.at(Path.cwd() / where).earlier
    rows = before.get(PER_MICROBATCH, order.rows) * before.get(MICROBATCHES, order.microbatches)
    return int(before.get(FIRST_ROW, 0) + step * (rows - order.rows * order.microbatches))


def _newest(base: str, where: str) -> tuple[int, dict[str, tuple[int, ...]]] | None:
    """Its step, and the shapes of its tensors."""
    root = folder.root_of(Path(base), where)
    with contextlib.suppress(OSError, EverstepError):
        names = [name for _, name in place_of(root).complete()]
        if names:
            with contextlib.closing(folder.open_step(root, names[-1])) as found:
                return found.step, {name: tuple(entry.shape) for name, entry in found.tensors.items()}
    return None


def _trained(there: dict[str, tuple[int, ...]]) -> set[str]:
    """The parameters that the checkpoint has optimizer states of."""
    return {folder.parameter_of(name) for name in there if name.startswith("optimizer/")}


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) if shape else "one element"
