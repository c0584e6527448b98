"""Calculators: numbers from formulas, standard library only, exact where a closed form exists.

Each floor uses those below it, and import-linter holds that:

    formulas                                         the list behind the formula sheet
    runs                                             a long run: batch size, failures, rent, traces
    layouts                                          meshes, the planner, the largest run that fits
    memory                                           what a training run needs of each GPU
    parallel                                         each kind of parallelism: memory, traffic, time
    precision, flops                                 bytes per parameter, FLOPs per step
    params, hardware, communication, schedules       counts, GPUs and links, collectives, pipelines
    models, units, errors, torch_versions            the basics

Read `parallel.zero` first: its formulas are the shortest.
"""
