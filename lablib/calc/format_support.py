"""Which card has matrix units for which format, and what that is worth.

Matrix units, tensor cores, decide: any card can store a bf16 or an FP8 tensor, but only a card with units for the
format multiplies it faster. NVIDIA's formats follow the compute capability:

| compute capability | generation | adds |
|---|---|---|
| 7.0, 7.5 | Volta, Turing | fp16 |
| 8.0, 8.6 | Ampere | bf16, TF32 |
| 8.9 | Ada | FP8 with one scale for a tensor |
| 9.0 | Hopper | FP8 with block scaling |
| 10.0 | Blackwell, data center | MXFP8, and FP4 with block scales (NVFP4) |

Sources: Transformer Engine documentation, datatype and hardware support matrix (bf16 and all FP8 rows); NVIDIA
whitepapers of Volta, Turing and Ampere (fp16, TF32); AMD Instinct MI300X datasheet. AMD's MI300X has FP8 in the FNUZ
variants, whose E4M3 ends at 240 and not at 448 (PyTorch documentation, torch.float8_e4m3fnuz).

Chapter: book/08_mixed_precision.md
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.hardware import accelerator

# In the order of tables. "fp8-block": one scale for 1x128 or 128x128 values, "mxfp8": for 32, a power of two.
UNITS = ("fp16", "bf16", "tf32", "fp8", "fp8-block", "mxfp8", "fp4")
_SINCE = {
    "fp16": (7, 0),
    "bf16": (8, 0),
    "tf32": (8, 0),
    "fp8": (8, 9),
    "fp8-block": (9, 0),
    "mxfp8": (10, 0),
    "fp4": (10, 0),
}
# Key in `hardware.ACCELERATORS`: compute capability.
CAPABILITY = {
    "v100": (7, 0),
    "t4": (7, 5),
    "a100-40gb": (8, 0),
    "a100-80gb": (8, 0),
    "a100-40gb-pcie": (8, 0),
    "a100-80gb-pcie": (8, 0),
    "a10": (8, 6),
    "a10g": (8, 6),
    "rtx-a6000": (8, 6),
    "rtx-4090": (8, 9),
    "l4": (8, 9),
    "l40s": (8, 9),
    "rtx-6000-ada": (8, 9),
    "h100": (9, 0),
    "h100-pcie": (9, 0),
    "h100-nvl": (9, 0),
    "gh200": (9, 0),
    "h800": (9, 0),
    "h200": (9, 0),
    "b200": (10, 0),
    "gb200": (10, 0),
    "b300": (10, 3),
    "rtx-5090": (12, 0),
}
# Cards that are not NVIDIA's: their formats by name.
_OTHERS = {"mi300x": ("fp16", "bf16", "tf32", "fp8"), "tpu-v4": ("bf16",)}


@dataclass(frozen=True)
class Support:
    """The formats that one card multiplies in matrix units.

    Attributes:
        card: Key in `hardware.ACCELERATORS`.
        name: How tables call it.
        capability: Compute capability as text, "" where the card is not NVIDIA's.
        formats: Those of `UNITS` that it has.
        fp8_formats: Names in `formats.FORMATS` of its FP8 variants.
    """

    card: str
    name: str
    capability: str
    formats: tuple[str, ...]
    fp8_formats: tuple[str, ...]


def support(card: str) -> Support:
    """Return what a card has.

    Args:
        card: A name that `hardware.accelerator` knows.

    Raises:
        ValueError: If the card is unknown.
    """
    found = accelerator(card)
    key = next(key for key in (*CAPABILITY, *_OTHERS) if accelerator(key) is found)
    if key in _OTHERS:
        formats, capability = _OTHERS[key], ""
    else:
        formats = tuple(unit for unit in UNITS if CAPABILITY[key] >= _SINCE[unit])
        capability = ".".join(map(str, CAPABILITY[key]))
    variants = ("e4m3fnuz", "e5m2fnuz") if key == "mi300x" else ("e4m3", "e5m2")
    return Support(key, found.name, capability, formats, variants if "fp8" in formats else ())


def support_table() -> list[Support]:
    """Return every card with what it has, oldest generation first."""
    return [support(card) for card in (*CAPABILITY, *_OTHERS)]


def peak_ratio(card: str, fast: str, slow: str) -> float:
    """Return how many times faster a card is in one dtype than in another, at its peak.

    The gain of a whole step is smaller: norms, softmax and the optimizer are not matmuls, and a fp32 baseline runs its
    matmuls in TF32 where that is switched on (`torch.set_float32_matmul_precision("high")`).

    Args:
        card: A name that `hardware.accelerator` knows.
        fast: A dtype of `Accelerator.flops`.
        slow: Another.

    Raises:
        ValueError: If the card or its rate is not in the table.
    """
    found = accelerator(card)
    return found.peak(fast) / found.peak(slow)
