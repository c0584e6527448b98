"""Optimizers: the moments that each keeps between steps.

| optimizer | moments | bytes a parameter, fp32 moments |
|---|---|---|
| adamw | momentum, variance | 8 |
| sgd | | 0 |
| sgd-momentum | momentum | 4 |
| adamw-8bit | momentum, variance | 2 (1 + 4/256) = 2.03 |

Chapter: book/01_why_distributed.md
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.choices import one_of

BLOCK = 256  # values that share one scale in block-wise 8-bit moments
SCALE_BYTES = 4  # the scale is fp32


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The moments that an optimizer keeps between steps.

    Attributes:
        name: How tables call it.
        summary: Which implementation is meant.
        source: Where its bytes come from.
        moments: Names of its moments.
        quantized: Whether moments are block-wise 8-bit: 1 byte a value and an fp32 scale for every 256 values.
    """

    name: str
    summary: str
    source: str
    moments: tuple[str, ...] = ()
    quantized: bool = False

    def moment_bytes(self, params: int, value_bytes: int = 4) -> dict[str, int]:
        """Return the bytes of each moment for so many parameters.

        8-bit: `n + 4 ceil(n / 256)` a moment, the parameters of a rank taken as one flat array.
        Left out: tensors of fewer than 4,096 values, which bitsandbytes and torchao keep in 32 bits, and their
        lookup tables of 1 KiB. Together they are under 0.5 percent of the moments from GPT-2 upwards.

        Args:
            params: Parameters that this rank's optimizer updates.
            value_bytes: Bytes of a moment value where the optimizer is not quantized; the recipe knows.
        """
        scales = SCALE_BYTES * -(-params // BLOCK)
        return dict.fromkeys(self.moments, params + scales if self.quantized else params * value_bytes)


OPTIMIZERS = {
    optimizer.name: optimizer
    for optimizer in (
        Optimizer(
            name="adamw",
            summary="torch.optim.AdamW: two moments",
            source="Loshchilov and Hutter 2017 (arXiv 1711.05101)",
            moments=("momentum", "variance"),
        ),
        Optimizer(
            name="sgd", summary="torch.optim.SGD: no moments", source="PyTorch documentation, torch.optim"
        ),
        Optimizer(
            name="sgd-momentum",
            summary="torch.optim.SGD with momentum: one moment",
            source="PyTorch documentation, torch.optim",
            moments=("momentum",),
        ),
        Optimizer(
            name="adamw-8bit",
            summary="bitsandbytes.optim.AdamW8bit and torchao.optim.AdamW8bit: 8-bit moments, fp32 scale per 256 values",
            source="Dettmers et al. 2021 (arXiv 2110.02861) with blocks of 2,048; both implementations now use 256",
            moments=("momentum", "variance"),
            quantized=True,
        ),
    )
}


def optimizer_names() -> list[str]:
    """Return the names that `find_optimizer` knows."""
    return list(OPTIMIZERS)


def find_optimizer(name: str | Optimizer) -> Optimizer:
    """Return an optimizer by name; an Optimizer is returned as it is.

    Args:
        name: One of `optimizer_names()`, or an Optimizer of your own.

    Raises:
        ValueError: If the name is unknown; close names are suggested.
    """
    return name if isinstance(name, Optimizer) else OPTIMIZERS[one_of("optimizer", name, OPTIMIZERS)]
