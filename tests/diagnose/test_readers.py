"""Files as they come: foreign, torn, hostile, of every version; each is read or refused with a reason."""

import json
import pickle
import re
import time
from pathlib import Path
from typing import Any

import pytest

from everstep import ring
from everstep.cli import main
from everstep.ras_json import read_json
from everstep_diagnose import UnusableFileError, analyse, join, read
from everstep_diagnose.ras import read_ras


def entry(number: int, **more: Any) -> dict[str, Any]:
    return {
        "record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": number,
        "p2p_seq_id": 0, "op_id": number, "profiling_name": "nccl:all_reduce",
        "time_created_ns": 10**18 + number, "input_sizes": [[10, 3]], "input_dtypes": ["Float"],
        "output_sizes": [[10, 3]], "output_dtypes": ["Float"],
        "state": "scheduled", "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
        "retired": False, "timeout_ms": 600000, "is_p2p": False,
    } | more  # fmt: skip


def dump(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    return {"version": "2.9", "pg_config": config, "pg_status": {}, "entries": list(entries)} | more


def empty_ring(names: dict[str, Any]) -> bytes:
    text = json.dumps(names).encode()
    head = ring.HEAD.pack(ring.MAGIC, ring.VERSION, 0, 0, 0, len(text))
    return head.ljust(ring.NAMES_AT, b"\0") + text.ljust(ring.SLOTS_AT - ring.NAMES_AT, b"\0")


def pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=2)


class Attack:
    def __reduce__(self) -> Any:
        return (print, ("a dump ran code",))


def test_a_pickle_that_would_run_code_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnusableFileError, match="plain data only"):
        read("rank_0", pickled(dump() | {"nccl_version": Attack()}))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("version", ["2.0", "2.4", "2.7", "2.9", "2.10"])
def test_versions(version: str) -> None:
    part = read("nccl_trace_rank_3", pickled(dump(entry(5), version=version)))
    (record,) = part.log.records()
    assert (record.rank, record.seq, record.kind, record.bytes, record.done) == (
        3,
        5,
        "all_reduce",
        120,
        False,
    )


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty"),
        (b"hello\n", "not a format known"),
        (b"\x80\x02}q", "truncated"),
        (b'{"version": "2.9", "entr', "truncated"),
        (b"[" * 100_000, "RecursionError"),
        (json.dumps(dump(pg_status=7)).encode(), "AttributeError: 'int' object has no attribute 'items'"),
        (json.dumps(dump(pg_status={"x": {}})).encode(), "ValueError: invalid literal for int"),
        (empty_ring({"world_size": 1 << 40}), "1099511627776 ranks"),
        (json.dumps({"communicators": [{"missing_ranks": [{"rank": -1}]}]}).encode(), "of rank -1"),
        (b'{"some": "json"}', "no Flight Recorder dump"),
        (pickled(dump(version="3.1")), "3.1 is not known"),
        (pickled(dump(entry(1, input_sizes="x"))), "entry 0 cannot be read"),
        (b"\xff\xfe\x00garbage", "not a format known"),
        (b"everring" + bytes(10), "no ring"),
    ],
)
def test_what_cannot_be_used_says_why(content: bytes, why: str) -> None:
    with pytest.raises(UnusableFileError, match=re.escape(why)):
        read("rank_0", content)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("_dump_2", 2),
        ("comm_lib_trace_rank_3", 3),
        ("host7_rank_1.pkl", 1),
        ("node12/rank2.json", 2),
        ("trace0", 0),
    ],
)
def test_the_rank_is_in_the_name(name: str, rank: int) -> None:
    assert read(name, pickled(dump(entry(1)))).ranks == (rank,)


def test_a_name_that_contradicts_the_groups_is_refused() -> None:
    with pytest.raises(UnusableFileError, match="its groups do not"):
        read("rank_9", pickled(dump(entry(1))))


def test_the_numbers_of_a_group_are_ranks_of_the_group() -> None:
    config = {"7": {"name": "7", "desc": "pipe", "ranks": "[4, 12]"}}
    part = read(
        "rank_4",
        pickled(
            dump(
                entry(
                    1,
                    process_group=("7", "pipe"),
                    profiling_name="nccl:send 0->1",
                    p2p_seq_id=31,
                    is_p2p=False,
                ),
                pg_config=config,
            )
        ),
    )
    (record,) = part.log.records()
    assert (record.kind, record.peer, record.seq) == ("send", 12, 31)


def test_gloo_says_completed_by_retired_and_names_no_group() -> None:
    """Its pg_config is one nameless group without ranks; who is in a group is who was seen in it."""
    nameless = {"": {"name": "", "desc": "", "ranks": "[]"}}
    parts = []
    for rank in range(4):
        rows = [entry(n, profiling_name="gloo:all_reduce", retired=True) for n in (1, 2)]
        if rank != 3:
            rows.append(entry(3, profiling_name="gloo:all_reduce", time_created_ns=10**18 + 9))
        parts.append(read(f"fr_rank_{rank}", pickled(dump(*rows, pg_config=nameless, version="2.10"))))
    case = join(parts)
    assert case.groups[0].members == (0, 1, 2, 3)
    assert not case.has_device
    (finding,) = analyse(parts).incidents
    assert [s.rank for s in finding.suspects] == [3]
    assert finding.where == "host"


@pytest.mark.parametrize("asleep", range(5))
def test_no_rank_is_named_that_there_is_not(asleep: int) -> None:
    """Five ranks of gloo in groups of three and two, which their dumps do not list, and one of them asleep.
    Groups were taken for equal blocks: rank 5 had stopped first, and there was none.
    """
    groups, parts = [(0, 1, 2), (3, 4)], []
    nameless = {"": {"name": "", "desc": "", "ranks": "[]"}}
    for rank in range(5):
        mine = next(at for at, group in enumerate(groups) if rank in group)
        ours, all_of_us = (str(mine + 1), "undefined"), ("0", "default_pg")
        calls = [(name, step) for step in range(1, 6) for name in (ours, all_of_us)]
        stuck = 6 if asleep in groups[mine] else 7  # in the group's all-reduce, or in that of all
        rows = [
            entry(
                step, process_group=name, pg_id=int(name[0]), profiling_name="gloo:all_reduce",
                retired=at < stuck, time_created_ns=10**18 + at * 10**7 + rank,
            )
            for at, (name, step) in enumerate(calls[: stuck + (rank != asleep)])
        ]  # fmt: skip
        parts.append(read(f"rank_{rank}", pickled(dump(*rows, pg_config=nameless, version="2.10"))))
    assert join(parts).world == (0, 1, 2, 3, 4)
    (finding,) = analyse(parts).incidents
    assert [suspect.rank for suspect in finding.suspects] == [asleep]


def test_dumps_of_gloo_after_a_failure_accuse_nobody_and_say_why() -> None:
    """What failed is marked as what completed, so nothing tells who stopped first."""
    rows = [entry(n, profiling_name="gloo:all_reduce", retired=True) for n in range(1, 9)]
    said = analyse([read(f"rank_{rank}", pickled(dump(*rows[: 8 - rank]))) for rank in range(2)])
    assert said.incidents == []
    assert any("do not show which rank stopped first" in note for note in said.notes)


def test_of_two_dumps_of_one_rank_the_later_counts() -> None:
    early = read("rank_0.pkl", pickled(dump(entry(1))))
    late = read("rank_0.json", json.dumps(dump(entry(1, retired=True), entry(2))).encode())
    for parts in ([early, late], [late, early]):
        assert [(r.seq, r.done) for r in join(parts).log.records()] == [(1, True), (2, False)]


def test_an_operation_whose_record_was_written_over_is_not_missed() -> None:
    """Rank 1 went on for longer than its recorder remembers: it was in number 5, as its later ones say."""
    gloo = {"profiling_name": "gloo:all_reduce"}
    entries = {0: [entry(5, **gloo)], 1: [entry(8, retired=True, **gloo), entry(9, **gloo)]}
    parts = [read(f"rank_{rank}.json", json.dumps(dump(*said)).encode()) for rank, said in entries.items()]
    analyse(parts)


def inspector(rank: int, number: int, microseconds: float) -> str:
    return json.dumps(
        {
            "header": {"id": "0xabc", "rank": rank, "n_ranks": 4, "nnodes": 1},
            "metadata": {
                "inspector_output_format_version": "v4.0",
                "hostname": f"node{rank // 2}",
                "pid": 100 + rank,
            },
            "coll_perf": {
                "coll": "AllReduce",
                "coll_sn": number,
                "coll_msg_size_bytes": 1 << 20,
                "coll_exec_time_us": microseconds,
                "coll_timing_source": "kernel_gpu",
            },
        }
    )


def test_inspector_the_last_to_arrive_has_the_shortest_operation() -> None:
    """Rank 2 is late by 800 us each time: the others' lengths hold the waiting for it. A torn last line is
    no harm."""
    parts = []
    for rank in range(4):
        lines = [inspector(rank, n, 200 + (0 if rank == 2 else 800) + (n * 7 + rank) % 5) for n in range(30)]
        parts.append(read(f"node-{rank}.log", ("\n".join(lines) + '\n{"header": {"id"').encode()))
    (finding,) = analyse(parts).incidents
    assert [(s.rank, s.node) for s in finding.suspects] == [(2, "node1")]
    assert finding.syndrome == "non-communication slow"


def test_inspector_a_file_that_begins_with_counts_of_lost_records_is_known() -> None:
    """As NCCL 2.30 writes it, at the start of each dump."""
    counts = (
        '{"header": {"id": "0xabc", "rank": 2, "n_ranks": 4}, "dump_stats": {"coll": {"dropped_total": 0}}}'
    )
    part = read("node-2.log", "\n".join([counts, inspector(2, 7, 200.0)]).encode())
    assert [(record.rank, record.seq) for record in part.log.records()] == [(2, 7)]


def test_inspector_numbers_are_counted_for_each_kind_of_operation() -> None:
    """Number 7 of the all-gathers is another operation than number 7 of the all-reduces."""
    lines = [inspector(2, 7, 200.0), inspector(2, 7, 300.0).replace("AllReduce", "AllGather")]
    records = read("node-2.log", "\n".join(lines).encode()).log.records()
    assert len({record.group for record in records}) == 2


def ras(counts: dict[int, int], **more: Any) -> str:
    ranks = [
        {"rank": r, "host": f"h{r}", "pid": 10 + r, "cuda_dev": 0, "collective_counts": {"AllReduce": n}}
        for r, n in counts.items()
    ]
    return json.dumps({"communicators": [{"hash": "0x1", "ranks": ranks, "missing_ranks": [], **more}]})


def test_ras_a_count_that_stays_behind_is_a_stuck_host() -> None:
    stuck = {0: 101, 1: 100, 2: 101, 3: 101}
    (finding,) = analyse([read_ras("ras.json", ras(stuck), before=ras(stuck))]).incidents
    assert [s.rank for s in finding.suspects] == [1]
    assert finding.where == "host"


def test_ras_counts_that_move_accuse_nobody() -> None:
    before, now = {0: 100, 1: 99, 2: 100}, {0: 104, 1: 103, 2: 104}
    assert analyse([read_ras("ras.json", ras(now), before=ras(before))]).incidents == []


def test_ras_one_status_accuses_no_rank_that_answers() -> None:
    """A count that is one short may be a rank on its way."""
    text = ras({0: 101, 1: 100, 2: 101, 3: 101})
    assert analyse([read("ras.json", text.encode())]).incidents == []


def test_ras_two_files_of_a_folder_tell_who_stands_still(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("b.json", "a.json"):
        (tmp_path / name).write_text(ras({0: 101, 1: 101, 2: 100, 3: 101}))
    main.run(["diagnose", str(tmp_path), "--json"])
    (incident,) = json.loads(capsys.readouterr().out)["incidents"]
    assert [suspect["rank"] for suspect in incident["suspects"]] == [2]
    (tmp_path / "c.json").write_text(ras(dict.fromkeys(range(4), 105)))  # newer, and it goes on
    main.run(["diagnose", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["incidents"] == []


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"considered_dead": True}, "is dead"),
        ({"unresponsive": True, "considered_dead": False}, "is not answering"),
    ],
)
def test_ras_a_rank_that_it_misses_is_named(status: dict[str, bool], words: str) -> None:
    text = ras({0: 50, 1: 50}, missing_ranks=[{"rank": 2, "status": status}])
    (finding,) = analyse([read("ras.json", text.encode())]).incidents
    assert [s.rank for s in finding.suspects] == [2]
    assert words in finding.suspects[0].evidence


def test_ras_the_comma_that_nccl_forgets_where_a_rank_is_missing_is_not_needed() -> None:
    text = ras({0: 50, 1: 50}, missing_ranks=[{"rank": 2, "status": {"unresponsive": True}}])
    written = json.dumps(json.loads(text), indent=2)
    forgotten = written.replace('"rank": 2,', '"rank": 2')
    assert forgotten != written
    (finding,) = analyse([read("ras.json", forgotten.encode())]).incidents
    assert [s.rank for s in finding.suspects] == [2]


def test_ras_an_answer_of_empty_lines_is_given_up_at_once() -> None:
    """A search for the missing comma took the square of their number, hours for what a listener may send."""
    began = time.process_time()
    with pytest.raises(ValueError, match="Expecting"):
        read_json("{1" + ("\n" * (1 << 16) + "1") * 16)
    assert time.process_time() - began < 5


def error(message: str) -> bytes:
    return json.dumps({"message": {"message": message, "extraInfo": {"timestamp": "1794717902"}}}).encode()


def test_the_rank_that_raised_first_is_the_one_whose_error_is_its_own() -> None:
    lost = "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:4411"
    parts = [
        read(f"attempt_0/{r}/error.json", error("ValueError: bad batch" if r == 2 else lost))
        for r in range(4)
    ]
    (finding,) = analyse(parts).incidents
    assert [s.rank for s in finding.suspects] == [2]
    assert "bad batch" in finding.suspects[0].evidence


@pytest.mark.parametrize(
    ("group", "message"), [(("7", "pipe"), "recv 0<-1"), (("0", "default_pg"), "recv 4<-99")]
)
def test_a_rank_that_no_source_names_is_not_to_blame(group: tuple[str, str], message: str) -> None:
    """A dump that did not list the ranks of a group: rank 1 of the group was taken for rank 1 of the job,
    which had nothing to do with it, and rank 99 of eight was to blame."""
    parts = []
    for rank in range(8):
        rows = [entry(number, state="completed", retired=True) for number in range(3)]
        if rank == 4:
            rows.append(entry(3, profiling_name=f"nccl:{message}", process_group=group, p2p_seq_id=1))
        parts.append(read(f"rank_{rank}", pickled(dump(*rows, pg_config={}))))
    named = {r for one in analyse(parts).incidents for s in one.suspects for r in (s.rank, s.peer)}
    assert named <= {4, None}
