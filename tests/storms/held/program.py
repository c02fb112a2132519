"""A script as storms see it: what every rank does in each interval, and what it all gives without a failure.

All ranks walk one list of items; a rank skips the collectives of groups that it is no member of. What a rank
puts into a collective follows from its parameters, its random state and the position, so a newcomer with
other parameters, another random state or another answer than its predecessor's is seen at once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any


def mixed(*parts: Any) -> int:
    """A number that another input does not give, as far as a storm can tell."""
    found = 0xCBF29CE484222325
    for part in parts:
        found = ((found ^ (hash(part) & 0xFFFFFFFFFFFFFFFF)) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return found


@dataclass(frozen=True, slots=True)
class Collective:
    group: str
    root: int = -1  # a broadcast's; -1: all wait for all
    is_awaited: bool = True  # else it stays in the air until the next wait, update or snapshot
    makes_gradient: bool = False


@dataclass(frozen=True, slots=True)
class Update:
    optimizer: int
    inside: tuple[Collective, ...] = ()  # its step runs these with half of its work done


@dataclass(frozen=True, slots=True)
class Work:
    """It draws random numbers, and takes a while."""

    most: float


Item = Collective | Update | Work


@dataclass(slots=True)
class Program:
    world: int
    unit: int
    optimizers: int
    groups: dict[str, tuple[int, ...]]
    intervals: list[list[Item]]
    is_in_step: bool = True  # every interval has a gradient; else ranks may be several intervals apart

    @property
    def may_drift(self) -> bool:
        """Ranks may be so far apart that no rank has all that a newcomer needs."""
        return not self.is_in_step or any(name.startswith("own") for name in self.groups)

    @property
    def tears_states(self) -> bool:
        """All ranks may be inside an update at once, with half of it done."""
        return any(isinstance(item, Update) and item.inside for items in self.intervals for item in items)

    @classmethod
    def drawn(cls, seed: int) -> Program:
        draw = random.Random(seed)
        unit = draw.choice([1, 1, 1, 2, 2, 3])
        units = draw.randint(2, 4 if unit == 1 else 3)
        world = unit * units
        groups = {"all": tuple(range(world))}
        if unit > 1:
            for each in range(units):
                groups[f"shard {each}"] = tuple(range(each * unit, (each + 1) * unit))
            for shard in range(unit):
                groups[f"replicate {shard}"] = tuple(range(shard, world, unit))
        for number in range(draw.choice([0, 0, 1, 2])):
            members = sorted(draw.sample(range(world), draw.randint(2, world)))
            if len({rank // unit for rank in members}) > 1:
                groups[f"own {number}"] = tuple(members)
        program = cls(world, unit, draw.choice([1, 1, 2]), groups, [])
        uses_all, program.is_in_step = draw.random() < 0.7, draw.random() < 0.8
        for _ in range(draw.randint(3, 7)):
            program.intervals.append(program._interval(draw, uses_all=uses_all))
        return program

    def _interval(self, draw: random.Random, *, uses_all: bool) -> list[Item]:
        names = [name for name in self.groups if uses_all or name != "all" or self.unit == 1]
        items: list[Item] = []
        if self.is_in_step:
            items += self._gradient(draw)
        for optimizer in draw.sample(range(self.optimizers), draw.randint(0, self.optimizers)):
            items += self._some(draw, names)
            for _ in range(draw.randint(1, 3)):
                items += [Work(draw.random()), *self._gradient(draw)]
            items += self._some(draw, names)
            items.append(Update(optimizer, self._inside(draw)))
        items += self._some(draw, names)
        return items

    def _some(self, draw: random.Random, names: list[str]) -> list[Item]:
        found: list[Item] = []
        for _ in range(draw.choice([0, 0, 1, 2])):
            group = draw.choice(names)
            root = draw.choice(self.groups[group]) if draw.random() < 0.3 else -1
            found += [Work(draw.random()), Collective(group, root, draw.random() < 0.6)]
        return found

    def _inside(self, draw: random.Random) -> tuple[Collective, ...]:
        if draw.random() < 0.8:
            return ()
        return (Collective("all"),) if self.unit == 1 else tuple(map(Collective, self._shards()))

    def _shards(self) -> list[str]:
        return [name for name in self.groups if name.startswith("shard")]

    def _gradient(self, draw: random.Random) -> list[Item]:
        names = ["all"] if self.unit == 1 else [f"replicate {shard}" for shard in range(self.unit)]
        is_awaited = draw.random() < 0.3
        inside: list[Item] = [Collective(name) for name in self._shards()]
        return inside + [Collective(name, -1, is_awaited, makes_gradient=True) for name in names]


@dataclass(slots=True)
class Memory:
    """Of one rank: what its script has. An optimizer's parameters and its moments change together."""

    parameters: list[int]
    moments: list[int]
    draws: int
    other: int = 0  # a number in the script's state: a scheduler's
    gradient: int = 0

    @classmethod
    def fresh(cls, program: Program, rank: int) -> Memory:
        shard = rank % program.unit
        parameters = [mixed("parameters", shard, each) for each in range(program.optimizers)]
        return cls(parameters, [mixed("moments", shard, each) for each in range(program.optimizers)], rank)

    def work(self) -> None:
        self.draws = mixed(self.draws)

    def input(self, group: str, interval: int, number: int) -> int:
        return mixed(group, interval, number, *self.parameters, self.draws, self.other)

    def hear(self, item: Collective, value: int) -> None:
        if item.makes_gradient:
            self.gradient = (self.gradient + value) & 0xFFFFFFFFFFFFFFFF  # in whatever order they end

    def half_update(self, optimizer: int) -> None:
        self.moments[optimizer] = mixed(self.moments[optimizer], self.gradient)

    def update(self, optimizer: int) -> None:
        self.parameters[optimizer] = mixed(self.parameters[optimizer], self.moments[optimizer])
        self.other, self.gradient = self.other + 1, 0


@dataclass(slots=True)
class Reference:
    """The failure-free run: by (group, interval, number) all inputs and the result; by rank its updates."""

    inputs: dict[tuple[str, int, int], dict[int, int]] = field(default_factory=dict)
    results: dict[tuple[str, int, int], int] = field(default_factory=dict)
    updates: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    last: dict[int, Memory] = field(default_factory=dict)

    def run(
        self,
        program: Program,
        item: Collective,
        interval: int,
        numbers: dict[str, int],
        memories: dict[int, Memory],
    ) -> None:
        at = (item.group, interval, numbers[item.group])
        numbers[item.group] += 1
        inputs = {rank: memories[rank].input(*at) for rank in program.groups[item.group]}
        self.inputs[at], self.results[at] = inputs, result_of(item, inputs)
        for rank in inputs:
            memories[rank].hear(item, self.results[at])


def result_of(item: Collective, inputs: dict[int, int]) -> int:
    return inputs[item.root] if item.root >= 0 else mixed(*(inputs[rank] for rank in sorted(inputs)))


def reference(program: Program) -> Reference:
    found = Reference(updates={rank: [] for rank in range(program.world)})
    memories = {rank: Memory.fresh(program, rank) for rank in range(program.world)}
    for interval, items in enumerate(program.intervals):
        numbers = dict.fromkeys(program.groups, 0)
        for memory in memories.values():
            memory.gradient = 0
        for item in items:
            match item:
                case Work():
                    for memory in memories.values():
                        memory.work()
                case Collective():
                    found.run(program, item, interval, numbers, memories)
                case Update(optimizer=optimizer):
                    for memory in memories.values():
                        memory.half_update(optimizer)
                    for each in item.inside:
                        found.run(program, each, interval, numbers, memories)
                    for rank, memory in memories.items():
                        memory.update(optimizer)
                        state = (optimizer, memory.parameters[optimizer], memory.moments[optimizer])
                        found.updates[rank].append(state)
    found.last = memories
    return found
