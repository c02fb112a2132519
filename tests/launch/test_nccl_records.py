"""What NCCL knows of ranks: RAS is asked, whoever answers there can do no harm, and the judges of hangs and
of slow ranks use what it says."""

import json
import os
import resource
import socket
import time
from pathlib import Path

import pytest

from everstep.core.faults.arrivals import slowest
from everstep.core.faults.testimony import suspects_of_hang
from everstep.protocol.messages import RankPosition
from everstep.ranks import nccl_records
from everstep.ranks.keeper import paces_of
from everstep.ranks.nccl_records import (
    NcclQuestion,
    SeenByRas,
    completed_operations,
    ras_address,
    seen_by_ras,
)
from tests.launch import stand_in_ras as stand_in
from tests.launch.stand_in_ras import Answer, answer, communicator, ras, status

PIDS = {0: 100, 1: 101, 2: 102, 3: 103}
RANKS = {pid: rank for rank, pid in PIDS.items()}
WORLD = "NCCL communicator 0x5bf1 (AllReduce)"
LATE = {0: 13, 1: 13, 2: 12, 3: 13}


def ask(*answers: Answer, seconds: float = 1.5, **more: str) -> tuple[dict[int, SeenByRas], float]:
    with ras(answers) as address:
        began = time.monotonic()
        environment = {"NCCL_RAS_ADDR": address, **more}
        question = NcclQuestion(environment, RANKS, world=4, seconds=seconds)
        while not question.is_over:
            assert time.monotonic() - began < seconds + 3.0
            time.sleep(0.002)
        return question.seen, time.monotonic() - began


def judged(seen: dict[int, SeenByRas]) -> tuple[tuple[int, ...], str, tuple[str, ...]]:
    """All ranks wait in the same place, so that only NCCL can tell them apart."""
    found = suspects_of_hang(
        [
            RankPosition(
                rank=rank,
                at="a.py:1 in f",
                is_inside_torch=True,
                launched=each.launched,
                trouble=each.trouble,
            )
            for rank, each in seen.items()
        ],
        (),
    )
    return found.ranks, found.because, found.evidence


def test_the_rank_that_has_launched_less_is_named() -> None:
    seen, _ = ask(answer(status(communicator(LATE, PIDS))))
    assert {rank: each.launched for rank, each in seen.items()} == {r: {WORLD: n} for r, n in LATE.items()}
    ranks, because, evidence = judged(seen)
    assert ranks == (2,)
    assert because == f"rank 2 has not launched operation 13 of {WORLD}, in which 3 ranks wait, by NCCL's RAS"
    assert evidence == ("ranks 0, 1, 2, 3 are at a.py:1 in f",), "what it was named for is not said twice"


def test_a_rank_that_waits_in_one_communicator_is_not_blamed_for_being_late_in_another() -> None:
    """Rank 3 hangs. Its partner 2 waits for it in theirs, so both are late where 0 and 1 wait."""
    pair, other = {2: 21, 3: 20}, {0: 21, 1: 21}
    everyone = {0: 7, 1: 7, 2: 6, 3: 6}
    for first, second in (("0x1", "0x2"), ("0x2", "0x1")):
        text = status(
            communicator(everyone, PIDS, name=first),
            communicator(pair, PIDS, name=second),
            communicator(other, PIDS, name="0x3"),
        )
        ranks, because, _ = judged(seen_by_ras(stand_in.said(text), RANKS, 4))
        assert ranks == (3,)
        assert f"operation 21 of NCCL communicator {second} (AllReduce), in which 1 rank waits" in because


def test_the_same_holds_for_process_groups_of_torch() -> None:
    for world, pair in (("0", "1"), ("1", "0")):
        entered = {0: {world: 7}, 1: {world: 7}, 2: {world: 6, pair: 21}, 3: {world: 6, pair: 20}}
        at = [
            RankPosition(rank=rank, at="", is_inside_torch=True, entered=groups)
            for rank, groups in entered.items()
        ]
        found = suspects_of_hang(at, ())
        assert found.ranks == (3,)
        assert found.because == (
            f"rank 3 has not entered collective 21 of process group {pair}, in which 1 rank waits"
        )


def test_a_rank_that_has_launched_nothing_yet_is_late_too() -> None:
    seen, _ = ask(answer(status(communicator({0: 1, 1: 0, 2: 1, 3: 1}, PIDS))))
    assert judged(seen)[0] == (1,)


@pytest.mark.parametrize(
    ("said_of_it", "words"),
    [
        ({"considered_dead": True, "unresponsive": True}, "is considered dead"),
        ({"unresponsive": True}, "does not answer"),
    ],
)
def test_a_rank_that_ras_misses_is_named(said_of_it: dict[str, bool], words: str) -> None:
    seen, _ = ask(answer(status(communicator({0: 9, 2: 9, 3: 9}, PIDS, missing={1: said_of_it}))))
    ranks, because, _ = judged(seen)
    assert ranks == (1,)
    assert because == f"rank 1 {words}, by NCCL's RAS"


def test_what_ras_says_is_shown_where_the_flight_recorder_names_the_rank_and_where_all_are_alike() -> None:
    at = [
        RankPosition(
            rank=rank,
            at="",
            is_inside_torch=True,
            entered={"0": 8 - (rank == 2)},
            launched={WORLD: 13 - (rank == 2)},
        )
        for rank in range(4)
    ]
    found = suspects_of_hang(at, ())
    assert found.because.startswith("rank 2 has not entered collective 8 of process group 0")
    assert (
        f"rank 2 has not launched operation 13 of {WORLD}, in which 3 ranks wait, by NCCL's RAS"
        in found.evidence
    )
    alike = seen_by_ras(stand_in.said(status(communicator(dict.fromkeys(range(4), 5), PIDS))), RANKS, 4)
    ranks, _, evidence = judged(alike)
    assert ranks == ()
    assert "4 ranks have launched the same operations, by NCCL's RAS" in evidence


def test_messages_between_two_ranks_are_not_compared() -> None:
    text = json.loads(status(communicator(dict.fromkeys(range(4), 5), PIDS)))
    text["communicators"][0]["ranks"][2]["collective_counts"] |= {"Send": 9, "Recv": 3}
    assert judged(seen_by_ras(stand_in.said(json.dumps(text).encode()), RANKS, 4))[0] == ()


# ------------------------------------------------------------------ who answers


def test_another_task_on_this_host_may_get_the_connection_first() -> None:
    others = answer(status(communicator({0: 5, 1: 4}, {0: 900, 1: 901})))
    seen, took_s = ask(others, others, answer(status(communicator(LATE, PIDS))))
    assert judged(seen)[0] == (2,)
    assert took_s < 1.0
    assert ask(others)[0] == {}


def test_a_process_that_is_stopped_or_ends_may_get_the_connection_first() -> None:
    seen, took_s = ask(stand_in.never, stand_in.reset, answer(status(communicator(LATE, PIDS))))
    assert judged(seen)[0] == (2,)
    assert took_s < 1.0


def test_processes_of_another_host_with_the_same_ids_are_not_ours() -> None:
    """As in pods: ranks 0 and 1 are here, and 2 and 3 have the same ids elsewhere."""
    ids = {0: 100, 1: 101, 2: 100, 3: 101}
    everyone = communicator({0: 7, 1: 7}, ids, size=4)
    there = communicator({2: 6, 3: 7}, ids, host="10.0.0.2")
    everyone["ranks"] += there["ranks"]
    local = [
        communicator({0: 3, 1: 3}, ids, name="0x8"),
        communicator({0: 4, 1: 5}, ids, name="0x9", host="10.0.0.2"),
    ]
    text = stand_in.said(status(everyone, *local))
    assert {rank: each.launched for rank, each in seen_by_ras(text, {100: 0, 101: 1}, 4).items()} == {
        rank: {WORLD: 7, "NCCL communicator 0x8 (AllReduce)": 3} for rank in (0, 1)
    }
    without = stand_in.said(status(*local))
    assert seen_by_ras(without, {100: 0, 101: 1}, 4) == {}, "nothing tells the hosts apart"


def test_an_nccl_that_answers_in_text_is_left_alone() -> None:
    text = (
        b"ERROR: Unknown command SET FORMAT json\nNCCL version 2.26.2 compiled with CUDA 12.6\nJob summary\n"
    )
    assert ask(answer(text))[0] == {}


@pytest.mark.parametrize(
    "hostile",
    [
        stand_in.never,
        stand_in.close_early,
        stand_in.one_gigabyte,
        stand_in.drip,
        answer(os.urandom(1 << 16)),
        answer(b'{"communicators": ' + b"[" * 100_000),
        answer(b'{"communicators": [{"ranks": [{"pid": ' + b"9" * 10_000 + b"}]}]}"),
        answer(
            b'{"communicators": [3, {"ranks": {}, "missing_ranks": [[], null]}, {"ranks": [{"pid": true}]}]}'
        ),
        answer(b'{"communicators": [{"ranks": [{"pid": 100, "status": [], "collective_counts": 3}]}]}'),
    ],
    ids=["never", "closes", "gigabyte", "drips", "noise", "nested", "digits", "shapes", "fields"],
)
def test_whoever_answers_there_costs_a_bounded_time_and_accuses_nobody(hostile: Answer) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen, took_s = ask(hostile, seconds=0.8)
    assert judged(seen)[0] == ()
    assert took_s < 2.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


def test_words_of_an_answer_are_harmless_to_a_terminal() -> None:
    text = json.loads(status(communicator(LATE, PIDS, name="\x1b[31m0x1\n" + "x" * 1000)))
    because = judged(seen_by_ras(stand_in.said(json.dumps(text).encode()), RANKS, 4))[1]
    assert because.isprintable()
    assert len(because) < 200


def test_where_nobody_listens_or_ras_is_off_it_is_over_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    for environment in (
        {"NCCL_RAS_ADDR": address},
        {"NCCL_RAS_ADDR": address, "NCCL_RAS_ENABLE": "0"},
        {"NCCL_RAS_ADDR": "no port"},
    ):
        began = time.monotonic()
        question = NcclQuestion(environment, RANKS, world=4, seconds=1.5)
        while not question.is_over:
            time.sleep(0.002)
        assert time.monotonic() - began < 0.5
        assert question.seen == {}


def test_addresses() -> None:
    assert ras_address({}) == ("localhost", 28028)
    assert ras_address({"NCCL_RAS_ADDR": "10.0.0.1:5"}) == ("10.0.0.1", 5)
    assert ras_address({"NCCL_RAS_ADDR": "[::1]:28028"}) == ("::1", 28028)
    for wrong in ("", "x", ":5", "h:99999", "h:-1"):
        assert ras_address({"NCCL_RAS_ADDR": wrong}) is None


# ------------------------------------------------------------------ the Inspector


def line(number: int, took_us: int, *, pid: int = 7, at_us: int = 0, source: str = "kernel_gpu") -> str:
    """As the Inspector of NCCL 2.28 writes it."""
    return json.dumps(
        {
            "header": {"id": "0x7f8c", "rank": 2, "n_ranks": 4, "nnodes": 1},
            "metadata": {
                "inspector_output_format_version": "v4.0",
                "git_rev": "",
                "rec_mechanism": "nccl_profiler_interface",
                "dump_timestamp_us": at_us,
                "hostname": "h",
                "pid": pid,
            },
            "coll_perf": {
                "coll": "AllReduce",
                "coll_sn": number,
                "coll_msg_size_bytes": 1 << 20,
                "coll_exec_time_us": took_us,
                "coll_timing_source": source,
                "coll_algobw_gbs": 2.5,
                "coll_busbw_gbs": 3.1,
            },
        }
    )


def inspector(folder: Path, **more: str) -> dict[str, str]:
    return {
        "NCCL_RAS_ENABLE": "0",
        "NCCL_PROFILER_PLUGIN": "/x/libnccl-profiler-inspector.so",
        "NCCL_INSPECTOR_ENABLE": "1",
        "NCCL_INSPECTOR_DUMP_DIR": str(folder),
        **more,
    }


def read(environment: dict[str, str], folder: str = "") -> dict[int, nccl_records.Operations]:
    question = NcclQuestion(environment, RANKS, folder=folder, world=0, seconds=1.5)
    while not question.is_over:
        time.sleep(0.002)
    return question.completed


def write(folder: Path, pid: int, lines: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{socket.gethostname()}-pid{pid}.log").write_text("\n".join(lines) + "\n")


def test_the_inspector_is_read_only_where_it_is_switched_on(tmp_path: Path) -> None:
    write(tmp_path / "d", 102, [line(n, 100) for n in range(5)])
    name = "NCCL communicator 0x7f8c (AllReduce)"
    assert max(read(inspector(tmp_path / "d"))[2][name]) == 4
    assert max(read(inspector(Path("d")), str(tmp_path))[2][name]) == 4, "as the script's own folder has it"
    assert read(inspector(tmp_path / "d", NCCL_INSPECTOR_ENABLE="0")) == {}
    assert read(inspector(tmp_path / "d", NCCL_PROFILER_PLUGIN="")) == {}
    assert read(inspector(tmp_path / "absent")) == {}


def test_of_a_large_file_only_the_last_lines_are_read(tmp_path: Path) -> None:
    write(tmp_path, 102, [line(n, 100) for n in range(20_000)])
    assert (tmp_path / f"{socket.gethostname()}-pid102.log").stat().st_size > 4 << 20
    began = time.monotonic()
    (found,) = read(inspector(tmp_path))[2].values()
    assert max(found) == 19_999
    assert len(found) < 2_000
    assert time.monotonic() - began < 1.0


def test_lines_that_cannot_be_used_are_left_out() -> None:
    good = line(3, 100)
    broken = [
        good[20:],
        "{}",
        "[]",
        "null",
        '{"header": 3, "coll_perf": []}',
        line(9, 5, source="collective_cpu"),
    ]
    text = "\n".join([*broken, good, '{"header": {"id": "0x1"}, "dump_stats": {}}', good[:50]])
    (found,) = completed_operations(text.encode() + b"\xff\xfe").values()
    assert set(found) == {3}


def test_a_rank_whose_device_has_not_completed_what_others_have_is_named() -> None:
    at = [
        RankPosition(rank=rank, at="", is_inside_torch=True, completed={WORLD: 40 - (rank == 1)})
        for rank in range(4)
    ]
    found = suspects_of_hang(at, ())
    assert found.ranks == (1,)
    assert (
        found.because
        == f"rank 1 has not completed operation 40 of {WORLD}, as others have, by NCCL's Inspector"
    )


def test_a_slow_rank_is_found_by_the_lengths_that_the_inspector_writes() -> None:
    """Rank 2 comes last, so it is inside for the shortest time; each rank's file has other gaps."""
    paces = []
    for rank in range(4):
        lines = [
            line(n, 200 if rank == 2 else 30_200 + (n * 7 + rank) % 90, at_us=n * 100_000)
            for n in range(200)
            if (n + rank) % 50
        ]
        paces += paces_of(rank, completed_operations("\n".join(lines).encode()))
    assert all(pace.is_by_device for pace in paces)
    late = slowest(paces, 4)
    assert late is not None
    assert late.ranks == (2,)
    assert 0.02 < late.by_s < 0.04
