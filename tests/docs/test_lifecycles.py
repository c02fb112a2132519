"""The tables of transitions are whole."""

import pytest

from tools import lifecycles

FOUND = lifecycles.lifecycles()


@pytest.mark.parametrize("found", FOUND, ids=lambda found: found.name)
def test_every_state_can_be_reached_from_the_first(found: lifecycles.Lifecycle) -> None:
    first = next(iter(found.table))
    reached, todo = {first}, [first]
    while todo:
        for state in found.table[todo.pop()] - reached:
            reached.add(state)
            todo.append(state)
    assert reached == set(found.table)


def test_the_tables_that_are_known_are_found() -> None:
    names = {found.name for found in FOUND}
    assert {"core.task.states.PHASE", "core.worker.step_state.UPDATE"} <= names
    assert not lifecycles.is_table({"a": frozenset({"b"})}), "b is no state of it"
