"""Recipes and optimizers: how many bytes each parameter costs, term by term. Read `Recipe` first.

A recipe names the dtypes of a training run, an optimizer adds its moments.

| recipe | weights | gradients | fp32 extra | master | AdamW moments | in all |
|---|---|---|---|---|---|---|
| fp32 | 4 | 4 | | | 8 | 16 |
| mixed-bf16, mixed-fp16 | 2 | 2 | | 4 | 8 | 16 |
| mixed-bf16-fp32-grads | 2 | 4 | | 4 | 8 | 18 |
| mixed-bf16-fp32-accum | 2 | 2 | 4 | 4 | 8 | 20 |
| megatron-fp16 | 2 | 2 | 4 | 4 | 8 | 20 |
| fsdp2-mixed, fsdp2-mixed-fp32-reduce | 4 | 4 | | | 8 | 16 |
| autocast-bf16, autocast-fp16 | 4 | 4 | | | 8 | 16 |
| pure-bf16 | 2 | 2 | | | 4 | 8 |
| pure-bf16-fp32-moments | 2 | 2 | | | 8 | 12 |

| optimizer | moments | bytes a parameter, fp32 moments |
|---|---|---|
| adamw | momentum, variance | 8 |
| sgd | | 0 |
| sgd-momentum | momentum | 4 |
| adamw-8bit, adamw-8bit-bnb | momentum, variance | 2 (1 + 4/256) = 2.03 |
| adamw-fp8 | momentum, variance | 2 (1 + 4/256) = 2.03 |
| adamw-4bit | momentum, variance | 2 (1/2 + 4/128) = 1.06 |
| adamw-bf16 | momentum, variance | 4, whatever the recipe |

The default everywhere is mixed-bf16 with AdamW: 16 bytes, of which 12 belong to the optimizer (ZeRO's K = 12).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lablib.calc.errors import one_of
from lablib.calc.torch_versions import PINNED, torch_facts

BLOCK = 256  # values that share one scale in block-wise 8-bit moments
SCALE_BYTES = 4  # the scale is fp32
LEAST_QUANTIZED = 4096  # values of a tensor from which on its moments are quantized


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The moments that an optimizer keeps between steps.

    Attributes:
        source: Where its bytes come from.
        bits: Of a moment value; None: the recipe's `moment`.
        block: Values that share one fp32 scale; 0 where there are no scales.
        whole_blocks: Whether a tensor whose last block is not full stays in the recipe's dtype, as in torchao; else the
            last block is shorter.
        table: Values of the fp32 table of each moment.
        shared_table: Whether all tensors share it.
    """

    name: str
    summary: str
    source: str
    moments: tuple[str, ...] = ()
    bits: int | None = None
    block: int = 0
    whole_blocks: bool = False
    table: int = 0
    shared_table: bool = False

    @property
    def quantized(self) -> bool:
        """Whether moments lie in blocks with scales."""
        return bool(self.block)

    def moment_bytes(self, params: int, value_bytes: int = 4) -> dict[str, int]:
        """Return the bytes of each moment for so many parameters, taken as one flat array.

        In blocks: `ceil(n bits / 8) + 4 ceil(n / block)` a moment. What depends on single tensors is left out: small
        ones, and tables. Together they are under 1 percent of GPT-2's moments, and 5 to 8 of a 0.5B model's on 64 ranks;
        `bytes_of_tensors` has them.

        Args:
            params: Parameters that this rank's optimizer updates.
            value_bytes: Bytes of a moment value where the optimizer does not say; the recipe knows.
        """
        return dict.fromkeys(self.moments, self._flat(params, value_bytes))

    def _flat(self, params: int, value_bytes: int = 4) -> int:
        size = params * value_bytes if self.bits is None else -(-params * self.bits // 8)
        return size + (SCALE_BYTES * -(-params // self.block) if self.block else 0)

    def bytes_of_tensors(self, sizes: Iterable[int], value_bytes: int = 4) -> dict[str, int]:
        """Return the bytes of each moment, exactly.

        Args:
            sizes: Values of each tensor as this rank's optimizer meets it: of a shard, under FSDP2.
        """
        if not self.quantized:
            return self.moment_bytes(sum(sizes), value_bytes)
        quantized, plain = [], 0
        for size in sizes:
            if size < LEAST_QUANTIZED or (self.whole_blocks and size % self.block):
                plain += size
            else:
                quantized.append(size)
        tables = min(len(quantized), 1) if self.shared_table else len(quantized)
        # bitsandbytes keeps small ones in fp32, torchao in the dtype of the parameter.
        plain_bytes = 4 if self.shared_table else value_bytes
        total = sum(map(self._flat, quantized)) + SCALE_BYTES * self.table * tables + plain_bytes * plain
        return dict.fromkeys(self.moments, total)


_MOMENTS = ("momentum", "variance")
_EIGHT = "Dettmers et al. 2021 (arXiv 2110.02861) with blocks of 2,048; both libraries now use 256"
OPTIMIZERS = {
    name: Optimizer(name=name, summary=summary, source=source, **how)
    for name, summary, source, how in (
        (
            "adamw",
            "torch.optim.AdamW: two moments",
            "Loshchilov and Hutter 2017 (arXiv 1711.05101)",
            {"moments": _MOMENTS},
        ),
        ("sgd", "torch.optim.SGD: no moments", "PyTorch documentation, torch.optim", {}),
        (
            "sgd-momentum",
            "torch.optim.SGD with momentum: one moment",
            "PyTorch documentation, torch.optim",
            {"moments": ("momentum",)},
        ),
        (
            "adamw-8bit",
            "torchao.optim.AdamW8bit: 8-bit moments, fp32 scale per 256 values",
            _EIGHT,
            {"moments": _MOMENTS, "bits": 8, "block": BLOCK, "whole_blocks": True, "table": 256},
        ),
        (
            "adamw-8bit-bnb",
            "bitsandbytes.optim.AdamW8bit: the same, with shorter last blocks and one table for all tensors",
            _EIGHT,
            {"moments": _MOMENTS, "bits": 8, "block": BLOCK, "table": 256, "shared_table": True},
        ),
        (
            "adamw-fp8",
            "torchao.optim.AdamWFp8: E4M3 moments, fp32 scale per 256 values",
            "torchao 0.18, torchao/optim/subclass_fp8.py",
            {"moments": _MOMENTS, "bits": 8, "block": BLOCK, "whole_blocks": True},
        ),
        (
            "adamw-4bit",
            "torchao.optim.AdamW4bit: 4-bit moments, fp32 scale per 128 values",
            "Li et al. 2023 (arXiv 2309.01507); torchao 0.18, torchao/optim/subclass_4bit.py",
            {"moments": _MOMENTS, "bits": 4, "block": 128, "whole_blocks": True, "table": 16},
        ),
        (
            "adamw-bf16",
            "AdamW with both moments in bf16, as DeepSeek-V3 keeps them",
            "DeepSeek-V3 (arXiv 2412.19437), section 3.3",
            {"moments": _MOMENTS, "bits": 16},
        ),
    )
}


def find_optimizer(name: str | Optimizer) -> Optimizer:
    """Return an optimizer by name; an Optimizer is returned as it is.

    Args:
        name: One of `OPTIMIZERS`, or an Optimizer of your own.
    """
    return name if isinstance(name, Optimizer) else OPTIMIZERS[one_of("optimizer", name, OPTIMIZERS)]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Bytes per parameter of one precision recipe, without the optimizer's moments.

    Attributes:
        source: Where its bytes come from.
        weights: Bytes of a stored weight.
        accumulation: Bytes of a second, fp32 gradient buffer that lives as long as the gradients.
        gradient_copy: Bytes of an fp32 gradient that the optimizer makes for itself; sharded with the optimizer.
        master: Bytes of the fp32 master copy.
        moment: Bytes of one moment value, where the optimizer does not fix it.
        gathered: Bytes of a weight as FSDP gathers it for use.
        reduced_by_default: Whether nobody said in which dtype FSDP2 reduces gradients, so that its version decides.
        casts: Bytes of a low-precision copy of every matrix that autograd keeps until backward (autocast).
        activation: Bytes of one activation value.
    """

    name: str
    summary: str
    source: str
    weights: int
    gradients: int
    accumulation: int = 0
    gradient_copy: int = 0
    master: int = 0
    moment: int = 4
    gathered: int
    reduced_by_default: bool = False
    casts: int = 0
    activation: int = 2

    @property
    def casts_when_gathered(self) -> bool:
        """Whether gathered weights have fewer bytes than stored ones, as with FSDP2's MixedPrecisionPolicy."""
        return self.gathered < self.weights

    def reduced(self, torch: str = PINNED) -> int:
        """Return the bytes of a gradient value as ranks reduce it: those of `gradients`, where FSDP2 does not decide.

        Args:
            torch: PyTorch whose FSDP2 it is.
        """
        as_computed = self.reduced_by_default and not torch_facts(torch).fsdp2_reduces_as_stored
        return self.gathered if as_computed else self.gradients

    def bytes_per_param(self, optimizer: str | Optimizer = "adamw") -> float:
        """Return the bytes of model states per parameter, `w + g + K`.

        Args:
            optimizer: Name of an optimizer, or the optimizer.
        """
        # A whole number of blocks, so that a fraction of a scale counts as a fraction.
        moments = sum(find_optimizer(optimizer).moment_bytes(BLOCK, self.moment).values()) / BLOCK  # 128 divides it
        return self.weights + self.gradients + self.accumulation + self.gradient_copy + self.master + moments


_MIXED = "Micikevicius et al. 2017 (arXiv 1710.03740); ZeRO (arXiv 1910.02054), section 3.1, K = 12"
_FSDP2 = "PyTorch documentation, torch.distributed.fsdp.fully_shard; FSDP (arXiv 2304.11277), section 4.4"
_MEGATRON = "Megatron-LM documentation, distributed optimizer, table of bytes per parameter"


def _recipe(
    name: str, weights: int, gradients: int, gathered: int, summary: str, source: str, **more: object
) -> Recipe:
    """A row of the table: bytes of a weight, of a gradient and of a gathered weight, and what else differs."""
    sizes = {"weights": weights, "gradients": gradients, "gathered": gathered}
    return Recipe(name=name, summary=summary, source=source, **sizes, **more)


_ROWS = (
    _recipe(
        "fp32", *(4, 4, 4), "everything in fp32", "4-byte weights, gradients and moments; " + _MEGATRON, activation=4
    ),
    _recipe("mixed-bf16", *(2, 2, 2), "bf16 weights and gradients, fp32 master copy and moments", _MIXED, master=4),
    _recipe(
        "mixed-fp16",
        *(2, 2, 2),
        "fp16 weights and gradients, fp32 master copy and moments, loss scaling",
        _MIXED,
        master=4,
    ),
    _recipe(
        "mixed-bf16-fp32-grads",
        *(2, 4, 2),
        "mixed-bf16 with gradients in fp32 only",
        _MEGATRON + ": 18, or 6 + 12/d when sharded",
        master=4,
    ),
    _recipe(
        "mixed-bf16-fp32-accum",
        *(2, 2, 2),
        "mixed-bf16 with an fp32 buffer that accumulates the bf16 gradients",
        "The Ultra-Scale Playbook (Hugging Face), memory for weights, gradients, optimizer states: 20",
        accumulation=4,
        master=4,
    ),
    _recipe(
        "megatron-fp16",
        *(2, 2, 2),
        "mixed-fp16 whose optimizer copies the gradients to fp32",
        _MEGATRON + ": 20, or 4 + 16/d when sharded",
        gradient_copy=4,
        master=4,
    ),
    _recipe(
        "fsdp2-mixed",
        *(4, 4, 2),
        "FSDP2's MixedPrecisionPolicy(param_dtype=bfloat16): fp32 shards, gathered in bf16, reduced in bf16 "
        "until torch 2.14 and in fp32 from 2.15 on",
        _FSDP2 + "; reduce_dtype=None in MixedPrecisionPolicy of torch 2.15",
        reduced_by_default=True,
    ),
    _recipe(
        "fsdp2-mixed-fp32-reduce",
        *(4, 4, 2),
        "the same with reduce_dtype=float32, as torchtitan and this course's `shard` have it",
        _FSDP2 + "; torchtitan, mixed_precision_reduce",
    ),
    _recipe(
        "autocast-bf16",
        *(4, 4, 4),
        "torch.autocast: everything stored in fp32, matrices cast to bf16 for use",
        "PyTorch documentation, torch.amp",
        casts=2,
    ),
    _recipe(
        "autocast-fp16",
        *(4, 4, 4),
        "torch.autocast with fp16 and a GradScaler",
        "PyTorch documentation, torch.amp",
        casts=2,
    ),
    _recipe(
        "pure-bf16",
        *(2, 2, 2),
        "everything in bf16, torch.optim's moments too: what model.bfloat16() does",
        "torch.optim makes moments in the dtype of the parameter",
        moment=2,
    ),
    _recipe(
        "pure-bf16-fp32-moments",
        *(2, 2, 2),
        "bf16 weights and gradients, fp32 moments, no master copy",
        "the sum 2 + 2 + 8; weights need stochastic rounding to learn small updates",
    ),
)
RECIPES = {row.name: row for row in _ROWS}


def recipe(name: str | Recipe) -> Recipe:
    """Return a recipe by name; a Recipe is returned as it is.

    Args:
        name: One of `RECIPES`, or a Recipe of your own.
    """
    return name if isinstance(name, Recipe) else RECIPES[one_of("recipe", name, RECIPES)]
