"""How the planner's time model is fitted and judged, on step times that others measured and published.

    runs       rows of `measured_runs.csv`, and where each source's are from
    fitting    least squares of log ratios
    verdicts   errors, one constant beside ours, ranking, what each term earns
    table      all of it as one file, which the page and the planner's answers quote

Read `fitting` first. `python -m tests.evidence planner` runs it; the page "How wrong is the planner?" shows the result.
"""
