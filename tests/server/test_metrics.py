"""What Prometheus reads, and that the Grafana dashboard asks for nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from prometheus_client.parser import text_string_to_metric_families

from everstep.cli import main
from everstep.cli.client import Client
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.server.access import CALLS
from everstep.server.metrics import METRICS, ClusterMetrics
from everstep.server.record import ClusterRecord
from tests.support.served import JOB, agent, call, served

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "everstep.json"
BY_PROMETHEUS = {"job", "instance"}


def expressions() -> list[str]:
    """Every question the dashboard asks."""
    document = json.loads(DASHBOARD.read_text())
    found = [target["expr"] for panel in document["panels"] for target in panel.get("targets", [])]
    found += [note["expr"] for note in document["annotations"]["list"] if "expr" in note]
    return found + [v["query"]["query"] for v in document["templating"]["list"] if v["type"] == "query"]


async def some_life(address: str) -> str:
    """A node, a task, a death, a restart; then what is exported."""
    async with agent(address, "a") as one:
        await asyncio.to_thread(Client(address=address).post, "/v1/tasks", {"name": "llama", "job": JOB})
        order = await one.until(msg.StartProcess)
        started = ev.WorkerStarted(worker=order.worker, incarnation=1, address=("127.0.0.1", 1))
        await one.say(1, msg.TaskEvent(task="llama", event=started))
        exited = ev.WorkerExited(worker=order.worker, incarnation=1, reason="killed by SIGKILL")
        await one.say(2, msg.TaskEvent(task="llama", event=exited))
        await one.acknowledged(2)
        return await asyncio.to_thread(exported, address)


def exported(address: str) -> str:
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        text: str = answer.read().decode()
    return text


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Its address, and its metrics."""
    with served(tmp_path_factory.mktemp("state")) as address:
        yield address, asyncio.run(some_life(address))


def rules() -> list[str]:
    """Every question of the alert rules."""
    text = (DASHBOARD.parents[1] / "prometheus" / "rules.yaml").read_text()
    return re.findall(r"expr: (?:>-\n)?(.*?)\n        (?=\w)", text, re.DOTALL)


def test_what_is_exported_is_what_the_table_says(lived: tuple[str, str]) -> None:
    seen = set()
    for family in text_string_to_metric_families(lived[1]):
        seen.add(family.name)
        row = METRICS[family.name]
        assert row.kind == family.type
        for sample in family.samples:
            assert {*sample.labels} - {"le"} == {*row.labels}
            for label, values in row.values.items():
                assert sample.labels[label] in values
    assert seen == {*METRICS}


def test_rules_and_dashboard_ask_only_for_what_the_table_has() -> None:
    """Also for the values of a label: an alert on a state that no task is ever in does not fire."""
    by_name = {name + row.suffix: row for name, row in METRICS.items()}
    assert len(rules()) >= 10
    assert len(expressions()) > 20
    for expression in rules() + expressions():
        asked = [
            (name, chosen) for name, chosen in re.findall(r"\b(everstep_\w+)(?:\{([^}]*)\})?", expression)
        ]
        assert asked, expression
        for name, chosen in asked:
            assert name in by_name, f"{name} of {expression!r} is not exported"
            row = by_name[name]
            for label, operator, value in re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', chosen):
                assert label in {*row.labels} | BY_PROMETHEUS, f"{label} of {expression!r} is no label"
                if label in row.values:
                    wanted = value.split("|") if "~" in operator else [value]
                    assert {*wanted} <= {*row.values[label]}, f"{value} of {expression!r} is never exported"


def test_a_coordinator_that_stands_by_is_up_and_does_not_lead(tmp_path: Path) -> None:
    """It answered 503, and every healthy one was a target that is down."""
    record = ClusterRecord()
    metrics = ClusterMetrics(record)
    text = metrics.text().decode()
    assert "everstep_leader 0.0" in text
    assert {family.name for family in text_string_to_metric_families(text)} == {
        "everstep_leader",
        "everstep_build_info",
    }
    (call_,) = [call for call in CALLS if call.standby]
    assert (call_.path, call_.method) == ("/metrics", "GET")


def test_what_a_death_does_is_in_the_metrics(lived: tuple[str, str]) -> None:
    text = lived[1]
    assert 'everstep_nodes{state="up"} 1.0' in text
    assert 'everstep_task_state{state="running",task="llama"} 1.0' in text
    assert 'everstep_task_state{state="stalled",task="llama"} 0.0' in text
    assert re.search(r'everstep_incidents_total\{kind="[^"]+",severity="SEV2"\} 1.0', text)
    assert "everstep_incidents_open 1.0" in text


def test_every_panel_has_a_place_of_its_own_and_says_what_it_shows() -> None:
    document = json.loads(DASHBOARD.read_text())
    taken: set[tuple[int, int]] = set()
    numbers = [panel["id"] for panel in document["panels"]]
    assert len(numbers) == len(set(numbers))
    for panel in document["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not taken & cells, f"{panel['title']} lies on another panel"
        taken |= cells
        assert panel["type"] == "row" or panel["description"]


# ------------------------------------------------------------------ by the real ones


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_finds_nothing_to_complain_of(lived: tuple[str, str]) -> None:
    ran = subprocess.run(["promtool", "check", "metrics"], input=lived[1], text=True, capture_output=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@contextlib.contextmanager
def prometheus(folder: Path, address: str) -> Iterator[str]:
    """A real Prometheus that scrapes this coordinator four times a second. Its address."""
    target = urllib.parse.urlsplit(address).netloc
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 250ms, scrape_timeout: 250ms}\n"
        f"scrape_configs: [{{job_name: everstep, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def answered(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.load(answer)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
def test_a_real_prometheus_answers_every_question_of_the_dashboard(
    lived: tuple[str, str], tmp_path: Path
) -> None:
    values = {"$job": ".*", "$task": ".*", "$__rate_interval": "2s"}
    empty: list[str] = []
    with prometheus(tmp_path, lived[0]) as asked:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError):
                seen = answered(f"{asked}/api/v1/query?query=count_over_time(everstep_leader[1m])")
                if seen["data"]["result"] and float(seen["data"]["result"][0]["value"][1]) >= 6:
                    break
            assert time.monotonic() < deadline, "Prometheus reads nothing"
            time.sleep(0.1)
        for expression in expressions():
            if variable := re.fullmatch(r"label_values\((.*), (\w+)\)", expression):
                expression = f"group by ({variable[2]}) ({variable[1]})"
            for name, value in values.items():
                expression = expression.replace(name, value)
            told = answered(f"{asked}/api/v1/query?query={urllib.parse.quote(expression)}")
            assert told["status"] == "success", expression
            if not told["data"]["result"]:
                empty.append(expression)
    never = ("everstep_task_loss", "everstep_task_step_seconds", "changes(")  # no step was run here
    assert [e for e in empty if not any(name in e for name in never)] == []


def test_goodput_is_in_the_metrics_and_in_the_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a task that waits: all its time is lost to waiting."""
    with served(tmp_path) as address:
        client = Client(address=address)
        client.post("/v1/tasks", {"name": "t", "job": JOB})
        client.post("/v1/tasks", {"name": "later", "job": JOB})  # an event: time has passed for the first
        text = call(address, "/metrics")[1].decode()
        assert 'everstep_task_goodput_ratio{task="t"} 0.0' in text
        assert 'everstep_task_lost_seconds_total{cause="wait",task="t"}' in text
        assert re.search(r'everstep_task_step_tokens{task="t"} [1-9]', text)
        assert re.search(r'everstep_task_step_model_flops{task="t"} [1-9]', text)
        assert "everstep_build_info{version=" in text
        picture = tmp_path / "week.svg"
        words = ["report", "--since", "1h", "--address", address]
        assert main.run([*words, "--picture", str(picture), "--json"]) == 0
        row = json.loads(capfd.readouterr().out)["tasks"][0]
        assert (row["task"], row["owner"], row["state"]) == ("t", "an operator", "waiting")
        assert sum(row["lost_s"].values()) + row["productive_s"] == pytest.approx(row["wall_s"])
        ElementTree.fromstring(picture.read_text())
        assert main.run(words) == 0
        assert "wait" in capfd.readouterr().out
        assert main.run([*words, "nobody"]) == 2
