"""Checks of others, as findings of ours: a command, NVRx's health service, the taints of a Kubernetes node.

    command    exit code 0 passes; its last line is what people read
    socket     `nvhcd.HealthCheckService` of nvidia-resiliency-ext: gRPC on a Unix socket. What it answers
               counts; where nothing listens that is a warning, as NVRx itself goes on then
    taints     of this node at the API server: what keeps other pods away keeps workers away, but for the
               keys that are tolerated (GPU nodes have taints of their own)

One call of one method does not need a library: HTTP/2 frames are written out here, headers as plain literals,
and of the answer only the message is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import struct
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from urllib.parse import quote

from everstep.net.sockets import in_url, read_exactly
from everstep.node.checks import CheckFinding, State

TOLERATED = ("nvidia.com/gpu", "amd.com/gpu")  # what GPU nodes have in good health
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CORDONED = "node.kubernetes.io/unschedulable"  # the taint of a node that an operator has cordoned
MOST_BYTES = 1 << 20  # of an answer


def command(text: str, limit_s: float) -> CheckFinding:
    """It leads a process group of its own, which ends with it."""
    process = subprocess.Popen(
        text, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        told = process.communicate(timeout=limit_s)[0].decode(errors="replace").strip()
        last = told.splitlines()[-1][:200] if told else "it said nothing"
        state: State = "passed" if process.returncode == 0 else "failed"
        says = last if state == "passed" else f"exit code {process.returncode}: {last}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        state, says = "failed", f"no answer within {limit_s:.0f} s"
    return CheckFinding(check=f"command {text}"[:80], state=state, says=says)


# ------------------------------------------------------------------ NVRx's health service

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/nvhcd.HealthCheckService/RunHealthCheck",
    ":authority": "localhost",
    "content-type": "application/grpc",
    "te": "trailers",
}
_ARGUMENT = b"--no-slurm"  # as NVRx asks it
_DATA, _HEAD, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END, _ACK, _END_HEADERS, _PADDED = 1, 1, 4, 8
_WINDOW_SIZE = 4  # the setting


def health_socket(path: str, limit_s: float) -> CheckFinding:
    name, place = f"socket {path}"[:80], path.removeprefix("unix://")
    try:
        success, code, output, error = _answer(_asked(place, limit_s))
    except TimeoutError:
        return CheckFinding(check=name, state="failed", says=f"no answer within {limit_s:.0f} s")
    except OSError as failed:
        why = failed.strerror or str(failed)
        return CheckFinding(check=name, state="warning", says=f"no health service answers: {why}")
    except ValueError as failed:
        return CheckFinding(check=name, state="warning", says=f"not an answer of NVRx's service: {failed}")
    told = " ".join((error or output or "it said nothing").split())[:200]
    if success:
        return CheckFinding(check=name, state="passed", says=told)
    return CheckFinding(check=name, state="failed", says=f"exit code {code}: {told}")


def _asked(path: str, limit_s: float) -> bytes:
    """The bytes of the answer's message."""
    ends = time.monotonic() + limit_s
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(limit_s)
        line.connect(path)
        message = bytes([1 << 3 | 2, len(_ARGUMENT)]) + _ARGUMENT
        block = b"".join(b"\0" + _text(key) + _text(value) for key, value in _HEADERS.items())
        line.sendall(
            _PREFACE
            + _frame(_SETTINGS, 0, 0, struct.pack("!HI", _WINDOW_SIZE, MOST_BYTES))
            + _frame(_HEAD, _END_HEADERS, 1, block)
            + _frame(_DATA, _END, 1, struct.pack("!BI", 0, len(message)) + message)
        )
        data = b""
        while len(data) <= MOST_BYTES:
            line.settimeout(max(0.01, ends - time.monotonic()))
            size, kind, flags, stream = struct.unpack("!IBBI", b"\0" + read_exactly(line, 9))
            body = read_exactly(line, min(size, MOST_BYTES))
            if kind == _SETTINGS and not flags & _ACK:
                line.sendall(_frame(_SETTINGS, _ACK, 0, b""))
            elif kind == _PING and not flags & _ACK:
                line.sendall(_frame(_PING, _ACK, 0, body))
            elif kind == _DATA and stream == 1:
                data += body[1 : len(body) - body[0]] if flags & _PADDED else body
                line.sendall(_frame(_WINDOW, 0, 0, struct.pack("!I", max(1, size))))
            if kind in (_RESET, _GOAWAY) or (kind in (_DATA, _HEAD) and stream == 1 and flags & _END):
                break
    if len(data) < 5:
        raise ValueError("the call was refused")
    return data[5 : 5 + struct.unpack("!I", data[1:5])[0]]


def _answer(message: bytes) -> tuple[bool, int, str, str]:
    """success, exit_code, output, error: fields 1 to 4; one that is missing is zero or empty."""
    numbers: dict[int, int] = {}
    texts: dict[int, str] = {}
    for field, value in _fields(message):
        if isinstance(value, int):
            numbers[field] = value
        else:
            texts[field] = value.decode(errors="replace")
    code = numbers.get(2, 0)
    return bool(numbers.get(1)), code - (1 << 64 if code >> 63 else 0), texts.get(3, ""), texts.get(4, "")


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        value, at = _varint(message, at)
        if key & 7 == 0:
            yield key >> 3, value
        elif key & 7 == 2 and at + value <= len(message):
            yield key >> 3, message[at : at + value]
            at += value
        else:
            raise ValueError("unknown fields")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise ValueError("it is cut off")
        value |= (message[at] & 127) << shift
        at += 1
        if not message[at - 1] & 128:
            break
    return value, at


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return struct.pack("!I", len(body))[1:] + struct.pack("!BBI", kind, flags, stream) + body


def _text(text: str) -> bytes:
    assert len(text) < 127, "a length of one byte"
    return bytes([len(text)]) + text.encode()


# ------------------------------------------------------------------ taints


def taints(
    node: str, tolerated: Collection[str], limit_s: float, *, api: str = "", account: Path = ACCOUNT
) -> CheckFinding:
    """`api`: its address; empty: of the cluster that this pod is in."""
    name = f"taints {node}"[:80]
    try:
        found = _node_at(api or _api_of_pod(), node, account, limit_s)
    except (OSError, ValueError, KeyError) as error:
        why = f"HTTP {error.code}" if isinstance(error, urllib.error.HTTPError) else str(error)
        return CheckFinding(
            check=name, state="warning", says=f"the API server does not tell them: {why}"[:300]
        )
    keys = {*TOLERATED, *tolerated}
    bad = [one for one in found if one.get("key") not in keys]
    away = [one for one in bad if one.get("effect") in ("NoSchedule", "NoExecute")]
    if away:
        return CheckFinding(check=name, state="failed", says=_named(away))
    if bad:
        return CheckFinding(check=name, state="warning", says=_named(bad))
    says = f"none but {_named(found)}" if found else "none"
    return CheckFinding(check=name, state="passed", says=says)


def _named(found: Iterable[dict[str, str]]) -> str:
    def words(one: dict[str, str]) -> str:
        value = f"={one['value']}" if one.get("value") else ""
        since = f" since {one['timeAdded']}" if one.get("timeAdded") else ""
        return f"{one.get('key')}{value}:{one.get('effect')}{since}"

    return ", ".join(map(words, found))[:300]


def _api_of_pod() -> str:
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}") for name in ("HOST", "PORT"))
    if not host or not port:
        raise ValueError("this is not a pod: KUBERNETES_SERVICE_HOST is not set")
    return f"https://{in_url(host)}:{port}"


def _node_at(api: str, node: str, account: Path, limit_s: float) -> list[dict[str, str]]:
    asked = urllib.request.Request(f"{api}/api/v1/nodes/{quote(node, safe='')}")
    with contextlib.suppress(FileNotFoundError):  # a proxy of an operator may need none
        asked.add_header("Authorization", f"Bearer {(account / 'token').read_text().strip()}")
    authority = account / "ca.crt"
    trusted = ssl.create_default_context(cafile=str(authority) if authority.exists() else None)
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusted)
    )
    with opener.open(asked, timeout=limit_s) as answer:
        table = json.loads(answer.read(MOST_BYTES))
    spec = table["spec"]
    found = [one for one in spec.get("taints") or () if isinstance(one, dict)]
    if spec.get("unschedulable") and not any(one.get("key") == CORDONED for one in found):
        found.append({"key": CORDONED, "effect": "NoSchedule"})
    return found
