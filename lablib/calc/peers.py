"""Other people's memory calculators, asked about the same configurations as this course's own.

A peer says one quantity: the states, the activations, or both together ("total", judged by the peak of a step).
A calculator that says several is several peers of one name. Each is asked about what it claims to cover and nothing
else; where its text leaves a choice open, the choice is the one that is kinder to it:

- FlashAttention counts as selective recomputation: either keeps no scores.
- FSDP2 shards everything that lives from step to step, so it is stage 3, whether or not it gathers again.
- Weights stored in fp32 and cast for use (autocast, FSDP2's policy) count as mixed precision.
- Tiny models are left out where a formula drops terms that only large models make small.
- Where a formula takes a number of parameters, it gets the exact one.

    for peer in PEERS:
        if not peer.covers(case):
            print(peer.name, peer.quantity, peer.predict(case))

Chapter: book/memory_calculator.md
"""

from __future__ import annotations

from lablib.calc import (
    peer_accelerate,
    peer_cookbook,
    peer_deepspeed,
    peer_korthikanti,
    peer_megatron,
    peer_own,
    peer_playbook,
    peer_transformer_math,
    peer_zero,
)
from lablib.calc.peer import Peer

__all__ = ["PEERS", "QUANTITIES", "Peer", "find_peer", "peer_names"]

QUANTITIES = ("states", "activations", "total")

PEERS: tuple[Peer, ...] = (
    *peer_zero.PEERS,
    *peer_korthikanti.PEERS,
    *peer_transformer_math.PEERS,
    *peer_playbook.PEERS,
    *peer_megatron.PEERS,
    *peer_cookbook.PEERS,
    *peer_deepspeed.PEERS,
    *peer_accelerate.PEERS,
    *peer_own.PEERS,
)


def peer_names() -> list[str]:
    """Return the calculators, each once, in the order of `PEERS`."""
    return list(dict.fromkeys(peer.name for peer in PEERS))


def find_peer(name: str, quantity: str) -> Peer:
    """Return a peer.

    Args:
        name: Of the calculator.
        quantity: "states", "activations" or "total".

    Raises:
        ValueError: If no calculator of this name says this quantity.
    """
    for peer in PEERS:
        if (peer.name, peer.quantity) == (name, quantity):
            return peer
    known = "; ".join(f"{peer.name}: {peer.quantity}" for peer in PEERS)
    raise ValueError(f"no peer is named {name!r} and says {quantity!r}; there are {known}")
