"""FP8 training: bytes of states, of scales and of gathers, and the time that it can gain.

FP8 training casts the inputs of matmuls. Weights, gradients and moments stay in high precision, since updates would
be lost in 8 bits: so model states do not shrink, and the step gets faster in its matmuls only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lablib.calc.errors import one_of
from lablib.calc.models import ModelConfig
from lablib.calc.params import count_params, layer_params

# What DeepSeek-V3 (arXiv 2412.19437, section 3.3) keeps in BF16 or FP32. The paper says that these are sensitive to
# low precision or cheap; the reason beside each is ours.
HIGH_PRECISION = {
    "embedding": "BF16 or FP32: a table, not a matmul",
    "output head": "BF16 or FP32: its errors reach the loss directly",
    "MoE gating": "BF16 or FP32: small errors change which expert is chosen",
    "normalization": "BF16 or FP32: statistics over a whole row",
    "attention operators": "BF16 or FP32: a softmax magnifies errors",
    "master weights": "FP32",
    "weight gradients": "FP32",
    "optimizer moments": "BF16",
}

BLOCKS = {
    "tensor": None,
    "row": None,
    "block1x128": (1, 128),
    "block128x128": (128, 128),
    **dict.fromkeys(("mx32", "mx32-floor", "mx32-even", "mx32-ceil"), (1, 32)),
    "nvfp4": (1, 16),
}
SCALE_BYTES = {name: 1 for name in BLOCKS if name.startswith("mx32")} | {"nvfp4": 1}  # E8M0, E4M3; all others are fp32

#: How the scale of an MX block is rounded to a power of two, by torchao's names, and what becomes of the largest value.
MX_ROUNDINGS = {
    "rceil": "2^ceil(log2(largest / top)): it lands at most at the top, and none saturates",
    "floor": "2^(floor(log2 largest) - floor(log2 top)): it lands in the top binade, and above the top it is cut off",
    "even": "as floor for the largest rounded to the bits of the format: from 31/16 of a power of two on one more in E4M3",
    "ceil": "2^(ceil(log2 largest) - floor(log2 top)): none saturates, and most scales are twice as large as they need be",
}


@dataclass(frozen=True)
class StateRecipe:
    """Bytes of model states per parameter, by what they are."""

    name: str
    terms: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes per parameter in all."""
        return sum(self.terms.values())


# A cached FP8 copy of the weights is an addition: it saves casting them again for every micro-batch.
STATES = {
    recipe.name: recipe
    for recipe in (
        StateRecipe("mixed-bf16", {"weights": 2, "gradients": 2, "master": 4, "moments": 8}),
        StateRecipe("mixed-bf16, fp32 gradients", {"weights": 2, "gradients": 4, "master": 4, "moments": 8}),
        StateRecipe("torchao float8 with FSDP2", {"weights": 4, "gradients": 4, "moments": 8}),
        StateRecipe("deepseek-v3", {"weights": 1, "gradients": 4, "master": 4, "moments": 4}),
    )
}


def scale_count(rows: int, columns: int, scaling: str) -> int:
    """Return how many scales a matrix has.

    Args:
        scaling: "tensor", "row", "block1x128", "block128x128", "mx32" or "nvfp4".
    """
    block = BLOCKS[one_of("scaling", scaling, BLOCKS)]
    if block is None:
        return 1 if scaling == "tensor" else rows
    return math.ceil(rows / block[0]) * math.ceil(columns / block[1])


def quantized_bytes(rows: int, columns: int, scaling: str) -> float:
    """Return the bytes of a matrix with its scales: one for each FP8 value, half for FP4, 4 or 1 for a scale.

    NVFP4 has one more scale, in fp32, for the whole matrix (arXiv 2509.25149).
    """
    scales = scale_count(rows, columns, scaling) * SCALE_BYTES.get(scaling, 4)
    values = rows * columns
    return values / 2 + scales + 4 if scaling == "nvfp4" else values + scales


def largest_scale(largest: float, top: float = 448.0) -> float:
    """Return the scale that brings a largest magnitude to the largest number of a format, `max |x| / top`."""
    return largest / top if largest else 1.0


def mx_doubles(mantissa: Any, top_mantissa: Any, epsilon: float, rounding: str) -> Any:
    """Return whether the scale of an MX block is twice `2^(e - f)`, for `mx_scale`: of one mantissa, or of a tensor of them."""
    return {
        "rceil": mantissa > top_mantissa,
        "floor": mantissa >= 1,
        "even": mantissa >= 1 - epsilon / 4,
        "ceil": mantissa > 0.5,
    }[one_of("rounding", rounding, MX_ROUNDINGS)]


def mx_scale(largest: float, top: float = 448.0, *, epsilon: float = 0.125, rounding: str = "rceil") -> float:
    """Return the scale of an MX block, a power of two.

    With `largest = m 2^e` and `top = t 2^f`, m and t from 1/2 to 1, the scale is `2^(e - f)`, or twice that where m is
    above a threshold: t for "rceil", 1 for "floor", 1/2 for "ceil", and for "even" what rounds up to 1.

    Training rounds up, "rceil" (Mishra et al. 2025, arXiv 2506.08027; Transformer Engine). "floor" is the suggestion of
    the OCP Microscaling Formats Specification, with which their training diverged.

    Args:
        largest: Largest magnitude of the block.
        top: Largest number of the format: 448 for E4M3.
        epsilon: Its gap between 1 and the next number.
        rounding: A key of `MX_ROUNDINGS`.
    """
    (mantissa, exponent), (top_mantissa, top_exponent) = math.frexp(largest), math.frexp(top)
    doubled = mx_doubles(mantissa, top_mantissa, epsilon, rounding)
    return 2.0 ** (exponent - top_exponent + doubled) if largest else 2.0**-127


def linear_params(config: ModelConfig) -> int:
    """Return the parameters that FP8 training gathers in FP8: the matrices of the layers, without norms and biases."""
    h, per_layer = config.hidden, layer_params(config, 0)
    attention = h * (2 * config.q_width + 2 * config.kv_width)
    mlp = h * config.ffn * (3 if config.gated_mlp else 2)
    if config.is_moe or config.is_mla or attention + mlp > sum(per_layer.values()):
        raise ValueError(f"{config.name}: only dense models without latent attention are counted here")
    return config.num_layers * (attention + mlp)


def gather_bytes(config: ModelConfig, ranks: int, *, float8: bool) -> float:
    """Return the bytes that one all-gather of all weights sends per rank, `(N-1)/N` of them.

    With float8 the matrices of the layers travel in one byte and everything else in bf16; the scales need one
    all-reduce of a number per matrix, which is left out (torchao, enable_fsdp_float8_all_gather).

    Args:
        float8: Whether matrices travel in FP8; else all travels in bf16.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    total = count_params(config).total
    matrices = linear_params(config) if float8 else 0
    return (2 * total - matrices) * (ranks - 1) / ranks


def step_speedup(matmul_share: float, matmul_speedup: float = 2.0) -> float:
    """Return how many times faster a step gets if its matmuls do (Amdahl).

        speedup = 1 / (1 - f + f / s)

    Args:
        matmul_share: f, share of the step's time that goes to the matmuls in question, before.
        matmul_speedup: s, at most the ratio of peaks: 2 for FP8 against bf16.
    """
    if not 0 <= matmul_share <= 1 or matmul_speedup <= 0:
        raise ValueError(f"matmul_share={matmul_share} must be 0 to 1 and matmul_speedup={matmul_speedup} positive")
    return 1 / (1 - matmul_share + matmul_share / matmul_speedup)


def implied_share(speedup: float, matmul_speedup: float = 2.0) -> float:
    """Return which share of a step was matmuls if it got faster by this much: the inverse of `step_speedup`."""
    if not 1 <= speedup <= matmul_speedup or matmul_speedup == 1:
        raise ValueError(f"speedup={speedup} is not between 1 and matmul_speedup={matmul_speedup}")
    return (1 - 1 / speedup) / (1 - 1 / matmul_speedup)


def rounding_error(epsilon: float) -> float:
    """Return the relative root mean square error of rounding one number.

    The error is even over a gap g, so its mean square is g^2/12. A gap is epsilon times the power of two below the
    number, and where the logarithm of numbers is even over a binade, `E[(2^e/x)^2] = 3 / (8 ln 2)`:

        noise = epsilon * sqrt(1/12) * sqrt(3 / (8 ln 2))
    """
    return epsilon * math.sqrt(3 / (8 * math.log(2)) / 12)


def ring_sum_error(ranks: int, epsilon: float, *, full: bool = False, same_sign: bool = False) -> float:
    """Return the relative error of a sum over ranks on a ring that rounds after every addition.

    Each of n - 1 additions rounds a running sum. Of k numbers with random signs it has the size sqrt(k), so the squares
    of the errors add up to `noise^2 * (2 + 3 + ... + n)`, against a result of size sqrt(n). Where all numbers have one
    sign, as with a mean far from zero, the running sum has the size k and the result n:

        random signs   noise * sqrt((n + 1)/2 - 1/n)
        one sign       noise * sqrt((2^2 + 3^2 + ... + n^2) / n^2)      ~ noise * sqrt(n/3)
        fp32 sums      noise

    Args:
        epsilon: Gap between 1 and the next number of the format: 2^-7 for bf16.
        full: Whether the additions are in fp32, rounded once at the end.
        same_sign: Whether all numbers have one sign.
    """
    if ranks == 1:
        return 0.0  # nothing is added, and so nothing is rounded
    sizes = [k * k if same_sign else k for k in range(2, ranks + 1)]
    growth = 1.0 if full else math.sqrt(sum(sizes) / (ranks * ranks if same_sign else ranks))
    return rounding_error(epsilon) * growth


# DeepSeek-V3, table 1: H800 hours of pre-training and of the whole training.
DEEPSEEK_V3 = {"active_params": 37e9, "tokens": 14.8e12, "pretraining_hours": 2.664e6, "hours": 2.788e6}

# torchao's documentation, quantized training: Llama 3 8B on 8 H100, tokens per second and GPU, and peak GiB.
TORCHAO_LLAMA3_8B = {
    "bf16": (6150.0, 47.65),
    "float8 tensorwise, float8 all-gather": (7689.5, 47.77),
    "float8 rowwise, bf16 all-gather": (6768.0, 47.79),
}
