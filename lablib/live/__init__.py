"""Explorers: pages that compute in the reader's browser with `lablib.calc`.

`{livecalc} lablib.live.training` in a page shows an explorer: its first state is drawn at build time, and the browser
calls the same function for every other. Standard library and calc only, because the room is zipped for the browser.

    explorer   controls and states, and how one is found
    cluster    a run on many GPUs: its cost      the home page
    planner    layouts, ranked                   choosing a layout
    training   the memory of a training run      the memory calculator
    pipeline   a schedule over time              chapter 04
    zero       a step of DDP, ZeRO and FSDP      chapter 05
    mesh       which rank holds what             chapter 07
    formulas   the sheet for a job of yours      the sheet of formulas
    svg        SVG as text
    steps      a picture that is stepped through
    mechanisms   rings, schedules, dispatch: moving pictures for chapters

Read `explorer` first.
"""
