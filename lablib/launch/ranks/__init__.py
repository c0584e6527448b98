"""Start ranks from a notebook or a script, and hear which one failed.

`run_ranks(fn, world_size)` runs a function on every rank and returns their results. A rank that fails is named with its own
traceback, a hung one with the line where it stands; an interrupt ends them all.

    run              `run_ranks`
    agreement        fail on all ranks if one fails, and what long errors mean, in a sentence
    turns            ranks without processes: threads that run one at a time, so that any order of events can be played
    shared_machine   whose ranks run now, where several people share a machine
    handle, rank_process, transport: the inside of `run_ranks`, and where a rank computes

Read `run` first. All chapters from 02 on.
"""

from lablib.launch.ranks.agreement import (
    agree,
    count_ranks,
    explain,
    from_rank_0,
    one_sentence,
    own_group,
    own_line,
    own_rank,
    readable,
)
from lablib.launch.ranks.rank_process import leave_the_notebook
from lablib.launch.ranks.run import RankError, RankTimeout, run_ranks
from lablib.launch.ranks.shared_machine import CORES_EACH, TURNS, place
from lablib.launch.ranks.transport import (
    check_device,
    environment,
    hide_gpus,
    pickle_call,
    pickle_result,
    rank_device,
    rank_mesh,
)
from lablib.launch.ranks.turns import Endless, Turns

__all__ = [
    "CORES_EACH",
    "TURNS",
    "Endless",
    "RankError",
    "RankTimeout",
    "Turns",
    "agree",
    "check_device",
    "count_ranks",
    "environment",
    "explain",
    "from_rank_0",
    "hide_gpus",
    "leave_the_notebook",
    "one_sentence",
    "own_group",
    "own_line",
    "own_rank",
    "pickle_call",
    "pickle_result",
    "place",
    "rank_device",
    "rank_mesh",
    "readable",
    "run_ranks",
]
