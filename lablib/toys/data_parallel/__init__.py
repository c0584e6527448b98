"""Data parallelism in three steps: naive, bucketed, overlapped with backward.

    ddp           the three classes, and what must be equal on every rank
    faulty_runs   runs whose loss falls although they are wrong

Read `ddp` first, beside chapter 02.
"""

from lablib.toys.data_parallel.ddp import BucketedDDP, NaiveDDP, OverlappedDDP, broadcast_tensors, check_replica
from lablib.toys.data_parallel.faulty_runs import DIAGNOSES, Chart, diagnosis, train_regression

__all__ = [
    "DIAGNOSES",
    "BucketedDDP",
    "Chart",
    "NaiveDDP",
    "OverlappedDDP",
    "broadcast_tensors",
    "check_replica",
    "diagnosis",
    "train_regression",
]
