"""`everstep agent --fabric-ports`: which worker gets which ports, and how workers follow the routes that a
coordinator with `--fabric` plans.
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everstep.errors import UserError
from everstep.protocol.messages import Sender
from everstep.protocol.ops import Worker
from everstep_fabric import Flow, Routing, allocate
from everstep_fabric.at_node import FabricSettings
from everstep_fabric.document import routes_document
from everstep_fabric.flows import connection_name
from everstep_fabric.steer import PlannedPath, SourcePorts, Steering
from tests.fabric import fabric_testbed

TESTBED = fabric_testbed.Testbed(leaves=2, spines=4, rate_mbit=40.0)
ME = Sender("job", Worker(0, 1), 1)
PEERS = [("10.1.2.2", 5000), ("10.1.2.2", 5001)]


def routing(peers: list[tuple[str, int]] = PEERS, *, over: tuple[int, ...] = ()) -> Routing:
    """This worker's flows to these peers, and one of another worker. `over`: the spine of each."""
    names = [connection_name("job", "0:1", *peer) for peer in peers]
    names.append(connection_name("job", "0:11", *PEERS[0]))
    flows = tuple(
        Flow(name=n, task="job", phase="reduce", group=n, source=("h1", 0), target=("h2", 0), bytes=1e6)
        for n in names
    )
    found = allocate(TESTBED.topology(), flows)
    if not over:
        return found
    ways = found.topology.paths(("h1", 0), ("h2", 0))
    return replace(found, paths=np.array([ways[spine] for spine in over]))


def settings(slots: int = 2) -> FabricSettings:
    return FabricSettings(ports=range(24000, 25000), slots=slots)


def follows(folder: Path) -> tuple[Steering, list[tuple[str, int]]]:
    """A worker's steering, and the peers whose connections it closes."""
    moved: list[tuple[str, int]] = []
    found = Steering.of(settings().settings(folder, [1]), ME, "10.1.1.2", 0)
    found.move = moved.append
    return found, moved


def test_each_worker_and_each_of_its_shards_has_ports_of_its_own(tmp_path: Path) -> None:
    assert settings().settings(tmp_path, [0])["ports"] == [[24000, 24499]]
    assert settings().settings(tmp_path, [1])["ports"] == [[24500, 24999]]
    assert settings(4).settings(tmp_path, [2, 3])["ports"] == [[24500, 24749], [24750, 24999]]


def test_too_few_ports_are_one_sentence() -> None:
    with pytest.raises(UserError, match="has 1000 ports for 40 slots; give at least 64 each"):
        settings(40)


def test_without_routes_any_port_will_do(tmp_path: Path) -> None:
    steering, _ = follows(tmp_path)
    assert steering.ports("10.1.2.2", 5000) is None
    assert steering.look() == []


def test_a_worker_takes_its_own_flows_and_opens_again_only_what_has_another_path(tmp_path: Path) -> None:
    settings().take(tmp_path, routes_document(routing(over=(0, 1, 2))))
    steering, moved = follows(tmp_path)
    assert set(steering.ports.flow_of) == set(PEERS)
    steering.look_at_routes()
    assert moved == []
    settings().take(tmp_path, routes_document(routing(over=(0, 3, 2))))
    steering.look_at_routes()
    assert moved == [PEERS[1]]
    assert steering.watch is not None
    steering.watch.validate()


def test_a_path_has_the_addresses_of_its_plane(tmp_path: Path) -> None:
    """Both planes are planned for a worker's two peers; each connection takes the ports of its own."""
    two = replace(TESTBED, planes=2)
    flows = [replace(flow, bytes=1e6) for flow in routing().flows[:2]]
    settings().take(tmp_path, routes_document(allocate(two.topology(), flows)))
    steering, _ = follows(tmp_path)
    ends = {(path.source, path.target) for path in steering.ports.paths.values()}
    assert ends == {("10.1.1.2", "10.1.2.2"), ("10.2.1.2", "10.2.2.2")}


def test_a_peer_that_does_not_listen_in_a_plane_is_reached_as_before(tmp_path: Path) -> None:
    """Its agent was started without --bind: every connection to the other plane would be refused for ever."""
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as peer:
        port = peer.getsockname()[1]
        flow = replace(routing().flows[0], name=connection_name("job", "0:1", "127.0.0.1", port))
        topology = replace(TESTBED, planes=2).topology()
        path = PlannedPath(("10.111.1.2",), "127.0.0.1", "127.0.0.2")
        ports = SourcePorts("127.0.0.1", range(24000, 24100), told.append)
        ports.take(topology, {("127.0.0.1", port): (flow.name, path)})
        assert ports("127.0.0.1", port) is None
    assert "start the agents of nodes with several planes with --bind 0.0.0.0" in told[0]


def test_a_peer_that_was_replaced_is_another_flow_and_one_that_is_gone_is_none(tmp_path: Path) -> None:
    settings().take(tmp_path, routes_document(routing()))
    steering, _ = follows(tmp_path)
    settings().take(tmp_path, routes_document(routing([("10.1.2.2", 6000)])))
    steering.look_at_routes()
    assert set(steering.ports.flow_of) == {("10.1.2.2", 6000)}


def test_routes_that_cannot_be_read_change_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings().take(tmp_path, routes_document(routing()))
    steering, moved = follows(tmp_path)
    settings().take(tmp_path, {**routes_document(routing()), "paths": [[0, 1, 2, 3]]})
    steering.look_at_routes()
    assert (moved, set(steering.ports.flow_of)) == ([], set(PEERS))
    assert "the routes are not followed" in capfd.readouterr().err


LOOK = """
import json
from everstep_fabric.at_node import FabricSettings
from everstep_fabric.document import topology_document
from tests.fabric.fabric_testbed import Testbed
from pathlib import Path
import tempfile

testbed = Testbed(leaves=3, spines=4, rate_mbit=40.0)
found = []
with testbed.up(), tempfile.TemporaryDirectory() as folder:
    testbed.seed(1)
    settings = FabricSettings(ports=range(24000, 28000), slots=1)
    settings.take(Path(folder), {"fabric": topology_document(testbed.topology())})
    look = lambda n: testbed.inside(f"h{n}", lambda: settings.look(testbed.host(n)))
    found.append([look(1), look(2), look(3)])
    testbed.kill(2, 1)
    found.append([look(1), look(2), look(3)])
    testbed.heal(2, 1)
    found.append([look(1), look(2), look(3)])
print(json.dumps(found))
"""


def _needs_testbed() -> Path:
    reason = fabric_testbed.why_not()
    if reason is not None:
        pytest.skip(reason)
    return Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_dead_cable_is_found_by_probes_from_every_node_and_so_is_its_repair() -> None:
    root = _needs_testbed()
    done = subprocess.run(
        ["unshare", "-m", "-n", "--propagation", "private", sys.executable, "-c", LOOK],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"},
    )
    assert done.returncode == 0, done.stderr
    healthy, broken, healed = json.loads(done.stdout)
    assert healthy == healed == [[], [], []]
    assert broken == [["s1>l2"], ["l2>s1"], ["s1>l2"]]


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 3, 4])
def test_workers_send_by_the_spines_that_the_coordinator_has_planned(dead: int) -> None:
    """Real agents and workers on two hosts of a network of namespaces; the cables count the bytes. A cable
    that is dead from the start is found by the agents, and no flow is planned over it.
    """
    found = _trained("--dead", str(dead))
    sent = {int(spine): count for spine, count in found["spine_bytes"].items()}
    busy = {spine for spine, count in sent.items() if count > sum(sent.values()) / 5}
    assert found["finished"]
    assert len(found["planned_spines"]) == 2
    assert busy == set(found["planned_spines"]) - {dead}, found


@pytest.mark.slow
def test_workers_send_by_both_planes_where_a_host_has_a_port_in_each() -> None:
    """The plan puts the two workers of a host into different planes; only one had been used."""
    found = _trained("--planes", "2")
    assert found["finished"]
    assert min(found["plane_bytes"]) > sum(found["plane_bytes"]) / 4, found


def _trained(*words: str) -> Any:
    root = _needs_testbed()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.fabric.steered_training",
            "--harm",
            "none",
            "--steps",
            "8",
            "--json",
            *words,
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
