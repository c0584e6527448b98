"""Nodes, the links inside them and the network cards between them: how long a round of messages takes there.

All messages of a round start together. What leaves through one port shares it, and what comes in through one port
does too; the round is over when the busiest port is done:

    T = max over the messages of α + max over the ports of bytes / bandwidth,  and the receivers' additions, γ·s

Inside a node every rank has a port. Across nodes the ranks of a node share its network cards: rank i of g uses card
⌊i · cards / g⌋. The network between the cards is taken as wide enough for all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lablib.calc.communication.algorithms import Round, Send, algorithm_rounds, hierarchical_rounds
from lablib.calc.communication.costs import check_link


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A cluster of equal nodes.

    Attributes:
        ranks_per_node: g; rank k is on node ⌊k/g⌋, unless `placement` says otherwise.
        inside: Bytes per second of one rank's port inside the node, per direction.
        across: Bytes per second of one network card, per direction.
        inside_latency: α inside, in seconds per message.
        across_latency: α across nodes.
        cards: Network cards of a node.
        gamma: γ, seconds to add one byte to another.
        placement: For every rank its seat, counted through all nodes; None seats rank k at k.
    """

    nodes: int
    ranks_per_node: int
    inside: float
    across: float
    inside_latency: float = 0.0
    across_latency: float = 0.0
    cards: int = 1
    gamma: float = 0.0
    placement: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for count in ("nodes", "ranks_per_node", "cards"):
            if getattr(self, count) < 1:
                raise ValueError(f"{count}={getattr(self, count)} must be at least 1")
        for rate in ("inside", "across"):
            if not getattr(self, rate) > 0:
                raise ValueError(f"{rate}={getattr(self, rate)} must be above 0 bytes per second")
        check_link(1, inside_latency=self.inside_latency, across_latency=self.across_latency, gamma=self.gamma)
        if self.placement is not None and sorted(self.placement) != list(range(self.ranks)):
            raise ValueError(f"placement={self.placement} must name each of the seats 0 to {self.ranks - 1} once")

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.nodes * self.ranks_per_node

    def node(self, rank: int) -> int:
        """Return the node that a rank is on."""
        return self._seat(rank) // self.ranks_per_node

    def _seat(self, rank: int) -> int:
        return rank if self.placement is None else self.placement[rank]

    def _ports(self, send: Send) -> tuple[tuple, tuple, float, float]:
        """Return the port a message leaves through, the one it comes in by, their bandwidth, and α."""
        if self.node(send.source) == self.node(send.target):
            return ("rank out", send.source), ("rank in", send.target), self.inside, self.inside_latency

        def card(rank: int) -> tuple[int, int]:
            return self.node(rank), self._seat(rank) % self.ranks_per_node * self.cards // self.ranks_per_node

        return ("out", card(send.source)), ("in", card(send.target)), self.across, self.across_latency

    def round_time(self, sends: Iterable[Send], itemsize: float = 1) -> float:
        """Return the seconds of messages that start together."""
        busy: Counter[tuple] = Counter()
        adding: Counter[int] = Counter()
        latest = 0.0
        for send in sends:
            size = (send.stop - send.start) * itemsize
            leave, come, bandwidth, latency = self._ports(send)
            busy[leave] += size / bandwidth
            busy[come] += size / bandwidth
            adding[send.target] += self.gamma * size * send.adds
            latest = max(latest, latency)
        return latest + max(busy.values(), default=0.0) + max(adding.values(), default=0.0)

    def time(self, all_rounds: Sequence[Round], itemsize: float = 1) -> float:
        """Return the seconds of rounds that follow each other."""
        return sum(self.round_time(sends, itemsize) for sends in all_rounds)

    def bytes_across(self, all_rounds: Sequence[Round], itemsize: float = 1) -> float:
        """Return the bytes that leave the node which sends the most of them."""
        leaving: Counter[int] = Counter()
        for send in (send for sends in all_rounds for send in sends):
            if self.node(send.source) != self.node(send.target):
                leaving[self.node(send.source)] += (send.stop - send.start) * itemsize
        return max(leaving.values(), default=0)

    def collective_time(self, algorithm: str, size: int, itemsize: int = 4) -> float:
        """Return the seconds of a collective over all ranks.

        Args:
            algorithm: One of `ALGORITHMS`, or "hierarchical_all_reduce".
            size: S, the bytes of the whole array.
            itemsize: Bytes per element; `size` is rounded to whole elements.
        """
        numel = round(size / itemsize)
        if algorithm != "hierarchical_all_reduce":
            return self.time(algorithm_rounds(algorithm, numel, self.ranks), itemsize)
        if self.placement is not None:
            raise ValueError("hierarchical_all_reduce needs ranks that sit in order; leave placement out")
        return self.time(hierarchical_rounds(numel, self.ranks, self.ranks_per_node), itemsize)


def tcp_bandwidth(line_rate: float, *, frame: int = 14) -> float:
    """Return the bytes of data per second that TCP carries over a link, per direction.

    Of each packet of 1500 bytes 20 are IP's header, 20 TCP's and 12 TCP's timestamps; the link adds `frame` bytes.

    Args:
        line_rate: Bytes per second on the link.
        frame: Bytes around each packet: 14 as Linux counts when it throttles a link, 38 on a real Ethernet with its
            checksum, preamble and gap.
    """
    return line_rate * (1500 - 52) / (1500 + frame)
