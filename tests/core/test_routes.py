"""Which way a reduce goes: every part reaches every owner once, whatever the nodes are."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from everstep.core.worker.mailbox import Mailbox
from everstep.protocol.ops import Replicas, Worker
from everstep.protocol.routes import Routes
from everstep.protocol.work import Members, Resume


@st.composite
def nodes_of(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Up to eight nodes of up to nine members, with gaps in their numbers."""
    hosts = draw(st.dictionaries(st.integers(0, 99), st.integers(0, 7), min_size=1, max_size=40))
    nodes: dict[int, list[int]] = {}
    for member in sorted(hosts):
        nodes.setdefault(hosts[member], []).append(member)
    return tuple(map(tuple, nodes.values()))


@given(nodes_of())
def test_every_part_reaches_every_owner_once_and_every_sum_every_member(
    nodes: tuple[tuple[int, ...], ...],
) -> None:
    routes = {k: Routes(k, nodes) for node in nodes for k in node}
    members = sorted(routes)
    home = {k: node for node in nodes for k in node}
    arrived = {owner: Counter({owner: 1}) for owner in members}  # an owner: of whom it has a part
    holds = {k: Counter({k: 1}) for k in members}  # a member: whose chunks' sums it has
    for k, mine in routes.items():
        assert mine.members == tuple(members)
        for to in mine.mates or mine.owners:
            if mine.mates:
                assert k in routes[to].mates
                assert to in mine.of_part(k, to), "a gatherer takes its own chunk, too"
            for owner in mine.of_part(k, to):
                if owner == to:
                    arrived[owner][k] += 1
                else:
                    assert owner in routes[to].owners, "and passes on what it took for others"
        if mine.mates:  # one part for the node
            for owner in mine.owners:
                assert owner not in home[k]
                for one in home[k]:
                    assert one == k or owner in routes[one].of_part(one, k)
                    arrived[owner][one] += 1
        assert set(mine.senders) == {
            j for j, other in routes.items() if k in (*other.mates, *other.owners)
        }, "who sends to an owner is waited for, and nobody else"
        for reader in mine.gatherers if mine.passes_on else mine.senders:
            holds[reader][k] += 1
        for mate in mine.mates if mine.passes_on else ():
            assert set(mine.of_sum(k, k)) == {k, *mine.owners}
            holds[mate].update(mine.of_sum(k, k))
    assert all(Counter(members) == found for found in arrived.values())
    assert all(Counter(members) == found for found in holds.values())


def test_eight_nodes_of_eight_need_fourteen_partners_instead_of_sixty_three() -> None:
    nodes = tuple(tuple(range(8 * n, 8 * n + 8)) for n in range(8))
    assert {len(Routes(k, nodes).partners) for k in range(64)} == {14}
    assert {len(Routes.direct(k, range(64)).partners) for k in range(64)} == {63}


def test_without_the_address_of_one_every_part_goes_directly() -> None:
    book = {Worker(k, 0): (f"host-{k // 2}", 1000 + k) for k in range(4)}

    def partners(known: dict[Worker, tuple[str, int]]) -> set[int]:
        mail = Mailbox(Worker(0, 0), incarnation=1)
        row = Members(1, (Replicas(range(4)),), (1,))
        mail.order = Resume(epoch=1, attempts=((0, 0),), step=1, members=(row,), book=known)
        return set(mail.routes(1).mates)

    assert partners(book) == {1}
    assert partners({w: at for w, at in book.items() if w.replica != 3}) == set()
