"""How much of the cluster each owner may ask for: checked when a task is submitted, resized or reshaped.

    [default]            for owners without a table of their own; without it there is no limit
    workers = 64         of all unfinished tasks together, with those that `max_replicas` allows
    tasks = 8            unfinished ones
    weight = 1.0         the highest that a task may have: weight is priority

    [owner.alice]
    workers = 256

The file is read again when it changes. Running tasks are not touched by a quota that became smaller. An admin
is an owner like any other; the cluster's one token ("an operator") has no limit.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.core.cluster.task import OVER, Task
from everstep.errors import UserError
from everstep.job.tables import read
from everstep.protocol.messages import AN_OPERATOR, TaskSubmitted
from everstep.protocol.shape import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    workers: int | None = None  # None: no limit
    tasks: int | None = None
    weight: float | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "tasks", "weight"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UserError(f"{name} is {value}; a quota is 0 or more.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    workers: int
    tasks: int


def usage_of(owner: str, tasks: Iterable[Task], *, without: str = "") -> Usage:
    """Of its unfinished tasks; `without`: but not this one."""
    mine = [t for t in tasks if t.request.owner == owner and t.state not in OVER and t.name != without]
    return Usage(workers=sum(_most_workers(task) for task in mine), tasks=len(mine))


def _most_workers(task: Task) -> int:
    """What it has, or what the planner may give it by itself."""
    if task.bounds.is_shape_kept:
        return num_workers(task.shape)
    return asked_workers(task.request, task.shape)


def asked_workers(request: TaskSubmitted, shape: Shape) -> int:
    return max(num_workers(shape), request.most_workers * shape.shards)


def num_workers(shape: Shape) -> int:
    return shape.replicas * shape.stages * shape.shards


class Quotas:
    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._default = Quota()
        self._owners: dict[str, Quota] = {}
        self._read()

    def of(self, owner: str) -> Quota:
        self._read()
        return Quota() if owner == AN_OPERATOR else self._owners.get(owner, self._default)

    def check(self, owner: str, tasks: Iterable[Task], *, task: str, workers: int, weight: float) -> None:
        """`task` with so many workers and this weight, beside the other tasks of its owner."""
        quota, used = self.of(owner), usage_of(owner, tasks, without=task)
        wanted = used.workers + workers
        if quota.workers is not None and wanted > quota.workers:
            raise UserError(
                f"{owner} would have {wanted} workers in {used.tasks + 1} tasks, and the quota is "
                f"{quota.workers}; ask for fewer, or wait until another task has ended."
            )
        if quota.tasks is not None and used.tasks + 1 > quota.tasks:
            raise UserError(
                f"{owner} would have {used.tasks + 1} unfinished tasks, and the quota is {quota.tasks}; wait "
                "until one has ended, or cancel one."
            )
        if quota.weight is not None and weight > quota.weight:
            raise UserError(f"weight is {weight:g}, and the most that {owner} may give is {quota.weight:g}.")

    def _read(self) -> None:
        if self._path is None:
            return
        try:
            found = self._path.stat()
        except OSError:
            self._default, self._owners, self._seen = Quota(), {}, None
            return
        if (mark := (found.st_mtime_ns, found.st_size, found.st_ino)) == self._seen:
            return
        self._default, self._owners = read_quotas(self._path)
        self._seen = mark


def read_quotas(path: Path) -> tuple[Quota, dict[str, Quota]]:
    try:
        document: dict[str, Any] = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"the quotas file {path} cannot be read: {error}.") from None
    owners = document.pop("owner", {})
    default = read(Quota, document.pop("default", {}), "default")
    if document or not isinstance(owners, dict):
        raise UserError(f"the quotas file {path} must contain [default] and [owner.NAME] tables only.")
    return default, {name: read(Quota, table, f"owner.{name}") for name, table in owners.items()}
