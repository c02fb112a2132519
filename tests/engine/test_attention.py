"""Attention in exact jobs: the same numbers as torch's, and on a GPU the same bits every time."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from everstep.engine.layers import attention

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def drawn(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    rows, heads, length, size = shape
    generator = torch.Generator(device).manual_seed(sum(shape))
    made = torch.randn(rows, length, heads, size, generator=generator, device=device, dtype=dtype)
    return made.transpose(1, 2)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_on_a_cpu_attention_is_torchs_own(kv_heads: int) -> None:
    q, k, v = drawn(2, 4, 8, 16), drawn(2, kv_heads, 8, 16), drawn(2, kv_heads, 8, 16)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != 4)
    assert torch.equal(attention.causal(q, k, v), expected)


def plain_grads(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    given = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    with torch.enable_grad():
        return torch.autograd.grad(F.scaled_dot_product_attention(*given, is_causal=True), given, grad)


@pytest.mark.parametrize("way", ["library", "own"])
def test_every_gradient_reaches_its_tensor_whichever_kernel_makes_it(
    way: Literal["library", "own"], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True), torch.zeros(())

    monkeypatch.setattr(attention, "_forward", forward)
    monkeypatch.setattr(attention, "gradients", lambda q, k, v, out, grad, sums: plain_grads(q, k, v, grad))
    monkeypatch.setattr(
        attention.attention_library,
        "backward",
        lambda *_: lambda q, k, v, out, grad, sums: plain_grads(q, k, v, grad),
    )
    q, k, v = (drawn(2, 4, 8, 16 + i)[..., :16].detach().requires_grad_() for i in range(3))
    grad = drawn(2, 4, 8, 20)[..., :16]
    found = torch.autograd.grad(attention._WAYS[way](q, k, v), (q, k, v), grad)
    assert all(torch.allclose(a, b) for a, b in zip(found, plain_grads(q, k, v, grad), strict=True))


def test_a_front_end_that_cannot_be_used_says_so_and_leaves_it_to_the_other_way(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def built(*_: object) -> None:
        raise RuntimeError("no kernel for this")

    library = attention.attention_library
    monkeypatch.setattr(library, "_front_end", object)
    monkeypatch.setattr(library, "_built", built)
    shape = torch.Size((1, 1, 128, 64))
    assert library.backward.__wrapped__(shape, torch.bfloat16, torch.device("cpu")) is None
    assert "exact attention without cuDNN's front end: no kernel for this" in capfd.readouterr().err


def test_all_layers_use_one_workspace_which_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    library = attention.attention_library
    monkeypatch.setattr(library, "_spaces", {})
    cpu = torch.device("cpu")
    first = library._space(cpu, 1000)
    assert library._space(cpu, 500) is first
    assert library._space(cpu, 2000) is not first
    assert library._space(cpu, 1000).numel() == 2000


def test_blocks_of_the_kernels_fit_into_each_other() -> None:
    """Else the last keys of a block would be left out."""
    for queries, keys, *_ in attention._OF_QUERIES.values():
        assert queries % keys == 0
        assert attention.ROWS % queries == 0
    for queries, keys, *_ in attention._OF_KEYS.values():
        assert keys % queries == 0
        assert attention.ROWS % keys == 0


@needs_gpu
@pytest.mark.parametrize("way", ["library", "own"])
@pytest.mark.parametrize("shape", [(8, 16, 1024, 64), (8, 16, 2048, 128)])
def test_on_a_gpu_gradients_have_the_same_bits_every_time(shape: tuple[int, ...], way: str) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no Hopper GPU")
    if way == "library":
        pytest.importorskip("cudnn")
    torch.use_deterministic_algorithms(True)
    try:
        given = [drawn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        q, k, v = (tensor.detach().requires_grad_() for tensor in given[:3])
        assert attention.exact_way(q.shape, q.dtype, q.device) != "torch", "which takes twice as long"
        run = attention._WAYS[way]  # type: ignore[index]
        out = run(q, k, v)
        first = torch.autograd.grad(out, (q, k, v), given[3], retain_graph=True)
        for _ in range(20):
            again = torch.autograd.grad(out, (q, k, v), given[3], retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
            assert torch.equal(run(q, k, v), out)
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        theirs = torch.autograd.grad(expected, (q, k, v), given[3])
        for ours, other in zip((out, *first), (expected, *theirs), strict=True):
            assert (ours - other).abs().max() < 0.02 * other.abs().max()
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_trial_of_a_kernel_leaves_no_trace_in_a_recomputed_layer() -> None:
    """On a Hopper GPU the first recomputed layer of a built-in model raised CheckpointError: its forward had
    tried the kernels, its recompute had not.
    """
    tried: list[bool] = []

    def layer(x: Tensor) -> Tensor:
        if not tried:
            tried.append(attention._passes(attention._torch, x.shape, x.dtype, x.device))
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    x = drawn(1, 2, 8, 16).requires_grad_()
    checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
    assert tried == [True]
    assert x.grad is not None


@needs_gpu
def test_a_recomputed_layer_with_exact_attention_has_the_gradients_of_one_that_is_kept() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        grads = []
        for again in (False, True):
            attention.exact_way.cache_clear()
            x = drawn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
            made = (
                checkpoint(attention.causal, x, x, x, use_reentrant=False)
                if again
                else attention.causal(x, x, x)
            )
            made.float().pow(2).sum().backward()
            assert x.grad is not None
            grads.append(x.grad)
        assert torch.equal(*grads)
    finally:
        torch.use_deterministic_algorithms(False)
