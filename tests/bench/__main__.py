"""`python -m tests.bench [names] [--json path]` runs the benches."""

import sys

from tests.bench.harness import main

sys.exit(main())
