"""One question to all ranks of a script that does nothing: where are you? Their stacks and records answer."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping

from everstep.ranks import looks as rank_looks
from everstep.ranks import suspects as rank_suspects
from everstep.ranks.rank_main import STACKS_SIGNAL
from everstep.ranks.running_rank import RunningRank
from everstep.ranks.words import DiagnoseHang, HangDiagnosed

_WAIT_S = 1.5  # for ranks to write their stacks and records
_LEAST_S = 0.2  # a stack that is half written would blame the wrong rank


class HangDiagnosis:
    def __init__(self, asked: DiagnoseHang, now: float) -> None:
        self._asked = asked
        self.due = now + _WAIT_S

    def ask(self, ranks: Mapping[int, RunningRank]) -> None:
        for number in self._asked.ranks:
            rank = ranks[number]
            rank.is_recorded = False
            if rank_looks.handles(rank.process.pid, STACKS_SIGNAL):
                os.kill(rank.process.pid, STACKS_SIGNAL)
            question = {"record": str(rank.record_path(number))}
            with contextlib.suppress(OSError):
                rank.line.send(json.dumps(question).encode())

    def answered(self, ranks: Mapping[int, RunningRank]) -> dict[int, tuple[str, bytes]] | None:
        """By rank, its stacks and its record of collectives; None while ranks may still answer."""
        there = {number: ranks[number] for number in self._asked.ranks if number in ranks}
        left_s = self.due - time.monotonic()
        is_answered = all(rank.has_answered for rank in there.values())
        if left_s > _WAIT_S - _LEAST_S or (left_s > 0 and not is_answered):
            return None
        return {number: (rank.stacks(), rank.record(number)) for number, rank in there.items()}

    def answer(self, ranks: Mapping[int, RunningRank]) -> HangDiagnosed | None:
        found_in = self.answered(ranks)
        if found_in is None:
            return None
        found = rank_suspects.suspect(
            stacks={number: stacks for number, (stacks, _) in found_in.items()},
            records={number: record for number, (_, record) in found_in.items() if record},
            finished=self._asked.finished,
        )
        return HangDiagnosed(
            life=self._asked.life, suspects=found.ranks, because=found.because, evidence=found.evidence
        )
