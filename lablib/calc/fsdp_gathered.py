"""The whole parameters that a rank holds under FSDP2, moment by moment.

A unit is gathered into a buffer, and copied from there into its parameters. In forward the buffer stays for the next
gather, so that on a GPU that gather can run during the copy; in backward it goes at once. When it goes is a fact of
the version of PyTorch (`lablib.calc.torch_versions`): up to 2.14 after the next unit's copy, from 2.15 before it.

    forward     root + unit + its buffer, for the length of a copy; up to 2.14 the buffer of the one before, too
    backward    root + unit + the buffer of the unit that is gathered ahead

Chapter: book/06_fsdp.md. Source: the hooks of `torch.distributed.fsdp.fully_shard`, step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lablib.calc.fsdp_units import Unit, as_units, check_numbers, check_reshard, padded
from lablib.calc.torch_versions import PINNED, torch_facts


@dataclass(frozen=True)
class Moment:
    """What a rank holds besides its shards after one event.

    Attributes:
        event: "gather", "copy", "compute", "part", "release".
        phase: "forward" or "backward".
        unit: Name of the unit.
        params: Bytes of whole parameters.
        buffers: Bytes of all-gather buffers.
        parts: Bytes of what `reshard` as a number keeps after forward. FSDPMemTracker calls them activations.
    """

    event: str
    phase: str
    unit: str
    params: int
    buffers: int
    parts: int

    @property
    def total(self) -> int:
        """Bytes of all three."""
        return self.params + self.buffers + self.parts


def gathered_timeline(
    units: Sequence[Unit | int],
    shards: int,
    *,
    reshard: bool | int = True,
    root_reshard: bool | int = False,
    prefetch: int | None = None,
    param_bytes: int = 4,
    torch: str = PINNED,
) -> list[Moment]:
    """Return what is gathered after every event of one forward and backward pass.

    Args:
        units: The root first, then in the order in which they run; a number stands for so many parameters.
        shards: Ranks that share a parameter.
        reshard: `reshard_after_forward` of the units, see `lablib.calc.fsdp.fsdp_traffic`.
        root_reshard: The same of the root.
        prefetch: Units gathered ahead explicitly, in forward and backward; None for FSDP2's own way, which is
            none in forward and one in backward; 0 for none at all, which FSDP2 doesn't offer.
        param_bytes: Bytes of a gathered value.
        torch: Version of PyTorch whose FSDP2 it is, such as "2.13" or `torch.__version__`.

    Raises:
        ValueError: If a number is out of range, or the version is not known.

    Chapter: book/06_fsdp.md.
    """
    facts = torch_facts(torch)
    listed = as_units(units)
    check_numbers(shards=shards, param_bytes=param_bytes)
    check_reshard(reshard, shards)
    check_reshard(root_reshard, shards, "root_reshard")
    if prefetch is not None and prefetch < 0:
        raise ValueError(f"prefetch={prefetch} must not be negative")
    walk = _Walk(listed, shards, reshard, root_reshard, prefetch, param_bytes)
    walk.frees_early = facts.fsdp2_frees_buffer_before_copy
    walk.forward(0)
    walk.backward(0)
    return walk.moments


def peak_unsharded_bytes(
    units: Sequence[Unit | int],
    shards: int,
    *,
    reshard: bool | int = True,
    root_reshard: bool | int = False,
    prefetch: int | None = None,
    param_bytes: int = 4,
    buffers: bool = True,
    torch: str = PINNED,
) -> int:
    """Return the most bytes of gathered parameters that a rank holds at a time, besides its shards.

    Args:
        units: As in `gathered_timeline`, and so are the others.
        shards: Ranks that share a parameter.
        reshard: Of the units.
        root_reshard: Of the root.
        prefetch: Units gathered ahead.
        param_bytes: Bytes of a gathered value.
        buffers: Count the buffers of all-gathers, and parts kept after forward, too.
        torch: Version of PyTorch.

    Raises:
        ValueError: If a number is out of range, or the version is not known.

    Chapter: book/06_fsdp.md.
    """
    moments = gathered_timeline(
        units,
        shards,
        reshard=reshard,
        root_reshard=root_reshard,
        prefetch=prefetch,
        param_bytes=param_bytes,
        torch=torch,
    )
    return max((moment.total if buffers else moment.params for moment in moments), default=0)


class _Walk:
    """One forward and backward pass through the tree of units."""

    frees_early = False  # the buffer before this one goes before this one is copied, and not after

    def __init__(
        self,
        units: list[Unit],
        shards: int,
        reshard: bool | int,
        root_reshard: bool | int,
        prefetch: int | None,
        param_bytes: int,
    ):
        self.units, self.prefetch = units, prefetch
        self.size = [param_bytes * padded(u.shapes + u.frozen, shards) for u in units]
        self.buffer_size = self.size if shards > 1 else [0] * len(units)
        self.kept = [root_reshard, *[reshard] * (len(units) - 1)]
        self.children = _tree([unit.name for unit in units])
        self.whole: dict[int, int] = {}  # bytes in parameters, by unit
        self.parts: dict[int, int] = {}  # bytes kept after forward, by unit
        self.buffers: dict[int, int] = {}  # bytes in buffers that are not copied out yet, by unit
        self.deferred = 0  # bytes in the one buffer that is copied and still there
        self.ended: list[int] = []  # in the order of the forward's end
        self.moments: list[Moment] = []
        self.phase = "forward"

    def note(self, event: str, unit: int) -> None:
        whole, waiting = sum(self.whole.values()), sum(self.buffers.values()) + self.deferred
        parts = sum(self.parts.values())
        self.moments.append(Moment(event, self.phase, self.units[unit].name, whole, waiting, parts))

    def gather(self, unit: int) -> None:
        if unit not in self.whole and unit not in self.buffers:
            self.buffers[unit] = self.buffer_size[unit]
            self.note("gather", unit)

    def use(self, unit: int, ahead: Sequence[int]) -> None:
        self.gather(unit)
        if unit in self.buffers:
            self.whole[unit] = self.size[unit]
            if self.frees_early:
                self.deferred = 0
            self.note("copy", unit)
            self.parts.pop(unit, None)  # freed once the whole is there
            # In forward the buffer before this one goes now at the latest, and this one with the next gather.
            buffer = self.buffers.pop(unit)
            self.deferred = buffer if self.phase == "forward" else 0
        for other in ahead:
            self.gather(other)

    def forward(self, unit: int) -> None:
        ahead = range(unit + 1, len(self.units))[: self.prefetch or 0]
        self.use(unit, ahead)
        for child in self.children[unit]:
            self.forward(child)
        self.note("compute", unit)
        self.ended.append(unit)
        if self.kept[unit] is True:
            self.whole.pop(unit)
        elif self.kept[unit] is not False:
            self.parts[unit] = self.size[unit] // self.kept[unit]
            self.note("part", unit)
            self.whole.pop(unit)
        if unit == 0:
            self.deferred = 0
        self.note("release", unit)

    def backward(self, unit: int) -> None:
        self.phase = "backward"
        place = self.ended.index(unit)
        if self.prefetch is None:
            ahead = self.ended[:place][-1:]
        elif unit == 0:
            ahead = range(1, len(self.units))[::-1][: self.prefetch]
        else:
            ahead = range(max(1, unit - self.prefetch), unit)[::-1]
        self.use(unit, ahead)
        self.note("compute", unit)
        for child in reversed(self.children[unit]):
            self.backward(child)
        self.whole.pop(unit)
        self.note("release", unit)


def _tree(names: list[str]) -> list[list[int]]:
    """Return the direct children of every unit, by the dots in their names; number 0 is the root."""
    children: list[list[int]] = [[] for _ in names]
    for number, name in enumerate(names[1:], start=1):
        around = [i for i, other in enumerate(names) if i and name.startswith(f"{other}.")]
        children[max(around, key=lambda i: len(names[i]), default=0)].append(number)
    return children
