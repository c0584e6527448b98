"""Whether a run fits on a GPU: its peak against what CUDA gives out, in one of three words.

    verdict(memory_timeline(run).peak_bytes, "h100").word  # "does not fit", "tight" or "fits"

What is compared is the peak of `memory_timeline`, never the sum of terms, which are not all there at once. A run that
leaves less than the reserve is tight: it may end in an out-of-memory error that no formula here foresees.
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.hardware import Accelerator, accelerator, least_share
from lablib.calc.memory.config import RunConfig
from lablib.calc.units import GB, GiB

#: Bytes of a GPU that a run should leave: NCCL's buffers, workspaces of cuBLAS and of attention, and what the allocator
#: has reserved and cannot hand out. It is a choice and not a measurement: out-of-memory messages of training runs show 0.1
#: to 1 GiB reserved and unallocated, NCCL's buffers grow with the number of process groups, and the fastest layout that
#: Llama 3's table 4 can mean leaves 2.9 GiB by our count. With the context it is 3 GiB.
RESERVE = 5 * GiB // 2

#: Share of a peak that a planner leaves free beside the reserve where nobody judged such a peak: as much as the published
#: peaks of Megatron-LM exceed what is counted of them at most (book/data/megatron_peaks.json), 3.03 % of the count. Those
#: runs are of eight GPUs; nothing larger was published.
UNPROVEN_SHARE = 0.031

MEANING = (
    "unproven: no peak of the memory table and no published one has it. "
    f"Published peaks were up to {UNPROVEN_SHARE:.1%} above their counts."
)


def unproven(run: RunConfig) -> tuple[str, ...]:
    """Return what of a run has no judged peak: in the memory table, or for Megatron-LM among the published ones."""
    published = run.implementation.startswith("megatron")  # with ZeRO-1, with experts over ranks; tp and pp apart
    named = {
        "paper's peak": run.implementation == "paper",
        run.optimizer.name: run.optimizer.quantized,
        "qlora": run.tuning == "qlora",
        "offload": run.offload != "none",
        "flat ZeRO": run.zero > 0 and run.sharding == "flat" and run.dp * run.cp > 1 and not published,
        "cp": run.cp > 1 and not run.implementation.eager,
        "ep": run.ep > 1 and not published,
        "tp with pp": run.tp > 1 and run.pp > 1,
        "pp": run.pp > 1 and not published and (run.dp * run.cp > 1 or run.implementation != "toy"),
        "autocast with pp": run.pp > 1 and run.recipe.name.startswith("autocast"),
        "torchtitan": run.implementation == "torchtitan" and run.dp * run.cp > 1,
        run.schedule: run.schedule != "1f1b",
        "dropout": bool(run.dropout),
    }
    return tuple(name for name, so in named.items() if so)


@dataclass(frozen=True)
class Verdict:
    """A peak beside a GPU.

    Attributes:
        peak: Bytes at the fullest instant of a step.
        reserve: Bytes that the run should leave.
    """

    peak: int
    device: Accelerator
    reserve: int = RESERVE

    @property
    def room(self) -> int:
        """Bytes that stay free at the peak; negative if it does not fit."""
        return self.device.usable_bytes - self.peak

    @property
    def word(self) -> str:
        """One of "does not fit", "tight" (less than the reserve is left) and "fits"."""
        return "does not fit" if self.room < 0 else "tight" if self.room < self.reserve else "fits"

    def as_dict(self) -> dict[str, object]:
        """Return the fields that every command prints as JSON."""
        return {
            "gpu": self.device.name,
            "usable_bytes": self.device.usable_bytes,
            "peak_bytes": self.peak,
            "reserve": self.reserve,
            "fits": self.room >= 0,
            "verdict": self.word,
            "headroom": self.room,
        }

    def __str__(self) -> str:
        card, left = self.device, f"{abs(self.room) / GB:.1f} GB"
        has = f"{card.name} has {card.usable_bytes / GiB:.2f} GiB ({card.usable_bytes / GB:.1f} GB) for a run{_unseen(card)}: "
        if self.room < 0:
            return has + f"does not fit, {left} too much."
        kept = f"{self.reserve / GB:.1f} GB that NCCL, workspaces and fragments may take"
        return has + (f"tight, {left} left of the {kept}." if self.word == "tight" else f"fits, {left} left.")


def _unseen(card: Accelerator) -> str:
    """Say that nobody has read a total from such a GPU."""
    return (
        ""
        if card.cuda_bytes or not card.driver
        else f", if CUDA has {least_share():.0%} of the printed {card.memory_gib:.0f}"
    )


def verdict(peak: int, device: Accelerator | str, reserve: int = RESERVE) -> Verdict:
    """Return whether a run with this peak fits on a GPU.

    Args:
        peak: Bytes, from `memory_timeline`.
        device: An accelerator or its name.
        reserve: Bytes that the run should leave.

    Raises:
        ValueError: If the name is unknown, or the reserve is negative or as large as the GPU.
    """
    card = accelerator(device) if isinstance(device, str) else device
    check_reserve(reserve, card)
    return Verdict(peak, card, reserve)


def check_reserve(reserve: int, device: Accelerator) -> None:
    """Raise a ValueError unless the reserve leaves something of the GPU."""
    if not isinstance(reserve, int) or isinstance(reserve, bool) or not 0 <= reserve < device.usable_bytes:
        raise ValueError(
            f"reserve={reserve!r} bytes must be at least 0 and less than the {device.usable_bytes} of {device.name}"
        )
