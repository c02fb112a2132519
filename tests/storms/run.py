"""One storm from its seed: a safety phase with faults, then a healed phase in which it must end.

0 ─────────────── faults ──────────────► heal ─────────── nothing new ──────────► the budget's end
  whatever happens, no invariant breaks        whatever has happened, training ends
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.storms.checkers import Violation
from tests.storms.cluster_world import ClusterWorld
from tests.storms.faults import FaultKind
from tests.storms.spec import Spec, run_time_us
from tests.storms.strikes import Strikes
from tests.storms.virtual_coordinator import RecoveryMachine, fingerprint
from tests.storms.world import World

SAFETY_RUN_TIMES = 3  # the faults last this many fault-free run times
LIVENESS_RUN_TIMES = 60
MOST_EVENTS = 60_000
# Where live connections break, everybody may come to wait for what was lost, and the detector asks for a new
# epoch. Nothing else may need that.
LOSING = (
    FaultKind.CUT,
    FaultKind.PART,
    FaultKind.ONE_WAY,
    FaultKind.NODE,
    FaultKind.RACK,
    FaultKind.LEMON,
    FaultKind.STAGE,
)
MOST_STALLS = 3
LEAVING_US = 2_000_000
FIRST_STEP_US = 12_000_000  # of the detectors: how long a first step takes is not known yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    seed: int
    violation: str | None  # None: it passed
    hash: str
    events: int
    virtual_ms: float
    deaths: int
    incidents: int
    stalls: int  # times that everybody waited for something lost, until the detector asked for a new epoch
    roles: int  # workers that took part in a step at another stage than before
    faults_struck: tuple[str, ...]
    transcript: tuple[str, ...] = ()


def run_storm(spec: Spec, *, record: bool = False, cluster: bool = False) -> Report:
    """Never raises for what the system does wrong: that is a violation, in words.

    `cluster`: the whole coordinator with agents and detectors, not one task's recovery alone.
    """
    world: World | ClusterWorld = (ClusterWorld if cluster else World)(spec, record=record)
    scene = world.scene
    strikes = Strikes(world, spec.faults)
    violation: str | None = None
    try:
        _run(world, strikes)
    except Violation as found:
        violation = str(found)
    except Exception as error:
        violation = f"{type(error).__name__}: {error}"
    return Report(
        seed=spec.seed,
        violation=violation,
        hash=scene.trace.hash(),
        events=scene.agenda.done,
        virtual_ms=scene.agenda.now_us / 1e3,
        deaths=scene.num_deaths,
        incidents=len(world.recovery.incidents),
        stalls=scene.num_stalls,
        roles=scene.num_roles,
        faults_struck=tuple(str(f) for f in strikes.struck),
        transcript=tuple(scene.trace.lines or ()),
    )


def _run(world: World | ClusterWorld, strikes: Strikes) -> None:
    spec, scene, agenda = world.spec, world.scene, world.scene.agenda
    usual = run_time_us(spec)
    heal_at = SAFETY_RUN_TIMES * usual
    end_at = (
        heal_at
        + LIVENESS_RUN_TIMES * usual
        + 40 * max(spec.weather.start_us, spec.weather.silence_us, spec.weather.overdue_us)
    )
    if isinstance(world, ClusterWorld):
        end_at += FIRST_STEP_US
        agenda.at(heal_at, world.waits.heal)
    agenda.at(heal_at, strikes.heal)
    world.begin()
    step = agenda.step
    others = world.others.open if isinstance(world, ClusterWorld) else ()
    while scene.outcome is None or others:
        if not step():
            may_lose = any(fault.what in LOSING for fault in strikes.struck)
            if scene.num_stalls == (MOST_STALLS if may_lose else 0):
                _complain(world)
                raise Violation(f"liveness: nothing is left to happen; {_summary(world)}")
            world.stall()
        if agenda.now_us > end_at or agenda.done > MOST_EVENTS:
            _complain(world)
            raise Violation(f"liveness: no end {agenda.now_us / 1e3:g} ms after the start; {_summary(world)}")
    is_cancelled = isinstance(world, ClusterWorld) and world.is_cancelled
    if scene.outcome == "finished":
        states = {
            w: (process.worker_state, process.state) for w, process in world.workers.items() if process.alive
        }
        scene.checkers.at_the_end(world.recovery, states)
    elif not (is_cancelled and scene.outcome.startswith("cancelled")):
        raise Violation(f"liveness: the task {scene.outcome}")
    if isinstance(world, ClusterWorld):
        _let_all_leave(world)
        world.check_the_coordinator()
    elif spec.seed % 4 == 0:
        again = world.head.replayed(world.head.acted)
        assert isinstance(again, RecoveryMachine)
        scene.checkers.journal_replayed(fingerprint(world.recovery), fingerprint(again.recovery))


def _let_all_leave(world: ClusterWorld) -> None:
    """The task is over: what was given up behind a cut line ends when the line is back, and what slept in the
    kernel wakes up, dies, and frees its slot.
    """
    agenda = world.scene.agenda
    world.wake_all()
    end_at = max(agenda.now_us, world.lines.all_back_us) + LEAVING_US
    while not world.is_quiet():
        if not agenda.step() or agenda.now_us > end_at:
            raise Violation(f"nothing left behind: {world.left_behind()}")


def _complain(world: World | ClusterWorld) -> None:
    if isinstance(world, ClusterWorld):
        world.waits.complain()


def _summary(world: World | ClusterWorld) -> str:
    workers = ", ".join(f"{w} {process.summary()}" for w, process in world.workers.items() if process.alive)
    return f"{world.recovery.phase}; {workers}"
