"""A shuffled order of any number of samples that nobody has to keep.

A permutation of 10 billion samples as a list takes 80 GB on every rank. `shuffled_place` computes one entry of it: a
Feistel network mixes the bits of the place, which is one-to-one on all numbers of so many bits, and a result beyond the
last sample is mixed again until it is one (cycle walking). So the position in the data stays one number, on any number
of ranks, at any size.

Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, sections 3 and 4. Chapter 11.
"""

from __future__ import annotations

from hashlib import blake2b

_ROUNDS = 4


def shuffled_place(place: int, count: int, *, seed: int = 0) -> int:
    """Return the sample at a place of the endless shuffled order of `count` samples.

    Args:
        place: From 0 on, over all epochs; each epoch has an order of its own.
        seed: Of the run.
    """
    if count < 1 or place < 0:
        raise ValueError(f"count={count} must be at least 1 and place={place} at least 0")
    epoch, number = divmod(place, count)
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    key = f"{seed} {epoch}".encode()
    while True:
        left, right = number >> half, number & ((1 << half) - 1)
        for turn in range(_ROUNDS):
            mixed = blake2b(b"%d %d" % (turn, right), key=key[:64], digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(mixed, "big") & ((1 << half) - 1))
        number = left << half | right
        if number < count:
            return number
