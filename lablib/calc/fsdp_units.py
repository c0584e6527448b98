"""The units of FSDP2: lists of tensor shapes that are gathered together, and their padding.

FSDP2 splits the first dim of every tensor into equal pieces, so its rows are rounded up to a multiple of the ranks:
a tensor of 6 x 3 on 4 ranks becomes 8 x 3 in a message, and a rank keeps ceil(6 / 4) = 2 rows.

Chapter: book/06_fsdp.md. Source: `torch.distributed.fsdp.fully_shard`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What is gathered together.

    Attributes:
        name: Dotted name; "" is the root. A unit whose name begins with another's lies inside it.
        shapes: Shapes of the trained parameters.
        frozen: Shapes of the others: gathered, and never reduced.
    """

    name: str
    shapes: tuple[Shape, ...] = ()
    frozen: tuple[Shape, ...] = ()

    @property
    def params(self) -> int:
        """Parameters, without padding."""
        return sum(map(prod, self.shapes + self.frozen))


def padded(shapes: Sequence[Shape], ranks: int) -> int:
    """Return the numbers in a message about these tensors: each has its rows rounded up to a multiple of `ranks`.

    Args:
        shapes: Shapes of whole tensors.
        ranks: Ranks that share each of them.
    """
    return ranks * sum(-(-rows // ranks) * prod(row) for rows, *row in shapes)


def check_reshard(reshard: bool | int, shards: int, name: str = "reshard") -> None:
    """Raise a ValueError unless `reshard` is True, False or a divisor of `shards` other than 1 and itself.

    Args:
        reshard: What to check.
        shards: Ranks that share a parameter.
        name: The argument, for the message.
    """
    if isinstance(reshard, bool):
        return
    divisors = [d for d in range(2, shards) if shards % d == 0]
    if reshard not in divisors:
        use = f"True, False or {' or '.join(map(str, divisors))}" if divisors else "True or False"
        raise ValueError(
            f"{name}={reshard} must divide shards={shards} and be neither 1 nor {shards}; use {use}"
        )


def check_numbers(**numbers: int) -> None:
    """Raise a ValueError for a number below 1.

    Args:
        **numbers: By name.
    """
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name}={number} must be at least 1")


def as_units(units: Sequence[Unit | int]) -> list[Unit]:
    """Return units; a number becomes a unit of so many parameters in one dim.

    Args:
        units: The root first.

    Raises:
        ValueError: If there is none, a size is negative, or a parameter has no dim.
    """
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
