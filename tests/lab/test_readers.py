"""Files of real failures: every form is known by its first line, from any start; a refusal names them all."""

import json
import math
from pathlib import Path

import pytest

from everstep.errors import UserError
from everstep_lab.study import readers
from everstep_lab.study.failures import Seen, Trace
from everstep_lab.study.request import Request
from everstep_lab.study.study import run_study

INFINITEHBD = Path(__file__).parents[2].parent / "shared" / "data" / "traces" / "infinitehbd.json"


def read(text: str, seed: int = 0) -> Trace:
    return readers.read(text, name="file", seed=seed)


def losses(trace: Trace) -> list[tuple[float, int]]:
    return [(f.at_s, f.node) for f in trace.failures]


def test_spot_events_become_a_pool_of_places_from_any_start() -> None:
    for start in (0, 480_000):
        rows = (
            (0, "add,a"),
            (60_000, "add,b"),
            (900_000, "remove,a"),
            (901_000, "add,c"),
            (902_000, "add,d"),
        )
        trace = read("".join(f"{start + at},{what}\n" for at, what in rows))
        assert (trace.nodes, trace.absent, trace.spot) == (3, (2,), True)
        assert losses(trace) == [(840.0, 0)], "time counts from the moment both were there"
        assert trace.joins == ((841.0, 0), (842.0, 2))


def test_a_node_lost_while_the_fleet_fills_is_not_there_at_the_start() -> None:
    trace = read("0,add,a\n0,add,b\n60000,remove,a\n60000,add,c\n999000,remove,b\n")
    assert (trace.nodes, trace.absent, losses(trace)) == (2, (), [(939.0, 0)])


def test_counts_become_losses_and_joins_in_three_forms() -> None:
    counts = [0, 2, 3, 1, 3]
    gap = 1000
    forms = {
        "SkyPilot": json.dumps({"metadata": {"gap_seconds": gap}, "data": counts}),
        "plain": "time,up\n" + "".join(f"{i * gap},{n}\n" for i, n in enumerate(counts)),
        "plain, no header": "".join(f"{i * gap},{n}\n" for i, n in enumerate(counts)),
        "GCP": "".join(
            f"2021-12-11, {i * gap // 3600:02}:{i * gap % 3600 // 60:02}:{i * gap % 60:02}, {n}\n"
            for i, n in reversed(list(enumerate(counts)))
        ),
    }
    for name, text in forms.items():
        trace = read(text)
        assert (trace.nodes, trace.absent) == (3, (2,)), name
        assert trace.joins[0] == (1000.0, 2), name
        assert [at for at, _ in losses(trace)] == [2000.0, 2000.0], name
        assert len({node for _, node in losses(trace)}) == 2, name
        assert [at for at, _ in trace.joins[1:]] == [3000.0, 3000.0], name


def test_which_node_a_count_loses_comes_from_the_seed() -> None:
    text = "0,16\n1000,8\n2000,16\n3000,8\n"
    assert read(text, 1) == read(text, 1)
    assert losses(read(text, 1)) != losses(read(text, 2))
    assert len(Request(trace="file", text=text, seeds=3).traces()) == 3
    assert len(Request(trace="file", text="0,add,a\n1000,add,b\n", seeds=3).traces()) == 1


EVENTS = """Cluster|NodeName|TimeStart|TimeEnd|State|Reason|User
c||2024-05-01T00:00:00|2024-05-03T00:00:00||Cluster Registered TRES|root
c|gpu02|2024-05-01T06:00:00|2024-05-01T08:00:00|DOWN*|Not responding|slurm
c|gpu[01,03]|2024-05-02T00:00:00|Unknown|DRAIN|Xid 79|root
c|gpu04|2024-05-02T00:00:00|2024-05-02T01:00:00|IDLE||root
"""
JOBS = """JobID|State|Start|End|NodeList|FailedNode
1|NODE_FAIL|2024-05-01T00:00:00|2024-05-01T10:00:00|gpu[01-02]|gpu02
1.0|CANCELLED|2024-05-01T00:00:00|2024-05-01T10:00:00|gpu[01-02]|
2|COMPLETED|2024-05-01T11:00:00|2024-05-01T12:00:00|gpu01|
3|COMPLETED|2024-05-01T14:00:00|2024-05-02T00:00:00|gpu[02-03]|
4|NODE_FAIL|2024-05-01T12:00:00|2024-05-01T20:00:00|gpu01|
"""


SEGMENTS = """# made up
[0, "add", {"nodes": ["n0", "n1", "n2"], "duration": 60000, "liveput_truth_strategy": [1, 3]}]
[60000, "no-op", {"nodes": [], "duration": 60000}]
[660000, "remove", {"nodes": ["n2", "n0"], "duration": 60000}]
[720000, "add", {"nodes": ["n3"], "duration": 60000}]
[780000, "no-op", {"nodes": [], "duration": 60000}]
"""


def test_parcaes_segments_are_spot_events_that_last_as_long_as_their_last_row() -> None:
    trace = read(SEGMENTS)
    assert (trace.nodes, trace.absent, trace.spot, trace.horizon_s) == (3, (), True, 840.0)
    assert losses(trace) == [(660.0, 0), (660.0, 2)]
    assert trace.joins == ((720.0, 2),)


def fault(node: str, days: float, what: str, kind: str = "GPU") -> dict:
    about = {"Level": "Hardware Failure", "Class": kind, "Desc": "made up"}
    return {"node_id": node, "event_time": days, "event_type": f"fault_{what}", "fault_type": about}


def test_faults_that_start_and_end_are_outages_and_those_that_overlap_are_one() -> None:
    rows = [
        fault("b", 1.0, "start"),
        fault("b", 1.5, "start", "NIC"),
        fault("c", 1.75, "end"),
        fault("b", 2.0, "end"),
        fault("b", 3.0, "end", "NIC"),
        fault("a", 4.0, "start", "Fan"),
    ]
    for indent in (None, 4):
        trace = read(json.dumps(rows, indent=indent))
        assert (trace.nodes, trace.spot, trace.horizon_s) == (3, False, 4 * 86_400)
        assert [(f.node, f.at_s / 86_400, f.repair_s / 86_400, f.cause, f.seen) for f in trace.failures] == [
            (2, 0.0, 1.75, "GPU", Seen.EXCEPTION),
            (1, 1.0, 2.0, "GPU", Seen.EXCEPTION),
            (0, 4.0, math.inf, "Fan", Seen.SILENCE),
        ]
    assert Request(trace="faults", text=json.dumps(rows), nodes=8).traces()[0].nodes == 8


@pytest.mark.skipif(not INFINITEHBD.exists(), reason="the shared traces are not here")
def test_infinitehbd_is_read_whole() -> None:
    trace = Request(trace="file", text=INFINITEHBD.read_text(), nodes=400).traces()[0]
    assert len(trace.failures) == 582, "584 faults, two of them while the node was away"
    assert trace.severe_per_1000_node_days == pytest.approx(4.17, abs=0.01)
    assert len({f.node for f in trace.failures}) == 231
    away = sum(min(f.repair_s, trace.horizon_s - f.at_s) for f in trace.failures) / trace.horizon_s
    assert away == pytest.approx(9.2, abs=0.2), "nodes away on average"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0,add,a\n5,bring,b\n", "line 2"),
        ("0,remove,a\n", "adds no node"),
        ("2021-12-11, 11:11:30, 55\n2021-12-11, 25:00:00, 5\n", "line 2"),
        ("time,up\n0,0\n10,0\n", "no time at which"),
        ("0,4\n10,-1\n", "below 0"),
        ("0,4\nnan,1\n", "line 2"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "gap_seconds is 0"),
        ('[0, "add", {"nodes": ["a"]}]\n[5, "take", {"nodes": ["a"]}]\n', "line 2 is not of the form"),
        ('[0, "add", {"nodes": ["a"]}]\n[5, "remove"]\n', "line 2"),
        ('[0, "add", {"nodes": ["a"]}]\n[5, "remove", {"nodes": 3}]\n', "line 2"),
        ('[NaN, "add", {"nodes": ["a"]}]\n', "line 1"),
        ('[0, "remove", {"nodes": ["a"]}]\n', "adds no node"),
        ("[", "is not JSON"),
        ("[]", "has no fault"),
        ("[7]", "entry 1 is not of the form"),
        (json.dumps([{"node_id": 1, "event_time": 1, "event_type": "fault"}]), "entry 1"),
        (json.dumps([{"node_id": 1, "event_time": "x", "event_type": "fault_start"}]), "entry 1"),
        (
            json.dumps([{"node_id": 1, "event_time": 1e400, "event_type": "fault_start"}]).replace(
                "Infinity", "1e999"
            ),
            "entry 1",
        ),
    ],
)
def test_a_wrong_line_is_named(text: str, says: str | None) -> None:
    if says is None:
        assert read(text).nodes == 1
        return
    with pytest.raises(UserError, match=says):
        read(text)


def test_a_state_is_on_disk_alone_once_no_node_is_left() -> None:
    """It cost those with states in memory nothing: one node that died for hours lost a second."""
    trace = read(
        "".join(f"{at},{what},a\n" for at, what in ((0, "add"), (7_200_000, "remove")))
        + "7260000,add,a\n14400000,remove,a\n"
    )
    request = Request(trace=trace.name, tasks=("gpt3-1.3b",), checkpoint_minutes=20.0)
    chosen = request.chosen()
    found = run_study(request.setup(trace), [trace], {n: chosen[n] for n in ("recycle", "everstep", "ideal")})
    lost = {name: summary.results[0].lost["replay"] for name, summary in found.items()}
    second = found["everstep"].results[0].healthy_waf / trace.horizon_s
    assert lost["everstep"] >= 10 * 60 * second
    assert lost["recycle"] >= 10 * 60 * second
    assert lost["ideal"] == 0
