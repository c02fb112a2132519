"""Being told: the shipped alert rules."""

from __future__ import annotations

import contextlib
import http.server
import json
import queue
import re
import shutil
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from everstep.core.cluster.node_states import NodeAdmin
from everstep.core.cluster.task import Task
from everstep.drive.ports import HandledEvent
from everstep.protocol import messages as msg
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from everstep.server.metrics import ClusterMetrics
from everstep.server.record import ClusterRecord
from harness.cluster import Cluster, small_job
from harness.etcd import free_ports
from tests.support.fake_cluster import FakeCluster
from tests.support.served import served

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules.yaml"
PAGE = Path(__file__).parents[2] / "docs" / "alerts.md"


# ------------------------------------------------------------------ what a coordinator exports


class Observed(FakeCluster):
    """A coordinator with its record, whose metrics are read every 30 s of its time. Its one task makes a step
    every 5 s.
    """

    def __init__(self) -> None:
        self.record = ClusterRecord(say=lambda text: None, clock=lambda: self.now)
        self.metrics = ClusterMetrics(self.record)
        self.scrapes: list[dict[str, float]] = []
        super().__init__(nodes={"a": 1, "b": 1, **dict.fromkeys("cdefg", 0)})
        self.record.leads = True
        self.submit(shape=Shape(1, 2, 2), steps=10**6, has_checkpoints=True)
        self.saves = True

    def handled(self, one: HandledEvent) -> None:
        super().handled(one)
        self.record.machine = self.coordinator
        self.record.handled(one)

    @property
    def task(self) -> Task:
        return self.coordinator.tasks["t"]

    def watch(self, minutes: float, *, trains: bool = True) -> Observed:
        for _ in range(round(2 * minutes)):
            for _ in range(6):
                self.wait(5.0)
                if trains:
                    self.seal()
                    if self.saves and self.task.next_step % 50 == 0:
                        self.save(self.task.next_step - 1)
            families = text_string_to_metric_families(self.metrics.text().decode())
            samples = (sample for family in families for sample in family.samples)
            self.scrapes.append({_series(one.name, one.labels): one.value for one in samples})
        return self

    def loses_a_stage(self) -> Observed:
        self.hear(msg.NodeLeft(node="a"))
        return self

    def input_series(self) -> list[dict[str, str]]:
        """In the words of promtool; what was not exported at a time is _."""
        found = []
        for name in {name: None for scrape in self.scrapes for name in scrape}:
            values = [f"{scrape[name]:.17g}" if name in scrape else "_" for scrape in self.scrapes]
            found.append({"series": name, "values": " ".join(values)})
        return found


def _series(name: str, labels: dict[str, str]) -> str:
    return name + "{" + ", ".join(f"{key}={json.dumps(value)}" for key, value in labels.items()) + "}"


def fired(seen: Observed, folder: Path) -> set[str]:
    """The shipped alerts that fire at its end."""
    at = f"{len(seen.scrapes) // 2 - 1}m"
    names = re.findall(r"alert: (\w+)", RULES.read_text())
    asked = [f'count(ALERTS{{alertname="{name}", alertstate="firing"}})' for name in names]
    test = {
        "interval": "30s",
        "input_series": seen.input_series(),
        "promql_expr_test": [{"expr": expression, "eval_time": at} for expression in asked],
    }
    shutil.copy(RULES, folder / "rules.yaml")
    file = folder / "test.json"
    file.write_text(json.dumps({"rule_files": ["rules.yaml"], "evaluation_interval": "30s", "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True)
    text = done.stdout + done.stderr  # of each that has a sample, which the test does not expect
    assert done.returncode == 0 or "got:" in text, text
    return {name for name, expression in zip(names, asked, strict=True) if json.dumps(expression) in text}


def healthy(seen: Observed) -> None:
    seen.watch(100)


def led_by_none(seen: Observed) -> None:
    seen.watch(30)
    seen.record.leads = False
    seen.watch(10)


def stage_without_a_worker(seen: Observed) -> None:
    seen.watch(70)
    seen.loses_a_stage().watch(30, trains=False)
    assert seen.scrapes[-1]['everstep_task_state{state="stalled", task="t"}'] == 1.0


def hung(seen: Observed) -> None:
    """All its workers are there, and no step is made."""
    seen.watch(70)
    seen.watch(30, trains=False)
    assert seen.scrapes[-1]['everstep_task_state{state="running", task="t"}'] == 1.0


def saves_fail(seen: Observed) -> None:
    seen.watch(30)
    worker, step = Worker(0, 0), seen.task.next_step - 1
    attempt = seen.task.recovery.attempt_of(step) if seen.task.recovery is not None else 0
    seen.report("t", worker, msg.SaveFailed(task="t", step=step, attempt=attempt, because="No space left"))
    seen.watch(5)


def never_saved(seen: Observed) -> None:
    seen.saves = False
    seen.watch(125)


def counted_wrong(seen: Observed) -> None:
    seen.watch(30)
    seen.record.steps["t"].committed -= 1
    seen.watch(10)


def lemon(seen: Observed) -> None:
    seen.watch(30)
    node = seen.coordinator.nodes["g"]
    node.set_admin(NodeAdmin.LEMON, "isolated too often", seen.now)
    seen.coordinator.roster.node_changed(node)
    seen.watch(5)


def rack_lost(seen: Observed) -> None:
    seen.watch(30)
    for node in "cdef":
        seen.silence(node)
    seen.watch(5)


def incident_open(seen: Observed) -> None:
    seen.watch(30)
    seen.crew.starts = False
    seen.exits(Worker(0, 0), "killed by SIGKILL")
    seen.watch(20, trains=False)


def slow_decisions(seen: Observed) -> None:
    seen.watch(30)
    seen.record.handled_s.extend([0.75] * 100)
    seen.watch(15)


SITUATIONS: dict[Callable[[Observed], None], set[str]] = {
    healthy: set(),
    led_by_none: {"EverstepNoLeader"},
    stage_without_a_worker: {"EverstepTaskStalled", "EverstepGoodputLow", "EverstepIncidentOpen"},
    hung: {"EverstepTaskStalled", "EverstepGoodputLow"},
    saves_fail: {"EverstepSavesFail"},
    never_saved: {"EverstepUnprotected"},
    counted_wrong: {"EverstepMicrobatchesDiffer"},
    lemon: {"EverstepLemon"},
    rack_lost: {"EverstepNodesGone"},
    incident_open: {"EverstepIncidentOpen", "EverstepTaskStalled"},
    slow_decisions: {"EverstepSlowDecisions"},
}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda one: one.__name__)
def test_an_alert_fires_on_what_a_coordinator_exports_and_only_then(
    situation: Callable[[Observed], None], tmp_path: Path
) -> None:
    seen = Observed()
    situation(seen)
    assert fired(seen, tmp_path) == SITUATIONS[situation]


def test_every_alert_is_fired_and_explained() -> None:
    names = set(re.findall(r"alert: (\w+)", RULES.read_text()))
    assert names == set().union(*SITUATIONS.values())
    assert all(f"## {name}\n" in PAGE.read_text() for name in names)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_a_task_that_goes_back_counts_on_and_is_not_stalled_while_it_does_steps_again(tmp_path: Path) -> None:
    """everstep_task_steps_total went back with it: a reset, and a rate that never was."""
    seen = Observed().watch(25)
    seen.saves, seen.crew.on_disk = False, seen.task.checkpoints.newest
    seen.watch(35)
    before = seen.scrapes[-1]['everstep_task_step{task="t"}']
    seen.loses_a_stage().watch(1, trains=False)
    seen.join("h", 1)
    seen.watch(20)
    steps = [scrape['everstep_task_step{task="t"}'] for scrape in seen.scrapes]
    assert min(steps[120:]) < before - 300
    for name in seen.scrapes[0]:
        if name.partition("{")[0].endswith(("_total", "_count", "_sum")):
            values = [scrape[name] for scrape in seen.scrapes]
            assert values == sorted(values), f"{name} goes back"
    assert "EverstepTaskStalled" not in fired(seen, tmp_path)


def sped_up(text: str, by: float) -> str:
    """Rules whose every duration is shorter."""
    seconds = {"s": 1.0, "m": 60.0, "h": 3600.0}

    def shorter(found: re.Match[str]) -> str:
        return f"{found[1]}{1000 * int(found[2]) * seconds[found[3]] / by:.0f}ms"

    return re.sub(r"(\[|for: |offset )(\d+)([smh])\b", shorter, text)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
def test_a_real_prometheus_says_that_a_real_task_is_stalled_and_that_it_no_longer_is(tmp_path: Path) -> None:
    """A stage loses its only worker, and there is no slot for another one. Durations by 60."""
    job = small_job(tmp_path, steps=100_000, replicas=1, stages=2, microbatches=2)
    job |= {"checkpoint": {"folder": str(tmp_path / "saved"), "interval": 5}}
    with Cluster(tmp_path) as cluster, contextlib.ExitStack() as stack:
        target = cluster.start_coordinator().rpartition("/")[2]
        port = free_ports(1)[0]
        (tmp_path / "rules.yaml").write_text(sped_up(RULES.read_text(), 60.0))
        (tmp_path / "prometheus.yml").write_text(
            "global: {scrape_interval: 250ms, scrape_timeout: 250ms, evaluation_interval: 250ms}\n"
            "rule_files: [rules.yaml]\n"
            f"scrape_configs:\n  - {{job_name: everstep, authorization: {{credentials: {cluster.token}}}, "
            f"static_configs: [{{targets: ['{target}']}}]}}\n"
        )
        command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", "--log.level=error"]
        command += [f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{port}"]
        started = stack.enter_context(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        stack.callback(started.terminate)

        def firing() -> set[str]:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/alerts", timeout=5) as answer:
                alerts = json.load(answer)["data"]["alerts"]
            return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

        for node in ("a", "b"):
            cluster.start_agent(node, slots=1)
        cluster.nodes_up(2)
        cluster.submit(job)
        cluster.step_reached(12)
        cluster.signal_node("b", signal.SIGKILL)
        cluster.until(lambda: cluster.task()["state"] == "stalled", "the task is stalled")
        cluster.until(lambda: "EverstepTaskStalled" in firing(), "the alert fires")
        cluster.start_agent("b", slots=1)
        cluster.until(lambda: "EverstepTaskStalled" not in firing(), "and no longer")


class Receiver(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = server.answers.pop(0) if server.answers else 200
        server.told.put((status, self.headers.get("Authorization"), body))
        self.send_response(status)
        self.end_headers()

    def log_message(self, *words: Any) -> None: ...


@contextlib.contextmanager
def receiver(*answers: int) -> Iterator[Any]:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    server.answers, server.told = list(answers), queue.SimpleQueue()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


ALERTMANAGER = next((name for name in ("prometheus-alertmanager", "alertmanager") if shutil.which(name)), "")


@contextlib.contextmanager
def monitored(folder: Path, coordinator: int, hook: str) -> Iterator[None]:
    """A Prometheus with the shipped rules, and an Alertmanager that posts to `hook`."""
    manager = free_ports(1)[0]
    rules = re.sub(r"\n +for: \w+", "", RULES.read_text())  # at once
    (folder / "rules.yaml").write_text(rules)
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 250ms, scrape_timeout: 250ms, evaluation_interval: 250ms}\n"
        "rule_files: [rules.yaml]\n"
        "scrape_configs:\n"
        f"  - {{job_name: everstep, static_configs: [{{targets: ['127.0.0.1:{coordinator}']}}]}}\n"
        f"alerting: {{alertmanagers: [{{static_configs: [{{targets: ['127.0.0.1:{manager}']}}]}}]}}\n"
    )
    (folder / "alertmanager.yml").write_text(
        "route: {receiver: us, group_by: [alertname], group_wait: 0s, group_interval: 1s}\n"
        f"receivers: [{{name: us, webhook_configs: [{{url: '{hook}', send_resolved: true}}]}}]\n"
    )
    commands = [
        [
            ALERTMANAGER,
            f"--config.file={folder}/alertmanager.yml",
            f"--storage.path={folder}/am",
            f"--web.listen-address=127.0.0.1:{manager}",
            "--cluster.listen-address=",
        ],
        [
            "prometheus",
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{free_ports(1)[0]}",
        ],
    ]
    started = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for command in commands]
    try:
        yield
    finally:
        for process in started:
            process.terminate()
            process.wait(30)


@pytest.mark.slow
@pytest.mark.skipif(
    not ALERTMANAGER or shutil.which("prometheus") is None,
    reason="Alertmanager is not installed (Debian: prometheus prometheus-alertmanager)",
)
def test_a_lost_leader_and_its_return_reach_people_through_a_real_alertmanager(tmp_path: Path) -> None:
    def heard(status: str) -> Any:
        while True:
            body = told.told.get(timeout=120)[2]
            for alert in body["alerts"]:
                if alert["labels"]["alertname"] == "EverstepNoLeader" and alert["status"] == status:
                    return alert

    port = free_ports(1)[0]
    with receiver() as told, contextlib.ExitStack() as stack:
        with served(tmp_path / "state", port=port):
            stack.enter_context(monitored(tmp_path, port, f"http://127.0.0.1:{told.server_port}/hook"))
        fired = heard("firing")
        assert fired["labels"]["severity"] == "page"
        assert "No Everstep coordinator leads" in fired["annotations"]["summary"]
        assert fired["annotations"]["runbook"] == "docs/alerts.md#everstepnoleader"
        with served(tmp_path / "state", port=port):
            heard("resolved")
