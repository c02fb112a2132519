"""From any action back to the event that began it all."""

from __future__ import annotations

from everstep.drive import causes as module
from everstep.drive.causes import Causes
from everstep.drive.ports import HandledEvent
from everstep.drive.step_rows import begins_training
from everstep.protocol.ops import Worker
from everstep.server import words
from tests.core.fake_cluster import FakeCluster

W00, W01 = Worker(0, 0), Worker(0, 1)


class Told(FakeCluster):
    """A fake cluster whose causes are kept."""

    def handled(self, one: HandledEvent) -> None:
        self.__dict__.setdefault("causes", Causes(of_event=words.event, of_action=words.decision))
        self.causes: Causes
        self.causes.handled(one)
        super().handled(one)


def hang() -> Told:
    cluster = Told()
    cluster.submit()
    cluster.seal()
    cluster.overdue(W00, busy=False, doing="G[2 stage 0 0.0]", elapsed_s=1.1)
    cluster.overdue(W01, elapsed_s=2.0)
    return cluster


def test_the_order_to_train_on_is_traced_back_to_the_report_of_the_hang() -> None:
    cluster = hang()
    resumed = [a for a in cluster.actions if begins_training(a)]
    first = next(a for a in resumed if a.because.startswith("worker 0:1 is gone"))
    texts = [link.text for link in cluster.causes.chain(first.cause)]
    assert texts == [
        "task t has a new schedule, epoch 2",
        "worker 1:1 of t reports its ledger, epoch 2",
        "worker 0:1 of t exited: killed by SIGKILL",
        "worker 0:1 of t is overdue in 1F0.0",
    ]


def test_an_incident_names_the_events_of_its_evidence_verdict_and_remedy() -> None:
    cluster = hang()
    (incident,) = cluster.coordinator.log.incidents
    assert incident.verdict is not None
    overdue, _, exited = (evidence.event for evidence in incident.evidence)
    assert cluster.causes.link(overdue).text == "worker 0:1 of t is overdue in 1F0.0"
    assert cluster.causes.link(exited).text == "worker 0:1 of t exited: killed by SIGKILL"
    assert incident.verdict.event == incident.remedies[0].event == overdue
    assert incident.events[0] == overdue
    assert incident.events[-1] > exited


def test_what_is_too_long_ago_is_not_known_and_little_is_kept(monkeypatch) -> None:
    monkeypatch.setattr(module, "KEPT", 10)
    cluster = hang()
    assert cluster.causes.link(1) is None
    assert cluster.causes.chain(1) == []
    last = cluster.causes.link(cluster.coordinator.events)
    assert last is not None
    assert last.number == cluster.coordinator.events
    assert len(cluster.causes._asked) <= 10
