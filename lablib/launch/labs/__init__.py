"""`rung labs`: run the labs through papermill, one after the other, each done once.

    labs       which labs there are, the queue, and the state of its jobs
    worker     takes one job after the other
    notebook   one job: a notebook under papermill, in its own process

Read `labs` first, then `worker`. Every GPU lab.
"""

from lablib.launch.labs.labs import (
    all_jobs,
    all_labs,
    is_running,
    lab_parameters,
    latest_queue,
    parse_gpus,
    prepare_queue,
    read_job,
    read_json,
    source_digest,
)
from lablib.launch.labs.worker import pack_results, start_worker

__all__ = [
    "all_jobs",
    "all_labs",
    "is_running",
    "lab_parameters",
    "latest_queue",
    "pack_results",
    "parse_gpus",
    "prepare_queue",
    "read_job",
    "read_json",
    "source_digest",
    "start_worker",
]
