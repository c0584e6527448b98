"""Pipeline parallelism: one executor that runs any schedule of `lablib.calc.schedules`.

    executor   runs a rank's actions
    stages     a transformer cut by depth, and a backward cut in two
    mailbox    messages between stages

Read `executor` first, beside chapter 04.
"""

from lablib.toys.pipeline.executor import PipelineExecutor
from lablib.toys.pipeline.stages import Stage, split_stages

__all__ = ["PipelineExecutor", "Stage", "split_stages"]
