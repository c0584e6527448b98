"""Real jobs: ranks from a notebook, measurements, records."""

import sys

if "ipykernel" in sys.modules:  # a notebook: the server of its ranks loads torch while the notebook still does
    from lablib.launch import cell_errors
    from lablib.launch.rank_server import start_early

    cell_errors.load()
    start_early()
