"""Real sockets on loopback: probes, ports by plan, moved links, and connects of code that is not ours."""

import os
import queue
import socket
import threading
import time

import pytest
import torch

from everstep.errors import UserError
from everstep.net.envelope import Envelope
from everstep.net.links import LinkEvents, Links
from everstep.net.sockets import Way, progress_of
from everstep.protocol.parcels import Parcel, ParcelKind
from everstep_fabric.catalogue import Tuple4
from everstep_fabric.probe import REACHED, Budget, Prober, probe
from everstep_fabric.topology import FabricNode, Port, Switch, Topology

HOME = Topology(
    name="home",
    nodes=(FabricNode(name="me", ports=(Port(nic=0, plane=0, leaf="l", gbps=1.0, address="127.0.0.1"),)),),
    leaves=(Switch(name="l"),),
    spines=(),
    fabric_links=(),
)
KEY = Tuple4(protocol="tcp", source="127.0.0.1", target="127.0.0.1", target_port=9)


def free_ports(count: int) -> range:
    """A stretch below the kernel's own range that nobody listens on; another for each process of tests."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for start in range(20100 + 1000 * process, 30000, 50):
        try:
            for port in range(start, start + count):
                with socket.socket() as sock:
                    sock.bind(("127.0.0.1", port))
        except OSError:
            continue
        return range(start, start + count)
    pytest.skip("no free ports")


def test_a_target_that_answers_itself_is_reached() -> None:
    ports = free_ports(4)
    with socket.create_server(("127.0.0.1", 0)) as server:
        key = Tuple4(
            protocol="tcp", source="127.0.0.1", target="127.0.0.1", target_port=server.getsockname()[1]
        )
        assert probe(key, list(ports), 64, reply_s=1.0) == dict.fromkeys(ports, REACHED)


def test_a_port_that_carries_this_very_connection_is_left_out() -> None:
    first, second = free_ports(2)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as busy:
        busy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        busy.bind(("127.0.0.1", first))
        busy.connect(server.getsockname())
        key = Tuple4(
            protocol="tcp", source="127.0.0.1", target="127.0.0.1", target_port=server.getsockname()[1]
        )
        assert probe(key, [first, second], 64, reply_s=1.0) == {second: REACHED}


def test_strangers_are_not_probed_and_foreign_sources_are_a_sentence() -> None:
    prober = Prober(topology=HOME, ports=free_ports(2))
    with pytest.raises(UserError, match=r"192\.0\.2\.7 is not the address of a node in fabric home"):
        prober.learn(Tuple4(protocol="tcp", source="127.0.0.1", target="192.0.2.7", target_port=9), [20100])
    with pytest.raises(UserError, match=r"192\.0\.2\.1 is not an address of this machine"):
        prober.learn(Tuple4(protocol="tcp", source="192.0.2.1", target="127.0.0.1", target_port=9), [20100])
    with pytest.raises(UserError, match="use tcp or udp"):
        prober.learn(Tuple4(protocol="gre", source="127.0.0.1", target="127.0.0.1", target_port=9), [20100])
    with pytest.raises(UserError, match="24000-24999"):
        Prober(topology=HOME, ports=range(0))


def test_probing_ends_when_its_packets_or_its_seconds_are_spent() -> None:
    few = Prober(topology=HOME, ports=free_ports(8), budget=Budget(packets=5, reply_s=0.01))
    few.learn(KEY, list(few.ports))
    few.port_for(KEY, ("nowhere",))
    assert few.budget.sent <= 5
    clock = iter(range(0, 1000, 10))
    late = Budget(seconds=25.0, clock=lambda: float(next(clock)))
    assert [late.take(1) for _ in range(4)] == [1, 1, 0, 0]


def links(inbox: queue.Queue, **more) -> Links:
    events = LinkEvents(
        deliver=lambda frame: inbox.put(("frame", frame.parcel.step)),
        broken=lambda address: inbox.put(("broken", address)),
        failed=lambda error: inbox.put(("failed", error)),
    )
    made = Links(
        events,
        token=b"t" * 16,
        host="127.0.0.1",
        empty=lambda shape, dtype: torch.empty(shape, dtype=dtype),
        **more,
    )
    made.start()
    return made


def send(sender: Links, to: object, step: int) -> None:
    parcel = Parcel(ParcelKind.ACTIVATION, 0, step, 0, None, 0, 0, 0)
    sender.send(to, parcel, Envelope(), torch.ones(1000))


def test_a_link_takes_the_source_port_it_is_given_and_another_one_after_a_move() -> None:
    wanted = list(free_ports(2))
    here, there = queue.Queue(), queue.Queue()
    left = list(wanted)
    sender = links(here, way=lambda host, port: Way("127.0.0.1", left.pop(0), host))
    receiver = links(there)
    try:
        send(sender, receiver.address, 1)
        assert there.get(timeout=5) == ("frame", 1)
        assert [sock.getsockname()[1] for _, sock in sender.sockets()] == wanted[:1]
        sender.move(receiver.address)
        assert here.get(timeout=5) == ("broken", receiver.address)
        send(sender, receiver.address, 2)
        assert there.get(timeout=5) == ("frame", 2)
        ((_, sock),) = sender.sockets()
        assert sock.getsockname()[1] == wanted[1]
        deadline = time.monotonic() + 5
        while (seen := progress_of(sock)).waiting and time.monotonic() < deadline:
            pass
        assert seen.acked_bytes > 4000
    finally:
        sender.stop()
        receiver.stop()


def test_a_path_that_is_probed_for_long_does_not_hold_up_the_thread_that_sends() -> None:
    """Up to two seconds for each peer, in the thread that trains, after every death."""
    here, there = queue.Queue(), queue.Queue()
    probed = threading.Event()

    def probe(host: str, port: int) -> Way | None:
        assert probed.wait(30)
        return None

    sender, receiver = links(here, way=probe), links(there)
    try:
        for step in (1, 2):
            send(sender, receiver.address, step)
        assert sender.queued(receiver.address) > 8000
        assert there.empty()
        probed.set()
        assert [there.get(timeout=5) for _ in (1, 2)] == [("frame", 1), ("frame", 2)]
        probed.clear()
        sender.move(receiver.address)
        assert here.get(timeout=5) == ("broken", receiver.address)
        send(sender, receiver.address, 3)
        sender.move(receiver.address)  # while it is probed
        assert here.get(timeout=5) == ("broken", receiver.address)
        probed.set()
        send(sender, receiver.address, 4)
        assert there.get(timeout=5) == ("frame", 4)
    finally:
        probed.set()
        sender.stop()
        receiver.stop()


def test_a_message_sent_between_a_break_and_its_notice_does_not_hide_the_break() -> None:
    """The next connection may be open before the I/O thread has buried the last one: still it is told."""
    here, there = queue.Queue(), queue.Queue()
    sender, receiver = links(here), links(there)
    try:
        send(sender, receiver.address, 1)
        assert there.get(timeout=5) == ("frame", 1)
        for step in range(2, 30):
            sender.move(receiver.address)
            send(sender, receiver.address, step)  # often before the old one is dropped
            assert here.get(timeout=5) == ("broken", receiver.address)
    finally:
        sender.stop()
        receiver.stop()
