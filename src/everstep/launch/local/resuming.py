"""Is the checkpoint that a run would resume from one of its model? Asked before a worker is started."""

from __future__ import annotations

import contextlib

from everstep.engine.layers.model import Model, slots
from everstep.errors import EverstepError, UserError
from everstep.job.job import Job
from everstep.launch.local.history import History
from everstep.store import folder
from everstep.store.places import place_of


def refuse_another_model(job: Job, model: Model) -> None:
    """Names and shapes are compared, nothing is read of the tensors. A checkpoint that cannot be opened is
    no matter of this check: what it means is said when the run starts.
    """
    if job.checkpoint is None or (found := _newest(job, job.checkpoint.folder)) is None:
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


def refuse_epochs_of_another_batch(job: Job) -> None:
    """Rows are found by step and batch: after a change of the batch the steps so far have not shown the rows
    that the new batch counts.
    """
    if job.checkpoint is None or (found := _newest(job, job.checkpoint.folder)) is None:
        return
    before = History.of(job).earlier.get("microbatches per step")
    if before not in (None, job.microbatches_in_step):
        raise UserError(
            f"epochs counts rows, and the {found[0]} steps that are saved had {before} microbatches each, "
            f"not {job.microbatches_in_step}: give microbatches or --batch so that it stays {before}, or say "
            "steps instead of epochs."
        )


def _newest(job: Job, where: str) -> tuple[int, dict[str, tuple[int, ...]]] | None:
    """Its step, and the shapes of its tensors."""
    root = folder.root_of(job.base, where)
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
