"""List scheduling: run the step in virtual time, and whenever a worker is free give it the best op that is
ready.

The order of preference, and why:

    I before F     someone upstream waits for the gradient
    F before W     a worker downstream waits for the activation; none waits for a weight gradient
    F is barred    while the stash is full; only W makes room

Five habits refine it; each helps some shapes and hurts others, so a `Habit` switches them and the planner
keeps the best of a few:

    alternate       after an I, an F goes before the next I: one forward, one backward, or those below starve
    clear_a_place   after an I, with an F barred by a full stash, a W goes before the next I, so the F can go
    await_first     before the first gradient has come, rather idle than start an F that would delay it
    await_last      when no F is left, rather idle than start a W that would delay a gradient under way
    patience        rather idle than start a W that would delay any F or I under way, up to this share of the
                    W's time; only where the worker can afford it: its work and idle time so far must leave
                    room within the target, which is the lower bound

Stage 0 waits for no gradient: no worker waits for its output.

            0  F F F F . . . I W F I W F I W I W      "." is the wait for the first gradient: what the
            1    F F F . . I F I W F I W I W W        stash cannot fill, and the bound counts as idle
            2      F F . I F I W F I W I W W
            3        F I F I F I W F I W W W

Events are ends of ops (a heap) and arrivals after a hop (a queue: the hop is the same for all, so they come
in order). Everything is an index into flat lists: this loop is the planner's whole cost, about 2
microseconds an op.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import NamedTuple

from everstep.schedule.compact import Compact


class Habit(NamedTuple):
    alternate: bool = True
    clear_a_place: bool = True
    await_first: bool = True
    await_last: bool = False
    patience: float = 0.6


# In the order in which they did best over 48 instances of 4 to 16 stages. The last is plain list scheduling.
HABITS = (
    Habit(),
    Habit(await_first=False),
    Habit(await_last=True, patience=0.8),
    Habit(clear_a_place=False, await_last=True, patience=0.4),
    Habit(patience=0.4),
    Habit(await_first=False, patience=0.0),
    Habit(False, False, True, True, 0.6),
    Habit(False, False, False, False, 0.0),
)


def dispatch(problem: Compact, habit: Habit, target: float) -> list[list[int]]:
    """The op codes of every folded worker, in order. Cannot deadlock: see `docs/schedules.md`."""
    stages, hop, host, key = problem.stages, problem.hop, problem.host, problem.key
    forward, backward, weight, room = problem.forward, problem.backward, problem.weight, problem.room
    alternate, clear_a_place, await_first, await_last, patience = habit
    size, num_workers, last_stage = len(host), len(forward), stages - 1
    stage_of = [w % stages for w in range(num_workers)]
    forwards: list[list[int]] = [[] for _ in range(num_workers)]  # heaps of keys
    inputs: list[list[int]] = [[] for _ in range(num_workers)]
    weights: list[deque[int]] = [deque() for _ in range(num_workers)]  # units
    order: list[list[int]] = [[] for _ in range(num_workers)]
    held = [0] * num_workers
    forwards_left = [0] * num_workers
    gradient_due = [-1.0] * num_workers  # when the next gradient known to be under way arrives
    forward_due = [-1.0] * num_workers  # the same for activations
    spare = [target] * num_workers  # idle time a worker can afford if the step is to take `target`
    free_since = [0.0] * num_workers
    last_was_backward = bytearray(num_workers)
    had_backward = bytearray(num_workers)
    busy = bytearray(num_workers)
    running = [0] * num_workers
    ends: list[tuple[float, int]] = []
    arrivals: deque[tuple[float, int]] = deque()  # (time, unit): an activation; (time, ~unit): a gradient
    done_f, done_i, done_w = bytearray(problem.have_forward), problem.have_input, problem.have_weight
    gradient_here = bytearray(size)

    for unit in range(size):
        worker, stage = host[unit], unit % stages
        if not done_f[unit]:
            forwards_left[worker] += 1
            spare[worker] -= forward[worker] + backward[worker] + weight[worker]
            if stage == 0 or done_f[unit - 1]:
                heappush(forwards[worker], key[unit])
        if not done_i[unit]:
            gradient_here[unit] = stage == last_stage or done_i[unit + 1]
            if done_f[unit]:
                held[worker] += 1
                if gradient_here[unit]:
                    heappush(inputs[worker], key[unit])
        elif not done_w[unit]:
            held[worker] += 1
            weights[worker].append(unit)

    now = 0.0
    free = list(range(num_workers))
    while True:
        for worker in free:
            if busy[worker]:
                continue
            fs = forwards[worker]
            may_forward = fs and held[worker] < room[worker]
            if inputs[worker]:
                if may_forward:
                    kind = 0 if alternate and last_was_backward[worker] else 1
                elif clear_a_place and fs and weights[worker] and last_was_backward[worker]:
                    kind = 2
                else:
                    kind = 1
            elif may_forward:
                if await_first and not had_backward[worker]:
                    due = gradient_due[worker]
                    if now < due < now + forward[worker]:
                        continue
                kind = 0
            elif weights[worker]:
                due = gradient_due[worker] if stage_of[worker] else -1.0
                if await_last and not forwards_left[worker] and now < due < now + 0.67 * weight[worker]:
                    continue
                if patience and spare[worker] > 0.0:
                    if (
                        now < forward_due[worker]
                        and held[worker] < room[worker]
                        and (due <= now or forward_due[worker] < due)
                    ):
                        due = forward_due[worker]
                    wait = due - now
                    if 0.0 < wait <= patience * weight[worker] and wait < spare[worker]:
                        continue
                kind = 2
            else:
                continue
            if had_backward[worker]:
                spare[worker] -= now - free_since[worker]
            if kind == 1:
                unit = heappop(inputs[worker]) % size
                end = now + backward[worker]
                last_was_backward[worker] = had_backward[worker] = 1
                if stage_of[worker] and not done_i[unit - 1]:
                    above = host[unit - 1]
                    due = end + hop
                    if gradient_due[above] <= now or due < gradient_due[above]:
                        gradient_due[above] = due
            elif kind == 0:
                unit = heappop(fs) % size
                end = now + forward[worker]
                held[worker] += 1
                forwards_left[worker] -= 1
                last_was_backward[worker] = 0
                if stage_of[worker] != last_stage and not done_f[unit + 1]:
                    below = host[unit + 1]
                    due = end + hop
                    if forward_due[below] <= now or due < forward_due[below]:
                        forward_due[below] = due
            else:
                unit = weights[worker].popleft()
                end = now + weight[worker]
            busy[worker] = 1
            running[worker] = code = 3 * unit + kind
            order[worker].append(code)
            heappush(ends, (end, worker))

        if ends:
            now = ends[0][0]
            if arrivals and arrivals[0][0] < now:
                now = arrivals[0][0]
        elif arrivals:
            now = arrivals[0][0]
        else:
            return order
        free = []
        while ends and ends[0][0] == now:
            worker = heappop(ends)[1]
            busy[worker] = 0
            free_since[worker] = now
            free.append(worker)
            unit, kind = divmod(running[worker], 3)
            if kind == 0:
                done_f[unit] = 1
                if gradient_here[unit]:
                    heappush(inputs[worker], key[unit])
                elif done_i[unit]:
                    held[worker] -= 1  # run again for its output alone
                if stage_of[worker] != last_stage and not done_f[unit + 1]:
                    arrivals.append((now + hop, unit + 1))
            elif kind == 1:
                if done_w[unit]:
                    held[worker] -= 1
                else:
                    weights[worker].append(unit)
                if stage_of[worker] and not done_i[unit - 1]:
                    arrivals.append((now + hop, ~(unit - 1)))
            else:
                held[worker] -= 1
        while arrivals and arrivals[0][0] == now:
            unit = arrivals.popleft()[1]
            if unit >= 0:
                worker = host[unit]
                heappush(forwards[worker], key[unit])
            else:
                unit = ~unit
                worker = host[unit]
                if done_f[unit]:
                    heappush(inputs[worker], key[unit])
                else:
                    gradient_here[unit] = 1
            free.append(worker)
