"""How a piece of a model is put on a tape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lablib.calc.models import ModelConfig

if TYPE_CHECKING:
    from lablib.calc.implementations import Implementation
    from lablib.calc.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class BlockSetting:
    """How a block runs.

    Attributes:
        config: The model.
        kernels: Whose operators.
        batch: Sequences.
        seq: Tokens in a sequence.
        value: Bytes of a value of the model.
        gradient: Bytes of a parameter's gradient.
        low: Bytes of a value in matmuls under autocast; 0 without.
        fused: Whether attention is one kernel.
        dropout: Whether there is dropout.
        recompute: "none", "selective" or "full".
        tp: Tensor parallel ranks.
        sequence_parallel: Whether the stream is split over them.
        cp: Context parallel ranks.
        layer: Number of the layer.
        input_needs_grad: Whether the block's input gets a gradient: not behind a frozen embedding.
        lora_rank: Rank of adapters; 0 without.
        lora_targets: "all" or "attention".
    """

    config: ModelConfig
    kernels: Implementation
    batch: int
    seq: int
    value: int = 2
    gradient: int = 2
    low: int = 0
    fused: bool = True
    dropout: bool = False
    recompute: str = "none"
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    layer: int = 0
    input_needs_grad: bool = True
    lora_rank: int = 0
    lora_targets: str = "all"

    @property
    def tokens(self) -> int:
        """Tokens of this rank where no sequence parallelism is."""
        return self.batch * self.seq // self.cp

    @property
    def stream(self) -> int:
        """Tokens of this rank in the stream."""
        return self.tokens // (self.tp if self.sequence_parallel else 1)


def block_setting(run: RunConfig, layer: int, gradient: int, *, behind_embedding: bool) -> BlockSetting:
    """Return how a layer of a run is put on a tape.

    Args:
        run: The run.
        layer: Its number; it matters whether that layer has experts.
        gradient: Bytes of a parameter's gradient.
        behind_embedding: Whether it is the first layer of the model.
    """
    dropout = run.dropout
    if dropout is None:
        dropout = run.kernels.default_dropout(run.model)
    autocast = run.recipe.casts
    lora = run.tuning != "full"
    return BlockSetting(
        config=run.model,
        kernels=run.kernels,
        batch=run.micro_batch,
        seq=run.seq,
        value=run.recipe.weights if autocast and run.kernels.eager else run.recipe.activation,
        gradient=gradient,
        low=autocast if run.kernels.eager else 0,
        fused=run.attention == "fused",
        dropout=dropout > 0,
        recompute=run.recompute,
        tp=run.tp,
        sequence_parallel=run.sequence_parallel,
        cp=run.cp,
        # One layer stands for all that are like it, so that its tape is written once.
        layer=run.model.num_layers - 1 if run.model.has_experts(layer) else 0,
        # Hugging Face's recomputation asks for the gradient of a frozen embedding's output, as a leaf.
        input_needs_grad=not (lora and behind_embedding)
        or (run.kernels.checkpoints_positions and run.recompute == "full"),
        lora_rank=run.lora_rank if lora else 0,
        lora_targets=run.lora_targets,
    )
