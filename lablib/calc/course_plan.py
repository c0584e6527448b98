"""How long the course takes, and the one line for a rented machine.

README, how_to_use, chapter 11 and the page on graduation print the table and the lines; a test holds them to this.

Chapter: book/how_to_use.md
"""

from __future__ import annotations

from lablib.calc.cost_sheet import LABS, SETUP_MINUTES

#: Minutes of the chapter and of the lab, by rung.
MINUTES = {
    "01": (60, 40),
    "02": (60, 60),
    "03": (60, 60),
    "04": (60, 75),
    "05": (60, 60),
    "06": (60, 75),
    "07": (75, 75),
    "08": (75, 75),
    "09": (60, 60),
    "10": (75, 75),
    "11": (90, 90),
}

#: The labs that a GPU is rented for. The first one writes the scaling report, which graduation asks for.
GPU_LABS = ("11", "06", "01", "08", "09")
BUDGET_MINUTES = 50
RUN_GPU_LABS = f"rung labs run {' '.join(GPU_LABS)} --gpus all --budget-minutes {BUDGET_MINUTES} --pack"

#: At home, in the folder of the course: the results land where labs and reports look for them.
BRING_HOME = (
    "scp USER@HOST:distributed-training/distributed-experiments/NAME-results.tar.gz .",
    "tar xzf NAME-results.tar.gz",
)


def study_minutes(*rungs: str) -> int:
    """Return the minutes of rungs, chapter and lab.

    Args:
        *rungs: Two digits each.
    """
    return sum(sum(MINUTES[rung]) for rung in rungs)


def rented_minutes() -> float:
    """Return for how long the machine is rented: set up, and the GPU labs, as `rung cost` has them."""
    return SETUP_MINUTES + sum(budget.minutes for budget in LABS if budget.lab in GPU_LABS)


def hours(minutes: float) -> str:
    """Return minutes as "1 h 40 min".

    Args:
        minutes: How many.
    """
    whole, rest = divmod(round(minutes), 60)
    return " ".join(
        part for part, count in ((f"{whole} h", whole), (f"{rest} min", rest or not whole)) if count
    )
