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
from tests.server.served import agent, served
from tests.server.test_api import JOB, call

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "everstep.json"
NAME = re.compile(r"\beverstep_\w+")
LABELS = re.compile(r"\{([^}]*)\}")
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


def labels_by_name(text: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        found.setdefault(family.name + ("_total" if family.type == "counter" else ""), set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_the_dashboard_names_only_metrics_and_labels_that_are_exported(lived: tuple[str, str]) -> None:
    known = labels_by_name(lived[1])
    assert len(expressions()) > 20
    for expression in expressions():
        names = NAME.findall(expression)
        assert names, expression
        for name in names:
            assert name in known, f"{name} of {expression!r} is not exported"
        for chosen in LABELS.findall(expression):
            for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", chosen):
                of_tasks = {"task"} if any(name.startswith("everstep_task_") for name in names) else set()
                mine = set().union(*(known[name] for name in names)) | BY_PROMETHEUS | of_tasks
                assert label in mine, f"{label} of {expression!r} is no label"


def test_the_alert_rules_name_only_metrics_that_are_exported(lived: tuple[str, str]) -> None:
    rules = (DASHBOARD.parents[1] / "prometheus" / "rules.yaml").read_text()
    assert {*NAME.findall(rules)} - {*labels_by_name(lived[1])} == set()


def test_what_a_death_does_is_in_the_metrics(lived: tuple[str, str]) -> None:
    text = lived[1]
    assert 'everstep_nodes{state="up"} 1.0' in text
    assert 'everstep_task_running{task="llama"} 1.0' in text
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
        assert 'everstep_task_tokens_total{task="t"} 0.0' in text
        assert 'everstep_task_model_flops_total{task="t"} 0.0' in text
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
        assert main.run([*words, "--task", "nobody"]) == 2


def test_what_full_experts_dropped_is_in_the_metrics_and_in_the_task(tmp_path: Path) -> None:
    async def told(address: str) -> tuple[str, dict[str, Any]]:
        client = Client(address=address)
        async with agent(address, "a") as one:
            await asyncio.to_thread(client.post, "/v1/tasks", {"name": "moe", "job": JOB})
            order = await one.until(msg.StartProcess)
            started = ev.WorkerStarted(worker=order.worker, incarnation=1, address=("127.0.0.1", 1))
            await one.say(1, msg.TaskEvent(task="moe", event=started))
            times = {"F": 1.0, "dropped": 0.25}
            await one.say(2, msg.TimesReported(task="moe", worker=order.worker, times=times, incarnation=1))
            await one.say(3, msg.TaskEvent(task="moe", event=started))  # times are not acknowledged
            await one.acknowledged(3)
            return await asyncio.to_thread(exported, address), await asyncio.to_thread(
                client.get, "/v1/status"
            )

    with served(tmp_path) as address:
        text, tasks = asyncio.run(told(address))
    assert 'everstep_task_dropped_ratio{task="moe"} 0.25' in text
    assert [task["dropped"] for task in tasks["tasks"]] == [0.25]
