"""Other people's memory calculators: each formula written down from its source, beside this course's own.

A calculator answers one quantity: the states, the activations, or both together ("total", judged by the peak of a
step). One that publishes several has an entry for each. Each is asked about what it claims to cover and nothing else;
where its text leaves a choice open, it gets the choice that is kinder to it:

- FlashAttention counts as selective recomputation: either keeps no scores.
- FSDP2 shards everything that lives from step to step, so it is stage 3, whether or not it gathers again.
- Weights stored in fp32 and cast for use (autocast, FSDP2's policy) count as mixed precision.
- Tiny models are left out where a formula drops terms that only large models make small.
- Where a formula takes a number of parameters, it gets the exact one.

`tests.evidence.comparison` holds every answer to what PyTorch measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from lablib.calc.models import ModelConfig
from lablib.calc.parallel import zero3_estimate
from lablib.calc.params import count_params
from lablib.calc.precision import find_optimizer, recipe
from tests.evidence.cases import Case
from tests.evidence.verdict import predict

QUANTITIES = ("states", "activations", "total")
OWN = "this course"

#: Recipes that people call mixed precision: an fp32 copy of the weights and 16-bit values in forward.
MIXED = ("mixed-bf16", "autocast-bf16", "fsdp2-mixed", "fsdp2-mixed-fp32-reduce")

#: A reason for not asking a calculator about a case, and when it holds.
Limit = tuple[str, Callable[[Case], bool]]


@dataclass(frozen=True)
class Source:
    """Where a calculator is published: in words, its page without the scheme, its key in book/references.bib."""

    name: str
    citation: str
    page: str = ""
    key: str = ""

    @property
    def url(self) -> str:
        return f"https://{self.page}" if self.page else ""


@dataclass(frozen=True)
class Calculator:
    """One quantity of one calculator.

    Attributes:
        quantity: "states", "activations" or "total".
        formula: Bytes of one rank in a case.
        limits: What it does not claim to cover, the first that holds being the reason given.
        variant: Which formula, where a source has two of one quantity.
    """

    source: Source
    quantity: str
    formula: Callable[[Case], float]
    limits: tuple[Limit, ...] = ()
    variant: str = ""

    @property
    def name(self) -> str:
        return f"{self.source.name}, {self.variant}" if self.variant else self.source.name

    def refuses(self, case: Case) -> str:
        """Return "" or the reason why the calculator does not claim to cover a case."""
        if case.cp > 1 and self.name != OWN:
            return "it was not asked about context parallelism"
        if case.implementation == "hf" and case.model.is_moe and self.name != OWN:
            return "it was not asked about the experts of Hugging Face's classes"
        return next((reason for reason, holds in self.limits if holds(case)), "")

    def predict(self, case: Case) -> int:
        if reason := self.refuses(case):
            raise ValueError(f"{self.name} does not cover {case.name}: {reason}")
        return round(self.formula(case))


@dataclass(frozen=True)
class PaperSymbols:
    """The letters of the papers; `v` is padded to a multiple of `t`."""

    s: int  # tokens in a sequence
    b: int  # sequences in a micro-batch
    h: int  # hidden size
    a: int  # attention heads
    layers: int  # L
    v: int  # vocabulary
    t: int = 1  # tensor-parallel ranks
    p: int = 1  # pipeline stages

    @property
    def sbh(self) -> int:
        return self.s * self.b * self.h


def symbols(case: Case) -> PaperSymbols:
    model = case.model
    vocab = -(-model.vocab // case.tp) * case.tp
    sizes = (case.seq, case.micro_batch, model.hidden, model.num_heads, model.num_layers, vocab)
    return PaperSymbols(*sizes, case.tp, case.pp)


def parameters(case: Case) -> int:
    """Return the parameters of the model before it is split over ranks, exactly."""
    return count_params(case.model).total


def keeps_scores(case: Case) -> bool:
    """Return whether the scores of every pair of tokens wait for backward."""
    return case.attention == "plain" and case.recompute == "none"


# What calculators do not cover.


def _is_split(case: Case) -> bool:
    return case.tp * case.pp > 1


def _not_one_device(case: Case) -> bool:
    return not case.unsharded or _is_split(case)


def _not_16_bits(case: Case) -> bool:
    return case.recipe not in (*MIXED, "pure-bf16")


def _not_mixed(case: Case) -> bool:
    return case.recipe not in MIXED


def _not_mixed_or_fp32(case: Case) -> bool:
    return case.recipe not in (*MIXED, "fp32")


def _has_other_mlp(case: Case) -> bool:
    return not case.model.gated_mlp and case.model.ffn != 4 * case.model.hidden


_TINY = "it leaves out what is small in models of published sizes, and this one is tiny"
FULL_TUNING: Limit = "it counts full fine-tuning only", lambda c: c.tuning != "full"
ONE_MLP: Limit = "its blocks have one MLP, no experts", lambda c: c.model.is_moe
WIDE_MLP: Limit = "it takes an MLP four times as wide as the stream for granted", _has_other_mlp
SIXTEEN_BITS: Limit = "its activations have 2 bytes a value", _not_16_bits
ONLY_MIXED: Limit = "it counts mixed precision only", _not_mixed
FP32_MOMENTS: Limit = "it keeps moments in fp32", _not_mixed_or_fp32
ADAM: Limit = "it was asked about AdamW only", lambda c: c.optimizer != "adamw"
PUBLISHED: Limit = _TINY, lambda c: c.size == "tiny"
SPLIT_TINY: Limit = _TINY, lambda c: c.size == "tiny" and c.tp > 1
EVEN: Limit = "it divides evenly, and PyTorch's ZeRO-1 optimizer by whole tensors", lambda c: c.sharding == "zero1"
SPLIT_TABLE: Limit = (
    "it divides all parameters by the tensor-parallel ranks, and PyTorch's plan leaves the embedding whole",
    lambda c: c.implementation != "paper" and c.tp > 1,
)
HAS_PEAK: Limit = "no peak is measured with the papers' kernels", lambda c: c.implementation == "paper"
#: EleutherAI's calculator has a number for them.
LIVE: Limit = (
    "its total under ZeRO-3 has live parameters, a setting of DeepSpeed that these runs have not",
    lambda c: c.shards,
)


# States.


def zero_states(
    params: float, weights: float, gradients: float, optimizer: float, *, ranks: int = 1, stage: int = 0
) -> float:
    """Return the bytes of one rank: stage 1 divides the optimizer's states, 2 the gradients too, 3 the weights too.

    With 2, 2 and 12 bytes a parameter these are the rows of ZeRO's table 1: (2 + 2 + K) ψ, (2 + 2 + K/N) ψ,
    (2 + (2 + K)/N) ψ and (2 + 2 + K) ψ/N. Source: Rajbhandari et al. 2019, sections 3.1, 5 and table 1.
    """
    parts = (weights, 3), (gradients, 2), (optimizer, 1)
    return sum(size * params / (ranks if stage >= least else 1) for size, least in parts)


def _sharded(case: Case, params: float, weights: float, gradients: float, optimizer: float) -> float:
    stage = 3 if case.shards else 0
    return zero_states(params, weights, gradients, optimizer, ranks=case.dp, stage=stage)


def _zero(case: Case) -> float:
    """K is an fp32 copy of the weights and the optimizer's moments; model parallelism divides ψ."""
    moments = len(find_optimizer(case.optimizer).moment_bytes(1, 4))
    return _sharded(case, parameters(case) / case.tp, 2, 2, 4 + 4 * moments)


def _playbook(case: Case, params: float) -> float:
    """Fp32: 4 + 4 + 8 bytes a parameter; bf16: 2 + 2 + 4 of an fp32 copy + 8. Tensor parallelism splits evenly."""
    sizes = (2, 2, 12) if case.recipe in MIXED else (4, 4, 8)
    return _sharded(case, params / case.tp, *sizes)


def simple_parameters(hidden: int, layers: int, vocab: int) -> int:
    """Return the Playbook's number of parameters of a simple transformer, N = hv + L (12h² + 13h) + 2h."""
    return hidden * vocab + layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden


#: Transformer Math 101: the optimizer's bytes a parameter, the fp32 copy of the weights included.
MATH_101_OPTIMIZERS = {"adamw": 12, "adamw-8bit": 6, "sgd-momentum": 8}


def _math_101(case: Case) -> float:
    """Model and gradients 2 bytes each, 4 in fp32, where the copy is the weights themselves and counts once."""
    mixed, optimizer = case.recipe in MIXED, MATH_101_OPTIMIZERS[case.optimizer]
    sizes = (2, 2, optimizer) if mixed else (4, 4, optimizer - 4)
    return _sharded(case, parameters(case), *sizes)


def megatron_parameters(case: Case) -> float:
    """Return the parameters of Megatron's most loaded rank: (blocks / p + embedding) / t.

    The head counts where it is a table of its own and p = 1. Biases are left out, norms are split like matrices.
    """
    x, model = symbols(case), case.model
    inside = 3 if model.gated_mlp else 2
    width = model.num_experts * model.expert_ffn if model.is_moe else model.ffn
    norm = 2 if model.norm == "layernorm" else 1
    block = inside * x.h * width + 2 * x.h * norm + 2 * x.h * (model.q_width + model.kv_width)
    tables = x.h * x.v * (2 if count_params(model).by_component["head"] and x.p == 1 else 1)
    return ((x.layers * block + norm * x.h) / x.p + tables) / x.t


def megatron_bytes(ranks: int = 1) -> float:
    """Return Megatron's bytes a parameter: 18, or 6 + 12/d with its distributed optimizer on d ranks."""
    return 6 + 12 / ranks


def eleuther_parameters(
    hidden: int, layers: int, vocab: int, seq: int, *, width: int, matrices: int = 2, kv_ratio: float = 1.0
) -> float:
    """Return the parameters that EleutherAI's calculator counts.

    2vh + hs + 8hL + 2h + 2 (1 + a_kv/a) L h² + n L h f: two tables, positions, and four norms a block whatever the
    model has.
    """
    block = 2 * (1 + kv_ratio) * hidden**2 + matrices * hidden * width
    return 2 * vocab * hidden + hidden * seq + 8 * hidden * layers + 2 * hidden + layers * block


def _eleuther_count(case: Case) -> float:
    x, model = symbols(case), case.model
    width = model.num_experts * model.expert_ffn if model.is_moe else model.ffn
    matrices = 3 if model.gated_mlp else 2
    ratio = model.num_kv_heads / x.a
    return eleuther_parameters(x.h, x.layers, x.v, x.s, width=width, matrices=matrices, kv_ratio=ratio)


def _eleuther_states(case: Case) -> float:
    """ZeRO divides by all GPUs, tensor-parallel ones too; tensor and pipeline parallelism only the weights."""
    params, shards = _eleuther_count(case), case.dp * case.tp if case.shards else 1
    weights = 2 if case.recipe in MIXED else 4
    return (weights / (case.tp * case.pp) + recipe(case.recipe).gradients + 12) * params / shards


def transformers_bytes(mixed: bool, optimizer: str = "adamw") -> int:
    """Return the bytes a parameter of Transformers' documentation: weights 4, mixed 6; gradients 4; AdamW 8, SGD 4."""
    return (6 if mixed else 4) + 4 + {"adamw": 8, "sgd-momentum": 4}[optimizer]


def largest_layer(model: ModelConfig) -> int:
    """Return the parameters of the module with the most of its own: the token table, or a matrix of an MLP."""
    matrix = model.hidden * model.ffn + (max(model.hidden, model.ffn) if model.mlp_bias else 0)
    return max(model.vocab * model.hidden, matrix)


def deepspeed_arguments(case: Case) -> dict[str, int]:
    """Return what DeepSpeed's estimator is asked about a sharded case, on nodes of 8 GPUs."""
    gpus = min(case.dp, 8)
    sizes = {"params": parameters(case), "largest_layer": largest_layer(case.model)}
    return sizes | {"gpus_per_node": gpus, "nodes": case.dp // gpus}


def accelerate_usage(model: float, *, mixed: bool) -> dict[str, float]:
    """Return the bytes that Accelerate's estimator looks at; it prints the largest. `model` is its size in fp32."""
    gradients, step = (1.5, 2) if mixed else (1, 4)
    return {"model": model, "gradients": gradients * model, "optimizer": 2 * model, "step": step * model}


# Activations.


def korthikanti_layer(
    x: PaperSymbols, *, sequence_parallel: bool = False, scores: bool = True, full: bool = False
) -> float:
    """Return the bytes that one block of a GPT keeps for backward, in 16 bits, with dropout.

    sbh (10 + 24/t + 5as/(ht)); with sequence parallelism sbh (34 + 5as/h) / t; selective recomputation leaves out the
    term in as; full recomputation keeps 2sbh. Source: Korthikanti et al. 2022, section 4 and table 2.
    """
    if full:
        return 2 * x.sbh
    stream = x.sbh / x.t if sequence_parallel else x.sbh
    return 10 * stream + 24 * x.sbh / x.t + (5 * x.a * x.s * x.s * x.b / x.t if scores else 0)


def korthikanti_ends(x: PaperSymbols) -> float:
    """Return the bytes outside the blocks: the embedding's dropout sbhp/t and, for p = 1, head and logits 4sbh/t (1 + v/h)."""
    return (x.sbh * x.p + (4 * x.sbh * (1 + x.v / x.h) if x.p == 1 else 0)) / x.t


def _blocks(case: Case, sequence_parallel: bool = False) -> float:
    """All L blocks: a first stage holds p micro-batches of L/p."""
    full = case.recompute == "full"
    x, scores = symbols(case), keeps_scores(case)
    return x.layers * korthikanti_layer(x, sequence_parallel=sequence_parallel, scores=scores, full=full)


def zero_activations(hidden: int, batch: int, seq: int, layers: int, value: int = 2) -> int:
    """Return ZeRO's 12 values a token, unit of hidden size and block, at `value` bytes each."""
    return value * 12 * hidden * batch * seq * layers


def _zero_activations(case: Case) -> float:
    x = symbols(case)
    return zero_activations(x.h, x.b, x.s, x.layers, recipe(case.recipe).activation)


def megatron_activations(case: Case) -> float:
    """Return the bytes of a first stage, without scores.

    With sequence parallelism (sbh (18 + 4 f/h) L + 8sbp + sbhp, and for p = 1 4sbh (1 + v/h)) / t, f being the width of
    the MLP; without it (sbh (10 + 24/t) L + 8sbp + sbhp, and for p = 1 2 (sbv/t + sbh)) times 1.05.
    """
    x = symbols(case)
    embedding = 8 * x.s * x.b * x.p + x.sbh * x.p
    if case.sequence_parallel:
        head = 4 * x.sbh * (1 + x.v / x.h) if x.p == 1 else 0
        return (x.sbh * (18 + 4 * case.model.ffn / x.h) * x.layers + embedding + head) / x.t
    head = 2 * (x.s * x.b * x.v / x.t + x.sbh) if x.p == 1 else 0
    return 1.05 * (x.sbh * (10 + 24 / x.t) * x.layers + embedding + head)


def _eleuther_activations(case: Case) -> float:
    """Korthikanti's sum for any width w of a value: sbhL (16w + 2 + (2w + 1) as/h) bytes."""
    x, w = symbols(case), recipe(case.recipe).activation
    scores = (2 * w + 1) * x.a * x.s / x.h if keeps_scores(case) else 0
    return x.sbh * x.layers * (16 * w + 2 + scores) / (case.tp if case.sequence_parallel else 1)


def _eleuther_buffers(case: Case) -> float:
    """With ZeRO-3 a bucket of 5e8 parameters and 1e9 live ones, DeepSpeed's defaults, each at most the model."""
    weights, params = 2 if case.recipe in MIXED else 4, _eleuther_count(case)
    return weights * (min(5e8, params) + min(1e9, params)) if case.shards else 0


# This course.


@cache
def _own(case: Case) -> dict:
    return predict(case)


# The table.

ZERO = Source("ZeRO", "Rajbhandari et al. 2019, ZeRO (arXiv 1910.02054)", "arxiv.org/abs/1910.02054", "rajbhandari2019")
KORTHIKANTI = Source(
    "Korthikanti et al.", "Korthikanti et al. 2022 (arXiv 2205.05198)", "arxiv.org/abs/2205.05198", "korthikanti2022"
)
MATH_101 = Source(
    "Transformer Math 101",
    "Anthony, Biderman, Schoelkopf 2023, Transformer Math 101",
    "blog.eleuther.ai/transformer-math/",
    "anthony2023",
)
PLAYBOOK = Source(
    "Ultra-Scale Playbook",
    "Tazi et al. 2025, The Ultra-Scale Playbook",
    "huggingface.co/spaces/nanotron/ultrascale-playbook",
    "tazi2025",
)
MEGATRON = Source(  # read at commit 00caa53
    "Megatron-LM's report",
    "NVIDIA, Megatron-LM, megatron/training/theoretical_memory_usage.py",
    "github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/theoretical_memory_usage.py",
    "megatronmemory",
)
ELEUTHER = Source(  # read at commit 069ae2e
    "EleutherAI's calculator",
    "EleutherAI, cookbook, calc/calc_transformer_mem.py",
    "github.com/EleutherAI/cookbook/blob/main/calc/calc_transformer_mem.py",
    "eleuthercookbook",
)
TRANSFORMERS = Source(
    "Transformers' docs",
    "Hugging Face Transformers, documentation, model_memory_anatomy",
    "huggingface.co/docs/transformers/model_memory_anatomy",
    "transformersmemory",
)
DEEPSPEED = Source(
    "DeepSpeed",
    "DeepSpeed, estimate_zero3_model_states_mem_needs",
    "deepspeed.readthedocs.io/en/latest/memory.html",
    "deepspeedmemory",
)
ACCELERATE = Source(
    "Accelerate",
    "Hugging Face Accelerate, accelerate estimate-memory",
    "huggingface.co/docs/accelerate/usage_guides/model_size_estimator",
    "acceleratememory",
)
THIS_COURSE = Source(OWN, "lablib.calc.memory.training_memory and lablib.calc.memory.timeline.memory_timeline")

_ZERO_STATES = Calculator(
    ZERO,
    "states",
    _zero,
    (FULL_TUNING, SPLIT_TABLE, EVEN, ONLY_MIXED, SPLIT_TINY, ("it has no pipeline stages", lambda c: c.pp > 1)),
)
_ZERO_ACTIVATIONS = Calculator(
    ZERO,
    "activations",
    _zero_activations,
    (
        FULL_TUNING,
        ("it counts activations of GPT-2's architecture only", lambda c: c.family != "gpt2"),
        WIDE_MLP,
        PUBLISHED,
        ("its 12 values are without recomputation", lambda c: c.recompute != "none"),
        ("its 12 values are on one device", _is_split),
    ),
)
_KORTHIKANTI = Calculator(
    KORTHIKANTI,
    "activations",
    lambda c: _blocks(c, c.sequence_parallel) + korthikanti_ends(symbols(c)),
    (FULL_TUNING, ("it counts GPT blocks only", lambda c: c.family != "gpt2"), WIDE_MLP, SIXTEEN_BITS, PUBLISHED),
)
_MATH_STATES = Calculator(
    MATH_101,
    "states",
    _math_101,
    (
        FULL_TUNING,
        EVEN,
        FP32_MOMENTS,
        ("it has Adam and SGD with momentum only", lambda c: c.optimizer not in MATH_101_OPTIMIZERS),
        ("its sum for a split model belongs to ZeRO-1", _is_split),
    ),
)
_MATH_ACTIVATIONS = Calculator(
    MATH_101,
    "activations",
    _blocks,
    (
        FULL_TUNING,
        ONE_MLP,
        WIDE_MLP,
        SIXTEEN_BITS,
        PUBLISHED,
        ("it has no sequence parallelism", lambda c: c.sequence_parallel),
        ("its formula is of one stage", lambda c: c.pp > 1),
    ),
)
_PLAYBOOK_STATES = Calculator(
    PLAYBOOK,
    "states",
    lambda c: _playbook(c, parameters(c)),
    (
        FULL_TUNING,
        SPLIT_TABLE,
        EVEN,
        FP32_MOMENTS,
        ADAM,
        SPLIT_TINY,
        ("it gives no sum for a stage", lambda c: c.pp > 1),
    ),
)
_PLAYBOOK_N = Calculator(
    PLAYBOOK,
    "states",
    lambda c: _playbook(c, simple_parameters(c.model.hidden, c.model.num_layers, c.model.vocab)),
    (
        *_PLAYBOOK_STATES.limits,
        PUBLISHED,
        (
            "it counts parameters of a simple transformer and, in its pictures, of Llama models",
            lambda c: c.family not in ("gpt2", "llama"),
        ),
        WIDE_MLP,
    ),
    variant="its N",
)
_PLAYBOOK_ACTIVATIONS = Calculator(
    PLAYBOOK,
    "activations",
    _blocks,
    (FULL_TUNING, ONE_MLP, WIDE_MLP, SIXTEEN_BITS, PUBLISHED, ("its formula is of one device", _is_split)),
)
_MEGATRON_STATES = Calculator(
    MEGATRON,
    "states",
    lambda c: megatron_bytes() * megatron_parameters(c),
    (
        FULL_TUNING,
        SPLIT_TABLE,
        ("it counts bf16 with fp32 gradients only", lambda c: c.recipe not in ("mixed-bf16", "autocast-bf16")),
        ADAM,
        PUBLISHED,
        ("its distributed optimizer does not shard the weights", lambda c: c.shards),
    ),
)
_MEGATRON_ACTIVATIONS = Calculator(
    MEGATRON,
    "activations",
    megatron_activations,
    (
        FULL_TUNING,
        ONE_MLP,
        SIXTEEN_BITS,
        PUBLISHED,
        ("it has no sum for full recomputation", lambda c: c.recompute == "full"),
        ("it takes for granted that no scores are kept", keeps_scores),
    ),
)
_ELEUTHER_STATES = Calculator(
    ELEUTHER,
    "states",
    _eleuther_states,
    (FULL_TUNING, SPLIT_TABLE, ("its optimizer keeps fp32 states", _not_mixed_or_fp32), ADAM, PUBLISHED),
)
_ELEUTHER_ACTIVATIONS = Calculator(
    ELEUTHER,
    "activations",
    _eleuther_activations,
    (
        FULL_TUNING,
        PUBLISHED,
        ("it has one kind of checkpointing, which keeps 34 bytes", lambda c: c.recompute == "full"),
    ),
)


def _total(states: Calculator, activations: Calculator, *more: Limit) -> Calculator:
    """States and activations together, which a peak is held to."""

    def formula(case: Case) -> float:
        buffers = _eleuther_buffers(case) if states.source is ELEUTHER else 0
        return states.formula(case) + activations.formula(case) + buffers

    limits = (HAS_PEAK, *states.limits, *activations.limits, *more)
    return Calculator(states.source, "total", formula, limits)


CALCULATORS: tuple[Calculator, ...] = (
    _ZERO_STATES,
    _ZERO_ACTIVATIONS,
    _KORTHIKANTI,
    _MATH_STATES,
    _MATH_ACTIVATIONS,
    _total(_MATH_STATES, _MATH_ACTIVATIONS, LIVE),
    _PLAYBOOK_STATES,
    _PLAYBOOK_N,
    _PLAYBOOK_ACTIVATIONS,
    _total(_PLAYBOOK_STATES, _PLAYBOOK_ACTIVATIONS),
    _MEGATRON_STATES,
    _MEGATRON_ACTIVATIONS,
    _total(_MEGATRON_STATES, _MEGATRON_ACTIVATIONS),
    _ELEUTHER_STATES,
    _ELEUTHER_ACTIVATIONS,
    _total(_ELEUTHER_STATES, _ELEUTHER_ACTIVATIONS),
    Calculator(
        TRANSFORMERS,
        "states",
        lambda c: transformers_bytes(c.recipe in MIXED, c.optimizer) * parameters(c),
        (
            FULL_TUNING,
            ("it has fp32 and mixed precision only", _not_mixed_or_fp32),
            ("it has AdamW and SGD with momentum only", lambda c: c.optimizer not in ("adamw", "sgd-momentum")),
            ("it describes one device", _not_one_device),
        ),
    ),
    Calculator(
        DEEPSPEED,
        "states",
        lambda c: zero3_estimate(**deepspeed_arguments(c), offload="none").gpu,
        (
            ("it estimates ZeRO-2 and ZeRO-3 only", lambda c: not c.shards),
            FULL_TUNING,
            ("it counts mixed precision only", lambda c: not c.recipe.startswith("fsdp2-mixed")),
            ADAM,
            ("it knows no tensor parallelism", lambda c: c.tp > 1),
        ),
    ),
    Calculator(
        ACCELERATE,
        "states",
        lambda c: max(accelerate_usage(4 * parameters(c), mixed=c.recipe in MIXED).values()),
        (
            FULL_TUNING,
            ("it keeps fp32 weights beside 16-bit ones", _not_mixed_or_fp32),
            ADAM,
            ("it estimates one device", _not_one_device),
        ),
    ),
    Calculator(THIS_COURSE, "states", lambda c: sum(_own(c)["states"].values())),
    Calculator(THIS_COURSE, "activations", lambda c: _own(c)["saved"]),
    Calculator(THIS_COURSE, "total", lambda c: _own(c)["peak"], (HAS_PEAK,)),
)


def find_calculator(name: str, quantity: str) -> Calculator:
    for one in CALCULATORS:
        if (one.name, one.quantity) == (name, quantity):
            return one
    known = "; ".join(f"{one.name}: {one.quantity}" for one in CALCULATORS)
    raise ValueError(f"no calculator is named {name!r} and says {quantity!r}; there are {known}")
