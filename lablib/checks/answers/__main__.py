"""What is found out about one answer, in a process of its own, and written to a file.

python -m lablib.checks.answers judge NOTEBOOK NAME RESULT RUNG       the verdict of its check
python -m lablib.checks.answers call NOTEBOOK NAME RESULT ARGUMENT    what it returns for a text
"""

import json
import os
import sys
from dataclasses import asdict, is_dataclass
from pathlib import Path

from lablib.checks.answers.graduation import defined, judge

_work, _notebook, _name, _result, _given = sys.argv[1:]  # what a learner calls `work` is looked for in this module
_found = judge(Path(_notebook), _given, _name) if _work == "judge" else defined(Path(_notebook), _name)(_given)
_found = asdict(_found) if is_dataclass(_found) else dict(_found)
Path(_result).write_text(json.dumps(_found), encoding="utf-8")
os._exit(0)  # whatever threads the answer has left
