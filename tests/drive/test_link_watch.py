"""Links between machines, judged live from what peers acknowledge."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

import pytest

from everstep.drive.link_watch import ALIKE, CALM_LOOKS, COMPARED, KNOWN, LOOKS, LinkWatch
from everstep.protocol.messages import LinksSuspected, SlowLinkEnded, SlowLinkFound, TimesReported
from everstep.protocol.ops import Worker

WORKERS = [Worker(replica, stage) for replica in range(2) for stage in range(2)]
PEERS = {str(worker): worker for worker in WORKERS}
VICTIM = Worker(1, 1)
Bandwidth = Callable[[Worker, Worker, int], float]  # of the usual, by link and step
News = tuple[int, SlowLinkFound | SlowLinkEnded]


def story(
    bandwidth: Bandwidth,
    *,
    steps: int,
    noise: float = 0.2,
    watch: LinkWatch | None = None,
    seed: int = 1,
    workers: list[Worker] = WORKERS,
) -> list[News]:
    """What is said, and after which step, of workers on four machines with cables of 12.5 MB/s."""
    draw, found = random.Random(seed), []
    watch = watch or LinkWatch("t")
    for step in range(1, steps + 1):
        for worker in workers:
            sent = {}
            for peer in workers:
                if peer != worker:
                    rate = 12.5e6 * bandwidth(worker, peer, step) * draw.uniform(1 - noise, 1 + noise)
                    sent[str(peer)] = (1_000_000, 1e6 / rate)
            report = TimesReported(task="t", worker=worker, incarnation=1, step=step, times={}, sent=sent)
            found += [(step, news) for news in watch.reported(report, PEERS)]
    return found


def links(news: Iterable[News]) -> set[tuple[Worker, Worker]]:
    return {(said.worker, said.peer) for _, said in news if isinstance(said, SlowLinkFound)}


@pytest.mark.parametrize("seed", range(10))
def test_links_that_scatter_are_not_slow(seed: int) -> None:
    assert story(lambda sender, receiver, step: 1.0, steps=100, noise=0.4, seed=seed) == []


def test_a_link_at_a_tenth_of_its_bandwidth_is_found_in_three_looks_and_ends_when_it_is_well() -> None:
    slow = (Worker(0, 0), Worker(1, 0))

    def bandwidth(sender: Worker, receiver: Worker, step: int) -> float:
        return 0.1 if (sender, receiver) == slow and 20 <= step < 40 else 1.0

    (at, found), (until, ended) = story(bandwidth, steps=60)
    assert isinstance(found, SlowLinkFound)
    assert (found.worker, found.peer) == slow
    assert 20 < at <= 20 + LOOKS
    assert "usually 12" in found.because
    assert "the other 11 links" in found.ruled_out[0]
    assert isinstance(ended, SlowLinkEnded)
    assert until <= 40 + CALM_LOOKS


def test_the_cable_of_a_machine_slows_its_row_and_its_column_and_no_other_link() -> None:
    def bandwidth(sender: Worker, receiver: Worker, step: int) -> float:
        return 0.1 if VICTIM in (sender, receiver) and step >= 20 else 1.0

    found = story(bandwidth, steps=40)
    others = [worker for worker in WORKERS if worker != VICTIM]
    assert links(found) == {(VICTIM, w) for w in others} | {(w, VICTIM) for w in others}


def test_one_bad_cable_of_three_machines_is_found_though_most_links_are_slow() -> None:
    three = WORKERS[1:]

    def bandwidth(sender: Worker, receiver: Worker, step: int) -> float:
        return 0.1 if VICTIM in (sender, receiver) and step >= 20 else 1.0

    found = links(story(bandwidth, steps=30, workers=three))
    assert len(found) == 4
    assert all(VICTIM in link for link in found)


def test_a_machine_without_a_free_core_slows_all_links_and_accuses_none() -> None:
    assert story(lambda sender, receiver, step: 0.1 if step >= 20 else 1.0, steps=60) == []


def test_if_all_links_are_slow_they_are_suspected_once_until_they_are_calm() -> None:
    """Whether they are those of two machines, who runs the watch knows."""
    watch = LinkWatch("t")
    for begin in (20, 100):
        story(lambda sender, receiver, step: 1.0, steps=begin, watch=watch)
        told: list[list[LinksSuspected]] = []
        for _ in range(2 * ALIKE):
            story(lambda sender, receiver, step: 0.1, steps=1, watch=watch)
            told.append(watch.suspected(lambda: True))
        assert told[:-1] == [[]] * (2 * ALIKE - 1), "a moment"
        (found,) = told[-1]
        assert len(found.links) == 12
        assert "MB/s are usual" in found.because
        assert story(lambda sender, receiver, step: 0.1, steps=20, watch=watch) == []
        assert watch.suspected(lambda: True) == []
        ended = story(lambda sender, receiver, step: 1.0, steps=2 * CALM_LOOKS, watch=watch)
        assert {(said.worker, said.peer) for _, said in ended} == set(found.links)


def test_links_of_more_than_two_machines_are_not_suspected() -> None:
    watch = LinkWatch("t")
    for slower in (1.0, 0.1):
        story(lambda sender, receiver, step, slower=slower: slower, steps=20, watch=watch)
    assert watch.suspected(lambda: False) == []


def test_a_link_that_was_slow_from_the_beginning_is_found_beside_the_others() -> None:
    slow = (Worker(0, 0), Worker(1, 0))
    found = story(lambda a, b, step: 0.08 if (a, b) == slow else 1.0, steps=40)
    assert links(found) == {slow}
    assert "the other links have" in found[0][1].because


def test_two_slow_moments_are_no_slow_link() -> None:
    def bandwidth(sender: Worker, receiver: Worker, step: int) -> float:
        return 0.1 if (sender, step) in {(VICTIM, 20), (VICTIM, 21)} else 1.0

    assert story(bandwidth, steps=40) == []


def test_a_new_process_has_new_links() -> None:
    watch = LinkWatch("t")
    slow = (Worker(0, 0), Worker(1, 0))
    story(lambda a, b, step: 0.1 if (a, b) == slow and step > KNOWN + 3 else 1.0, steps=30, watch=watch)
    again = TimesReported(task="t", worker=slow[0], incarnation=2, step=31, times={})
    (ended,) = watch.reported(again, PEERS)
    assert isinstance(ended, SlowLinkEnded)
    assert "started again" in ended.because


def test_what_a_report_says_of_workers_that_are_not_of_the_task_is_not_kept() -> None:
    watch = LinkWatch("t")
    for number in range(1000):
        sent = {f"{number}:7": (1 << 20, 1.0), "not a worker": (1, 1.0)}
        report = TimesReported(task="t", worker=VICTIM, incarnation=1, step=1, times={}, sent=sent)
        assert watch.reported(report, PEERS) == []
    assert watch._rates == {}


SENT, BUSY_S = 1_000_000, 0.08
Sent = Callable[[Worker, Worker, int], tuple[int, float]]
FIRST = (Worker(0, 0), Worker(1, 0))


def heard(
    sent: Sent, *, steps: int, workers: list[Worker] = WORKERS, watch: LinkWatch | None = None
) -> list[News]:
    """As a story, of exactly these bytes and seconds."""
    watch, found = watch or LinkWatch("t"), []
    for step in range(1, steps + 1):
        for worker in workers:
            to = {str(peer): sent(worker, peer, step) for peer in workers if peer != worker}
            report = TimesReported(task="t", worker=worker, incarnation=1, step=step, times={}, sent=to)
            found += [(step, news) for news in watch.reported(report, PEERS)]
    return found


@pytest.mark.parametrize(
    "odd",
    [
        (SENT, 0.0),
        (50 * SENT, 0.0),
        (SENT, -5.0),
        (SENT, -0.01),
        (SENT, math.nan),
        (SENT, math.inf),
        (SENT, -math.inf),
        (0, 0.0),
        (-1000 * SENT, 1.0),
        (10**400, 1.0),
        (50 * SENT, BUSY_S),  # a burst
    ],
    ids=lambda odd: f"{odd[0]:.0e} bytes in {odd[1]} s" if odd[0] < 1 << 60 else "10**400 bytes",
)
@pytest.mark.parametrize("often", [1, 20])
def test_what_cannot_be_true_and_bursts_neither_crash_nor_blame_and_a_slow_link_is_still_found(
    odd: tuple[int, float], often: int
) -> None:
    def sent(sender: Worker, receiver: Worker, step: int) -> tuple[int, float]:
        if (sender, receiver) == FIRST and 7 <= step < 7 + often:
            return odd
        return SENT, BUSY_S * (10 if (sender, receiver) == FIRST and step > 70 else 1)

    found = heard(sent, steps=80)
    assert [step > 70 for step, _ in found] == [True]
    assert links(found) == {FIRST}


@pytest.mark.parametrize("slower", [2.0, 10.0, 1000.0])
def test_a_single_link_is_not_blamed_for_its_machine(slower: float) -> None:
    watch, (sender, receiver) = LinkWatch("t"), FIRST
    for step in range(1, 200):
        sent = {str(receiver): (SENT, BUSY_S * (slower if step > 20 else 1))}
        report = TimesReported(task="t", worker=sender, incarnation=1, step=step, times={}, sent=sent)
        assert watch.reported(report, PEERS) == []


@pytest.mark.parametrize("small", [SENT, SENT // 20, SENT // 200])
@pytest.mark.parametrize("begin", [3, 20, 300])
@pytest.mark.parametrize("workers", [list(FIRST), WORKERS])
def test_if_all_links_get_slow_none_is_blamed_though_some_carry_little(
    small: int, begin: int, workers: list[Worker]
) -> None:
    """Rates of links that carry little are known late: they are of a time when all was well."""

    def sent(sender: Worker, receiver: Worker, step: int) -> tuple[int, float]:
        size = SENT if (sender, receiver) == FIRST else small
        return size, BUSY_S * size / SENT * (10 if step >= begin else 1)

    assert heard(sent, steps=450, workers=workers) == []


def test_of_two_machines_the_direction_that_alone_is_slow_is_found() -> None:
    def sent(sender: Worker, receiver: Worker, step: int) -> tuple[int, float]:
        return SENT, BUSY_S * (10 if (sender, receiver) == FIRST and step >= 20 else 1)

    assert links(heard(sent, steps=30, workers=list(FIRST))) == {FIRST}


@pytest.mark.parametrize("together", [True, False])
def test_links_that_alternate_are_not_blamed(together: bool) -> None:
    def sent(sender: Worker, receiver: Worker, step: int) -> tuple[int, float]:
        phase = 0 if together else sender.replica + 2 * sender.stage + receiver.replica
        return SENT, BUSY_S * (10 if (step + phase) // (LOOKS - 1) % 2 else 1)

    assert heard(sent, steps=200) == []


def test_rates_of_a_heavy_tail_hardly_ever_make_a_slow_link() -> None:
    """One window of ten has less than 0.4 of the median rate: by chance alone there are three in a row."""
    draw, found = random.Random(1), 0
    for _ in range(5):
        news = heard(lambda a, b, step: (SENT, BUSY_S * math.exp(draw.gauss(0, 0.7))), steps=300)
        found += len(links(news))
    assert found <= 3  # of 18,000 windows


def test_a_link_that_carries_little_is_found_by_its_own_past() -> None:
    def sent(sender: Worker, receiver: Worker, step: int) -> tuple[int, float]:
        size = SENT // 20 if (sender, receiver) == FIRST else SENT
        return size, BUSY_S * size / SENT * (10 if (sender, receiver) == FIRST and step >= 200 else 1)

    assert links(heard(sent, steps=260)) == {FIRST}


def test_of_a_large_task_a_link_is_compared_with_few_and_a_slow_one_is_found() -> None:
    """With all 4,000 links of 1,000 workers the coordinator needed seconds for the reports of one step."""
    many = [Worker(replica, 0) for replica in range(40)]
    peers, watch, found = {str(worker): worker for worker in many}, LinkWatch("t"), []
    for step in range(1, 30):
        for worker in many:
            slow = 10 if worker == many[7] and step > 20 else 1
            to = {str(peer): (SENT, BUSY_S * slow) for peer in many if peer != worker}
            report = TimesReported(task="t", worker=worker, incarnation=1, step=step, times={}, sent=to)
            found += [(step, news) for news in watch.reported(report, peers)]
    assert links(found) == {(many[7], peer) for peer in many if peer != many[7]}
    rates = watch._rates.values()
    assert max(len(watch._others(rate)) for rate in list(rates)[:50]) <= COMPARED


def test_a_watch_that_begins_anew_ends_what_was_slow_when_it_is_as_fast_as_the_others() -> None:
    """A restarted coordinator knows from its journal which links were slow, and nothing of their rates."""

    def sent(sender: Worker, receiver: Worker, step: int) -> tuple[int, float]:
        return SENT, BUSY_S * (10 if (sender, receiver) == FIRST and step < 20 else 1)

    ((step, ended),) = heard(sent, steps=40, watch=LinkWatch.of("t", [FIRST]))
    assert isinstance(ended, SlowLinkEnded)
    assert (ended.worker, ended.peer) == FIRST
    assert 20 <= step <= 20 + CALM_LOOKS


def test_a_slow_link_ends_with_a_worker_that_is_not_replaced() -> None:
    watch = LinkWatch("t")
    slow = lambda a, b, step: (SENT, BUSY_S * (10 if (a, b) == FIRST and step > 10 else 1))  # noqa: E731
    assert links(heard(slow, steps=20, watch=watch)) == {FIRST}
    left = {str(worker): worker for worker in WORKERS if worker != FIRST[1]}
    report = TimesReported(task="t", worker=VICTIM, incarnation=1, step=21, times={})
    (ended,) = watch.reported(report, left)
    assert isinstance(ended, SlowLinkEnded)
    assert "1:0 is gone" in ended.because
    assert watch.reported(report, left) == []
