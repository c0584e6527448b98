"""`python -m lablib.launch.lab_runs QUEUE`: the process of a queue, which `worker` describes."""

import sys
from pathlib import Path

from lablib.launch.lab_runs.worker import main

sys.exit(main(Path(sys.argv[1])))
