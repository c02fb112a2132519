"""The tables of transitions are whole."""

import pytest

from tools import lifecycles

FOUND = lifecycles.lifecycles()


def test_the_page_draws_every_table() -> None:
    page = lifecycles.page()
    assert all(f"`{found.name.rpartition('.')[0]}`" in page for found in FOUND)


@pytest.mark.parametrize("found", FOUND, ids=lambda found: found.name)
def test_every_state_can_be_reached_from_the_first(found: lifecycles.Lifecycle) -> None:
    first = next(iter(found.table))
    reached, todo = {first}, [first]
    while todo:
        for state in found.table[todo.pop()] - reached:
            reached.add(state)
            todo.append(state)
    assert reached == set(found.table)


@pytest.mark.parametrize("found", FOUND, ids=lambda found: found.name)
def test_every_lifecycle_has_a_title_and_every_state_a_meaning(found: lifecycles.Lifecycle) -> None:
    assert found.name in lifecycles.TITLES
    for state in found.table:
        assert lifecycles.meaning(state), f"{found.name}: {state} says nothing of itself"


def test_the_tables_that_are_known_are_found() -> None:
    names = {found.name for found in FOUND}
    assert {"core.task.states.PHASE", "core.worker.step_state.UPDATE"} <= names
    assert not lifecycles.is_table({"a": frozenset({"b"})}), "b is no state of it"
