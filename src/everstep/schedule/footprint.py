"""What a worker of our engine keeps in memory, item by item: the one place that counts bytes.

The engine asks how much is left for stashes, the scheduler how many microbatches a worker may hold, the
planner whether a shape fits, the preflight whether a job is refused. `bench/memory.py` compares the count
with what a process really uses.

    per parameter          fp32     16 bits, fp8
    master weights            4        4
    working weights         0, 4       2     fp32: the masters themselves, until a stage updates eagerly
    optimizer state           8        8     of Adam
    gradient sums          4, 8     4, 8     of this worker's own microbatches; see docs/strict-sums.md
    reduced gradient          4        4     of the stage
    average of the weights    4        4     only with optimizer.ema
    weights in fp8            -     0, 2     of Linears, scaled by row and by column; only in fp8
    undo                      0        0     an eager update is computed twice instead

Per microbatch a stage holds its stash: from F to I what autograd saves, from I to W the inputs and output
gradients of the Linears, or the weight gradients, where those are smaller and the whole model is one stage of
a CPU. `stash_cap` says how many at once: twice as many as there are stages (one, where all is one stage),
whatever the number of microbatches. With this cap no schedule that we have measured takes 1 % longer
(docs/schedules.md). Strict sums on a GPU keep one more from W to the next W: its contributions may have to be
made again (`engine.sums.sums`). Where a GPU has room for it, F and I are recorded as CUDA graphs
(`engine.stage.recordings`): each microbatch under way then has memory of its own that is never given back,
and no job is refused for it. Boundary tensors are kept until the step is sealed everywhere: one step of
them, and they do grow with the number of microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from everstep.protocol.shape import CHUNKS_PER_REPLICA

SUMS = {"strict": 8.0, "strict40": 8.0, "strict32": 4.0, "fp64": 8.0, "fp32": 4.0}  # bytes per parameter
PARTED = 5.0  # `strict40` on a GPU, of a worker that runs no more microbatches in a step than:
MOST_SHORT = 63
PARTS = {"strict40": 7.0}  # at most: 4 and 1 that come, 1 at its place, and a copy of 1 that is sent
WEIGHTS = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 2.0}
FP8_WEIGHTS = 2.0  # of Linears, by row and by column; counted as if all parameters were theirs
MASTERS = REDUCED = PRODUCT = 4.0
ADAM = 8.0
HOLDERS = 2  # of each chunk of a sharded optimizer state
# Whatever the device.
ON_THE_HOST = ("state for a joiner", "states being saved", "chunks for new holders")
RECORDED = "recorded ops"
SAVED_COPIES = 2  # in host memory, for disk and for memory: one being written, one that waits (`store.saver`)
BUCKET = 16 << 20  # parameters that are updated at once where a step needs scratch
CHUNK = 4 << 20  # elements of the reduce that are summed at once
LANE, LANE_ON_THE_HOST = 18.5e6, 49e6  # bytes of a communicator of NCCL (`bench/gpu/communicators.py`)
CHECKED = 1 << 30  # bytes that are held for additions which a GPU has not confirmed, as one group
# Bytes of a state on its way to a joiner or a new holder, in host memory: queued for each while a step is
# computed; left for the moment before an update; copied at once (`net.transfers`).
SNAPSHOT_WINDOW, SNAPSHOT_REST, SNAPSHOT_PIECE = 256 << 20, 1 << 30, 8 << 20
# Of what comes and goes inside an op, what a recording keeps: measured as 2.2 to 2.6 on an H200. A pool of
# memory is cut into pieces that do not always fit what is asked for next.
RECORDED_INSIDE = 2.6
USABLE = 0.92  # of a device's memory: the rest is the driver's, the libraries' and the allocator's


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What of a job decides how many bytes a parameter takes."""

    precision: str = "bf16"
    accumulate: str = "strict"
    eager: bool = False  # may a stage update before the norm of all stages is known?
    clip: bool = True
    optimizer: float = ADAM  # bytes per parameter of its state
    elementwise: bool = True  # else its step needs scratch for the whole stage
    average: bool = False  # of the weights, kept beside them
    replicas: int = 1
    sharded: bool = False  # masters, optimizer state and reduced gradient at two replicas, not at all
    through_host: bool = False  # what peers send is received in host memory: a GPU without shared memory
    saved: float = 0.0  # of the state, what a save or a copy in memory takes along; 0: neither
    exact: bool = False  # kernels of a GPU that give the same bits every time
    checked_late: bool = False  # strict sums on a GPU: W keeps what it read until it is confirmed
    lanes: int = 0  # communicators of NCCL: one per peer and direction
    in_place: bool = False  # all workers share one GPU: what peers send is read where it is
    recorded: bool = False  # F and I as CUDA graphs, where there is room
    alone: bool = False  # one worker is the whole task
    offload: bool = False  # what layers keep for the backward waits in host memory


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """What one stage is made of."""

    parameters: int
    largest: int  # parameters of its largest tensor
    held_forward: float = 0.0  # bytes of one microbatch from F to I
    held_weight: float = 0.0  # from I to W
    host: float = 0.0  # from F to I besides, in host memory
    inside: float = 0.0  # bytes that come and go inside an op
    sent: float = 0.0  # boundary tensors that one microbatch leaves in the outbox
    joined: int = 0  # parameters of tied tensors, as often as the reduce has them besides
    workspace: float = 0.0  # of a library, for exact attention; kept from the first backward on
    keys_values: float = 0.0  # of `held_forward`, what attention reads of all tokens
    keys_values_inside: float = 0.0  # the same of one layer
    queries: float = 0.0  # of `held_forward`, what attention reads of its own tokens

    @property
    def held(self) -> float:
        """The most that one microbatch holds."""
        return max(self.held_forward, self.held_weight)

    def of_a_part(self, parts: int) -> StageFigures:
        """On one of so many shards, each with whole layers and a part of every row: keys and values are
        gathered, and so are, inside an op, their gradients. What attention makes is there twice: of the two
        pieces of a part, and put together.
        """
        held = (self.held_forward - self.keys_values + self.queries) / parts + self.keys_values
        return replace(
            self,
            held_forward=held,
            held_weight=self.held_weight / parts,
            inside=self.inside / parts + 2 * self.keys_values_inside,
            sent=self.sent / parts,
            host=self.host / parts,
            workspace=0.0,
        )


def together(parts: Sequence[StageFigures]) -> StageFigures:
    """A worker that runs several parts of the model. What it holds of a microbatch is counted per part, by
    the largest of them.
    """
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[0],
        parameters=sum(part.parameters for part in parts),
        joined=sum(part.joined for part in parts),
        sent=sum(part.sent for part in parts) / len(parts),
        **{name: max(getattr(part, name) for part in parts) for name in _OF_THE_LARGEST},
    )


_OF_THE_LARGEST = ("largest", "held_forward", "held_weight", "host", "inside", "workspace")


class When(StrEnum):
    ALWAYS = "always"
    OPS = "while microbatches are computed"
    CLOSING = "in the reduce and the update"  # then no microbatch is held
    RECORDED = "instead of stashes, where there is room"


@dataclass(frozen=True, slots=True)
class Item:
    name: str
    when: When
    device: float  # bytes
    host: float = 0.0  # on a GPU's machine; a CPU worker has one memory, and everything is in `device`


def per_parameter(settings: Settings, hosted: int = 1) -> dict[str, float]:
    """Bytes that stay from step to step. `hosted`: microbatches that a worker runs in one."""
    separate = settings.precision != "fp32" or settings.eager or settings.sharded
    part = share(settings)
    average = {"average of the weights": MASTERS * part} if settings.average else {}
    is_parted = settings.accumulate == "strict40" and settings.checked_late
    is_own = settings.alone and (is_parted or SUMS[settings.accumulate] == REDUCED)
    in_fp8 = {"weights in fp8": FP8_WEIGHTS} if settings.precision == "fp8" else {}
    return {
        "master weights": MASTERS * part,
        "working weights": WEIGHTS[settings.precision] if separate else 0.0,
        **in_fp8,
        "optimizer state": settings.optimizer * part,
        "gradient sums": PARTED if is_parted and hosted <= MOST_SHORT else SUMS[settings.accumulate],
        "reduced gradient": 0.0 if is_own else REDUCED * part,  # it takes the place of the sums
        **average,
    }


def share(settings: Settings) -> float:
    """Of a stage's optimizer state that one worker has: every chunk is at an owner and a guard."""
    return min(1.0, HOLDERS / settings.replicas) if settings.sharded else 1.0


def scratch(stage: StageFigures, settings: Settings) -> float:
    """The most that the reduce or the update needs besides: a chunk of sums, a bucket of parameters."""
    bucket = min(stage.parameters, max(BUCKET, stage.largest) if settings.elementwise else stage.parameters)
    if settings.sharded:
        bucket = stage.parameters // (CHUNKS_PER_REPLICA * settings.replicas)
    clipped = 4.0 * bucket if settings.clip else 0.0
    preview = (MASTERS + settings.optimizer) * bucket if settings.eager else 0.0
    chunk = 16.0 * min(stage.parameters, CHUNK)
    return max(clipped, preview, chunk) + REDUCED * stage.joined


def received(stage: StageFigures, settings: Settings) -> float:
    """Parts and sums of peers, until they are added up and put together."""
    others = (settings.replicas - 1) / settings.replicas
    if settings.in_place:  # copies of what 32 bits of the sums lack, one sent and one at its place; later of
        # the new weights, for those who do not hold the chunk
        lacking = 2.0 * others if settings.accumulate in PARTS else 0.0
        sends = settings.sharded and settings.replicas > HOLDERS
        weights = WEIGHTS[settings.precision] / settings.replicas if sends else 0.0
        return stage.parameters * max(lacking, weights)
    part = PARTS.get(settings.accumulate, SUMS[settings.accumulate])
    if settings.sharded:  # parts of what it owns, sums of what it guards, and the others' new weights
        arriving = part + REDUCED / settings.replicas
        return others * stage.parameters * max(arriving, WEIGHTS[settings.precision])
    return others * stage.parameters * (part + REDUCED)


def items(stage: StageFigures, settings: Settings, *, stash: int, hosted: int) -> list[Item]:
    """All that a worker holds at the worst. `hosted`: microbatches it runs in a step."""
    found = [
        Item(name, When.ALWAYS, each * stage.parameters)
        for name, each in per_parameter(settings, hosted).items()
    ]
    host = settings.through_host
    outbox, arriving = stage.sent * hosted, received(stage, settings)
    under_way = min(stash, hosted)
    is_late = settings.checked_late and hosted > under_way  # a W is not settled when the next F begins
    checked = min(stage.held_weight, CHECKED) if is_late else 0.0
    product = 0.0 if settings.accumulate == "fp32" else PRODUCT * stage.largest  # before it is added
    later = product + stage.held_weight - stage.held  # of W, which runs when its microbatch holds less
    recordings = under_way + int(is_late) if settings.recorded else 0
    each = stage.held_forward + RECORDED_INSIDE * stage.inside
    return [
        *found,
        Item("workspace of attention", When.ALWAYS, stage.workspace if settings.exact else 0.0),
        Item("connections", When.ALWAYS, LANE * settings.lanes, LANE_ON_THE_HOST * settings.lanes),
        Item("outbox", When.ALWAYS, 0.0 if host else outbox, outbox if host else 0.0),
        Item("stashes", When.OPS, stage.held * under_way),
        *([Item("stashes on the host", When.OPS, 0.0, stage.host * under_way)] if settings.offload else ()),
        Item("gradients being checked", When.OPS, checked),
        Item("inside an op", When.OPS, max(later, stage.inside)),
        Item("arriving in the reduce", When.CLOSING, 0.0 if host else arriving, arriving if host else 0.0),
        Item("scratch of the update", When.CLOSING, scratch(stage, settings)),
        Item(RECORDED, When.RECORDED, recordings * each),
        *_on_the_host(stage, settings),
    ]


def _on_the_host(stage: StageFigures, settings: Settings) -> list[Item]:
    """States on their way: to a joiner in pieces, to the disk or a memory store as two copies at most."""
    state = (MASTERS + settings.optimizer) * stage.parameters
    sent = WEIGHTS[settings.precision] * stage.parameters if settings.sharded else state
    most = SNAPSHOT_WINDOW + SNAPSHOT_REST + SNAPSHOT_PIECE
    found = []
    if settings.replicas > 1:
        found.append(Item(ON_THE_HOST[0], When.ALWAYS, 0.0, min(sent, most)))
    if settings.replicas > HOLDERS and settings.sharded:
        most = (settings.replicas - 1) * (SNAPSHOT_WINDOW + SNAPSHOT_PIECE) + SNAPSHOT_REST
        found.append(Item(ON_THE_HOST[2], When.ALWAYS, 0.0, min(share(settings) * state, most)))
    if settings.saved:
        found.append(Item(ON_THE_HOST[1], When.ALWAYS, 0.0, SAVED_COPIES * settings.saved * state))
    return found


def total(found: Sequence[Item]) -> float:
    """Bytes that a worker needs on the device, at the worst moment of a step."""
    of = _by_moment(found)
    return of[When.ALWAYS] + max(of[When.OPS], of[When.CLOSING])


def with_recordings(found: Sequence[Item]) -> float:
    """Bytes that it uses where there is room to record all its ops: they stay through reduce and update."""
    of = _by_moment(found)
    return max(total(found), of[When.ALWAYS] + of[When.RECORDED] + of[When.CLOSING])


def _by_moment(found: Sequence[Item]) -> dict[When, float]:
    return {when: sum(item.device for item in found if item.when is when) for when in When}


def stash_cap(stages: int) -> int:
    """Microbatches a worker may hold from F to W, where memory allows. A worker that waits for no other stage
    gains nothing from a second one.
    """
    return 2 * stages if stages > 1 else 1


def room_for(stage: StageFigures, settings: Settings, memory: float, *, hosted: int) -> int:
    """How many stashes fit into this much memory beside everything else; 0 or less: none."""
    others = items(stage, settings, stash=0, hosted=hosted)
    rest = memory - sum(item.device for item in others if item.when in (When.ALWAYS, When.OPS))
    return int(rest // stage.held) if stage.held else hosted
