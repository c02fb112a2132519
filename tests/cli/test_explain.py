"""`everstep explain`: the table of severities, and incidents as a coordinator tells them."""

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from everstep.cli import main
from everstep.cli.explain import story
from everstep.core.faults.severity import ErrorKind
from everstep.outbound import OURS

INCIDENT: dict[str, Any] = {
    "number": 7,
    "task": "gpt",
    "node": "n3",
    "workers": ["1:0"],
    "what": "killed by SIGKILL",
    "opened_at": 1000.0,
    "closed_at": 1000.875,
    "evidence": [
        {"at": 1000.0, "source": "exit", "text": "killed by SIGKILL", "event": 41},
        {"at": 1000.004, "source": "log", "text": "its last line: [step 41] loss 2.71"},
    ],
    "verdict": {"kind": "killed", "severity": 2, "because": "the process was killed", "event": 41},
    "remedies": [
        {
            "at": 1000.006,
            "what": "restart worker 1:0",
            "because": "It has 3 restarts left.",
            "outcome": "worked",
        }
    ],
    "timeline": [{"at": 1000.010, "because": "Worker 0:0 takes its 2 microbatches."}],
}


OPEN = INCIDENT | {"number": 12, "closed_at": None, "what": "hung in F3 for 2.1 s " + "and more " * 12}
EVENT: dict[str, Any] = {
    "event": 41,
    "at": 1000.0,
    "text": "worker 1:0 of gpt exited: killed by SIGKILL",
    "actions": [{"text": "start worker 1:0 of gpt on n3", "because": "it was lost"}],
}


class Coordinator(http.server.BaseHTTPRequestHandler):
    answers: dict[str, tuple[int, bytes]] = {}  # noqa: RUF012

    def do_GET(self) -> None:
        code, body = self.answers.get(self.path, (404, b"{}"))
        if self.headers.get("Authorization") != "Bearer secret":
            code = 401
        self.send_response(code)
        self.send_header(OURS, "coordinator")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    Coordinator.answers = {
        "/v1/incidents?last=10": (200, json.dumps([INCIDENT, OPEN]).encode()),
        "/v1/incidents/7": (200, json.dumps(INCIDENT).encode()),
        "/v1/incidents/8": (200, b"<html>a router</html>"),
        "/v1/incidents/9": (500, b""),
        "/v1/incidents/10": (200, b'{"number": 10, "evidence": [{"at": "noon"}]}'),
        "/v1/incidents/11": (200, b'{"number": 11}'),
        "/v1/events/41": (200, json.dumps(EVENT).encode()),
    }
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Coordinator)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def explain(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main.run(["explain", *arguments])
    told = capfd.readouterr()
    return code, told.out, told.err


def test_severities_as_a_table_and_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = explain(capfd, "severities", "--patterns")
    assert (code, err) == (0, "")
    assert all(str(kind) in out for kind in ErrorKind)
    assert "SEV1 isolate the node;" in " ".join(out.split())
    code, out, err = explain(capfd, "severities", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    kinds = {each["kind"]: each for each in document["kinds"]}
    assert kinds["ecc error"]["severity"] == "SEV1"
    assert 48 in kinds["ecc error"]["xids"]
    assert "uncorrectable ECC error encountered" in {p["pattern"] for p in kinds["ecc error"]["patterns"]}


def test_without_a_number_recent_incidents_are_listed_uncut(
    address: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = explain(capfd, "--address", address, "--token", "secret")
    assert (code, err) == (0, "")
    head, closed, still_open, hint = out.splitlines()
    assert head.split() == ["incident", "opened", "where", "workers", "state", "what"]
    assert closed.split()[0] == "7"
    assert closed.endswith("gpt node n3  1:0      closed after 875 ms  killed by SIGKILL")
    assert still_open.endswith(f"open                 {OPEN['what'].rstrip()}")
    assert hint == "everstep explain 12 tells one of them in full"
    code, out, _ = explain(capfd, "--address", address, "--token", "secret", "--json")
    assert [one["number"] for one in json.loads(out)["incidents"]] == [7, 12]


def test_an_incident_is_told_in_order_with_offsets(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = explain(capfd, "7", "--address", address, "--token", "secret")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert out.startswith("incident 7: killed by SIGKILL\ntask gpt, node n3, worker 1:0\n")
    assert "closed after 875 ms" in out
    assert [line[:3] for line in lines if line and line[0].startswith("+")] == [
        ["+0", "ms", "evidence"],
        ["+4", "ms", "evidence"],
        ["+4", "ms", "verdict"],
        ["+6", "ms", "remedy"],
        ["+10", "ms", "note"],
        ["+875", "ms", "closed"],
    ]


def test_an_event_is_explained_by_what_followed(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = explain(capfd, "event:41", "--address", address, "--token", "secret")
    assert code == 0
    assert [line.strip() for line in out.splitlines()] == [
        "event 41, at 1000.000 s: worker 1:0 of gpt exited: killed by SIGKILL",
        "→ start worker 1:0 of gpt on n3: it was lost",
    ]


def test_json_is_the_coordinators_document(
    address: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_ADDRESS", address)
    monkeypatch.setenv("EVERSTEP_TOKEN", "secret")
    code, out, _ = explain(capfd, "7", "--json")
    assert code == 0
    assert json.loads(out) == INCIDENT


def test_an_incident_that_is_still_open_is_told_as_far_as_it_is(
    address: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = explain(capfd, "11", "--address", address, "--token", "secret")
    assert code == 0
    assert out.startswith("incident 11: unnamed")
    unfinished = INCIDENT | {"closed_at": None, "remedies": [INCIDENT["remedies"][0] | {"outcome": ""}]}
    assert [m.text for m in story(unfinished)][
        3
    ] == "restart worker 1:0 (in progress): It has 3 restarts left."
    assert all(moment.what != "closed" for moment in story(unfinished))


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["severties"], 2, "'severties' cannot be explained; give the number of an incident"),
        (["7", "--address", "127.0.0.1:7077"], 2, "is not of the form http://127.0.0.1:7077"),
        (["7", "--address", "http://127.0.0.1:1"], 2, "no coordinator at http://127.0.0.1:1"),
        (["7", "--address", "{}"], 2, "answers 401"),
        (["12", "--address", "{}", "--token", "secret"], 2, "answers 404"),
        (
            ["8", "--address", "{}", "--token", "secret"],
            1,
            "does not answer as a coordinator does",
        ),
        (["9", "--address", "{}", "--token", "secret"], 1, "answers 500"),
        (["10", "--address", "{}", "--token", "secret"], 1, "this version cannot read incident 10"),
    ],
)
def test_what_cannot_be_explained_is_one_sentence(
    arguments: list[str], code: int, sentence: str, address: str, capfd: pytest.CaptureFixture[str]
) -> None:
    told = explain(capfd, *(argument.format(address) for argument in arguments))
    assert told[0] == code
    assert told[1] == ""
    assert sentence in told[2]
    assert len(told[2].splitlines()) == 1
