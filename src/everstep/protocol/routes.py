"""Which way a stage's gradients go in a reduce: those of several replicas on one node are added up there
first.

Every worker owns a chunk of the gradient. On each node one worker, the *gatherer* of that chunk, takes the
parts of its *mates* (the other replicas on its node), adds its own, and sends the owner one part for the
whole node. The sum goes back the same way.

    node a                        node b
    0, 1   parts of chunk 2  ──►  0 gathers 0 and 1 for 2  ──►  2 has: its own, 3's, and one of node a
    2, 3   sum of chunk 2    ──►  3 directly, 0, and 0 passes it on to 1

So between nodes a stage's gradients go once per node, not once per replica, and a worker exchanges them with
its mates and with about one worker of each other node. Gatherers of an owner have its place in their node, or
that place modulo the node's size, so all members share the work.

With one replica per node everybody gathers only its own part: each part goes to its owner directly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from everstep.protocol.ops import Replicas, Worker


class Routes:
    """Of one worker. `nodes`: the members of its stage, by node."""

    def __init__(self, me: int, nodes: Iterable[tuple[int, ...]]) -> None:
        self.me, self._nodes = me, tuple(nodes)
        by_node = self._nodes
        self.members = tuple(sorted(member for node in by_node for member in node))
        here = next((node for node in by_node if me in node), (me,))
        places = {member: place for node in by_node for place, member in enumerate(node)}
        gathered: dict[int, list[int]] = {member: [] for member in here}
        for owner in self.members:
            gathered[here[places[owner] % len(here)]].append(owner)
        self._gathered = {member: tuple(owners) for member, owners in gathered.items()}
        self.mates = tuple(member for member in here if member != me)
        # The owners on other nodes that this worker sends a part to: of its node, or its own.
        self.owners = tuple(owner for owner in self._gathered[me] if owner not in here)
        # Who sends it a part of another node for its own chunk, and passes the sum on there.
        self.gatherers = tuple(
            node[places.get(me, 0) % len(node)] for node in by_node if node is not here and me not in node
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Routes) and (self.me, self._nodes) == (other.me, other._nodes)

    def __hash__(self) -> int:
        return hash((self.me, self._nodes))

    def __repr__(self) -> str:
        return f"Routes({self.me}, {self._nodes})"

    @staticmethod
    def direct(me: int, members: Iterable[int]) -> Routes:
        return Routes(me, ((member,) for member in members))

    @staticmethod
    def by_host(me: int, members: Replicas | tuple[int, ...], hosts: Mapping[int, str]) -> Routes:
        """`hosts`: of every member. All members must be told the same."""
        nodes: dict[str, list[int]] = {}
        for member in members:
            nodes.setdefault(hosts[member], []).append(member)
        return Routes(me, map(tuple, nodes.values()))

    @staticmethod
    def of(me: Worker, live: Replicas | tuple[int, ...], book: Mapping[Worker, tuple[str, int]]) -> Routes:
        """By the addresses of an epoch; directly where one of them is not known."""
        at = {k: book[worker][0] for k in live if (worker := Worker(k, me.stage)) in book}
        is_known = len(at) == len(live)
        return Routes.by_host(me.replica, live, at) if is_known else Routes.direct(me.replica, live)

    @property
    def passes_on(self) -> bool:
        """There are mates, and other nodes: mates get all sums at once that this worker gathers for."""
        return bool(self.mates and len(self.members) > 1 + len(self.mates))

    @property
    def senders(self) -> tuple[int, ...]:
        """Whose parts the chunk of this worker is summed from, its own apart; and who gets its sum."""
        return (*self.mates, *self.gatherers)

    @property
    def partners(self) -> frozenset[int]:
        """All that it exchanges gradients with."""
        return frozenset((*self.mates, *self.gatherers, *self.owners))

    def of_part(self, sender: int, receiver: int) -> tuple[int, ...]:
        """The owners whose chunks are in a PART: on one node, all those the receiver gathers for."""
        is_here = sender in self._gathered and receiver in self._gathered
        return self._gathered[receiver] if is_here else (receiver,)

    def of_sum(self, sender: int, receiver: int) -> tuple[int, ...]:
        """The owners whose chunks are in a SUM; `receiver` as in its name."""
        return self._gathered[sender] if sender == receiver else (sender,)
