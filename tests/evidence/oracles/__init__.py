"""Bytes counted by PyTorch and never by lablib: models run on fake tensors under memory trackers.

    measurement   runs a case and counts, with PyTorch's memory tracker
    models    the models under test: Hugging Face's, the course's, sharded and split
    paper     a block built from the operators that the papers count

Read `measurement` first.
"""

from tests.evidence.oracles.measurement import measure_case, prepared
from tests.evidence.oracles.models import Master, build_model, make_optimizer

__all__ = ["Master", "build_model", "make_optimizer", "measure_case", "prepared"]
