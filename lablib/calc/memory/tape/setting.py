"""How a block runs: what its tape depends on, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from lablib.calc.errors import check_whole
from lablib.calc.memory.config import RunConfig
from lablib.calc.memory.implementation import Implementation, find_implementation
from lablib.calc.models import ModelConfig
from lablib.calc.parallel import check_sequence

MASK = 1  # bytes of one value of a dropout mask on a GPU
FP32 = 4
INT64 = 8


@dataclass(frozen=True, kw_only=True)
class BlockSetting:
    """How a block runs, and the part of a micro-batch that one rank has.

    Attributes:
        batch: Sequences.
        seq: Tokens in a sequence, s, before context parallelism divides it.
        implementation: Whose operators; a name of `lablib.calc.memory.implementation`.
        bytes_per_value: 2 for bf16 and fp16, 4 for fp32.
        gradient: Bytes of a parameter's gradient.
        low: Bytes of a value in matmuls under autocast; 0 without.
        attention: "plain" keeps the scores of every pair of tokens, "fused" their statistics.
        dropout: Probability; only whether it is 0 matters. None: as published, which is dropout in the paper's
            GPT blocks and none elsewhere.
        recompute: "none", "selective" or "full".
        tp: Tensor-parallel ranks.
        sequence_parallel: Whether norms, dropout and the stream are split over them too.
        cp: Context-parallel ranks; each holds `s / cp` tokens and sees every key.
        cp_way: "ring", "gathered" or "ulysses".
        ep: Expert-parallel ranks.
        etp: Ranks that split one expert; None means tp.
        layer: Number of the layer; it matters whether it has experts. None: the last one.
        input_needs_grad: Whether the block's input gets a gradient: not behind a frozen embedding.
        lora_rank: Rank of adapters; 0 without.
        lora_targets: "all" or "attention".
        experts: How Hugging Face's classes multiply with experts: "grouped" or "loop".
        imbalance: Tokens that the fullest expert-parallel rank gets, over the average.

    Raises:
        ValueError: If a size is not positive, factors do not divide each other, or the implementation has no such model.
    """

    config: ModelConfig
    batch: int
    seq: int
    implementation: Implementation = "paper"
    bytes_per_value: int = 2
    gradient: int = 2
    low: int = 0
    attention: str = "fused"
    dropout: float | None = None
    recompute: str = "none"
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    cp_way: str = "ring"
    ep: int = 1
    etp: int | None = None
    layer: int | None = None
    input_needs_grad: bool = True
    lora_rank: int = 0
    lora_targets: str = "all"
    experts: str = "grouped"
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        config, tp, cp = self.config, self.tp, self.cp
        counted = find_implementation(self.implementation)
        object.__setattr__(self, "implementation", counted)
        if self.bytes_per_value not in (2, 4):
            raise ValueError(f"bytes_per_value={self.bytes_per_value!r} must be one of 2, 4")
        for name in ("batch", "seq", "tp", "cp"):
            check_whole(name, getattr(self, name), 1)
        if self.dropout is None:
            object.__setattr__(self, "dropout", counted.default_dropout(config))
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and less than 1")
        counted.check_model(config)
        if self.sequence_parallel and counted.eager:
            raise ValueError(
                f"implementation={counted!r} splits a layer by tp alone, and not with sequence_parallel=True; use "
                "sequence_parallel=False, or implementation='paper'"
            )
        check_sequence(config, tp=tp, cp=cp, seq=self.seq, sequence_parallel=self.sequence_parallel, cp_way=self.cp_way)
        counted.check_recompute(self.recompute)
        counted.check_split(config, attention=self.attention, seq=self.seq, tp=tp, cp=cp, cp_way=self.cp_way)
        # One layer stands for all that are like it, so that its tape is written once. A ValueError if there is none.
        last = config.num_layers - 1
        sparse = config.has_experts(last if self.layer is None else self.layer)
        object.__setattr__(self, "layer", last if sparse else 0)

    @property
    def value(self) -> int:
        """Bytes of a value of the model."""
        return self.bytes_per_value

    @property
    def fused(self) -> bool:
        """Whether attention is one kernel."""
        return self.attention == "fused"

    @property
    def tokens(self) -> int:
        """Tokens of this rank where no sequence parallelism is, `b s / cp`."""
        return self.batch * self.seq // self.cp

    @property
    def stream(self) -> int:
        """Tokens of this rank in the stream."""
        return self.tokens // (self.tp if self.sequence_parallel else 1)

    @property
    def visits(self) -> int:
        """Copies of tokens that this rank's experts get: `k n` if all ranks get as many, more by the imbalance."""
        return ceil(self.tokens * self.config.experts_per_token * self.imbalance)


def run_setting(
    run: RunConfig, layer: int, *, gradient: int = 2, behind_embedding: bool = False, autocast: bool = True
) -> BlockSetting:
    """Return how a layer of a run is put on a tape.

    Args:
        layer: Its number; it matters whether that layer has experts.
        gradient: Bytes of a parameter's gradient as backward leaves it.
        behind_embedding: Whether it is the first layer of the model.
        autocast: Whether autocast's casts are on the tape; if not, every value has the dtype of the matmuls.
    """
    casts = run.recipe.casts if autocast and run.implementation.eager else 0
    lora = run.tuning != "full"
    return BlockSetting(
        config=run.model,
        implementation=run.implementation,
        batch=run.micro_batch,
        seq=run.seq,
        bytes_per_value=run.recipe.weights if casts else run.recipe.activation,
        gradient=gradient,
        low=casts,
        attention=run.attention,
        dropout=run.dropout,
        recompute=run.recompute,
        tp=run.tp,
        sequence_parallel=run.sequence_parallel and run.tp > 1,
        cp=run.cp,
        cp_way=run.cp_way,
        ep=run.ep,
        etp=run.etp,
        layer=layer,
        # Hugging Face's recomputation asks for the gradient of a frozen embedding's output, as a leaf.
        input_needs_grad=not (lora and behind_embedding)
        or (run.implementation.checkpoints_positions and run.recompute == "full"),
        lora_rank=run.lora_rank if lora else 0,
        lora_targets=run.lora_targets,
        experts=run.experts,
        imbalance=run.imbalance,
    )
