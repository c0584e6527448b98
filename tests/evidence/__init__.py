"""How the memory calculator and the planner are judged: configurations, oracles, verdicts, other people's calculators.

`lablib` never imports this package, and no page and no lab does: `python -m tests.evidence` writes what they quote to
book/data, and tests hold the files to what is predicted today.

    cases              one judged configuration, and the settings that the calculator gets
    grid               the configurations: chosen, covering all pairs of settings, and drawn
    oracles            bytes that PyTorch itself counts for a case, on fake tensors
    verdict            predicted against counted: within the tolerance or not
    table              the judged table, measured, written and compared
    headline           what pages quote of a table
    real_runs          steps of small models without a tracker, tied and untied, by PyTorch's profiler
    gpu                which cases are weighed on a GPU
    other_calculators  formulas of other people's calculators, each from its source
    comparison         those formulas on the same cases
    published_peaks    peaks that others measured on GPUs: Megatron-LM's
    low_bits           training in few bits, and the bytes of real low-bit optimizers
    local_sgd          local SGD and DiLoCo between two hosts
    storm              replica groups that are killed and come back
    facts              what pages say of frameworks, in the frameworks' files
    planner            the planner's constants, fitted to measured runs and judged on them
    exported           what frameworks' own parsers read in the files of `rung plan --export`

Read `cases` first, then `oracles.measurement`.
"""
