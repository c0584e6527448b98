"""How a block runs: what its tape depends on."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from lablib.calc.memory.config import RunConfig
from lablib.calc.memory.implementation import Implementation
from lablib.calc.models import ModelConfig


@dataclass(frozen=True, kw_only=True)
class BlockSetting:
    """How a block runs.

    Attributes:
        config: The model.
        implementation: Whose operators.
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
        cp_way: "ring", "gathered" or "ulysses".
        layer: Number of the layer.
        input_needs_grad: Whether the block's input gets a gradient: not behind a frozen embedding.
        lora_rank: Rank of adapters; 0 without.
        lora_targets: "all" or "attention".
        experts: "grouped" or "loop".
        imbalance: Tokens of the fullest expert-parallel rank over the average.
    """

    config: ModelConfig
    implementation: Implementation
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
    cp_way: str = "ring"
    layer: int = 0
    input_needs_grad: bool = True
    lora_rank: int = 0
    lora_targets: str = "all"
    experts: str = "grouped"
    imbalance: float = 1.0

    @property
    def tokens(self) -> int:
        """Tokens of this rank where no sequence parallelism is."""
        return self.batch * self.seq // self.cp

    @property
    def visits(self) -> int:
        """Copies of tokens that this rank's experts get."""
        return ceil(self.tokens * self.config.experts_per_token * self.imbalance)

    @property
    def stream(self) -> int:
        """Tokens of this rank in the stream."""
        return self.tokens // (self.tp if self.sequence_parallel else 1)


def block_setting(run: RunConfig, layer: int, gradient: int, *, behind_embedding: bool) -> BlockSetting:
    """Return how a layer of a run is put on a tape.

    Args:
        layer: Its number; it matters whether that layer has experts.
        behind_embedding: Whether it is the first layer of the model.
    """
    dropout = run.dropout
    if dropout is None:
        dropout = run.implementation.default_dropout(run.model)
    autocast = run.recipe.casts
    lora = run.tuning != "full"
    return BlockSetting(
        config=run.model,
        implementation=run.implementation,
        batch=run.micro_batch,
        seq=run.seq,
        value=run.recipe.weights if autocast and run.implementation.eager else run.recipe.activation,
        gradient=gradient,
        low=autocast if run.implementation.eager else 0,
        fused=run.attention == "fused",
        dropout=dropout > 0,
        recompute=run.recompute,
        tp=run.tp,
        sequence_parallel=run.sequence_parallel,
        cp=run.cp,
        cp_way=run.cp_way,
        # One layer stands for all that are like it, so that its tape is written once.
        layer=run.model.num_layers - 1 if run.model.has_experts(layer) else 0,
        # Hugging Face's recomputation asks for the gradient of a frozen embedding's output, as a leaf.
        input_needs_grad=not (lora and behind_embedding)
        or (run.implementation.checkpoints_positions and run.recompute == "full"),
        lora_rank=run.lora_rank if lora else 0,
        lora_targets=run.lora_targets,
        experts=run.experts,
        imbalance=run.imbalance,
    )
