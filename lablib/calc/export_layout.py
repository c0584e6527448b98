"""One door to the exporters: a layout as the files of the framework that is named."""

from __future__ import annotations

from collections.abc import Callable

from lablib.calc.choices import one_of
from lablib.calc.export_accelerate import accelerate_yaml, deepspeed_json
from lablib.calc.export_job import ExportJob
from lablib.calc.export_megatron import megatron_script
from lablib.calc.export_torchtitan import torchtitan_toml

EXPORTERS: dict[str, Callable[[ExportJob], str]] = {
    "torchtitan": torchtitan_toml,
    "megatron": megatron_script,
    "deepspeed": deepspeed_json,
    "accelerate": accelerate_yaml,
}


def export_layout(job: ExportJob, framework: str) -> str:
    """Return the layout as text that the framework reads.

    Args:
        job: The job.
        framework: One of `EXPORTERS`.

    Raises:
        ValueError: If the framework is unknown or cannot run the layout.
    """
    return EXPORTERS[one_of("framework", framework, EXPORTERS)](job)
