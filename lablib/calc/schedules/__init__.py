"""Pipeline schedules: make one by name, read one, check it, run it on paper.

    from lablib.calc.schedules import schedule, simulate
    timeline = simulate(schedule("1f1b", p=4, m=8))
    timeline.bubble_over_ideal          # 0.375, which is (p - 1)/m

| name | function | what it trades |
|---|---|---|
| naive | `naive` | nothing: one rank in p works |
| gpipe | `gpipe` | memory of m micro-batches for a bubble of (p - 1)/m |
| 1f1b | `one_f_one_b` | the same bubble with the memory of at most p |
| interleaved | `interleaved` | about v times the messages for 1/v of the bubble |
| zb-h1 | `zb_h1` | a later weight half for a smaller bubble |
| zb-h2 | `zb_h2` | twice the memory for no idle time within a stage's span, at equal times |
| zb-v | `zb_v` | two stages a rank for the same with the memory of 1F1B |
| dualpipe-v | `dualpipe_v` | overlaps forwards and backwards to hide communication |

    actions      a schedule as data: the actions of every rank, in order
    generators   the schedules of the table
    validation   can it run? Charts and deadlocks
    simulation   when each action starts, who idles, who holds how much
    text         grids and PyTorch's CSV
    stages       which layers a stage holds, and how many micro-batches are in flight

Read `actions` first. Chapter 04.
"""

from __future__ import annotations

from lablib.calc.schedules.actions import Action, Schedule, Step, parse_action, parse_schedule
from lablib.calc.schedules.generators import (
    dualpipe_v,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    schedule,
    schedule_names,
    zb_h1,
    zb_h2,
    zb_v,
)
from lablib.calc.schedules.simulation import Event, Timeline, peak_activations, simulate, time_grid
from lablib.calc.schedules.stages import (
    SCHEDULES,
    chunk_layers,
    in_flight,
    layers_of_stage,
    layers_per_stage,
    stage_layers,
)
from lablib.calc.schedules.text import ScheduleError, to_csv
from lablib.calc.schedules.validation import check_chart, needs, validate

__all__ = [
    "SCHEDULES",
    "Action",
    "Event",
    "Schedule",
    "ScheduleError",
    "Step",
    "Timeline",
    "check_chart",
    "chunk_layers",
    "dualpipe_v",
    "gpipe",
    "in_flight",
    "interleaved",
    "layers_of_stage",
    "layers_per_stage",
    "naive",
    "needs",
    "one_f_one_b",
    "parse_action",
    "parse_schedule",
    "peak_activations",
    "schedule",
    "schedule_names",
    "simulate",
    "stage_layers",
    "time_grid",
    "to_csv",
    "validate",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
