"""What ranks of a script testify when something goes wrong, and which of them tells the cause.

A rank that is killed takes its peers' connections with it, so most of what is heard after a fault is
`HEARSAY`: what a healthy neighbour of the fault would say. The cause is the first witness that is no hearsay;
if there is none, the first that spoke.

A hang has no witness that speaks. Who looks guilty follows from where the ranks are: one that has not entered
the collective in which the others sit, by torch's record or else by NCCL's own count; else one outside torch
while the others are inside it; else one that has ended while all others are inside torch; else one that has
not completed what the others have, by NCCL. If all ranks are in the same place, none is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from everstep.core.faults.severity import ErrorKind, Judgement, Source, judge
from everstep.protocol.messages import RankFailed, RankPosition
from everstep.protocol.ops import Worker

HEARSAY = frozenset(
    {
        ErrorKind.CONNECTION_RESET,
        ErrorKind.CONNECTION_REFUSED,
        ErrorKind.OTHER_NETWORK,
        ErrorKind.COMMUNICATOR_ABORTED,
        ErrorKind.NCCL_TIMEOUT,
    }
)

# Errors by which Python says that the program is wrong. Twice the same: the machine is not at fault.
PROGRAM_ERRORS = frozenset(
    {
        "SyntaxError",
        "IndentationError",
        "ImportError",
        "ModuleNotFoundError",
        "NameError",
        "UnboundLocalError",
        "AttributeError",
        "TypeError",
        "KeyError",
        "IndexError",
        "ValueError",
        "AssertionError",
        "NotImplementedError",
        "FileNotFoundError",
        "ZeroDivisionError",
    }
)

_MOST_PLACES = 6  # groups of ranks with the same stack that are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """One piece of evidence, with what it would mean if it were the cause."""

    rank: int | None
    what: str
    judgement: Judgement
    code: int  # as in `subprocess`: negative for a signal
    since: float  # the first trace of it
    traceback: str = ""
    program_error: str = ""  # empty: the program may be right
    evidence: tuple[str, ...] = ()
    worker: Worker | None = None  # whose node runs this rank
    source: str = ""
    text: str = ""  # that was judged
    finding: str = ""  # what the stacks of a hang show

    @property
    def is_hearsay(self) -> bool:
        return self.judgement.kind in HEARSAY

    @property
    def is_crash(self) -> bool:
        """Of native code: NCCL's may crash in a rank whose peer has left, and Python's at the end of all."""
        return self.judgement.kind is ErrorKind.CRASH


def cause_of(witnesses: Sequence[Witness]) -> Witness:
    return next((witness for witness in witnesses if not witness.is_hearsay), witnesses[0])


def left_early(cause: Witness, early: tuple[int, ...], worker: Worker) -> Witness:
    """A connection is closed because a rank has ended, with code 0: it had fewer batches, or left a loop."""
    return replace(
        cause,
        rank=early[0] if len(early) == 1 else None,
        worker=worker,
        what=f"{names(early)} ended with code 0 while others still communicate: {cause.what}",
        finding=f"{names(early)} came to the end of the script before the others, and closed its connections",
    )


def names(ranks: tuple[int, ...]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def of_report(event: RankFailed, now: float) -> Witness:
    source: Source = event.source if event.source in ("exception", "exit", "progress") else "log"  # type: ignore[assignment]
    return Witness(
        rank=event.rank,
        what=event.what,
        judgement=judge(source, event.text),
        code=event.code,
        since=now - max(0.0, event.ago_s),
        traceback=event.traceback,
        program_error=event.program_error,
        evidence=event.evidence,
        worker=event.worker,
        source=event.source,
        text=event.text,
    )


def of_held(what: str, now: float) -> Witness:
    """Ranks could not be held, and no death is the reason."""
    return Witness(
        rank=None, what=what, judgement=judge("exit", what), code=1, since=now, source="exit", text=what
    )


# ------------------------------------------------------------------ what a rank has said or left


def raised_text(error: str, traceback: str) -> str:
    """From which an exception is judged: lines of a traceback that are not indented are errors; the others
    are code, which may say anything.
    """
    return "\n".join([error, *(line for line in traceback.splitlines() if line[:1].strip())])


def raised_what(rank: int, error: str, where: str) -> str:
    return f"rank {rank} raised {_first_line(error)}{f' at {where}' if where else ''}"


def program_error(error: str, where: str) -> str:
    name = error.partition(":")[0].rpartition(".")[2]
    return f"{error}{f' at {where}' if where else ''}" if name in PROGRAM_ERRORS else ""


def exit_text(code: int, reason: str, words: str) -> str:
    """A signal has a cause of its own, whatever the rank wrote before it came."""
    return reason if code < 0 else f"{reason}\n{words}"


def last_words(rank: int, words: str) -> tuple[str, ...]:
    lines = [line for line in words.splitlines() if line.strip()]
    return (f"the last line of rank {rank} on stderr: {lines[-1].strip()[:300]}",) if lines else ()


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]


# ------------------------------------------------------------------ a hang


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspects:
    ranks: tuple[int, ...]
    because: str
    evidence: tuple[str, ...]


def of_hang(rank: int | None, what: str, found: Suspects, *, since: float, worker: Worker | None) -> Witness:
    """No rank makes progress and no error text exists; the sentence has all that is known."""
    return Witness(
        rank=rank,
        what=what,
        judgement=judge("progress", ""),
        code=1,
        since=since,
        evidence=(found.because, *found.evidence),
        worker=worker,
        source="progress",
        text=what,
        finding=found.because,
    )


def suspects_of_hang(positions: Sequence[RankPosition], finished: tuple[int, ...]) -> Suspects:
    at = {position.rank: position for position in positions}
    by_nccl = _unlaunched(at) or _troubled(at)
    named = _behind(at) or _apart(at) or by_nccl or _slowest(at) or _outside(at, finished) or _incomplete(at)
    if named is not None and len(named[0]) == 1 and at.get(named[0][0]) is not None:
        only = at[named[0][0]]
        named = named[0], named[1] + ("; it uses a CPU" if only.is_busy else "")
    if named is None and finished:
        named = finished, f"{names(finished)} ended with code 0 while the others still wait"
    ranks, because = named or ((), _unknown(at))
    evidence = [each for each in (*_places(at), *_said_by_nccl(at)) if each != because]
    return Suspects(ranks=ranks, because=because, evidence=tuple(evidence))


def may_work(now: RankPosition, before: RankPosition | None) -> bool:
    """Of a rank that uses a CPU: unless it was in the same functions when it was last seen, and has sent or
    received nothing since.
    """
    if before is None or not now.stack:
        return True
    return (now.stack, now.num_ops) != (before.stack, before.num_ops)


_Named = tuple[tuple[int, ...], str]


def _behind(at: dict[int, RankPosition]) -> _Named | None:
    """Ranks that have not entered the collective in which the others of their process group sit."""
    entered = {rank: p.entered for rank, p in at.items()}
    return _least(entered, "entered collective {last} of process group {group}, in which {others}")


def _unlaunched(at: dict[int, RankPosition]) -> _Named | None:
    """The same by NCCL's own count, which has operations that torch did not start."""
    launched = {rank: p.launched for rank, p in at.items()}
    return _least(launched, "launched operation {last} of {group}, in which {others}, by NCCL's RAS")


def _incomplete(at: dict[int, RankPosition]) -> _Named | None:
    completed = {rank: p.completed for rank, p in at.items()}
    return _least(completed, "completed operation {last} of {group}, as others have, by NCCL's Inspector")


def _troubled(at: dict[int, RankPosition]) -> _Named | None:
    ranks = tuple(sorted(rank for rank, p in at.items() if p.trouble))
    if not ranks or len(ranks) == len(at):
        return None
    return ranks, "; ".join(f"rank {rank} {at[rank].trouble}, by NCCL's RAS" for rank in ranks)


def _said_by_nccl(at: dict[int, RankPosition]) -> list[str]:
    found = [each[1] for each in (_unlaunched(at), _troubled(at), _incomplete(at)) if each is not None]
    counted = tuple(rank for rank, p in sorted(at.items()) if p.launched)
    if counted and not found:
        found = [f"{len(counted)} ranks have launched the same operations, by NCCL's RAS"]
    return found


def _least(counts: Mapping[int, Mapping[str, int]], has_not: str) -> _Named | None:
    """By rank and group: who is late in some group, and ahead in none. Who is ahead waits there, and is late
    elsewhere because of it. Where all are ahead somewhere, the late ones of the first group.
    """
    found: list[tuple[str, int, set[int], int]] = []
    ahead: set[int] = set()
    for group in sorted({group for each in counts.values() for group in each}):
        reached = {rank: each[group] for rank, each in counts.items() if group in each}
        last = max(reached.values())
        late = {rank for rank, number in reached.items() if number < last}
        if late:
            found.append((group, last, late, len(reached) - len(late)))
            ahead |= reached.keys() - late
    if not found:
        return None
    blamed = set[int]().union(*(late for _, _, late, _ in found)) - ahead
    group, last, late, waiting = min(found, key=lambda each: (not each[2] & blamed, len(each[2] - blamed)))
    ranks = tuple(sorted(late & blamed or late))
    others = f"{waiting} {'rank waits' if waiting == 1 else 'ranks wait'}"
    text = has_not.format(last=last, group=group, others=others)
    return ranks, f"{names(ranks)} {'has' if len(ranks) == 1 else 'have'} not {text}"


def _apart(at: dict[int, RankPosition]) -> _Named | None:
    """Ranks whose last collective has the same number as that of the others, and is another one: they have
    left one out, or taken another branch.
    """
    for group in sorted({group for position in at.values() for group in position.kinds}):
        kinds = {rank: p.kinds[group] for rank, p in at.items() if p.kinds.get(group)}
        counted = Counter(kinds.values()).most_common()
        if len(counted) < 2 or counted[0][1] == counted[1][1]:
            continue  # all alike; or as many here as there, and nobody knows who is right
        usual = counted[0][0]
        other = tuple(sorted(rank for rank, kind in kinds.items() if kind != usual))
        number = at[other[0]].entered.get(group, 0)
        verb = "is" if len(other) == 1 else "are"
        return other, (
            f"{names(other)} {verb} in {kinds[other[0]]} as collective {number} of process group {group}, "
            f"and the others in {usual}"
        )
    return None


def _slowest(at: dict[int, RankPosition]) -> _Named | None:
    """Ranks that have told fewer steps than the others, where all tell them."""
    steps = {rank: p.step for rank, p in at.items() if p.step is not None}
    if len(steps) < len(at) or len(set(steps.values())) < 2:
        return None
    last = max(steps.values())
    late = tuple(sorted(rank for rank, step in steps.items() if step < last))
    verb = "is" if len(late) == 1 else "are"
    return late, f"{names(late)} {verb} at step {min(steps.values())}, the others at {last}"


def _outside(at: dict[int, RankPosition], finished: tuple[int, ...]) -> _Named | None:
    outside = tuple(sorted(rank for rank, p in at.items() if not p.is_inside_torch))
    if not outside or (len(outside) == len(at) and not finished):
        return None
    where = f"{names(outside)} {'is' if len(outside) == 1 else 'are'} at {at[outside[0]].at}, outside torch"
    rest = "the others wait inside it" if len(outside) < len(at) else "the others have ended"
    return outside, f"{where}; {rest}"


def _unknown(at: dict[int, RankPosition]) -> str:
    return "all ranks are in the same kind of place, so none is named" if at else "no rank reported its stack"


def _places(at: dict[int, RankPosition]) -> list[str]:
    """Ranks with the same stack in one sentence, most of them first."""
    counted = Counter((p.at, p.doing) for p in at.values())
    found = []
    for (where, doing), count in counted.most_common(_MOST_PLACES):
        ranks = tuple(sorted(rank for rank, p in at.items() if (p.at, p.doing) == (where, doing)))
        who = names(ranks) if count <= 4 else f"{count} ranks ({', '.join(map(str, ranks[:3]))}, …)"
        is_one = "is" if count == 1 else "are"
        found.append(f"{who} {is_one} at {where}" + (f", in torch's {doing}" if doing else ""))
    return found
