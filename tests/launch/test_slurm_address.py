"""A node is reached by an address that means the same elsewhere."""

from __future__ import annotations

import socket

import pytest

from everstep.errors import UserError
from everstep.launch.slurm import shell as slurm_shell
from everstep.launch.slurm.address import address_of, free_port
from everstep.launch.slurm.slurm_text import SlurmNode
from everstep.net.sockets import in_url


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What names are looked up as, and what Slurm knows of one node."""
    known = {"n1": "10.0.0.1", "n2": "127.0.1.1"}

    def look_up(name: str, port: object) -> list[object]:
        if name not in known:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, 1, 6, "", (known[name], 0))]

    nodes = {
        "n2": SlurmNode(name="n2", states=frozenset(), address="10.0.0.2"),
        "n3": SlurmNode(name="n3", states=frozenset(), address="10.0.0.3"),
        "n4": SlurmNode(name="n4", states=frozenset(), address="n4"),
    }
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(slurm_shell, "nodes", lambda wanted: {n: nodes[n] for n in wanted if n in nodes})
    return known


def test_a_name_that_can_be_looked_up_is_used_as_it_is(names: dict[str, str]) -> None:
    assert address_of("n1") == "n1"


def test_a_name_that_means_loopback_here_or_nothing_gives_way_to_slurms_address(
    names: dict[str, str],
) -> None:
    assert address_of("n2") == "10.0.0.2"
    assert address_of("n3") == "10.0.0.3"


@pytest.mark.parametrize("node", ["n4", "n5"])
def test_a_node_that_nobody_could_reach_is_told_what_to_give(names: dict[str, str], node: str) -> None:
    with pytest.raises(UserError, match="--interface"):
        address_of(node)


def test_an_interface_is_used_if_it_is_there() -> None:
    assert address_of("n1", "lo") == "127.0.0.1"
    with pytest.raises(UserError, match=r"ib7 is not on this node; it has .*lo"):
        address_of("n1", "ib7")


def test_a_port_that_is_taken_gives_way_to_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert free_port("127.0.0.1", port) != port
    assert free_port("127.0.0.1", port) == port


def test_addresses_of_ipv6_are_bracketed_in_urls() -> None:
    assert in_url("fe80::1") == "[fe80::1]"
    assert in_url("n1") == "n1"
