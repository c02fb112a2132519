"""Replicas that hold the same tensors divide the writing of them."""

from everstep.layout import Tensor, merged
from everstep.layout import builders as build
from everstep.layout.sharing import writing_shares


def test_replicas_share_the_writing() -> None:
    weights = [Tensor(name=f"w{i}", shape=(1024, 64)) for i in range(3)]
    layout = merged([build.replicated(w, [0, 1, 2, 3]) for w in weights])
    sizes = [sum(s.box.volume for s in shares) for shares in writing_shares(layout).values()]
    assert sizes == [3 * 1024 * 64 // 4] * 4
