"""Hashes of tensors: equal bits, equal hash; one flipped bit, another hash. For votes (`core.worker.votes`).

On a CPU xxhash reads the bytes. On a GPU the bytes stay there: each word of 32 bits is multiplied with an odd
number that depends on its place, and the products are added up modulo 2^64, in any order. A changed word
changes the sum, because an odd number times a difference is not zero. Hashes of different kinds of devices
are never compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import xxhash
from torch import Tensor

Partial = str | Tensor  # a hash, or one that is still on its device
_STRETCH = 1 << 24  # words at a time: numbers of their places take twice their memory
_ODD = -7046029254386353131  # 2^64 divided by the golden ratio, as a signed number


def partial_hash(tensors: Iterable[Tensor]) -> Partial:
    """Of some tensors together, in their order."""
    parts = [_of_one(tensor.detach()) for tensor in tensors]
    if all(isinstance(part, str) for part in parts):
        return parts[0] if len(parts) == 1 else xxhash.xxh3_64_hexdigest(" ".join(map(str, parts)).encode())
    total: Tensor | None = None
    for part in parts:
        assert isinstance(part, Tensor)
        total = part if total is None else total * _ODD + part
    assert total is not None
    return total


def settled(hashes: Mapping[str, Partial]) -> dict[str, str]:
    """As text. The host waits once for the device."""
    waiting = {name: found for name, found in hashes.items() if isinstance(found, Tensor)}
    numbers = torch.stack(list(waiting.values())).tolist() if waiting else []
    texts = {
        name: f"{number & 0xFFFFFFFFFFFFFFFF:016x}" for name, number in zip(waiting, numbers, strict=True)
    }
    return {name: texts[name] if isinstance(found, Tensor) else found for name, found in hashes.items()}


def _of_one(tensor: Tensor) -> Partial:
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    raw = tensor.view(-1).view(torch.uint8)
    if tensor.device.type == "cpu":
        return str(xxhash.xxh3_64_hexdigest(raw.numpy().data))
    if rest := raw.numel() % 4:
        raw = torch.cat([raw, raw.new_zeros(4 - rest)])
    return _sum_of_words(raw.view(torch.int32))


def _sum_of_words(words: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for begin in range(0, words.numel(), _STRETCH):
        stretch = words[begin : begin + _STRETCH]
        places = torch.arange(begin + 1, begin + 1 + stretch.numel(), dtype=torch.int64, device=words.device)
        places.mul_(_ODD)
        places.bitwise_xor_(places >> 29).bitwise_or_(1)
        total += (places * (stretch.to(torch.int64) + 0x9E3779B9)).sum()
    return total
