"""Data parallelism in three steps: naive, bucketed, overlapped with backward.

    ddp        the three classes
    replicas   what must be equal on every rank
    failures   runs whose loss falls although they are wrong

Read `ddp` first, beside chapter 02.
"""

from lablib.toys.data_parallel.ddp import BucketedDDP, NaiveDDP, OverlappedDDP
from lablib.toys.data_parallel.failures import DIAGNOSES, Chart, diagnosis, train_regression
from lablib.toys.data_parallel.replicas import check_replica, take_from_first

__all__ = [
    "DIAGNOSES",
    "BucketedDDP",
    "Chart",
    "NaiveDDP",
    "OverlappedDDP",
    "check_replica",
    "diagnosis",
    "take_from_first",
    "train_regression",
]
