"""Fabrics as files, catalogues of ports, fabrics from traces, and what the pictures show."""

import tomllib

import pytest

from everstep.errors import UserError
from everstep.fabric import Flow, clos
from everstep.fabric.catalogue import Catalogue, Tuple4
from everstep.fabric.discovery import PathTrace, topology_of
from everstep.fabric.document import topology_document, topology_from

LAB = """
[fabric]
name = "lab"
[[leaf]]
name = "l1"
[[leaf]]
name = "l2"
[[spine]]
name = "s1"
[[node]]
name = "h1"
ports = [{ leaf = "l1", gbps = 0.1, address = "10.1.1.2" }]
[[node]]
name = "h2"
ports = [{ leaf = "l2", gbps = 0.1, address = "10.1.2.2" }]
[[cable]]
leaf = "l1"
spine = "s1"
gbps = 0.1
spine_address = "10.11.1.2"
leaf_address = "10.11.1.1"
[[cable]]
leaf = "l2"
spine = "s1"
gbps = 0.1
spine_address = "10.12.1.2"
leaf_address = "10.12.1.1"
[[task]]
name = "t"
replicas = 2
stages = 1
gradient_bytes = 1e6
workers = ["h1", "h2:0"]
"""


def test_a_fabric_file_says_what_is_connected_and_comes_back_as_it_was() -> None:
    topology = topology_from(tomllib.loads(LAB))
    (path,) = topology.paths(("h1", 0), ("h2", 0))
    assert topology.spell(tuple(path)) == "h1.0.p0 > l1 > s1 > l2 > h2.0.p0"
    assert topology_from(topology_document(topology)) == topology


@pytest.mark.parametrize(
    ("was", "becomes", "sentence"),
    [
        ('leaf = "l1", gbps', 'leaf = "l9", gbps', r"h1: its port names leaf 'l9', which is not a leaf"),
        ("gbps = 0.1, address", "gbps = -1, address", r"h1: gbps of NIC 0 must be more than 0"),
        (
            'spine = "s1"\ngbps = 0.1',
            'spine = "s5"\ngbps = 0.1',
            r"link l1>s5: a link joins a leaf and a spine",
        ),
        ('[fabric]\nname = "lab"', "[fabric]\nnam = 1", r"\[fabric\]: 'nam' is not a field"),
        ("[[task]]", '[condition]\n"l1>s9" = 0.0\n[[task]]', r"condition: 'l1>s9' is not a link"),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence_that_names_it(was, becomes, sentence) -> None:
    assert was in LAB
    document = tomllib.loads(LAB.replace(was, becomes, 1))
    with pytest.raises(UserError, match=sentence):
        topology_from(document)


def test_three_leaves_traced_from_every_side_are_one_fabric() -> None:
    traces = [
        PathTrace(
            source=f"10.1.{a}.2",
            target=f"10.1.{b}.2",
            hops=(f"10.1.{a}.1", f"10.{10 + a}.{s}.2", f"10.{10 + b}.{s}.1"),
        )
        for a in (1, 2, 3)
        for b in (1, 2, 3)
        for s in (1, 2)
        if a != b
    ]
    found = topology_of(traces, link_gbps=1.0, port_gbps=2.0)
    assert (len(found.leaves), len(found.spines), len(found.fabric_links)) == (3, 2, 12)
    seen_from_one_node = topology_of(traces[:4], link_gbps=1.0, port_gbps=2.0)
    for topology in (found, seen_from_one_node):
        again = topology_from(topology_document(topology))
        assert set(again.fabric_links) == set(topology.fabric_links)
        assert again.nodes == topology.nodes
    with pytest.raises(UserError, match="there are 2 switches"):
        topology_of([PathTrace(source="a", target="b", hops=("x", "y"))], link_gbps=1.0, port_gbps=1.0)


def test_two_nodes_under_one_leaf_share_it() -> None:
    found = topology_of([PathTrace(source="a", target="b", hops=("x",))], link_gbps=1.0, port_gbps=1.0)
    assert (len(found.leaves), len(found.spines)) == (1, 0)


KEY = Tuple4(protocol="tcp", source="10.0.0.1", target="10.0.0.2", target_port=5000)


def test_a_port_is_given_out_once_and_only_while_it_is_fresh() -> None:
    catalogue = Catalogue(fresh_s=10.0)
    catalogue.learn(KEY, {1000: ("s1", "d1"), 1001: ("s2", "d2"), 1002: ("s1", "d1")}, now_s=0.0)
    assert [catalogue.take(KEY, ("s1",), 5.0) for _ in range(3)] == [1000, 1002, None]
    assert catalogue.take(KEY, ("s2", "d2"), 11.0) is None


def test_entries_survive_a_file() -> None:
    catalogue = Catalogue()
    catalogue.learn(KEY, {1001: ("s2", "d2")}, now_s=0.0)
    again = Catalogue.from_document(catalogue.document())
    assert again.ports(KEY, 1.0) == {("s2", "d2"): [1001]}
    with pytest.raises(UserError, match="probe again"):
        Catalogue.from_document({"entries": []})


def crossing(spines: int = 4) -> tuple:
    topology = clos(name="f", nodes=2, nics=1, port_gbps=40, nodes_per_leaf=1, spines=spines, uplink_gbps=10)
    flows = [
        Flow(name=f"f{n}", task="t", phase="p", group="g", source=("n0", 0), target=("n1", 0), bytes=1e9)
        for n in range(4)
    ]
    return topology, flows
