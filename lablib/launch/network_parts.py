"""What one rank of the study measures at which bandwidth; everything is built before the link is throttled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lablib.calc.network_ddp_rows import VARIANTS
from lablib.calc.network_placement import LAYOUTS
from lablib.launch.network_clock import Sample
from lablib.launch.network_ddp import Step, alone_samples, ddp_samples
from lablib.launch.network_link import all_reduces, exchanges
from lablib.launch.network_placement import Layout, placement_samples
from lablib.toys.collectives import node_groups
from lablib.toys.transformer import tiny_config

if TYPE_CHECKING:
    from lablib.launch.network_study import Settings

RANKS_PER_HOST = 2


class Parts:
    """The models and groups of a study on this rank.

    Args:
        settings: What to measure.
        parts: Which parts of the study.
    """

    def __init__(self, settings: Settings, parts: Sequence[str]) -> None:
        self.settings, self.parts = settings, parts
        self.groups = node_groups(RANKS_PER_HOST)
        self.steps: dict[str, Step] = {}
        self.layouts: dict[str, Layout] = {}
        if "ddp" in parts:
            for variant in ("compute", *VARIANTS):
                self.steps[variant] = Step(
                    variant,
                    width=settings.width,
                    layers=settings.layers,
                    tokens=settings.tokens,
                    bucket_bytes=settings.bucket_bytes,
                    micro_batches=settings.micro_batches,
                    groups=self.groups,
                )
                self.steps[variant]()  # memory is touched for the first time
        if "placement" in parts:
            config = tiny_config("llama", hidden=settings.hidden, num_layers=settings.blocks)
            windows = torch.randint(
                config.vocab,
                (settings.batch, settings.seq + 1),
                generator=torch.Generator().manual_seed(0),
            )
            for name in LAYOUTS:
                self.layouts[name] = Layout(name, config, windows, self.groups)

    def has(self, rate: str | None) -> bool:
        """Return whether anything is measured at this bandwidth."""
        s = self.settings
        wanted = {
            "link": rate == s.link_rate,
            "all-reduce": rate == s.link_rate,
            "ddp": rate in (None, s.savings_rate, *s.ddp_rates),
            "placement": rate in (None, s.placement_rate),
        }
        return any(wanted[part] for part in self.parts)

    def at_rate(self, rate: str | None) -> list[Sample]:
        """Return the samples of everything that is measured at this bandwidth."""
        s, samples = self.settings, []
        if "link" in self.parts and rate == s.link_rate:
            samples += exchanges(rate, s.link_sizes, turns=s.turns, other_host=RANKS_PER_HOST)
        if "all-reduce" in self.parts and rate == s.link_rate:
            samples += all_reduces(rate, s.reduce_sizes, self.groups, turns=s.turns)
        if "ddp" in self.parts:
            if rate is None:
                samples += alone_samples(self.steps["compute"], turns=s.turns)
                samples += ddp_samples(self.steps["compute"], rate, turns=s.turns)
            for variant in VARIANTS:
                base = variant == "buckets" and (rate is None or rate in s.ddp_rates)
                if base or rate == s.savings_rate:
                    samples += ddp_samples(self.steps[variant], rate, turns=s.turns, warm=int(base))
        if "placement" in self.parts and rate in (None, s.placement_rate):
            for layout in self.layouts.values():
                # Without a throttled link every layout has warmed up already.
                samples += placement_samples(layout, rate, turns=s.turns, warm=int(rate is None))
        return samples
