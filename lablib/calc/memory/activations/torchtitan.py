"""Activations of torchtitan's Llama 3: blocks as `lablib.calc.memory.activations.toy` has them, with RMSNorm in one operator.

That keeps the norm's input in the dtype of the stream and one fp32 number a token, `n h` values and 4 n bytes, where a
norm written out keeps `4 n h + 4 n` bytes and `n h` values. Rotary tables are buffers of the model. Token ids and targets
are two tensors of a batch, and the loss keeps the targets themselves.

Source: torchtitan/models/llama3 and models/common, version 0.3.0, held to the byte by its own model.
"""

from __future__ import annotations

from lablib.calc.memory.activations import toy
from lablib.calc.memory.activations.share import FP32, INT64, Share


def layer(share: Share, *, experts: bool, recompute: str, attention: str) -> dict[str, int]:
    """Return one layer's bytes by kind."""
    kinds = toy.layer(share, experts=experts, recompute=recompute, attention=attention)
    return kinds if recompute == "full" else kinds | {"norms": 2 * _norm(share)}


def embedding(share: Share) -> dict[str, int]:
    """Return the bytes before the first layer: token ids and targets."""
    return {"tokens": 2 * share.tokens * INT64, "positions": 0, "dropout": 0}


def head(share: Share) -> dict[str, int]:
    """Return the bytes of final norm, head and loss."""
    return toy.head(share) | {"norms": _norm(share), "loss": FP32}


def _norm(share: Share) -> int:
    return share.tokens * (share.config.hidden * share.value + FP32)
