"""How the memory calculator is judged: configurations, oracles, verdicts, and other people's calculators.

Nothing below imports this room. `book/memory_calculator.md` shows what it finds, `rung memory-table` runs it.

    cases      one judged configuration, and what the calculator says of it
    grid       the configurations: chosen, covering all pairs of settings, and drawn
    oracles    what PyTorch itself counts for a case, on fake tensors
    gpu_rows, gpu_measure: what a GPU's allocator counts, where there is one
    verdict    predicted against counted: within the tolerance or not
    headline   the sentences and numbers that the page and the README quote
    table      the whole table, measured and written
    other_calculators, comparison: other people's calculators on the same cases

Read `cases` first, then `oracles.measurement`.
"""
