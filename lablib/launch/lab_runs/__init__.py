"""Labs that run by themselves, under papermill, on this machine's CPU or GPUs.

    queue          what runs, in which order, with which parameters; a job that is done is not run again
    worker         the process that runs a queue and survives its terminal; the archive of its results
    clean_kernel   cells in a kernel of their own
    people         the runs of a room full of people on a few GPUs: fair, within minutes for each

Read `queue` first. Rung 11, and the part on teaching.
"""

from lablib.launch.lab_runs.clean_kernel import run_cells
from lablib.launch.lab_runs.people import ask, share
from lablib.launch.lab_runs.queue import (
    acquire_lock,
    all_jobs,
    all_labs,
    find_lab,
    is_running,
    lab_parameters,
    latest_queue,
    parse_gpus,
    prepare_queue,
    progress,
    read_job,
    read_json,
)
from lablib.launch.lab_runs.worker import end_children, pack_results, start_worker, without_rehearsals

__all__ = [
    "acquire_lock",
    "all_jobs",
    "all_labs",
    "ask",
    "end_children",
    "find_lab",
    "is_running",
    "lab_parameters",
    "latest_queue",
    "pack_results",
    "parse_gpus",
    "prepare_queue",
    "progress",
    "read_job",
    "read_json",
    "run_cells",
    "share",
    "start_worker",
    "without_rehearsals",
]
