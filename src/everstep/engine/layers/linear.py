"""The backward of a Linear in two halves: I now, W whenever the schedule says.

    F   y = x Wᵀ + b                     saves x and W
    I   dx = dy W                        returned to autograd; (W, b, x, dy) goes on a queue
    W   dW += dyᵀ x,  db += Σ dy         run from the queue, into the gradient buffer

A plain `nn.Linear` in any user's module is taken over by giving the instance a forward of ours, and a plain
`nn.Embedding` with it (its weight gradient is a dense table, too large to hold from I to W; its indices are
not); of transformers also GPT-2's `Conv1D`, a Linear whose weight lies the other way, Falcon's Linear, and
experts whose matrices are stacked.
Every other parameter gets its gradient from autograd during I: for those, I and W are one op. `share_in_two`
tells how many.

Rejected: `torch.distributed.pipelining`'s split of the autograd graph. It walks private graph state, fails on
outputs that are views, and under activation checkpointing runs the forward once more per parameter group;
here the recompute happens once, in I, because W needs only tensors that I already has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Into = Callable[[Tensor], Tensor]  # a parameter -> its view in the gradient buffer
Product = Callable[[], Tensor]  # makes a gradient
Products = list[tuple[Tensor, Product]]  # each with its parameter


_LINEAR_TOO = {"transformers.models.falcon.modeling_falcon.FalconLinear"}  # a forward of their own, as good
_ACROSS = {"transformers.pytorch_utils.Conv1D"}


class LinearGrad(NamedTuple):
    weight: Tensor | None
    bias: Tensor | None
    input: Tensor | None  # None where the weight is frozen
    grad: Tensor
    across: bool = False  # the weight is inputs x outputs

    @property
    def trained(self) -> list[Tensor]:
        weight = None if self.input is None else self.weight
        return [parameter for parameter in (weight, self.bias) if parameter is not None]

    def run(self, into: Into) -> None:
        grad = self.grad.reshape(-1, self.grad.shape[-1])
        if self.weight is not None and self.input is not None:
            x = self.input.reshape(-1, self.input.shape[-1])
            add_product(into(self.weight), *((x, grad) if self.across else (grad, x)))
        if self.bias is not None:
            into(self.bias).add_(_column_sums(grad))

    def products(self) -> Products:
        """As `run`, but each gradient by itself."""
        made: Products = []
        grad = self.grad.reshape(-1, self.grad.shape[-1])
        if self.weight is not None and self.input is not None:
            x = self.input.reshape(-1, self.input.shape[-1])
            made.append((self.weight, partial(_product, *((x, grad) if self.across else (grad, x)))))
        if self.bias is not None:
            made.append((self.bias, partial(_column_sums, grad)))
        return made


class EmbeddingGrad(NamedTuple):
    weight: Tensor
    tokens: Tensor
    padding: int
    grad: Tensor

    @property
    def trained(self) -> list[Tensor]:
        return [self.weight]

    def run(self, into: Into) -> None:
        into(self.weight).add_(self._table())

    def products(self) -> Products:
        return [(self.weight, self._table)]

    def _table(self) -> Tensor:
        made: Tensor = torch.ops.aten.embedding_dense_backward(
            self.grad, self.tokens, self.weight.shape[0], self.padding, False
        )
        return made


class GroupedGrad(NamedTuple):
    """Of stacked matrices: one for each expert, with rows of its own, those of one after the other's."""

    weight: Tensor
    input: Tensor
    grad: Tensor
    ends: tuple[int, ...]  # where the rows of each expert end
    across: bool  # a matrix is inputs x outputs

    @property
    def trained(self) -> list[Tensor]:
        return [self.weight]

    def run(self, into: Into) -> None:
        target = into(self.weight)
        for number, pair in self._pairs():
            add_product(target[number], *pair)

    def products(self) -> Products:
        return [(self.weight, self._stacked)]

    def _stacked(self) -> Tensor:
        made = torch.zeros(self.weight.shape, dtype=torch.float32, device=self.grad.device)
        for number, pair in self._pairs():
            made[number] = _product(*pair)
        return made

    def _pairs(self) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        for number, (start, stop) in enumerate(pairwise((0, *self.ends))):
            if start < stop:
                x, grad = self.input[start:stop], self.grad[start:stop]
                yield number, (x, grad) if self.across else (grad, x)


Queue = list[LinearGrad | EmbeddingGrad | GroupedGrad]


def contributions_of(queue: Queue, others: list[tuple[Tensor, Tensor]]) -> Products:
    """One product per parameter: a layer that is used twice adds up its own, in the order of I."""
    made: Products = [pair for queued in queue for pair in queued.products()]
    made += [(parameter, partial(_itself, gradient)) for parameter, gradient in others]
    by_parameter: dict[Tensor, list[Product]] = {}
    for parameter, product in made:
        by_parameter.setdefault(parameter, []).append(product)
    return [(parameter, partial(_sum_of, products)) for parameter, products in by_parameter.items()]


def _itself(gradient: Tensor) -> Tensor:
    return gradient


def _sum_of(products: list[Product]) -> Tensor:
    total = products[0]()
    for product in products[1:]:
        total = total.float() + product()
    return total


def add_product(target: Tensor, grad: Tensor, x: Tensor) -> None:
    """target += gradᵀ x, in the target's precision, in as few passes over memory as the types allow.

    One fused pass when the product can be accumulated where it is computed. For fp64 the product of a
    microbatch is rounded to fp32 first, so that it is the same bits whichever buffer it lands in.
    """
    if target.dtype == grad.dtype:
        target.addmm_(grad.t(), x)
    elif target.dtype == torch.float32 and grad.is_cuda:
        torch.addmm(target, grad.t(), x, out_dtype=torch.float32, out=target)
    else:
        target.add_(_product(grad, x))


def _product(grad: Tensor, x: Tensor) -> Tensor:
    """gradᵀ x, in fp32 where the device can keep what it accumulates."""
    if grad.dtype == torch.float32 or not grad.is_cuda:
        return torch.mm(grad.t(), x)
    return torch.mm(grad.t(), x, out_dtype=torch.float32)


def _column_sums(grad: Tensor) -> Tensor:
    return grad.sum(0) if grad.dtype == torch.float32 else grad.sum(0, dtype=torch.float32)


def _alone(x: Tensor | None) -> Tensor | None:
    """Without the graph that made it, which would live on in the queue."""
    return None if x is None else x.detach()


def _queued(ctx: Any, grad: Tensor, *, across: bool) -> Tensor:
    """Queue the weight gradient of a linear map, as far as it is needed; its weight."""
    x, weight = ctx.saved_tensors
    _, *needed, _ = ctx.needs_input_grad
    if any(needed):
        ours = [p if need else None for p, need in zip((ctx.weight, ctx.bias), needed, strict=True)]
        ctx.queue.append(LinearGrad(weight=ours[0], bias=ours[1], input=_alone(x), grad=grad, across=across))
    found: Tensor = weight
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, queue: Queue) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.weight, ctx.bias, ctx.queue = weight, bias, queue  # the objects: a saved tensor may be an alias
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        (grad,) = grads
        weight = _queued(ctx, grad, across=False)
        return grad.matmul(weight) if ctx.needs_input_grad[0] else None, None, None, None


class _Conv1D(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, queue: Queue) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.weight, ctx.bias, ctx.queue = weight, bias, queue
        return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        (grad,) = grads
        weight = _queued(ctx, grad, across=True)
        return grad.matmul(weight.t()) if ctx.needs_input_grad[0] else None, None, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, padding: int | None, queue: Queue) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.padding, ctx.queue = weight, -1 if padding is None else padding, queue
        return nn.functional.embedding(tokens, weight, padding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        (tokens,) = ctx.saved_tensors
        ctx.queue.append(EmbeddingGrad(ctx.weight, tokens, ctx.padding, *grads))
        return None, None, None, None


def queued_linear(x: Tensor, weight: Tensor, bias: Tensor | None, queue: Queue) -> Tensor:
    output: Tensor = _Linear.apply(x, weight, bias, queue)  # type: ignore[no-untyped-call]
    return output


def of_one_input(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    """What these Linears make of x. Their gradients of x take no pass of their own to be added up, where all
    are plain ones of ours; it rounds otherwise than one Linear after the other.
    """
    forwards = [layer.forward for layer in layers]
    plain = [one for one in forwards if isinstance(one, QueuedLinear) and one.module.bias is None]
    if len(plain) < len(layers) or not all(one.module.weight.requires_grad for one in plain):
        return [layer(x) for layer in layers]
    return list(_Linears.apply(x, plain[0].queue, *(one.module.weight for one in plain)))  # type: ignore[no-untyped-call]


def queued_embedding(tokens: Tensor, weight: Tensor, padding: int | None, queue: Queue) -> Tensor:
    output: Tensor = _Embedding.apply(tokens, weight, padding, queue)  # type: ignore[no-untyped-call]
    return output


class _Linears(torch.autograd.Function):
    """Several of one input. What they give back to it is added up inside the products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, queue: Queue, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.weights, ctx.queue = weights, queue
        return tuple(nn.functional.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        for parameter, grad in zip(ctx.weights, grads, strict=True):
            ctx.queue.append(LinearGrad(weight=parameter, bias=None, input=_alone(x), grad=grad))
        none = (None,) * (1 + len(weights))
        if not ctx.needs_input_grad[0]:
            return None, *none
        flat = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        total = flat[0].matmul(weights[0])
        for grad, weight in zip(flat[1:], weights[1:], strict=True):
            total.addmm_(grad, weight)
        return total.view(x.shape), *none


def product_of_groups(x: Tensor, weight: Tensor, ends: tuple[int, ...]) -> Tensor:
    """Rows up to each end times the matrix (inputs x outputs) of their expert; at once, where torch can."""
    even = all(size * x.itemsize % 16 == 0 for size in weight.shape[1:])  # what its kernels ask for
    fitting = x.is_cpu or (x.is_cuda and x.dtype == torch.bfloat16)
    if even and fitting and hasattr(torch, "_grouped_mm"):
        offsets = torch.tensor(ends, dtype=torch.int32, device=x.device)
        return torch._grouped_mm(x.contiguous(), weight, offs=offsets)
    parts = zip(pairwise((0, *ends)), weight, strict=True)
    return torch.cat([x[start:stop] @ matrix for (start, stop), matrix in parts])


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends: tuple[int, ...], across: bool, queue: Queue
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.weight, ctx.ends, ctx.across, ctx.queue = weight, ends, across, queue
        return product_of_groups(x, weight if across else weight.transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.queue.append(GroupedGrad(ctx.weight, x.detach(), grad, ctx.ends, ctx.across))
        back = None
        if ctx.needs_input_grad[0]:
            back = product_of_groups(grad, weight.transpose(1, 2) if ctx.across else weight, ctx.ends)
        return back, None, None, None, None


def through_experts(part: Any, x: Tensor, chosen: Tensor, weights: Tensor, queue: Queue | None) -> Tensor:
    """Experts in the form that transformers gives them (`use_experts_implementation`), and ours: tokens are
    sorted by expert, so that those of each are multiplied at once. A queue gets the weight gradients.
    """
    numbers, order = chosen.reshape(-1).sort(stable=True)
    up, down = part.gate_up_proj if part.has_gate else part.up_proj, part.down_proj
    count, rows = down.shape[0], len(numbers)
    if x.is_meta:  # where only shapes are looked at: as if all experts got as many
        ends = tuple(rows * number // count for number in range(1, count + 1))
    else:
        every = torch.arange(count, device=x.device)
        ends = tuple(torch.searchsorted(numbers, every, right=True).tolist())

    def product(x: Tensor, weight: Tensor) -> Tensor:
        x = x.to(weight.dtype)
        if queue is None:
            return product_of_groups(x, weight if part.is_transposed else weight.transpose(1, 2), ends)
        made: Tensor = _Grouped.apply(x, weight, ends, part.is_transposed, queue)  # type: ignore[no-untyped-call]
        return made

    inside = product(x.index_select(0, order.div(chosen.shape[-1], rounding_mode="floor")), up)
    if part.has_bias:
        inside = inside + (part.gate_up_proj_bias if part.has_gate else part.up_proj_bias)[numbers]
    made = product(part._apply_gate(inside) if part.has_gate else part.act_fn(inside), down)
    if part.has_bias:
        made = made + part.down_proj_bias[numbers]
    if getattr(part, "has_post_expert_norm", False):
        made = part.post_expert_norm(made)
    made = made * weights.reshape(-1).index_select(0, order).unsqueeze(-1)
    back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=x.device))
    return made.index_select(0, back).view(*chosen.shape, -1).sum(-2).to(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class QueuedExperts:
    """What stacked experts run as their forward, once they are taken over."""

    module: Any
    queue: Queue

    def __call__(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return through_experts(self.module, hidden_states, chosen, weights, self.queue)


@dataclass(frozen=True, slots=True, eq=False)
class QueuedLinear:
    """What an nn.Linear runs as its forward, once it is taken over."""

    module: Any  # with a weight and a bias, read at every call
    queue: Queue

    def __call__(self, input: Tensor) -> Tensor:
        return queued_linear(input, self.module.weight, self.module.bias, self.queue)


@dataclass(frozen=True, slots=True, eq=False)
class QueuedConv1D:
    """The same for transformers' Conv1D, which is not imported for this."""

    module: Any
    queue: Queue

    def __call__(self, x: Tensor) -> Tensor:
        output: Tensor = _Conv1D.apply(x, self.module.weight, self.module.bias, self.queue)  # type: ignore[no-untyped-call]
        return output


@dataclass(frozen=True, slots=True, eq=False)
class QueuedEmbedding:
    """The same for an nn.Embedding."""

    module: Any
    queue: Queue

    def __call__(self, input: Tensor) -> Tensor:
        return queued_embedding(input, self.module.weight, self.module.padding_idx, self.queue)


def take_over(module: nn.Module, queue: Queue) -> int:
    """Every plain Linear and Embedding in `module` queues its weight gradient from now on; how many."""
    taken = 0
    for part in module.modules():
        queued = _queued_forward(part)
        if queued is not None:
            part.forward = queued(part, queue)
            taken += 1
    return taken


def share_in_two(modules: Iterable[nn.Module]) -> float:
    """Of the trained numbers in these modules, the part whose I and W are two ops."""
    taken, total = 0, 0
    for part in (part for module in modules for part in module.modules()):
        own = [p for p in part.parameters(recurse=False) if p.requires_grad]
        total += sum(p.numel() for p in own)
        if _queued_forward(part) is not None:
            taken += sum(p.numel() for p in own)
    return taken / total if total else 1.0


def largest_in_one(layers: Mapping[str, nn.Module]) -> str | None:
    """The name of the largest trained parameter whose I and W are one op."""
    sizes = {
        f"{layer}.{path}.{name}".replace("..", "."): p.numel()
        for layer, module in layers.items()
        for path, part in module.named_modules()
        for name, p in part.named_parameters(recurse=False)
        if p.requires_grad and _queued_forward(part) is None
    }
    return max(sizes, key=sizes.__getitem__, default=None)


def _has_form_of_experts(part: Any) -> bool:
    known = all(hasattr(part, key) for key in ("has_gate", "has_bias", "is_transposed", "_apply_gate"))
    if not known or "forward" in vars(part):
        return False
    matrices = [
        part._parameters.get(key) for key in ("gate_up_proj" if part.has_gate else "up_proj", "down_proj")
    ]
    # Another implementation that a user has chosen stays.
    usual = getattr(getattr(part, "config", None), "_experts_implementation", "grouped_mm") == "grouped_mm"
    return usual and all(isinstance(one, nn.Parameter) and one.ndim == 3 for one in matrices)


def _queued_forward(part: nn.Module) -> Callable[[Any, Queue], Callable[..., Tensor]] | None:
    if _has_form_of_experts(part):
        return QueuedExperts
    # A parametrized weight is no parameter of the module but computed from one: autograd must see it.
    if not isinstance(part._parameters.get("weight"), nn.Parameter) or "forward" in vars(part):
        return None
    name = f"{type(part).__module__}.{type(part).__qualname__}"
    if isinstance(part, nn.Linear) and (type(part).forward is nn.Linear.forward or name in _LINEAR_TOO):
        return QueuedLinear
    if name in _ACROSS and part._parameters.get("bias") is not None:
        return QueuedConv1D
    if isinstance(part, nn.Embedding) and type(part).forward is nn.Embedding.forward:
        plain = part.max_norm is None and not part.sparse and not part.scale_grad_by_freq
        return QueuedEmbedding if plain else None
    return None
