"""The checks of rung 01: bytes per parameter, what fits where, activations of a block, a whole run.

Every check compares an answer with the truth on many cases, and a wrong one with what each known mistake would give.
A mistake is named only if it explains every case that is wrong; otherwise the smallest such case is shown.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import product

from lablib.calc.memory.activations import layer_activations
from lablib.calc.models import ModelConfig
from lablib.calc.params import count_params
from lablib.checks.judging import Slip, Wrong, check, close, name_the_mistake, pair, refuse

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
#: Bytes of optimizer moments per parameter; the 8-bit one keeps one fp32 scale per block of 256 values.
MOMENT_BYTES = {"sgd": 0.0, "sgd-momentum": 4.0, "adamw": 8.0, "adamw-8bit": 2 * (1 + 4 / 256)}
STRATEGIES = {"ddp": 0, "zero-1": 12, "zero-2": 14, "zero-3": 16, "tensor": 16}  # bytes of 16 that are divided
#: Optimizers of a run in mixed precision: bytes of moments a parameter, and of roots that its step makes.
#: One moment comes first, because there a missing master copy and 16-bit moments are different numbers.
RUN_OPTIMIZERS = {"sgd-momentum": (4, 0), "adamw": (8, 4), "adamw-fused": (8, 0), "sgd": (0, 0)}
#: Bytes a logit at the loss: eager PyTorch holds log-probabilities and two gradients in fp32, Megatron one fp32 and one bf16.
RUN_LOSSES = {"eager": 12, "megatron": 6}
TERMS = ("parameters", "weights", "gradients", "optimizer", "activations", "logits", "peak")


def _dice(seed: int) -> random.Random:
    print(f"drawing cases with seed {seed}")
    return random.Random(seed)


@check(
    idea="Every copy of a parameter that is held between backward and the optimizer's step costs its own bytes.",
    section="Model states: 16 bytes a parameter",
    line="Add weights, each gradient buffer, 4 bytes for a master copy if there is one, and the optimizer's moments.",
)
def bytes_per_parameter(answer: Callable[..., float], seed: int = 1) -> str:
    """Judge `bytes_per_parameter(weights, gradients, master, optimizer)` on every combination."""
    half, plain = DTYPE_BYTES.get, ("sgd-momentum", "adamw")
    buffers = (("bf16",), ("fp16",), ("fp32",), ("bf16", "fp32"), ("fp16", "fp32"))
    cases = list(product(("bf16", "fp16", "fp32"), buffers, (True, False), MOMENT_BYTES))
    _dice(seed).shuffle(cases)

    def right(w: str, g: tuple[str, ...], m: bool, o: str) -> float:
        return half(w) + sum(map(half, g)) + 4 * m + MOMENT_BYTES[o]

    def but(**changed: Callable[..., float]) -> Callable[..., float]:
        """The truth with some of its four parts counted otherwise."""
        parts = {
            "weights": lambda w, g, m, o: half(w), "gradients": lambda w, g, m, o: sum(map(half, g)),
            "master": lambda w, g, m, o: 4 * m, "moments": lambda w, g, m, o: MOMENT_BYTES[o],
        } | changed  # fmt: skip
        return lambda *case: sum(part(*case) for part in parts.values())

    def moments(of: Callable[..., float]) -> Callable[..., float]:
        return but(moments=lambda w, g, m, o: MOMENT_BYTES[o] * (of(w, g) / 4 if o in plain else 1))

    each = "Block-wise 8-bit AdamW keeps two moments of 1 byte, each with a 4-byte scale per 256 values"
    eight = lambda bytes_: but(moments=lambda w, g, m, o: bytes_ if o == "adamw-8bit" else MOMENT_BYTES[o])  # noqa: E731
    slips = [
        ("Plain moments are fp32, 4 bytes each, whatever the dtype of the weights", moments(lambda w, g: half(w))),
        ("Plain moments are fp32, 4 bytes each, whatever the dtype of the gradients", moments(lambda w, g: half(g[0]))),
        ("Plain moments are fp32, 4 bytes each, and not 2", moments(lambda w, g: 2)),
        ("An fp32 master copy costs 4 bytes beside the working weights", but(master=lambda *_: 0)),
        ("Where there is no master copy it costs 0", but(master=lambda *_: 4)),
        ("Count the master copy beside fp32 weights too", but(master=lambda w, g, m, o: 4 * (m and w != "fp32"))),
        ("A master copy is fp32, 4 bytes, whatever the dtype of the weights", but(master=lambda w, g, m, o: m * half(w))),
        ("A master copy does not replace the working weights", but(weights=lambda w, g, m, o: 0 if m else half(w))),
        ("Backward fills a gradient for every parameter before the optimizer steps", but(gradients=lambda *_: 0)),
        ("A gradient has its own dtype, not that of the weights", but(gradients=lambda w, g, m, o: half(w) * len(g))),
        *((f"A gradient has its own dtype, and is not always {n} bytes", but(gradients=lambda w, g, m, o, n=n: n * len(g)))
          for n in (4, 2)),
        ("A weight has its own dtype, and is not always 2 bytes", but(weights=lambda *_: 2)),
        *(("Every gradient buffer that stays allocated counts, the fp32 sum beside the bf16 gradient too", one)
          for one in (but(gradients=lambda w, g, m, o: half(g[0])), but(gradients=lambda w, g, m, o: half(g[-1])))),
        ("AdamW keeps two fp32 moments, 8 bytes",
         but(moments=lambda w, g, m, o: 4 if o == "adamw" else MOMENT_BYTES[o])),
        ("SGD with momentum keeps one fp32 buffer, 4 bytes, and plain SGD none",
         but(moments=lambda w, g, m, o: {"sgd": 4, "sgd-momentum": 8}.get(o, MOMENT_BYTES[o]))),
        ("Moments depend on the optimizer: not every one is AdamW", but(moments=lambda *_: 8)),
        ("16 bytes are one recipe's: add up what this one has", lambda *case: 16 if case[3] == "adamw" else right(*case)),
        *(("The roots that AdamW's step makes are no model states, and gone after it",
           but(moments=lambda w, g, m, o, of=of: MOMENT_BYTES[o] + 4 * (o in of))) for of in (("adamw",), ("adamw", "adamw-8bit"))),
        ("Moments are kept with and without a master copy", but(moments=lambda w, g, m, o: m * MOMENT_BYTES[o])),
        *((each, eight(bytes_)) for bytes_ in (2, 1 + 1 / 64, 2 + 1 / 64, 2 + 2 / 256, 2 * (1 + 4), 2 * (1 + 4 / 2048))),
        ("The number is in bits, and the answer is asked in bytes", lambda *case: 8 * right(*case)),
    ]  # fmt: skip
    rows = [(case, answer(*case), right(*case)) for case in cases]
    if wrong := [row for row in rows if not close(row[1], row[2], rel=0.006 / row[2])]:  # two decimals are fine
        name_the_mistake(rows, wrong, slips, "weights {0}, gradients {1}, master {2}, {3}")
    return f"{len(cases)} recipes from plain SGD to 8-bit AdamW are right."


@check(
    idea="A strategy divides some of the 16 bytes by the number of GPUs, and each GPU holds all of the others.",
    section="Several GPUs: which of the 16 bytes each strategy divides",
    line="Return params * (kept + divided / gpus) in GB, and whether that many bytes are at most capacity_gib * 2**30.",
)
def fits(answer: Callable[..., tuple[float, bool]], seed: int = 1) -> str:
    """Judge `fits(params, gpus, capacity_gib, strategy)`, which returns GB per GPU and whether it fits."""
    dice = _dice(seed)
    # 13B on four 80 GiB GPUs first; then sizes drawn so that every strategy meets both verdicts.
    cases = [(13_015_864_320, 4, 80, strategy) for strategy in STRATEGIES]
    for strategy in STRATEGIES:
        for filled in (0.5, 0.917, 0.95, 0.98, 0.996, 1.02, 1.5, 70.0):  # of a GPU, and more than all GPUs hold
            gpus, capacity = dice.choice((4, 8, 16, 64)), dice.choice((48, 80, 141, 180))
            share = _gigabytes(1, gpus, capacity, strategy)
            cases.append((round(filled * capacity * 2**30 / 1e9 / share), gpus, capacity, strategy))
    answers = []
    for case in cases:
        gigabytes, verdict = pair(answer(*case), "Return two things: GB per GPU, and True or False.")
        if isinstance(verdict, str) or verdict not in (True, False):
            raise Wrong(f"The second value should be True or False, and is {verdict!r}.")
        answers.append((gigabytes, bool(verdict)))
    truths = [_gigabytes(*case) for case in cases]
    rows = [(case, given, truth) for case, (given, _), truth in zip(cases, answers, truths, strict=True)]
    if wrong := [row for row in rows if not close(row[1], row[2], rel=1.001 / row[2])]:  # whole GB are fine
        name_the_mistake(rows, wrong, _FIT_SLIPS, "{0:,} parameters, {3} on {1} GPUs of {2} GiB")
    _judge_verdicts(cases, truths, [verdict for _, verdict in answers])
    told = ", ".join(f"{case[3]} {truth:.0f} GB" for case, truth in list(zip(cases, truths, strict=True))[:5])
    return f"{len(cases)} cases right. 13B on 4 GPUs: {told}."


def _gigabytes(params: float, gpus: int, capacity: float, strategy: str) -> float:
    return _divided(STRATEGIES)(params, gpus, capacity, strategy)


def _divided(by_strategy: Mapping[str, int], total: int = 16) -> Callable[..., float]:
    """GB on a GPU if that many bytes a parameter are divided by the GPUs, of a total."""

    def gigabytes(params: float, gpus: int, capacity: float, strategy: str) -> float:
        shared = by_strategy.get(strategy, STRATEGIES[strategy] - (16 - total if STRATEGIES[strategy] else 0))
        return params * (total - shared + shared / gpus) / 1e9

    return gigabytes


_ORDER = "Stages shard in this order: optimizer state, then gradients, then weights"
_MOMENTS = "Stage 1 shards all 12 bytes of the optimizer, the master copy with the moments, not the 8 of the moments"
_FIT_SLIPS: list[Slip] = [
    ("GB is 1e9 bytes, and this number is in GiB, 2**30 bytes", lambda *case: _gigabytes(*case) * 1e9 / 2**30),
    ("The number is in bytes, and the answer is asked in GB, 1e9 bytes", lambda *case: _gigabytes(*case) * 1e9),
    ("The number is in MB, and the answer is asked in GB, 1e9 bytes", lambda *case: _gigabytes(*case) * 1e3),
    ("This is what all GPUs hold together, and one of them is asked for", lambda *case: _gigabytes(*case) * case[1]),
    ("AdamW's state in mixed precision is 12 bytes: the master copy too", _divided({}, total=12)),
    ("Gradients are 16-bit here, 2 bytes, so that the states are 2 + 2 + 12",
     _divided({"zero-1": 12, "zero-2": 16, "zero-3": 18, "tensor": 18}, total=18)),
    *((_MOMENTS, _divided(dict(zip(("zero-1", "zero-2", "zero-3", "tensor"), shared, strict=False))))
      for shared in ((8,), (8, 10), (8, 10, 12), (8, 10, 12, 12))),
    ("Plain data parallelism replicates: more ranks do not shrink a rank's states", _divided({"ddp": 16})),
    ("Stages 1 and 2 divide a part of the 16 bytes, and `ddp` none", _divided(dict.fromkeys(STRATEGIES, 16))),
    *(("Stages 1 and 2 do not divide everything: a rank holds some of it in full, and a share of the rest", one) for one in
      (_divided({"zero-1": 16, "zero-2": 16}), lambda n, gpus, _, strategy: n * (STRATEGIES[strategy] / gpus or 16) / 1e9)),
    ("Of what is divided a GPU keeps one share: take away the others, and not that one",
     lambda n, gpus, _, strategy: n * (16 - STRATEGIES[strategy] / gpus) / 1e9),
    ("Every strategy but `ddp` divides something by the number of GPUs", _divided(dict.fromkeys(STRATEGIES, 0))),
    *((_ORDER, _divided(dict(zip(("zero-1", "zero-2", "zero-3"), shared, strict=False))))
      for shared in ((14, 12), (2, 4), (2, 14), (0, 12, 14), (14, 16))),
    ("Stage 2 divides the optimizer state as well, not the gradients alone", _divided({"zero-2": 2})),
    ("Each stage divides more than the one before: stage 2 the gradients too, stage 3 the weights too",
     _divided({"zero-2": 12, "zero-3": 12})),
    ("Stage 3 divides the weights too, and so all 16 bytes", _divided({"zero-3": 14})),
    ("The weights that stage 3 gathers are no states: what fits has them unit by unit",
     lambda *case: _gigabytes(*case) + 2 * case[0] / 1e9 * (case[3] == "zero-3")),
    *(("Tensor parallelism splits a matrix, and with it its gradient and its optimizer state", _divided({"tensor": n}))
      for n in (0, 2, 4, 12, 14)),
]  # fmt: skip


def _judge_verdicts(cases: Sequence[tuple], gigabytes: Sequence[float], verdicts: Sequence[bool]) -> None:
    def all_are(rule: Callable[[float, float, int], bool]) -> bool:
        return all(rule(g, case[2], case[1]) == v for case, g, v in zip(cases, gigabytes, verdicts, strict=True))

    gib = 2**30 / 1e9
    if all_are(lambda g, capacity, gpus: g <= capacity * gib):
        return
    case, g = next((c, g) for c, g, v in zip(cases, gigabytes, verdicts, strict=True) if v != (g <= c[2] * gib))
    refuse(
        f"{g:.1f} GB on GPUs of {case[2]} GiB, which are {case[2] * gib:.1f} GB",
        (f"The verdict is {verdicts[0]} in every case, and depends on the bytes and the capacity", len(set(verdicts)) == 1),
        ("GB were compared with GiB", all_are(lambda g, capacity, gpus: g <= capacity)),
        ("The verdict is the wrong way round: True means that it fits", all_are(lambda g, capacity, gpus: g > capacity * gib)),
        ("Compare what one GPU holds with one GPU's capacity, not with that of all",
         all_are(lambda g, capacity, gpus: g <= gpus * capacity * gib)),
        ("No reserve is asked for here: the states alone fit if they are at most the capacity", g <= case[2] * gib),
        ("The bytes are right and the verdict is not: compare them with one GPU's capacity", True),
    )  # fmt: skip


@check(
    idea="A block keeps what its backward reads: 16-bit inputs of its operators, and dropout masks of 1 byte.",
    section="Activation memory of a transformer block",
    line="Return 2sbh under full recomputation, else 34sbh, and 5as²b more where the scores are kept.",
)
def block_activations(answer: Callable[..., float], seed: int = 1) -> str:
    """Judge `block_activations(seq, batch, hidden, heads, attention, recompute)` in bytes for a GPT block."""
    dice = _dice(seed)
    cases = []
    for attention, recompute in (("fused", "none"), ("plain", "none"), ("plain", "full"), ("fused", "full")):
        for seq, batch in zip(dice.sample((512, 1024, 4096), 3), dice.sample((3, 5, 7), 3), strict=True):
            heads, width = dice.choice((8, 12, 16, 40)), dice.choice((64, 80, 128))
            cases.append((seq, batch, heads * width, heads, attention, recompute))
    rows, wrong = [], []
    for case in cases:
        given = answer(*case)
        s, b, h, a, attention, recompute = case
        kept = "full" if recompute == "full" else "selective" if attention == "fused" else "none"
        config = _gpt(hidden=h, heads=a, positions=s)
        truth = sum(layer_activations(config, batch=b, seq=s, recompute=kept, attention="plain").values())
        # What PyTorch's kernels keep beside it is right too: two numbers a token and norm, one a row of scores.
        statistics = 0 if recompute == "full" else 16 * b * s + (4 * a * b * s if attention == "fused" else 0)
        if not (close(given, truth, rel=1e-3) or truth <= float(given) <= (truth + statistics) * (1 + 1e-6)):
            wrong.append((case, given, truth))
        rows.append((case, given, truth))
    if wrong:
        name_the_mistake(rows, wrong, _BLOCK_SLIPS, "s={0}, b={1}, h={2}, a={3}, attention {4}, recompute {5}")
    return f"{len(cases)} blocks right, with and without the scores, with and without recomputation."


def _gpt(*, hidden: int, heads: int, positions: int) -> ModelConfig:
    return ModelConfig(
        name="drawn", family="gpt2", num_layers=1, hidden=hidden, num_heads=heads, ffn=4 * hidden, vocab=256,
        max_positions=positions, learned_positions=True, tied=True, norm="layernorm", gated_mlp=False,
        qkv_bias=True, attn_out_bias=True, mlp_bias=True,
    )  # fmt: skip


def _block(linear: float = 34, scores: float = 5, full: float = 2, fused: float = 0) -> Callable[..., float]:
    """What a block keeps with these factors of sbh and of as²b; `fused` is that of the scores of a fused kernel."""

    def kept(s: int, b: int, h: int, a: int, attention: str, recompute: str) -> float:
        if recompute == "full":
            return full * s * b * h
        return linear * s * b * h + (scores if attention == "plain" else fused) * a * s * s * b

    return kept


_NARROW = (
    "2sbh are missing, one 16-bit tensor of width h: a norm's input, the input of QKV, Q, K, V, the input of the output "
    "projection or of the MLP. Both dropout masks, 1 byte a value, are as many"
)
_BLOCK_SLIPS: list[Slip] = [
    ("The count looks like values, not bytes: a bf16 value has 2 bytes", lambda *case: _block()(*case) / 2),
    ("The count looks like values, not bytes: a bf16 value has 2 bytes", _block(16, 2, 1)),
    ("Values are bf16, 2 bytes each, and not 4", lambda *case: _block()(*case) * 2),
    ("Values are bf16, 2 bytes each, and not 4", _block(66, 9, 4)),
    ("Every sequence of the micro-batch keeps its own activations", lambda *case: _block()(*case) / case[1]),
    ("A dropout mask is kept too, 1 byte a value; there is one after attention and one after the MLP", _block(33)),
    (_NARROW, _block(32)),
    ("4sbh are missing, two 16-bit tensors of width h: both norms' inputs, or Q and K", _block(30)),
    ("8sbh are missing, a tensor of the MLP's width 4h: the input of GeLU, or that of the second matrix", _block(26)),
    ("The MLP's 19sbh are missing", _block(15)),
    ("Attention's linear part, 11sbh, is missing", _block(23)),
    *(("2sbh are too many: a dropout mask has 1 byte a value, not 2, and a block's output is the next one's input",
       _block(36, n)) for n in (5, 6)),
    ("A dropout mask has 1 byte a value, not 2: the one of the scores too", _block(34, 6)),
    ("Dropout masks are kept too, 1 byte a value: after attention, after the MLP and of the scores", _block(32, 4)),
    ("Plain attention keeps an s by s matrix for every head: that term is missing", _block(scores=0)),
    *(("Plain attention keeps three s by s tensors a head: softmax output, dropout mask, their product",
       _block(scores=n)) for n in (2, 3)),
    ("Of the scores a dropout mask is kept too, 1 byte a value", _block(scores=4)),
    ("A fused kernel never writes the s by s scores to memory", _block(fused=5)),
    ("Plain attention keeps the scores, a fused kernel does not: not the other way round", _block(scores=0, fused=5)),
    ("The scores exist once per head, so their term has a factor a", lambda *c: _block(scores=5 / c[3])(*c)),
    ("The scores are s by s: their term grows with the square of s", lambda *c: _block(scores=5 / c[0])(*c)),
    ("The factor s b h multiplies the scores' term 5 a s / h too",
     lambda *c: _block(scores=5 / (c[0] * c[1] * c[2]))(*c) if c[5] == "none" else _block()(*c)),
    ("The scores exist for every sequence of the micro-batch", lambda *c: _block(scores=5 / c[1])(*c)),
    *(("Scores are bf16 here, 2 bytes a value, and softmax's input is not kept", _block(scores=n)) for n in (7, 9)),
    ("The number is in GB, and the answer is asked in bytes", lambda *c: _block()(*c) / 1e9),
    ("A block has one input, 2sbh", _block(full=4)),
    ("With full recomputation the scores are dropped like the rest",
     lambda *c: _block()(*c) + (_block(0)(*c[:5], "none") if c[5] == "full" else 0)),
    ("Full recomputation still keeps something: the block's input, to start again from", _block(full=0)),
    ("With full recomputation only the block's input survives the forward pass", _block(full=34)),
    ("With full recomputation only the block's input survives the forward pass", lambda *c: _block()(*c[:5], "none")),
    ("Count what survives the forward pass; the working set exists only during backward", _block(full=36)),
    ("Count what survives the forward pass; the working set exists only during backward",
     lambda *c: _block()(*c[:5], "none") + _block()(*c)),
]  # fmt: skip


@check(
    idea="Count the parameters, then ask for two instants, the loss and the optimizer's step: the larger is the peak.",
    section="The peak of a step: loss or optimizer",
    line="At the loss weights, optimizer, activations and 12sbV or 6sbV are held; in the step weights, optimizer and 4 or 8 "
    "bytes a parameter.",
)
def run_memory(answer: Callable[..., Mapping[str, float]], seed: int = 1) -> str:
    """Judge `run_memory(shape, optimizer, seq, batch, recompute, loss)`: bytes by term, for Llama shapes drawn at random."""
    for shape, optimizer, seq, batch, recompute, loss, truth in _draw_runs(_dice(seed)):
        given = _terms_of(answer, shape, optimizer, seq, batch, recompute, loss)
        case = f"{shape['layers']} layers, hidden {shape['hidden']}, {optimizer}, recompute {recompute}, {loss} loss"
        _judge_run(given, truth, shape, optimizer, seq, batch, recompute, loss, case)
        print(f"  {case}, s={seq}, b={batch}:\n    {truth['peak'] / 1e9:.1f} GB at the {truth['at']}")
    counted = ("lablib.calc.memory.", "lablib.calc.params.")
    if used := [name for name in getattr(answer, "called", ()) if name.startswith(counted)]:
        raise Wrong(f"The numbers are right, and {used[0].rpartition('.')[2]} of lablib has counted them: write down yourself "
                    "what is held at the loss and in the step.")  # fmt: skip
    return "You can compute the memory of a training run from model size and optimizer choice."


def _draw_runs(dice: random.Random) -> list[tuple]:
    """Draw a run for each optimizer and recomputation; the number of tokens alone does not say where the peak is."""
    while True:
        runs, tokens = [], {"loss": [], "step": []}
        for i, (optimizer, recompute) in enumerate(product(RUN_OPTIMIZERS, ("none", "full"))):
            at = ("loss", "step")[(i + i // 2) % 2]
            loss = ("eager", "megatron")[(i + i // 4) % 2]  # both at both instants
            shape, seq, batch, truth = _draw_run(dice, optimizer, recompute, loss, at)
            runs.append((shape, optimizer, seq, batch, recompute, loss, truth))
            tokens[truth["at"]].append(seq * batch)
        if min(tokens["loss"]) < max(tokens["step"]):
            return runs


def _draw_run(dice: random.Random, optimizer: str, recompute: str, loss: str, at: str) -> tuple[dict, int, int, dict]:
    """Draw a run whose peak is at that instant, whoever's loss it is, and in AdamW's step also if its roots are forgotten."""
    margin = 1.35 if at == "step" and optimizer == "adamw" else 1.1
    while True:
        kv_heads, group, head_dim = dice.choice((2, 4, 8)), dice.choice((2, 4, 8)), dice.choice((64, 128))
        hidden = 256 * dice.randrange(4, 25)
        shape = {
            "layers": dice.randrange(4, 65), "hidden": hidden, "heads": kv_heads * group, "kv_heads": kv_heads,
            "head_dim": head_dim, "ffn": 64 * dice.randrange(hidden // 32, hidden // 16),
            "vocab": dice.randrange(30_000, 260_000), "tied": dice.choice((True, False)),
        }  # fmt: skip
        seq, batch = dice.choice((512, 1024, 2048, 4096, 8192)), dice.choice((2, 3, 5, 8))
        least, most = (true_run(shape, optimizer, seq, batch, recompute, of) for of in ("megatron", "eager"))
        truth = most if loss == "eager" else least
        other = truth["step"] + truth["last"] if at == "loss" else most["loss"]
        if truth["at"] == at and least[at] > margin * other and hidden != kv_heads * group * head_dim:
            return shape, seq, batch, truth


def true_run(shape: Mapping, optimizer: str, seq: int, batch: int, recompute: str, loss: str) -> dict:
    """Return the bytes of a run by term, and the two instants of which the larger is the peak."""
    config = ModelConfig(
        name="drawn", num_layers=shape["layers"], hidden=shape["hidden"], num_heads=shape["heads"],
        num_kv_heads=shape["kv_heads"], head_dim=shape["head_dim"], ffn=shape["ffn"], vocab=shape["vocab"],
        tied=shape["tied"],
    )  # fmt: skip
    n, (moments, roots) = count_params(config).total, RUN_OPTIMIZERS[optimizer]
    block = layer_activations(config, batch=batch, seq=seq, recompute=recompute, attention="fused")
    found = {"parameters": n, "weights": 2 * n, "gradients": 2 * n, "optimizer": (4 + moments) * n}
    found |= {"activations": shape["layers"] * sum(block.values()), "logits": 4 * seq * batch * shape["vocab"]}
    states = found["weights"] + found["optimizer"]
    found["loss"] = (
        states + found["activations"] + seq * batch * (RUN_LOSSES[loss] * shape["vocab"] + 4 * shape["hidden"])
    )
    found["step"] = states + (4 + roots) * n
    # Where no roots come after it, the conversion to fp32 is the peak: the last gradient is there in both.
    found["last"] = 0 if roots else 2 * shape["vocab"] * shape["hidden"]
    return found | {"peak": max(found["loss"], found["step"]), "at": max(("loss", "step"), key=found.get)}


def _terms_of(answer: Callable[..., object], shape: Mapping, *case: object) -> Mapping[str, float]:
    """Return the learner's dictionary, or raise `Wrong` if it is not one of bytes."""
    try:
        given = answer(dict(shape), *case)  # a copy, so that an answer may take its entries out
    except (TypeError, AttributeError) as error:
        if "ModelConfig" not in str(error) and "'dict' object has no attribute" not in str(error):
            raise
        raise Wrong("`shape` is a dictionary of sizes, and the parameters are yours to count: the chapter's equation "
                    "has them term by term.") from None  # fmt: skip
    if not isinstance(given, Mapping):
        raise Wrong(f"Return a dictionary with {', '.join(TERMS)} and at, and not {type(given).__name__}.")
    missing = [term for term in (*TERMS, "at") if term not in given]
    if missing:
        raise Wrong(f"The dictionary has no {', '.join(missing)}.")
    return given


def _judge_run(
    given: Mapping, truth: Mapping, shape: Mapping, optimizer: str, s: int, b: int, recompute: str, loss: str, case: str
) -> None:
    tokens, layers, h, vocab, f = s * b, shape["layers"], shape["hidden"], shape["vocab"], shape["ffn"]
    q, k = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    widths = (h // shape["heads"], h / shape["heads"])  # what `head_dim` would be if the heads filled the hidden size
    cut = [(shape["heads"] * d, shape["kv_heads"] * d) for d in widths]
    n, table, block = truth["parameters"], vocab * h, truth["activations"] / layers
    states, rows = truth["weights"] + truth["optimizer"], 4 * shape["heads"] * tokens
    statistics = layers * rows if recompute == "none" else 0
    ends = 4 * tokens * h
    left_out = {"activations": (0, layers * rows), "peak": (0, ends, layers * rows, layers * rows + ends)}
    near = {"activations": layers * rows, "peak": layers * rows + ends}
    moments, roots = RUN_OPTIMIZERS[optimizer]
    slips = {
        "parameters": [
            ("Tied embeddings are one table, and the head is that table", n + table if shape["tied"] else 0),
            ("Embedding and head are two tables where they are not tied", 0 if shape["tied"] else n - table),
            ("The tables of embedding and head are missing", n - table * (1 if shape["tied"] else 2)),
            ("The norms are missing: 2h a block, and h at the end", n - (2 * layers + 1) * h),
            ("The norm at the end is missing, h parameters", n - h),
            ("A block has two norms of h parameters", n - layers * h),
            ("Keys and values have fewer heads than queries", n + 2 * layers * h * (q - k)),
            ("Heads times their width need not be the hidden size", n + 2 * layers * h * (h - q)),
            *(("`head_dim` is given, and heads times it need not be the hidden size: it is not hidden // heads",
               n + 2 * layers * h * (all_q - q + all_k - k)) for all_q, all_k in cut),
            ("A gated MLP has three matrices", n - layers * h * f),
            ("The output projection is missing, h by q", n - layers * h * q),
            *(("12h² a block is a GPT's: this shape has other widths", 12 * layers * h * h + of * table) for of in (0, 1, 2)),
        ],
        "weights": [("Weights are bf16, 2 bytes each", 4 * n)],
        "gradients": [("Gradients are bf16 when backward ends; only the step makes fp32 ones of them", 4 * n),
                      ("Every trained parameter has a gradient", 0)],
        "optimizer": [
            ("The fp32 master copy is missing, 4 bytes a parameter", truth["optimizer"] - 4 * n),
            ("Count this optimizer's own moments: not every one is AdamW", 12 * n),
            ("Moments are fp32, 4 bytes each", (4 + moments / 2) * n),
        ],
        "activations": [
            ("Full recomputation keeps the input of every block", 0),
            ("This is one layer; every layer keeps its own activations", block),
            ("Every sequence of the micro-batch keeps its own activations", truth["activations"] / b),
            ("34sbh is a GPT block's; a Llama block has other widths and no dropout", 34 * tokens * h * layers),
            ("Under full recomputation a block keeps its input alone", _llama(tokens, h, q, k, f) * layers),
            ("Keys and values are narrower than queries", _llama(tokens, h, q, q, f) * layers),
            ("The width of all query heads need not be the hidden size", _llama(tokens, h, h, k, f) * layers),
            *(("`head_dim` is given, and is not hidden // heads", _llama(tokens, h, *both, f) * layers) for both in cut),
            ("A gated MLP keeps three tensors of width f, gate, up, product",
             _llama(tokens, h, q, k, f * 2 / 3) * layers),
            ("A gated MLP keeps three tensors of width f, because a fused kernel applies the activation function again",
             _llama(tokens, h, q, k, f * 4 / 3) * layers),
            ("Values have 2 bytes", truth["activations"] / 2),
            ("Values are bf16, 2 bytes each", 2 * truth["activations"]),
        ],
        "logits": [
            ("The loss keeps logits in fp32, 4 bytes each", 2 * tokens * vocab),
            *(("The gradient of the logits belongs to the peak, not to what the loss keeps", of * tokens * vocab) for of in (6, 12)),
            ("Every token has logits, of all sequences of the micro-batch", 4 * s * vocab),
        ],
        "peak": [
            *(("No instant holds all: gradients come while activations go",
               states + truth["gradients"] + truth["activations"] + logits) for logits in (truth["logits"], 0)),
            ("The peak is the larger of two instants, and this is the smaller", min(truth["loss"], truth["step"])),
            *((f"{sentence}: at the loss a logit has {RUN_LOSSES[loss]} bytes here, and this is {of}",
               truth["loss"] + (of - RUN_LOSSES[loss]) * tokens * vocab) for sentence, of in _LOGITS),
            ("The optimizer's state stays on the device at the loss too", truth["loss"] - truth["optimizer"]),
            ("No gradient of a weight exists yet at the loss", truth["loss"] + 2 * n),
            ("In the step fp32 gradients take the place of the bf16 ones", truth["step"] + 2 * n),
            ("The optimizer reads fp32 gradients, 4 bytes each", truth["step"] - 2 * n),
            ("AdamW's default takes all roots at once, 4 bytes a parameter", truth["step"] - roots * n),
            ("In the step gradients are fp32, and AdamW's default makes roots beside them", states + 2 * n),
            ("This optimizer makes no roots: the fused kernel keeps them in registers, and SGD needs none",
             truth["step"] + (4 - roots) * n),
        ],
    }  # fmt: skip
    # What a kernel keeps beside the table is right with it and without it, and so are the inputs of norm and head.
    below = {"activations": statistics, "peak": (statistics + ends) * (truth["at"] == "loss")}
    above = {"peak": truth["last"] * (truth["at"] == "step")}
    for term in TERMS:
        value, right = given[term], truth[term]
        if close(value, right, rel=1e-6 if term == "parameters" else 2e-4):
            continue
        if right - below.get(term, 0) <= float(value) <= right + above.get(term, 0):
            continue
        for unit, size in (("GB", 1e9), ("GiB", 2**30), ("MB", 1e6), ("MiB", 2**20)):
            if term != "parameters" and close(value, right / size, rel=1e-4 + near.get(term, 0) / right):
                raise Wrong(f"{term}: Return bytes, not {unit} ({case}).")
        for loosely, (sentence, mistaken) in product((False, True), slips[term]):
            loose = (
                1e-4 + near.get(term, 0) / max(mistaken, 1) if loosely and mistaken and term != "parameters" else 1e-9
            )
            left = (0,) if loosely or not mistaken else left_out.get(term, (0,))
            if mistaken != right and any(close(value, mistaken - each, rel=loose) for each in left):
                raise Wrong(f"{term}: {sentence} ({case}).")
        raise Wrong(
            f"{term}: this mistake is not one that the check knows. {shape}, {optimizer}, s={s}, b={b}, recompute "
            f"{recompute}, {loss} loss gives {float(value):,.0f}, and should give {right:,.0f}."
        )
    said = str(given["at"]).lower()
    if truth["at"] not in said or all(word in said for word in ("loss", "step")):
        raise Wrong(f"at: say 'loss' or 'step', where the peak is; here it is not {given['at']!r} ({case}).")


_LOGITS = [
    ("Logits are held at the loss", 0),
    ("The gradient of the logits stands beside what the loss keeps", 4),
    *(("It matters whose loss it is, eager PyTorch's log-probabilities and two gradients, all in fp32, or Megatron's "
       "probabilities in fp32 and a gradient in bf16", of) for of in (2, 6, 8, 10, 12, 14, 16)),
]  # fmt: skip


def _llama(tokens: int, h: float, q: float, k: float, f: float) -> float:
    return tokens * (8 * h + 4 * q + 4 * k + 6 * f)
