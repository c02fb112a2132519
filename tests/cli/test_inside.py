"""Looking inside a running task: traces, stacks, and a bundle without secrets."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from everstep.cli import main
from everstep.cli.inside import grouped, main_thread, redacted
from everstep.cli.trace import chrome_trace
from everstep.engine.telemetry.recorder import WorkerRecorder
from everstep.node.recent_ops import recorded
from everstep.node.stacks import place_of, stacks_of
from everstep.protocol.ops import Microbatch, Worker
from everstep.protocol.parcels import Parcel, ParcelKind
from everstep.server import step_timeline
from harness.cluster import Cluster

SENDER, RECEIVER = Worker(0, 0), Worker(0, 1)


def traced(folder: Path, home: int = 0, number: int = 0) -> list[dict[str, Any]]:
    """Two workers of one pipeline, each on its node: an op, a parcel, an op."""
    parcel = Parcel(ParcelKind.ACTIVATION, attempt=1, step=7, stage=1, microbatch=Microbatch(home, number))
    answers: dict[str, Any] = {}
    for node, me in (("a", SENDER), ("b", RECEIVER)):
        beacon = folder / f"beacon-{me.stage}"
        recorder = WorkerRecorder.beside(str(beacon), me, replicas=1, stages=2)
        for step in (6, 7):
            begun = time.monotonic_ns()
            recorder.op(step, begun, begun + 5000, 5000)
        if me == SENDER:
            recorder.sent(parcel, 0, 1, 64)
        else:
            recorder.got(parcel, 64)
        answers[node] = {str(me): recorded(beacon, 7, 7)}
    return step_timeline.traced(None, answers)


def check_format(trace: dict[str, Any]) -> None:
    """As the format's description says: every event has what its phase needs, and arrows have two ends."""
    ends: dict[str, set[int]] = {"s": set(), "f": set()}
    slices = {(e["pid"], e["tid"], e["ts"]) for e in trace["traceEvents"] if e["ph"] == "X"}
    for event in trace["traceEvents"]:
        assert event["ph"] in ("M", "X", "s", "f")
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert event["args"]
            continue
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        assert event["name"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
        else:
            ends[event["ph"]].add(event["id"])
            assert (event["pid"], event["tid"], event["ts"]) in slices, "an arrow ends on a slice"
    assert ends["s"] == ends["f"]


def test_a_trace_has_ops_of_the_wanted_steps_and_arrows_between_nodes(tmp_path: Path) -> None:
    document = {"task": "t", "first": 7, "last": 7, "workers": traced(tmp_path)}
    assert [worker["steps"] for worker in document["workers"]] == [[6, 7], [6, 7]]
    trace = json.loads(json.dumps(chrome_trace(document)))
    check_format(trace)
    events = trace["traceEvents"]
    assert {e["args"]["step"] for e in events if e["ph"] == "X"} == {7}
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]}
    assert {"node a", "node b", "worker 0:0", "worker 0:1"} <= names
    (start,) = [e for e in events if e["ph"] == "s"]
    (end,) = [e for e in events if e["ph"] == "f"]
    assert start["pid"] != end["pid"]
    assert start["name"] == "activation 0.0"


def test_a_trace_names_the_microbatches_of_large_jobs(tmp_path: Path) -> None:
    """Above 255 replicas or microbatches they had another one's name: there were eight bits for each."""
    workers = traced(tmp_path, 300, 700)
    events = chrome_trace({"task": "t", "first": 7, "last": 7, "workers": workers})["traceEvents"]
    (start,) = [event for event in events if event["ph"] == "s"]
    assert start["name"] == "activation 300.700"
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {7}


def test_workers_in_the_same_place_are_shown_together_and_the_odd_one_first() -> None:
    stuck, waits = 'Thread 0x1 (most recent call first):\n  File "a.py", line 3 in read', "  elsewhere"
    rows: list[Any] = [{"worker": f"{n}:0", "text": stuck.replace("0x1", hex(n))} for n in range(5)]
    rows += [{"worker": "5:0", "text": waits}, {"worker": "6:0", "error": "it is stopped"}]
    found = grouped(rows)
    assert [len(workers) for _, workers in found] == [1, 1, 5]
    assert found[-1][0] == '  File "a.py", line 3 in read'
    assert any("it is stopped" in text for text, _ in found)


def test_the_main_thread_is_the_last_one_that_faulthandler_writes() -> None:
    text = 'Thread 0x2 (most recent call first):\n  File "b.py"\n\nCurrent thread 0x1:\n  File "a.py"\n'
    assert main_thread(text) == '  File "a.py"'
    py_spy = (
        'Process 1: x\n\nThread 2 (idle): "MainThread"\n    read (a.py:3)\nThread 3: "other"\n    b (b.py:1)'
    )
    assert main_thread(py_spy) == "    read (a.py:3)"


def test_a_process_says_where_it_is_and_one_that_cannot_yet_is_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # no py-spy
    code = """
import sys, time
from pathlib import Path
if len(sys.argv) > 1:
    from everstep.node.stacks import answer_to_signal
    answer_to_signal(Path(sys.argv[1]))
def here():
    print("ready", flush=True)
    time.sleep(600)
here()
"""
    beacon = tmp_path / "beacon"
    for words in ([str(beacon)], []):
        process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            first, second = stacks_of(process.pid, beacon), stacks_of(process.pid, beacon)
            assert process.poll() is None
            if words:
                assert "in here" in first["text"]
                assert second["text"].count("in here") == 1, "only the newest"
            else:
                assert "has not begun" in first["error"]
        finally:
            process.kill()
            process.wait()
    assert "gone" in stacks_of(process.pid, beacon)["error"]
    assert place_of(beacon).exists()


@pytest.mark.parametrize(
    "text",
    [
        "wandb login: api_key=s3cret99",
        "Authorization: Bearer s3cret99",
        "password: 's3cret99', user",
        "https://me:s3cret99@host/x",
        "hf_s3cret99s3cret99",
        "the cluster's own s3cret99",
    ],
)
def test_credentials_in_what_workers_print_are_replaced(text: str) -> None:
    found = redacted({"text": [text, 5]}, "own s3cret99")
    assert "s3cret99" not in json.dumps(found)
    assert found["text"][1] == 5
    assert redacted("loss 0.5, 100 tokens per second") == "loss 0.5, 100 tokens per second"


@pytest.mark.parametrize(
    "value",
    [
        {"command": ["train.py", "--wandb-token", "s3cret99", "--steps", "5"]},
        {"command": ["train.py", "--hf-api-key=s3cret99"]},
        {"command": "train.py --password s3cret99 --steps 5"},
        {"environment": {"WANDB_API_KEY": "s3cret99"}},
        {"environment": [["HF_TOKEN", "s3cret99"]]},
        {"environment": {"AWS_SECRET_ACCESS_KEY": "s3cret99"}},
        {"a": [{"b": ["-passphrase", "s3cret99"]}]},
    ],
)
def test_credentials_in_commands_and_environments_are_replaced(value: Any) -> None:
    """A command is a list of words: name and value are no longer side by side in one text."""
    found = json.dumps(redacted(value))
    assert "s3cret99" not in found
    assert "[removed]" in found


def test_what_is_no_credential_stays() -> None:
    value = {
        "command": ["train.py", "--data", "tokens", "--steps", "5"],
        "data": {"kind": "tokens", "tokens": 5},
        "needs_token": True,
        "evidence": ["a token was lost", "it is back"],
    }
    assert redacted(value) == value


@pytest.mark.slow
def test_trace_stacks_and_collect_of_a_cluster(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job: dict[str, Any] = {
        "steps": 100_000,
        "replicas": 2,
        "stages": 2,
        "microbatches": 2,
        "model": {"preset": "gpt-tiny"},
        "data": {"kind": "synthetic", "rows": 2, "sequence": 16},
    }
    with Cluster(tmp_path) as cluster:
        cluster.start_coordinator()
        for node in ("a", "b"):
            cluster.start_agent(node, slots=2)
        cluster.submit(job)
        to = ["--address", cluster.addresses["first"], "--token", cluster.token, "--json"]
        out, bundle = tmp_path / "trace.json", tmp_path / "bundle.tar.gz"
        assert main.run(["trace", "job", "--steps", "5:7", "-o", str(out), *to]) == 0, capfd.readouterr().err
        told = json.loads(capfd.readouterr().out)
        assert told["workers"] == 4
        assert told["arrows"] > 0
        trace = json.loads(out.read_text())
        check_format(trace)
        ops = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] != "parcel"]
        assert {e["args"]["step"] for e in ops} == {5, 6, 7}
        assert main.run(["trace", "job", "--steps", "9:5", *to]) == 2
        assert main.run(["stacks", "job", *to]) == 0
        capfd.readouterr()
        assert main.run(["stacks", "job", *to]) == 0
        workers = json.loads(capfd.readouterr().out)["workers"]
        assert len(workers) == 4
        assert all("worker_loop.py" in worker["text"] for worker in workers), workers
        assert main.run(["collect", "-o", str(bundle), *to]) == 0
        capfd.readouterr()
    with tarfile.open(bundle) as archive:
        names = archive.getnames()
        whole = b"".join(archive.extractfile(name).read() for name in names)  # type: ignore[union-attr]
    assert "everstep-collect/tasks/job-stacks.json" in names
    assert "everstep-collect/metrics.txt" in names
    assert cluster.token.encode() not in whole


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="needs py-spy")
def test_py_spy_is_asked_where_it_is_installed_also_for_a_process_that_is_stopped(tmp_path: Path) -> None:
    code = "import time\ndef here():\n    print('ready', flush=True)\n    time.sleep(600)\nhere()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in ("running", "stopped"):
            found = stacks_of(process.pid, tmp_path / "beacon")
            assert found["how"] == "py-spy"
            assert "here (<string>:4)" in main_thread(found["text"])
            process.send_signal(signal.SIGSTOP)
    finally:
        process.kill()
        process.wait()
