"""How a replacement comes in: it copies a live peer's state while training goes on, and is let in at a step
nobody has entered.
"""

from __future__ import annotations

from collections.abc import Mapping

from everstep.core.task.restoring import Restoring
from everstep.core.task.states import Joining, Member, Running
from everstep.core.words.actions import Action, CopyState
from everstep.core.words.events import StateCopied
from everstep.core.words.ops import Worker
from everstep.core.words.worker_messages import Ledger


class Admission(Restoring):
    def _feed_joiners(self) -> list[Action]:
        """Every joiner without a living source gets one: the live peer of its stage that feeds the fewest."""
        actions: list[Action] = []
        sources = [place.source for _, place in self._joiners()]
        for joiner, place in self._joiners():
            if self._is_fed(place):
                continue
            peers = [w for w in self._having(Member) if w.stage == joiner.stage]
            if not peers:
                continue
            source = min(peers, key=lambda w: (sources.count(w), w))
            sources.append(source)
            self.places[joiner] = Joining(place.incarnation, source)
            actions.append(
                CopyState(
                    source=source,
                    joiner=joiner,
                    because=f"{joiner} takes its state from {source} while training goes on",
                )
            )
        return actions

    def _copied(self, event: StateCopied) -> list[Action]:
        place = self.places[event.worker]
        if not isinstance(place, Joining) or place.incarnation != event.incarnation or place.source is None:
            return []
        place.copied = True
        if not isinstance(self.phase, Running):
            return []
        return self._gather(f"worker {event.worker} has caught up and joins")

    def _admit_the_late(self) -> list[Action]:
        """Joiners that had caught up while others were being planned for: nobody has let them in yet."""
        late = [
            w
            for w, place in self._joiners()
            if place.copied and place.enter_at is None and self._is_fed(place)
        ]
        if not late or not isinstance(self.phase, Running) or self.recorded >= self.last_step:
            return []
        return self._gather(f"worker {late[0]} has caught up and joins")

    def _settle_joiners(self, told: Mapping[Worker, Ledger]) -> dict[Worker, Ledger]:
        """A joiner that was let in is a member once its state is there; without its source it must copy
        anew.
        """
        ledgers: dict[Worker, Ledger] = {}
        for worker, ledger in told.items():
            place = self.places[worker]
            if isinstance(place, Joining):
                assert place.enter_at is not None
                if not ledger.joining or ledger.step == place.enter_at:
                    self.places[worker] = Member(place.incarnation, place.enter_at)
                    ledgers[worker] = ledger
                elif not self._is_fed(place):
                    self.places[worker] = Joining(place.incarnation)
            else:
                ledgers[worker] = ledger
        return ledgers
