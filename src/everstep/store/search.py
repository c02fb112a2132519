"""Which checkpoint a run starts from. Nothing complete is removed here, and none is passed over in silence.

    written, all parts there, and not committed (its coordinator was away)    commit it
    newest checkpoint is …
        whole        start from it (its bytes are checked as they are loaded)
        corrupt      set aside by a rename, with its reason; look at the one before
        unreadable   the system failed to read it: try again, then stop with the reason
        unknown      of a version we do not read: stop with the reason

A read that fails says nothing of the bytes on the disk, so it may not cost a checkpoint. To start from step 1
although checkpoints were there, or to pass over one that could not be read, needs an operator's word:
`checkpoint.start_over`. What is passed over then is set aside too: a later checkpoint of the same step would
otherwise replace it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from everstep.errors import EverstepError, UserError
from everstep.store.folder import Adopted, commit_whole
from everstep.store.index import Refused
from everstep.store.places import Place, place_of
from everstep.store.reader import UnusableCheckpointError, open_in, unusable

PAUSES_S = (0.1, 0.4, 1.6)  # between attempts to read
START_OVER = "set checkpoint.start_over = true (everstep train --start-over)"


@dataclass(frozen=True, slots=True)
class Newest:
    step: int  # 0: there is none
    refused: tuple[str, ...] = ()  # a sentence for each newer one that was set aside
    loss: float | None = None  # of that step, if it is known
    compiled: bool | None = None  # were the layers of its run? None: it is none of ours


class NoStart(EverstepError):
    """No step to start from, in one sentence. `passing`: it may work later."""

    def __init__(self, because: str, *, passing: bool) -> None:
        super().__init__(because)
        self.passing = passing


def done_already(root: str | Path, steps: int) -> int:
    """The step of a checkpoint with which a run of so many steps is over; 0: there is something left to do,
    or it is not known. Nothing is read but its index, and nothing is changed.
    """
    with contextlib.suppress(OSError, EverstepError, Refused):
        place = place_of(root)
        for _, name in reversed(place.complete()):
            found = open_in(place, name)
            found.close()
            return found.step if found.step >= steps else 0
    return 0


def newest_to_use(
    root: str | Path,
    *,
    known: int = 0,
    start_over: bool = False,
    verify: bool = False,
    run: str = "",
    keep: int = 3,
    live: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> Newest:
    """The newest checkpoint whose index fits its files, by sizes and headers; who loads it checks the hashes
    of what it reads. `verify`: all bytes are read and checked, after a load has failed. `known`: a step that
    is known to have been committed. What this `run` has written is committed first where it is whole; other
    incomplete checkpoints are removed, unless the run is `live` and may be writing them.
    """
    for pause_s in (*PAUSES_S, None):
        try:
            last = pause_s is None
            left = _adopt(root, run, keep, live, last)
            found = _newest(place_of(root), known, start_over and last, start_over, verify)
            return replace(found, refused=(*left, *found.refused))
        except OSError as error:
            reason = NoStart(f"checkpoint folder {root} cannot be read: {error}", passing=True)
        except NoStart as error:
            reason = error
        except UserError as error:
            raise NoStart(str(error).rstrip("."), passing=False) from error
        if pause_s is None or not reason.passing:
            break
        sleep(pause_s)
    raise reason


def _adopt(root: str | Path, run: str, keep: int, live: bool, last: bool) -> list[str]:
    """Commit what is whole. A sentence for each step that may be whole, and whose files are therefore kept;
    before the `last` try it is looked at again.
    """
    found = Adopted() if not run else commit_whole(root, run=run, keep=keep)
    if found.kept and not last:
        raise OSError(next(iter(found.kept.values())))
    if not live:
        place_of(root).clean(keep=found.kept)
    return [f"{root}: step {step}: {why}; its files are kept." for step, why in found.kept.items()]


def _newest(place: Place, known: int, pass_over: bool, start_over: bool, verify: bool) -> Newest:
    refused: list[str] = []
    for _, name in reversed(place.complete()):
        try:
            found = _usable(place, name, verify)
            step = _not_older(place, found.step, known, refused, start_over)
            return replace(found, step=step, refused=tuple(refused))
        except UnusableCheckpointError as error:
            sentence = str(error).rstrip(".")
            if error.kind == "unknown" and not start_over:
                because = f"{sentence}; use the Everstep that wrote it, or {START_OVER}"
                raise NoStart(because, passing=False) from None
            if error.kind == "unreadable" and not pass_over:
                raise NoStart(f"{sentence}; to continue without it, {START_OVER}", passing=True) from None
            aside = place.put_aside(name, error.kind)
            refused.append(f"{sentence}; it is kept as {aside}.")
    aside_now = place.set_aside()
    if aside_now and not start_over:
        raise NoStart(
            f"no checkpoint in {place} can be used, and {len(aside_now)} that cannot be used are kept there "
            f"({', '.join(aside_now[-3:])}); to start from step 1, {START_OVER}",
            passing=False,
        )
    return Newest(_not_older(place, 0, known, refused, start_over), tuple(refused))


def _usable(place: Place, name: str, verify: bool) -> Newest:
    try:
        found = open_in(place, name)
    except Refused as refused:
        raise unusable(f"{place}/{name}", refused) from refused
    try:
        if verify:
            found.verify()
        loss = found.meta.get("loss")
        return Newest(found.step, loss=loss if isinstance(loss, float) else None, compiled=found.compiled)
    finally:
        found.close()


def _not_older(place: Place, step: int, known: int, refused: list[str], start_over: bool) -> int:
    """A folder that lost what was committed is no reason to go back: it may not be mounted."""
    if step < known and not refused and not start_over:
        newest = f"its newest is of step {step}" if step else "it holds none"
        raise NoStart(
            f"the checkpoint of step {known} is gone from {place}: {newest}; to continue, {START_OVER}",
            passing=True,
        )
    return step
