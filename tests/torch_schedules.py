"""The one place that touches private names of torch.distributed.pipelining: its orders, its validator, its CSV reader.

Nothing here starts a process: the classes are made without their constructors, which want a process group.
"""

import csv
import io
import re
from pathlib import Path

import torch
from torch.distributed.pipelining import schedules as _torch

from lablib.calc.schedules.actions import Schedule, from_steps, parse_action
from lablib.calc.torch_versions import SUPPORTED

_NAMES = (
    "_Action",
    "_PipelineScheduleRuntime",
    "_format_pipeline_order",
    "_validate_schedule",
    "_simulate_comms_compute",
)
_CLASSES = (
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)


def why_not() -> str:
    """Return why this torch cannot be asked, or nothing."""
    missing = [name for name in (*_NAMES, *_CLASSES) if not hasattr(_torch, name)]
    if not missing:
        return ""
    return f"torch {torch.__version__} has no {', '.join(missing)} in torch.distributed.pipelining.schedules"


def is_proven() -> bool:
    """Say whether this release is supported: there a missing name is a failure, elsewhere a reason to skip."""
    return ".".join(torch.__version__.split(".")[:2]) in SUPPORTED


def order(class_name: str, p: int, m: int, v: int = 1) -> list[list[str]]:
    """Return the order of a class of PyTorch, one list of actions a rank, without its idle steps."""
    it = _bare(class_name, p, m, v)
    if class_name in ("ScheduleGPipe", "Schedule1F1B"):
        steps = it._get_pipeline_order()
    else:
        steps = {rank: it._calculate_single_rank_operations(rank) for rank in range(p)}
    # Actions of data parallelism, which some orders carry, are not work of the schedule.
    return [[str(a) for a in steps[rank] if a is not None and "REDUCE" not in str(a)] for rank in range(p)]


def grid(class_name: str, p: int, m: int, v: int = 1) -> str:
    """Return the order of a class of PyTorch as PyTorch prints it."""
    steps = order(class_name, p, m, v)
    return _torch._format_pipeline_order({r: [_torch._Action.from_str(a) for a in row] for r, row in enumerate(steps)})


def validate(rows: list[list[str]], p: int, stages: int, m: int) -> dict[int, int]:
    """Ask PyTorch's validator; return the rank of every stage.

    Raises:
        AssertionError: What the validator raises.
    """
    actions = {rank: [_torch._Action.from_str(a) for a in row] for rank, row in enumerate(rows)}
    return _torch._validate_schedule(actions, p, stages, m)


def load_csv(path: str, p: int, stages: int, m: int) -> "_torch._PipelineScheduleRuntime":
    """Read a CSV as PyTorch's runtime does: it validates, adds sends and receives, and can then be simulated."""
    it = _bare("_PipelineScheduleRuntime", p, m, stages // p)
    it._load_csv(path, format="compute_only")
    return it


def dry_run(loaded: "_torch._PipelineScheduleRuntime") -> int:
    """Run a loaded schedule in PyTorch's dry run, which finds deadlocks of sends and receives; return its steps.

    Raises:
        ValueError: If the schedule does not progress.
    """
    # The dry run does not know the actions of FSDP and DDP that loading adds.
    known = {
        rank: [a for a in actions if not str(a).endswith(("SHARD", "REDUCE_GRAD"))]
        for rank, actions in loaded.pipeline_order_with_comms.items()
    }
    steps = _torch._simulate_comms_compute(
        known, lambda stage: loaded.stage_index_to_group_rank[stage], loaded._num_stages
    )
    return max(map(len, steps.values()))


def _bare(class_name: str, p: int, m: int, v: int) -> object:
    cls = getattr(_torch, class_name)
    it = object.__new__(cls)
    it._n_microbatches, it.pp_group_size, it.n_local_stages = m, p, v
    it._num_stages = it.num_stages = p * v
    it.number_of_rounds = max(1, m // p)
    it.microbatches_per_round = m // it.number_of_rounds
    it.pipeline_order, it._stages, it._defer_pp_recv = {}, [], False
    # What the constructor of 2.15 takes besides, at its defaults: FSDP2's gathers and reductions, and waiting for sends.
    it._max_active_stages, it._unshard_lookahead = 3, "full"
    it._defer_reduce_grad_wait, it._max_outstanding_sends = False, None
    return it


# What PyTorch adds when it prepares a schedule for running; it adds them anew to the schedule that it reads. From 2.15
# it writes the waits, too.
_DERIVED = re.compile(r"-?\d+(WAIT_)?(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def from_csv(source: str | Path) -> Schedule:
    """Read a schedule from PyTorch's CSV; idle cells, sends, receives and the actions of FSDP are dropped."""
    text = source.read_text() if isinstance(source, Path) else source
    rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text)) if row]
    return from_steps([[parse_action(cell) for cell in row if cell and not _DERIVED.fullmatch(cell)] for row in rows])
