"""`python -m lablib.launch.labs QUEUE` runs a queue; `worker`, which the door imports, cannot be run by its own name."""

import sys

from lablib.launch.labs.worker import main

if __name__ == "__main__":
    sys.exit(main())
