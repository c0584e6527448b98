"""lablib: the calculators, toys and launchers behind *Distributed Training, Rung by Rung*.

Importing this package loads nothing: no torch, no numpy, no matplotlib.
"""

__version__ = "0.1.0"
