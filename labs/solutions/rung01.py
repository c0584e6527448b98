"""Worked exercises of rung 01, why distributed training."""

from __future__ import annotations

from lablib.calc.params import count_params

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def bytes_per_parameter(weights, gradients, master, optimizer):
    """Add up every copy of a parameter that exists when the optimizer steps."""
    moments = {
        "sgd": 0,
        "sgd-momentum": 4,
        "adamw": 4 + 4,
        # One byte a moment, and one fp32 scale shared by a block of 256 values.
        "adamw-8bit": 2 * (1 + 4 / 256),
    }
    gradient_bytes = sum(BYTES[dtype] for dtype in gradients)
    master_bytes = 4 if master else 0
    return BYTES[weights] + gradient_bytes + master_bytes + moments[optimizer]


def fits(params, gpus, capacity_gib, strategy):
    """Divide what the strategy shards by the number of GPUs, then compare bytes with bytes."""
    weights, gradients, optimizer = 2 * params, 2 * params, 12 * params
    if strategy == "ddp":
        needed = weights + gradients + optimizer
    elif strategy == "zero-1":
        needed = weights + gradients + optimizer / gpus
    elif strategy == "zero-2":
        needed = weights + (gradients + optimizer) / gpus
    else:  # zero-3 shards everything; tensor parallelism splits every matrix, its gradient and its moments
        needed = (weights + gradients + optimizer) / gpus
    return needed / 1e9, needed <= capacity_gib * 2**30


def block_activations(seq, batch, hidden, heads, attention, recompute):
    """Count what one GPT block keeps for backward: bf16 values 2 bytes, dropout masks 1 byte."""
    tokens_by_hidden = seq * batch * hidden
    if recompute == "full":
        return 2 * tokens_by_hidden  # the block's input
    linear = 11 * tokens_by_hidden + 19 * tokens_by_hidden + 4 * tokens_by_hidden
    if attention == "fused":
        return linear
    scores = heads * seq * seq * batch
    return linear + (2 + 1 + 2) * scores  # softmax output, dropout mask, dropout output


def run_memory(config, optimizer, seq, batch):
    """Weights, gradients and optimizer state from the parameter count; activations from the shape."""
    params = count_params(config).total
    moments = {"sgd": 0, "sgd-momentum": 4, "adamw": 8, "adamw-8bit": 2 * (1 + 4 / 256)}[optimizer]
    block = block_activations(seq, batch, config.hidden, config.num_heads, "fused", "none")
    return {
        "weights": 2 * params,
        "gradients": 2 * params,
        "optimizer": (4 + moments) * params,  # the fp32 master copy belongs to the optimizer
        "activations": config.num_layers * block,
    }
