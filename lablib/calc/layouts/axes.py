"""Bytes that a rank sends over each axis of a layout in a step.

Two layers on one rank, one sequence of 4 tokens, width 2, two tensor-parallel ranks: a layer has four all-reduces of
4 x 2 = 8 values, a ring of two sends each once, so 2 x 4 x 8 = 64 values a step. Chapter 07 has the formulas of
`axis_bytes` as a table; t, c, p, d, v are tp, cp, pp, dp and the stages on a rank, m micro-batches of b sequences.

    tp   8 bsh/c (t-1)/t L/p m        cp   4 bsk/t (c-1)/c L/p m
    pp   2 bsh/(ct) m v               dp   2 ψ/(tp) (dc-1)/(dc)         values

Tokens that go to experts are `lablib.calc.parallel.dispatch_bytes`.

Sources: Narayanan et al. 2021 (arXiv 2104.04473), section 3; Grattafiori et al. 2024 (arXiv 2407.21783), section 3.3.2.
"""

from __future__ import annotations

from lablib.calc.communication import ring_all_gather_bytes, ring_all_reduce_bytes
from lablib.calc.layouts.planner import Layout
from lablib.calc.memory import resolve_model
from lablib.calc.models import ModelConfig
from lablib.calc.params import count_params


def axis_bytes(
    model: ModelConfig | str, layout: Layout, *, seq: int, global_batch: int, value: int = 2
) -> dict[str, float]:
    """Return the bytes that a rank of a middle stage sends over tp, cp, pp and dp in a step.

    Keys and values are all-gathered; a stage sends its output on and a gradient back, each rank its part in tp.
    Gradients are all-reduced, or scattered and gathered under ZeRO-1, over dp and cp together; ψ/(tp · pp) of them.

    Args:
        layout: tp, cp, pp, dp, micro_batch and virtual_stages are used; ep must be 1.
        value: Bytes of a number on the wire.
    """
    if layout.ep > 1:
        raise ValueError(f"ep={layout.ep}: experts' tokens are counted by dispatch_bytes, a layer at a time")
    config = resolve_model(model)
    t, c, p, d = layout.shape
    m = layout.num_microbatches(global_batch)
    tokens = layout.micro_batch * seq * value
    layers = config.num_layers / p * m
    keys = 2 * tokens * config.kv_width / t
    held = count_params(config).total * value / (t * p)
    return {
        "tp": 4 * layers * ring_all_reduce_bytes(tokens * config.hidden / c, t),
        "cp": 2 * layers * ring_all_gather_bytes(keys, c),
        "pp": 2 * m * layout.virtual_stages * tokens * config.hidden / (c * t) if p > 1 else 0.0,
        "dp": ring_all_reduce_bytes(held, d * c),
    }
