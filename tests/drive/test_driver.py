"""The driver: written down first, handled in order, carried out before the next, and nothing twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from everstep.drive.driver import Driver, Handled

TICK = "tick"


class Echo:
    """A machine: an event is its own action; it wants to be woken when it is told a number."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.due: float | None = None

    def handle(self, event: str, now: float) -> list[str]:
        self.seen.append(event)
        self.due = float(event) if event.isdecimal() else None
        return [event]

    def due_at(self) -> float | None:
        return self.due

    def unfinished(self) -> list[str]:
        return ["unfinished"]


class Stage:
    """All ports in one: a store that syncs when told to, a clock that stands."""

    def __init__(self) -> None:
        self.machine = Echo()
        self.now = 0.0
        self.alarms: list[float] = []
        self.journal: list[tuple[float, str]] = []
        self.syncs: list[Callable[[], None]] = []
        self.out: list[Handled[str, str]] = []
        self.answers: dict[str, str] = {}
        self.driver = self.new_driver()

    def new_driver(self) -> Driver[str, str]:
        return Driver(self.machine, clock=self, store=self, port=self.take, time_passed=TICK)

    def time(self) -> float:
        return self.now

    def wake_at(self, when: float) -> None:
        self.alarms.append(when)

    def write(self, entries: Sequence[tuple[float, str]], done: Callable[[], None]) -> None:
        self.journal += entries
        self.syncs.append(done)

    def take(self, one: Handled[str, str]) -> None:
        self.out.append(one)
        if not one.replayed and one.event in self.answers:
            self.driver.hear(self.answers[one.event])

    def sync(self) -> None:
        self.syncs.pop(0)()

    def carried_out(self) -> list[str]:
        return [action for one in self.out if not one.replayed for action in one.actions]


def test_nothing_is_handled_before_it_is_durable() -> None:
    stage = Stage()
    stage.driver.hear("a")
    assert stage.journal == [(0.0, "a")]
    assert stage.machine.seen == []
    stage.sync()
    assert stage.machine.seen == ["a"]


def test_what_comes_while_the_store_writes_goes_into_the_next_batch_together() -> None:
    stage = Stage()
    for event in "abc":
        stage.driver.hear(event)
    assert [event for _, event in stage.journal] == ["a"]
    stage.now = 1.0
    stage.sync()
    assert stage.journal == [(0.0, "a"), (1.0, "b"), (1.0, "c")]
    stage.sync()
    assert stage.machine.seen == ["a", "b", "c"]


def test_an_answer_that_comes_at_once_waits_its_turn() -> None:
    stage = Stage()
    stage.answers["a"] = "answer"
    done: list[str] = []
    stage.driver.hear("a", handled=lambda: done.append("a"))
    stage.driver.hear("b")
    stage.sync()
    assert done == ["a"]
    stage.sync()
    assert stage.machine.seen == ["a", "b", "answer"]


def test_the_clock_is_looked_at_once_for_each_moment_that_is_due() -> None:
    stage = Stage()
    stage.driver.hear("5")
    stage.sync()
    assert stage.alarms == [5.0]
    stage.driver.look_at_clock()
    assert stage.journal[1:] == [], "it is not time yet"
    stage.now = 5.5
    stage.driver.look_at_clock()
    stage.driver.look_at_clock()
    assert stage.journal[1:] == [(5.5, TICK)]


def test_a_closed_driver_handles_nothing_more_and_gives_back_what_waited() -> None:
    stage = Stage()
    stage.driver.hear("a")
    stage.driver.hear("b")
    assert stage.driver.close() == ["b"]
    stage.sync()
    stage.driver.hear("c")
    assert stage.machine.seen == []
    assert not stage.syncs


def test_time_never_runs_backwards_in_the_journal() -> None:
    stage = Stage()
    for now in (3.0, 1.0, 4.0):
        stage.now = now
        stage.driver.hear("x")
        stage.sync()
    assert [at for at, _ in stage.journal] == [3.0, 3.0, 4.0]


@given(st.lists(st.sampled_from(["hear", "sync", "crash"]), max_size=40))
def test_whatever_crashes_every_durable_event_is_decided_once_and_in_order(moves: list[str]) -> None:
    stage = Stage()
    durable = 0
    for number, move in enumerate(moves):
        if move == "hear":
            stage.driver.hear(f"e{number}")
        elif move == "sync" and stage.syncs:
            durable = len(stage.journal)
            stage.sync()
        elif move == "crash":
            stage.driver.close()
            stage.syncs.clear()
            del stage.journal[durable:]
            carried_out = stage.driver.number
            stage.machine = Echo()
            stage.driver = stage.new_driver()
            stage.driver.replay(stage.journal, carried_out=carried_out)
    assert stage.machine.seen == [event for _, event in stage.journal[: stage.driver.number]]
    carried_out = stage.carried_out()
    assert carried_out == list(dict.fromkeys(carried_out)), "nothing is carried out twice"
    assert carried_out == stage.machine.seen
