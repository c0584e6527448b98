"""Training in 16, 8 and 4 bits: what keeps it stable.

    master   a loss scaler, a master copy, stochastic rounding
    fp8      a linear layer whose three products read eight bits
    fp4      NVFP4: values of four bits, and what makes them trainable
    low_bit_adamw   AdamW with moments in 8 or 4 bits
    nf4      the frozen weights of QLoRA

Read `master` first, beside chapter 08; `low_bit_adamw` belongs to chapter 05.
"""

from lablib.toys.precision.fp4 import Recipe4, hadamard, quantize_mxfp4, quantize_nvfp4, turn
from lablib.toys.precision.fp8 import E4M3, E5M2, SCALINGS, DelayedScaling, quantize, swap_linears
from lablib.toys.precision.low_bit_adamw import LowBitAdamW
from lablib.toys.precision.master import LossScaler, MasterWeights, RoundedWeights

__all__ = [
    "E4M3",
    "E5M2",
    "SCALINGS",
    "DelayedScaling",
    "LossScaler",
    "LowBitAdamW",
    "MasterWeights",
    "Recipe4",
    "RoundedWeights",
    "hadamard",
    "quantize",
    "quantize_mxfp4",
    "quantize_nvfp4",
    "swap_linears",
    "turn",
]
