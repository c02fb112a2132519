"""Being told: the shipped alert rules, and webhooks."""

from __future__ import annotations

import contextlib
import http.server
import json
import queue
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.errors import UserError
from everstep.server.record import ClusterRecord
from everstep.server.webhooks import AGAIN_S, Notifier, Repetition, Webhook, notification, read_webhooks
from tests.server.served import served

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules.yaml"
PAGE = Path(__file__).parents[2] / "docs" / "alerts.md"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_the_alert_rules_fire_when_they_should_and_only_then() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", "rules.test.yaml"], cwd=RULES.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_both_ways_and_explained() -> None:
    names = re.findall(r"alert: (\w+)", RULES.read_text())
    assert len(names) >= 10
    tests = RULES.with_name("rules.test.yaml").read_text()
    for name in names:
        assert tests.count(f"alertname: {name}\n") == 1, f"{name} is never expected to fire"
        assert f"{{eval_time: 3h, alertname: {name}}}" in tests, f"{name} is never expected to be silent"
        assert f"## {name}\n" in PAGE.read_text()


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


def news(state: str, node: str = "n1") -> dict[str, Any]:
    return {"at": 1.0, "kind": "NodeChanged", "node": node, "state": state, "because": "two ECC errors"}


def leading() -> ClusterRecord:
    record = ClusterRecord()
    record.leads = True
    return record


def test_a_receiver_is_told_once_after_errors_and_in_its_form() -> None:
    said: list[str] = []
    with receiver(500, 429) as server:
        url = f"http://127.0.0.1:{server.server_port}/x"
        hooks = [Webhook(url=url, form="slack", header="Authorization: Bearer t", tell=["nodes"])]
        teller = Notifier(leading(), hooks, first_wait_s=0.001, warn=said.append)
        teller.hear(news("lemon"))
        teller.hear(news("lemon"))
        teller.hear({"at": 1.0, "kind": "TaskEnded", "task": "t", "state": "failed", "because": ""})
        teller.hear(news("up"))
        heard = [server.told.get(timeout=30) for _ in range(4)]
        teller.close()
    assert [status for status, _, _ in heard] == [500, 429, 200, 200]
    assert {header for _, header, _ in heard} == {"Bearer t"}
    assert heard[2][2] == {"text": "*node n1 is lemon*\ntwo ECC errors"}
    assert heard[3][2] == {"text": "*node n1 is up*\ntwo ECC errors"}, (
        "the repetition and the task are not told"
    )
    assert said == []


def test_what_cannot_be_told_is_given_up_and_the_secret_is_not_said() -> None:
    said: list[str] = []
    with receiver(404) as server:
        port = server.server_port
        hooks = [Webhook(url=f"http://127.0.0.1:{port}/s3cret")]
        teller = Notifier(leading(), hooks, first_wait_s=0.001, warn=said.append)
        teller.hear(news("gone"))
        assert server.told.get(timeout=30)[0] == 404
        teller.close()
    teller = Notifier(leading(), hooks, first_wait_s=0.001, warn=said.append)  # nobody listens any more
    teller.hear(news("gone"))
    while len(said) < 2:
        threading.Event().wait(0.01)
    teller.close()
    assert "it answers 404" in said[0]
    assert not any("s3cret" in line for line in said)


def test_the_journal_of_the_past_is_not_told_again() -> None:
    with receiver() as server:
        record = ClusterRecord()
        teller = Notifier(record, [Webhook(url=f"http://127.0.0.1:{server.server_port}/")])
        teller.hear(news("gone"))
        record.leads = True
        teller.hear(news("gone", "n2"))
        assert server.told.get(timeout=30)[2]["about"] == "node n2"
        teller.close()


def test_a_message_that_comes_often_is_sent_once_and_counted() -> None:
    one = notification(news("isolated"), False)
    assert one is not None
    seen = Repetition()
    assert [seen.take(one, now) for now in (0.0, 1.0, 2.0)] == [0, None, None]
    assert seen.take(one, AGAIN_S) == 2
    assert one.body("json", 2)["repeated"] == 2
    assert notification(news("up"), False) is None, "that a node joins is not worth a message"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[[webhook]]\nurl = 'ftp://x'", "webhook.url"),
        ("[[webhook]]\nurl = 'https://x/'\ntell = ['birds']", "webhook.tell"),
        ("[[webhook]]\nurl = 'https://x/'\nform = 'xml'", "webhook.form"),
        ("[[webhook]]\nurl = 'https://x/'\nheader = 'x'", "webhook.header"),
        ("webhook = 3", "must contain"),
        ("[[", "is not TOML"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "hooks.toml"
    path.touch(mode=0o600)
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(why)):
        read_webhooks(path)


def test_others_must_not_read_the_addresses(tmp_path: Path) -> None:
    path = tmp_path / "hooks.toml"
    path.write_text("[[webhook]]\nurl = 'https://x/'")
    path.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        read_webhooks(path)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


ALERTMANAGER = next((name for name in ("prometheus-alertmanager", "alertmanager") if shutil.which(name)), "")


@contextlib.contextmanager
def monitored(folder: Path, coordinator: int, hook: str) -> Iterator[None]:
    """A Prometheus with the shipped rules, and an Alertmanager that posts to `hook`."""
    manager = free_port()
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
            f"--web.listen-address=127.0.0.1:{free_port()}",
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

    port = free_port()
    with receiver() as told, contextlib.ExitStack() as stack:
        with served(tmp_path / "state", port=port):
            stack.enter_context(monitored(tmp_path, port, f"http://127.0.0.1:{told.server_port}/hook"))
        fired = heard("firing")
        assert fired["labels"]["severity"] == "page"
        assert "No Everstep coordinator leads" in fired["annotations"]["summary"]
        assert fired["annotations"]["runbook"] == "docs/alerts.md#everstepnoleader"
        with served(tmp_path / "state", port=port):
            heard("resolved")
