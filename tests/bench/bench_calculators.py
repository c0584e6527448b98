"""Processor time of the calculators whose wait a reader would notice: loading, the largest search, the largest timeline."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

from lablib.calc.layouts.planner import plan
from lablib.calc.schedules import schedule, simulate
from tests.bench.harness import Result, median

RUNS = 5
LOAD = """
import time
start = time.process_time()
import lablib.calc.memory.formulas
print(time.process_time() - start)
"""


def load() -> float:
    """Load the memory calculator in a new Python; return its seconds."""
    return float(subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, check=True).stdout)


def spent(work: Callable[[], object]) -> float:
    """Return the processor time of a call in seconds."""
    start = time.process_time()
    work()
    return time.process_time() - start


def results() -> list[Result]:
    """Time each a few times."""
    zb, interleaved = schedule("zb-v", 64, 1024, 1), schedule("interleaved", 64, 1024, 2)
    measured = {
        "loading the memory calculator": (0.15, [load() for _ in range(RUNS)]),
        "planning 405B on 16,384 GPUs": (2.0, [spent(_plan_405b) for _ in range(RUNS)]),
        "ZB-V with 64 ranks and 1,024 micro-batches": (5.0, [spent(lambda: simulate(zb))]),
        "interleaved 1F1B with as many": (5.0, [spent(lambda: simulate(interleaved))]),
    }
    return [
        Result(name, median(samples), limit, "s", samples={"seconds": samples})
        for name, (limit, samples) in measured.items()
    ]


def _plan_405b() -> None:
    plan("llama-3.1-405b", gpus=16384, gpu="h100", seq=8192, global_batch=2048)
