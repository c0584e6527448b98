"""Pipeline parallelism: 1F1B in one function, and an executor for any schedule of `lablib.calc.schedules`.

    one_f_one_b   1F1B from top to bottom, with paired sends and receives
    executor      runs a rank's actions, whatever the schedule, and its messages
    stages        a transformer cut by depth, and a backward cut in two

Read `one_f_one_b` first, beside chapter 04, then `executor`.
"""

from lablib.toys.pipeline.executor import PipelineExecutor
from lablib.toys.pipeline.one_f_one_b import step_1f1b
from lablib.toys.pipeline.stages import Stage, split_stages

__all__ = ["PipelineExecutor", "Stage", "split_stages", "step_1f1b"]
