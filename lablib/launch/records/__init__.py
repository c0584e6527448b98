"""Predictions, measurements and logs on disk, each with the machine that they come from.

    experiments     predictions that are locked before a run, records of runs, and what their fields may be
    samples         samples kept one by one, measured on a GPU or replayed
    logs            one file of JSON lines a rank
    machine         hardware and versions of this machine; what a rented one gives: links, clocks

Read `experiments` first. Every lab.
"""

from lablib.launch.records.experiments import (
    CHECKED,
    FLOAT,
    FOLDER_SWITCH,
    NUMBER,
    POSITIVE,
    RECORD_SWITCH,
    TEXT,
    WHOLE,
    Predictions,
    Record,
    check_fields,
    experiments_dir,
    git_commit,
    read_record,
    recorded,
    repository_root,
    run_or_replay,
    utc_now,
    write_json,
)
from lablib.launch.records.logs import JsonLines, RankLog, read_json_lines, read_logs
from lablib.launch.records.machine import (
    all_reduce_rates,
    compile_seconds,
    gpu_topology,
    host_rates,
    machine_label,
    missing_for_compile,
    nvidia_smi,
    this_machine,
    versions,
    while_busy,
)
from lablib.launch.records.samples import (
    SampleCache,
    coverage,
    gpu_record_name,
    gpu_samples,
    recorded_counts,
    recorded_on_gpus,
)

__all__ = [
    "CHECKED",
    "FLOAT",
    "FOLDER_SWITCH",
    "NUMBER",
    "POSITIVE",
    "RECORD_SWITCH",
    "TEXT",
    "WHOLE",
    "JsonLines",
    "Predictions",
    "RankLog",
    "Record",
    "SampleCache",
    "all_reduce_rates",
    "check_fields",
    "compile_seconds",
    "coverage",
    "experiments_dir",
    "git_commit",
    "gpu_record_name",
    "gpu_samples",
    "gpu_topology",
    "host_rates",
    "machine_label",
    "missing_for_compile",
    "nvidia_smi",
    "read_json_lines",
    "read_logs",
    "read_record",
    "recorded",
    "recorded_counts",
    "recorded_on_gpus",
    "repository_root",
    "run_or_replay",
    "this_machine",
    "utc_now",
    "versions",
    "while_busy",
    "write_json",
]
