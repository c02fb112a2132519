"""A step's three lifecycles at one worker: what may follow what, and what is an error of ours."""

import pytest

from everstep.core.worker.step_state import SEAL, SUM, UPDATE, StepState, SumState, UpdateState
from everstep.errors import InternalError
from everstep.protocol.ops import Kind, Microbatch, Op
from everstep.protocol.parcels import Part

PART = Part((Microbatch(0, 0),), (), 3, (1.0,))


def step() -> StepState:
    return StepState(step=7, round=1)


@pytest.mark.parametrize("table", [SUM, SEAL, UPDATE], ids=["sum", "seal", "update"])
def test_every_state_of_a_table_can_be_reached_and_is_listed(table: dict) -> None:
    _, *others = table
    assert set(others) <= set().union(*table.values())
    assert set().union(*table.values()) <= set(table)


def test_a_new_group_takes_back_a_contribution_but_not_a_sum() -> None:
    state = step()
    state.contributed(PART)
    state.chunk_summed((1.0,))
    state.restart_reduce(2)
    assert (state.sum, state.own_part, state.own_chunk_squares) == (SumState.COMPUTING, None, None)
    state.contributed(PART)
    state.chunk_summed((1.0,))
    state.held(0, 1.0)
    state.restart_reduce(3)
    assert (state.round, state.sum, state.own_part) == (3, SumState.HELD, PART)
    assert Op(Kind.R, None, 0) in state.done


def test_a_sum_can_be_given_before_anything_is_contributed() -> None:
    state = step()
    state.held(1, 2.0)
    assert state.holds_sum
    with pytest.raises(InternalError, match="the sum of step 7: held cannot become contributed"):
        state.contributed(PART)


def test_an_invalid_eager_update_is_made_again_and_never_eagerly() -> None:
    state = step()
    state.updated(1.0, eagerly=True)
    assert state.is_updated
    assert not state.is_final
    state.invalidated()
    with pytest.raises(InternalError, match="the update of step 7: invalid cannot become valid"):
        state.validated()
    state.must_wait()
    state.must_wait()
    assert not state.is_updated
    with pytest.raises(InternalError, match="the update of step 7: waiting cannot become eager"):
        state.updated(1.0, eagerly=True)
    state.updated(0.5, eagerly=False)
    assert (state.update, state.scale) == (UpdateState.FINAL, 0.5)


def test_an_eager_update_that_holds_is_final_once_it_is_committed() -> None:
    state = step()
    state.updated(1.0, eagerly=True)
    assert state.is_provisional
    state.validated()
    assert state.is_updated
    assert not state.is_provisional
    assert not state.is_final
    state.committed()
    assert state.is_final


def test_a_sum_is_released_once_and_counts_as_held() -> None:
    state = step()
    with pytest.raises(InternalError, match="computing cannot become released"):
        state.released()
    state.held(0, 1.0)
    state.released()
    assert state.holds_sum
    with pytest.raises(InternalError, match="released cannot become combined"):
        state.combined(1.0, attempt=0)


def test_a_final_update_is_final() -> None:
    state = step()
    state.updated(None, eagerly=False)
    with pytest.raises(InternalError, match="final cannot become waiting"):
        state.must_wait()


def test_a_step_is_sealed_once_and_announced_after() -> None:
    state = step()
    with pytest.raises(InternalError, match="the seal of step 7: open cannot become announced"):
        state.announced()
    state.sealed()
    assert state.is_sealed
    state.announced()
    with pytest.raises(InternalError, match="announced cannot become sealed"):
        state.sealed()
