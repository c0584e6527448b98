"""What is found out about one answer, in a process of its own, and written to a file.

python -m lablib.checks.answers judge NOTEBOOK NAME RESULT RUNG       the verdict of its check
python -m lablib.checks.answers call NOTEBOOK NAME RESULT ARGUMENT    what it returns for a text
"""

import json
import sys
from dataclasses import asdict, is_dataclass
from pathlib import Path

from lablib.checks.answers.graduation import defined, judge

work, notebook, name, result, given = sys.argv[1:]
if work == "judge":
    found = asdict(judge(Path(notebook), given, name))
else:
    found = defined(Path(notebook), name)(given)
    found = asdict(found) if is_dataclass(found) else dict(found)
Path(result).write_text(json.dumps(found), encoding="utf-8")
