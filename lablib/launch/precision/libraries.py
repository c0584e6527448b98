"""What torchao and bitsandbytes make of blocks and of moments, in the course's words: oracles for `lablib.toys.precision`.

Neither is needed: `missing` says what is not there. torchao's block formats are prototypes, whose names may move with
any release; this is the one file that knows them. Seen with torchao 0.18 and bitsandbytes 0.50.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lablib.calc.errors import one_of

EXTRAS = {"torchao": "fp8", "bitsandbytes": "bnb"}
ADAMW = {"8bit": "AdamW8bit", "4bit": "AdamW4bit", "fp8": "AdamWFp8"}


def missing(library: str) -> str | None:
    """Return a sentence on how to install a library, or None if it is there."""
    if importlib.util.find_spec(one_of("library", library, EXTRAS)):
        return None
    return (
        f"{library} is not installed; in the course's folder, .venv/bin/pip install -e '.[{EXTRAS[library]}]' adds it"
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what both say on import from the reader: kernels for a GPU that are not there, names that will go."""
    was = logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(was)


def load(name: str) -> ModuleType:
    """Import a module of one of the two.

    Raises:
        ValueError: If the library is not installed.
    """
    if why := missing(name.partition(".")[0]):
        raise ValueError(why)
    with quiet():
        return importlib.import_module(name)


def mx_blocks(x_MK: Tensor, dtype: torch.dtype, rounding: str) -> tuple[Tensor, Tensor]:
    """Return torchao's codes of an MX matrix as bytes, two of four bits in one, and its E8M0 scales as bytes.

    Args:
        dtype: float8_e4m3fn, float8_e5m2 or float4_e2m1fn_x2.
        rounding: A key of `lablib.calc.precision.MX_ROUNDINGS`.
    """
    mx = load("torchao.prototype.mx_formats.mx_tensor")
    scale, values = mx.to_mx(x_MK, dtype, 32, mx.ScaleCalculationMode(rounding))
    return values.view(torch.uint8), scale.view(torch.uint8)


def nvfp4_blocks(x_MK: Tensor, tensor_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return torchao's codes of an NVFP4 matrix, two in a byte, and its block scales in E4M3."""
    scale, values = load("torchao.prototype.mx_formats.nvfp4_tensor").nvfp4_quantize(x_MK, 16, tensor_scale)
    return values, scale


def torchao_adamw(params: Iterable[Tensor], states: str, **how: Any) -> torch.optim.Optimizer:
    """Return torchao's low-bit AdamW, whose step is not compiled: a compiler needs minutes for what a CPU does at once.

    Args:
        states: "8bit", "4bit" or "fp8".
    """
    optimizer = getattr(load("torchao.optim"), ADAMW[one_of("states", states, ADAMW)])(params, **how)
    compiled = optimizer.step

    def step(closure: Any = None) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return compiled(closure)

    optimizer.step = step
    return optimizer


def bitsandbytes_adamw(params: Iterable[Tensor], **how: Any) -> torch.optim.Optimizer:
    """Return bitsandbytes' AdamW8bit."""
    return load("bitsandbytes").optim.AdamW8bit(params, **how)


def moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, dict[str, Tensor]]:
    """Return the tensors behind momentum and variance of one parameter, of either library.

    A quantized moment has "codes", "scale" and, but for FP8, "table"; one in 32 bits has "values".
    """
    state, found = optimizer.state[parameter], {}
    for name, torchao, number in (("momentum", "exp_avg", 1), ("variance", "exp_avg_sq", 2)):
        if torchao in state:
            made = getattr(state[torchao], "_local_tensor", state[torchao])
            parts = {"codes": "codes", "scale": "scale", "table": "qmap"}
            found[name] = {key: getattr(made, part) for key, part in parts.items() if hasattr(made, part)}
            found[name] = found[name] or {"values": made}
        elif f"qmap{number}" in state:
            parts = {"codes": f"state{number}", "scale": f"absmax{number}", "table": f"qmap{number}"}
            found[name] = {key: state[part] for key, part in parts.items()}
        else:
            found[name] = {"values": state[f"state{number}"]}
    return found


def moment_bytes(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes behind momentum and variance of all parameters; what several share counts once."""
    seen: dict[str, dict[int, Tensor]] = {"momentum": {}, "variance": {}}
    for parameter in optimizer.state:
        for name, parts in moments(optimizer, parameter).items():
            seen[name].update((id(tensor), tensor) for tensor in parts.values())
    return {name: sum(tensor.nbytes for tensor in each.values()) for name, each in seen.items()}


def nf4_parts(x: Tensor) -> dict[str, Tensor]:
    """Return the tensors that bitsandbytes keeps of NF4 with double quantization.

    These are "codes", two in a byte, "scale_codes", "second_scale" and "mean".
    """
    codes, state = load("bitsandbytes.functional").quantize_4bit(x, compress_statistics=True, quant_type="nf4")
    second = state.state2.absmax
    return {"codes": codes, "scale_codes": state.absmax, "second_scale": second, "mean": state.offset}
