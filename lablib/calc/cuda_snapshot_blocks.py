"""What a GPU holds at one instant of a memory snapshot: blocks, where they come from, and what lies between them.

Chapter: book/memory_calculator.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Every block is a multiple of this.
ROUNDING = 512
#: Blocks up to this size share segments of 2 MiB; a larger request keeps a remainder up to this size.
SMALL = KEPT_WHOLE = 2**20

BEFORE = "(allocated before the recording)"
NO_FRAMES = "(no Python frames: backward, or C++)"
#: A frame in a file of these is PyTorch's own: the line that called it is what a reader wants to know.
_LIBRARY = ("-packages/torch/", "<frozen ", "<string>", "<eval_with_key>")


def round_up(size: int) -> int:
    """Return the size of the block for a request, as long as what is left of the free block can be split off.

    Args:
        size: Bytes asked for.
    """
    return max(ROUNDING, -(-size // ROUNDING) * ROUNDING)


@dataclass(frozen=True)
class Block:
    """A piece of memory in use.

    Attributes:
        address: Its first byte.
        size: Bytes given.
        requested: Bytes asked for.
        frames: The stack of the program when it asked, the innermost frame first; empty if it was not recorded.
        waiting: Whether it is freed already, and another stream still uses it.
        recorded: Whether its allocation is in the trace.
        placeholder: Whether only its freeing is known so far.
    """

    address: int
    size: int
    requested: int
    frames: tuple[Mapping[str, Any], ...] = ()
    waiting: bool = False
    recorded: bool = False
    placeholder: bool = False

    @property
    def site(self) -> str:
        """The line of the program that asked for it, "train.py:12 step": the innermost frame outside of PyTorch."""
        own = next((frame for frame in self.frames if not _is_library(frame)), None)
        if own is not None:
            return f"{_place(own)} {own.get('name', '')}"
        if self.frames or self.recorded:
            return NO_FRAMES
        return BEFORE

    @property
    def module(self) -> str:
        """The lines of `forward` methods that it was made in, the outermost first; where there is none, its site."""
        chain = [f for f in reversed(self.frames) if f.get("name") == "forward" and not _is_library(f)]
        return " > ".join(map(_place, chain)) or self.site


@dataclass(frozen=True)
class Held:
    """What a device holds at one instant.

    The parts add up: `requested + rounding + not_split = active = allocated + waiting`, and
    `active + split_free + cached = reserved`.

    Attributes:
        instant: Number of events before it.
        requested: Bytes asked for, of all blocks.
        allocated: Bytes given, without those that wait for another stream.
        active: Bytes given.
        reserved: Bytes that the allocator has from CUDA.
        split_free: Free bytes in segments that hold something, and so cannot go back to CUDA: fragmentation.
            Expandable segments give back their free pages and are counted under `cached`.
        blocks: By address.
    """

    instant: int
    requested: int
    allocated: int
    active: int
    reserved: int
    split_free: int
    blocks: tuple[Block, ...]

    @property
    def rounding(self) -> int:
        """Bytes that rounding to 512 adds."""
        return sum(round_up(block.requested) - block.requested for block in self.blocks)

    @property
    def not_split(self) -> int:
        """Bytes behind requests that were too few to be a block of their own."""
        return self.active - self.requested - self.rounding

    @property
    def waiting(self) -> int:
        """Bytes that are freed and that another stream still uses."""
        return self.active - self.allocated

    @property
    def cached(self) -> int:
        """Free bytes of segments that are empty, and of expandable ones, which give back whole pages only."""
        return self.reserved - self.active - self.split_free

    def by_site(self) -> dict[str, int]:
        """Return the bytes asked for by the line that asked, the most first."""
        return _sums(self.blocks, [block.site for block in self.blocks])

    def by_module(self) -> dict[str, int]:
        """Return the bytes asked for by the chain of `forward` methods, the most first."""
        return _sums(self.blocks, [block.module for block in self.blocks])


def _sums(blocks: Sequence[Block], names: Sequence[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for block, name in zip(blocks, names, strict=True):
        found[name] = found.get(name, 0) + block.requested
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _is_library(frame: Mapping[str, Any]) -> bool:
    name = _path(frame)
    # Frames of C++ have a source of PyTorch's build, or ?? without one.
    compiled = name in ("", "??") or name.endswith((".cpp", ".cc", ".c", ".cu", ".h"))
    return compiled or any(mark in name for mark in _LIBRARY)


def _place(frame: Mapping[str, Any]) -> str:
    return f"{'/'.join(_path(frame).split('/')[-2:])}:{frame.get('line', '?')}"


def _path(frame: Mapping[str, Any]) -> str:
    return str(frame.get("filename", "")).replace("\\", "/")
