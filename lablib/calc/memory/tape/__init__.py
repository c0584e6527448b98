"""Autograd's memory without a tensor: operators that keep their inputs or outputs until their backward has run.

`Tape` states the five rules and plays them; `operators` has what each operator of PyTorch keeps; `setting`
is how a block runs; `blocks` writes its tape in an eager implementation, `context` its attention over cp ranks, `experts`
its mixture, `paper` the tape that the papers count, `ends` those of embedding, head and loss. `write_tape` writes
whichever is asked for, and `kept_by_kind` sums up what it keeps.

Read `tape` first: the rules stand in its docstring. Chapter 09.
"""

from lablib.calc.memory.tape.context import own_temporaries, ring_temporaries
from lablib.calc.memory.tape.ends import LOSS_OPERATORS, LOSS_TERMS, ids_and_positions, kept_by_kind, write_tape
from lablib.calc.memory.tape.setting import FP32, INT64, MASK, BlockSetting, run_setting
from lablib.calc.memory.tape.tape import Event, Item, Tape, Value

__all__ = [
    "FP32",
    "INT64",
    "LOSS_OPERATORS",
    "LOSS_TERMS",
    "MASK",
    "BlockSetting",
    "Event",
    "Item",
    "Tape",
    "Value",
    "ids_and_positions",
    "kept_by_kind",
    "own_temporaries",
    "ring_temporaries",
    "run_setting",
    "write_tape",
]
