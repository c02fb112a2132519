"""Who is slow, and what is not a fault, on records with known causes."""

import numpy as np
import pytest

from everstep_diagnose import Dump, Group, Log, Record, analyse, join
from everstep_diagnose.change import change_point
from everstep_diagnose.clocks import offsets_ns
from everstep_diagnose.finding import Finding
from everstep_diagnose.message_delays import pair_up
from everstep_diagnose.own_work import RoleWork
from everstep_diagnose.slow import find_slow

MS = 1_000_000


def role(own: np.ndarray, name: str = "group 0", first: int = 0) -> RoleWork:
    steps, ranks = own.shape
    return RoleWork(
        name=name,
        ranks=tuple(range(first, first + ranks)),
        steps=tuple(range(steps)),
        own_s=own,
        step_s=float(np.median(own.max(axis=1))),
    )


def noisy(seed: int, steps: int = 40, ranks: int = 8, scale: float = 0.03) -> np.ndarray:
    return np.random.default_rng(seed).normal(1.0, scale, size=(steps, ranks)) * 0.1


def suspects(findings: list[Finding]) -> list[int]:
    return [suspect.rank for finding in findings for suspect in finding.suspects]


@pytest.mark.parametrize("factor", [1.25, 1.6, 3.0])
@pytest.mark.parametrize("ranks", [2, 4, 33])
def test_a_rank_slower_than_its_peers_is_named(factor: float, ranks: int) -> None:
    own = noisy(1, ranks=ranks)
    own[:, 1] *= factor
    findings, _ = find_slow([role(own)])
    assert suspects(findings) == [1]


def test_a_rank_that_turns_slow_is_named_with_the_step() -> None:
    own = noisy(2)
    own[25:, 4] *= 1.5
    (finding,), _ = find_slow([role(own)])
    assert suspects([finding]) == [4]
    assert abs((finding.since_step or 0) - 25) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_wild_first_steps_do_not_hide_a_rank_that_turns_slow(seed: int) -> None:
    own = noisy(seed, steps=30, scale=0.1)
    own[:8] *= np.random.default_rng(seed).uniform(0.1, 1.6, size=(8, 8))
    own[10:, 6] += 0.035
    findings, _ = find_slow([role(own)])
    assert suspects(findings) == [6]


@pytest.mark.parametrize("seed", range(20))
def test_even_ranks_accuse_nobody(seed: int) -> None:
    assert find_slow([role(noisy(seed, scale=0.15))])[0] == []


@pytest.mark.parametrize("seed", range(20))
def test_sequence_lengths_accuse_nobody_and_are_named(seed: int) -> None:
    own = 0.1 * np.random.default_rng(seed).lognormal(0, 0.5, size=(40, 8))
    findings, imbalances = find_slow([role(own)])
    assert findings == []
    assert "work per step" in [imbalance.kind for imbalance in imbalances]


def test_single_pauses_accuse_nobody() -> None:
    own = noisy(3)
    own[[11, 23], [2, 5]] += 0.5
    findings, imbalances = find_slow([role(own)])
    assert findings == []
    assert [imbalance.kind for imbalance in imbalances] == ["pauses"]


def test_the_first_steps_accuse_nobody() -> None:
    own = noisy(4)
    own[:3, 1] *= 8
    assert find_slow([role(own)])[0] == []


def test_a_stage_with_more_work_is_an_imbalance_and_its_slow_rank_still_a_suspect() -> None:
    light, heavy = noisy(5, ranks=4), 2 * noisy(6, ranks=4)
    heavy[:, 2] *= 1.5
    findings, imbalances = find_slow([role(light, "stage 0"), role(heavy, "stage 1", first=4)])
    assert suspects(findings) == [6]
    assert [(i.kind, i.ranks) for i in imbalances] == [("stage", (4, 5, 6, 7))]


def test_without_peers_a_rank_is_compared_with_its_past() -> None:
    stages = [role(noisy(7 + s, ranks=1), f"rank {s}", first=s) for s in range(4)]
    assert find_slow(stages)[0] == []
    changed = noisy(20, ranks=1)
    changed[20:] *= 1.7
    findings, _ = find_slow([*stages[:2], role(changed, "rank 2", first=2), stages[3]])
    assert suspects(findings) == [2]


def test_all_ranks_changing_at_once_is_another_phase_not_a_fault() -> None:
    roles = []
    for at in range(4):
        own = noisy(30 + at, ranks=1)
        own[20:] *= 2
        roles.append(role(own, f"rank {at}", first=at))
    assert find_slow(roles)[0] == []


def test_a_change_is_found_and_a_spike_is_none() -> None:
    flat = np.random.default_rng(1).normal(1, 0.05, 60)
    assert change_point(flat) == 0
    spike = flat.copy()
    spike[30:32] += 5
    assert change_point(spike) == 0
    assert abs(change_point(np.r_[flat[:40], flat[40:] + 0.5]) - 40) <= 1


def chain(
    *,
    slow: dict[tuple[int, int], int] | None = None,
    skew_ms: dict[int, int] | None = None,
    late: int | None = None,
) -> list[Dump]:
    """Four ranks in a line, each with its own clock: messages there and back, 1 ms each, `slow` longer."""
    slow, skew_ms = slow or {}, skew_ms or {}
    records: dict[int, list[Record]] = {rank: [] for rank in range(4)}
    counts: dict[tuple[int, int], int] = {}
    now = 10**15
    free = dict.fromkeys(range(4), now)  # when a rank was done; then it waits for the next
    for step in range(30):
        for a, b in ((0, 1), (1, 2), (2, 3), (3, 2), (2, 1), (1, 0)):
            counts[a, b] = counts.get((a, b), 0) + 1
            if late == a and step >= 15:
                now += 8 * MS
            now += 2 * MS + step % 3 * 20_000
            end = now + slow.get((a, b), 1) * MS
            for rank, kind, peer in ((a, "send", b), (b, "recv", a)):
                shift = skew_ms.get(rank, 0) * MS
                begin = (now if kind == "send" else free[rank] + 1000) + shift
                records[rank].append(
                    Record(
                        rank=rank, group=0, seq=counts[a, b], kind=kind, peer=peer, bytes=1 << 16, done=True,
                        enqueued_ns=begin, ended_ns=end + shift, order=begin,
                    )
                )  # fmt: skip
                free[rank] = end
            now = end
    group = Group(name="messages", members=(0, 1, 2, 3), pairwise=True)
    return [
        Dump(source=str(r), form="ring", log=Log.of(rows), groups=[group], ranks=(r,), hosts={r: f"node {r}"})
        for r, rows in records.items()
    ]


@pytest.mark.parametrize("skew_ms", [{}, {1: 500, 3: -700}])
def test_a_slow_link_is_named_whatever_the_clocks_say(skew_ms: dict[int, int]) -> None:
    analysis = analyse(chain(slow={(1, 2): 20, (2, 1): 20}, skew_ms=skew_ms))
    (finding,) = analysis.incidents
    assert (finding.syndrome, finding.where) == ("communication slow", "link")
    assert [(s.rank, s.peer) for s in finding.suspects] == [(1, 2)]
    case = join(chain(slow={(1, 2): 20, (2, 1): 20}, skew_ms=skew_ms))
    offsets = offsets_ns(case, pair_up(case))
    for rank, shift in skew_ms.items():
        assert abs(offsets[rank] - shift * MS) < 3 * MS


def test_a_slow_column_is_the_receiving_side_and_a_slow_row_the_sending_side() -> None:
    here = dict.fromkeys(range(4), "one node")
    for slow, where in (
        ({(1, 2): 20, (3, 2): 20}, "receiving side"),
        ({(2, 1): 20, (2, 3): 20}, "sending side"),
    ):
        parts = chain(slow=slow)
        for part in parts:
            part.hosts = {rank: here[rank] for rank in part.ranks}
        (finding,) = analyse(parts).incidents
        assert finding.where == where
        assert [s.rank for s in finding.suspects] == [2]


def test_a_rank_that_turns_late_is_not_a_slow_link() -> None:
    (finding,) = analyse(chain(late=2)).incidents
    assert finding.syndrome == "non-communication slow"
    assert [s.rank for s in finding.suspects] == [2]


def test_an_even_chain_accuses_nobody() -> None:
    assert analyse(chain(skew_ms={2: 250})).incidents == []
