"""Every communication of a process, into shared memory that outlives it.

`begin` takes a slot of the ring and stamps it, `end` writes one number into it: about a microsecond each, no
lock, no system call. What a stopped or killed process had begun and not ended stays readable in the file; the
layout is `everstep.ring`.

    recorder = Recorder(path, rank=3, world_size=8)
    slot = recorder.begin(SEND, peer=4, bytes=1 << 20, seq=17)
    ...
    recorder.end(slot)

`watch_messages` is for plain PyTorch scripts: it records what Flight Recorder leaves out on gloo, the
point-to-point messages. Its collectives are in Flight Recorder already.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import platform
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from everstep import ring
from everstep.engine.telemetry.beacon import ring_beside
from everstep.protocol.ops import Worker
from everstep.protocol.parcels import Parcel, ParcelKind, recorded_as

KIND = {name: number for number, name in enumerate(ring.KINDS)}
SEND, RECV, COMPUTE = KIND["send"], KIND["recv"], KIND["compute"]
_clock = time.monotonic_ns
_wall = time.time_ns
_AT, _MASK, _end = ring.SLOTS_AT, 0x7FFFFFFF, ring.TIME.pack_into
assert (ring.SLOT_SIZE, ring.ENDED_AT) == (
    64,
    16,
)  # written out below: a name costs as much as the arithmetic


class Recorder:
    def __init__(self, path: Path, *, rank: int, world_size: int = 0, capacity: int = 4096) -> None:
        size = ring.size_of(capacity)
        with path.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk raises here, and is no SIGBUS in an op
            self._map = mmap.mmap(file.fileno(), size)
        self._rank, self._capacity = rank, capacity
        self._count = itertools.count()  # next() is one step of the interpreter: threads cannot share a turn
        self._pack = ring.SLOT.pack_into
        self._names: dict[str, Any] = {"host": platform.node(), "world_size": world_size, "groups": []}
        self.group("messages", range(world_size))

    def group(self, name: str, members: Any) -> int:
        """The number under which a group's operations are recorded."""
        groups = self._names["groups"]
        groups.append({"name": name, "members": list(members)})
        text = json.dumps(self._names).encode()
        if len(text) > ring.SLOTS_AT - ring.NAMES_AT:  # too many to name: numbers stay good
            groups[-1]["members"] = []
            text = json.dumps(self._names).encode()[: ring.SLOTS_AT - ring.NAMES_AT]
        self._map[ring.NAMES_AT : ring.NAMES_AT + len(text)] = text
        ring.HEAD.pack_into(
            self._map,
            0,
            ring.MAGIC,
            ring.VERSION,
            self._capacity,
            self._rank,
            _wall_minus_monotonic(),
            len(text),
        )
        return len(groups) - 1

    def begin(self, kind: int, *, peer: int = -1, bytes: int = -1, seq: int = 0, group: int = 0) -> int:
        """An operation is enqueued now. Returns where it was written."""
        turn = next(self._count)
        place = _AT + turn % self._capacity * 64
        turn = (turn & _MASK) + 1
        self._pack(self._map, place, turn, kind, 0, _clock(), 0, -1, bytes, seq, peer, group, turn)
        return place

    def end(self, place: int) -> None:
        _end(self._map, place + 16, _clock())

    def happened(
        self,
        kind: int,
        started_ns: int,
        ended_ns: int,
        peer: int = -1,
        bytes: int = -1,
        seq: int = 0,
        group: int = 0,
        took_ns: int = -1,
    ) -> None:
        """An operation that is over, in one write. `took_ns`: if its length is not end less start."""
        turn = next(self._count)
        place = _AT + turn % self._capacity * 64
        turn = (turn & _MASK) + 1
        if took_ns < 0 and started_ns:
            took_ns = ended_ns - started_ns
        self._pack(
            self._map, place, turn, kind, 0, started_ns, ended_ns, took_ns, bytes, seq, peer, group, turn
        )

    def content(self) -> bytes:
        return bytes(self._map)

    def close(self) -> None:
        self._map.close()


class WorkerRecorder:
    """A worker's ops and parcels, in the words of the ring: a rank is `stage * replicas + replica`, a role
    its stage, and a parcel's number is made of its name, so that both its ends give it the same one."""

    def __init__(self, path: Path, me: Worker, *, replicas: int, stages: int) -> None:
        self._me, self._replicas = me, replicas
        self._ring = Recorder(path, rank=self._rank(me.replica, me.stage), world_size=replicas * stages)
        members = [self._rank(replica, me.stage) for replica in range(replicas)]
        self._stage = self._ring.group(f"stage {me.stage}", members)

    @classmethod
    def beside(cls, beacon: str, me: Worker, *, replicas: int, stages: int) -> WorkerRecorder:
        """In the same place as the worker's beacon: a reader of one finds the other."""
        return cls(ring_beside(Path(beacon)), me, replicas=replicas, stages=stages)

    def op(self, step: int, started_ns: int, ended_ns: int, own_ns: int) -> None:
        """`own_ns`: without what it stood in line for a core, which is not slowness."""
        self._ring.happened(COMPUTE, started_ns, ended_ns, seq=step, group=self._stage, took_ns=own_ns)

    def sent(self, parcel: Parcel, replica: int, stage: int, size: int) -> None:
        now = _clock()
        self._ring.happened(SEND, now, now, self._rank(replica, stage), size, self._number(parcel))

    def got(self, parcel: Parcel, size: int) -> None:
        sender = parcel.sender if parcel.microbatch is None else parcel.microbatch.home
        is_boundary = parcel.what in (ParcelKind.ACTIVATION, ParcelKind.GRADIENT)
        stage = parcel.maker if is_boundary else self._me.stage
        self._ring.happened(RECV, 0, _clock(), self._rank(sender, stage), size, self._number(parcel))

    def _rank(self, replica: int, stage: int) -> int:
        return stage * self._replicas + replica

    def _number(self, parcel: Parcel) -> int:
        home, number = parcel.microbatch or (parcel.sender, parcel.owner)
        return recorded_as(parcel.step, _WHAT[parcel.what], home, number)


_WHAT = {what: number for number, what in enumerate(ParcelKind)}


def _wall_minus_monotonic() -> int:
    """Of the closest of several readings: between two clock calls a process can lose its core for long, and
    the error would be taken for the delay of a link.
    """
    readings = []
    for _ in range(9):
        before, wall, after = _clock(), _wall(), _clock()
        readings.append((after - before, wall - (before + after) // 2))
    return min(readings)[1]


def watch_messages(recorder: Recorder) -> None:
    """From now on every `torch.distributed` send and receive of this process is recorded."""
    import torch.distributed as dist

    counts: dict[tuple[int, int], int] = defaultdict(int)

    def recording(call: Any, kind: int, blocking: bool) -> Any:
        def wrapped(tensor: Any, other: int | None = None, *args: Any, **kwargs: Any) -> Any:
            given = other if other is not None else kwargs.get("dst", kwargs.get("src"))
            peer = -1 if given is None else int(given)
            counts[kind, peer] += 1
            size = tensor.numel() * tensor.element_size()
            place = recorder.begin(kind, peer=peer, bytes=size, seq=counts[kind, peer])
            result = (
                call(tensor, other, *args, **kwargs) if other is not None else call(tensor, *args, **kwargs)
            )
            if blocking:
                recorder.end(place)
                return result
            return _Recorded(result, recorder, place)

        return wrapped

    for name, kind in (("send", SEND), ("recv", RECV)):
        setattr(dist, name, recording(getattr(dist, name), kind, True))
        setattr(dist, f"i{name}", recording(getattr(dist, f"i{name}"), kind, False))


class _Recorded:
    """A `Work` whose wait is the message's end."""

    def __init__(self, work: Any, recorder: Recorder, place: int) -> None:
        self._work, self._recorder, self._place = work, recorder, place

    def wait(self, *args: Any) -> Any:
        result = self._work.wait(*args)
        self._recorder.end(self._place)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
