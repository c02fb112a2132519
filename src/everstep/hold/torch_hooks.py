# mypy: disable-error-code="assignment, attr-defined, no-untyped-call, unused-ignore"
"""Where a held run reaches into torch: groups, optimizers, DDP and loaders of the script. Once per process,
before the script begins.

DDP makes its buckets anew after the first backward, in the order in which gradients came, and agrees on it
by broadcasts. A newcomer must have the buckets its peers have, so it is given these broadcasts apart.

To iterate a DataLoader draws from torch's generator; a newcomer that takes an epoch up in the middle must not
draw for what its predecessor had drawn before the record was made.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from everstep.hold.groups import HeldGroup
from everstep.hold.rank import HeldRank

BACKEND = "everstep"


def install(rank: HeldRank) -> None:
    _groups(rank)
    _optimizers(rank)
    _ddp(rank)
    _loaders(rank)


def _groups(rank: HeldRank) -> None:
    asked: dict[str, Any] = {}

    def create(options: Any, _: Any) -> HeldGroup:
        return HeldGroup(
            rank,
            options.group_rank,
            options.global_ranks_in_group or range(options.group_size),
            str(options.group_id),
            asked["kinds"],
            options.timeout or timedelta(minutes=30),
        )

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
    real = c10d._new_process_group_helper

    def new_group(
        size: int, own: int, ranks: Any, backend: Any, store: Any, name: Any, *more: Any, **named: Any
    ) -> Any:
        if rank.is_forked:
            return real(size, own, ranks, backend, store, name, *more, **named)
        config = dist.BackendConfig(dist.Backend(backend if backend else "undefined"))
        kinds = {device: str(kind) for device, kind in config.get_device_backend_map().items()}
        kinds = {device: kind for device, kind in kinds.items() if device in ("cpu", "cuda")}
        if not torch.cuda.is_available() and "cpu" in kinds:
            kinds.pop("cuda", None)
        if not kinds or set(kinds.values()) - {"gloo", "nccl"}:
            rank.refuse(f"its process group has the backend {backend}; gloo and nccl can be held")
            return real(size, own, ranks, backend, store, name, *more, **named)
        asked["kinds"] = kinds
        named.pop("device_id", None)
        named.pop("backend_options", None)
        group, prefixed = real(size, own, ranks, BACKEND, store, name, *more, **named)
        if isinstance(group, HeldGroup):  # what a script asks torch about it is what it asked for
            c10d._world.pg_map[group] = (str(backend), prefixed)
            c10d._world.pg_backend_config[group] = str(config)
        return group, prefixed

    c10d._new_process_group_helper = new_group


def _optimizers(rank: HeldRank) -> None:
    real = torch_optimizer.Optimizer.__init__

    def begin(self: Any, *arguments: Any, **named: Any) -> None:
        real(self, *arguments, **named)
        if all(each() is not self for each in rank.optimizers):
            rank.optimizers.append(weakref.ref(self))

    torch_optimizer.Optimizer.__init__ = begin

    def before(optimizer: Any, *_: Any) -> None:
        if not rank.is_forked:
            rank.before_update(optimizer)

    def after(optimizer: Any, *_: Any) -> None:
        if not rank.is_forked:
            rank.after_update(optimizer)

    torch_optimizer.register_optimizer_step_pre_hook(before)
    torch_optimizer.register_optimizer_step_post_hook(after)


# ------------------------------------------------------------------ DDP


def _ddp(rank: HeldRank) -> None:
    real, real_forward = DistributedDataParallel.__init__, DistributedDataParallel._pre_forward

    def begin(self: Any, *arguments: Any, **named: Any) -> None:
        rank.is_in_ddp = True
        try:
            real(self, *arguments, **named)
        finally:
            rank.is_in_ddp = False
        rank.ddps.append(weakref.ref(self))

    def pre_forward(self: Any, *arguments: Any, **named: Any) -> Any:
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._everstep_synced = getattr(self, "_everstep_synced", 0) + 1
        if torch.is_grad_enabled() and getattr(self, "reducer", None) is not None:
            _rebuild_buckets(rank, self)
        return real_forward(self, *arguments, **named)

    DistributedDataParallel.__init__ = begin
    DistributedDataParallel._pre_forward = pre_forward


def _rebuild_buckets(rank: HeldRank, ddp: Any) -> None:
    rank.is_structural = True
    try:
        ddp.reducer._rebuild_buckets()
    finally:
        rank.is_structural = False


def ddp_state(ddp: Any) -> dict[str, Any]:
    """What it knows of its past: whether it has agreed with others, and whether the next forward will."""
    synced = getattr(ddp, "_everstep_synced", 0)
    return {"synced": synced, "forward": bool(getattr(ddp, "require_forward_param_sync", True))}


def ddp_arrives(ddp: Any, had: dict[str, Any], interval: int) -> int:
    """A newcomer's, with what its predecessor knew. How many collectives of a first iteration only this one
    will issue.
    """
    ddp.require_forward_param_sync = had["forward"]
    group = ddp.process_group
    if not had["synced"]:
        return 0
    if getattr(ddp, "reducer", None) is None or not isinstance(group, HeldGroup):
        return 0
    ddp.reducer._push_all_rebuilt_params()
    if earlier := [answer for at, answer in group.structure if at < interval]:
        group.replayed = earlier
        ddp.reducer._rebuild_buckets()
        group.replayed = []
    ddp._everstep_synced = 1
    return int(bool(ddp.static_graph))


# ------------------------------------------------------------------ loaders


def _loaders(rank: HeldRank) -> None:
    real, real_iter, real_next = DataLoader.__init__, DataLoader.__iter__, _BaseDataLoaderIter.__next__

    def begin(self: Any, *arguments: Any, **named: Any) -> None:
        real(self, *arguments, **named)
        rank.loaders.append(weakref.ref(self))

    def iterate(self: Any) -> Any:
        resumed = self.__dict__.pop("_everstep_resumed", None)
        now = torch.get_rng_state()
        if resumed is not None:
            torch.set_rng_state(resumed["at"])
        found = real_iter(self)
        if resumed is not None:
            found._everstep_again, found._everstep_random = resumed["given"], torch.get_rng_state()
            torch.set_rng_state(now)
        found._everstep_at = now if resumed is None else resumed["at"]
        object.__setattr__(self, "_everstep_iterator", weakref.ref(found))
        return found

    def following(self: Any) -> Any:
        again = getattr(self, "_everstep_again", 0)
        if not again:
            return real_next(self)
        now = torch.get_rng_state()
        torch.set_rng_state(self._everstep_random)
        try:
            return real_next(self)
        finally:
            self._everstep_again, self._everstep_random = again - 1, torch.get_rng_state()
            torch.set_rng_state(now)

    DataLoader.__init__ = begin
    DataLoader.__iter__ = iterate
    _BaseDataLoaderIter.__next__ = following


def loader_state(loader: Any) -> dict[str, Any] | None:
    """Within an epoch: how much it has given, and the generator's state when it began. None: between two."""
    if (resumed := getattr(loader, "_everstep_resumed", None)) is not None:
        return dict(resumed)  # a newcomer's, before it has taken the first of this epoch
    iterator = getattr(loader, "_everstep_iterator", lambda: None)()
    if iterator is None or not _is_midway(iterator):
        return None
    return {"given": iterator._num_yielded, "at": iterator._everstep_at}


def _is_midway(iterator: Any) -> bool:
    try:
        return bool(0 < iterator._num_yielded < len(iterator._index_sampler))
    except TypeError:  # of a length that nobody knows
        return bool(iterator._num_yielded)


def loader_arrives(loader: Any, progress: dict[str, Any] | None) -> None:
    if loader is not None and progress is not None and loader_state(loader) is None:
        loader._everstep_resumed = progress
