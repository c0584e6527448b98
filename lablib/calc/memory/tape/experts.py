"""Experts of Hugging Face's classes as lines of a tape: Mixtral's and Qwen3-MoE's, in the two ways that they run.

n tokens visit k of E experts of inner width f; S = k n pairs of a token and an expert.

| | "grouped": `grouped_mm`, the default of transformers | "loop": `experts_implementation="eager"` |
|---|---|---|
| order | pairs sorted by expert, one product for all | one expert after the other, with its own tokens |
| tokens | S copies, made at once | copies of one expert's tokens at a time; all of them are kept |
| autocast | does not know `grouped_mm`: experts run in fp32 | casts each expert's weights, and keeps the casts |
| gradient of the weights | one, made at once | each expert makes zeros for all E, and adds them up |

Either keeps numbers of a pair: the token, `2 f` behind gate and up, SiLU, the product, and what the expert made,
`2 h + 4 f`. The loop keeps `h` more: `index_add_` holds what it adds, for its shape. Beside them are indices. All of
these are sums over pairs, so what is kept does not depend on how many tokens each expert gets.

Source: transformers, models/mixtral/modeling_mixtral.py, models/qwen3_moe/modeling_qwen3_moe.py, integrations/moe.py.
"""

from __future__ import annotations

from lablib.calc.memory.tape.operators import Eager
from lablib.calc.memory.tape.setting import FP32, INT64, BlockSetting
from lablib.calc.memory.tape.tape import NEW, NONE, SHARED, Value


def routed_experts(e: Eager, s: BlockSetting, x: Value) -> Value:
    """Return what the experts make of the tokens: the weighted sum of each token's."""
    logits, weights, chosen = _router(e, s, x)
    y = (_grouped if s.experts == "grouped" else _loop)(e, s, x, weights, chosen)
    for variable in (logits, weights, chosen):  # of the frame around both
        e.tape.use(variable)
    return y


def _router(e: Eager, s: BlockSetting, x: Value) -> tuple[Value, Value, Value]:
    """Return logits, the weights of the chosen experts, which sum to one if the model says so, and their numbers."""
    c, pairs = s.config, s.tokens * s.config.experts_per_token
    logits = e.linear(x, c.hidden, c.num_experts, kind="mlp", name="router", label="logits of the router")
    full = e.cast(logits, FP32, "logits of the router in fp32")
    shares = e.function("softmax of the router", full, kind="router", keeps_output=True, label="shares of the experts")
    chosen = e.make("numbers of the chosen experts", [], pairs, INT64)
    zeros = s.tokens * c.num_experts * FP32  # into a copy of which a dispatch mode scatters the gradients of the chosen
    weights = e.make(
        "top k", [shares], pairs, FP32, keeps=[chosen], kind="router", traced_temporary=zeros, label="chosen shares"
    )
    if c.router is None or c.router.normalized:
        total = e.make("sum of the chosen", [weights], s.tokens, FP32, label="sums of the chosen")
        # In place, so that backward needs a copy of what was there.
        weights = e.make(
            "divide by the sum",
            [weights, total],
            pairs,
            FP32,
            view=True,
            keeps=[total],
            extra=pairs * FP32,
            kind="router",
            backward_temporary=2 * pairs * FP32,
        )
    if c.family not in s.implementation.wide_routing:
        weights = e.cast(weights, e.item[logits])
    for variable in (logits, shares):
        e.tape.use(variable)
    return logits, weights, chosen


def _index(e: Eager, name: str, x: Value, rows: Value, numbers: int, kind: str, label: str) -> Value:
    """Return rows of x; backward writes their gradients into zeros, or into a copy of these under a dispatch mode."""
    return e.make(
        name,
        [x, rows],
        numbers,
        e.item[x],
        keeps=[rows],
        gradient=[NEW, NONE],
        kind=kind,
        traced_temporary=x.bytes,
        label=label,
    )


def _weighted(e: Eager, y: Value, weights: Value) -> Value:
    """Return y times one number a pair. Backward makes both products whole, casts the one and then sums the other.

    What it kept is there until then, unless a replay made it: a checkpoint hands a tensor out, and forgets it.
    """
    item = max(e.item[y], e.item[weights])
    temporary = e.numbers(y) * item
    if e.item[y] < item:
        temporary += e.numbers(y) * item - weights.bytes - (y.bytes if e.tape.recomputing else 0)
    return e.make(
        "weights of the experts",
        [y, weights],
        e.numbers(y),
        item,
        keeps=[y, weights],
        kind="experts",
        backward_temporary=temporary,
        label="weighted outputs",
    )


def _grouped(e: Eager, s: BlockSetting, x: Value, weights: Value, chosen: Value) -> Value:
    c, kind = s.config, "experts"
    h, f, pairs = c.hidden, c.expert_ffn, s.tokens * c.experts_per_token

    def product(name: str, y: Value, inputs: int, outputs: int) -> Value:
        # Not an operator of autocast: what goes in gets the dtype of the weights.
        y, numbers = e.cast(y, s.value), c.num_experts * inputs * outputs
        return e.make(
            name,
            [y],
            pairs * outputs,
            s.value,
            keeps=[y, ends],
            weight_gradient=numbers * e.gradient,
            low_gradient=numbers * s.value if s.value != e.gradient else 0,
            kind=kind,
            label=f"output of {name}",
        )

    ordered = e.make("sort by expert", [chosen], pairs, INT64, label="experts in order")
    order = e.make("order of the pairs", [chosen], pairs, INT64, label="order of the pairs")
    rows = e.make("rows of the tokens", [order], pairs, INT64, label="rows of the tokens")
    copies = _index(e, "copy tokens", x, rows, pairs * h, kind, "copies of tokens")
    own = _index(e, "order the weights", weights, order, pairs, kind, "weights in order")
    counted = e.make("experts as fp32", [ordered], pairs, FP32)  # for a histogram, on a CPU
    ends = e.make("ends of the groups", [counted], c.num_experts, FP32)
    both = product("gate and up of the experts", copies, h, 2 * f)
    gate, up = e.split(both, [pairs * f] * 2)
    inner = e.function("SiLU", gate, kind=kind, label="output of SiLU")
    inner = e.times(inner, up, kind=kind, name="SiLU(gate) × up", label="SiLU(gate) × up")
    made = product("down of the experts", inner, f, h)
    weighted = _weighted(e, made, own)
    back = e.make("order back", [order], pairs, INT64, temporary=pairs * INT64, label="order back")
    returned = _index(e, "back to the tokens", weighted, back, pairs * h, kind, "weighted outputs by token")
    y = e.make("sum of a token's experts", [returned], s.tokens * h, e.item[returned])
    y = e.cast(y, e.item[x])
    for variable in (ordered, order, copies, own, counted, ends, made, returned, back):
        e.tape.use(variable)
    return y


def _loop(e: Eager, s: BlockSetting, x: Value, weights: Value, chosen: Value) -> Value:
    c, kind = s.config, "experts"
    h, f, pairs = c.hidden, c.expert_ffn, s.tokens * c.experts_per_token
    parameters: dict[str, Value] = {}

    def product(name: str, y: Value, inputs: int, outputs: int) -> Value:
        size, item = inputs * outputs, s.low or e.item[y]
        if name not in parameters:
            # Of all experts at once; it is counted elsewhere, and its gradient is the sum of what experts send.
            all_of_them = e.make(
                f"all {name}",
                [],
                c.num_experts * size,
                s.value,
                weight_gradient=c.num_experts * size * e.gradient,
                becomes_gradient=True,
            )
            parameters[name] = all_of_them
            e.tape.given.append(all_of_them)
        part = e.make(f"{name} of one expert", [parameters[name]], size, s.value, view=True)
        y, part = e.cast(y, item), e.cast(part, item, f"{name} in 16 bits")
        if s.low and s.low != s.value:
            e.tape.kinds[part] = "weight_casts"  # of no leaf: autocast's cache takes none of them
        tokens = e.numbers(y) // inputs
        return e.make(name, [y, part], tokens * outputs, item, keeps=[y, part], kind=kind, label=f"output of {name}")

    total = e.make("zeros", [], s.tokens * h, e.item[x], label="sums of the experts")
    mask = e.make("experts as one-hot", [chosen], pairs * (c.num_experts + 1), INT64)
    hit = e.make("experts with tokens", [mask], c.num_experts, INT64)
    before: list[Value] = []  # variables of the expert before, until the next one has made its own
    for expert in range(c.num_experts):
        tokens = pairs // c.num_experts + (expert < pairs % c.num_experts)
        places = e.make("tokens of one expert", [mask], 2 * tokens, INT64, label="rows and columns")
        state = _index(e, "copy tokens", x, places, tokens * h, kind, "copies of tokens")
        for variable in before[:1]:
            e.tape.use(variable)
        both = product("gate and up", state, h, 2 * f)
        gate, up = e.split(both, [tokens * f] * 2)
        inner = e.function("SiLU", gate, kind=kind, label="output of SiLU")
        inner = e.times(inner, up, kind=kind, name="SiLU(gate) × up", label="SiLU(gate) × up")
        for variable in before[1:]:
            e.tape.use(variable)
        made = product("down", inner, f, h)
        own = _index(e, "weights of one expert", weights, places, tokens, kind, "weights of one expert")
        weighted = _weighted(e, made, own)
        added = e.cast(weighted, e.item[x])
        total = e.make(
            "add to the tokens",
            [total, added],
            s.tokens * h,
            e.item[x],
            view=True,
            keeps=[places, added],  # for its shape alone
            gradient=[SHARED, NEW],
            kind=kind,
        )
        before = [state, weighted]
    for variable in (mask, hit, *before):
        e.tape.use(variable)
    return total
