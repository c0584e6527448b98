"""Samples kept one by one: a lab that was interrupted goes on where it stopped and repeats nothing.

    kept = Kept("11_throughput")
    for batch in batches:
        samples.append(kept.sample({"batch": batch}, lambda: measure(batch)))

Under `rung labs run` each sample is a file in the folder of that run, written whole or not at all; the same command
finds it again. In a notebook of your own nothing is kept, because who runs a cell again wants to measure again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lablib.launch.experiments import FOLDER_SWITCH, now, write_json


def lab_folder() -> Path | None:
    """Return the folder of the run that this notebook belongs to, for samples and checkpoints; None outside one."""
    folder = os.environ.get(FOLDER_SWITCH)
    return Path(folder) if folder else None


class Kept:
    """The samples of one measurement.

    Args:
        name: What is measured; part of the file names.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._folder = lab_folder()

    def sample(self, case: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the sample of a case: the one that is kept, or a new one.

        Args:
            case: What tells this sample from the others, as JSON can write it.
            measure: Returns what was measured.

        Returns:
            The case and what was measured, in one dictionary.
        """
        if self._folder is None:
            return {**case, **measure()}
        text = json.dumps(case, sort_keys=True)
        path = self._folder / "samples" / f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            print(f"kept from {kept['date']}: {text}")
            return kept["sample"]
        sample = {**case, **measure()}
        write_json(path, {"date": now(), "sample": sample})
        return sample
