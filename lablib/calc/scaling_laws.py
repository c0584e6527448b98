"""What a training run costs, and how large a model and how much data a budget wants.

    C ≈ 6 N D        FLOPs for N parameters on D tokens: 2N forward and 4N backward a token
    D ≈ 20 N         the compute-optimal split (Chinchilla), so C ≈ 120 N²
    t = C / (n · peak · utilization)

Sources: Kaplan et al. 2020 (arXiv 2001.08361), section 2.1 and equation 1.1; Hoffmann et al. 2022 (arXiv 2203.15556),
tables 2 and 3; Narayanan et al. 2021 (arXiv 2104.04473), equation 4, for the time with full recomputation.

Chapter: book/01_why_distributed.md
"""

from __future__ import annotations

TOKENS_PER_PARAMETER = 20
KAPLAN_ALPHA_N = 0.076


def training_flops(params: float, tokens: float, *, recompute: str = "none") -> float:
    """Return the FLOPs of a training run: `6 N D`, or `8 N D` when every forward pass is run again in backward.

    Attention's `s²` part is left out; `lablib.calc.flops.step_flops` counts it.

    Args:
        params: Parameters, N; active ones for a model with experts.
        tokens: Training tokens, D.
        recompute: "none" or "full".

    Raises:
        ValueError: If a number is not positive, or `recompute` is neither.
    """
    require_positive(params=params, tokens=tokens)
    if recompute not in ("none", "full"):
        raise ValueError(f"recompute={recompute!r} must be 'none' or 'full'; step_flops knows 'selective'")
    return (8 if recompute == "full" else 6) * params * tokens


def chinchilla_tokens(params: float) -> float:
    """Return the compute-optimal number of training tokens, `D ≈ 20 N`.

    Hoffmann et al. 2022 (arXiv 2203.15556), table 3: 20.0 tokens a parameter at 400M, 20.5 at 10B, 21.2 at 1T.

    Args:
        params: Parameters, N, embeddings included.

    Raises:
        ValueError: If `params` is not positive.
    """
    require_positive(params=params)
    return TOKENS_PER_PARAMETER * params


def chinchilla_params(flops: float) -> float:
    """Return the compute-optimal number of parameters for a budget: `N = √(C / 120)`, from `C = 6 N D` and `D = 20 N`.

    Args:
        flops: Budget in FLOPs, C.

    Raises:
        ValueError: If `flops` is not positive.
    """
    require_positive(flops=flops)
    return (flops / (6 * TOKENS_PER_PARAMETER)) ** 0.5


def kaplan_loss_ratio(times: float) -> float:
    """Return by what the loss is multiplied when the model grows: `L(N) ∝ N^-0.076`, with data and compute to spare.

    Kaplan et al. 2020 (arXiv 2001.08361), equation 1.1.

    Args:
        times: Factor on the parameters.

    Raises:
        ValueError: If `times` is not positive.
    """
    require_positive(times=times)
    return times**-KAPLAN_ALPHA_N


def training_time(flops: float, *, devices: int = 1, peak: float, utilization: float = 1.0) -> float:
    """Return the seconds of a training run, `t = C / (n · peak · utilization)`.

    Args:
        flops: FLOPs of the whole run, for example from `training_flops`.
        devices: Accelerators, n.
        peak: FLOP/s of one accelerator: its peak, or what it reaches, with `utilization` 1.
        utilization: Share of the peak that is reached. It must count the same FLOPs: MFU for `6 N D`, HFU for `8 N D`.

    Raises:
        ValueError: If a number is not positive, or `utilization` is above 1.
    """
    require_positive(flops=flops, devices=devices, peak=peak, utilization=utilization)
    if utilization > 1:
        raise ValueError(
            f"utilization={utilization} is a share of the peak: give at most 1, 40 percent as 0.4"
        )
    return flops / (devices * peak * utilization)


def gpu_hours(flops: float, *, peak: float, utilization: float = 1.0) -> float:
    """Return the GPU-hours of a training run, however many GPUs share them.

    Args:
        flops: FLOPs of the whole run.
        peak: Peak FLOP/s of one accelerator.
        utilization: Share of the peak that is reached.

    Raises:
        ValueError: If a number is not positive, or `utilization` is above 1.
    """
    return training_time(flops, peak=peak, utilization=utilization) / 3600


def training_cost(flops: float, *, peak: float, utilization: float = 1.0, dollars_per_hour: float) -> float:
    """Return the price of a training run in dollars: GPU-hours times the price of one.

    Args:
        flops: FLOPs of the whole run.
        peak: Peak FLOP/s of one accelerator.
        utilization: Share of the peak that is reached.
        dollars_per_hour: Price of one GPU for one hour.

    Raises:
        ValueError: If a number is not positive, or `utilization` is above 1.
    """
    require_positive(dollars_per_hour=dollars_per_hour)
    return gpu_hours(flops, peak=peak, utilization=utilization) * dollars_per_hour


def require_positive(**values: float) -> None:
    """Check that numbers are positive and finite.

    Args:
        values: Numbers by the name that a message should give them.

    Raises:
        ValueError: If one is not; it names it.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ValueError(f"{name}={value!r} must be a positive number")
