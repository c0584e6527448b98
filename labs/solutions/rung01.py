"""Worked exercises of rung 01, why distributed training."""

from __future__ import annotations

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
    linear = (
        11 * tokens_by_hidden + 19 * tokens_by_hidden + 4 * tokens_by_hidden
    )
    if attention == "fused":
        return linear
    scores = heads * seq * seq * batch
    return (
        linear + (2 + 1 + 2) * scores
    )  # softmax output, dropout mask, dropout output


def run_memory(shape, optimizer, seq, batch, recompute, loss):
    """Count parameters, then terms, then what is held at the loss and in the optimizer's step."""
    layers, h, f, vocab = (
        shape[name] for name in ("layers", "hidden", "ffn", "vocab")
    )
    q, k = (
        shape["heads"] * shape["head_dim"],
        shape["kv_heads"] * shape["head_dim"],
    )
    tables = (1 if shape["tied"] else 2) * vocab * h
    n = layers * (2 * h * q + 2 * h * k + 3 * h * f + 2 * h) + h + tables
    # Two moments and their roots for AdamW; its fused kernel keeps the roots in registers.
    moments, roots = {
        "adamw": (8, 4),
        "adamw-fused": (8, 0),
        "sgd-momentum": (4, 0),
        "sgd": (0, 0),
    }[optimizer]
    tokens = seq * batch
    block = (
        2 * tokens * h
        if recompute == "full"
        else tokens * (8 * h + 4 * q + 4 * k + 6 * f)
    )
    terms = {
        "parameters": n,
        "weights": 2 * n,
        "gradients": 2 * n,
        "optimizer": (4 + moments)
        * n,  # the fp32 master copy belongs to the optimizer
        "activations": layers * block,
        "logits": 4 * tokens * vocab,
    }
    always = terms["weights"] + terms["optimizer"]
    # Eager PyTorch: log-probabilities and two gradients in fp32. Megatron: probabilities, and a bf16 gradient.
    a_logit = {"eager": 4 + 4 + 4, "megatron": 4 + 2}[loss]
    at_loss = always + terms["activations"] + a_logit * tokens * vocab
    in_step = always + (4 + roots) * n  # gradients in fp32 by now
    return terms | {
        "peak": max(at_loss, in_step),
        "at": "loss" if at_loss > in_step else "step",
    }
