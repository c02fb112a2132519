"""Ends a rank of a held run at one place of a step, once, as HELD_KILL says: RANK,STEP,WHERE[,NTH[,HOW]].

WHERE: forward, bucket (before its NTH is issued), in-bucket (2 ms after), after-bucket (once it is done),
clip, other (before a collective outside of backward), opt (inside optimizer.step), after-opt, eval, save,
between (before the snapshot); with STEP -1, in a replacement: start (in its prelude), load (once it has its
state). HOW: kill, stop, raise, exit. Several are parted by `;`. A script calls `arm()` when torch is
imported; nothing happens without the variable. HELD_LIVES_S: every process is killed after a random time, of
so many seconds on average.
"""

from __future__ import annotations

import importlib
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import everstep
from everstep.hold import door
from everstep.hold.groups import HeldGroup


def arm() -> None:
    if lives_s := os.environ.get("HELD_LIVES_S"):
        at_random(float(lives_s))
    held, given = door.current, os.environ.get("HELD_KILL", "")
    if held is None or not given or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return
    for each in given.split(";"):
        rank, step, where, *more = each.split(",")
        if int(rank) == held.rank:
            _Kill(held, int(step), where, int(more[0]) if more else 0, more[1] if more[1:] else "kill").arm()


def is_replacement() -> bool:
    return door.current is not None and door.current.is_replacement


class _Kill:
    def __init__(self, held: Any, step: int, where: str, nth: int, how: str) -> None:
        self._held, self._step, self._where, self._nth, self._how = held, step, where, nth, how
        self._seen: Counter[str] = Counter()

    def at(self, where: str) -> bool:
        if self._held.book.interval != self._step or where != self._where:
            return False
        self._seen[where] += 1
        return self._seen[where] == self._nth + 1 and not self._mark.exists()

    @property
    def _mark(self) -> Path:
        """In a folder that the rank's processes share: a replacement comes to the same place."""
        name = f"killed-{self._step}-{self._where}-{self._nth}"
        return Path(os.environ["TORCHELASTIC_ERROR_FILE"]).with_name(name)

    def strike(self) -> None:
        self._mark.touch()
        sys.stdout.flush()
        match self._how:
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise OSError("planted: connection to the storage lost")
            case "exit":
                sys.exit(3)
            case _:
                os.kill(os.getpid(), signal.SIGKILL)

    def here(self, where: str) -> None:
        if self.at(where):
            self.strike()

    def arm(self) -> None:
        torch.nn.modules.module.register_module_forward_pre_hook(
            lambda module, _: self.here("forward" if module.training else "eval")
        )
        self._groups()
        clip: Any = importlib.import_module("torch.nn.utils.clip_grad")
        self._before(clip, "_clip_grads_with_norm_", "clip")
        self._before(torch, "save", "save")
        self._before(everstep, "snapshot", "between")
        if self._held.is_replacement:
            self._before(everstep, "restore", "start")
            self._before(everstep, "snapshot", "load")
        adam: Any = importlib.import_module("torch.optim.adam")
        real = adam.adam

        def inside(*arguments: Any, **named: Any) -> None:
            real(*arguments, **named)
            self.here("opt")

        adam.adam = inside
        register_optimizer_step_post_hook(lambda *_: self.here("after-opt"))

    def _before(self, module: Any, name: str, where: str) -> None:
        real = getattr(module, name)

        def first(*arguments: Any, **named: Any) -> Any:
            self.here(where)
            return real(*arguments, **named)

        setattr(module, name, first)

    def _groups(self) -> None:
        real = HeldGroup.run

        def run(group: HeldGroup, kind: str, *arguments: Any, **named: Any) -> Any:
            is_backward = torch._C._current_graph_task_id() != -1
            if is_backward:
                self.here("bucket")
            elif kind in ("allreduce", "barrier"):
                self.here("other")
            work = real(group, kind, *arguments, **named)
            if is_backward and self.at("in-bucket"):
                threading.Timer(0.002, self.strike).start()
            if is_backward and self.at("after-bucket"):
                work.wait()
                self.strike()
            return work

        HeldGroup.run = run  # type: ignore[method-assign]


def at_random(mean_s: float) -> None:
    """From its first snapshot on, this process, also a replacement, lives for a random time."""
    held = door.current
    if held is None:
        return
    time_s = random.SystemRandom().expovariate(1.0 / mean_s)

    def wait() -> None:
        while held.book.interval < 0:
            time.sleep(0.005)
        time.sleep(time_s)
        if held.is_dismissed:  # all scripts have ended
            return
        print(f"\nkilled in {moment()}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


# By functions of a stack, outermost ones last: where a script is.
MOMENTS = {
    "clip_grad_norm_": "clip",
    "backward": "backward",
    "evaluate": "evaluation",
    "snapshot": "snapshot",
    "save": "save",
    "barrier": "save",
    "all_reduce": "logging",
    "forward": "forward",
}


def moment() -> str:
    """Of the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    names: list[tuple[str, str]] = []
    while frame is not None:
        names.append((frame.f_code.co_name, frame.f_code.co_filename))
        frame = frame.f_back
    if any("/torch/optim/" in file for _, file in names):
        return "update"
    functions = {name for name, _ in names}
    return next((moment for name, moment in MOMENTS.items() if name in functions), "between")
