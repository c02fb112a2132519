"""Random layouts of random tensors, by every builder."""

from itertools import pairwise

from hypothesis import strategies as st

from everstep.layout import Tensor
from everstep_lab import layout_builders as build
from everstep_lab.layout import Layout, merged

WORLD = 5


@st.composite
def tensors(draw: st.DrawFn, count: int = 3) -> list[Tensor]:
    dims = st.lists(st.integers(1, 6), min_size=1, max_size=3)
    return [Tensor(name=f"t{i}", shape=tuple(draw(dims))) for i in range(draw(st.integers(1, count)))]


@st.composite
def parts_of(draw: st.DrawFn) -> list[list[int]]:
    """Holders in parts, every part with at least one; some holders may be in none."""
    holders = draw(st.permutations(range(WORLD)))[: draw(st.integers(1, WORLD))]
    cuts = sorted(draw(st.sets(st.integers(1, len(holders) - 1)))) if len(holders) > 1 else []
    edges = [0, *cuts, len(holders)]
    return [list(holders[a:b]) for a, b in pairwise(edges)]


@st.composite
def one_layout(draw: st.DrawFn, tensor: Tensor) -> Layout:
    parts = draw(parts_of())
    dim = draw(st.integers(0, len(tensor.shape) - 1))
    match draw(
        st.sampled_from(["replicated", "split", "uneven", "fused", "experts", "padded", "transposed"])
    ):
        case "replicated":
            return build.replicated(tensor, parts[0])
        case "split":
            return build.split(tensor, dim, parts)
        case "uneven":
            cuts = sorted(draw(st.integers(0, tensor.shape[dim])) for _ in parts[1:])
            edges = [0, *cuts, tensor.shape[dim]]
            return build.split(tensor, dim, parts, [b - a for a, b in pairwise(edges)])
        case "fused":
            first = draw(st.integers(0, tensor.shape[dim]))
            second = build.Segment(tensor.shape[dim] - first, split=draw(st.booleans()))
            return build.fused(tensor, dim, [first, second], parts)
        case "experts":
            divisors = [n for n in range(1, tensor.shape[0] + 1) if tensor.shape[0] % n == 0]
            inner = draw(st.sampled_from([None, *range(len(tensor.shape))]))
            return build.experts(tensor, draw(st.sampled_from(divisors)), parts, inner)
        case "padded":
            return build.padded(tensor, dim, parts, draw(st.integers(1, 4)))
        case _:
            return build.transposed(tensor, draw(st.permutations(range(len(tensor.shape)))), parts[0])


@st.composite
def layouts(draw: st.DrawFn, over: list[Tensor]) -> Layout:
    """Each tensor by a builder of its own, or all in one flat buffer, over shards or over wholes."""
    kind = draw(st.sampled_from(["each", "flat", "flat by tensor", "flat over shards"]))
    if kind == "each":
        return merged([draw(one_layout(tensor)) for tensor in over])
    holders = draw(st.permutations(range(WORLD)))[: draw(st.integers(1, WORLD))]
    if kind == "flat":
        return build.flat(over, holders, align=draw(st.integers(1, 4)))
    if kind == "flat by tensor":
        return build.flat_by_tensor(over, holders)
    if len(holders) == 1:
        return build.flat(over, holders)
    cut = draw(st.integers(1, len(holders) - 1))
    groups = [holders[:cut], holders[cut:]]
    shards = [build.fused_shards(t, 0, [t.shape[0] // 2, t.shape[0] - t.shape[0] // 2], 2) for t in over]
    flat = draw(st.sampled_from([build.flat, build.flat_by_tensor]))
    return merged([flat([mine[i] for mine in shards], group) for i, group in enumerate(groups)])
