"""ZeRO stage 2: as stage 1, and no two ranks hold the same gradients either.

Stage 1 has the whole gradient on every rank until its step. Here a bucket leaves as soon as backward has filled it, and
what comes back is this rank's piece.

Paper: Rajbhandari et al. 2019, ZeRO (arXiv 1910.02054), section 5.2.
"""

from __future__ import annotations

from torch import nn

from lablib.toys.flat_shards import FlatShards, group_flat
from lablib.toys.zero1 import ZeRO1


class ZeRO2(ZeRO1):
    """Shard gradients too: reduce-scatter each bucket from within backward, and keep only this rank's piece.

    Accumulating costs a reduce-scatter for every backward, where stage 1 needs one for every step.

    Args:
        bucket_bytes: A bucket is sent when it holds at least so many bytes of gradients.
    """

    stage = 2

    def __init__(self, *args: object, bucket_bytes: int = 25 * 2**20, **options: object):
        self.bucket_bytes = bucket_bytes  # the constructor below makes the buckets
        super().__init__(*args, **options)
        self._sent = 0

    def _make_flats(self) -> list[FlatShards]:
        flats, filling = [], []
        for p in reversed([p for p in self.module.parameters() if p.requires_grad]):  # backward's order
            filling.append(p)
            if sum(q.nbytes for q in filling) >= self.bucket_bytes:
                flats += group_flat(filling, self.group, self.master)
                filling = []
        return flats + group_flat(filling, self.group, self.master)

    def _put(self, p: nn.Parameter) -> None:
        if self.home[p] in self.trained[: self._sent]:
            raise RuntimeError(
                "a weight got a second gradient after its bucket had left; use checkpoint(..., use_reentrant=False)"
            )
        super()._put(p)
        # Strictly in order, so that ranks agree on it whatever their backward used.
        while self._sent < len(self.trained) and self.trained[self._sent].complete:
            self._send_next()

    def _send_next(self) -> None:
        self._reduce([self.trained[self._sent]])
        self._sent += 1

    def _after_backward(self) -> None:
        while self._sent < len(self.trained):
            self._send_next()
        self._finish()
        self._sent = 0

    def _reduce_rest(self) -> None:
        pass
