"""A caching allocator that plays PyTorch's on numbers: it rounds, keeps what is freed, and makes snapshots.

Each block has a segment of its own, and a freed one serves the next request of the same size. Its counters are the
truth that a replay has to find again.
"""

from __future__ import annotations

MIB = 2**20


class OutOfMemory(Exception):
    """The capacity is used up."""


class Simulated:
    """One device."""

    def __init__(self, capacity=1 << 40, *, base=0x7F0000000000):
        self.capacity, self.next_address = capacity, base
        self.blocks, self.trace, self.recording, self.frames = {}, [], False, []
        self.now = dict.fromkeys(("requested", "allocated", "reserved"), 0)
        self.reset()

    def record(self):
        self.recording = True
        self.reset()

    def reset(self):
        self.most = dict(self.now)

    def malloc(self, asked):
        """Return the address of a block."""
        size = max(512, -(-asked // 512) * 512)
        free = [a for a, block in self.blocks.items() if block["state"] == "inactive"]
        address = next((a for a in free if self.blocks[a]["size"] == size), None)
        if address is None:
            if self.now["reserved"] + size > self.capacity:
                for empty in free:
                    self._note("segment_free", empty, self.blocks.pop(empty)["size"], reserved=-1)
            if self.now["reserved"] + size > self.capacity:
                self.trace.append({"action": "oom", "size": size})
                raise OutOfMemory
            address, self.next_address = self.next_address, self.next_address + size
            self._note("segment_alloc", address, size, reserved=1)
        frames = list(self.frames) if self.recording else []
        self.blocks[address] = {
            "size": size, "requested_size": asked, "state": "active_allocated", "frames": frames
        }  # fmt: skip
        self._note("alloc", address, asked, requested=1)
        self._count(allocated=size)
        return address

    def free(self, address):
        """Free a block, which stays in the cache."""
        block = self.blocks[address]
        self._note("free_requested", address, block["requested_size"])
        self._note("free_completed", address, block["requested_size"], requested=-1)
        self._count(allocated=-block["size"])
        block |= {"state": "inactive", "requested_size": 0, "frames": []}

    def live(self):
        return [address for address, block in self.blocks.items() if block["state"] != "inactive"]

    def _note(self, action, address, size, **signs):
        if self.recording:
            event = {"action": action, "addr": address, "size": size}
            self.trace.append(event | ({"frames": list(self.frames)} if action == "alloc" else {}))
        self._count(**{kind: sign * size for kind, sign in signs.items()})

    def _count(self, **changes):
        for kind, change in changes.items():
            self.now[kind] += change
            self.most[kind] = max(self.most[kind], self.now[kind])


def snapshot(*devices, max_entries=None):
    """Return what `torch.cuda.memory._snapshot()` would; the trace has its last `max_entries` events."""
    segments = [
        {"device": number, "address": address, "total_size": block["size"], "blocks": [dict(block)]}
        | {"stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "allocated_size": 0, "active_size": 0}
        for number, device in enumerate(devices)
        for address, block in device.blocks.items()
    ]
    return {"segments": segments, "device_traces": [device.trace[-(max_entries or 10**9) :] for device in devices]}
