"""Strict sums: the same bits in any order and any grouping, of any contributions, and close to the truth."""

import math
import operator
import random
import weakref
from fractions import Fraction
from functools import partial, reduce
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipeline import stages

from everstep.engine.datasets.data import Synthetic
from everstep.engine.layers import taken_over
from everstep.engine.layers.gpt import gpt
from everstep.engine.layers.model import Slot
from everstep.engine.stage import weight_sums
from everstep.engine.sums import grids, kernels, sum_units
from everstep.engine.sums import sums as gradient_sums
from everstep.engine.sums.device_sums import reciprocal
from everstep.engine.sums.sum_parts import (
    joined,
    owned,
    parted,
    peaks_of,
    virtual_chunks,
)
from everstep.engine.sums.sums import GradientSums
from everstep.errors import PeerError

CPU = torch.device("cpu")
SLOTS = {"small": Slot(0, (5,)), "matrix": Slot(64, (9, 8)), "lone": Slot(192, ())}
SIZE = 256
WHOLE = slice(0, SIZE)
COUNT = 13
LIMITS = [-3, 0, 2]
STRICT: list[grids.StrictKind] = ["strict", "strict40"]
KINDS = [(kind, late) for kind in STRICT for late in (False, True)]

Contribution = tuple[torch.Tensor, ...]


def sums(kind: str, late: bool, limits: list[int] | None = None) -> GradientSums:
    made = GradientSums(SLOTS, SIZE, kind=kind, contributions=COUNT, device=CPU, late=late)
    made.begin(1, limits or LIMITS)
    return made


def added(into: GradientSums, contributions: list[Contribution]) -> GradientSums:
    for contribution in contributions:
        for index, tensor in enumerate(contribution):
            into.add(index, lambda tensor=tensor: tensor)
        into.added()
    return into


def reduced(workers: list[GradientSums], replicas: int = 3) -> torch.Tensor:
    """As a stage does it: every worker sums its own stretch of chunks from the parts of all."""
    out = torch.full((SIZE,), -1.0, dtype=torch.float64)  # fp32 would hide a difference in the last unit
    chunks = virtual_chunks(SIZE, replicas)
    for owner in range(len(workers)):
        mine = owned(chunks, range(len(workers)), owner)
        stretch = slice(mine[0].start, mine[-1].stop)
        parts = [worker.part(stretch) for worker in workers]
        for other in {*range(len(workers))} - {owner}:
            tensors, told = workers[other].sent(stretch, parts[other], most=2)
            parts[other] = workers[owner].arrived(stretch, tensors, parts[other].peaks, told)
        workers[owner].means(stretch, mine, parts, 1.0, out)
    return out


def drawn(rng: random.Random, count: int = COUNT, *, wild: float = 0.15) -> list[Contribution]:
    """Many sizes, exact ties of every grid, subnormal numbers, all that the limit allows, and now and then
    far too much.
    """
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    made = []
    for _ in range(count):
        tensors = []
        for slot, limit in zip(SLOTS.values(), LIMITS, strict=True):
            x = torch.randn(slot.shape, generator=generator) * 2.0 ** rng.uniform(-12, 0)
            most = 2.0**limit * (1 - 2**-24)
            x = x.clamp(-most, most)
            half_units = [limit - grids.grid(kind, COUNT).depth - 1 for kind in STRICT]
            ties = torch.randint(-9, 9, slot.shape, generator=generator) * 2.0 ** rng.choice(half_units)
            x = torch.where(torch.rand(slot.shape, generator=generator) < 0.3, ties.float(), x)
            x = torch.where(torch.rand(slot.shape, generator=generator) < 0.1, x * 2.0**-140, x)
            x.reshape(-1)[0] = most if rng.random() < 0.85 else 2.0 ** (rng.choice(half_units) + 1)
            tensors.append(x * 2.0 ** rng.randint(3, 60) if rng.random() < wild else x)
        made.append(tuple(tensors))
    return made


def regrouped(rng: random.Random, kind: str, late: bool, contributions: list[Contribution]) -> torch.Tensor:
    order = rng.sample(contributions, len(contributions))
    hosts = [rng.randrange(rng.randint(1, 4)) for _ in order]
    groups = [[c for c, host in zip(order, hosts, strict=True) if host == h] for h in range(max(hosts) + 1)]
    return reduced([added(sums(kind, late), group) for group in groups])


def own(made: GradientSums) -> torch.Tensor:
    part = made.part(WHOLE)
    return part.tensors[0].long() if part.high is None else joined(part.tensors[0], part.high)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int64), b.view(torch.int64))


def imitated(
    totals: torch.Tensor,
    high: torch.Tensor | None,
    addends: list[kernels.Addend],
    offsets: torch.Tensor,
    peaks: torch.Tensor,
    *,
    sign: int = 1,
) -> None:
    """What the GPU's kernel computes, with torch."""
    assert 0 < len(addends) <= kernels.MOST
    assert len({one.slot for one in addends}) == len(addends), "two blocks would write to one place"
    for x, slot, start, is_first in addends:
        where = slice(start, start + x.numel())
        total = totals[where]
        placed = x.double() + offsets[slot]
        units = placed.view(torch.int64) - offsets[slot].view(torch.int64)
        if high is None:
            total.copy_(units) if is_first else total.add_(units.to(total.dtype), alpha=sign)
        else:
            before = torch.zeros_like(units) if is_first else total.long()
            now = before + sign * units
            total.copy_(now)
            over = (now - total) >> 32
            high[where].copy_(over if is_first else high[where] + over)
            if over.any():
                peaks[peaks.numel() // 2 + slot] = 1.0
        bits, seen = x.float().view(torch.int32) & 0x7FFFFFFF, peaks.view(torch.int32)
        seen[slot] = torch.maximum(seen[slot], bits.max())


def imitated_mean(
    out: torch.Tensor,
    parts: list[tuple[torch.Tensor, torch.Tensor | None]],
    tables: tuple[torch.Tensor, ...],
    scales: torch.Tensor,
    blocks: range,
    where: slice,
    *,
    start: int,
    origin: int,
) -> None:
    """One block after the other, as the kernel's programs do."""
    slots, starts, ends, rooms = tables
    wholes = [low.long() if high is None else joined(low, high) for low, high in parts]
    for block in blocks:
        slot = slots[block]
        at = starts[block] + torch.arange(kernels.BLOCK)
        at = at[(at >= where.start) & (at < where.stop) & (at < rooms[slot])]
        real = at < ends[slot]
        value = torch.zeros(len(at), dtype=torch.float64)
        value[real] += sum(whole[at[real] - start] for whole in wholes).double()
        out[at - origin] = (value * scales[slot] * scales[-1]).to(out.dtype)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "usable", lambda *kinds: True)
    monkeypatch.setattr(kernels, "add_units", imitated)
    monkeypatch.setattr(kernels, "mean_of", imitated_mean)


def try_orders(kind: str, late: bool, times: int) -> None:
    rng = random.Random(f"{kind} {late}")
    for _ in range(10):
        contributions = drawn(rng)
        first = regrouped(rng, kind, late, contributions)
        assert first.isfinite().all()
        for _ in range(times // 10):
            assert same_bits(regrouped(rng, kind, late, contributions), first)


@pytest.mark.parametrize(("kind", "late"), KINDS)
def test_any_order_and_any_grouping_gives_the_same_bits(kind: str, late: bool) -> None:
    try_orders(kind, late, 60)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("kind", STRICT)
def test_with_the_kernel_of_a_gpu_too(kind: str) -> None:
    rng = random.Random(kind)
    for _ in range(3):
        contributions = drawn(rng)
        with_kernel = [regrouped(rng, kind, True, contributions) for _ in range(5)]
        made = added(sums(kind, True), contributions)
        assert made.has_kernels
        assert made.num_promoted > 0
        for one in with_kernel:
            assert same_bits(one, with_kernel[0])


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("kind", STRICT)
def test_the_kernel_of_a_gpu_gives_the_sums_of_the_reference(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    contributions = drawn(random.Random(7))
    found = added(sums(kind, True), contributions).values()
    monkeypatch.setattr(kernels, "usable", lambda *kinds: False)
    assert same_bits(found, added(sums(kind, True), contributions).values())


@pytest.mark.usefixtures("kernel")
def test_a_gpu_adds_many_small_contributions_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch takes the host longer than the device; two for one slot are apart."""
    count = kernels.MOST + 8
    slots = {f"t{i}": Slot(16 * i, torch.Size([5])) for i in range(count)}
    xs = [torch.full((5,), float(i), dtype=torch.bfloat16 if i < 4 else torch.float32) for i in range(count)]
    launches: list[int] = []

    def counted(
        totals: torch.Tensor, high: None, addends: list[kernels.Addend], *rest: object, **more: int
    ) -> None:
        launches.append(len(addends))
        imitated(totals, high, addends, *rest, **more)

    monkeypatch.setattr(kernels, "add_units", counted)
    made = GradientSums(slots, 16 * count, kind="strict", contributions=4, device=CPU, late=True)
    made.begin(1, [10] * count)
    for _ in range(2):
        for index, x in enumerate(xs):
            made.add(index, lambda x=x: x)
        made.added()
    assert launches == [kernels.MOST, 8] * 2
    made.begin(2, [10] * count)
    for x in (xs[5], xs[6]):  # of one slot, as two microbatches without a check between them would be
        made.add(5, lambda x=x: x)
    assert made.values()[80:85].tolist() == [11.0] * 5
    assert launches[-2:] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "late"), KINDS)
def test_thousands_of_orders_and_groupings_give_the_same_bits(kind: str, late: bool) -> None:
    try_orders(kind, late, 3000)


@pytest.mark.parametrize(("kind", "late"), KINDS)
def test_a_sum_of_all_that_the_limit_allows_is_still_exact(kind: str, late: bool) -> None:
    most, least = 2.0**2 * (1 - 2**-24), 2.0 ** grids.grid(kind, COUNT).unit(2, 0)
    contributions = [torch.tensor(most)] * (COUNT - 1) + [torch.tensor(least)]
    for order in (contributions, contributions[::-1]):
        made = sums(kind, late)
        for one in order:
            made.add(2, lambda one=one: one)
        made.added()
        unit = Fraction(least)
        expected = (COUNT - 1) * _rounded(Fraction(most) / unit, away=True) * unit + unit
        assert Fraction(float(made.values()[192])) == expected


def test_plain_sums_do_not_pass_the_same_test() -> None:
    """Else the test would show nothing: fp64 sums of these numbers differ in the order they are added."""
    rng = random.Random(1)
    contributions = drawn(rng, wild=0.3)
    totals = set()
    for _ in range(50):
        total = torch.zeros(9, 8, dtype=torch.float64)
        for one in rng.sample(contributions, len(contributions)):
            total += one[1]
        totals.add(tuple(total.flatten().tolist()))
    assert len(totals) > 1


@pytest.mark.parametrize(("kind", "late"), KINDS)
def test_a_sum_is_the_sum_of_what_was_rounded_once(kind: str, late: bool) -> None:
    """Against exact rational arithmetic, promoted contributions and all."""
    rng = random.Random(f"exact {kind} {late}")
    for _ in range(5):
        contributions = drawn(rng)
        made = added(sums(kind, late), contributions)
        found = made.values()
        for index, slot in enumerate(SLOTS.values()):
            levels: dict[int, list[Fraction]] = {}
            for contribution in contributions:
                x = contribution[index].reshape(-1)
                level = made.grid.level(made.limits[index], grids.exponent(float(x.abs().max())))
                unit = Fraction(2) ** made.grid.unit(made.limits[index], level)
                totals = levels.setdefault(level, [Fraction(0)] * slot.size)
                for i, value in enumerate(x.tolist()):
                    totals[i] += _rounded(Fraction(value) / unit, away=not late) * unit
            expected = [
                # One after the other: from Python 3.12 on `sum` makes up for what floats lose.
                reduce(operator.add, (float(levels[level][i]) for level in sorted(levels)), 0.0)
                for i in range(slot.size)
            ]
            assert found[slot.offset : slot.offset + slot.size].tolist() == expected


@pytest.mark.parametrize(("kind", "late"), KINDS)
def test_a_mean_has_the_bits_of_the_kernels_which_multiply(kind: str, late: bool) -> None:
    """With the reciprocal of the weight, in fp64. A quotient rounds otherwise now and then."""
    weight, drew = 3.0, random.Random(f"mean {kind} {late}")
    made = added(sums(kind, late), drawn(drew))
    found, total = (torch.zeros(SIZE, dtype=torch.float64) for _ in range(2))
    made.means(WHOLE, [WHOLE], [made.part(WHOLE)], weight, found)
    made.means(WHOLE, [WHOLE], [made.part(WHOLE)], 1.0, total)
    assert torch.equal(found, total * (1 / weight))
    assert not torch.equal(found, total / weight)


def _rounded(value: Fraction, *, away: bool) -> int:
    if not away:
        return round(value)  # ties to even
    return math.copysign(1, value) * math.floor(abs(value) + Fraction(1, 2)) if value else 0


@given(
    values=st.lists(st.floats(width=32, min_value=-4, max_value=4), min_size=2, max_size=COUNT),
    limit=st.integers(-20, 3),
    kind=st.sampled_from(STRICT),
    seed=st.integers(0, 1000),
)
def test_no_single_number_depends_on_its_neighbours(
    values: list[float], limit: int, kind: str, seed: int
) -> None:
    def total(order: list[float]) -> torch.Tensor:
        made = GradientSums({"x": Slot(0, (1,))}, 64, kind=kind, contributions=COUNT, device=CPU)
        made.begin(1, [limit])
        for value in order:
            made.add(0, lambda value=value: torch.tensor([value]))
        return made.values()

    assert torch.equal(total(values), total(random.Random(seed).sample(values, len(values))))


@pytest.mark.parametrize(("kind", "bits"), [("strict", 40), ("strict40", 30)])
def test_sums_are_as_close_to_the_truth_as_their_bits_allow(kind: str, bits: int) -> None:
    contributions = [tuple(x.clamp(-1, 1) for x in one) for one in drawn(random.Random(3), wild=0)]
    found = added(sums(kind, late=False, limits=[1, 1, 1]), contributions).values()
    for index, slot in enumerate(SLOTS.values()):
        exact = sum(one[index].double() for one in contributions).reshape(-1)
        error = (found[slot.offset : slot.offset + slot.size] - exact).abs().max()
        assert float(error) < COUNT * 2.0**-bits


@pytest.mark.parametrize(("kind", "late"), KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_contribution_that_is_not_finite_shows_in_its_tensor_and_in_no_other(
    kind: str, late: bool, bad: float
) -> None:
    rng = random.Random(5)
    contributions = drawn(rng, wild=0)
    contributions[4][1][2, 3] = bad
    workers = [added(sums(kind, late), contributions[:6]), added(sums(kind, late), contributions[6:])]
    mean = reduced(workers)
    assert mean[64 : 64 + 72].isnan().all()
    assert mean[:64].isfinite().all()
    assert mean[192:].isfinite().all()
    assert peaks_of([worker.part(WHOLE) for worker in workers])[1] == grids.NOT_FINITE


def test_peaks_are_those_of_all_workers_and_a_tensor_without_any_has_none() -> None:
    one, other = sums("strict", False), sums("strict", False)
    one.add(0, lambda: torch.tensor([0.3, 0, 0, 0, -5.0]))
    other.add(0, lambda: torch.full((5,), 0.1))
    other.add(1, lambda: torch.full((9, 8), 0.75))
    assert peaks_of([one.part(WHOLE), other.part(WHOLE)]) == [3, 0, grids.NO_PEAK]


@pytest.mark.parametrize(("kind", "rise", "fall"), [("strict", 2, 2), ("strict40", 4, 1)])
def test_limits_follow_the_peaks_a_few_bits_per_step(kind: grids.StrictKind, rise: int, fall: int) -> None:
    grid = grids.grid(kind, 64)
    limits = grids.Limits(["a", "b"], grid)
    assert limits.at(1) == (grids.NO_LIMIT, grids.NO_LIMIT)
    limits.follow(1, [-9, grids.NO_PEAK])
    assert limits.at(2) == (-9 + grid.headroom, grids.NO_LIMIT)
    limits.follow(2, [20, grids.NOT_FINITE])
    limits.follow(2, [20, grids.NOT_FINITE])  # an update made again after an undo
    assert limits.at(3) == (-9 + grid.headroom + rise, grids.NO_LIMIT)
    limits.follow(3, [-9, -300])
    assert limits.at(4) == (-9 + grid.headroom + rise - fall, -90)
    other = grids.Limits(["b", "a"], grid)
    other.load(3, limits.state(3))
    assert other.at(4) == limits.at(4)[::-1]
    assert limits.state(9) == {}


def test_chunks_do_not_depend_on_who_lives_and_are_all_owned_once() -> None:
    for replicas in (1, 2, 3, 16, 40):
        chunks = virtual_chunks(10_000, replicas)
        assert len(chunks) >= replicas
        for members in (range(replicas), range(1, replicas), [replicas - 1]):
            if len(members):
                shared = [chunk for owner in members for chunk in owned(chunks, list(members), owner)]
                assert shared == chunks


@pytest.mark.parametrize("kind", STRICT)
@pytest.mark.parametrize(("group", "block"), [(1, 7), (40, 16), (1 << 18, 5)])
def test_how_many_contributions_are_added_at_once_does_not_show(
    monkeypatch: pytest.MonkeyPatch, kind: str, group: int, block: int
) -> None:
    contributions = drawn(random.Random(f"{kind} {group}"))
    whole = added(sums(kind, False), contributions)
    monkeypatch.setitem(gradient_sums._GROUP, "cpu", group)
    monkeypatch.setitem(sum_units._BLOCK, "cpu", block)
    pieces = added(sums(kind, False), contributions)
    assert pieces.peaks == whole.peaks
    assert same_bits(reduced([pieces]), reduced([whole]))
    assert torch.equal(pieces.flat, whole.flat)


@pytest.mark.parametrize("kind", [*STRICT, "fp32"])
def test_where_nothing_counts_there_is_no_mean(kind: str) -> None:
    """The step behind the last one only evaluates: on a GPU its sums ended the run."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = GradientSums(SLOTS, SIZE, kind=kind, contributions=COUNT, device=device)
    made.begin(1, LIMITS)
    mean = torch.zeros(SIZE, device=device)
    made.means(WHOLE, [WHOLE], [made.part(WHOLE)], 0.0, mean)
    assert all(mean[slot.offset : slot.offset + slot.size].isnan().all() for slot in SLOTS.values())
    assert math.isnan(reciprocal(0.0))
    assert reciprocal(4.0) == 0.25


def test_sums_of_40_bits_are_32_with_their_sign_and_8_that_those_lack() -> None:
    most = 1 << 38
    numbers = [0, 1, -1, most, -most, 1 << 32, -(1 << 32), (1 << 32) - 1, -(1 << 31), 255, -256]
    generator = torch.Generator().manual_seed(1)
    drawn_ones = torch.randint(-most, most, (1001,), generator=generator)
    total = torch.cat([torch.tensor(numbers), drawn_ones])
    low, high = torch.empty_like(total, dtype=torch.int32), torch.empty_like(total, dtype=torch.int8)
    parted(total, low, high)
    assert torch.equal(joined(low, high), total)


@pytest.mark.parametrize(("kind", "late"), KINDS)
def test_a_stretch_without_any_tensor_is_zeros(kind: str, late: bool) -> None:
    """Of few numbers and many chunks, some chunks lie between tensors."""
    between = slice(8, 40)
    workers = [added(sums(kind, late), [(torch.ones(5), torch.ones(72), torch.ones(1))]) for _ in range(2)]
    assert not workers[0].pieces(between)
    out = torch.full((32,), -1.0, dtype=torch.float64)
    parts = [worker.part(between) for worker in workers]
    workers[0].means(between, [between], parts, 2.0, out, origin=between.start)
    assert out.tolist() == [0.0] * 32


def test_only_integers_of_40_bits_are_sent_in_fewer_bytes_than_they_may_need() -> None:
    for kind, late in KINDS:
        made = sums(kind, late)
        least = 4 if kind == "strict40" and late else 8
        (sent,), told = made.sent(WHOLE, made.part(WHOLE))
        assert sent.nbytes == least * SIZE, kind
        assert sent.data_ptr() == made.flat.data_ptr(), "nothing is copied"
        assert told == [[]]


@pytest.mark.parametrize("with_kernels", [False, True], ids=["", "kernels"])
def test_sums_that_32_bits_hold_are_sent_in_as_many(
    with_kernels: bool, request: pytest.FixtureRequest
) -> None:
    """The grid is 33 bits below the limit. Of the first tensor the sum has 31 bits, of the second 32."""
    if with_kernels:
        request.getfixturevalue("kernel")
    made = sums("strict40", True)
    unit = [2.0 ** (limit - 33) for limit in LIMITS]
    most, one_more = float((1 << 31) - 128), float(1 << 31)
    units = [most, one_more, -one_more]
    for part in (0.5, 0.5):
        for index, slot in enumerate(SLOTS.values()):
            made.add(index, lambda i=index, slot=slot, p=part: torch.full(slot.shape, p * units[i] * unit[i]))
        made.added()
    total = own(made)
    wheres = [slice(slot.offset, slot.offset + slot.size) for slot in SLOTS.values()]
    for where, expected in zip([*wheres, WHOLE], [*units, None], strict=True):
        part = made.part(where)
        tensors, told = made.sent(where, part)
        lacks = expected in (one_more, None)
        assert [one.dtype for one in tensors] == [torch.int32, *[torch.int8] * lacks]
        assert sum(one.nbytes for one in tensors) == 4 * total[where].numel() + lacks * SLOTS["matrix"].size
        came = made.arrived(where, tensors, part.peaks, told)
        found = came.tensors[0].long() if came.high is None else joined(came.tensors[0], came.high)
        assert torch.equal(found, total[where])
        if expected is not None:
            assert found.unique().tolist() == [int(expected)]


@pytest.mark.parametrize("most", [0, 9], ids=["in one", "each"])
def test_promoted_sums_that_32_bits_hold_are_sent_in_as_many(most: int) -> None:
    """On level 1 the unit is 23 bits below the limit: one contribution below 2**7 of it fits, or two below
    2**6. What is sent in either way adds up to the exact sum.
    """
    for sizes, width in (([6.9], 4), ([5.9, 5.9], 4), ([6.9, 6.9], 8), ([7.0], 8), ([9.5], 8)):
        workers = [sums("strict40", True) for _ in range(2)]
        for one in workers:
            for size in sizes:
                for index, (slot, limit) in enumerate(zip(SLOTS.values(), LIMITS, strict=True)):
                    contribution = torch.full(slot.shape, -(2.0 ** (limit + size)))
                    one.add(index, lambda contribution=contribution: contribution)
                one.added()
        part = workers[1].part(WHOLE)
        tensors, told = workers[1].sent(WHOLE, part, most)
        promoted = tensors[2:]  # behind the sums, and what those lack
        assert workers[1].num_promoted == len(SLOTS)
        assert len(promoted) == (len(SLOTS) if most and width == 8 else 1)
        assert sum(one.nbytes for one in promoted) == width * sum(slot.size for slot in SLOTS.values())
        came = workers[0].arrived(WHOLE, tensors, part.peaks, told)
        out = torch.full((SIZE,), -1.0, dtype=torch.float64)
        workers[0].means(WHOLE, [WHOLE], [workers[0].part(WHOLE), came], 1.0, out)
        exact = torch.zeros(SIZE, dtype=torch.float64)
        for slot, limit in zip(SLOTS.values(), LIMITS, strict=True):
            unit = 2.0 ** (limit - 23)
            once = sum(round(float(torch.tensor(2.0 ** (limit + size))) / unit) for size in sizes)
            exact[slot.offset : slot.offset + slot.size] = -2 * once * unit
        assert torch.equal(out, exact)


@pytest.mark.parametrize(("kind", "late"), KINDS)
def test_a_peers_sums_that_do_not_belong_to_its_part_are_refused(kind: str, late: bool) -> None:
    """A kernel would read what lies behind them."""
    made = added(sums(kind, late), drawn(random.Random(3), wild=0))
    part = made.part(WHOLE)
    (low, *rest), told = made.sent(WHOLE, part)
    with pytest.raises(PeerError, match="too short"):
        made.arrived(WHOLE, (low[:-16], *rest), part.peaks, told)
    high = torch.zeros(SLOTS["matrix"].size, dtype=torch.int8)
    made.arrived(WHOLE, (low, high), part.peaks, [[], [1]])
    for wrong, slots in ((high[1:], [1]), (high, [0]), (high, [7]), (high.float(), [1]), (high, [1, 1])):
        with pytest.raises(PeerError, match="do not belong"):
            made.arrived(WHOLE, (low, wrong), part.peaks, [[], slots])


def test_many_microbatches_of_one_worker_are_sent_whole() -> None:
    """After deaths a worker may compute more than 63, and their sum may have more than 40 bits."""
    for count in (grids.MOST_SHORT - 1, grids.MOST_SHORT, 2 * grids.MOST_SHORT):
        made = GradientSums(SLOTS, SIZE, kind="strict40", contributions=200, device=CPU, late=True)
        made.begin(1, LIMITS)
        for _ in range(count):
            for index, (slot, limit) in enumerate(zip(SLOTS.values(), LIMITS, strict=True)):
                made.add(
                    index, lambda slot=slot, limit=limit: torch.full(slot.shape, 2.0**limit * (1 - 2**-24))
                )
            made.added()
        flat = own(made)
        assert made.num_promoted == 0
        most = round(2.0**33 * (1 - 2**-24))
        assert {int(flat[slot.offset]) for slot in SLOTS.values()} == {count * most}
        part = made.part(WHOLE)
        tensors, told = made.sent(WHOLE, part)
        _, high = tensors
        assert high.dtype == (torch.int8 if count < grids.MOST_SHORT else torch.int32)
        came = made.arrived(WHOLE, tensors, part.peaks, told)
        assert came.high is not None
        assert torch.equal(joined(came.tensors[0], came.high), flat)


@pytest.mark.parametrize("with_kernels", [False, True], ids=["", "kernels"])
@pytest.mark.parametrize(("kind", "late"), [("fp32", False), ("strict40", True)])
def test_means_in_the_place_of_the_sums_have_the_same_bits(
    kind: str, late: bool, with_kernels: bool, request: pytest.FixtureRequest
) -> None:
    """Of one worker without peers. Promoted sums and what is not finite are among them."""
    if with_kernels:
        request.getfixturevalue("kernel")
    rng = random.Random(kind)
    for turn in range(6):
        contributions = drawn(rng, wild=0.0 if kind == "fp32" else 0.1 * turn)
        if turn == 5:
            contributions[3][1].view(-1)[4] = math.inf
        found = []
        for in_place in (False, True):
            made = sums(kind, late)
            for contribution in contributions:
                for index, tensor in enumerate(contribution):
                    if kind == "fp32":
                        made.shaped[index].add_(tensor)
                    else:
                        made.add(index, lambda tensor=tensor: tensor)
                made.added()
            part = made.part(WHOLE)
            out = made.own_means if in_place else torch.empty(SIZE)
            assert out is not None
            made.means(WHOLE, virtual_chunks(SIZE, 1), [part], 7.0, out)
            assert made.are_means == in_place
            found.append(out.clone())
            made.begin(2, LIMITS)
            assert not made.are_means
        assert torch.equal(found[0].view(torch.int32), found[1].view(torch.int32))


@pytest.mark.parametrize("kind", ["fp32", "strict", "strict40"])
def test_sums_of_a_stage_without_parameters_are_never_means(kind: str) -> None:
    """No memory lies at one place with any other. A peer may ask for them after the sum."""
    made = GradientSums({}, 0, kind=kind, contributions=4, device=CPU)
    made.begin(1, [])
    made.means(slice(0, 0), [slice(0, 0)], [made.part(slice(0, 0))], 4.0, torch.empty(0))
    assert made.part(slice(0, 0)).tensors[0].numel() == 0


@pytest.mark.parametrize("with_kernels", [False, True], ids=["", "kernels"])
@pytest.mark.parametrize("odd", [2.0**40, math.inf, math.nan])
def test_what_does_not_fit_is_taken_back_also_where_sums_become_longer(
    odd: float, with_kernels: bool, request: pytest.FixtureRequest
) -> None:
    """At the 63rd microbatch, and around it: of what is too long for 40 bits a part is lost on the way."""
    if with_kernels:
        request.getfixturevalue("kernel")
    fitting = -(2.0**-3) * (1 - 2**-24)
    for at in range(grids.MOST_SHORT - 3, grids.MOST_SHORT + 2):
        made = GradientSums(SLOTS, SIZE, kind="strict40", contributions=200, device=CPU, late=True)
        made.begin(1, LIMITS)
        for k in range(grids.MOST_SHORT + 3):
            made.add(0, lambda k=k, at=at: torch.full((5,), odd if k == at else fitting))
            made.added()
        expected = (grids.MOST_SHORT + 2) * round(fitting * 2.0**36)
        assert own(made)[:5].tolist() == [expected] * 5


@pytest.mark.parametrize("kind", STRICT)
def test_contributions_put_together_have_the_bits_of_those_added_one_by_one(kind: str) -> None:
    """Slots side by side, one longer than a block, one with a gap behind it, one without numbers; in one
    microbatch a contribution is promoted, in another one is not finite.
    """
    block = sum_units.CPU_BLOCK
    sizes = [64, block + 192, 100, 0, 64, 2 * block]
    ends = [0, *accumulate(-(-size // 64) * 64 for size in sizes)]
    slots = {str(at): Slot(ends[at], (size,)) for at, size in enumerate(sizes)}
    draw = torch.Generator().manual_seed(4)
    made = [[torch.randn(size, generator=draw) for size in sizes] for _ in range(5)]
    made[1][1][7] = 3e4
    made[3][4][3] = math.nan

    def trained(*, one_by_one: bool, order: list[int]) -> tuple[torch.Tensor, list[int]]:
        total = GradientSums(slots, ends[-1], kind=kind, contributions=5, device=CPU)
        total.begin(1, [4] * len(sizes))
        for microbatch in order:
            for index in range(len(sizes)):
                total.add(index, partial(made[microbatch].__getitem__, index))
                if one_by_one:
                    total.flush()
            total.added()
        assert total.num_promoted == 1
        return total.values(), total.peaks

    values, peaks = trained(one_by_one=True, order=[0, 1, 2, 3, 4])
    together, found = trained(one_by_one=False, order=[4, 2, 0, 3, 1])
    assert torch.equal(values.nan_to_num(-1.0), together.nan_to_num(-1.0))
    assert values.isnan().sum() == 64
    assert peaks == found


def bytes_alive(storages: list[weakref.ref[torch.UntypedStorage]]) -> int:
    found = [storage for ref in storages if (storage := ref()) is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


@pytest.mark.parametrize("limit", [-30, 30], ids=["promoted", "fits"])
def test_of_a_large_microbatch_little_is_held_for_the_check_after_its_w(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """As on a GPU. Checked in small groups or all at once, the sums have the same bits."""
    monkeypatch.setattr(taken_over, "_in_one", lambda part, queued: queued)  # gradients are made in W
    data = Synthetic(vocab=64, sequence=16, rows=2, seed=3)
    found, left = [], []
    for most in (1 << 40, 1 << 14):
        monkeypatch.setattr(weight_sums, "CHECKED", most)
        (stage,) = stages(gpt(vocab=64, width=32, heads=4, hidden=48, depth=4), 1, data)
        slots, size = stage.slots, stage.size
        late = GradientSums(slots, size, kind="strict", contributions=256, device=CPU, late=True)
        stage.sums = late
        late.begin(1, [limit] * len(slots))
        for microbatch in (0, 1):
            stage.forward(1, microbatch)
            stage.input_grad(1, microbatch)
            held = [weakref.ref(one.untyped_storage()) for one in stage._stashes[1, microbatch].for_weights()]
            stage.weight_grad(1, microbatch)
            left.append(bytes_alive(held) - stage.working.nbytes)
        assert (late.num_promoted > 0) == (limit < 0)
        found.append(late.values())
    assert torch.equal(*found)
    at_once, in_groups = left[:2], left[2:]
    assert max(in_groups) < 1 << 15 < min(at_once), "a group, and the tensor that filled it"
