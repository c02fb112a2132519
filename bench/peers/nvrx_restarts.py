"""NVRx's in-process wrapper, as both trials of it are started."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import nvidia_resiliency_ext.inprocess as inprocess

INTERVALS = (
    "monitor_thread_interval",
    "monitor_process_interval",
    "heartbeat_interval",
    "progress_watchdog_interval",
    "last_call_wait",
)


def run(train: Callable[[Any], None], *, interval_ms: int | None = None, **timeouts: timedelta) -> None:
    """`train` gets the call wrapper. Without `interval_ms` NVRx's own intervals (1 s) hold."""
    intervals = dict.fromkeys(INTERVALS, timedelta(milliseconds=interval_ms)) if interval_ms else {}
    # NVRx's own store listens one port higher; the training's store moves on with every restart.
    store = {"host_name": os.environ["MASTER_ADDR"], "port": int(os.environ["MASTER_PORT"]) + 1}

    # The argument is recognised by its type; without one the function would fail, and be restarted, for ever.
    def restartable(call_wrapper=None) -> None:
        train(call_wrapper)

    restartable.__annotations__["call_wrapper"] = inprocess.CallWrapper
    inprocess.Wrapper(store_kwargs=store, **timeouts, **intervals)(restartable)()
