"""How a layer of a run is put on a tape: the settings of a run in the words of `lablib.calc.tape_blocks`.

Chapter: book/01_why_distributed.md
"""

from __future__ import annotations

from lablib.calc.run_config import RunConfig
from lablib.calc.tape_blocks import BlockSetting


def block_setting(run: RunConfig, layer: int, gradient: int, *, behind_embedding: bool) -> BlockSetting:
    """Return how a layer runs.

    Args:
        run: The run.
        layer: Its number.
        gradient: Bytes of a parameter's gradient.
        behind_embedding: Whether it is the first layer of the model.
    """
    dropout = run.dropout
    if dropout is None:
        dropout = 0.1 if run.kernels == "paper" and run.model.family == "gpt2" else 0.0
    autocast = run.recipe.casts
    lora = run.tuning != "full"
    return BlockSetting(
        config=run.model,
        kernels=run.kernels,
        batch=run.micro_batch,
        seq=run.seq,
        value=run.recipe.weights if autocast and run.kernels != "paper" else run.recipe.activation,
        gradient=gradient,
        low=autocast if run.kernels != "paper" else 0,
        fused=run.attention == "fused",
        dropout=dropout > 0,
        recompute=run.recompute,
        tp=run.tp,
        sequence_parallel=run.sequence_parallel,
        cp=run.cp,
        layer=layer,
        # Hugging Face's recomputation asks for the gradient of a frozen embedding's output, as a leaf.
        input_needs_grad=not (lora and behind_embedding) or (run.kernels == "hf" and run.recompute == "full"),
        lora_rank=run.lora_rank if lora else 0,
        lora_targets=run.lora_targets,
    )
