"""Fabrics as files, catalogues of ports."""

import tomllib

import pytest

from everstep.errors import UserError
from everstep_fabric.catalogue import Catalogue, Tuple4
from everstep_fabric.document import topology_document, topology_from

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
        ("[[leaf]]", '[condition]\n"l1>s9" = 0.0\n[[leaf]]', r"condition: 'l1>s9' is not a link"),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence_that_names_it(was, becomes, sentence) -> None:
    assert was in LAB
    document = tomllib.loads(LAB.replace(was, becomes, 1))
    with pytest.raises(UserError, match=sentence):
        topology_from(document)


KEY = Tuple4(protocol="tcp", source="10.0.0.1", target="10.0.0.2", target_port=5000)


def test_a_port_is_given_out_once_and_only_while_it_is_fresh() -> None:
    catalogue = Catalogue(fresh_s=10.0)
    catalogue.learn(KEY, {1000: ("s1", "d1"), 1001: ("s2", "d2"), 1002: ("s1", "d1")}, now_s=0.0)
    assert [catalogue.take(KEY, ("s1",), 5.0) for _ in range(3)] == [1000, 1002, None]
    assert catalogue.take(KEY, ("s2", "d2"), 11.0) is None
