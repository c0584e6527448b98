"""Training in 16, 8 and 4 bits: what keeps it stable.

    master   a loss scaler, a master copy, stochastic rounding
    fp8      a linear layer whose three products read eight bits
    fp4      NVFP4: values of four bits, and what makes them trainable

Read `master` first, beside chapter 08.
"""

from lablib.toys.precision.fp4 import hadamard, quantize_nvfp4, turn
from lablib.toys.precision.fp8 import E4M3, E5M2, SCALINGS, DelayedScaling, quantize, swap_linears
from lablib.toys.precision.master import LossScaler, MasterWeights, RoundedWeights

__all__ = [
    "E4M3",
    "E5M2",
    "SCALINGS",
    "DelayedScaling",
    "LossScaler",
    "MasterWeights",
    "RoundedWeights",
    "hadamard",
    "quantize",
    "quantize_nvfp4",
    "swap_linears",
    "turn",
]
