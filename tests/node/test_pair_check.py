"""Two nodes measure the network between them, over real sockets."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from everstep.node import pair_check
from everstep.node.pair_check import PairServer, measured
from everstep.protocol.messages import MeasurePair

KEY = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def server() -> Iterator[PairServer]:
    made = PairServer("127.0.0.1", clock=lambda: time.time() - 30.0)
    made.open()
    yield made
    made.close()


def order(server: PairServer, key: str = KEY) -> MeasurePair:
    return MeasurePair(peer="b", host=server.host, port=server.port, key=key)


def test_rates_answers_and_the_difference_of_the_clocks_are_measured(server: PairServer) -> None:
    server.expect(KEY)
    found = measured(order(server))
    assert (found.peer, found.key, found.error) == ("b", KEY, "")
    assert found.out_mb_s > 1
    assert found.in_mb_s > 1
    assert 0 < found.answer_ms < 1000
    assert found.clock_off_s == pytest.approx(30.0, abs=0.5)


def test_a_key_counts_once_and_an_unknown_one_not_at_all(
    server: PairServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.expect(KEY)
    assert not measured(order(server)).error
    monkeypatch.setattr(pair_check, "TRY_S", 0.5)
    assert measured(order(server)).error == "it does not know of this check"
    assert measured(order(server, "x" * 32)).error == "it does not know of this check"


def test_of_two_callers_with_one_key_at_once_one_is_served(
    server: PairServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one's thread ended with a KeyError."""
    both, raised = threading.Barrier(2, timeout=30), list[object]()

    def compared(key: bytes, given: bytes) -> bool:
        both.wait()
        return key == given

    monkeypatch.setattr(pair_check.hmac, "compare_digest", compared)
    monkeypatch.setattr(threading, "excepthook", raised.append)
    server.expect(KEY)
    callers = [socket.create_connection((server.host, server.port)) for _ in range(2)]
    for caller in callers:
        caller.settimeout(30)
        caller.sendall(KEY.encode())
    assert sorted(caller.recv(1) for caller in callers) == [b"", b"k"]
    for caller in callers:
        caller.close()
    assert raised == []


def test_the_order_to_answer_may_come_later_than_the_call(server: PairServer) -> None:
    threading.Timer(0.3, server.expect, [KEY]).start()
    assert not measured(order(server)).error


def test_a_caller_that_brings_its_key_byte_by_byte_is_hung_up_on(
    server: PairServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte had 10 s, so 16 strangers kept all nodes from measuring the network for minutes."""
    monkeypatch.setattr(pair_check, "STRANGER_S", 0.3)
    slow = [socket.create_connection((server.host, server.port)) for _ in range(pair_check.MOST_CALLERS)]
    over = time.monotonic() + 20.0
    while slow and time.monotonic() < over:
        for caller in list(slow):
            try:
                caller.sendall(b"0")
            except OSError:
                caller.close()
                slow.remove(caller)
        time.sleep(0.1)
    assert not slow
    server.expect(KEY)
    assert not measured(order(server)).error


def test_a_closed_port_and_a_silent_peer_are_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_check, "TRY_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # accepts, and says nothing
        port = deaf.getsockname()[1]
        asked = MeasurePair(peer="b", host="127.0.0.1", port=port, key=KEY)
        assert measured(asked).error == "no answer in time"
    assert measured(asked).error == "Connection refused"


def test_a_bit_that_is_changed_on_its_way_is_seen(
    server: PairServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.expect(KEY)
    monkeypatch.setattr(pair_check, "_give", lambda line, size: (line.sendall(bytes(size)), 7)[1])
    assert measured(order(server)).error == "other bytes arrived than were sent"
