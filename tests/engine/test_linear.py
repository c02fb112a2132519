"""The split backward is the normal backward, bit for bit; and a recompute happens once."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from everstep.engine.layers.linear import Queue, QueuedLinear
from everstep.engine.layers.taken_over import take_over


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 12, padding_idx=0)
        self.first = nn.Linear(12, 24)
        self.norm = nn.LayerNorm(24)
        self.second = nn.Linear(24, 5, bias=False)
        self.forwards = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.forwards += 1
        return self.second(torch.tanh(self.norm(self.first(self.table(tokens)))))


def twins() -> tuple[Net, Net, Queue]:
    torch.manual_seed(0)
    plain, ours = Net(), Net()
    ours.load_state_dict(plain.state_dict())
    queue: Queue = []
    assert take_over(ours, queue) == 3
    return plain, ours, queue


@pytest.mark.parametrize("recompute", [False, True])
def test_deferred_in_order_it_is_bitwise_the_normal_backward(recompute: bool) -> None:
    plain, ours, queue = twins()
    sums = {p: torch.zeros_like(p) for p in ours.parameters()}
    batches = [torch.randint(11, (3, 7)) for _ in range(4)]
    held = []
    for tokens in batches:
        plain(tokens).square().sum().backward()
        out = checkpoint(ours, tokens, use_reentrant=False) if recompute else ours(tokens)
        out.square().sum().backward()
        held.append(queue.copy())
        queue.clear()
    assert ours.forwards == (2 if recompute else 1) * len(batches)
    for entries in held:
        for entry in entries:
            product = {p: torch.zeros_like(p) for p in ours.parameters()}
            entry.run(product.__getitem__)
            for p, value in product.items():
                sums[p] += value
    assert ours.forwards == (2 if recompute else 1) * len(batches), "W recomputes nothing"
    for (name, a), b in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(a.grad, sums[b] if b.grad is None else b.grad), name
        assert (b.grad is None) == (not name.startswith("norm")), "only the norm's gradient comes with I"


def test_the_input_gradient_is_bitwise_the_same_for_any_rank_of_input() -> None:
    for shape in [(6,), (4, 6), (2, 3, 6), (2, 2, 3, 6)]:
        plain, ours = nn.Linear(6, 5), nn.Linear(6, 5)
        ours.load_state_dict(plain.state_dict())
        queue: Queue = []
        take_over(ours, queue)
        x = torch.randn(shape)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        plain(inputs[0]).sin().sum().backward()
        ours(inputs[1]).sin().sum().backward()
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        sums = {p: torch.zeros_like(p) for p in ours.parameters()}
        queue[0].run(sums.__getitem__)
        assert torch.equal(sums[ours.weight], plain.weight.grad)
        assert torch.equal(sums[ours.bias], plain.bias.grad)


class Tagged(nn.Linear):
    pass


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_what_is_taken_over_and_what_is_left_to_autograd() -> None:
    tagged, doubled = Tagged(2, 2), Doubled(2, 2)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    bounded = nn.Embedding(3, 2, max_norm=1.0)
    queue: Queue = []
    assert take_over(nn.ModuleList([tagged, doubled, normed, bounded]), queue) == 1
    assert isinstance(tagged.forward, QueuedLinear)
    assert type(tagged) is Tagged
    out = normed(doubled(tagged(torch.ones(2)))) + bounded(torch.tensor(1))
    out.sum().backward()
    assert len(queue) == 1
    assert tagged.weight.grad is None
    assert all(p.grad is not None for module in (doubled, normed, bounded) for p in module.parameters())


def test_a_frozen_weight_is_not_queued() -> None:
    layer = nn.Linear(3, 3)
    layer.weight.requires_grad_(False)
    queue: Queue = []
    take_over(layer, queue)
    layer(torch.ones(2, 3)).sum().backward()
    assert [(entry.weight, entry.bias is layer.bias) for entry in queue] == [(None, True)]


def test_weights_changed_between_f_and_i_are_an_error_not_a_wrong_gradient() -> None:
    layer = nn.Linear(3, 3)
    take_over(layer, [])
    out = layer(torch.ones(2, 3, requires_grad=True))
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
