"""The units of FSDP2, lists of tensor shapes that are gathered together, and what a rank holds unsharded at each event.

FSDP2 splits the first dim of every tensor into equal pieces, so its rows are rounded up to a multiple of the ranks:
a tensor of 6 x 3 on 4 ranks becomes 8 x 3 in a message, and a rank keeps ceil(6 / 4) = 2 rows.

A unit is gathered into a buffer, and copied from there into its parameters. In forward the buffer stays for the next
gather, so that on a GPU that gather can run during the copy; in backward it goes at once. When it goes is a fact of
the version of PyTorch (`lablib.calc.torch_versions`): up to 2.14 after the next unit's copy, from 2.15 before it.

    forward     root + unit + its buffer, for the length of a copy; up to 2.14 the buffer of the one before, too
    backward    root + unit + the buffer of the unit that is gathered ahead

Backward also holds gradients that are not sharded yet. A unit's gradients are complete when its backward ends; then its
weights are freed, and the gradients are copied into the input buffer of the reduce-scatter, in the dtype of the
reduction. Gradients and buffer exist together for the length of that copy, and the buffer stays until the next unit's
gradients are copied. The root's gradients wait for the end of backward.

Source: torch/distributed/fsdp/_fully_shard, `post_backward` and `foreach_reduce`.

Read `Unit` first, then `gathered_timeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from lablib.calc.torch_versions import PINNED, torch_facts

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What is gathered together.

    Attributes:
        name: Dotted name; "" is the root. A unit whose name begins with another's lies inside it.
        shapes: Shapes of the trained parameters.
        frozen: Shapes of the others: gathered, and never reduced.
        after: Of the root, for each of `shapes`, how many other units run before it is used: 0 for an embedding. Its
            gradient comes when the backward of all later units has ended. Without it, all come first.
        kept: Whether it stays gathered after forward, whatever `reshard` says.
    """

    name: str
    shapes: tuple[Shape, ...] = ()
    frozen: tuple[Shape, ...] = ()
    after: tuple[int, ...] = ()
    kept: bool = False

    @property
    def params(self) -> int:
        """Parameters, without padding."""
        return sum(map(prod, self.shapes + self.frozen))


def padded(shapes: Sequence[Shape], ranks: int) -> int:
    """Return the numbers in a message about these tensors: each has its rows rounded up to a multiple of `ranks`.

    Args:
        ranks: Ranks that share each of them.
    """
    return ranks * sum(-(-rows // ranks) * prod(row) for rows, *row in shapes)


def as_units(units: Sequence[Unit | int]) -> list[Unit]:
    """Return units; a number becomes a unit of so many parameters in one dim."""
    if not units:
        raise ValueError("no units: give at least the root")
    listed = []
    for number, unit in enumerate(units):
        if isinstance(unit, int):
            unit = Unit(name=f"unit {number}" if number else "", shapes=((unit,),))
        for shape in unit.shapes + unit.frozen:
            if not shape or min(shape) < 0:
                raise ValueError(f"unit {unit.name!r}: shape {shape} needs at least one dim, none negative")
        listed.append(unit)
    return listed


def check_reshard(reshard: bool | int, shards: int, name: str = "reshard") -> None:
    """Raise a ValueError unless `reshard` is True, False or a divisor of `shards` other than 1 and itself."""
    if isinstance(reshard, bool):
        return
    divisors = [d for d in range(2, shards) if shards % d == 0]
    if reshard not in divisors:
        use = f"True, False or {' or '.join(map(str, divisors))}" if divisors else "True or False"
        raise ValueError(f"{name}={reshard} must divide shards={shards} and be neither 1 nor {shards}; use {use}")


def check_numbers(**numbers: int) -> None:
    """Raise a ValueError for a number below 1."""
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name}={number} must be at least 1")


@dataclass(frozen=True)
class UnshardedState:
    """What is unsharded on a rank, besides its shards, after one event.

    Attributes:
        event: "gather", "copy", "compute", "part", "complete", "reduce", "release".
        phase: "forward" or "backward".
        parts: Bytes of what `reshard` as a number keeps after forward. FSDPMemTracker calls them activations.
    """

    event: str
    phase: str
    unit: str
    params: int
    buffers: int
    parts: int
    gradients: int = 0
    scatter_buffers: int = 0

    @property
    def total(self) -> int:
        """Bytes of what is gathered: parameters, buffers of all-gathers, parts."""
        return self.params + self.buffers + self.parts

    @property
    def held(self) -> int:
        """Bytes of what is gathered, of unsharded gradients, and of the buffers of reduce-scatters."""
        return self.total + self.gradients + self.scatter_buffers


def gathered_timeline(
    units: Sequence[Unit | int],
    shards: int,
    *,
    reshard: bool | int = True,
    root_reshard: bool | int = False,
    prefetch: int | None = None,
    param_bytes: int = 4,
    reduce_bytes: int = 4,
    scatter_buffers: int = 1,
    torch: str = PINNED,
) -> list[UnshardedState]:
    """Return what is unsharded after every event of one forward and backward pass.

    Args:
        units: The root first, then in the order in which they run; a number stands for so many parameters.
        reshard: `reshard_after_forward` of the units, see `lablib.calc.parallel.fsdp_traffic`.
        prefetch: Units gathered ahead explicitly, in forward and backward; None for FSDP2's own way, which is
            none in forward and one in backward; 0 for none at all, which FSDP2 doesn't offer.
        reduce_bytes: Bytes of a gradient value in a reduce-scatter.
        scatter_buffers: Input buffers of reduce-scatters that are kept at a time: the number given to
            `set_reduce_scatter_max_input_buffers`.
        torch: Version of PyTorch whose FSDP2 it is, such as "2.13" or `torch.__version__`.
    """
    listed = as_units(units)
    check_numbers(shards=shards, param_bytes=param_bytes, reduce_bytes=reduce_bytes, scatter_buffers=scatter_buffers)
    check_reshard(reshard, shards)
    check_reshard(root_reshard, shards, "root_reshard")
    if prefetch is not None and prefetch < 0:
        raise ValueError(f"prefetch={prefetch} must not be negative")
    sizes = [param_bytes * padded(unit.shapes + unit.frozen, shards) for unit in listed]
    kept = [root_reshard, *[not unit.kept and reshard for unit in listed[1:]]]
    walk = _Walk(listed, sizes, kept, shards > 1, prefetch)
    walk.frees_early = torch_facts(torch).fsdp2_frees_buffer_before_copy
    walk.last = scatter_buffers
    walk.gradient_size = [param_bytes * sum(map(prod, unit.shapes)) for unit in listed]
    walk.root_gradients = [param_bytes * prod(shape) for shape in listed[0].shapes]
    walk.scatter_size = [reduce_bytes * padded(unit.shapes, shards) for unit in listed]
    walk.forward(0)
    walk.backward(0)
    return walk.states


def peak_unsharded_bytes(
    units: Sequence[Unit | int], shards: int, *, buffers: bool = True, **options: bool | int | str | None
) -> int:
    """Return the most bytes of gathered parameters that a rank holds at a time, besides its shards.

    Args:
        buffers: Count the buffers of all-gathers, and parts kept after forward, too.
        **options: Of `gathered_timeline`.
    """
    states = gathered_timeline(units, shards, **options)
    return max((state.total if buffers else state.params for state in states), default=0)


def peak_held_bytes(units: Sequence[Unit | int], shards: int, **options: bool | int | str | None) -> int:
    """Return the most bytes that a rank holds unsharded at a time: parameters, gradients, and buffers of both.

    Options are those of `gathered_timeline`; `peak_unsharded_bytes` counts the side of the parameters alone.
    """
    return max((state.held for state in gathered_timeline(units, shards, **options)), default=0)


class _Walk:
    """One forward and backward pass through the tree of units."""

    frees_early = False  # the buffer before this one goes before this one is copied, and not after
    last = 1  # buffers of reduce-scatters that are kept
    gradient_size: Sequence[int] = ()  # bytes of unsharded gradients, by unit
    root_gradients: Sequence[int] = ()  # bytes of each of the root's
    scatter_size: Sequence[int] = ()  # bytes in the buffer of a reduce-scatter, by unit

    def __init__(
        self, units: list[Unit], sizes: list[int], kept: list[bool | int], buffered: bool, prefetch: int | None
    ) -> None:
        self.units, self.size, self.kept, self.prefetch = units, sizes, kept, prefetch
        self.buffer_size = sizes if buffered else [0] * len(units)
        self.children = _tree([unit.name for unit in units])
        self.unsharded: dict[int, int] = {}  # bytes in parameters, by unit
        self.parts: dict[int, int] = {}  # bytes kept after forward, by unit
        self.buffers: dict[int, int] = {}  # bytes in buffers that are not copied out yet, by unit
        self.deferred = 0  # bytes in the one buffer that is copied and still there
        self.gradients: dict[int, int] = {}  # bytes that are not reduced yet, by unit
        self.reduced: list[int] = []  # bytes in the last buffers of reduce-scatters
        self.ended: list[int] = []  # in the order of the forward's end
        self.states: list[UnshardedState] = []
        self.phase = "forward"

    def note(self, event: str, unit: int) -> None:
        params, waiting = sum(self.unsharded.values()), sum(self.buffers.values()) + self.deferred
        parts = sum(self.parts.values())
        gradients, scattered = sum(self.gradients.values()), sum(self.reduced)
        name = self.units[unit].name
        self.states.append(UnshardedState(event, self.phase, name, params, waiting, parts, gradients, scattered))

    def gather(self, unit: int) -> None:
        if unit not in self.unsharded and unit not in self.buffers:
            self.buffers[unit] = self.buffer_size[unit]
            self.note("gather", unit)

    def use(self, unit: int, ahead: Sequence[int]) -> None:
        self.gather(unit)
        if unit in self.buffers:
            self.unsharded[unit] = self.size[unit]
            if self.frees_early:
                self.deferred = 0
            self.note("copy", unit)
            self.parts.pop(unit, None)  # freed once the unsharded parameter is there
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
            self.unsharded.pop(unit)
        elif self.kept[unit] is not False:
            self.parts[unit] = self.size[unit] // self.kept[unit]
            self.note("part", unit)
            self.unsharded.pop(unit)
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
        self.gradients[0] = self._made_by_root(unit or len(self.units))
        self.gradients[unit] = self.gradient_size[unit] if unit else self.gradients[0]
        self.note("compute", unit)
        for child in reversed(self.children[unit]):
            self.backward(child)
        if not unit:
            self.gradients[unit] = self.gradient_size[unit]
            self.note("complete", unit)
        self.unsharded.pop(unit)
        self.reduced = [*self.reduced, self.scatter_size[unit]][-self.last :]
        self.note("reduce", unit)
        self.gradients.pop(unit)
        self.note("release", unit)

    def _made_by_root(self, unit: int) -> int:
        """Return the bytes of the root's gradients that are there while a unit's backward runs."""
        after = self.units[0].after or [len(self.units)] * len(self.root_gradients)
        return sum(size for size, before in zip(self.root_gradients, after, strict=True) if before >= unit)


def _tree(names: list[str]) -> list[list[int]]:
    """Return the direct children of every unit, by the dots in their names; number 0 is the root."""
    children: list[list[int]] = [[] for _ in names]
    for number, name in enumerate(names[1:], start=1):
        around = [i for i, other in enumerate(names) if i and name.startswith(f"{other}.")]
        children[max(around, key=lambda i: len(names[i]), default=0)].append(number)
    return children
