"""Models, as the calculators know them: their sizes, the published ones by name, and those of a `config.json`."""

from __future__ import annotations

from lablib.calc.hf_config import from_hf
from lablib.calc.model_config import FAMILIES, ModelConfig
from lablib.calc.presets import preset, preset_names

__all__ = ["FAMILIES", "ModelConfig", "from_hf", "preset", "preset_names"]
