"""Models, as the calculators know them: their sizes, the published ones by name, and those of a `config.json`.

    config      `ModelConfig`: all that the calculators need to know about a model
    details     what changes no size and yet is another model: rotary positions, router, epsilon
    presets     published models by name
    hf_config   a Hugging Face `config.json` as a ModelConfig; its fields are in `hf_fields`, its families in `hf_families`
    tensors     the tensors of a model, and what a rank of tensor or expert parallelism holds of each

Read `config` first. Every chapter uses it, from 01 on.
"""

from __future__ import annotations

from lablib.calc.models.config import ModelConfig
from lablib.calc.models.details import Rotary, Router
from lablib.calc.models.hf_config import from_hf
from lablib.calc.models.presets import preset, preset_names
from lablib.calc.models.tensors import Tensor, embedding_tensors, head_tensors, layer_tensors

__all__ = [
    "ModelConfig",
    "Rotary",
    "Router",
    "Tensor",
    "embedding_tensors",
    "from_hf",
    "head_tensors",
    "layer_tensors",
    "preset",
    "preset_names",
]
