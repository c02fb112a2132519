"""Records of communication as jobs leave them, then broken: what `everstep diagnose` reads and looks at.

Per input, the files of a job of up to four ranks: Flight Recorder dumps of NCCL or gloo (pickle or JSON),
NCCL Inspector, RAS, torchelastic's error files, our own rings. A file that is not what it should
be is refused alone; whatever is left is analysed.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

from everstep.engine.telemetry.beacon import ring_beside
from everstep.engine.telemetry.recorder import COMPUTE, RECV, SEND, Recorder
from everstep.node.recent_ops import recorded
from everstep_diagnose import UnusableFileError, analyse, read
from tests.attacks.fuzzing import FuzzReport, Maker

RANKS = 4
NOW = 10**18


def records(seed: int, count: int) -> FuzzReport:
    maker, report = Maker(seed), FuzzReport("records")
    with tempfile.TemporaryDirectory() as folder:
        ring = _ring(Path(folder, "ring"))
    kinds = (_flight, _inspector, _ras, _error, lambda maker, rank: _flipped(maker, ring))
    for _ in range(count):
        kind = maker.random.choice(kinds)
        files = [(f"rank_{rank}", kind(maker, rank)) for rank in range(maker.random.choice((1, 2, RANKS)))]
        report.tried(lambda files=files: _look(files), (UnusableFileError,), files)
    return report


def rings(seed: int, count: int) -> FuzzReport:
    """What an agent makes of rings of its workers, whose files are their users'."""
    maker, report = Maker(seed), FuzzReport("rings")
    with tempfile.TemporaryDirectory() as name:
        beacon = Path(name, "b0")
        whole = _ring(ring_beside(beacon))
        for number in range(count):
            ring_beside(beacon).write_bytes(_flipped(maker, whole))
            report.tried(lambda: recorded(beacon, 1, 5), (), number)
    return report


def _look(files: list[tuple[str, bytes]]) -> None:
    parts, refused = [], None
    for name, content in files:
        try:
            parts.append(read(name, content, modified_ns=NOW))
        except UnusableFileError as error:
            refused = error
    if parts:
        analyse(parts).document()
    if refused is not None:
        raise refused


def _written(maker: Maker, document: Any, *, plain: bool = False) -> bytes:
    """A document, broken, as JSON or as a pickle; one in eight has other bytes in some places, or no end."""
    draw, broken = maker.random, maker.broken(document)
    data = json.dumps(broken).encode(errors="surrogatepass")
    if not plain and draw.random() < 0.5:
        with contextlib.suppress(RecursionError):
            data = pickle.dumps(broken, protocol=2)
    return _flipped(maker, data) if draw.random() < 0.12 else data


def _flipped(maker: Maker, content: bytes) -> bytes:
    draw, data = maker.random, bytearray(content)
    for _ in range(draw.choice((1, 4))):
        data[draw.randrange(len(data))] = draw.randrange(256)
    if draw.random() < 0.3:
        del data[draw.randrange(len(data)) :]
    return bytes(data)


def _flight(maker: Maker, rank: int) -> bytes:
    library = maker.random.choice(("nccl", "gloo"))
    behind = maker.random.randrange(3)
    entries = [_entry(library, number, 6 - behind) for number in range(1, 7)]
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(RANKS)))}}
    status = {"last_enqueued_collective": 6, "last_started_collective": 6, "last_completed_collective": 5}
    return _written(
        maker, {"version": "2.9", "pg_config": config, "pg_status": {"0": status}, "entries": entries}
    )


def _entry(library: str, number: int, done: int) -> dict[str, Any]:
    kind = ("all_reduce", "send 0->1", "_all_gather_base", "recv 0<-1")[number % 4]
    started = NOW + 1000 * number if number <= done else None
    return {
        "record_id": number, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": number,
        "p2p_seq_id": number, "op_id": number, "profiling_name": f"{library}:{kind}",
        "time_created_ns": NOW + 900 * number, "input_sizes": [[10, 3]], "input_dtypes": ["Float"],
        "output_sizes": [[40, 3]], "output_dtypes": ["Float"], "duration_ms": 0.4,
        "state": "completed" if number <= done else "scheduled", "time_discovered_started_ns": started,
        "time_discovered_completed_ns": started, "retired": number <= done, "timeout_ms": 600000,
    }  # fmt: skip


def _inspector(maker: Maker, rank: int) -> bytes:
    lines = [
        _written(
            maker,
            {
                "header": {"id": "0xabc", "rank": rank, "n_ranks": RANKS, "nnodes": 1},
                "metadata": {
                    "inspector_output_format_version": "v4.0",
                    "hostname": f"n{rank}",
                    "pid": rank,
                    "dump_timestamp_us": NOW // 1000,
                },
                "coll_perf": {
                    "coll": "AllReduce",
                    "coll_sn": number,
                    "coll_msg_size_bytes": 1 << 20,
                    "coll_exec_time_us": 200 + number,
                    "coll_timing_source": "kernel_gpu",
                },
            },
            plain=True,
        )
        for number in range(6)
    ]
    return b"\n".join(lines)


def _ras(maker: Maker, rank: int) -> bytes:
    ranks = [
        {
            "rank": r,
            "host": f"h{r}",
            "pid": 10 + r,
            "cuda_dev": 0,
            "collective_counts": {"AllReduce": 7 + r % 2},
        }
        for r in range(RANKS)
    ]
    lost = [{"rank": 3, "unresponsive": True}]
    return _written(
        maker, {"communicators": [{"hash": "0x1", "ranks": ranks, "missing_ranks": lost}]}, plain=True
    )


def _error(maker: Maker, rank: int) -> bytes:
    more = {"timestamp": "1700000000", "py_callstack": "Traceback"}
    return _written(maker, {"message": {"message": "ValueError: x", "extraInfo": more}}, plain=True)


def _ring(path: Path, rank: int = 2) -> bytes:
    recorder = Recorder(path, rank=rank, world_size=RANKS, capacity=32)
    for number in range(20):
        recorder.end(recorder.begin((SEND, RECV)[number % 2], peer=3 - rank, bytes=512, seq=number // 2))
    for step in range(1, 7):
        recorder.happened(COMPUTE, 100 * step, 100 * step + 50, seq=step)
    return bytes(recorder.content())
