"""Peaks that others measured on GPUs and published: Megatron-LM with Transformer Engine on eight B200.

    for row in MEGATRON_PEAKS:
        print(row.name, row.measured_gib, row.predicted())

Source: SimuMax (Moore Threads), docs/b200/b200_release_v1.2_summary.md, column "real alloc GiB": the largest
`torch.cuda.max_memory_allocated()` of all ranks in the second step; its launchers run_llama3.sh and run_deepseekv2.sh
say what ran. Rows with 8 and 32 micro-batches repeat those with 4. Whatever the models are called, they are cut to 12 or
4 layers, their "405B" has 16 key heads, and Megatron-LM pads a vocabulary to a multiple of 128 tp. Rows with context
parallelism exchange heads by all-to-all, for which Transformer Engine since 2.8 keeps attention's output before and
behind the exchange; that is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from lablib.calc.memory.timeline import memory_timeline
from lablib.calc.models import ModelConfig, preset
from lablib.calc.units import GiB
from lablib.launch.records import write_json
from tests.evidence.headline import TABLE

MEGATRON_TABLE = TABLE.with_name("megatron_peaks.json")


@dataclass(frozen=True)
class PublishedPeak:
    """One measured run.

    Attributes:
        measured_gib: Peak of allocated memory in GiB, on the fullest rank.
        theirs_gib: What SimuMax predicts, in GiB.
    """

    model: ModelConfig
    measured_gib: float
    theirs_gib: float
    dp: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    seq: int = 4096

    @property
    def name(self) -> str:
        degrees = {"tp": self.tp, "cp": self.cp, "pp": self.pp, "ep": self.ep, "dp": self.dp}
        said = " ".join(f"{name}={size}" for name, size in degrees.items() if size > 1)
        return f"{self.model.name}, {self.model.num_layers} layers, {self.seq:,} tokens, {said}"

    def predicted(self, implementation: str = "megatron-te-loss") -> int:
        """Return the bytes that the memory calculator predicts.

        Args:
            implementation: Whose operators; the runs' own are "megatron-te-loss".
        """
        return memory_timeline(
            self.model, implementation=implementation, recipe="mixed-bf16-fp32-grads", step="fused", micro_batch=1,
            seq=self.seq, dp=self.dp, zero=1, tp=self.tp, sequence_parallel=self.tp > 1, cp=self.cp, pp=self.pp,
            ep=self.ep, num_microbatches=4, dropout=0.0,
        ).peak_bytes  # fmt: skip

    def error(self, implementation: str = "megatron-te-loss") -> float:
        return self.predicted(implementation) / GiB / self.measured_gib - 1

    def told(self) -> dict[str, object]:
        """Return the row as the page reads it: GiB, and every prediction over what was measured, less 1."""
        output = 2 * self.seq // self.cp * self.model.q_width // self.tp * self.model.num_layers
        return {
            "name": self.name,
            "cp": self.cp,
            "measured": self.measured_gib,
            "SimuMax": self.theirs_gib / self.measured_gib - 1,
            "paper": self.error("paper"),
            "megatron-te-loss": self.error(),
            "output kept twice": (self.predicted() + output) / GiB / self.measured_gib - 1,
        }


def _cut(name: str, layers: int, **changes: int) -> ModelConfig:
    # A NullTokenizer has one word more than it is given.
    model = replace(preset(name), num_layers=layers, max_positions=2**17, **changes)
    return replace(model, vocab=model.vocab + 1)


def _padded(model: ModelConfig, tp: int) -> ModelConfig:
    return replace(model, vocab=-(-model.vocab // (128 * tp)) * 128 * tp)


_70B = _cut("llama-3-70b", 12)
_405B = _cut("llama-3.1-405b", 4, num_kv_heads=16)
_V3 = _cut("deepseek-v3", 4, num_dense_layers=1)
_V2 = replace(
    _V3, name="deepseek-v2", hidden=5120, ffn=12288, num_experts=160, experts_per_token=6, num_shared_experts=2,
    expert_ffn=1536, vocab=102401,
)  # fmt: skip


def _row(
    model: ModelConfig, tp: int, cp: int, pp: int, ep: int, dp: int, seq: int, real: float, theirs: float
) -> PublishedPeak:
    return PublishedPeak(_padded(model, tp), real, theirs, dp=dp, tp=tp, cp=cp, pp=pp, ep=ep, seq=seq)


MEGATRON_PEAKS = tuple(
    _row(*row)
    for row in (
        (_70B, 1, 1, 2, 1, 4, 4096, 66.55, 66.44),
        (_70B, 2, 1, 1, 1, 4, 4096, 60.68, 60.51),
        (_70B, 4, 1, 1, 1, 2, 4096, 39.07, 38.94),
        (_70B, 8, 1, 1, 1, 1, 4096, 28.29, 28.17),
        (_405B, 1, 1, 2, 1, 4, 4096, 87.08, 86.88),
        (_405B, 2, 1, 1, 1, 4, 4096, 81.59, 81.31),
        (_405B, 4, 1, 1, 1, 2, 4096, 52.89, 52.68),
        (_405B, 8, 1, 1, 1, 1, 4096, 38.57, 38.38),
        (_V2, 1, 1, 1, 8, 8, 4096, 45.63, 45.40),
        (_V2, 1, 1, 2, 4, 4, 4096, 44.70, 44.37),
        (_V3, 1, 1, 1, 8, 8, 4096, 104.30, 103.52),
        (_V3, 1, 1, 2, 4, 4, 4096, 114.00, 113.08),
        (_70B, 2, 4, 1, 1, 1, 32768, 68.43, 68.16),
        (_70B, 1, 8, 1, 1, 1, 32768, 104.51, 104.43),
        (_405B, 2, 4, 1, 1, 1, 32768, 87.03, 86.55),
        (_405B, 1, 8, 1, 1, 1, 32768, 139.22, 139.13),
        (_70B, 2, 4, 1, 1, 1, 131072, 112.67, 111.80),
        (_70B, 1, 8, 1, 1, 1, 131072, 147.99, 147.89),
        (_405B, 2, 4, 1, 1, 1, 131072, 118.13, 116.50),
    )
)


def save_peaks(path: Path = MEGATRON_TABLE) -> Path:
    return write_json(path, [row.told() for row in MEGATRON_PEAKS])
