"""Data parallelism in three steps: naive, bucketed, overlapped with backward; and replicas that exchange rarely.

    ddp           the three classes, and what must be equal on every rank
    local_sgd     local SGD and DiLoCo: an exchange once in H steps

Read `ddp` first, beside chapter 02.
"""

from lablib.toys.data_parallel.ddp import BucketedDDP, NaiveDDP, OverlappedDDP, broadcast_tensors, check_replica
from lablib.toys.data_parallel.local_sgd import DiLoCo, LocalSGD

__all__ = ["BucketedDDP", "DiLoCo", "LocalSGD", "NaiveDDP", "OverlappedDDP", "broadcast_tensors", "check_replica"]
