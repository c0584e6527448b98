"""Processor time of the calculators whose wait a reader would notice: loading, the largest search, the largest timeline."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

from lablib.calc.schedules import schedule, simulate
from tests.bench.harness import Result, median

RUNS = 5
COMMANDS = {
    "rung plan llama-3.1-405b --gpus 16384 --seq 8192 --global-batch 2048": 2.0,
    "rung plan deepseek-v3 --gpus 2048 --gpu h800 --seq 4096 --global-batch 15360": 2.0,
    "rung memory llama-3-8b --dp 8 --zero 3 --seq 8192 --gpu h100": 0.3,
    "rung fit llama-3-70b --gpu h100 --gpus 16 --seq 8192": 1.0,
}
LOAD = """
import time
start = time.process_time()
import lablib.calc.memory.formulas
print(time.process_time() - start)
"""


def load() -> float:
    """Load the memory calculator in a new Python; return its seconds."""
    return float(subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, check=True).stdout)


def command(line: str) -> float:
    """Run a command of `rung` in a new Python; return its seconds, start included."""
    before = os.times()
    call = "import sys; from lablib.cli.main import app; app(sys.argv[1:])"
    subprocess.run([sys.executable, "-c", call, *line.split()[1:]], capture_output=True, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


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
        **{line: (limit, [command(line) for _ in range(RUNS)]) for line, limit in COMMANDS.items()},
        "ZB-V with 64 ranks and 1,024 micro-batches": (5.0, [spent(lambda: simulate(zb))]),
        "interleaved 1F1B with as many": (5.0, [spent(lambda: simulate(interleaved))]),
    }
    return [
        Result(name, median(samples), limit, "s", samples={"seconds": samples})
        for name, (limit, samples) in measured.items()
    ]
