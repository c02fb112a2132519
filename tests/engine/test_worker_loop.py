"""One worker's loop with real tensors: what it does with the parcels it is given."""

from __future__ import annotations

import queue
from typing import Any

import torch

from everstep.core.words import worker_messages as msg
from everstep.core.words.ops import Worker
from everstep.core.words.worker_messages import Parcel, ParcelKind
from everstep.core.worker.worker_state import WorkerState
from everstep.engine.job import Job
from everstep.engine.links import Links
from everstep.engine.program import Program
from everstep.engine.worker_loop import Ports, WorkerLoop


def loop_of(me: Worker, program: Program) -> WorkerLoop:
    nothing: Any = lambda *args: None  # noqa: E731
    links = Links(
        token=b"t" * 32, host="127.0.0.1", deliver=nothing, broken=nothing, failed=nothing, empty=nothing
    )
    return WorkerLoop(
        me,
        WorkerState(me, program.rules()),
        lambda: program.build(me.stage),
        ports=Ports(report=nothing, save=nothing, load=nothing),
        links=links,
        inbox=queue.SimpleQueue(),
    )


def test_a_whole_sum_from_a_peer_is_taken_as_it_is_also_with_a_tied_pair_inside_the_stage() -> None:
    """The giver has joined the halves of the pair; joined once more, the tied gradient would be doubled."""
    program = Program.of(
        Job.from_dict({"model": {"preset": "gpt-tiny", "tied": True}, "replicas": 2, "stages": 1})
    )
    giver, taker = (loop_of(Worker(replica, 0), program) for replica in (0, 1))
    assert giver.stage.has_tied_pair
    chunk = Parcel(ParcelKind.SUM, 1, 1, 0, None, 1, 1)
    mine, others = giver._chunk((0, 1), 0), giver._chunk((0, 1), 1)
    drawn = torch.randn(giver.stage.gradients.shape, generator=torch.Generator().manual_seed(3))
    giver._sum(1)[mine] = drawn[mine]
    giver.payloads[chunk] = drawn[others]
    squares = giver._do(msg.AssembleSum(1, (0, 1), (chunk,)))
    (first, second), *_ = giver.stage.model.tied
    halves = giver.stage.views(drawn)
    joined = giver.stage.views(giver.sums[1])
    assert torch.equal(joined[first], halves[first] + halves[second])
    assert torch.equal(joined[second], joined[first])

    copy = Parcel(ParcelKind.COPY, 1, 1, 0, None, 1)
    taker.payloads[copy] = giver.sums[1].clone()
    told = taker._do(msg.AssembleSum(1, (0, 1), (copy,)))
    assert torch.equal(taker.sums[1], giver.sums[1])
    assert told in (None, squares), "the giver's sum of squares comes with the copy"
