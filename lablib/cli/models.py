"""`rung models`: the published models that the calculators know by name."""

from __future__ import annotations

import json
from dataclasses import asdict

from lablib.calc.models import preset, preset_names
from lablib.calc.params import count_params
from lablib.calc.units import format_count


def model_table(*, as_json: bool = False) -> str:
    """Return the models as text: one line each, or JSON with every field of ModelConfig and the counts."""
    rows = [(preset(name), count_params(preset(name))) for name in preset_names()]
    if as_json:
        return json.dumps(
            [asdict(config) | {"total": count.total, "active": count.active} for config, count in rows],
            indent=1,
        )
    lines = [f"{'model':<22}{'parameters':>17}  {'':>6}{'active':>8}{'layers':>8}{'hidden':>8}{'seq':>9}"]
    for config, count in rows:
        active = format_count(count.active) if config.is_moe else ""
        lines.append(
            f"{config.name:<22}{count.total:>17,}  {format_count(count.total):>6}{active:>8}"
            f"{config.num_layers:>8}{config.hidden:>8}{config.max_positions:>9,}"
        )
    return "\n".join(lines)
