"""Whole schedules as text, with an exact inverse: `parse_schedule(s.text()) == s` for every schedule.

    0:1 = 1F0.0 1F0.1 1I0.0 1W0.0 1I0.1 1W0.1 1R 1U

One line a worker, replica:stage, then its ops in order. Blank lines and `#` comments are allowed when
reading, so that a schedule can be kept in a file, edited by hand and checked.
"""

from __future__ import annotations

from everstep.errors import UserError
from everstep.protocol.ops import Op, Worker, parse_op, parse_worker
from everstep.schedule.schedule import Schedule


def parse_schedule(text: str) -> Schedule:
    """The inverse of `Schedule.text`."""
    ops: dict[Worker, tuple[Op, ...]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        name, equals, rest = content.partition("=")
        if not equals:
            raise UserError(f"line {number} has no '='; write a worker and its ops, like 0:1 = 1F0.0 1R 1U.")
        try:
            worker = parse_worker(name.strip())
            ops_here = tuple(parse_op(word) for word in rest.split())
        except UserError as error:
            raise UserError(f"line {number}: {error}") from None
        if worker in ops:
            raise UserError(f"line {number}: worker {worker} has a line already; keep one.")
        ops[worker] = ops_here
    return Schedule(ops)
