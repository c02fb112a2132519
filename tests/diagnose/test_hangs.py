"""Who is stuck, on jobs that are made to get stuck: the culprits and nobody else, host told from device."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from everstep_diagnose import Dump, Group, Log, Record, analyse
from everstep_diagnose.finding import Finding
from tests.diagnose.cluster import Cluster


def accused(findings: list[Finding]) -> dict[int, str]:
    return {suspect.rank: str(finding.where) for finding in findings for suspect in finding.suspects}


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Cluster, dict[int, tuple[str, int]]]:
    cluster = Cluster(
        tensor=draw(st.sampled_from([1, 2, 3])),
        data=draw(st.sampled_from([1, 2])),
        stages=draw(st.sampled_from([1, 2, 3])),
        window=draw(st.integers(1, 12)),
        one_group=draw(st.booleans()),
    )
    assume(cluster.size > 1)
    culprit = draw(st.integers(0, cluster.size - 1))
    kind = draw(st.sampled_from(["host", "device"]))
    return cluster, {culprit: (kind, draw(st.integers(1, len(cluster.programs[culprit]) - 1)))}


@settings(max_examples=80, deadline=None, derandomize=True)
@given(jobs(), st.booleans())
def test_a_stuck_host_is_named_and_nobody_else(
    job: tuple[Cluster, dict[int, tuple[str, int]]], only_pending: bool
) -> None:
    cluster, faults = job
    assume(not (only_pending and cluster.mixes()))
    ((rank, (_, at)),) = faults.items()
    findings = analyse(cluster.parts({rank: ("host", at)}, only_pending=only_pending)).incidents
    assert accused(findings) == {rank: "host"}
    assert set(findings[0].victims) | {rank} == set(range(cluster.size))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(jobs(), st.booleans())
def test_a_device_that_does_not_complete_is_named_and_nobody_else(
    job: tuple[Cluster, dict[int, tuple[str, int]]], only_pending: bool
) -> None:
    cluster, faults = job
    assume(not (only_pending and cluster.mixes()))
    ((rank, (_, at)),) = faults.items()
    message = cluster.programs[rank][at].kind in ("send", "recv")
    assume(not (message and cluster.one_group))  # there both ends number it differently
    assume(at < len(cluster.programs[rank]) - 1)
    findings = analyse(cluster.parts({rank: ("device", at)}, only_pending=only_pending)).incidents
    assert accused(findings) == {rank: "device"}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(jobs(), st.data())
def test_two_stuck_hosts_of_one_stage_are_both_named(
    job: tuple[Cluster, dict[int, tuple[str, int]]], data: st.DataObject
) -> None:
    cluster, faults = job
    ((rank, (_, at)),) = faults.items()
    stage = cluster.place(rank)[2]
    peers = [r for r in range(cluster.size) if r != rank and cluster.place(r)[2] == stage]
    assume(peers)
    other = data.draw(st.sampled_from(peers))
    both = {rank: ("host", at), other: ("host", at)}
    host, device = cluster.run(both)
    assume(any(host[r] > device[r] for r in range(cluster.size) if r not in both))  # somebody waits
    findings = analyse(cluster.parts(both, only_pending=False)).incidents
    assert accused(findings) == {rank: "host", other: "host"}


@pytest.mark.parametrize("only_pending", [False, True])
def test_a_rank_that_left_no_dump_is_named_when_everyone_waits_for_it(only_pending: bool) -> None:
    cluster = Cluster(tensor=2, data=2, stages=2)
    parts = [p for p in cluster.parts({5: ("host", 20)}, only_pending=only_pending) if p.ranks != (5,)]
    findings = analyse(parts).incidents
    assert accused(findings) == {5: "host"}
    assert findings[0].suspects[0].confidence < 0.9


def test_too_many_missing_dumps_accuse_nobody() -> None:
    cluster = Cluster(tensor=2, data=2, stages=1)
    parts = cluster.parts({0: ("host", 9)}, only_pending=False)
    analysis = analyse([p for p in parts if p.ranks in ((1,),)])
    assert not accused(analysis.incidents)


def world(records: list[Record], taken: dict[int, int] | None = None, ranks: int = 4) -> list[Dump]:
    group = Group(name="0", members=tuple(range(ranks)))
    return [
        Dump(
            source=str(rank),
            form="flight recorder",
            log=Log.of([r for r in records if r.rank == rank]),
            groups=[group],
            ranks=(rank,),
            taken_ns={} if taken is None else {rank: taken[rank]},
        )
        for rank in range(ranks)
    ]


def op(
    rank: int, seq: int, *, kind: str = "all_reduce", done: bool = True, at_ms: float = 0, **more: int
) -> Record:
    at = 10**18 + int(at_ms * 1e6)
    return Record(rank=rank, group=0, seq=seq, kind=kind, enqueued_ns=at, done=done, order=at + seq, **more)


def test_a_rank_that_calls_something_else_is_a_fault_of_the_program() -> None:
    records = [op(r, 7, kind="broadcast" if r == 2 else "all_reduce", done=False) for r in range(4)]
    (finding,) = analyse(world(records)).incidents
    assert accused([finding]) == {2: "program"}
    assert "calls broadcast where rank 0-1, 3 call all_reduce" in finding.suspects[0].evidence


def test_a_rank_that_brings_another_size_is_a_fault_of_the_program() -> None:
    records = [op(r, 7, done=False, bytes=28 if r == 1 else 4096) for r in range(4)]
    assert accused(analyse(world(records)).incidents) == {1: "program"}


def test_uneven_sizes_of_an_all_to_all_are_no_mismatch() -> None:
    records = [op(r, 7, kind="all_to_all", done=False, bytes=100 + r) for r in range(4)]
    (finding,) = analyse(world(records)).incidents
    assert finding.suspects == ()
    assert "does not tell which" in finding.because


def test_all_inside_and_one_not_started_is_its_device() -> None:
    records = [op(r, 7, done=False, started_ns=-1 if r == 3 else 5) for r in range(4)]
    assert accused(analyse(world(records)).incidents) == {3: "device"}


def test_a_look_at_a_healthy_job_accuses_nobody() -> None:
    """Rank 3 is on its way to operation 20; the others have been waiting for it for two milliseconds."""
    records = [op(r, s, at_ms=30 * s) for r in range(4) for s in range(20)]
    records += [op(r, 20, done=False, at_ms=600) for r in range(3)]
    taken = dict.fromkeys(range(4), 10**18 + 602_000_000)
    assert analyse(world(records, taken)).incidents == []
    much_later = {rank: at + 5_000_000_000 for rank, at in taken.items()}
    assert accused(analyse(world(records, much_later)).incidents) == {3: "host"}


def test_a_dump_that_was_taken_earlier_than_the_others_accuses_nobody() -> None:
    """The others completed what nobody completes without rank 0: its dump is old, not its device."""
    records = [op(0, 5, done=False, at_ms=150)]
    records += [op(r, s, at_ms=30 * s) for r in range(1, 4) for s in range(9)]
    assert analyse(world(records)).incidents == []
