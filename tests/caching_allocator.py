"""A caching allocator that keeps books: it plays PyTorch's on numbers, and makes snapshots in PyTorch's format.

It follows c10/cuda/CUDACachingAllocator.cpp: best fit, splitting, merging, blocks that wait for another stream, cached
segments, expandable segments, and a ring of trace entries. Its counters are the truth that a replay has to find again.
"""

from __future__ import annotations

import copy

MIB = 2**20
KINDS = ("requested", "allocated", "active", "reserved", "inactive_split")


class OutOfMemory(Exception):
    """The capacity is used up."""


class Simulated:
    """One device.

    Args:
        capacity: Bytes that CUDA can give.
        expandable: Segments that grow by pages.
        max_entries: Of the ring of events.
        base: Address of the first segment.
        rounding: Every block is a multiple of it; PyTorch's own is 512.
    """

    def __init__(
        self, capacity=1 << 40, *, expandable=False, max_entries=1 << 60, base=0x7F0000000000, rounding=512
    ):
        self.rounding = rounding
        self.capacity, self.expandable, self.max_entries = capacity, expandable, max_entries
        self.segments, self.trace, self.next_address = [], [], base
        self.recording, self.frames, self.clock = False, [], 1_700_000_000_000_000
        self.now, self.most = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)

    def record(self, recording=True):
        self.recording = recording
        self.reset()

    def reset(self):
        self.most = dict(self.now)

    def malloc(self, asked):
        """Return the address of a new block."""
        size = max(self.rounding, -(-asked // self.rounding) * self.rounding)
        small = size <= MIB
        found = self._best_fit(size, small) or self._new(size, small)
        if found is None:
            self.empty_cache()
            found = self._new(size, small)
        if found is None:
            self._note("oom", size=size, device_free=self.capacity - self.now["reserved"])
            raise OutOfMemory
        segment, block = found
        place, rest = segment["blocks"].index(block), block["size"] - size
        if rest >= 512 if small or self.expandable else rest > MIB:
            block["size"] = size
            free = {
                "size": rest,
                "requested_size": 0,
                "address": block["address"] + size,
                "state": "inactive",
                "frames": [],
            }
            segment["blocks"].insert(place + 1, free)
        block |= {"state": "active_allocated", "requested_size": asked, "frames": self._stack()}
        self._note("alloc", addr=block["address"], size=asked)
        self._count(requested=asked, allocated=block["size"], active=block["size"])
        return block["address"]

    def free(self, address, *, wait=False):
        """Free a block, or, with `wait`, all but free it."""
        _, block = self._find(address)
        block["state"] = "active_pending_free"
        self._note("free_requested", addr=address, size=block["requested_size"])
        self._count(allocated=-block["size"])
        if not wait:
            self.complete(address)

    def complete(self, address):
        """Another stream is done with a freed block."""
        segment, block = self._find(address)
        assert block["state"] == "active_pending_free"
        self._note("free_completed", addr=address, size=block["requested_size"])
        asked, size = block["requested_size"], block["size"]
        block |= {"state": "inactive", "requested_size": 0, "frames": []}
        for step in (1, -1):
            place = segment["blocks"].index(block)
            if 0 <= place + step < len(segment["blocks"]):
                other = segment["blocks"][place + step]
                if other["state"] == "inactive":
                    low = min(place, place + step)
                    first, second = segment["blocks"][low : low + 2]
                    first["size"] += second["size"]
                    del segment["blocks"][low + 1]
                    block = first
        self._count(requested=-asked, active=-size)

    def empty_cache(self):
        """Give back whole free segments, or whole free pages of the ends of expandable ones."""
        for segment in list(self.segments):
            last = segment["blocks"][-1]
            if self.expandable:
                page = 2 * MIB if segment["segment_type"] == "small" else 20 * MIB
                cut = last["size"] // page * page if last["state"] == "inactive" else 0
                if not cut:
                    continue
                last["size"] -= cut
                segment["total_size"] -= cut
                self._note("segment_unmap", addr=segment["address"] + segment["total_size"], size=cut)
                self._count(reserved=-cut)
                if not last["size"]:
                    segment["blocks"].remove(last)
                if not segment["blocks"]:
                    self.segments.remove(segment)
            elif len(segment["blocks"]) == 1 and last["state"] == "inactive":
                self.segments.remove(segment)
                self._note("segment_free", addr=segment["address"], size=segment["total_size"])
                self._count(reserved=-segment["total_size"])

    def live(self):
        """Return the addresses that are allocated, and those that wait."""
        blocks = [block for segment in self.segments for block in segment["blocks"]]
        states = ("active_allocated", "active_pending_free")
        return [[block["address"] for block in blocks if block["state"] == state] for state in states]

    def _best_fit(self, size, small):
        kind = "small" if small else "large"
        fits = [
            (block["size"], block["address"], segment, block)
            for segment in self.segments
            if segment["segment_type"] == kind
            for block in segment["blocks"]
            if block["state"] == "inactive" and block["size"] >= size
        ]
        return min(fits, key=lambda fit: fit[:2])[2:] if fits else None

    def _new(self, size, small):
        if self.expandable:
            return self._grow(size, small)
        total = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.now["reserved"] + total > self.capacity:
            return None
        segment = self._segment(total, small)
        self._note("segment_alloc", addr=segment["address"], size=total)
        self._count(reserved=total)
        return segment, segment["blocks"][0]

    def _grow(self, size, small):
        kind, page = ("small", 2 * MIB) if small else ("large", 20 * MIB)
        segment = next((s for s in self.segments if s["segment_type"] == kind), None)
        last = segment["blocks"][-1] if segment else None
        free = last["size"] if last and last["state"] == "inactive" else 0
        total = -(-(size - free) // page) * page
        if self.now["reserved"] + total > self.capacity:
            return None
        if segment is None:
            segment = self._segment(total, small)
            where = segment["address"]
        else:
            where = segment["address"] + segment["total_size"]
            segment["total_size"] += total
            if free:
                last["size"] += total
            else:
                new = {
                    "size": total,
                    "requested_size": 0,
                    "address": where,
                    "state": "inactive",
                    "frames": [],
                }
                segment["blocks"].append(new)
        self._note("segment_map", addr=where, size=total)
        self._count(reserved=total)
        return segment, segment["blocks"][-1]

    def _segment(self, total, small):
        block = {
            "size": total,
            "requested_size": 0,
            "address": self.next_address,
            "state": "inactive",
            "frames": [],
        }
        segment = {
            "address": self.next_address,
            "total_size": total,
            "segment_type": "small" if small else "large",
            "is_expandable": self.expandable,
            "stream": 0,
            "frames": self._stack(),
            "blocks": [block],
        }
        # Neighbours in addresses, as cudaMalloc likes to place them: no block may be taken to reach into the next one.
        self.next_address += 1 << 36 if self.expandable else total
        self.segments.append(segment)
        return segment

    def _find(self, address):
        for segment in self.segments:
            for block in segment["blocks"]:
                if block["address"] == address:
                    return segment, block
        raise KeyError(address)

    def _stack(self):
        return list(self.frames) if self.recording else []

    def _note(self, action, **rest):
        self.clock += 10
        if self.recording:
            event = {"action": action, **rest, "stream": 0, "time_us": self.clock, "frames": self._stack()}
            self.trace.append(event)
            del self.trace[: -self.max_entries]

    def _count(self, **changes):
        for kind, change in changes.items():
            self.now[kind] += change
        self.now["inactive_split"] = sum(
            segment["total_size"] - sum(b["size"] for b in segment["blocks"] if b["state"] != "inactive")
            for segment in self.segments
            if not self.expandable and any(b["state"] != "inactive" for b in segment["blocks"])
        )
        self.most = {kind: max(self.most[kind], self.now[kind]) for kind in KINDS}


def snapshot(*devices):
    """Return what `torch.cuda.memory._snapshot()` returns of these devices."""
    segments = []
    for number, device in enumerate(devices):
        for segment in sorted(copy.deepcopy(device.segments), key=lambda one: one["address"]):
            blocks = segment["blocks"]
            held = [b for b in blocks if b["state"] == "active_allocated"]
            used = [b for b in blocks if b["state"] != "inactive"]
            sums = {
                "allocated_size": sum(b["size"] for b in held),
                "active_size": sum(b["size"] for b in used),
                "requested_size": sum(b["requested_size"] for b in used),
            }
            segments.append({"device": number, "segment_pool_id": (0, 0), **segment, **sums})
    return {
        "segments": segments,
        "device_traces": [copy.deepcopy(device.trace) for device in devices],
        "allocator_settings": {"expandable_segments": any(device.expandable for device in devices)},
        "external_annotations": [],
    }
