"""Events in, actions out: who is named, when all ranks are started again, and when that is not tried."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.ranks.supervision import Supervision
from everstep.ranks.words import (
    Action,
    DiagnoseHang,
    EndRun,
    Event,
    HangDiagnosed,
    Interrupted,
    Look,
    RankExited,
    RankRaised,
    RanksSeen,
    RestartPolicy,
    RunRequested,
    ScriptTimePassed,
    SignalRanks,
    StartRanks,
    TellPerson,
)

RESET = "RuntimeError: [pair.cc:537] Read error [127.0.0.1]:44777: Connection reset by peer"
REASONS = {
    0: "exited with code 0",
    3: "exited with code 3",
    -9: "killed by SIGKILL",
    -15: "killed by SIGTERM",
}


class Run:
    """A supervision with a clock, checked after every event."""

    def __init__(self, **policy: float | int | None) -> None:
        self.machine = Supervision(RestartPolicy(**{"ranks": 2, **policy}))  # type: ignore[arg-type]
        self.now = 0.0
        self.told: list[Action] = []
        self.give(RunRequested())

    def give(self, event: Event, *, after: float = 0.0) -> list[Action]:
        self.now += after
        actions = self.machine.handle(event, self.now)
        self.machine.validate()
        self.told += actions
        return [action for action in actions if not isinstance(action, TellPerson)]

    def exited(self, rank: int, code: int, words: str = "", *, after: float = 0.0) -> list[Action]:
        life = self.machine.life
        return self.give(
            RankExited(rank=rank, life=life, code=code, reason=REASONS[code], words=words), after=after
        )

    def raised(self, rank: int, error: str, where: str = "train.py:7 in step") -> list[Action]:
        life = self.machine.life
        return self.give(
            RankRaised(rank=rank, life=life, error=error, where=where, raised_at=self.now - 0.004)
        )

    def pass_time(self) -> list[Action]:
        """To the next deadline."""
        deadline = self.machine.deadline()
        assert deadline is not None
        return self.give(ScriptTimePassed(), after=max(0.0, deadline - self.now))

    def looked(self, states: str, cpu_s: Iterable[float], *, after: float) -> list[Action]:
        looks = {
            rank: Look(state=state, cpu_s=cpu, output_bytes=0)
            for rank, (state, cpu) in enumerate(zip(states, cpu_s, strict=True))
        }
        return self.give(RanksSeen(life=self.machine.life, looks=looks), after=after)


def kinds(actions: Iterable[Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_all_ranks_are_started_and_the_run_ends_with_the_last_of_them() -> None:
    run = Run()
    assert run.told == [StartRanks(life=0, because="The run was asked for.")]
    assert run.exited(0, 0) == []
    assert run.exited(1, 0) == [EndRun(code=0, because="All 2 ranks have ended with code 0.")]
    assert run.machine.incidents == []


def test_a_kill_ends_the_others_at_once_and_the_first_restart_does_not_wait() -> None:
    run = Run(ranks=3)
    assert run.exited(1, -9) == [
        SignalRanks(
            ranks=(0, 2),
            signal="SIGTERM",
            because="rank 1 killed by SIGKILL; all ranks end together.",
        )
    ]
    assert run.exited(0, -15) == []
    assert run.exited(2, -15) == [
        StartRanks(life=1, because="rank 1 killed by SIGKILL; 3 of 3 restarts were left.")
    ]
    incident = run.machine.incidents[0]
    assert (incident.rank, incident.verdict, incident.severity) == (1, "killed", "SEV2")
    assert incident.evidence == ["rank 1 killed by SIGKILL"]
    assert incident.remedy == "restart of all 3 ranks, 1 of 3"


def test_a_neighbours_lost_connection_is_not_taken_for_the_cause() -> None:
    run = Run()
    assert run.raised(0, RESET) == []  # its peer's death may not have been seen yet
    assert kinds(run.exited(1, -9, after=0.02)) == ["SignalRanks"]
    incident = run.machine.incidents[0]
    assert incident.rank == 1
    assert incident.because.endswith("Rank 0 only lost touch with it.")
    assert incident.evidence[0] == "rank 1 killed by SIGKILL"
    assert "Connection reset by peer" in incident.evidence[1]


def test_a_lost_connection_that_nobody_explains_is_told_of_the_one_who_reports_it() -> None:
    run = Run()
    assert run.raised(0, RESET) == []
    assert run.machine.deadline() == pytest.approx(0.3)
    assert kinds(run.pass_time()) == ["SignalRanks"]
    assert run.machine.incidents[0].rank == 0
    assert run.machine.incidents[0].severity == "SEV3"


def test_an_exception_is_acted_on_before_its_process_has_ended() -> None:
    run = Run()
    (sent,) = run.raised(1, "ValueError: no batch")
    assert isinstance(sent, SignalRanks)
    assert sent.ranks == (0,), "who has raised may end in peace"
    incident = run.machine.incidents[0]
    assert incident.what == "rank 1 raised ValueError: no batch at train.py:7 in step"
    assert incident.noticed_ms == pytest.approx(4.0)
    assert run.exited(0, -15) == []
    # Who has raised may end by itself for a while; then it must.
    assert run.pass_time() == [
        SignalRanks(ranks=(1,), signal="SIGTERM", because="has raised, and has not ended within 0.5 s.")
    ]
    assert kinds(run.pass_time()) == ["SignalRanks"]
    assert run.told[-1].signal == "SIGKILL"  # type: ignore[union-attr]
    assert kinds(run.exited(1, -9)) == ["StartRanks"]


def test_restarts_wait_longer_and_longer_until_a_life_was_long() -> None:
    run = Run(max_restarts=9)
    waits = []
    for life_s in (1, 1, 1, 1, 1000, 1):
        run.exited(0, -9, after=life_s)
        ended = run.now
        if not run.exited(1, -15):
            run.pass_time()
        waits.append(run.now - ended)
    assert waits == [0, 1, 2, 4, 0, 1]


def test_the_budget_of_restarts_ends_and_the_run_has_the_failing_ranks_code() -> None:
    run = Run(max_restarts=1)
    run.exited(0, -9)
    run.exited(1, -15)
    assert run.machine.life == 1
    run.exited(1, 3)
    end = run.exited(0, -15)
    assert end == [EndRun(code=3, because="Rank 1 exited with code 3. All 1 restarts are used up.")]
    assert [incident.remedy for incident in run.machine.incidents] == [
        "restart of all 2 ranks, 1 of 1",
        "stop",
    ]


def test_a_signal_is_told_to_the_shell_as_shells_do() -> None:
    run = Run(max_restarts=0)
    run.exited(1, -9)
    assert run.exited(0, -15) == [
        EndRun(code=137, because="Rank 1 killed by SIGKILL. No restarts are allowed.")
    ]


def test_broken_hardware_is_not_tried_again() -> None:
    run = Run()
    run.raised(0, "RuntimeError: CUDA error: uncorrectable ECC error encountered")
    run.exited(1, -15)
    end = run.exited(0, 3)
    assert kinds(end) == ["EndRun"]
    assert "the same machine would fail again" in end[0].because
    assert end[0].code == 3, "what the rank that raised ended with"  # type: ignore[union-attr]
    assert run.machine.incidents[0].severity == "SEV1"


@pytest.mark.parametrize(
    ("errors", "restarts"),
    [
        (["NameError: name 'x'", "NameError: name 'x'"], 1),
        (["NameError: name 'x'", "NameError: name 'y'", "NameError: name 'y'"], 2),
        (["RuntimeError: flaky", "RuntimeError: flaky", "RuntimeError: flaky"], 3),
    ],
)
def test_a_program_that_is_wrong_in_the_same_way_twice_is_not_tried_a_third_time(
    errors: list[str], restarts: int
) -> None:
    run = Run(max_restarts=5)
    for error in errors:
        run.raised(0, error)
        run.exited(1, -15)
        run.exited(0, 3)
        if not run.machine.is_over and run.machine.deadline() is not None:
            run.pass_time()
    assert run.machine.restarts == restarts


def test_a_stopped_rank_is_named_when_seen_and_restarted_when_it_stays() -> None:
    run = Run()
    run.looked("SS", [1, 1], after=0.25)
    run.looked("ST", [1, 1], after=0.25)
    told = run.told[-1]
    assert isinstance(told, TellPerson)
    assert told.rank == 1
    assert told.because.startswith("rank 1 is stopped")
    assert run.machine.incidents == []
    run.looked("ST", [1, 1], after=4.0)
    assert kinds(run.pass_time()) == ["SignalRanks"]
    assert run.machine.incidents[0].what == "rank 1 has been stopped for 5.0 s"
    assert run.machine.incidents[0].verdict == "task hang"


def test_a_rank_in_a_debugger_is_left_alone_for_as_long_as_it_takes() -> None:
    run = Run(hang_after_s=10)
    for _ in range(100):
        assert run.looked("St", [0, 0], after=1.0) == []
    assert kinds(run.told) == ["StartRanks"]
    assert run.machine.deadline() is None


def test_a_rank_may_be_stopped_for_a_moment() -> None:
    run = Run(hang_after_s=60)
    run.looked("ST", [1, 1], after=0.25)
    assert run.looked("SS", [1, 1], after=3.0) == []
    assert isinstance(run.told[-1], TellPerson)
    assert run.told[-1].because == "rank 1 continues after 3.0 s; no action was needed."
    assert run.machine.deadline() is None


def test_where_a_rank_is_stopped_no_other_reason_for_stillness_is_looked_for() -> None:
    run = Run(hang_after_s=3)
    run.looked("SS", [0, 0], after=0.0)
    run.looked("ST", [0, 0], after=2.0)
    assert run.looked("ST", [0, 0], after=1.5) == []
    assert kinds(run.pass_time()) == ["SignalRanks"]


def test_a_hang_is_called_only_when_nobody_moves() -> None:
    run = Run(hang_after_s=10)
    cpu = 0.0
    for _ in range(100):  # rank 1 waits; rank 0 works for both
        cpu += 0.2
        assert run.looked("RS", [cpu, 0], after=0.25) == []
    for _ in range(39):
        assert run.looked("SS", [cpu, 0], after=0.25) == []
    asked = run.looked("SS", [cpu, 0], after=0.25)
    assert kinds(asked) == ["DiagnoseHang"]
    assert isinstance(asked[0], DiagnoseHang)
    assert asked[0].ranks == (0, 1)


def test_threads_that_wake_up_now_and_then_do_not_hide_a_hang() -> None:
    run = Run(hang_after_s=10)
    watchdog = 0.0
    answers: list[Action] = []
    for _ in range(60):
        watchdog += 0.25 * 0.01  # 1 % of a core
        answers += run.looked("SS", [watchdog, 0], after=0.25)
    assert kinds(answers) == ["DiagnoseHang"]


@pytest.mark.parametrize(
    ("suspects", "rank", "what"),
    [((1,), 1, "hang at rank 1: "), ((0, 1), None, "hang at ranks 0, 1: "), ((), None, "hang: ")],
)
def test_a_hang_names_whom_the_stacks_name(suspects: tuple[int, ...], rank: int | None, what: str) -> None:
    run = Run(hang_after_s=1)
    run.looked("SS", [0, 0], after=0.0)
    assert kinds(run.looked("SS", [0, 0], after=1.0)) == ["DiagnoseHang"]
    found = HangDiagnosed(life=0, suspects=suspects, because="Its stack says so.", evidence=("a stack",))
    assert kinds(run.give(found, after=0.1)) == ["SignalRanks"]
    incident = run.machine.incidents[0]
    assert incident.rank == rank
    assert incident.what.startswith(what)
    assert incident.because == "Its stack says so."
    assert incident.noticed_ms == pytest.approx(1100)


def test_stacks_that_never_come_do_not_hold_the_restart_up() -> None:
    run = Run(hang_after_s=1)
    run.looked("SS", [0, 0], after=0.0)
    run.looked("SS", [0, 0], after=1.0)
    assert kinds(run.pass_time()) == ["SignalRanks"]
    assert run.machine.incidents[0].because == "Stacks could not be collected in time."


def test_ctrl_c_ends_everybody_and_twice_means_now() -> None:
    run = Run()
    assert run.give(Interrupted(signal="SIGINT", code=130)) == [
        SignalRanks(ranks=(0, 1), signal="SIGTERM", because="SIGINT came; all ranks end together.")
    ]
    assert run.give(Interrupted(signal="SIGINT", code=130)) == [
        SignalRanks(ranks=(0, 1), signal="SIGKILL", because="SIGINT came a second time.")
    ]
    run.exited(0, -9)
    assert run.exited(1, -9) == [EndRun(code=130, because="Stopped by the user; every rank has ended.")]
    assert run.machine.incidents == []


def test_what_a_life_before_has_left_in_the_mail_changes_nothing() -> None:
    run = Run()
    run.exited(0, -9)
    run.exited(1, -15)
    assert run.machine.life == 1
    late = RankExited(rank=0, life=0, code=-9, reason="killed by SIGKILL")
    assert run.give(late) == []
    assert run.machine.snapshot()["live"] == [0, 1]


# ------------------------------------------------------------------ anything, in any order

RANKS = 3
ranks = st.integers(0, RANKS - 1)
anything = st.one_of(
    st.builds(
        lambda rank, code: ("exited", rank, code), ranks, st.sampled_from([0, 3, -9, -15])
    ),
    st.builds(lambda rank, error: ("raised", rank, error), ranks, st.sampled_from([RESET, "KeyError: y"])),
    st.builds(
        lambda states, cpu: ("looked", states, cpu),
        st.text("SRTD", min_size=RANKS, max_size=RANKS),
        st.sampled_from([0.0, 5.0]),
    ),
    st.just(("diagnosed",)),
    st.just(("time",)),
    st.just(("interrupted",)),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(anything, st.sampled_from([0.0, 0.1, 0.6, 7.0])), max_size=60))
def test_whatever_happens_ranks_are_accounted_for_and_the_run_ends_when_they_obey(
    story: list[tuple[tuple[str, ...], float]],
) -> None:
    run = Run(ranks=RANKS, max_restarts=2, hang_after_s=5)
    for (kind, *values), after in story:
        match kind:
            case "exited":
                run.exited(values[0], values[1], after=after)  # type: ignore[arg-type]
            case "raised":
                run.raised(*values)  # type: ignore[arg-type]
            case "looked":
                run.looked(values[0], [float(values[1])] * RANKS, after=after)
            case "diagnosed":
                run.give(HangDiagnosed(life=run.machine.life, suspects=(1,), because="so."), after=after)
            case "time":
                run.give(ScriptTimePassed(), after=after)
            case "interrupted":
                run.give(Interrupted(signal="SIGINT", code=130), after=after)
    run.give(Interrupted(signal="SIGINT", code=130))
    for rank in range(RANKS):
        run.exited(rank, -15)
    assert run.machine.is_over
    assert kinds(run.told).count("EndRun") == 1
    assert kinds(run.told)[-1] == "EndRun"
    assert kinds(run.told).count("StartRanks") == run.machine.life + 1 <= 3
    assert all(action.because for action in run.told)
    assert all(incident.remedy for incident in run.machine.incidents[:-1])
