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


def test_the_order_to_answer_may_come_later_than_the_call(server: PairServer) -> None:
    threading.Timer(0.3, server.expect, [KEY]).start()
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
