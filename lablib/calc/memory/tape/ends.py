"""The two ends of a transformer as tapes: the embedding, and final norm, head and loss.

The loss is where memory is lost with large vocabularies. In 16 bits, with n tokens and V words:

    logits                    2 n V    until the loss has read them
    logits in fp32            4 n V    until log-softmax has read them
    log-probabilities         4 n V    kept for backward
    gradient of these         4 n V    made by the loss's backward
    gradient of fp32 logits   4 n V    made by log-softmax's backward, while the two above are there
    gradient of logits        2 n V    what the head gets

The papers' kernel is Megatron-LM's: one operator, which keeps fp32 probabilities and turns them into the gradient.
Transformer Engine's keeps the logits, and writes their gradient over them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from lablib.calc.memory.tape.blocks import eager_block, fused_rmsnorm, gathered_logits, read_by_all, rmsnorm
from lablib.calc.memory.tape.operators import Eager
from lablib.calc.memory.tape.paper import gathered_linear, paper_block, paper_norm
from lablib.calc.memory.tape.setting import FP32, INT64, BlockSetting
from lablib.calc.memory.tape.tape import NEW, NONE, SHARED, Tape

#: Labels of the head's tensors that are terms of their own.
LOSS_TERMS = {"logits": "logits", "logits in fp32": "logits_fp32"}
#: Operators behind the logits.
LOSS_OPERATORS = ("cast", "log-softmax", "negative log-likelihood", "cross-entropy")


def paper_head(s: BlockSetting) -> Tape:
    """Return the tape of final norm, head and loss as the papers count it."""
    c = s.config
    e = Eager(value=s.value, gradient=s.gradient, low=s.low, frozen=s.lora_rank > 0)
    words = -(-c.vocab // s.tp)
    x = e.input("stream behind the last block", s.stream * c.hidden)
    x = paper_norm(e, s, x, "final norm")
    (logits,) = gathered_linear(e, s, x, {"head": ("logits", words)}, "head", bias=False)
    e.tape.hold(logits)
    if s.implementation.keeps_logits:
        e.make("cross-entropy", [logits], 1, FP32, keeps=[logits], kind="logits", overwrites=True)
        return e.tape
    probabilities = s.tokens * words * FP32  # which become the gradient in place
    e.make("cross-entropy", [logits], 1, FP32, extra=probabilities, kind="logits")
    return e.tape


def eager_head(s: BlockSetting) -> Tape:
    """Return the tape of final norm, head and loss in eager PyTorch; layer and recomputation do not matter."""
    c = s.config
    e = Eager(value=s.value, gradient=s.gradient, low=s.low, frozen=s.lora_rank > 0)
    words = -(-c.vocab // s.tp)
    x = e.input("stream behind the last block", s.stream * c.hidden, FP32 if s.low else s.value)
    norm = {"kind": "norms", "name": "final norm"}
    x = e.layernorm(x, c.hidden, **norm) if c.norm == "layernorm" else rmsnorm(e, s, x, c.hidden, **norm)
    if s.implementation.holds_variables:  # one of its forward until the loss is there, kept by a trained head or not
        e.tape.hold(x)
    if s.tp == 1:
        logits = e.linear(x, c.hidden, words, kind="head", name="head", label="logits")
    else:
        own = e.linear(read_by_all(e, s, x), c.hidden, words, kind="head", name="head", label="logits of this rank")
        logits = gathered_logits(e, s, own, words)
    e.tape.hold(logits)
    full = e.cast(logits, FP32, "logits in fp32")
    shifts = s.implementation.holds_variables and s.cp == 1  # with context parallelism the batch has shifted targets
    if shifts:
        # Each sequence's targets are padded by one and cut anew, and a variable holds the padded ones.
        e.tape.hold(e.tape.op("pad", [], (s.tokens + s.batch) * INT64, label="padded targets"))
    scores = e.function("log-softmax", full, kind="logits", keeps_output=True, label="log-probabilities")
    ours = not s.implementation.holds_variables and ((s.batch > 1 and s.seq > 1) or s.cp > 1)
    targets = s.tokens * INT64 if shifts or ours else 0
    e.make("negative log-likelihood", [scores], 1, FP32, extra=targets + FP32, kind="loss")
    return e.tape


def torchtitan_head(s: BlockSetting) -> Tape:
    """Return the tape of final norm, head and loss, with the logits in one piece (`CrossEntropyLoss`)."""
    c = s.config
    e = Eager(value=s.value, gradient=s.gradient)
    x = e.input("stream behind the last block", s.stream * c.hidden)
    x = fused_rmsnorm(e, x, c.hidden, kind="norms", name="final norm")
    logits = e.linear(x, c.hidden, c.vocab, kind="head", name="head", label="logits")
    e.tape.hold(logits)
    full = e.cast(logits, FP32, "logits in fp32")
    scores = e.function("log-softmax", full, kind="logits", keeps_output=True, label="log-probabilities")
    # It keeps the targets, too, which are there anyway.
    e.make("negative log-likelihood", [scores], 1, FP32, extra=FP32, kind="loss")
    return e.tape


def embedding(s: BlockSetting) -> Tape:
    """Return the tape of token and position embeddings and the dropout behind them.

    The papers split the table, and their mask has 1 byte a value.
    """
    c, eager = s.config, s.implementation.eager
    words = c.vocab if eager else -(-c.vocab // s.tp)
    # Of one sequence both have the same shape in Hugging Face's GPT-2, so that one gradient is enough for both.
    same = s.implementation.holds_variables and s.batch == 1
    e = Eager(value=s.value, gradient=s.gradient, low=0, frozen=s.lora_rank > 0)
    item = FP32 if s.low else s.value
    trained = 0 if e.frozen else s.gradient
    indices = e.input("tokens", 1, 1, needs_grad=False, given=True)
    numbers = s.stream * c.hidden
    x = e.make(
        "embedding",
        [indices],
        numbers,
        item,
        gradient=NONE,
        weight_gradient=words * c.hidden * trained,
        # Of a tied table the head's gradient is there already; `lablib.calc.memory.timeline.step` adds the two up.
        label="token embeddings",
    )
    if c.learned_positions:
        places = e.make(
            "positions",
            [indices],
            s.seq // s.cp * c.hidden,
            item,
            gradient=NONE,
            weight_gradient=c.max_positions * c.hidden * trained,
            label="position embeddings",
        )
        x = e.make("add positions", [x, places], numbers, item, gradient=[SHARED, SHARED if same else NEW])
    if c.family == "gemma" and eager:
        x = e.scale(x, "scale the embeddings")
    if s.dropout:
        if eager:
            e.dropout(x, kind="embedding")
        else:
            e.make("dropout", [x], numbers, item, extra=numbers, kind="embedding")
    return e.tape


def write_tape(piece: str, setting: BlockSetting) -> Tape:
    """Return the tape of a "block", of the "head" with final norm and loss, or of the "embedding"."""
    if piece == "embedding":
        return embedding(setting)
    if not setting.implementation.eager:
        return paper_head(setting) if piece == "head" else paper_block(setting)
    if piece == "block":
        return eager_block(setting)
    return torchtitan_head(setting) if setting.implementation.fused_norms else eager_head(setting)


@lru_cache(maxsize=4096)
def kept_by_kind(piece: str, setting: BlockSetting) -> Mapping[str, int]:
    """Return the bytes that a "block", the "head" or the "embedding" keeps for backward, by kind."""
    kept: Counter[str] = Counter()
    for kind, _, size in write_tape(piece, setting).kept():
        kept[kind or "input"] += size
    return MappingProxyType(kept)


def ids_and_positions(s: BlockSetting) -> dict[str, int]:
    """Return what a micro-batch keeps beside tapes: token ids, and position ids or rotary tables, shared by all blocks.

    Our model reads a view of windows of s + 1 tokens, and a view keeps the whole storage; on cp ranks it copies its part.
    Hugging Face's batches have the labels in the same tensor, and on cp ranks shifted labels and positions beside it.
    torchtitan's have two tensors, and its tables are buffers of the model. The papers count neither.
    """
    c, implementation, seq = s.config, s.implementation, s.seq // s.cp
    if not implementation.eager:
        return {}
    if implementation.fused_norms:
        return {"tokens": 2 * s.tokens * INT64, "positions": 0}
    wide = s.low or c.family in implementation.wide_tables  # under autocast the stream is fp32, and the tables are too
    tables = 2 * c.turned_dim * (FP32 if wide else s.value)
    positions = seq * (INT64 if c.learned_positions else tables)
    if implementation.holds_variables:
        if s.cp > 1:
            return {"tokens": 3 * s.tokens * INT64, "positions": s.tokens * tables}
        return {"tokens": s.tokens * INT64, "positions": positions}
    copy = s.tokens * INT64 if s.cp > 1 else 0
    return {"tokens": s.batch * (s.seq + 1) * INT64, "positions": positions + copy}
