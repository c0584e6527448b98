"""The checks of rung 09: bytes that a block keeps, a checkpoint by hand, segments, and what to recompute when."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from lablib.calc.activations import layer_activations
from lablib.calc.models import ModelConfig
from lablib.checks.checkpoint_function import checkpoint
from lablib.checks.recompute_jobs import Job, best_choice, jobs, moments_of_first, selective_peak
from lablib.checks.report import Wrong, check, close

#: What the lab and the tests use from here; the check of whole runs and the situations have their own modules.
__all__ = ["block_bytes", "checkpoint", "choose", "segment_peak"]

# --- bytes of a block --------------------------------------------------------------------------------------


def _config(hidden: int, heads: int, kv_heads: int, ffn: int, gated: bool) -> ModelConfig:
    return ModelConfig(
        name="drawn",
        family="llama" if gated else "gpt2",
        num_layers=1,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        ffn=ffn,
        vocab=256,
        max_positions=1 << 20,
        norm="rmsnorm" if gated else "layernorm",
        gated_mlp=gated,
    )


_BLOCK = ("batch", "seq", "hidden", "heads", "kv_heads", "ffn", "gated", "dropout", "fused")


def _draw(dice: random.Random) -> tuple:
    kv_heads, groups, width = dice.randint(1, 8), dice.choice((1, 1, 2, 4)), dice.choice((8, 16, 64))
    heads = kv_heads * groups
    gated, fused = dice.random() < 0.5, dice.random() < 0.5
    ffn = dice.randint(2, 5) * heads * width + dice.randint(0, 9)
    dropout = not gated and dice.random() < 0.6
    return (
        dice.randint(1, 5),
        dice.randint(3, 400),
        heads * width,
        heads,
        kv_heads,
        ffn,
        gated,
        dropout,
        fused,
    )


@check
def block_bytes(answer: Callable[..., float], seed: int = 9) -> str:
    """Judge `block_bytes(batch, seq, hidden, heads, kv_heads, ffn, gated, dropout, fused)`, to the byte."""
    dice = random.Random(seed)
    gpt3 = (1, 2048, 12288, 96, 96, 49152, False, True, False)
    llama = (1, 8192, 4096, 32, 8, 14336, True, False, True)
    cases = [(*gpt3[:7], False, False), gpt3, llama, (*llama[:8], False), *(_draw(dice) for _ in range(40))]
    for case in cases:
        named = dict(zip(_BLOCK, case, strict=True))
        config = _config(**{name: named[name] for name in ("hidden", "heads", "kv_heads", "ffn", "gated")})
        how = {
            "attention": "fused" if named["fused"] else "plain",
            "dropout": 0.1 if named["dropout"] else 0.0,
        }
        terms = layer_activations(config, batch=named["batch"], seq=named["seq"], **how)
        got, truth = answer(*case), sum(terms.values())
        if not close(got, truth, rel=1e-12):
            _explain_block(float(got), truth, named)
    return f"{len(cases)} blocks to the byte: GPT and Llama, grouped queries, plain and fused attention."


def _explain_block(got: float, truth: int, named: dict[str, Any]) -> None:
    b, s, h, a, f = (named[key] for key in ("batch", "seq", "hidden", "heads", "ffn"))
    n, off = b * s, got - truth
    keys = 4 * n * (h - h // a * named["kv_heads"])
    pairs = a * b * s * s
    slips = {
        "Values have 16 bits, 2 bytes each.": [truth],
        "A dropout mask has one byte a value, not two.": [2 * n * h, 2 * n * h + pairs, pairs]
        if named["dropout"]
        else [],
        "There are two dropout masks in the stream, n h bytes each.": [-2 * n * h, -n * h, n * h]
        if named["dropout"]
        else [],
        "Keys and values have kv_heads heads, not heads.": [keys] if keys else [],
        "Fused attention keeps no scores, but 4 bytes of statistics a token and query head.": [
            -4 * n * a,
            -2 * n * a,
            4 * n * a,
            2 * pairs - 4 * n * a,
            2 * pairs,
            5 * pairs - 4 * n * a,
            5 * pairs,
        ]
        if named["fused"]
        else [],
        "With dropout the scores are kept three times: after softmax, the mask, and what dropout makes of them.": [
            -3 * pairs,
            -2 * pairs,
            -pairs,
        ]
        if named["dropout"] and not named["fused"]
        else [],
        "Without dropout the softmax output is kept once, and no mask.": [
            3 * pairs,
            2 * pairs,
            3 * pairs + 2 * n * h,
        ]
        if not named["dropout"] and not named["fused"]
        else [],
        "The softmax output itself is missing: a b s² values of 2 bytes.": [-2 * pairs]
        if not named["fused"]
        else [],
        "A gated MLP keeps three inner tensors: gate, up, and their product.": [-2 * n * f, 2 * n * f]
        if named["gated"]
        else [],
        "Each norm, the projections to q, k and v together, the output projection, and the MLP keep an input of h "
        "values a token; one or two are missing.": [-2 * n * h, -4 * n * h],
        "Matrices that read the same tensor keep it once: q, k and v share theirs, and so do gate and up.": [
            2 * n * h,
            4 * n * h,
            6 * n * h,
        ],
    }
    for sentence, offsets in slips.items():
        if off in offsets:
            raise Wrong(f"{sentence.removesuffix('.')} ({_words(named)}).")
    raise Wrong(f"This block keeps {truth:,} bytes, not {got:,.0f} ({_words(named)}).")


def _words(named: dict[str, Any]) -> str:
    sizes = ", ".join(f"{name}={named[name]}" for name in _BLOCK[:6])
    flags = [name for name in _BLOCK[6:] if named[name]]
    return f"{sizes}; {', '.join(flags) or 'no flag set'}"


# --- segments ----------------------------------------------------------------------------------------------


def _segment_peak(layers: int, boundary: int, block: int, k: int) -> int:
    lengths = [min(k, layers - first) for first in range(0, layers, k)]
    return max((i + 1) * boundary + length * block - boundary for i, length in enumerate(lengths))


_SHORTER = (
    "{truth:,} bytes, not {got:,.0f}. The last segment is shorter, and the one before it is replayed when an input "
    "less is kept: look for the largest moment ({case})."
)


@check
def segment_peak(answer: Callable[[int, int, int, int], float], seed: int = 90) -> str:
    """Judge `segment_peak(layers, boundary, block, k)`, by hand first, then on random chains."""
    dice = random.Random(seed)
    cases = [(4, 1, 3, k) for k in (1, 2, 3, 4)] + [(9, 1, 1, 3), (16, 2, 34, 4), (7, 5, 6, 3)]
    for _ in range(40):
        layers, boundary = dice.randint(1, 100), dice.randint(1, 50)
        cases.append((layers, boundary, dice.randint(boundary, 60 * boundary), dice.randint(1, layers)))
    for layers, boundary, block, k in cases:
        got, truth = answer(layers, boundary, block, k), _segment_peak(layers, boundary, block, k)
        if close(got, truth, rel=1e-12):
            continue
        segments = -(-layers // k)
        case = f"{layers} blocks of {block} bytes with inputs of {boundary}, segments of {k}"
        if close(got, segments * boundary) or close(got, layers / k * boundary):
            raise Wrong(f"That is kept when forward ends; the segment that runs again comes on top ({case}).")
        if layers % k and close(got, (segments - 1) * boundary + (layers % k) * block):
            raise Wrong(_SHORTER.format(truth=truth, got=float(got), case=case))
        one_block = [segments * boundary + block, (segments - 1) * boundary + block]
        if k > 1 and any(close(got, size) for size in one_block):
            raise Wrong(f"The replay brings back all blocks of a segment, not one ({case}).")
        if close(got, segments * boundary + k * block):
            raise Wrong(
                f"The segment's input is among what its first block keeps, and is counted once ({case})."
            )
        if k > 1 and close(got, segments * boundary + k * (block - boundary)):
            raise Wrong(
                f"Inside a segment every block brings back all of its {block} bytes, its own input included; only "
                f"the first block's input was there already ({case})."
            )
        if segments > 1 and close(got, k * block):
            raise Wrong(f"While a segment runs again, the inputs of those before it are still kept ({case}).")
        if close(got, layers * boundary + block - boundary) and k > 1:
            raise Wrong(f"Only the inputs of segments are kept, {segments} of them ({case}).")
        if layers % k:
            raise Wrong(_SHORTER.format(truth=truth, got=float(got), case=case))
        raise Wrong(f"The most that is kept is {truth:,} bytes, not {float(got):,.0f} ({case}).")
    return f"{len(cases)} chains, shorter last segments included."


# --- what to recompute, and when ---------------------------------------------------------------------------


@check
def choose(answer: Callable[[Job], dict[str, Any] | None], seed: int = 99) -> str:
    """Judge `choose(job)` on situations computed from real models, with budgets around every border."""
    cases = jobs(random.Random(seed))
    for job in cases:
        _judge_choice(answer(job), best_choice(job), job)
    kinds = sorted(
        {(best_choice(job) or {"strategy": "none fits"})["strategy"].split(":")[0] for job in cases}
    )
    return f"{len(cases)} situations; right answers were of the kinds {', '.join(kinds)}."


def _judge_choice(got: dict[str, Any] | None, truth: dict[str, Any] | None, job: Job) -> None:
    if got is not None and (not isinstance(got, dict) or set(got) != {"strategy", "peak", "extra"}):
        raise Wrong("Return a dictionary with the keys strategy, peak and extra, or None.")
    if got is None:
        if truth is None:
            return
        raise Wrong(f"{truth['strategy']!r} fits: it keeps {truth['peak']:,} bytes at most ({job.words}).")
    name, _, number = str(got["strategy"]).partition(":")
    known = name in ("none", "selective") and not number
    if not known and not (name == "first" and number.isdecimal() and 1 <= int(number) <= job.layers):
        raise Wrong(
            f"`strategy` is 'none', 'selective' or 'first:n' with n from 1 to the {job.layers} layers."
        )
    n = int(number or 0)
    peak, extra = _cost(job, name, n)
    if not close(got["peak"], peak, rel=1e-12):
        raise Wrong(
            f"{got['strategy']!r} keeps {peak:,} bytes at most, not {float(got['peak']):,.0f}. {_moments(job, name, n)} "
            f"({job.words})."
        )
    if not close(got["extra"], extra, rel=1e-12):
        raise Wrong(
            f"{got['strategy']!r} computes {extra:,} FLOPs again, not {float(got['extra']):,.0f}: forward only, of "
            f"every block or core that is replayed ({job.words})."
        )
    if peak > job.budget:
        where = "Even this" if truth is None else "This"
        raise Wrong(f"{where} does not fit: {got['strategy']!r} keeps {peak:,} bytes at most, and the budget is "
                    f"{job.budget:,} ({job.words}).")  # fmt: skip
    if got["strategy"] != truth["strategy"]:
        raise Wrong(
            f"{got['strategy']!r} fits, but {truth['strategy']!r} keeps {truth['peak']:,} bytes at most, which fits "
            f"too, and computes less again ({job.words})."
        )


def _moments(job: Job, name: str, n: int) -> str:
    """Say which moments of a strategy compete for its peak."""
    if name == "none":
        return "Nothing is ever replayed: forward ends with all blocks kept"
    if name == "selective":
        return (
            "Forward ends with every block less its core; then the last block's core comes back, when `behind` bytes of "
            "that block are gone, and the larger moment counts"
        )
    forward, replay = moments_of_first(job, n)
    return (
        f"Forward ends with {forward:,}; when block {n} comes back, the blocks after it are gone, and {replay:,} are "
        "kept: the larger moment counts"
    )


def _cost(job: Job, name: str, n: int) -> tuple[int, int]:
    if name == "none":
        return job.layers * job.block, 0
    if name == "selective":
        return selective_peak(job), job.layers * job.core_flops
    return max(moments_of_first(job, n)), n * job.block_flops
