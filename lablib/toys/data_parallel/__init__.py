"""Data parallelism in three steps: naive, bucketed, overlapped with backward; and replicas that exchange rarely.

    ddp           the three classes, and what must be equal on every rank
    faulty_runs   runs whose loss falls although they are wrong
    local_sgd     local SGD and DiLoCo: an exchange once in H steps

Read `ddp` first, beside chapter 02.
"""

from lablib.toys.data_parallel.ddp import BucketedDDP, NaiveDDP, OverlappedDDP, broadcast_tensors, check_replica
from lablib.toys.data_parallel.faulty_runs import DIAGNOSES, Chart, diagnosis, train_regression
from lablib.toys.data_parallel.local_sgd import DiLoCo, LocalSGD

__all__ = [
    "DIAGNOSES",
    "BucketedDDP",
    "Chart",
    "DiLoCo",
    "LocalSGD",
    "NaiveDDP",
    "OverlappedDDP",
    "broadcast_tensors",
    "check_replica",
    "diagnosis",
    "train_regression",
]
