"""How many floating-point operations a training step takes, what share of the peak that is, and what a run costs.

Only matrix multiplications count, `2 m n k` FLOPs each; norms, softmax, biases and the optimizer are under one percent.
Backward is twice the forward. Attention counts all `s²` pairs, as the papers below do (`ALL_PAIRS`), or those that a causal
mask leaves with `causal=True`; a layer with a sliding window of w tokens has `s w`. MFU leaves recomputation out, HFU
counts it. `peak` is the dense FLOP/s of one accelerator in the dtype of the products, `utilization` a share of it.

Read `step_flops` first.

Sources: Narayanan et al. 2021 (arXiv 2104.04473), equations 3 and 4 and appendix; Korthikanti et al. 2022
(arXiv 2205.05198), appendix A; Chowdhery et al. 2022 (arXiv 2204.02311), appendix B, for MFU; Kaplan et al. 2020
(arXiv 2001.08361), section 2.1 and equation 1.1; Hoffmann et al. 2022 (arXiv 2203.15556), tables 2 and 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.models import ModelConfig
from lablib.calc.params import attention_matrices, count_params

RECOMPUTE = ("none", "selective", "full")

#: What every MFU of the course counts, in words.
ALL_PAIRS = "all pairs of attention"


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one optimizer step over `batch` sequences of `seq` tokens.

    Attributes:
        forward_by_component: FLOPs of the forward pass alone: attention projections, scores, MLP, experts, head.
        six_nd: The estimate `6 N D` with the model's active parameters.
        early_stop: Whether replays of whole blocks were counted as PyTorch runs them, without the end that nothing needs.
    """

    tokens: int
    forward_by_component: dict[str, int]
    recompute: int
    six_nd: int
    early_stop: bool = True

    @property
    def forward(self) -> int:
        """FLOPs of the forward pass."""
        return sum(self.forward_by_component.values())

    @property
    def backward(self) -> int:
        """FLOPs of the backward pass, recomputation left out: twice the forward pass."""
        return 2 * self.forward

    @property
    def by_component(self) -> dict[str, int]:
        """FLOPs of forward and backward by component; together they are `model`, and go over `model` or `six_nd`."""
        return {component: 3 * count for component, count in self.forward_by_component.items()}

    @property
    def model(self) -> int:
        """FLOPs of forward and backward, without recomputation: the numerator of MFU."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """FLOPs with recomputation: the numerator of HFU."""
        return self.model + self.recompute


def forward_flops(config: ModelConfig, *, batch: int, seq: int, causal: bool = False) -> dict[str, int]:
    """Return the FLOPs of one forward pass by component; a token visits `experts_per_token` routed experts and every shared one.

    Args:
        causal: Count only the pairs that a causal mask keeps, `s (s + 1) / 2` in place of `s²`, and with a window of w
            tokens `w (w + 1) / 2 + (s - w) w` in place of `s w`.
    """
    for name, value in (("batch", batch), ("seq", seq)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number, at least 1")
    if config.learned_positions and seq > config.max_positions:
        raise ValueError(f"seq={seq} is longer than the {config.max_positions} learned positions of {config.name}")
    tokens, layers = batch * seq, config.num_layers
    with_experts = layers - config.num_dense_layers if config.is_moe else 0
    pairs = attended_pairs(config, seq, causal=causal)
    expert = _mlp_flops(config, tokens, config.expert_ffn)
    flops = {
        "attention": layers * 2 * tokens * attention_matrices(config),
        "scores": 2 * batch * pairs * config.num_heads * (config.head_dim + config.value_dim),
        "mlp": (layers - with_experts) * _mlp_flops(config, tokens, config.ffn),
        "router": with_experts * 2 * tokens * config.hidden * config.num_experts,
        "experts": with_experts * config.experts_per_token * expert,
        "shared_experts": with_experts * config.num_shared_experts * expert,
        "head": 2 * tokens * config.hidden * config.vocab,
    }
    return {component: count for component, count in flops.items() if count}


def attended_pairs(config: ModelConfig, seq: int, *, causal: bool) -> int:
    """Return the pairs of a query and a key that all layers of one sequence need."""
    windows = config.num_window_layers
    full, near = _pairs(seq, seq, causal), _pairs(seq, min(seq, config.window), causal)
    return (config.num_layers - windows) * full + windows * near


def _pairs(seq: int, window: int, causal: bool) -> int:
    """Queries times the keys that each of them meets."""
    return window * (window + 1) // 2 + (seq - window) * window if causal else seq * window


def _mlp_flops(config: ModelConfig, tokens: int, ffn: int) -> int:
    matrices = 3 if config.gated_mlp else 2
    return 2 * tokens * matrices * config.hidden * ffn


def step_flops(
    config: ModelConfig,
    *,
    batch: int,
    seq: int,
    recompute: str = "none",
    causal: bool = False,
    selective_passes: int = 3,
    early_stop: bool = True,
    dropout: bool = False,
) -> StepFlops:
    """Return the FLOPs of one training step: forward, backward, recomputation, and 6ND beside them.

    "full" runs every layer's forward pass again, not the head. "selective" runs the two products with scores again;
    Korthikanti et al. count their backward too, three passes, which is the default so that HFU means what it means in the
    literature. `selective_passes=1` counts what is run again.

    Args:
        batch: Sequences in the step, over all replicas and micro-batches.
        selective_passes: Forward passes' worth of scores that selective recomputation adds.
        early_stop: Whether a replay of a block stops when backward has what it needs, as `torch.utils.checkpoint` does by
            default without reentrance. False: it runs to the end, as in Megatron-LM and in the papers' formulas.
        dropout: Whether dropout follows the MLP; its mask is then made again, and with it all that comes before.
    """
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute={recompute!r} must be one of {', '.join(RECOMPUTE)}")
    if selective_passes < 1:
        raise ValueError(f"selective_passes={selective_passes} must be at least 1")
    forward = forward_flops(config, batch=batch, seq=seq, causal=causal)
    extra = {
        "none": 0,
        "selective": selective_passes * forward["scores"],
        "full": sum(forward.values()) - forward["head"],
    }
    tokens = batch * seq
    if early_stop and not dropout:
        extra["full"] -= config.num_layers * skipped_by_early_stop(config, tokens)
    return StepFlops(tokens, forward, extra[recompute], 6 * count_params(config).active * tokens, early_stop)


def skipped_by_early_stop(config: ModelConfig, tokens: int) -> int:
    """Return the FLOPs of a block's replay that PyTorch leaves out: the down projection's, `2 n f h`, or none.

    Nothing asks for its output again, unless dropout or a norm comes behind it. Replays of experts are counted whole,
    and so are those of a model with both kinds of layers.
    """
    return 0 if config.ends_with_norm or config.is_moe else 2 * tokens * config.ffn * config.hidden


def mfu(flops: StepFlops | float, *, seconds: float, devices: int = 1, peak: float) -> float:
    """Return model FLOPs utilization, `F_model / (seconds · devices · peak)`, for a step or its model FLOPs as a number.

    All pairs of attention count, unless the step was counted with `causal=True`, which gives another MFU.
    """
    return _utilization(flops.model if isinstance(flops, StepFlops) else flops, seconds, devices, peak)


def hfu(flops: StepFlops | float, *, seconds: float, devices: int = 1, peak: float) -> float:
    """Return hardware FLOPs utilization: as `mfu`, with recomputed FLOPs counted."""
    return _utilization(flops.hardware if isinstance(flops, StepFlops) else flops, seconds, devices, peak)


def _utilization(flops: float, seconds: float, devices: int, peak: float) -> float:
    require_positive(flops=flops, seconds=seconds, devices=devices, peak=peak)
    return flops / (seconds * devices * peak)


TOKENS_PER_PARAMETER = 20


KAPLAN_ALPHA_N = 0.076


def training_flops(params: float, tokens: float, *, recompute: str = "none") -> float:
    """Return the FLOPs of a training run: `6 N D`, or `8 N D` when every forward pass is run again in backward.

    Attention's `s²` part is left out; `lablib.calc.flops.step_flops` counts it.

    Args:
        params: Parameters, N; active ones for a model with experts.
    """
    require_positive(params=params, tokens=tokens)
    if recompute not in ("none", "full"):
        raise ValueError(f"recompute={recompute!r} must be 'none' or 'full'; step_flops knows 'selective'")
    return (8 if recompute == "full" else 6) * params * tokens


def chinchilla_tokens(params: float) -> float:
    """Return the compute-optimal number of training tokens, `D ≈ 20 N`.

    Hoffmann et al. 2022 (arXiv 2203.15556), table 3: 20.0 tokens a parameter at 400M, 20.5 at 10B, 21.2 at 1T.
    """
    require_positive(params=params)
    return TOKENS_PER_PARAMETER * params


def chinchilla_params(flops: float) -> float:
    """Return the compute-optimal number of parameters for a budget: `N = √(C / 120)`, from `C = 6 N D` and `D = 20 N`."""
    require_positive(flops=flops)
    return (flops / (6 * TOKENS_PER_PARAMETER)) ** 0.5


def kaplan_loss_ratio(times: float) -> float:
    """Return by what the loss is multiplied when the model grows: `L(N) ∝ N^-0.076`, with data and compute to spare.

    Kaplan et al. 2020 (arXiv 2001.08361), equation 1.1.
    """
    require_positive(times=times)
    return times**-KAPLAN_ALPHA_N


def training_time(flops: float, *, devices: int = 1, peak: float, utilization: float = 1.0) -> float:
    """Return the seconds of a training run, `t = C / (n · peak · utilization)`."""
    require_positive(flops=flops, devices=devices, peak=peak, utilization=utilization)
    if utilization > 1:
        raise ValueError(f"utilization={utilization} is a share of the peak: give at most 1, 40 percent as 0.4")
    return flops / (devices * peak * utilization)


def gpu_hours(flops: float, *, peak: float, utilization: float = 1.0) -> float:
    """Return the GPU-hours of a training run, however many GPUs share them."""
    return training_time(flops, peak=peak, utilization=utilization) / 3600


def training_cost(flops: float, *, peak: float, utilization: float = 1.0, dollars_per_hour: float) -> float:
    """Return the price of a training run in dollars: GPU-hours times the price of one."""
    require_positive(dollars_per_hour=dollars_per_hour)
    return gpu_hours(flops, peak=peak, utilization=utilization) * dollars_per_hour


def require_positive(**values: float) -> None:
    """Check that numbers are positive and finite."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ValueError(f"{name}={value!r} must be a positive number")
