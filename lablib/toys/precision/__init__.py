"""Training in 16 and 8 bits: what keeps it stable.

    master   a loss scaler, a master copy, stochastic rounding
    fp8      a linear layer whose three products read eight bits

Read `master` first, beside chapter 08.
"""

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
    "quantize",
    "swap_linears",
]
