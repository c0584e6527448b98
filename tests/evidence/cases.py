"""The configurations on which the memory calculator is judged: factors, their values, and what can be combined.

A case is one value of each factor. Which cases are tried is chosen by `tests.evidence.grid`: every pair of values
that can occur together does so at least once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from lablib.calc.models import ModelConfig, preset

#: Every factor and its values, the cheapest to measure first.
FACTORS: dict[str, tuple] = {
    "implementation": ("toy", "hf", "paper"),
    "family": ("gpt2", "llama", "qwen2", "mistral", "mixtral"),
    "size": ("tiny", "small", "8b", "70b"),
    "seq": (64, 1000, 2048),
    "micro_batch": (1, 3),
    "recipe": ("fp32", "pure-bf16", "mixed-bf16", "autocast-bf16", "fsdp2-mixed-fp32-reduce"),
    "optimizer": ("adamw", "sgd", "sgd-momentum"),
    "step": ("for-loop", "foreach", "fused"),
    "recompute": ("none", "selective", "full"),
    "sharding": ("none", "ddp", "zero1", "fsdp2", "fsdp2-keep"),
    "dp": (1, 2, 4, 8, 64),
    "tensor": ("1", "2", "2+sp", "4", "4+sp"),
    "pp": (1, 2, 4),
    "accumulate": (1, 3),
    "attention": ("fused", "plain"),
    "tuning": ("full", "lora"),
}

#: Factors whose value needs a word before it.
WORDS = {"dp": "dp", "shard": "shard", "tensor": "tp", "pp": "pp", "accumulate": "accumulate", "cp": "cp"}

_TINY = {"num_layers": 4, "hidden": 48, "num_heads": 8, "ffn": 100, "vocab": 211, "max_positions": 1024}
_GPT = {"norm": "layernorm", "gated_mlp": False, "learned_positions": True, "tied": True}
_BIASES = {"qkv_bias": True, "attn_out_bias": True, "mlp_bias": True}
_GPT |= _BIASES
_EXPERTS = {"num_experts": 4, "experts_per_token": 2}
_TINY_FAMILY = {
    "gpt2": _GPT,
    "llama": {"num_kv_heads": 4},
    "qwen2": {"num_kv_heads": 4, "qkv_bias": True, "tied": True},
    "mistral": {"num_kv_heads": 4},
    "mixtral": {"num_kv_heads": 4, "expert_ffn": 100, **_EXPERTS},
    # Hugging Face's experts; grouped_mm wants rows that are multiples of 16 bytes.
    "mixtral-grouped": {"family": "mixtral", "num_kv_heads": 4, "ffn": 104, "expert_ffn": 104, **_EXPERTS},
    "mixtral-loop": {"family": "mixtral", "num_kv_heads": 4, "expert_ffn": 100, **_EXPERTS},
    "qwen3-moe": {"num_kv_heads": 4, "head_dim": 10, "qk_norm": True, "expert_ffn": 40, "num_experts": 8}
    | {"experts_per_token": 3},
    "qwen3-moe-loop": {"family": "qwen3-moe", "num_kv_heads": 4, "head_dim": 10, "qk_norm": True, "expert_ffn": 36}
    | {"num_experts": 8, "experts_per_token": 3},
    # Families beside the factors' own, and a window that is shorter than every sequence.
    "mistral-window": {"family": "mistral", "num_kv_heads": 4, "window": 40, "window_layers": (0, 1, 2, 3)},
    "qwen3": {"num_kv_heads": 4, "head_dim": 10, "qk_norm": True},
    "starcoder2": {"num_kv_heads": 4, "tied": True, "norm": "layernorm", "gated_mlp": False, **_BIASES},
    "gemma": {"num_kv_heads": 4, "head_dim": 10, "tied": True},
    "olmo2": {"post_norm": True, "qk_norm": True, "qk_norm_shared": False},
    "phi3": {"rotary_dim": 4},
    "gpt-neox": {"norm": "layernorm", "gated_mlp": False, "parallel_block": True, "rotary_dim": 2, **_BIASES},
}
_BILLION = {"num_layers": 16, "hidden": 2048, "num_heads": 16, "num_kv_heads": 8, "vocab": 32000}
_PRESETS = {
    ("gpt2", "small"): "gpt2",
    ("llama", "small"): "llama-3.2-1b",
    ("qwen2", "small"): "qwen2.5-0.5b",
    ("gpt2", "8b"): "gpt3-6.7b",
    ("llama", "8b"): "llama-3-8b",
    ("qwen2", "8b"): "qwen2.5-7b",
    ("mistral", "8b"): "mistral-7b-v0.1",
    ("mixtral", "8b"): "mixtral-8x7b",
    ("llama", "70b"): "llama-3-70b",
    ("qwen2", "70b"): "qwen2.5-72b",
    ("qwen3", "small"): "qwen3-0.6b",
    ("starcoder2", "small"): "starcoder2-3b",
    ("gemma", "small"): "gemma-2b",
    ("olmo2", "8b"): "olmo-2-7b",
    ("phi3", "small"): "phi-3-mini",
    ("gpt-neox", "small"): "pythia-410m",
    ("mixtral-grouped", "8b"): "mixtral-8x7b",
    ("qwen3-moe", "8b"): "qwen3-30b-a3b",
}
_CUSTOM = {
    ("mistral", "small"): _BILLION | {"name": "mistral-1b", "family": "mistral", "ffn": 7168},
    ("mistral-window", "small"): _BILLION
    | {"name": "mistral-1b-window", "family": "mistral", "ffn": 7168, "window": 512, "window_layers": tuple(range(16))},
    ("mixtral", "small"): _BILLION
    | {"name": "mixtral-8x1b", "family": "mixtral", "ffn": 3584, "expert_ffn": 3584, "num_experts": 8}
    | {"experts_per_token": 2},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration: a value of every factor of `FACTORS`, and of context parallelism, which stands apart.

    Attributes:
        implementation: Whose: "toy" (`lablib.toys.transformer`), "hf" (Hugging Face's classes) or "paper".
        size: "tiny" (measured on real tensors), "small", "8b" or "70b" (a published shape, all of its layers); beside
            the factors "words", tiny with a large vocabulary.
        sharding: "none", "ddp", "zero1" (DDP, and PyTorch's ZeroRedundancyOptimizer), "fsdp2" (reshards after forward)
            or "fsdp2-keep" (does not).
        tensor: Tensor-parallel ranks, with "+sp" for sequence parallelism.
        pp: Pipeline stages, 1F1B; the first stage is judged, with pp micro-batches in flight.
        tuning: "full" or "lora" (rank 16, all matrices of a block).
        cp: Ranks that share each sequence; the first one is judged.
        shard: Of dp, those that share one copy of what FSDP2 shards; None: all.
    """

    implementation: str = "toy"
    family: str = "llama"
    size: str = "tiny"
    seq: int = 64
    micro_batch: int = 1
    recipe: str = "fp32"
    optimizer: str = "adamw"
    step: str = "for-loop"
    recompute: str = "none"
    sharding: str = "none"
    dp: int = 1
    tensor: str = "1"
    pp: int = 1
    accumulate: int = 1
    attention: str = "fused"
    tuning: str = "full"
    cp: int = 1
    cp_way: str = "ring"
    shard: int | None = None

    @property
    def model(self) -> ModelConfig:
        return case_model(self.family, self.size)

    @property
    def tp(self) -> int:
        return int(self.tensor.partition("+")[0])

    @property
    def sequence_parallel(self) -> bool:
        return self.tensor.endswith("+sp")

    @property
    def shards(self) -> bool:
        return self.sharding.startswith("fsdp2")

    @property
    def experts(self) -> str:
        """How Hugging Face's classes run their experts: "grouped", as they do by themselves, or "loop"."""
        return "loop" if self.family.endswith("-loop") else "grouped"

    @property
    def unsharded(self) -> bool:
        return self.sharding in ("none", "ddp")

    @property
    def replicates(self) -> bool:
        return self.sharding in ("ddp", "zero1")

    @property
    def splits_eagerly(self) -> bool:
        """Whether tensor parallelism is PyTorch's own, of eager classes, and not Megatron's of the papers."""
        return self.tp > 1 and self.implementation != "paper"

    @property
    def micro_batches(self) -> int:
        """Of a step; one more than fill a pipeline, so that its first stage is full again while there are gradients."""
        return self.pp + 1 if self.pp > 1 else self.accumulate

    @property
    def name(self) -> str:
        plain = asdict(Case())
        always = ("implementation", "family", "size", "seq", "recipe")
        words = [self.model.name, self.implementation, f"{self.micro_batch} x {self.seq}", self.recipe]
        words += [
            f"{WORDS[factor]} {value}" if factor in WORDS else str(value)
            for factor, value in asdict(self).items()
            if factor not in (*always, "micro_batch") and value != plain[factor]
        ]
        return ", ".join(words)

    def settings(self) -> dict[str, object]:
        """Return the case as arguments of `training_memory`; `memory_timeline` takes `step` as well."""
        model = self.model
        if self.implementation == "toy" and model.family != "gpt2":
            model = replace(model, family="llama")  # the toy's other family: it has biases where the config says so
        zero = {"zero1": 1, "fsdp2": 3, "fsdp2-keep": 2}.get(self.sharding, 0)
        return {
            "model": model,
            "recipe": self.recipe,
            "optimizer": self.optimizer,
            "tuning": self.tuning,
            "micro_batch": self.micro_batch,
            "seq": self.seq,
            "dp": self.dp,
            "shard": self.shard,
            "zero": zero,
            "sharding": "fsdp2" if self.shards else "per-tensor" if self.sharding == "zero1" else "flat",
            "tp": self.tp,
            "sequence_parallel": self.sequence_parallel,
            "pp": self.pp,
            "cp": self.cp,
            "cp_way": self.cp_way,
            "stage": 0,
            "num_microbatches": self.micro_batches if self.micro_batches > 1 else None,
            "recompute": self.recompute,
            "attention": self.attention,
            "implementation": self.implementation,
            "experts": self.experts,
            "dropout": None if self.implementation == "paper" else 0.0,
        }


def case_model(family: str, size: str) -> ModelConfig:
    if size == "words":
        return replace(case_model(family, "tiny"), name=f"words-{family}", num_layers=2, vocab=3000)
    if size == "tiny":
        return ModelConfig(**{"name": f"tiny-{family}", "family": family} | _TINY | _TINY_FAMILY[family])
    if (family, size) in _CUSTOM:
        return ModelConfig(**_CUSTOM[family, size])
    if (family, size) not in _PRESETS:
        raise ValueError(f"there is no model of family {family!r} in size {size!r}")
    return preset(_PRESETS[family, size])


def has_model(family: str, size: str) -> bool:
    return size == "tiny" or (family, size) in _CUSTOM or (family, size) in _PRESETS
