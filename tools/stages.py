"""Run make targets one after the other, go on after a failure, and say what each took and whether all passed.

A clock is reported and fails nobody's command: a busy machine is no defect. With `LABLIB_BUDGETS=5`, which .ci/run
sets, five times the budget fails.

On Linux it also says how busy the machine's cores were: a stage that leaves them idle waits for something.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path


def ticks() -> tuple[int, int]:
    """Return what all cores have worked so far, and all their time, in the kernel's ticks; zeros where nobody counts."""
    try:
        user, nice, system, idle, wait, *others = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    except (OSError, ValueError):
        return 0, 0
    work = user + nice + system + sum(others)
    return work, work + idle + wait


def busy(before: tuple[int, int]) -> str:
    """Return how busy the cores have been since, for the end of a line; nothing where nobody counts.

    Args:
        before: Of `ticks`.
    """
    work, total = (now - then for now, then in zip(ticks(), before, strict=True))
    return f", cores {work / total:.0%} busy" if total > 0 else ""


def verdict(name: str, seconds: float, budget: float) -> str:
    """Return the closing line of a command.

    Args:
        name: The command.
        seconds: What it took, installing included.
        budget: What it may take on 2 cores when every rung exists.
    """
    line = f"{name}: {seconds / 60:.1f} of at most {budget / 60:.0f} minutes on 2 cores"
    return f"{line}: OVER THE BUDGET" if seconds > budget else line


def main() -> int:
    """Run the stages named on the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", help="the command that the stages belong to")
    parser.add_argument("--report", help="run nothing, only print the closing line of this command")
    parser.add_argument("--since", type=float, required=True, help="when the command started, Unix time")
    parser.add_argument("--budget", type=float, required=True, help="seconds")
    parser.add_argument("stages", nargs="*")
    args = parser.parse_args()

    rows, failed = [f"{'install':8} {time.time() - args.since:6.0f} s  passed"], []
    for stage in args.stages:
        print(f"\n== make {stage}", flush=True)
        start, before = time.time(), ticks()
        status = subprocess.call([os.environ.get("MAKE", "make"), stage])
        failed += [stage] if status else []
        rows.append(f"{stage:8} {time.time() - start:6.0f} s  {'FAILED' if status else 'passed'}{busy(before)}")
    if args.stages:
        print("\n" + "\n".join(rows))
    seconds = time.time() - args.since
    print(verdict(args.report or args.name, seconds, args.budget))
    if failed:
        print(f"failed: {', '.join(failed)}")
    most = float(os.environ.get("LABLIB_BUDGETS") or 0)
    too_slow = 0 < most * args.budget < seconds
    return 1 if failed or too_slow else 0


if __name__ == "__main__":
    sys.exit(main())
