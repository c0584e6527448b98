"""What of a setup no oracle has counted: `rung fit` marks it, as `rung memory --explain` does term by term.

The memory table (book/data/memory_table.json) holds the calculator to PyTorch. What none of its configurations has is a
formula and nothing more:

    unproven(run_config("llama-3-8b", optimizer="adamw-8bit", cp=2))       # ("adamw-8bit", "cp")

Chapter: book/memory_calculator.md
"""

from __future__ import annotations

from lablib.calc.run_config import RunConfig

MEANING = "unproven: no configuration of the memory table has it, so nothing that PyTorch counted stands beside the formula."


def unproven(run: RunConfig) -> tuple[str, ...]:
    """Return names of what of a run has no oracle, nothing if all has one.

    Args:
        run: The run.
    """
    named = {
        run.optimizer.name: run.optimizer.quantized,
        "qlora": run.tuning == "qlora",
        "offload": run.offload != "none",
        "flat ZeRO": run.zero > 0 and run.sharding == "flat" and run.dp * run.cp > 1,
        "cp": run.cp > 1,
        "ep": run.ep > 1,
        "interleaved": run.schedule == "interleaved",
    }
    return tuple(name for name, so in named.items() if so)
