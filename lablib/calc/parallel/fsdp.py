"""What FSDP2 sends in a step, from the sizes of its units. Chapter 06.

`fsdp_traffic` counts an all-gather of each unit in forward, another in backward if it was resharded, and a reduce-scatter
a backward that synchronises, of ranks · Σ ceil(rows / ranks) · row · bytes per value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lablib.calc.communication import ring_all_gather_bytes, ring_all_reduce_bytes, ring_reduce_scatter_bytes
from lablib.calc.parallel.fsdp_units import Unit, as_units, check_numbers, check_reshard, padded


@dataclass(frozen=True)
class Message:
    """One collective.

    Attributes:
        bytes: The full array, padding included.
    """

    op: str
    unit: str
    bytes: int
    ranks: int
    phase: str


@dataclass(frozen=True)
class FSDPTraffic:
    """The collectives of one optimizer step, on one rank.

    Attributes:
        messages: In the order in which they are sent without prefetch, where no unit lies inside another.
    """

    messages: tuple[Message, ...]

    @property
    def calls(self) -> Counter[str]:
        """Number of messages, by operation."""
        return Counter(message.op for message in self.messages)

    @property
    def bytes(self) -> Counter[str]:
        """Bytes of the arrays, by operation."""
        total: Counter[str] = Counter()
        for message in self.messages:
            total[message.op] += message.bytes
        return total

    def ring_bytes_sent(self) -> float:
        """Return the bytes that one rank sends if rings carry the collectives."""
        sent = {
            "all_gather": ring_all_gather_bytes,
            "reduce_scatter": ring_reduce_scatter_bytes,
            "all_reduce": ring_all_reduce_bytes,
        }
        return sum(sent[m.op](m.bytes, m.ranks) for m in self.messages)


def fsdp_traffic(
    units: Sequence[Unit | int],
    shards: int,
    *,
    replicas: int = 1,
    reshard: bool | int = True,
    root_reshard: bool | int = False,
    param_bytes: int = 4,
    reduce_bytes: int = 4,
    micro_batches: int = 1,
    sync_every: bool = True,
    keep_gathered: bool = False,
) -> FSDPTraffic:
    """Return the collectives of one optimizer step under FSDP2.

    Every unit runs once in each forward and gets a gradient in each backward. A group of one rank sends nothing.

    Args:
        units: The root first. A number stands for a unit of so many parameters in one dim.
        replicas: Copies of the sharded model (HSDP); gradient shards are all-reduced between them.
        reshard: `reshard_after_forward`: True frees a unit after its forward (ZeRO-3), False keeps it until its
            backward is done (ZeRO-2), a number keeps 1/number of it on each rank.
        root_reshard: The same for the root. `fully_shard` keeps the root by default.
        param_bytes: Bytes of a gathered value: 4, or 2 with param_dtype=torch.bfloat16.
        sync_every: Reduce after every backward; False: after the last one only, as inside `no_sync`.
        keep_gathered: Keep the parameters gathered after every backward but the last.
    """
    listed = as_units(units)
    check_numbers(
        shards=shards,
        replicas=replicas,
        param_bytes=param_bytes,
        reduce_bytes=reduce_bytes,
        micro_batches=micro_batches,
    )
    check_reshard(reshard, shards)
    check_reshard(root_reshard, shards, "root_reshard")
    if keep_gathered and sync_every:
        raise ValueError("keep_gathered=True belongs to no_sync: use it with sync_every=False")
    messages: list[Message] = []

    def send(op: str, unit: Unit, values: int, bytes_each: int, ranks: int, phase: str) -> None:
        if values and ranks > 1:
            messages.append(Message(op, unit.name, values * bytes_each, ranks, phase))

    def gather(unit: Unit, ranks: int, phase: str) -> None:
        send("all_gather", unit, padded(unit.shapes + unit.frozen, shards), param_bytes, ranks, phase)

    def gather_again(unit: Unit, kept: bool | int) -> None:
        # A number keeps 1/number of the unit on each rank: the message is as large, in a smaller group.
        if kept is not False:
            gather(unit, shards if kept is True else kept, "backward")

    def reduce(unit: Unit) -> None:
        values = padded(unit.shapes, shards)
        send("reduce_scatter", unit, values, reduce_bytes, shards, "backward")
        send("all_reduce", unit, values // shards, reduce_bytes, replicas, "backward")

    root, *others = listed
    for turn in range(micro_batches):
        reduces = sync_every or turn == micro_batches - 1
        for unit in listed:
            if turn == 0 or not keep_gathered:
                gather(unit, shards, "forward")
        gather_again(root, root_reshard)
        for unit in reversed(others):
            gather_again(unit, not unit.kept and reshard)
            if reduces:
                reduce(unit)
        if reduces:
            reduce(root)
    return FSDPTraffic(tuple(messages))
