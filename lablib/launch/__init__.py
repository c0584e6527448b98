"""Real jobs: ranks from a notebook, measurements, records."""
