"""What is owed after a death, from the survivors' ledgers."""

from everstep.core.task.owed import what_is_owed
from everstep.protocol.ops import Kind, Microbatch, Op, Worker
from everstep.protocol.parcels import Parcel, ParcelKind
from everstep.protocol.shape import Shape
from everstep.protocol.work import Ledger

SHAPE = Shape(replicas=2, stages=2, microbatches=2)
STEP = 5


def op(kind: Kind, home: int, number: int, stage: int) -> Op:
    return Op(kind, Microbatch(home, number), stage)


def has(what: ParcelKind, stage: int, home: int, number: int) -> Parcel:
    return Parcel(what, 0, STEP, stage, Microbatch(home, number))


def kept(ledgers: dict[Worker, Ledger]) -> int:
    return what_is_owed(SHAPE, ledgers, steps=9, entering={}).kept_outputs


def test_outputs_of_a_dead_worker_that_have_arrived_are_kept() -> None:
    """0:0 died after two forwards: 0:1 has used one of its activations and holds the other."""
    ledgers = {
        Worker(0, 1): Ledger(
            step=STEP,
            done=(op(Kind.F, 0, 0, 1),),
            holding=(has(ParcelKind.ACTIVATION, 1, 0, 1),),
        ),
        Worker(1, 0): Ledger(step=STEP, done=(op(Kind.F, 1, 0, 0),)),
        Worker(1, 1): Ledger(step=STEP, holding=(has(ParcelKind.ACTIVATION, 1, 1, 0),)),
    }
    assert kept(ledgers) == 1, "the activation of 1:0, which lives, can be sent again"


def test_a_gradient_of_a_dead_worker_is_kept_too_and_one_of_another_step_does_not_count() -> None:
    """0:1 died after I of its first microbatch."""
    ledgers = {
        Worker(0, 0): Ledger(
            step=STEP,
            done=(op(Kind.F, 0, 0, 0), op(Kind.F, 0, 1, 0)),
            holding=(
                has(ParcelKind.GRADIENT, 0, 0, 0),
                has(ParcelKind.GRADIENT, 0, 0, 1)._replace(step=STEP + 1),
            ),
        ),
        Worker(1, 0): Ledger(step=STEP),
        Worker(1, 1): Ledger(step=STEP),
    }
    assert kept(ledgers) == 1
    assert kept({**ledgers, Worker(0, 1): Ledger(step=STEP, done=(op(Kind.I, 0, 0, 1),))}) == 0


class Counted(dict[Worker, Ledger]):
    """How often a ledger was looked at."""

    looks = 0

    def __getitem__(self, worker: Worker) -> Ledger:
        self.looks += 1
        return super().__getitem__(worker)


def test_ghosts_are_shared_out_evenly_without_a_look_at_every_peer_for_each() -> None:
    """Stage 0 has its sum, stage 1 has nothing, and who made its inputs is dead: they are made again. With
    512 replicas the choice of hosts was an event of two seconds.
    """
    shape = Shape(replicas=64, stages=2, microbatches=4)
    late = {Worker(replica, 0): STEP + replica % 2 for replica in range(64)}
    ledgers = Counted(
        {
            w: Ledger(
                step=late.get(w, STEP),
                done=(Op(Kind.R, None, 0),) if late.get(w) == STEP else (),
                done_before=(Op(Kind.R, None, 0),) if late.get(w, STEP) > STEP else (),
            )
            for w in shape.workers()
        }
    )
    owed = what_is_owed(shape, ledgers, steps=9, entering={})
    assert {w: len(which) for w, which in owed.ghosts.items()} == {
        w: 8 for w, step in late.items() if step == STEP
    }, "those that have not updated yet"
    assert ledgers.looks < 8 * len(ledgers)
