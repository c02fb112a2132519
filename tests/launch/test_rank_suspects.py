"""Who looks guilty of a hang: the record of collectives first, then the stacks, then nobody."""

import json

from everstep.ranks.suspects import suspect

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


def test_who_never_entered_the_collective_is_named_whatever_the_stacks_say() -> None:
    found = suspect(
        stacks={0: IN_SCRIPT, 1: IN_TORCH},
        records={0: record((4, True), (5, True), (6, False)), 1: record((4, True), (5, True))},
        finished=(),
    )
    assert found.ranks == (1,)
    assert "all_reduce 6" in found.because
    assert found.evidence == (
        "rank 0 is at train.py:8 in read_batch",
        "rank 1 is at train.py:10 in <module>, in torch's all_reduce",
    )


def test_without_records_who_is_outside_torch_is_named() -> None:
    found = suspect(stacks={0: IN_TORCH, 1: IN_SCRIPT}, records={}, finished=())
    assert found.ranks == (1,)
    assert found.because == "rank 1 is at train.py:8 in read_batch, outside torch; the others wait inside it."


def test_where_all_wait_in_torch_the_one_that_has_ended_is_named() -> None:
    found = suspect(stacks={0: IN_TORCH}, records={}, finished=(1,))
    assert found.ranks == (1,)


def test_who_is_left_outside_torch_is_named_and_not_those_who_have_ended() -> None:
    found = suspect(stacks={0: IN_SCRIPT}, records={}, finished=(1,))
    assert found.ranks == (0,)
    assert found.because.endswith("outside torch; the others have ended.")


def test_nobody_is_named_when_all_are_in_the_same_place() -> None:
    both = record((6, False))
    found = suspect(stacks={0: IN_TORCH, 1: IN_TORCH}, records={0: both, 1: both}, finished=())
    assert found.ranks == ()
    assert "all_reduce 6" in found.because
    assert suspect(stacks={0: IN_SCRIPT, 1: IN_SCRIPT}, records={}, finished=()).ranks == ()
    assert suspect(stacks={0: "", 1: "rubbish"}, records={0: b"", 1: b"{7"}, finished=()).ranks == ()
