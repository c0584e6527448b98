"""The toys of few bits beside torchao and bitsandbytes, in a process that can import both: prints what it counted as JSON.

    PYTHONPATH=(their folders) python -m tests.low_bit_oracles 7        7 is the seed

Blocks and states are compared bit for bit. Four places are known where these releases leave the plain rule on a CPU,
and are counted apart: see `smallest`, `on_grid`, `just_above` and `nvfp4`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from lablib.calc.precision import MX_ROUNDINGS
from lablib.launch.precision import libraries
from lablib.toys.precision import LowBitAdamW, fp4, quantize, quantize_mxfp4, quantize_nvfp4
from lablib.toys.precision.fp8 import E4M3, E5M2, block_maxima, spread
from lablib.toys.precision.low_bit_adamw import FORMATS, State, dynamic_table, nearest
from lablib.toys.precision.nf4 import quantize_nf4

ROWS = 1024
E2M1_CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def matrices(seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield blocks of many kinds, 64 values a row: what models have, and what they should not."""
    generator = torch.Generator().manual_seed(seed)

    def powers(low: int, high: int, columns: int = 64) -> Tensor:
        return torch.exp2(torch.randint(low, high, (ROWS, columns), generator=generator).double()).float()

    normal = torch.randn(ROWS, 64, generator=generator)
    yield "random", normal
    yield "bf16", normal.bfloat16().float()
    yield "of all sizes", normal * powers(-40, 40)
    yield "extreme", normal * powers(-140, 125, 1)
    yield "subnormal in fp32", normal * 2.0**-130
    bits = torch.randint(-(2**31), 2**31 - 1, (ROWS, 64), generator=generator, dtype=torch.int32)
    yield "any bits", bits.view(torch.float32).nan_to_num(0, 0, 0)
    edges = torch.tensor([1, 1.25, 1.5, 1.75, 1.875, 1.9375, 1.99, 1 + 2.0**-23, 1.75 * (1 + 2.0**-22)])
    yield "edges", powers(-10, 10) * edges[torch.randint(len(edges), (ROWS, 64), generator=generator)]
    yield "zeros", torch.zeros(2, 64)


def packed(values_MK: Tensor) -> Tensor:
    """Return values of E2M1 as torchao stores them: the first of two in the lower half of a byte."""
    codes = torch.searchsorted(E2M1_CODES, values_MK.abs()) + 8 * values_MK.signbit()
    return codes[:, ::2] + 16 * codes[:, 1::2]


def exponent_bytes(scale_RC: Tensor) -> Tensor:
    return scale_RC.to(torch.float8_e8m0fnu).view(torch.uint8)


def smallest(scale_RC: Tensor, shape: torch.Size) -> Tensor:
    """Where the scale is 2^-127, E8M0's smallest, torchao multiplies by 1 or by 2^126, and not by 2^127."""
    return spread(scale_RC == 2.0**-127, (1, 32), shape)


def just_above(x_MK: Tensor, top: float) -> Tensor:
    """Where the largest is a few roundings above `top` times a power of two, torchao's log2 in fp32 does not see it."""
    ratio = block_maxima(x_MK, (1, 32)).double() / top
    above = ratio.log2() - ratio.log2().round()
    return (above > 0) & (above < 1e-5)


def mx(seed: int) -> dict[str, int]:
    """Count MX blocks, codes that differ, those of them that nothing explains, and scales that differ."""
    found = dict.fromkeys(("blocks", "smallest", "scales", "codes"), 0)
    for _, x in matrices(seed):
        for rounding in MX_ROUNDINGS:
            for dtype in (E4M3, E5M2, torch.float4_e2m1fn_x2):
                theirs, their_scale = libraries.mx_blocks(x, dtype, rounding)
                if dtype == torch.float4_e2m1fn_x2:
                    values, scale = quantize_mxfp4(x, rounding)
                    ours, top, step = packed(values), fp4.TOP, 2
                else:
                    made = quantize(x, "mx32" if rounding == "rceil" else f"mx32-{rounding}", dtype)
                    ours, scale, step = made.values_MK.view(torch.uint8), made.scale_RC, 1
                    top = torch.finfo(dtype).max
                edge = just_above(x, top) & (rounding == "rceil")
                other = their_scale.view(scale.shape) != exponent_bytes(scale)
                known = smallest(scale, x.shape) | spread(edge, (1, 32), x.shape)
                wrong = ours != theirs.view(ours.shape)
                found["blocks"] += scale.numel()
                found["smallest"] += int((scale == 2.0**-127).sum())
                found["scales"] += int((other & ~edge).sum())
                found["codes"] += int((wrong & ~known[:, ::step]).sum())
    return found


def nvfp4(seed: int) -> dict[str, int]:
    """The same for NVFP4, with a scale for the tensor and without."""
    found = dict.fromkeys(("blocks", "scales", "codes"), 0)
    for _, x in matrices(seed):
        for two_level in (True, False):
            made = quantize_nvfp4(x, two_level=two_level)
            theirs, scale = libraries.nvfp4_blocks(x, made.tensor_scale if two_level else None)
            found["blocks"] += scale.numel()
            found["scales"] += int((scale.view(torch.uint8) != made.scale_RC.view(torch.uint8)).sum())
            # Where the inverse of the tensor's scale is infinite, torchao makes no number of a zero, and codes that.
            known = (x == 0) & (1 / made.tensor_scale).isinf()
            found["codes"] += int(((theirs != packed(made.values_MK)) & ~known.unflatten(1, (-1, 2)).any(2)).sum())
    return found


def weights(seed: int) -> list[torch.nn.Parameter]:
    """Return tensors in whole blocks, too small for blocks, and with a last block that is not full."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator))
        for shape in ((64, 128), (100,), (70, 61), (96, 256))
    ]


def steps(pairs: list, optimizers: list, seed: int, count: int) -> None:
    """Give both the same gradients, of sizes that differ from step to step."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for ours, theirs in pairs:
            size = 10.0 ** (6 * torch.rand((), generator=generator) - 3)
            ours.grad = torch.randn(ours.shape, generator=generator) * size
            theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()


def torchao_states(states: str, seed: int) -> dict[str, int]:
    """Count codes, scales and weights that differ after 20 steps, and the bytes of both."""
    mine, other = weights(seed), weights(seed)
    ours, theirs = LowBitAdamW(mine, states=states), libraries.torchao_adamw(other, states)
    steps(list(zip(mine, other, strict=True)), [ours, theirs], seed, 20)
    found = dict.fromkeys(("codes", "scales", "plain"), 0)
    for a, b in zip(mine, other, strict=True):
        for name, parts in libraries.moments(theirs, b).items():
            state = ours.state[a][name]
            if isinstance(state, State):
                codes = parts["codes"].view(torch.uint8)
                codes = torch.stack((codes >> 4, codes & 15), -1) if states == "4bit" else codes
                found["codes"] += int((codes.view(a.shape) != state.codes.view(torch.uint8)).sum())
                found["scales"] += int((parts["scale"] != state.scale).sum())
            else:
                found["plain"] += int((parts["values"] != state).sum())
    found["weights"] = sum(int((a != b).sum()) for a, b in zip(mine, other, strict=True))
    return found | {"bytes": ours.state_bytes(), "their_bytes": sum(libraries.moment_bytes(theirs).values())}


def on_grid(x: Tensor) -> Tensor:
    """Round numbers from -1 to 1 to 65,536 places, as bitsandbytes' kernel for the CPU does before it looks them up."""
    return ((x.clamp(-1, 1) + 1) * 0.5 * 65535 + 0.5).int() / 65535 * 2 - 1


def bitsandbytes_states(seed: int) -> dict[str, float]:
    """Compare tables, and after one step from equal states the codes: by the plain rule, and on its grid."""
    mine, other = weights(seed)[:1], weights(seed)[:1]
    ours, theirs = LowBitAdamW(mine), libraries.bitsandbytes_adamw(other)
    steps(list(zip(mine, other, strict=True)), [ours, theirs], seed, 1)
    found: dict[str, float] = {"values": mine[0].numel()}
    for name, parts in libraries.moments(theirs, other[0]).items():
        state, codes = ours.state[mine[0]][name], parts["codes"].int()
        moment = 0.1 * mine[0].grad if name == "momentum" else 0.001 * mine[0].grad.square()
        scaled = moment.view(len(state.scale), -1) / state.scale[:, None]
        gridded = nearest(on_grid(scaled), state.table).view(codes.shape)
        found[f"{name}: table"] = int((parts["table"] != state.table).sum())
        found[f"{name}: scale"] = ((parts["scale"] - state.scale).abs() / state.scale).max().item()
        found[f"{name}: codes"] = int((codes != state.codes.int()).sum())
        found[f"{name}: codes on the grid"] = int((codes != gridded).sum())
    return found


def nf4(seed: int) -> dict[str, float]:
    """Compare NF4 with bitsandbytes': codes, the mean of their scales, and the codes and scales of these."""
    x = 0.02 * torch.randn(384, 512, generator=torch.Generator().manual_seed(seed))
    made, parts = quantize_nf4(x), libraries.nf4_parts(x)
    made_scale = x.view(-1, 64).abs().amax(1)
    scaled = (made_scale - made_scale.mean()).view(-1, 256) / made.second_scale[:, None]
    gridded = nearest(on_grid(scaled), dynamic_table(8, signed=True)).flatten()
    theirs = parts["scale_codes"].int()
    return {
        "values": x.numel(),
        "codes": int((parts["codes"].flatten() != 16 * made.codes[::2] + made.codes[1::2]).sum()),
        "mean": abs(parts["mean"].item() / made.mean.item() - 1),
        "second_scale": int((parts["second_scale"] != made.second_scale).sum()),
        "scale codes": int((theirs != made.scale_codes.int()).sum()),
        "scale codes on the grid": int((theirs != gridded).sum()),
        "bytes": made.nbytes,
        "their_bytes": sum(part.nbytes for part in parts.values()),
    }


def main(seed: int) -> dict[str, dict]:
    """Count everything."""
    found = {"mx": mx(seed), "nvfp4": nvfp4(seed), "bitsandbytes": bitsandbytes_states(seed), "nf4": nf4(seed)}
    return found | {states: torchao_states(states, seed) for states in FORMATS if states != "bf16"}


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print(json.dumps(main(int(sys.argv[1]))))
