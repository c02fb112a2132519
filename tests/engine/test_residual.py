"""Fused backwards of a block against autograd's own, one op after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everstep.engine.layers import regions
from everstep.engine.layers.gpt import Block
from everstep.engine.layers.linear import LinearGrad, Queue, of_one_input
from everstep.engine.layers.residual import branched
from everstep.engine.layers.taken_over import take_over
from everstep.job.presets import shape


def test_a_branch_gives_its_input_and_its_norm_with_right_gradients() -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    around, normed = branched(x, weight, 1e-6)
    assert torch.equal(around, x)
    assert torch.allclose(normed, F.rms_norm(x, (8,), weight, 1e-6))
    assert torch.autograd.gradcheck(lambda x, w: branched(x, w, 1e-6), (x, weight))


def test_in_sixteen_bits_a_branch_is_as_near_as_torch() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(64, 256), torch.randn(256)
    grads = torch.randn(2, 64, 256)

    def gradients(dtype: torch.dtype, fused: bool) -> list[Tensor]:
        a, b = (t.to(torch.bfloat16).to(dtype).requires_grad_() for t in (x, weight))
        made = branched(a, b, 1e-6) if fused else (a * 1, F.rms_norm(a, (256,), b, 1e-6))
        return [
            t.double() for t in torch.autograd.grad(made, (a, b), tuple(grads.to(torch.bfloat16).to(dtype)))
        ]

    exact = gradients(torch.float64, fused=False)
    for own, torchs, right in zip(
        gradients(torch.bfloat16, fused=True), gradients(torch.bfloat16, fused=False), exact, strict=True
    ):
        assert float((own - right).abs().max()) <= 1.5 * float((torchs - right).abs().max())


def layers(*, bias: bool = False) -> tuple[list[nn.Linear], Queue]:
    torch.manual_seed(2)
    made = [nn.Linear(6, outputs, bias=bias).double() for outputs in (4, 3, 5)]
    queue: Queue = []
    for layer in made:
        take_over(layer, queue)
    return made, queue


@pytest.mark.parametrize("bias", [False, True], ids=["fused", "one by one"])
def test_linears_of_one_input_give_and_queue_what_each_would_by_itself(bias: bool) -> None:
    made, queue = layers(bias=bias)
    x = torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)
    grads = [torch.randn(2, 7, layer.out_features, dtype=torch.float64) for layer in made]
    outputs = of_one_input(x, *made)
    (found,) = torch.autograd.grad(outputs, x, grads)
    queued = {id(one.weight): one for one in queue if isinstance(one, LinearGrad)}
    queue.clear()
    alone = [layer(x) for layer in made]
    assert all(torch.equal(a, b) for a, b in zip(outputs, alone, strict=True))
    (right,) = torch.autograd.grad(alone, x, grads)
    assert torch.allclose(found, right, rtol=1e-12)
    for one in queue:
        assert isinstance(one, LinearGrad)
        other = queued.pop(id(one.weight))
        assert other.input is not None
        assert one.input is not None
        assert torch.equal(one.grad, other.grad)
        assert torch.equal(one.input, other.input)
    assert not queued


def test_a_block_with_fused_backwards_has_the_gradients_of_one_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    form = shape("gpt-tiny")
    torch.manual_seed(3)
    block = Block(form).double()
    queue: Queue = []
    take_over(block, queue)
    given = torch.randn(2, 16, form.width, dtype=torch.float64)

    def gradients() -> tuple[list[Tensor], dict[int, Tensor]]:
        queue.clear()
        block.zero_grad()
        x = given.clone().requires_grad_()
        block(x).square().sum().backward()
        made = {id(p): product() for one in queue for p, product in one.products()}
        assert x.grad is not None
        assert block.attention_norm.weight.grad is not None
        return [x.grad, block.attention_norm.weight.grad.clone()], made

    own, weights = gradients()
    monkeypatch.setattr(regions, "are_enabled", lambda: True)
    fused, fused_weights = gradients()
    assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(own, fused, strict=True))
    assert weights.keys() == fused_weights.keys()
    assert all(torch.allclose(weights[key], fused_weights[key], rtol=1e-9) for key in weights)
