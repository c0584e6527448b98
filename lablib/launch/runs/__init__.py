"""Runs under torchrun: started, killed, resumed, compared.

    elastic          torchrun from Python, and a rank that is killed once
    start            the script that torchrun starts, and a plain loop beside it
    real_run         what lab 11 measures on GPUs, and its predictions
    scaling_report   scaling reports: records, report, comparison
    replica_groups   groups that are killed while the others go on, and come back
    torchft_group    such a group of torchft
    forked_rank      the program that a forked rank runs

Read `elastic` first. Chapters 11 and 14.
"""

from lablib.launch.runs.elastic import agent_command, kill_and_resume, torchrun, train_undisturbed
from lablib.launch.runs.forked_rank import reset_process
from lablib.launch.runs.real_run import (
    LearnerPredictions,
    RealRun,
    compare_with,
    describe,
    lock_predictions,
    loss_verdict,
    rate,
    what_can_be_measured,
)
from lablib.launch.runs.replica_groups import Blow, Groups, Survived, Toy, common_steps, equal_weights, stall, storm
from lablib.launch.runs.scaling_report import (
    REAL_PARAMS,
    ScalingReport,
    compare_reports,
    describe_machine,
    gpu_report,
    read_run,
    report_differences,
    report_rows,
    scaling_records,
)
from lablib.launch.runs.start import compare_loops, launched_ranks, plain_loop
from lablib.launch.runs.torchft_group import Torchft, why_not_torchft

__all__ = [
    "REAL_PARAMS",
    "Blow",
    "Groups",
    "LearnerPredictions",
    "RealRun",
    "ScalingReport",
    "Survived",
    "Torchft",
    "Toy",
    "agent_command",
    "common_steps",
    "compare_loops",
    "compare_reports",
    "compare_with",
    "describe",
    "describe_machine",
    "equal_weights",
    "gpu_report",
    "kill_and_resume",
    "launched_ranks",
    "lock_predictions",
    "loss_verdict",
    "plain_loop",
    "rate",
    "read_run",
    "report_differences",
    "report_rows",
    "reset_process",
    "scaling_records",
    "stall",
    "storm",
    "torchrun",
    "train_undisturbed",
    "what_can_be_measured",
    "why_not_torchft",
]
