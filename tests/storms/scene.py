"""What every virtual world has: time, chance, the truth to compare with, disks, and what is seen of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from everstep.schedule import Instance, uniform
from everstep.schedule.cache import PlanCache
from everstep_lab.draw import Draw, Steady
from tests.storms.agenda import Agenda
from tests.storms.checkers import Checkers
from tests.storms.disk import CheckpointDisk
from tests.storms.network import Network
from tests.storms.node_memory import VirtualMemory
from tests.storms.spec import Spec
from tests.storms.trace import StormTrace
from tests.storms.truth import Truth


class Scene:
    def __init__(self, spec: Spec, *, record: bool = False) -> None:
        self.spec = spec
        rules = spec.rules
        self.trace = StormTrace(record=record)
        self.agenda = Agenda()
        steady = spec.weather.op_times_us is not None
        self.weather = (Steady if steady else Draw)(spec.seed, "weather")
        self.network = Network(self.agenda, self.weather)
        self.truth = Truth(spec.seed, rules)
        calm = (spec.is_calm or spec.is_deaf_only) and not (spec.moves or spec.planned)
        self.checkers = Checkers(self.truth, rules, calm=calm)
        self.checkers.bad = spec.flip if spec.flip is not None and spec.flip.lasting else None
        self.disk = CheckpointDisk(rules.stages)
        self.memory = VirtualMemory()
        self.stuck_disks: set[int] = set()  # nodes on which nothing that is begun on a disk ends
        self.num_stuck_disks = 0  # so far
        self.plans = plans_of(Shape(rules.replicas, rules.stages, rules.microbatches))
        self.outcome: str | None = None
        self.num_deaths = 0
        self.num_stalls = 0
        self.num_roles = 0
        self.on_trigger: Callable[[str, int, Worker], None] | None = None
        self._triggers: dict[str, int] = {}

    def now(self) -> float:
        return self.agenda.now_us / 1e6

    def soon(self, typical_us: int, what: Callable[..., None], *args: object) -> None:
        """After about so long."""
        self.agenda.after(self.weather.spread(typical_us), what, *args)

    def mix(self, code: int, worker: Worker | None) -> None:
        """Into the trace's hash."""
        self.trace.mix(self.agenda.now_us, code, 0 if worker is None else worker[0] * 64 + worker[1] + 1)

    def note(self, what: str, worker: Worker, text: str) -> None:
        self.mix(6 + len(what), worker)
        self.trace.tell(self.agenda.now_us, text)

    def trigger(self, what: str, worker: Worker) -> None:
        """Something happens that a fault may be aimed at."""
        count = self._triggers[what] = self._triggers.get(what, 0) + 1
        if self.on_trigger is not None:
            self.on_trigger(what, count, worker)


@lru_cache(maxsize=64)
def plans_of(shape: Shape) -> PlanCache:
    """A pure function of the shape, so storms may share it."""
    grid = uniform(replicas=shape.replicas, stages=shape.stages, value=1.0)
    return PlanCache(
        Instance(
            replicas=shape.replicas,
            stages=shape.stages,
            microbatches=shape.microbatches,
            forward=grid,
            input_grad=grid,
            weight_grad=grid,
        )
    )
