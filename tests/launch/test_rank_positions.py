"""Who looks guilty of a hang: by the record of collectives first, then by the stacks, then no rank."""

import json

import pytest

from everstep.core.faults.testimony import Suspects, suspects_of_hang
from everstep.ranks.keeper import MOST_PACES, Found, paces, position
from everstep.ranks.stillness import COUNTED_S, Stillness
from everstep.ranks.words import Look

LINE = """Thread 0x0000ffffaf14f1a0 (most recent call first):
  File "/x/everstep/scripts/rank_main.py", line 60 in answer_questions
  File "/usr/lib/python3.11/threading.py", line 982 in run

"""
IN_TORCH = (
    LINE
    + """Current thread 0x0000ffffb0323020 (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/x/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "train.py", line 10 in <module>
  File "/x/everstep/scripts/rank_main.py", line 137 in _run_script
"""
)
IN_SCRIPT = (
    LINE
    + """Current thread 0x0000ffff8337f020 (most recent call first):
  File "train.py", line 8 in read_batch
  File "train.py", line 9 in <module>
"""
)


def record(*entries: tuple[int, bool]) -> bytes:
    """As PyTorch 2.13 writes it for gloo."""
    dump = {
        "version": "2.10",
        "pg_config": {"": {"desc": "", "name": "", "ranks": "[]"}},
        "entries": [
            {
                "collective_seq_id": number,
                "p2p_seq_id": 0,
                "op_id": number,
                "record_id": number - 1,
                "is_p2p": False,
                "pg_id": 0,
                "process_group": ["0", "default_pg"],
                "profiling_name": "gloo:all_reduce",
                "input_sizes": [[4]],
                "output_sizes": [[4]],
                "input_dtypes": ["Float"],
                "output_dtypes": ["Float"],
                "retired": is_done,
                "state": "scheduled",
                "time_created_ns": 1_000_000 * number,
                "time_discovered_started_ns": 0,
                "time_discovered_completed_ns": 0,
                "timeout_ms": 1_800_000,
            }
            for number, is_done in entries
        ],
    }
    return json.dumps(dump).encode()


def suspect(
    stacks: dict[int, str], records: dict[int, bytes] | None = None, finished: tuple[int, ...] = ()
) -> Suspects:
    found = [
        position(rank, Found(stacks=(text,), record=(records or {}).get(rank, b"")))
        for rank, text in stacks.items()
    ]
    return suspects_of_hang(found, finished)


def test_who_never_entered_the_collective_is_named_whatever_the_stacks_say() -> None:
    records = {0: record((4, True), (5, True), (6, False)), 1: record((4, True), (5, True))}
    found = suspect({0: IN_SCRIPT, 1: IN_TORCH}, records)
    assert found.ranks == (1,)
    assert "has not entered collective 6" in found.because
    assert set(found.evidence) == {
        "rank 0 is at train.py:8 in read_batch",
        "rank 1 is at train.py:10 in <module>, in torch's all_reduce",
    }


def test_a_rank_in_another_collective_of_the_same_number_is_named() -> None:
    usual, other = record((5, True), (6, False)), record((5, True), (6, False))
    other = other.replace(b"all_reduce", b"barrier")
    assert other != usual
    found = suspect(dict.fromkeys(range(4), IN_TORCH), {0: usual, 1: other, 2: usual, 3: usual})
    assert found.ranks == (1,)
    assert "rank 1 is in gloo:barrier as collective 6 of process group 0" in found.because
    assert suspect({0: IN_TORCH, 1: IN_TORCH}, {0: usual, 1: other}).ranks == (), "either may be right"


def test_without_records_who_is_outside_torch_is_named() -> None:
    found = suspect({0: IN_TORCH, 1: IN_SCRIPT})
    assert found.ranks == (1,)
    assert found.because == "rank 1 is at train.py:8 in read_batch, outside torch; the others wait inside it"


@pytest.mark.parametrize("package", ["slow", "torch"])
def test_a_rank_that_has_not_finished_an_import_is_named_with_the_line_that_imports(package: str) -> None:
    text = f"""Current thread 0x0000ffff8337f020 (most recent call first):
  File "/x/{package}/__init__.py", line 3 in <module>
  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed
  File "<frozen importlib._bootstrap>", line 1147 in _find_and_load_unlocked
  File "/x/{package}/outer.py", line 7 in <module>
  File "<frozen importlib._bootstrap_external>", line 940 in exec_module
  File "/home/me/train.py", line 2 in <module>
  File "/x/everstep/ranks/rank_main.py", line 137 in _run_script
"""
    found = suspect({0: IN_TORCH, 1: text})
    assert found.ranks == (1,)
    where = f"{package}/__init__.py:3 in <module>, imported at train.py:2"
    assert found.because.startswith(f"rank 1 is at {where}, outside torch")


def test_ranks_with_the_same_stack_are_one_sentence() -> None:
    found = suspect({rank: IN_SCRIPT if rank == 5 else IN_TORCH for rank in range(64)})
    assert found.ranks == (5,)
    assert found.evidence[0].startswith("63 ranks (0, 1, 2, …) are at train.py:10")


def test_where_all_wait_in_torch_the_one_that_has_ended_is_named() -> None:
    assert suspect({0: IN_TORCH}, finished=(1,)).ranks == (1,)


def test_who_is_left_outside_torch_is_named_and_not_those_who_have_ended() -> None:
    found = suspect({0: IN_SCRIPT}, finished=(1,))
    assert found.ranks == (0,)
    assert found.because.endswith("outside torch; the others have ended")


def test_no_rank_is_named_when_all_are_in_the_same_place() -> None:
    both = record((6, False))
    assert suspect({0: IN_TORCH, 1: IN_TORCH}, {0: both, 1: both}).ranks == ()
    assert suspect({0: IN_SCRIPT, 1: IN_SCRIPT}).ranks == ()
    assert suspect({0: "", 1: "rubbish"}, {0: b"", 1: b"{7"}).ranks == ()


# ------------------------------------------------------------------ who moves


class Watched:
    def __init__(self) -> None:
        self.now = 100.0
        self.stillness = Stillness(idle_share=0.02, moved_at=self.now)

    def look(self, states: str, cpu: list[float], after: float) -> tuple[list[int], list[tuple[int, float]]]:
        self.now += after
        looks = {
            rank: Look(state=state, cpu_s=cpu_s, output_bytes=0)
            for rank, (state, cpu_s) in enumerate(zip(states, cpu, strict=True))
        }
        return self.stillness.see(looks, self.now)

    @property
    def still_s(self) -> float:
        return self.now - self.stillness.moved_at


def test_one_rank_that_works_moves_for_all() -> None:
    watched = Watched()
    for turn in range(100):
        watched.look("RS", [0.2 * turn, 0], after=0.25)
        assert watched.still_s <= 1.25
    for _ in range(40):
        watched.look("SS", [0.2 * 99, 0], after=0.25)
    assert watched.still_s == pytest.approx(10, abs=1.3)


def test_threads_that_wake_up_now_and_then_do_not_hide_a_hang() -> None:
    watched = Watched()
    for turn in range(60):
        watched.look("SS", [turn * 0.25 * 0.01, 0], after=0.25)  # 1 % of a core
    assert watched.still_s > 10


def test_a_cpu_proves_nothing_once_collectives_are_counted_and_none_is_entered() -> None:
    """Rank 1 spins, rank 0 waits for it; both have counted collectives until then."""
    watched = Watched()

    def look(entered: int, cpu_s: float) -> None:
        watched.now += 0.25
        both = {
            rank: Look(state="R", cpu_s=cpu_s * rank, output_bytes=0, entered={"0": entered})
            for rank in (0, 1)
        }
        watched.stillness.see(both, watched.now)

    for turn in range(40):
        look(turn // 4, turn * 0.25)
        assert watched.still_s <= 1.25
    for turn in range(40, 80):
        look(9, turn * 0.25)
    assert watched.still_s == pytest.approx(10 - COUNTED_S, abs=1.3)
    assert [watched.stillness.is_busy(rank) for rank in (0, 1)] == [False, True]


def test_a_rank_that_is_elsewhere_each_time_or_reads_a_file_has_no_stack_to_compare() -> None:
    other = IN_SCRIPT.replace(" in ", " in other_")
    assert position(0, Found(stacks=(IN_SCRIPT, IN_SCRIPT))).stack
    assert not position(0, Found(stacks=(IN_SCRIPT, other))).stack
    assert not position(0, Found(stacks=(IN_SCRIPT, IN_SCRIPT), reads_or_writes=True)).stack


def test_a_rank_in_a_debugger_is_left_alone_for_as_long_as_it_takes() -> None:
    watched = Watched()
    for _ in range(100):
        assert watched.look("St", [0, 0], after=1.0) == ([], [])
    assert watched.still_s == 0


def test_a_rank_that_is_stopped_for_a_moment_is_told_of_when_it_stops_and_when_it_continues() -> None:
    watched = Watched()
    assert watched.look("ST", [1, 1], after=0.25) == ([1], [])
    assert watched.look("SS", [1, 1], after=3.0) == ([], [(1, 3.0)])


def test_ranks_whose_recorders_end_at_different_moments_tell_of_the_same_collectives() -> None:
    early, late = (
        paces(0, record(*((n, True) for n in numbers))) for numbers in (range(1, 300), range(90, 391))
    )
    (one,), (other,) = early, late
    assert one.group == other.group == "gloo 0"
    assert len(one.entered.keys() & other.entered.keys()) >= 8
    assert max(len(one.entered), len(other.entered)) <= 2 * MOST_PACES
    assert one.entered[96] == pytest.approx(0.096)
    assert one.step_s == pytest.approx(0.001)


def test_times_of_queueing_for_a_device_say_nothing_and_those_of_the_device_do() -> None:
    dump = json.loads(record(*((n, True) for n in range(1, 100))))
    for entry in dump["entries"]:
        entry["profiling_name"] = "nccl:all_reduce"
    assert paces(0, json.dumps(dump).encode()) == []
    for entry in dump["entries"]:
        entry["duration_ms"] = 2.5
    (found,) = paces(0, json.dumps(dump).encode())
    assert found.is_by_device
    assert set(found.entered.values()) == {-0.0025}


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b'{"entries": [7, null, {"collective_seq_id": "x"}]}'])
def test_a_record_that_cannot_be_read_tells_nothing(text: bytes) -> None:
    assert paces(0, text) == []
