"""The pattern language cuts tensors as it says, and says what is wrong with a pattern."""

import numpy as np
import pytest

from everstep.errors import UserError
from everstep.layout import Tensor
from everstep.layout.box import Box
from everstep_convert.patterns import Pattern, Patterns, read_patterns

LLAMA = r"""
[[pattern]]
match = 'embed\.weight'
kind = "fragment"
dim = 0
pad_to = 4
[[pattern]]
match = 'layers\.\d+\.qkv\.weight'
kind = "fragment"
dim = 0
parts = [8, "=2", "=2"]
[[pattern]]
match = 'layers\.\d+\.down\.weight'
kind = "fragment"
dim = 1
[[pattern]]
match = 'layers\.\d+\.experts'
kind = "fragment"
experts = 4
[[pattern]]
match = '.*norm\.weight'
kind = "replicated"
[[pattern]]
match = 'router\.bias'
kind = "average"
[[pattern]]
match = 'step'
kind = "unique"
"""
TENSORS = [
    Tensor(name="embed.weight", shape=(10, 4)),
    Tensor(name="layers.0.qkv.weight", shape=(12, 4)),
    Tensor(name="layers.0.down.weight", shape=(4, 6)),
    Tensor(name="layers.0.experts", shape=(8, 3)),
    Tensor(name="layers.0.norm.weight", shape=(4,)),
    Tensor(name="router.bias", shape=(3,)),
    Tensor(name="step", shape=()),
]


def patterns() -> Patterns:
    return read_patterns(LLAMA)


def shard_values(pattern: Pattern, tensor: Tensor, count: int) -> list[np.ndarray]:
    """What each part has of a tensor whose elements are 1, 2, …; padding is 0."""
    values = 1 + np.arange(tensor.num_elements).reshape(tensor.shape)
    found = []
    for shard in pattern.shards(tensor, count):
        part = np.zeros(shard.shape, values.dtype)
        for box, corner in shard.blocks:
            part[Box(corner, box.size).slices()] = values[box.slices()]
        found.append(part)
    return found


def test_each_kind_cuts_a_tensor_as_its_name_says() -> None:
    wholes = [1 + np.arange(tensor.num_elements).reshape(tensor.shape) for tensor in TENSORS]
    embed, qkv, down, experts, norm, router, step = wholes
    expected = {
        "embed.weight": [embed[:8], np.concatenate([embed[8:], np.zeros((6, 4))])],
        "layers.0.qkv.weight": [qkv[[0, 1, 2, 3, 8, 9, 10, 11]], qkv[4:]],
        "layers.0.down.weight": [down[:, :3], down[:, 3:]],
        "layers.0.experts": [experts[:4], experts[4:]],
        "layers.0.norm.weight": [norm, norm],
        "router.bias": [router, router],
        "step": [step, step],
    }
    for tensor in TENSORS:
        found = shard_values(patterns().of(tensor.name), tensor, 2)
        assert all(map(np.array_equal, found, expected[tensor.name])), tensor.name


def test_a_name_that_matches_none_or_two_is_named() -> None:
    with pytest.raises(UserError, match=r"'head.weight' matches no pattern; add one"):
        patterns().of("head.weight")
    with pytest.raises(UserError, match="matches only its beginning"):
        patterns().of("embed.weight.extra")
    with pytest.raises(UserError, match=r"'layers.0.down.weight' matches two patterns"):
        read_patterns(LLAMA + "[[pattern]]\nmatch='layers.*'\nkind='replicated'").of("layers.0.down.weight")


GRID = r"""
[[pattern]]
match = 'w'
kind = "fragment"
splits = [{dim = 2, over = 2, parts = [[5, 3], "=2", 4]}, {dim = 0, over = 3}]
"""


def test_a_pattern_splits_along_several_dimensions() -> None:
    """Part 4 of 6 is the second along dimension 2 and the second along dimension 0."""
    pattern = read_patterns(GRID).of("w")
    tensor = Tensor(name="w", shape=(7, 2, 14))
    values = 1 + np.arange(tensor.num_elements).reshape(tensor.shape)
    shards = shard_values(pattern, tensor, 6)
    rows, columns = [(0, 3), (3, 5), (5, 7)], [[0, 1, 2, 3, 4, 8, 9, 10, 11], [5, 6, 7, 8, 9, 12, 13]]
    for part in range(6):
        (low, high), mine = rows[part % 3], columns[part // 3]
        assert np.array_equal(shards[part], values[low:high][..., mine])
    shapes = [shard.shape for shard in pattern.shards(tensor, 6)]
    assert pattern.resized(shapes)[0] == tensor.shape
    with pytest.raises(UserError, match=r"is a grid of \[2, 3\], and there are 4 parts"):
        pattern.shards(tensor, 4)


def test_experts_over_one_dimension_and_each_split_along_another() -> None:
    pattern = read_patterns(
        """[[pattern]]
        match = 'experts.w1'
        kind = "fragment"
        splits = [{experts = 4, over = 2}, {dim = 1, over = 2}]"""
    ).of("experts.w1")
    first, second, *_ = pattern.shards(Tensor(name="experts.w1", shape=(12, 6)), 4)
    assert [box.start for box, _ in first.blocks + second.blocks] == [(0, 0), (0, 3)]
    assert first.shape == second.shape == (6, 3)


WRONG = {
    "has both splits and dim": 'match="a"\nkind="fragment"\ndim=0\nsplits=[{dim=0,over=2}]',
    "needs a dim of its own and over": 'match="a"\nkind="fragment"\nsplits=[{dim=0,over=2},{dim=0,over=2}]',
    "each of splits needs": 'match="a"\nkind="fragment"\nsplits=[{dim=0}]',
    "one of splits is 3, and must be a table": 'match="a"\nkind="fragment"\nsplits=[3]',
    "wide is not a key of one of splits": 'match="a"\nkind="fragment"\nsplits=[{dim=0,wide=2}]',
    "kind is 'fragments'; it is one of": 'match="a"\nkind="fragments"',
    "is not a regular expression": 'match="("\nkind="unique"',
    "is a fragment without dim": 'match="a"\nkind="fragment"',
    "has both sizes and parts": 'match="a"\nkind="fragment"\ndim=0\nsizes=[1]\nparts=[1]',
    "dim is for fragments only": 'match="a"\nkind="unique"\ndim=0',
    "pattern 1: shape is not a key": 'match="a"\nkind="unique"\nshape=[1]',
    "pattern 1: dim is 'x', and must be int": 'match="a"\nkind="fragment"\ndim="x"',
    "pattern 1: match is missing": 'kind="unique"',
    "is not TOML": "match=",
}


@pytest.mark.parametrize("says", WRONG)
def test_a_wrong_pattern_is_one_sentence(says: str) -> None:
    with pytest.raises(UserError, match=says) as raised:
        read_patterns("[[pattern]]\n" + WRONG[says])
    assert "\n" not in str(raised.value)
