"""What happened lately, and what followed from it."""

from __future__ import annotations

from everstep.drive import recent_events as module
from everstep.drive.ports import HandledEvent
from everstep.drive.recent_events import RecentEvents
from everstep.protocol.ops import Worker
from everstep.server import words
from tests.support.fake_cluster import FakeCluster

W00, W01 = Worker(0, 0), Worker(0, 1)


class Told(FakeCluster):
    """A fake cluster whose events are kept."""

    def handled(self, one: HandledEvent) -> None:
        self.__dict__.setdefault("recent", RecentEvents(of_event=words.event, of_action=words.decision))
        self.recent: RecentEvents
        self.recent.handled(one)
        super().handled(one)


def hang() -> Told:
    cluster = Told()
    cluster.submit()
    cluster.seal()
    cluster.overdue(W00, busy=False, doing="G[2 stage 0 0.0]", elapsed_s=1.1)
    cluster.overdue(W01, elapsed_s=2.0)
    return cluster


def test_an_incident_names_the_events_of_its_evidence_verdict_and_remedy() -> None:
    cluster = hang()
    (incident,) = cluster.coordinator.log.incidents
    assert incident.verdict is not None
    overdue, _, exited = (cluster.recent.get(evidence.event) for evidence in incident.evidence)
    assert overdue is not None
    assert exited is not None
    assert overdue.text == "worker 0:1 of t is overdue in 1F0.0"
    assert exited.text == "worker 0:1 of t exited: killed by SIGKILL"
    assert any(action.text.startswith("stop worker 0:1") for action in overdue.actions)
    assert incident.verdict.event == incident.remedies[0].event == overdue.number
    assert incident.events[0] == overdue.number
    assert incident.events[-1] > exited.number


def test_what_is_too_long_ago_is_not_known_and_little_is_kept(monkeypatch) -> None:
    monkeypatch.setattr(module, "KEPT", 10)
    cluster = hang()
    assert cluster.recent.get(1) is None
    last = cluster.recent.get(cluster.coordinator.events)
    assert last is not None
    assert last.number == cluster.coordinator.events
