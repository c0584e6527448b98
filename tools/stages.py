"""Run make targets one after the other, go on after a failure, and say what each took and whether all passed."""

import argparse
import os
import subprocess
import sys
import time


def verdict(name: str, seconds: float, budget: float) -> str:
    """Return the closing line of a command.

    Args:
        name: The command.
        seconds: What it took, installing included.
        budget: What it may take on 2 cores when all eleven rungs exist.
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

    rows, failed = [("install", args.since, time.time(), 0)], []
    for stage in args.stages:
        print(f"\n== make {stage}", flush=True)
        start = time.time()
        rows.append((stage, start, 0.0, subprocess.call([os.environ.get("MAKE", "make"), stage])))
        rows[-1] = (*rows[-1][:2], time.time(), rows[-1][3])
        failed += [stage] if rows[-1][3] else []
    if args.stages:
        print()
        for stage, start, end, status in rows:
            print(f"{stage:8} {end - start:6.0f} s  {'FAILED' if status else 'passed'}")
    seconds = time.time() - args.since
    print(verdict(args.report or args.name, seconds, args.budget))
    if failed:
        print(f"failed: {', '.join(failed)}")
    # A busy machine may take longer than it should; twice the budget is no longer noise.
    return 1 if failed or seconds > 2 * args.budget else 0


if __name__ == "__main__":
    sys.exit(main())
