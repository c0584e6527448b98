"""What PyTorch's tensor parallelism adds to a tape: `parallelize_module` with Hugging Face's plan.

    q, k, v, gate, up    column-wise: every rank reads the whole stream and makes its part of the outputs
    output, down         row-wise: every rank makes a part of every output's sum, and an all-reduce adds them up
    head                 column-wise, and its logits are gathered: the loss sees the whole vocabulary
    embedding, norms     whole on every rank

A collective of DTensor is a function: it reads one tensor and makes another, so both are there while it runs.
Forward, of n tokens: the sums of this rank, `n h`, and those of all. Backward: each column-wise matrix has a gradient
of the stream of its own, and sums it up over the ranks before it meets the others.

Chapter: book/03_tensor_parallelism.md. Source: torch/distributed/tensor/parallel/style.py and
torch/distributed/tensor/_redistribute.py; transformers, models/llama/configuration_llama.py, `base_model_tp_plan`.
"""

from __future__ import annotations

from lablib.calc.tape import NEW, SHARED, Value
from lablib.calc.tape_eager import Eager
from lablib.calc.tape_setting import BlockSetting


def read_by_all(e: Eager, s: BlockSetting, x: Value) -> Value:
    """Return x as a column-wise matrix reads it: in backward its gradients are summed up over the ranks.

    Args:
        e: Where to write.
        s: How the piece runs.
        x: The stream.
    """
    if s.tp == 1:
        return x
    return e.make("all-reduce of the gradient", [x], e.numbers(x), e.item[x], view=True, gradient=NEW)


def summed_up(e: Eager, s: BlockSetting, y: Value, name: str) -> Value:
    """Return the sum over ranks of what a row-wise matrix made.

    Args:
        e: Where to write.
        s: How the piece runs.
        y: This rank's part of the sums.
        name: Of the matrix.
    """
    if s.tp == 1:
        return y
    return e.make(f"all-reduce of the {name}", [y], e.numbers(y), e.item[y], gradient=SHARED)


def gathered_logits(e: Eager, s: BlockSetting, logits: Value, words: int) -> Value:
    """Return the logits of the whole vocabulary: gathered rank by rank, then put in the order of the words.

    Args:
        e: Where to write.
        s: How the piece runs.
        logits: Of this rank's words.
        words: On this rank; the last rank may have fewer, and is padded.
    """
    padded = s.tokens * words * s.tp
    return e.make(
        "all-gather of the logits",
        [logits],
        s.tokens * s.config.vocab,
        e.item[logits],
        temporary=padded * e.item[logits],
        label="logits",
    )
