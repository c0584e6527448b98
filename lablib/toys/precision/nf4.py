"""NF4: the frozen weights of QLoRA in 4 bits, with scales that are quantized themselves.

    w ~ table[code] * scale         one scale for 64 weights: 4 + 32/64 = 4.5 bits a weight
    scale ~ mean + table8[code8] * scale of scales     one of these for 256 scales: 4 + 8/64 + 32/(64 * 256) = 4.127 bits

The table has 16 values, quantiles of a normal distribution at even steps of probability, scaled to [-1, 1] and with an
exact zero. Weights are about normal; divided by the largest of their block they use the codes at the ends least. The second level is "double
quantization": scales are positive and alike, so that their mean is taken off first.

Paper: Dettmers et al. 2023, QLoRA (arXiv 2305.14314), section 3. Held to bitsandbytes 0.50, `quantize_4bit` with
`compress_statistics`; torchao's NF4 has other second scales (INT8, evenly spaced).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lablib.toys.precision.low_bit_adamw import dynamic_table

BLOCK, SECOND_BLOCK = 64, 256
SHARE = 0.9677083  # of the normal distribution's mass below the last value; the paper's code has it
# fmt: off
#: As the paper's appendix E prints it.
TABLE = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])
# fmt: on


def quantiles() -> Tensor:
    """Return the table from its definition: 7 values below zero, zero, 8 above, at even steps of probability."""

    def side(count: int) -> Tensor:
        return torch.special.ndtri(torch.linspace(SHARE, 0.5, count, dtype=torch.float64))[:-1]

    values = torch.cat((side(9), torch.zeros(1, dtype=torch.float64), -side(8)))
    return (values / values.max()).sort().values.float()


def quantize_table(x: Tensor, table: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales of a flat tensor; the last block may be shorter. Nearest value, halfway goes down."""
    blocks = torch.nn.functional.pad(x.flatten().float(), (0, -x.numel() % block)).view(-1, block)
    scale = blocks.abs().amax(1)
    scaled = blocks * (1 / scale.clamp(min=1e-38))[:, None]
    codes = torch.bucketize(scaled, (table[:-1] + table[1:]) / 2)
    return codes.flatten()[: x.numel()].to(torch.uint8), scale


def read_table(codes: Tensor, scale: Tensor, table: Tensor, block: int) -> Tensor:
    """Return the values of codes, flat, in fp32."""
    return table[codes.int()] * scale.repeat_interleave(block)[: codes.numel()]


@dataclass(frozen=True)
class Nf4:
    """A tensor in NF4 with double quantization.

    Attributes:
        codes: One of 16 for every value, in uint8; two of them fill a byte in `nbytes`.
        scale_codes: One byte for every 64 values.
        second_scale: fp32, one for every 256 scales.
        mean: Of the scales, fp32.
    """

    codes: Tensor
    scale_codes: Tensor
    second_scale: Tensor
    mean: Tensor
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """Bytes without the two tables, which all tensors share."""
        return -(-self.codes.numel() // 2) + self.scale_codes.nbytes + self.second_scale.nbytes + self.mean.nbytes

    @property
    def scale(self) -> Tensor:
        """The scales of the blocks, as they are read."""
        table = dynamic_table(8, signed=True)
        return read_table(self.scale_codes, self.second_scale, table, SECOND_BLOCK) + self.mean

    def dequantize(self) -> Tensor:
        """Return the tensor in fp32."""
        return read_table(self.codes, self.scale, TABLE, BLOCK).view(self.shape)


def quantize_nf4(x: Tensor) -> Nf4:
    """Return a tensor in NF4: blocks of 64 of its flat values, and the scales of 256 blocks in 8 bits."""
    codes, scale = quantize_table(x.detach(), TABLE, BLOCK)
    mean = scale.mean()
    scale_codes, second_scale = quantize_table(scale - mean, dynamic_table(8, signed=True), SECOND_BLOCK)
    return Nf4(codes, scale_codes, second_scale, mean, x.shape)
