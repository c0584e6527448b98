"""How the memory calculator is judged: configurations, oracles, verdicts, and other people's calculators.

Nothing below imports this room. `book/memory_calculator.md` shows what it finds, `rung memory-table` runs it.

    cases              one judged configuration, and the settings that the calculator gets
    grid               the configurations: chosen, covering all pairs of settings, and drawn
    oracles            bytes that PyTorch itself counts for a case, on fake tensors
    verdict            predicted against counted: within the tolerance or not
    table              the judged table, measured, written and compared
    real_runs          steps of small models without a tracker, tied and untied, by PyTorch's profiler
    headline           the sentences and numbers that the page and the README quote
    gpu_measure        a step on a real GPU, by its allocator
    gpu_rows           which cases are measured there, and what a record of them says
    other_calculators  formulas of other people's calculators, each from its source
    comparison         those formulas on the same cases
    published_peaks    peaks that others measured on GPUs: Megatron-LM's

Read `cases` first, then `oracles.measurement`.
"""
