"""Training in few bits, measured: the loss of every recipe beside bf16, and the bytes of real low-bit optimizers.

    python -m tests.evidence low-bits              the bytes: torchao's and bitsandbytes' optimizers beside the calculator
    python -m tests.evidence low-bits --write      train all recipes over all seeds too, half an hour on two cores, and
                                                   keep all of it in book/data/low_bits.json

Both libraries must be installed: .venv/bin/pip install -c constraints.txt -e '.[fp8,bnb]'.

What is compared are runs with one seed: the same weights at the start, the same batches. Two runs in bf16 whose starts
differ in the last bits of fp32 end apart as well, and by as much as chance alone makes of it: that is the band.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lablib.calc.memory import training_memory
from lablib.calc.memory.timeline import memory_timeline
from lablib.launch.precision.libraries import load, quiet
from lablib.launch.records import write_json
from lablib.launch.training.lora import LoRALinear
from lablib.toys.precision import LowBitAdamW, Recipe4, swap_linears
from lablib.toys.precision.fp8 import RECIPES, Recipe
from lablib.toys.text import batches, tokens
from lablib.toys.transformer import Transformer, tiny_config
from tests.evidence.cases import Case
from tests.evidence.oracles import measure_case
from tests.evidence.oracles.measurement import play
from tests.evidence.oracles.models import LOW_BIT, build_model

TABLE = Path(__file__).resolve().parents[2] / "book" / "data" / "low_bits.json"
SEEDS, HARD_SEEDS, STEPS, LAST, WARM = 6, 8, 300, 50, 30
LR, BATCH, SEQ, LAYERS, HIDDEN = 3e-3, 4, 64, 3, 64
T = {6: 2.571, 8: 2.365}  # Student's t at 97.5 percent, by the number of seeds
#: Letters by their frequencies alone cost 3.1: who ends above has diverged. Who ends half a nat above bf16, which ends near
#: 2.25, has learned little more than these; without warm-up bf16 itself does with some seeds.
FREQUENCIES, UNLEARNED = 3.2, 0.5


class Bf16(Recipe):
    """The three matmuls with both factors rounded to bf16, and sums in fp32."""

    def forward(self, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        """Return `x wᵀ`."""
        return x_MK.bfloat16().float() @ w_NK.bfloat16().float().T

    def input_gradient(self, g_MN: Tensor, w_NK: Tensor) -> Tensor:
        """Return `g w`."""
        return self.forward(g_MN, w_NK.T)

    def weight_gradient(self, g_MN: Tensor, x_MK: Tensor) -> Tensor:
        """Return `gᵀ x`."""
        return self.forward(g_MN.T, x_MK.T)


@dataclass(frozen=True)
class Run:
    """One way to train.

    Attributes:
        recipe: Of the linear layers but the head.
        last: Whether the last block stays in bf16, with the head.
        states: Of the optimizer; "fp32" is torch.optim.AdamW.
        tables: Whether embedding and head have fp32 states all the same.
        nudged: Whether the start differs in the last bits.
        base: The run that it is compared with.
        hard: Whether the model is GPT-2's kind and the learning rate does not begin low.
    """

    recipe: Recipe | Recipe4
    last: bool = False
    states: str = "fp32"
    tables: bool = False
    nudged: bool = False
    base: str = "bf16"
    hard: bool = False


_BF16, _FULL = Bf16(), Recipe4()
HARD = "no warm-up, fp32 moments"
RUNS: dict[str, Run] = {
    "bf16": Run(_BF16),
    "bf16, another start": Run(_BF16, nudged=True),
    "FP8, one scale a tensor": Run(RECIPES["tensor"]),
    "FP8, one scale a tensor, E4M3 gradients": Run(RECIPES["tensor, E4M3 gradients"]),
    "MXFP8": Run(RECIPES["mxfp8"]),
    "MXFP8, scales rounded down": Run(RECIPES["mxfp8, rounded down"]),
    "NVFP4, all ingredients": Run(_FULL, last=True),
    "without two levels of scales": Run(replace(_FULL, two_level=False), last=True),
    "without square blocks": Run(replace(_FULL, square=False), last=True),
    "without stochastic rounding": Run(replace(_FULL, stochastic=False), last=True),
    "without the Hadamard turn": Run(replace(_FULL, turned=False), last=True),
    "without a block in bf16": Run(_FULL),
    "without all of them": Run(Recipe4(two_level=False, square=False, stochastic=False, turned=False)),
    **{f"bf16, {states} moments": Run(_BF16, states=states) for states in ("bf16", "8bit", "fp8", "4bit")},
    **{f"bf16, {s} moments, tables in fp32": Run(_BF16, states=s, tables=True) for s in ("8bit", "fp8")},
    HARD: Run(_BF16, hard=True, base=HARD),
    **{
        f"{HARD.removesuffix('fp32 moments')}{states} moments{', tables in fp32' * tables}": Run(
            _BF16, states=states, tables=tables, hard=True, base=HARD
        )
        for states, tables in (("8bit", False), ("fp8", False), ("4bit", False), ("8bit", True), ("fp8", True))
    },
}


def train(name: str, seed: int, steps: int = STEPS) -> float | None:
    """Return the mean loss of the last steps of a run; None where it is no number."""
    run, generator = RUNS[name], torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Transformer(
        tiny_config("gpt2" if run.hard else "llama", num_layers=LAYERS, hidden=HIDDEN, max_positions=SEQ)
    )
    if run.nudged:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 2.0**-22 * torch.randn(parameter.shape, generator=generator))
    recipe = replace(run.recipe, generator=generator) if isinstance(run.recipe, Recipe4) else run.recipe
    last = [n for n, _ in model.named_modules() if run.last and n.startswith(f"blocks.{LAYERS - 1}.")]
    swap_linears(model, recipe=recipe, keep=("head", *last))
    swap_linears(model, recipe=_BF16, keep=())  # what was kept
    optimizers = optimizers_of(run, model)
    stream, losses = batches(tokens(), batch=BATCH, seq=SEQ, seed=100 + seed), []
    for step in range(steps):
        loss = model.loss(next(stream))
        loss.backward()
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = LR if run.hard else LR * min(1, (step + 1) / WARM)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    mean = math.fsum(losses[-LAST:]) / LAST
    return mean if math.isfinite(mean) else None


def optimizers_of(run: Run, model: Transformer) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a run's parameters."""
    named = dict(model.named_parameters())
    full = [
        p for n, p in named.items() if run.states == "fp32" or (run.tables and n.split(".")[0] in ("embed", "head"))
    ]
    rest = [p for p in named.values() if all(p is not q for q in full)]
    made = [torch.optim.AdamW(full, lr=LR)] if full else []
    return made + ([LowBitAdamW(rest, lr=LR, states=run.states)] if rest else [])


def _job(job: tuple[str, int]) -> tuple[str, int, float | None]:
    torch.set_num_threads(1)
    return (*job, train(*job))


def trained(say: Callable[[str], None]) -> dict[str, list[float | None]]:
    """Return the losses of every run, seed by seed."""
    losses: dict[str, list[float | None]] = {name: [] for name in RUNS}
    jobs = [(name, seed) for name, run in RUNS.items() for seed in range(HARD_SEEDS if run.hard else SEEDS)]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for name, seed, loss in pool.map(_job, jobs):
            losses[name].append(loss)
            say(f"{name}, seed {seed}: {loss}")
    return losses


def summary(losses: dict[str, list[float | None]]) -> list[dict[str, float | str | bool | None]]:
    """Return a row for each run: its mean loss above bf16, half of the 95 percent interval of that mean, and what it says.

    The band is that of "bf16, another start": the mean of differences that are chance alone. A run is apart from bf16 if
    its interval and the band do not meet. Of one that diverged with some seeds there is no mean.
    """
    rows = []
    for name, run in RUNS.items():
        pairs = list(zip(losses[name], losses[run.base], strict=True))
        lost = [a is None or a > FREQUENCIES or (a - b > UNLEARNED and not run.hard) for a, b in pairs]
        diverged, off = sum(lost), [a - b for (a, b), no in zip(pairs, lost, strict=True) if not no]
        half = None if diverged else T[len(off)] * statistics.stdev(off) / math.sqrt(len(off))
        rows.append(
            {"name": name, "above": None if diverged else statistics.fmean(off), "half": half, "diverged": diverged}
        )
    other = next(row for row in rows if row["name"] == "bf16, another start")
    band = abs(other["above"]) + other["half"]
    return [
        row | {"band": band, "apart": None if row["diverged"] else abs(row["above"]) - row["half"] > band}
        for row in rows
    ]


# --- bytes --------------------------------------------------------------------------------------------------

_WIDE = {"implementation": "hf", "size": "small", "sharding": "fsdp2", "recompute": "full"}
_OF = (
    {"family": "gpt2", "micro_batch": 3, "recipe": "pure-bf16"},
    {"family": "qwen2", "implementation": "hf", "recipe": "mixed-bf16"},
    {"family": "gpt2", "size": "small", "recipe": "mixed-bf16", "recompute": "full"},
    {"dp": 2, "sharding": "fsdp2", "recipe": "fsdp2-mixed-fp32-reduce"},
    {"dp": 8, "recipe": "fsdp2-mixed-fp32-reduce", **_WIDE},
    {"dp": 64, "family": "qwen2", "micro_batch": 3, "recipe": "fsdp2-mixed", **_WIDE},
)
#: bitsandbytes' optimizer knows no DTensor, and no fake tensors: it runs C code on their memory.
CASES = tuple(
    Case(optimizer=optimizer, seq=1000, step="fused", **how)
    for optimizer in LOW_BIT
    for how in _OF
    if optimizer != "adamw-8bit-bnb" or not {"sharding", "size"} & set(how)
)
QLORA = tuple(
    Case(implementation="hf", tuning="lora", step="fused", micro_batch=3, **how)
    for how in (
        {"family": "llama", "recipe": "fp32", "recompute": "full"},
        {"family": "mistral", "recipe": "fp32"},
        {"family": "llama", "recipe": "fp32", "optimizer": "adamw-8bit-bnb", "seq": 1000},
    )
)


def optimizer_row(case: Case) -> dict[str, Any]:
    """Measure a case, and put the calculator beside it: every state, and the peak of forward and backward.

    On a CPU the optimizer's step runs operator by operator, and holds what a compiled step keeps in registers. So it
    stands apart, as "eager_step".
    """
    with quiet():
        found = measure_case(case)
    settings = case.settings() | {"torch": torch.__version__}
    step = memory_timeline(step=case.step, out_of_place=True, **settings)
    totals = {name: total for name, total in found.totals.items() if name != "optimizer step"}
    return {
        "name": case.name,
        "optimizer": case.optimizer,
        "states": found.states,
        "exact": dict(training_memory(**settings).state_terms) == found.states,
        "peak": max(totals.values()),
        "predicted_peak": max(one.total for one in step.instants if one.phase != "optimizer"),
        "eager_step": found.totals["optimizer step"],
        "step": step.instant("optimizer step").total,
    }


class Nf4LoRALinear(torch.nn.Module):
    """`LoRALinear` whose frozen weight is bitsandbytes' NF4."""

    def __init__(self, layer: LoRALinear) -> None:
        super().__init__()
        library = load("bitsandbytes")
        settings = {"quant_type": "nf4", "compress_statistics": True, "blocksize": 64, "requires_grad": False}
        self.weight = library.nn.Params4bit(layer.weight.detach().clone(), **settings)._quantize(torch.device("cpu"))
        self.bias, self.lora_A, self.lora_B, self.scale = layer.bias, layer.lora_A, layer.lora_B, layer.scale
        self.multiply = library.matmul_4bit

    def forward(self, x: Tensor) -> Tensor:
        """Return the frozen layer's output with the adapter's added."""
        inner = torch.nn.functional.linear(x, self.lora_A.to(x.dtype))
        base = self.multiply(x, self.weight.t(), quant_state=self.weight.quant_state, bias=self.bias)
        return base + self.scale * torch.nn.functional.linear(inner, self.lora_B.to(x.dtype))

    def constants(self) -> int:
        """Bytes of the scales, their scales and their mean."""
        state = self.weight.quant_state
        return sum(tensor.nbytes for tensor in (state.absmax, state.state2.absmax, state.offset))


def qlora_row(case: Case) -> dict[str, Any]:
    """The same for QLoRA. The calculator has the largest matrix in its compute dtype all the time."""
    with quiet():
        subject, constants = build_model(case), 0
        for name, module in list(subject.model.named_modules()):
            if isinstance(module, LoRALinear):
                parent, _, last = name.rpartition(".")
                quantized = Nf4LoRALinear(module)
                setattr(subject.model.get_submodule(parent), last, quantized)
                constants += quantized.constants()
        found = play(case, subject, None)
    settings = case.settings() | {"tuning": "qlora"}
    said, step = training_memory(**settings), memory_timeline(step=case.step, out_of_place=True, **settings)
    states = dict(said.state_terms)
    codes = states.pop("quantized_weights")
    exact = states.pop("quantization_constants") == constants and found.states == states | {
        "weights": states["weights"] + codes
    }
    # The tracker does not see the constants, which hang on the codes.
    return {
        "name": case.name.replace("lora", "qlora"),
        "exact": exact,
        "codes": codes,
        "constants": constants,
        "peak": found.peak + constants,
        "predicted_peak": step.peak_bytes,
        "matrix": dict(step.peak.terms)["dequantized_weights"],
    }


def measured(say: Callable[[str], None], only: str = "") -> dict[str, list[dict[str, Any]]]:
    """Return the rows of bytes."""
    rows: dict[str, list[dict[str, Any]]] = {"optimizers": [], "qlora": []}
    for part, cases, row in (("optimizers", CASES, optimizer_row), ("qlora", QLORA, qlora_row)):
        for case in (case for case in cases if only in case.name):
            rows[part].append(row(case))
            made = rows[part][-1]
            say(
                f"{made['name']}: states {'exact' if made['exact'] else 'WRONG'}, peak {made['predicted_peak']:,} of {made['peak']:,}"
            )
    return rows


def drifted(rows: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return a sentence for every row that is no longer what the committed file says."""
    old = json.loads(TABLE.read_text(encoding="utf-8"))
    if old["how"]["torch"] != torch.__version__.partition("+")[0]:
        return []  # another release may keep something else
    known = {row["name"]: row for part in ("optimizers", "qlora") for row in old[part]}
    found = (row for part in rows.values() for row in part)
    return [
        f"{row['name']} was {known.get(row['name'])} and is {row}" for row in found if row != known.get(row["name"])
    ]


def save(rows: dict[str, list[dict[str, Any]]], losses: dict[str, list[float | None]]) -> Path:
    """Write all of it."""
    how = {
        "seeds": SEEDS,
        "hard_seeds": HARD_SEEDS,
        "steps": STEPS,
        "last": LAST,
        "lr": LR,
        "batch": BATCH,
        "seq": SEQ,
        "layers": LAYERS,
    }
    how |= {"hidden": HIDDEN, "torch": torch.__version__.partition("+")[0]}
    return write_json(TABLE, {"how": how, "training": summary(losses), "losses": losses, **rows})


def make(only: str, *, write: bool, say: Callable[[str], None]) -> list[str]:
    """Measure, and write or compare; return what is wrong."""
    rows = measured(say, only)
    wrong = [f"{row['name']}: not exact" for part in rows.values() for row in part if not row["exact"]]
    if write:
        say(f"wrote {save(rows, trained(say))}")
        return wrong
    return wrong + drifted(rows)
