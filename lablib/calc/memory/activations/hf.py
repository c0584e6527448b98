"""Activations of Hugging Face's eager classes, as `transformers` writes them: the families of `share.FAMILIES`.

The blocks are those of `lablib.calc.memory.activations.toy`, operator by operator, but for these things:

| what | our transformer | Hugging Face |
|---|---|---|
| GPT-2's GELU | one operator: 2 f a token with its output | written out in eight: 5 f |
| softmax of Llama's plain attention | in the model's dtype | in fp32, and a copy in the model's dtype |
| tokens | windows of s + 1 | s, which are the labels too |
| targets | a copy, where a view cannot be | a shifted copy always |

| a sliding window, fused attention | none | a mask of numbers a layer, `b s²`, once s is as long; k and v for every query head |
| RMSNorm of Gemma and OLMo 2 | | the normed value in fp32; Gemma: 1 + weight too |
| norms on q and k (Qwen 3, OLMo 2) | none | as the others, over a head or all of them |
| q, k, v in one matrix (Phi-3, Pythia) | three matrices | v is a view of all three; q, k and the output are copies |
| Pythia's block | one half after the other | both norms read the same stream |
| experts (Mixtral, Qwen3-MoE) | none | for each pair of token and expert `2 h + 4 f` values, in a loop `3 h + 4 f`; indices |

RMSNorm in fp32, rotary positions in four products, and SiLU and product as two operators are the same, so a Llama
block with fused attention keeps the same bytes in both, and more than the papers' kernels count.

This is training mode with `use_cache=False`, no padding, `attn_implementation` "sdpa" or "eager" (flash attention's own
classes get the window as a number), and dropout 0 unless asked for (GPT-2's own config says 0.1). Checked with transformers 5; names are those of the classes.
"""

from __future__ import annotations

from dataclasses import replace

from lablib.calc.memory.activations import toy
from lablib.calc.memory.activations.share import FP32, INT64, Share

INT32 = 4


def layer(share: Share, *, experts: bool, recompute: str, attention: str) -> dict[str, int]:
    """Return one layer's bytes by kind."""
    config, n, value, whose = share.one_rank, share.tokens, share.value, share.implementation
    kinds = toy.layer(share, experts=experts, recompute=recompute, attention=attention)
    if recompute == "full":
        return kinds
    own = 2 * norm(share, config.hidden)
    if config.parallel_block:
        own -= n * config.hidden * value  # both read the same stream
    if config.qk_norm:
        widths = [config.head_dim] * 2 if config.qk_norm_shared else [config.q_width, config.kv_width]
        sizes = (config.q_width, config.kv_width)
        kinds["attention"] += sum(norm(share, w, size // w) for w, size in zip(widths, sizes, strict=True))
    kinds["norms"] = own
    repeats = config.num_kv_heads < config.num_heads
    if share.cp > 1:  # attention's output, and the same in another layout
        kinds["attention"] += n * config.q_width * value
    if experts:
        kinds |= _experts(share)
    windowed = attention == "fused" and whose.masks_window(config, share.seq)
    if windowed:
        # The kernel's own copy of the mask, in the dtype of q; and it takes a key and a value for every query head.
        kinds["attention"] += n * share.seq * value + 2 * n * (config.q_width - config.kv_width) * value
    if whose.joins_rotated(config):
        copied = repeats and windowed
        if kinds["scores"]:
            copied = repeats or (share.batch > 1 and share.seq > 1 and config.num_heads > 1)
        if not copied:  # v is a view of q, k and v together
            kinds["attention"] += n * (config.q_width + config.kv_width) * value
        if attention == "fused":  # its output, and the same in another layout
            kinds["attention"] += n * config.q_width * value
    if config.family == "gpt2":
        # x/2, tanh, 1 + tanh beside GELU's input and output.
        kinds["mlp"] += 3 * n * config.ffn * value
    elif kinds["scores"] and value != FP32:
        # The softmax in fp32; its copy in the model's dtype is kept too, unless dropout reads it and makes another.
        kinds["scores"] += config.num_heads * n * share.seq * (FP32 - (value if share.drops else 0))
    return kinds


def _experts(share: Share) -> dict[str, int]:
    """Return what router and experts keep, in the way of `lablib.calc.memory.tape.experts`."""
    config, n, k = share.config, share.tokens, share.config.experts_per_token
    pairs = n * k
    # Shares of all experts, the numbers of the chosen, and what the division in place needs: chosen shares and sums.
    normalized = config.router is None or config.router.normalized
    router = n * config.num_experts * FP32 + pairs * INT64 + (n * (k + 1) * FP32 if normalized else 0)
    weight = FP32 if share.implementation.wide_routing(config) else share.value
    loop = share.experts == "loop"
    # Copy, gate and up, SiLU, product and output; in the loop what is added to the tokens, too.
    inside = pairs * (((3 if loop else 2) * config.hidden + 4 * config.expert_ffn) * share.value + weight)
    # Rows and columns of each expert's pairs; or rows, the order of the pairs and the way back, and where groups end.
    indices = 2 * pairs * INT64 if loop else 3 * pairs * INT64 + config.num_experts * INT32
    return {"mlp": n * config.hidden * share.value, "router": router, "experts": inside + indices}


def norm(share: Share, width: int, count: int = 1) -> int:
    """Return what one norm keeps that runs over so many vectors of a token: as our transformer's, or wide.

    In fp32 throughout: its input, an inverse root each, the normed value, and 1 + weight where there is such a thing.
    """
    config, whose = share.config, share.implementation
    if not whose.wide_norms(config):
        return toy.norm(replace(config, hidden=width), share.tokens * count, share.value)
    shifted = width * FP32 if whose.shifts_norms(config) else 0
    return share.tokens * count * (2 * width + 1) * FP32 + shifted


def embedding(share: Share) -> dict[str, int]:
    """Return the bytes before the first layer: token ids, and position ids or rotary tables.

    With context parallelism a batch has shifted labels and positions beside its tokens, and tables for each sequence.
    """
    config = share.config
    if share.cp > 1:
        tables = 2 * share.tokens * config.turned_dim * share.value
        return toy.embedding(share) | {"tokens": 3 * share.tokens * INT64, "positions": tables}
    kinds = toy.embedding(share) | {"tokens": share.tokens * INT64}
    if not config.learned_positions:
        wide = share.implementation.wide_tables(config)
        kinds["positions"] = 2 * share.seq * config.turned_dim * (FP32 if wide else share.value)
    return kinds


def head(share: Share) -> dict[str, int]:
    """Return the bytes of final norm, head and loss."""
    targets = share.tokens * INT64 if share.cp == 1 else 0  # else the batch has them
    return toy.head(share) | {"norms": norm(share, share.config.hidden), "loss": targets + FP32}
