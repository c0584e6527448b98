"""What the allocator of one GPU holds at one instant, and how an event of its trace changes that, forwards and backwards.

Chapter: book/memory_calculator.md
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from lablib.calc.cuda_snapshot_blocks import KEPT_WHOLE, SMALL, Block, Held, round_up

Event = Mapping[str, Any]
#: What the allocator gets from CUDA, and gives back.
_RESERVE = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class State:
    """What is held at one instant: blocks by address, and the segments that CUDA gave in one piece."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.order: list[int] = []  # addresses of blocks
        self.segments: dict[int, int] = {}  # address to size; expandable ones are in `reserved` alone
        self.bounds: list[int] = []  # addresses of segments
        self.reserved = self.requested = self.allocated = self.active = 0
        self.completes = True  # whether the trace has "free_completed" at all
        self.last: set[int] = (
            set()
        )  # numbers of "free_requested" behind which nothing says that it is completed
        self.known: dict[int, Block] = {}  # by number of the event that made it: what lives to the end
        self.unexplained: set[tuple[str, int]] = set()  # made while recording, and the event is not seen yet

    @classmethod
    def at_end(cls, segments: Iterable[Mapping[str, Any]]) -> State:
        """Return what the segments of a snapshot hold.

        Args:
            segments: Of one device.
        """
        state = cls()
        for segment in segments:
            address = segment["address"]
            state.reserved += segment["total_size"]
            if not segment.get("is_expandable", False):
                state.add_segment(address, segment["total_size"])
                if segment.get("frames"):
                    state.unexplained.add(("segment", address))
            for found in segment["blocks"]:
                if found["state"] != "inactive":
                    asked = found.get("requested_size", found["size"])
                    frames = tuple(found.get("frames", ()))
                    waiting = found["state"] != "active_allocated"
                    state.add(Block(address, found["size"], asked, frames, waiting=waiting))
                    if frames:
                        state.unexplained.add(("block", address))
                address += found["size"]
        return state

    def copy(self) -> State:
        """Return the same instant, to go on from it twice."""
        other = State()
        other.__dict__.update(self.__dict__)
        for name in (
            "blocks",
            "order",
            "segments",
            "bounds",
        ):  # what else there is are numbers, or stays as it is
            setattr(other, name, getattr(self, name).copy())
        return other

    def totals(self) -> tuple[int, int, int, int]:
        """Return the bytes requested, allocated, active and reserved."""
        return self.requested, self.allocated, self.active, self.reserved

    def held(self, instant: int) -> Held:
        """Return what is held, for reading."""
        free: dict[int, int] = dict(self.segments)
        for block in self.blocks.values():
            if (segment := self.segment_of(block.address)) is not None:
                free[segment] -= block.size
        split = sum(size for segment, size in free.items() if size < self.segments[segment])
        return Held(instant, *self.totals(), split, tuple(self.blocks[address] for address in self.order))

    def add(self, block: Block) -> None:
        """Hold a block more."""
        self.blocks[block.address] = block
        insort(self.order, block.address)
        self._count(block, 1)

    def remove(self, address: int) -> Block:
        """Hold a block less."""
        block = self.blocks.pop(address)
        del self.order[bisect_left(self.order, address)]
        self._count(block, -1)
        return block

    def wait(self, block: Block, waiting: bool) -> None:
        """Say whether a block is freed and another stream still uses it."""
        self._count(block, -1)
        self.blocks[block.address] = block = replace(block, waiting=waiting)
        self._count(block, 1)

    def _count(self, block: Block, sign: int) -> None:
        self.requested += sign * block.requested
        self.active += sign * block.size
        self.allocated += 0 if block.waiting else sign * block.size

    def add_segment(self, address: int, size: int) -> None:
        """Hold a segment more."""
        self.segments[address] = size
        insort(self.bounds, address)

    def drop_segment(self, address: int) -> None:
        """Hold a segment less."""
        del self.segments[address]
        del self.bounds[bisect_left(self.bounds, address)]

    def segment_of(self, address: int) -> int | None:
        """Return the segment that an address lies in, None for an expandable one."""
        place = bisect_right(self.bounds, address) - 1
        segment = self.bounds[place] if place >= 0 else None
        return segment if segment is not None and address < segment + self.segments[segment] else None

    def undo(self, event: Event, number: int) -> None:
        """Go back over an event.

        Args:
            event: The last one that is not undone.
            number: Its place in the trace.

        Raises:
            ValueError: If what is there now cannot come from it.
        """
        action, address, size = event["action"], event.get("addr", 0), event.get("size", 0)
        if action == "alloc":
            block = self.blocks.get(address)
            if block is None or size not in (block.requested, block.size):
                raise _contradiction(number, event, block)
            self.remove(address)
            if not block.placeholder:
                self.known[number] = block
            self.unexplained.discard(("block", address))
        elif action == "free_completed":
            if address in self.blocks:
                raise _contradiction(number, event, self.blocks[address])
            self.add(Block(address, 0, size, waiting=True, placeholder=True))
        elif action == "free_requested":
            block = self.blocks.get(address)
            if block is not None and block.waiting:
                self.wait(block, False)
            elif block is None and not self.completes:
                self.add(Block(address, 0, size, placeholder=True))
                self.last.add(number)
            else:
                raise _contradiction(number, event, block)
        elif action in _RESERVE:
            self.reserved -= _RESERVE[action] * size
            if action == "segment_free":
                self.add_segment(address, size)
            elif action == "segment_alloc":
                if self.segments.get(address) != size:
                    raise _contradiction(number, event, None)
                self.drop_segment(address)
                self.unexplained.discard(("segment", address))

    def size_blocks(self) -> tuple[int, int]:
        """Give a size to what was there at the beginning and is freed in the trace.

        Returns:
            How many of the known sizes disagree with the rules, and how many bytes more the others may have: what lies
            behind such a block was either split off, or is its own remainder with a block that is freed since.
        """
        disagree = unsure = 0
        for address in self.order:
            block = self.blocks[address]
            size = self.given(address, block.requested)
            if block.placeholder:
                unsure += KEPT_WHOLE if self.behind(address, size) > KEPT_WHOLE else 0
                self._count(block, -1)
                self.blocks[address] = block = replace(block, size=size, placeholder=False)
                self._count(block, 1)
            else:
                # Made before the trace, it lay beside blocks that are freed since: it was split or kept whole, by rule.
                least = round_up(block.requested)
                disagree += not 0 <= block.size - least <= (KEPT_WHOLE if least > SMALL else 0)
        return disagree, unsure

    def behind(self, address: int, size: int) -> int:
        """Return the free bytes behind a block above 1 MiB; 0 for others, which have no remainders.

        Args:
            address: Of the block.
            size: Of the block.
        """
        segment = self.segment_of(address)
        if segment is None or size <= SMALL:
            return 0
        place = bisect_right(self.order, address)
        end = segment + self.segments[segment]
        if place < len(self.order):
            end = min(end, self.order[place])
        return end - address - size

    def given(self, address: int, requested: int) -> int:
        """Return the size of the block that the allocator makes at an address."""
        size = round_up(requested)
        rest = self.behind(address, size)
        return size + rest if 0 < rest <= KEPT_WHOLE else size

    def do(self, event: Event, number: int) -> int:
        """Go forward over an event; return 1 if the block's size is not what the rules say.

        Args:
            event: The next one.
            number: Its place in the trace.
        """
        action, address, size = event["action"], event.get("addr", 0), event.get("size", 0)
        if action == "alloc":
            given = self.given(address, size)
            known = self.known.get(number)
            frames = tuple(event.get("frames", ())) or (known.frames if known else ())
            sizes = (known.size, known.requested) if known else (given, size)
            self.add(Block(address, *sizes, frames, recorded=True))
            return int(known is not None and known.size != given)
        if action == "free_completed":
            if not self.blocks[address].waiting:
                raise _contradiction(number, event, self.blocks[address])
            self.remove(address)
        elif action == "free_requested":
            if number in self.last:
                self.remove(address)
            else:
                self.wait(self.blocks[address], True)
        elif action in _RESERVE:
            self.reserved += _RESERVE[action] * size
            if action == "segment_alloc":
                self.add_segment(address, size)
            elif action == "segment_free":
                self.drop_segment(address)
        return 0


def _contradiction(number: int, event: Event, block: Block | None) -> ValueError:
    there = f"a block of {block.requested:,} bytes" if block else "nothing"
    what = f"event {number} ({event['action']} of {event['size']:,} bytes at {event['addr']:#x})"
    return ValueError(
        f"{what} contradicts the others: {there} is there then. Record every action, without skip_actions"
    )
