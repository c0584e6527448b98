"""PyTorch's FSDPMemTracker against the calculator: to the byte, for every way of wrapping."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from lablib.launch.fsdp import forecast
from lablib.toys.transformer import Transformer, tiny_config

CONFIG = tiny_config("gpt2", hidden=18, num_heads=3, ffn=50, num_layers=2, vocab=50, max_positions=16)
RANKS = 4


def seen(**options: object):
    # SGD has no state, and a step of AdamW on fake tensors takes longer than forward and backward.
    options.setdefault("optimizer", partial(torch.optim.SGD, lr=0.1))
    return forecast(lambda: Transformer(CONFIG), world_size=RANKS, batch=1, seq=4, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"wrap": "none", "optimizer": torch.optim.AdamW},
        {"wrap": "linear"},
        {"reshard_after_forward": False},
        {"reshard_after_forward": 2, "root_reshard": True},
        {"prefetch": 2, "mesh": (2, 2), "precision": "bf16"},
    ],
    ids=lambda options: ", ".join(options),
)
def test_gathered_bytes_are_the_calculator_s(options: dict) -> None:
    """The most of whole parameters and all-gather buffers at any operation, in forward and backward."""
    found = seen(**options)
    # With a number, the parts kept after forward are activations to the tracker; all else has the same name.
    without_parts = max(moment.params + moment.buffers for moment in found.report.gathered_timeline())
    assert found.most_gathered == without_parts
    if isinstance(found.report.reshard, bool):
        assert found.most_gathered == found.report.peak_unsharded_bytes()
    kept = 4 * found.report.params_per_rank
    assert found.after_backward["parameters"] == found.after_backward["gradients"] == kept
    assert found.after_backward["unsharded parameters"] == found.after_backward["all-gather buffers"] == 0
    assert found.total >= 2 * kept + found.peak["unsharded parameters"]
    assert found.most["activations"] > 0
    # AdamW keeps two more, with padding, and a step counter of 4 bytes for each tensor.
    tensors = sum(len(unit.shapes) for unit in found.report.units)
    states = 2 * kept + 4 * tensors if options.get("optimizer") is torch.optim.AdamW else 0
    assert found.after_backward["optimizer"] == states


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="world_size=0 must be at least 1"):
        forecast(lambda: Transformer(CONFIG), world_size=0, batch=1, seq=4)
    with pytest.raises(ValueError, match="wrap='blocks' is unknown"):
        seen(wrap="blocks")
    assert not dist.is_initialized()  # a refusal leaves no process group behind
