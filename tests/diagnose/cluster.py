"""A small job that gets stuck, and the records its ranks leave: hosts that enqueue ahead, devices that
complete in order, groups for tensor, data and pipeline parallelism. No part of the analysis is used to make
it.

A device completes its next operation when all who take part have reached it on their devices. Two faults:

    host     the rank's host enqueues nothing from operation k on
    device   operation k gets its contribution from the rank's device, and never completes there: peers go on
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from everstep_diagnose import Dump, Group, Log, Record
from everstep_diagnose.comm_record import GroupProgress


@dataclass(frozen=True)
class Call:
    kind: str
    group: int
    peer: int = -1


@dataclass
class Cluster:
    """Ranks are numbered tensor first, then data, then stage, as Megatron does."""

    tensor: int = 2
    data: int = 2
    stages: int = 2
    microbatches: int = 2
    steps: int = 4
    window: int = 6  # operations a host runs ahead of its device
    one_group: bool = False  # messages in the group of all, where both ends count differently
    groups: list[Group] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.size = self.tensor * self.data * self.stages
        self._index: dict[tuple[int, ...], int] = {}
        self.programs = [self._program(rank) for rank in range(self.size)]

    def place(self, rank: int) -> tuple[int, int, int]:
        return rank % self.tensor, rank // self.tensor % self.data, rank // (self.tensor * self.data)

    def rank(self, tensor: int, data: int, stage: int) -> int:
        return (stage * self.data + data) * self.tensor + tensor

    def group(self, *members: int) -> int:
        if members not in self._index:
            self._index[members] = len(self.groups)
            name = str(len(self.groups))
            self.groups.append(Group(name=name, members=members, pairwise=len(members) == 2))
        return self._index[members]

    def _program(self, rank: int) -> list[Call]:
        t, d, s = self.place(rank)
        shard = self.group(*(self.rank(i, d, s) for i in range(self.tensor))) if self.tensor > 1 else None
        peers = self.group(*(self.rank(t, i, s) for i in range(self.data))) if self.data > 1 else None
        up = self.rank(t, d, s - 1) if s else None
        down = self.rank(t, d, s + 1) if s + 1 < self.stages else None
        calls: list[Call] = []

        def message(kind: str, peer: int | None) -> None:
            if peer is not None:
                pair = range(self.size) if self.one_group else sorted((rank, peer))
                calls.append(Call(kind, self.group(*pair), peer))

        for _ in range(self.steps):
            for came, goes in ((up, down), (down, up)):
                for _ in range(self.microbatches):
                    message("recv", came)
                    if shard is not None:
                        calls.extend([Call("all_gather", shard), Call("reduce_scatter", shard)])
                    message("send", goes)
            if peers is not None:
                calls.append(Call("all_reduce", peers))
            calls.append(Call("all_reduce", self.group(*range(self.size))))
        return calls

    def matching(self, rank: int) -> list[int]:
        """Numbers under which two ends of a message, or all of a collective, find each other."""
        counts: dict[tuple[int, int, str], int] = defaultdict(int)
        numbers = []
        for call in self.programs[rank]:
            way = {"send": f"{rank}>{call.peer}", "recv": f"{call.peer}>{rank}"}.get(call.kind, "")
            counts[call.group, call.peer, way] += 1
            numbers.append(counts[call.group, call.peer, way])
        return numbers

    def numbered(self, rank: int) -> list[int]:
        """Sequence numbers as NCCL counts them: collectives and messages apart, per group."""
        counts: dict[tuple[int, bool], int] = defaultdict(int)
        numbers = []
        for call in self.programs[rank]:
            key = (call.group, call.peer >= 0)
            counts[key] += 1
            numbers.append(counts[key])
        return numbers

    def run(self, faults: dict[int, tuple[str, int]]) -> tuple[list[int], list[int]]:
        """Until nothing moves: how far each host enqueued and each device completed."""
        numbers = [self.matching(rank) for rank in range(self.size)]
        host, device = [0] * self.size, [0] * self.size
        moved = True
        while moved:
            moved = False
            for rank in range(self.size):
                kind, at = faults.get(rank, ("", 0))
                limit = min(len(self.programs[rank]), device[rank] + self.window)
                limit = min(limit, at) if kind == "host" else limit
                moved |= limit > host[rank]
                host[rank] = max(host[rank], limit)
            for rank in range(self.size):
                kind, at = faults.get(rank, ("", 0))
                if device[rank] >= host[rank] or (kind == "device" and device[rank] >= at):
                    continue
                if all(
                    self._is_there(m, rank, device, host, numbers, faults)
                    for m in self._partners(rank, device)
                ):
                    device[rank] += 1
                    moved = True
        return host, device

    def _partners(self, rank: int, device: list[int]) -> list[int]:
        call = self.programs[rank][device[rank]]
        return [call.peer] if call.peer >= 0 else [m for m in self.groups[call.group].members if m != rank]

    def _is_there(
        self,
        member: int,
        rank: int,
        device: list[int],
        host: list[int],
        numbers: list[list[int]],
        faults: dict,
    ) -> bool:
        call, number = self.programs[rank][device[rank]], numbers[rank][device[rank]]
        for at, other in enumerate(self.programs[member]):
            same = other.group == call.group and numbers[member][at] == number
            fits = other.peer < 0 if call.peer < 0 else other.peer == rank and other.kind != call.kind
            if same and fits:
                return at < host[member] and at <= device[member]
        raise AssertionError("programs do not match")

    def mixes(self) -> bool:
        """Is there a group with both messages and collectives? One counter cannot tell them apart there."""
        kinds = defaultdict(set)
        for program in self.programs:
            for call in program:
                kinds[call.group].add(call.peer >= 0)
        return any(len(both) == 2 for both in kinds.values())

    def parts(self, faults: dict[int, tuple[str, int]], *, only_pending: bool) -> list[Dump]:
        host, device = self.run(faults)
        return [self._part(rank, host[rank], device[rank], only_pending) for rank in range(self.size)]

    def _part(self, rank: int, host: int, device: int, only_pending: bool) -> Dump:
        numbers = self.numbered(rank)
        records = [
            Record(
                rank=rank,
                group=call.group,
                seq=numbers[at],
                kind=call.kind,
                peer=call.peer,
                enqueued_ns=10**18 + at * 1000 + rank,
                done=at < device,
                order=at,
            )
            for at, call in enumerate(self.programs[rank][:host])
            if at >= device or not only_pending
        ]
        return Dump(
            source=str(rank),
            form="flight recorder",
            log=Log.of(records),
            groups=list(self.groups),
            ranks=(rank,),
            progress=self._progress(rank, host, device) if only_pending else {},
        )

    def _progress(self, rank: int, host: int, device: int) -> dict[tuple[int, int], GroupProgress]:
        """NCCL's counters: the number of the last operation of a group, be it a collective or a message."""
        numbers, found = self.numbered(rank), {}
        for at, call in enumerate(self.programs[rank][:host]):
            before = found.get((rank, call.group), GroupProgress())
            found[rank, call.group] = GroupProgress(
                enqueued=numbers[at], completed=numbers[at] if at < device else before.completed
            )
        return found
