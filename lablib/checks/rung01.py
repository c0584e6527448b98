"""The checks of rung 01: bytes per parameter, what fits where, activations of a block, a whole run.

Every check draws its cases from a seed that it prints, one or more for each idea, so that no slip can hide.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from lablib.calc.memory import training_memory
from lablib.calc.memory.activations import layer_activations
from lablib.calc.models import ModelConfig
from lablib.calc.params import count_params
from lablib.checks.report import Wrong, check, close

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
#: Bytes of optimizer moments per parameter; the 8-bit one keeps one fp32 scale per block of 256 values.
MOMENT_BYTES = {"sgd": 0.0, "sgd-momentum": 4.0, "adamw": 8.0, "adamw-8bit": 2 * (1 + 4 / 256)}
STRATEGIES = ("ddp", "zero-1", "zero-2", "zero-3", "tensor")


def _dice(seed: int) -> random.Random:
    print(f"drawing cases with seed {seed}")
    return random.Random(seed)


def _explain(answer: object, slips: Sequence[tuple[float, str]], otherwise: str, case: str) -> None:
    """Raise `Wrong` with the sentence of the slip that gives exactly this answer, or with the general one."""
    for value, sentence in slips:
        if close(answer, value, rel=1e-4):
            raise Wrong(f"{sentence} ({case}).")
    raise Wrong(f"{otherwise} ({case}).")


@check
def bytes_per_parameter(answer: Callable[..., float], seed: int = 1) -> str:
    """Judge `bytes_per_parameter(weights, gradients, master, optimizer)`, one idea at a time, then in full."""
    dice = _dice(seed)
    for _ in range(8):
        weights = dice.choice(("bf16", "fp16", "fp32"))
        gradients = dice.choice((("bf16",), ("fp32",), ("bf16", "fp32")))
        master, optimizer = dice.choice((True, False)), dice.choice(tuple(MOMENT_BYTES))
        _probe_bytes(answer, weights, gradients, master, optimizer)
        truth = DTYPE_BYTES[weights] + sum(map(DTYPE_BYTES.get, gradients)) + 4 * master + MOMENT_BYTES[optimizer]
        if not close(answer(weights, gradients, master, optimizer), truth):
            case = f"weights {weights}, gradients {' + '.join(gradients)}, master {master}, {optimizer}"
            raise Wrong(f"Each part is right by itself, and the sum is not: add each copy once ({case}).")
    return "Recipes from plain SGD to 8-bit AdamW are right."


def _probe_bytes(
    answer: Callable[..., float], weights: str, gradients: tuple[str, ...], master: bool, optimizer: str
) -> None:
    """Change one choice at a time: the difference says which idea is wrong, whatever else is."""
    w, g, m, o = weights, gradients, master, optimizer
    half = "bf16" if w == "fp32" else w
    differences = [
        ((half, g, True, o), (half, g, False, o), 4,
         "An fp32 master copy costs 4 bytes beside the working weights, and where there is none it costs 0."),
        (("fp32", g, True, o), ("fp32", g, False, o), 4,
         "Count the master copy whenever `master` is True, also beside fp32 weights."),
        ((w, ("fp32",), m, o), (w, ("bf16",), m, o), 2,
         "Backward fills a gradient for every parameter before the optimizer steps, in the gradients' dtype."),
        ((w, ("bf16", "fp32"), m, o), (w, ("bf16",), m, o), 4,
         "Every gradient buffer that stays allocated counts, the fp32 sum beside the bf16 gradient too."),
        (("fp32", g, m, o), ("bf16", g, m, o), 2,
         "The working weights count in their own dtype: 4 bytes in fp32, 2 in bf16."),
        ((w, g, m, "sgd-momentum"), (w, g, m, "sgd"), 4,
         "SGD with momentum keeps one fp32 buffer, 4 bytes more than plain SGD, which keeps none."),
        ((w, g, m, "adamw"), (w, g, m, "sgd"), 8,
         "AdamW keeps two fp32 moments, 8 bytes more than plain SGD, which keeps none."),
        ((w, g, m, "adamw-8bit"), (w, g, m, "sgd"), MOMENT_BYTES["adamw-8bit"],
         "Block-wise 8-bit AdamW keeps two moments of 1 byte, each with a 4-byte scale per 256 values."),
    ]  # fmt: skip
    for one, other, expected, sentence in differences:
        values = [answer(*one), answer(*other)]
        for value in values:
            close(value, 0.0)  # raises Wrong for what is not a number
        if abs(float(values[0]) - float(values[1]) - expected) > 1e-6:
            raise Wrong(sentence)


@check
def fits(answer: Callable[..., tuple[float, bool]], seed: int = 1) -> str:
    """Judge `fits(params, gpus, capacity_gib, strategy)`, which returns GB per GPU and whether it fits."""
    dice = _dice(seed)
    # 13B on four 80 GiB GPUs first; then sizes drawn so that every strategy meets both verdicts.
    cases = [(13_015_864_320, 4, 80, strategy) for strategy in STRATEGIES]
    for strategy in STRATEGIES:
        for _ in range(6):
            cases.append((dice.randrange(1, 700) * 10**8, dice.choice((2, 4, 8, 16, 64)), 80, strategy))
        gpus, capacity = dice.choice((4, 8, 16)), dice.choice((24, 48, 80, 141))
        share = _bytes_per_gpu(1.0, gpus, strategy)
        # Between capacity in GB and capacity in GiB: who compares GB with GiB errs here.
        cases.append((round(1.03 * capacity * 1e9 / share), gpus, capacity, strategy))
    for params, gpus, capacity_gib, strategy in cases:
        given = answer(params, gpus, capacity_gib, strategy)
        try:
            gigabytes, verdict = given
        except (TypeError, ValueError):
            raise Wrong("Return two things: GB per GPU, and True or False.") from None
        _judge_fit(gigabytes, bool(verdict), params, gpus, capacity_gib, strategy)
    gigabytes = {strategy: _bytes_per_gpu(cases[0][0], 4, strategy) / 1e9 for strategy in STRATEGIES}
    answers = ", ".join(f"{strategy} {needed:.0f} GB" for strategy, needed in gigabytes.items())
    return f"{len(cases)} cases right. 13B on 4 GPUs: {answers}."


def _bytes_per_gpu(params: float, gpus: int, strategy: str) -> float:
    sharded = {"ddp": 0, "zero-1": 12, "zero-2": 14, "zero-3": 16, "tensor": 16}[strategy]
    return params * (16 - sharded + sharded / gpus)


def _judge_fit(gigabytes: object, verdict: bool, params: int, gpus: int, capacity_gib: float, strategy: str) -> None:
    needed = _bytes_per_gpu(params, gpus, strategy)
    case = f"{params / 1e9:.1f}B parameters, {strategy} on {gpus} GPUs of {capacity_gib} GiB"
    if not close(gigabytes, needed / 1e9):
        replicated, divided = 16 * params / 1e9, 16 * params / gpus / 1e9
        slips = [
            (needed / 2**30, "GB is 1e9 bytes, and this number is in GiB, 2**30 bytes"),
            (needed, "The number is in bytes, and the answer is asked in GB, 1e9 bytes"),
        ]
        if strategy == "ddp":
            idea = "Plain data parallelism replicates: more ranks do not shrink a rank's states"
            slips.append((divided, idea))
        else:
            slips.append((replicated, "This strategy divides something by the number of ranks"))
            idea = "This stage does not shard everything: ask what each rank still holds whole"
            slips.append((divided, idea))
        order = "Stages shard in this order: optimizer state, then gradients, then weights"
        if strategy == "tensor":
            order = "Tensor parallelism splits a matrix, and with it its gradient and its optimizer state"
        for split in (12, 14, 2, 4):  # bytes divided: stage 1, stage 2, weights alone, weights and gradients
            slips.append((params * (16 - split + split / gpus) / 1e9, order))
        sharded = {"ddp": 0, "zero-1": 8, "zero-2": 10, "zero-3": 12, "tensor": 12}[strategy]
        without_master = params * (12 - sharded + sharded / gpus) / 1e9
        slips.append((without_master, "AdamW's state in mixed precision is 12 bytes: the master copy too"))
        _explain(gigabytes, slips, "Split 16 bytes into what is sharded and what is replicated", case)
    if verdict != (needed <= capacity_gib * 2**30):
        if (gigabytes <= capacity_gib) == verdict:
            held = capacity_gib * 2**30 / 1e9
            raise Wrong(f"GB were compared with GiB: {capacity_gib} GiB are {held:.1f} GB ({case}).")
        raise Wrong(f"The bytes are right and the verdict is not: compare them with the capacity ({case}).")


@check
def block_activations(answer: Callable[..., float], seed: int = 1) -> str:
    """Judge `block_activations(seq, batch, hidden, heads, attention, recompute)` in bytes for a GPT block."""
    dice = _dice(seed)
    cases = []
    for attention, recompute in (("fused", "none"), ("plain", "none"), ("plain", "full"), ("fused", "full")):
        for _ in range(3):
            heads, width = dice.choice((8, 12, 16, 40)), dice.choice((64, 80, 128))
            # Never two sequences: a forgotten batch and values counted for bytes would give one and the same answer.
            shape = (dice.choice((512, 1024, 4096)), dice.choice((3, 4, 8)), heads * width, heads)
            cases.append((*shape, attention, recompute))
    for seq, batch, hidden, heads, attention, recompute in cases:
        config = _gpt(layers=1, hidden=hidden, heads=heads, vocab=256, positions=seq)
        # Without its scores a fused block is what selective recomputation keeps: 34 s b h.
        kept = "full" if recompute == "full" else "selective" if attention == "fused" else "none"
        truth = sum(layer_activations(config, batch=batch, seq=seq, recompute=kept, attention="plain").values())
        given = answer(seq, batch, hidden, heads, attention, recompute)
        if not close(given, truth, rel=2e-3):
            _wrong_activations(given, truth, seq, batch, hidden, heads, attention, recompute)
    return f"{len(cases)} blocks right, with and without the scores, with and without recomputation."


def _wrong_activations(
    given: object, truth: float, s: int, b: int, h: int, a: int, attention: str, recompute: str
) -> None:
    case = f"s={s}, b={b}, h={h}, a={a}, attention {attention}, recompute {recompute}"
    linear, scores = 34 * s * b * h, 5 * a * s * s * b
    mask = "A dropout mask is kept too, 1 byte a value"
    two_byte_mask = (linear + 2 * s * b * h, "A dropout mask has 1 byte a value, not 2")
    slips = [
        (truth / 2, "The count looks like values, not bytes: a bf16 value has 2 bytes"),
        (truth / b, "Every sequence of the micro-batch keeps its own activations"),
    ]
    if recompute == "full":
        kept = "With full recomputation only the block's input survives the forward pass"
        nothing = "Full recomputation still keeps something: the block's input, to start again from"
        block_input = 2 * s * b * h
        working = "Count what survives the forward pass; the working set exists only during backward"
        slips += [(0, nothing), (linear, kept), (linear + scores, kept)]
        slips += [(block_input + linear, working), (block_input + linear + scores, working)]
    elif attention == "plain":
        # Without its factor the term is too small for the tolerance that separates the other slips.
        if close(float(given) - linear, scores / (s * b * h), rel=1e-3):
            raise Wrong(f"The factor s b h multiplies the scores' term 5 a s / h too ({case}).")
        no_masks = linear - 2 * s * b * h
        slips += [(no_masks + kept, mask) for kept in (scores, scores * 4 / 5)]
        slips += [
            (linear + scores * 4 / 5, mask),
            (linear, "Plain attention keeps an s by s matrix for every head: that term is missing"),
            (linear + scores / a, "The scores exist once per head, so their term has a factor a"),
            (linear + scores / s, "The scores are s by s: their term grows with the square of s"),
            (two_byte_mask[0] + scores * 6 / 5, two_byte_mask[1]),
        ]
    else:
        slips += [
            (linear + scores, "A fused kernel never writes the s by s scores to memory"),
            (linear - 2 * s * b * h, mask),
            two_byte_mask,
        ]
    _explain(given, slips, "Walk through the block and list what each operator needs in backward", case)


@check
def run_memory(answer: Callable[..., Mapping[str, float]], seed: int = 1) -> str:
    """Judge `run_memory(config, optimizer, seq, batch)`: bytes by term, for GPT configs drawn at random."""
    dice = _dice(seed)
    for optimizer in (*MOMENT_BYTES, *MOMENT_BYTES):
        heads = dice.randrange(4, 97)
        config = _gpt(
            layers=dice.randrange(2, 97),
            hidden=heads * dice.choice((64, 96, 128)),
            heads=heads,
            vocab=dice.randrange(10_000, 130_000),
            positions=4096,
        )
        seq, batch = dice.choice((512, 1024, 2048, 4096)), dice.choice((2, 3, 4, 8))
        given = _terms_of(answer, config, optimizer, seq, batch)
        missing = {"weights", "gradients", "optimizer", "activations"} - set(given)
        if missing:
            raise Wrong(f"Return a dictionary of four kinds of bytes; missing: {', '.join(sorted(missing))}.")
        _judge_run(given, config, optimizer, seq, batch)
        total = sum(given[term] for term in ("weights", "gradients", "optimizer", "activations"))
        print(
            f"  {config.num_layers:3} layers, hidden {config.hidden:5}, {optimizer:12} s={seq} b={batch}:"
            f" {total / 1e9:9.1f} GB"
        )
    return "You can compute the memory of a training run from model size and optimizer choice."


def _terms_of(answer: Callable[..., object], *case: object) -> Mapping[str, float]:
    """Return the learner's dictionary, or raise `Wrong` if it is not a dictionary."""
    try:
        given = answer(*case)
    except TypeError as error:
        if "ParamCount" not in str(error):
            raise
        raise Wrong("`count_params(config)` is a report; take `count_params(config).total`.") from None
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise Wrong(f"Return a dictionary of weights, gradients, optimizer and activations, and not {kind}.")
    return given


def _gpt(*, layers: int, hidden: int, heads: int, vocab: int, positions: int) -> ModelConfig:
    return ModelConfig(
        name="drawn", family="gpt2", num_layers=layers, hidden=hidden, num_heads=heads, ffn=4 * hidden, vocab=vocab,
        max_positions=positions, learned_positions=True, tied=True, norm="layernorm", gated_mlp=False,
        qkv_bias=True, attn_out_bias=True, mlp_bias=True,
    )  # fmt: skip


def _judge_run(given: Mapping[str, float], config: ModelConfig, optimizer: str, seq: int, batch: int) -> None:
    memory = training_memory(config, recipe="mixed-bf16", optimizer=optimizer, seq=seq, micro_batch=batch)
    params = count_params(config).total
    case = f"{config.num_layers} layers, hidden {config.hidden}, {optimizer}"
    for term, idea in (
        ("weights", "Weights are 2 bytes for every parameter, embeddings and final norm included"),
        ("gradients", "Every trained parameter has a gradient, 2 bytes in bf16"),
    ):
        if not close(given[term], memory.terms[term]):
            _explain(given[term], [(memory.terms[term] / 1e9, "Return bytes, not GB")], idea, case)
    # Whole scales against fractions of one: a relative 1e-4 is wider than that, and narrower than any slip.
    if not close(given["optimizer"], memory.optimizer, rel=1e-4):
        forgot = (memory.optimizer - 4 * params, "The fp32 master copy is missing, 4 bytes a parameter")
        idea = "Count this optimizer's own moments, and the master copy"
        _explain(given["optimizer"], [forgot], idea, case)
    layer = sum(layer_activations(config, batch=batch, seq=seq, recompute="selective", attention="plain").values())
    with_scores = sum(layer_activations(config, batch=batch, seq=seq, recompute="none", attention="plain").values())
    truth = config.num_layers * layer
    # A fused kernel's statistics are below this tolerance, so counting them is right too.
    if not close(given["activations"], truth, rel=2e-3):
        slips = [
            (layer, "This is one layer; every layer keeps its own activations"),
            (config.num_layers * with_scores, "A fused kernel does not keep the scores: leave their term out"),
            (truth * 32 / 34, "A dropout mask is kept too, 1 byte a value"),
            (truth / batch, "Every sequence of the micro-batch keeps its own activations"),
        ]
        idea = "Blocks keep 34 s b h bytes each when scores are not kept"
        _explain(given["activations"], slips, idea, case)
