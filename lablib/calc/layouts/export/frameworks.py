"""The exporters by name, and the door to them."""

from __future__ import annotations

from lablib.calc.errors import one_of
from lablib.calc.layouts.export.accelerate import ACCELERATE
from lablib.calc.layouts.export.deepspeed import DEEPSPEED
from lablib.calc.layouts.export.job import Exporter, ExportJob
from lablib.calc.layouts.export.megatron import MEGATRON
from lablib.calc.layouts.export.torchtitan import TORCHTITAN

EXPORTERS: dict[str, Exporter] = {
    "torchtitan": TORCHTITAN,
    "megatron": MEGATRON,
    "deepspeed": DEEPSPEED,
    "accelerate": ACCELERATE,
}


def export_layout(job: ExportJob, framework: str) -> str:
    """Return the layout as text that the framework reads.

    Args:
        framework: One of `EXPORTERS`.
    """
    return EXPORTERS[one_of("framework", framework, EXPORTERS)].text(job)
