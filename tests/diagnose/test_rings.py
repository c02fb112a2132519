"""The ring outlives its writer, and is read by its agent and by `everstep diagnose`."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from everstep import ring as layout
from everstep.engine.telemetry import recorder as recording
from everstep.engine.telemetry.recorder import COMPUTE, RECV, SEND, Recorder, WorkerRecorder
from everstep.node.recent_ops import ring_at
from everstep.protocol.ops import Microbatch, Worker
from everstep.protocol.parcels import Parcel, ParcelKind
from everstep_diagnose import UnusableFileError, analyse, read
from everstep_diagnose.comm_record import UNKNOWN

MS = 1_000_000


def test_what_is_begun_and_not_ended_stays_in_the_ring(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "ring", rank=2, world_size=4)
    recorder.end(recorder.begin(SEND, peer=3, bytes=512, seq=1))
    recorder.begin(RECV, peer=1, bytes=64, seq=9)
    recorder.happened(COMPUTE, 100, 400, seq=5)
    part = read("ring", (tmp_path / "ring").read_bytes())
    found = {r.kind: (r.rank, r.peer, r.bytes, r.seq, r.done) for r in part.log.records()}
    assert found == {
        "send": (2, 3, 512, 1, True),
        "recv": (2, 1, 64, 9, False),
        "compute": (2, -1, -1, 5, True),
    }
    assert part.groups[0].members == (0, 1, 2, 3)
    (compute,) = [r for r in part.log.records() if r.kind == "compute"]
    assert compute.took_ns == 300


def test_numbers_that_were_torn_take_no_memory(tmp_path: Path) -> None:
    """A group's number of two thousand million made the reader, which may be an agent, run out of memory."""
    recorder = Recorder(tmp_path / "ring", rank=0, world_size=4, capacity=4)
    for number in range(3):
        recorder.begin(SEND, seq=number)
    content = bytearray(recorder.content())
    at = layout.SLOTS_AT + layout.SLOT_SIZE + 52
    content[at : at + 4] = (2**31 - 1).to_bytes(4, "little")
    assert read("ring", bytes(content)).log.seq.tolist() == [0, 2]
    content[16:20] = (2**31 - 1).to_bytes(4, "little")  # the rank
    with pytest.raises(UnusableFileError, match="it speaks of rank 2147483647"):
        read("ring", bytes(content))


def test_an_agent_reads_rings_and_nothing_else(tmp_path: Path) -> None:
    """They are files of the task's user."""
    recorder = Recorder(tmp_path / "ring", rank=0, capacity=16)
    recorder.begin(SEND)
    content = ring_at(tmp_path / "ring")
    assert len(layout.slots_of(content, layout.head_of(content))) == 1
    (tmp_path / "link").symlink_to(tmp_path / "ring")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").write_bytes(recorder.content())
    os.truncate(tmp_path / "huge", 1 << 40)
    (tmp_path / "pickle").write_bytes(b"\x80\x02]r\xff\xff\xff\x0f.")
    for name in ("link", "pipe", "huge", "pickle", "nothing"):
        with pytest.raises((OSError, ValueError)):
            ring_at(tmp_path / name)


def test_the_oldest_records_make_room(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "ring", rank=0, capacity=16)
    for number in range(100):
        recorder.end(recorder.begin(SEND, seq=number))
    assert sorted(read("ring", recorder.content()).log.seq.tolist()) == list(range(84, 100))


def test_a_slot_torn_by_a_death_is_skipped(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "ring", rank=0, capacity=4)
    for number in range(3):
        recorder.begin(SEND, seq=number)
    content = bytearray(recorder.content())
    content[layout.SLOTS_AT + layout.SLOT_SIZE] ^= 1  # its first stamp
    assert read("ring", bytes(content)).log.seq.tolist() == [0, 2]


def test_threads_do_not_take_each_others_slots(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "ring", rank=0, capacity=8192)
    threads = [
        threading.Thread(target=lambda: [recorder.happened(SEND, 1, 2, seq=n) for n in range(1000)])
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read("ring", recorder.content()).log) == 6000


def test_the_last_records_of_a_killed_process_can_be_read(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from everstep.engine.telemetry.recorder import *\n"
        f"r = Recorder(Path({str(tmp_path / 'ring')!r}), rank=5, world_size=8)\n"
        "r.begin(RECV, peer=4, seq=77); print('ready', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    (record,) = read("ring", (tmp_path / "ring").read_bytes()).log.records()
    assert (record.rank, record.peer, record.seq, record.done) == (5, 4, 77, False)


def test_both_ends_of_a_parcel_give_it_one_number(tmp_path: Path) -> None:
    sender = WorkerRecorder(tmp_path / "a", Worker(1, 0), replicas=2, stages=2)
    receiver = WorkerRecorder(tmp_path / "b", Worker(1, 1), replicas=2, stages=2)
    parcel = Parcel(ParcelKind.ACTIVATION, 0, 12, 1, Microbatch(1, 3))
    sender.sent(parcel, 1, 1, 4096)
    receiver.got(parcel, 4096)
    parts = [read(name, (tmp_path / name).read_bytes()) for name in ("a", "b")]
    (sent,), (got,) = parts[0].log.records(), parts[1].log.records()
    assert (sent.rank, sent.peer, sent.seq) == (got.peer, got.rank, got.seq) == (1, 3, sent.seq)
    assert got.enqueued_ns == UNKNOWN
    assert got.ended_ns >= sent.enqueued_ns - MS


def test_a_slowed_worker_is_told_from_its_rings(tmp_path: Path) -> None:
    """Two replicas of two stages; worker 1:0 computes 1.8 times as long."""
    parts = []
    for replica in range(2):
        for stage in range(2):
            path = tmp_path / f"{replica}{stage}"
            recorder = WorkerRecorder(path, Worker(replica, stage), replicas=2, stages=2)
            length = int(10 * MS * (1.8 if (replica, stage) == (1, 0) else 1.0))
            for step in range(1, 21):
                for op in range(6):
                    begin = 10**12 + step * 200 * MS + op * 20 * MS
                    took = length + (step * 13 + op) % 7 * 10_000
                    recorder.op(step, begin, begin + took, took)
            parts.append(read(path.name, path.read_bytes()))
    (finding,) = analyse(parts).incidents
    assert [s.rank for s in finding.suspects] == [1]
    assert "stage 0" in finding.suspects[0].evidence


@pytest.mark.parametrize("content", [b"everring", b"everring" + bytes(8000)])
def test_half_a_ring_is_refused(content: bytes) -> None:
    with pytest.raises(UnusableFileError):
        read("ring_rank_0", content)


def test_a_process_that_lost_its_core_between_two_clocks_has_the_same_offset(monkeypatch: object) -> None:
    """Else its messages would seem to take as long as it was away."""
    now = iter(range(10**9, 10**12, 10**3))
    pauses = iter([80 * MS, 80 * MS, 0, 80 * MS, *[0] * 100])
    away = 0

    def clock() -> int:
        return next(now) + away

    def wall() -> int:
        nonlocal away
        away += next(pauses)
        return 10**18 + next(now) + away

    monkeypatch.setattr(recording, "_clock", clock)  # type: ignore[attr-defined]
    monkeypatch.setattr(recording, "_wall", wall)  # type: ignore[attr-defined]
    assert abs(recording._wall_minus_monotonic() - 10**18) < MS // 100
