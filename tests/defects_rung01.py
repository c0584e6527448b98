"""Planted defects for the checks of rung 01: each runs, keeps the units and types, and errs in one idea."""

# ruff: noqa: E731

from __future__ import annotations

import numpy as np

from lablib.calc.models import ModelConfig
from lablib.calc.params import count_params
from tests.planted import asked, listed, told

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
RUN_LOGIT = {"eager": 12, "megatron": 6}
MOMENTS = {"sgd": 0.0, "sgd-momentum": 4.0, "adamw": 8.0, "adamw-8bit": 2 + 8 / 256}


class bytes_per_parameter:
    def right(weights, gradients, master, optimizer):
        """Builds a list of buffers, then adds."""
        buffers = [BYTES[weights]]
        buffers += [BYTES[dtype] for dtype in gradients]
        buffers += [4] if master else []
        buffers += {"sgd": [], "sgd-momentum": [4], "adamw": [4, 4], "adamw-8bit": [1 + 1 / 64] * 2}[optimizer]
        return sum(buffers)

    forgot_the_master_copy = asked(right, master=False)
    forgot_the_gradients = asked(right, gradients=())
    counted_one_gradient_buffer = asked(right, gradients=lambda gradients: gradients[:1])
    always_two_fp32_moments = asked(right, optimizer="adamw")
    forgot_the_scales = told(right, lambda size, optimizer: size - 8 / 256 * (optimizer == "adamw-8bit"))
    no_master_copy_beside_fp32 = asked(right, master=lambda master, weights: master and weights != "fp32")

    def moments_in_the_dtype_of_the_weights(weights, gradients, master, optimizer):
        moments = {"sgd-momentum": 1, "adamw": 2}.get(optimizer, 0) * BYTES[weights]
        moments = MOMENTS[optimizer] if optimizer == "adamw-8bit" else moments
        return bytes_per_parameter.right(weights, gradients, master, "sgd") + moments

    forgot_the_master_copy_and_the_scales = told(
        right, lambda size, master, optimizer: size - 4 * master - 8 / 256 * (optimizer == "adamw-8bit")
    )
    two_mistakes = asked(right, gradients=lambda gradients: gradients[:1], master=False, optimizer="adamw")
    gradients_always_fp32 = asked(right, gradients=lambda gradients: ["fp32"] * len(gradients))
    always_sixteen = lambda weights, gradients, master, optimizer: 16
    weights_always_bf16 = asked(right, weights="bf16")
    gradients_always_bf16 = asked(right, gradients=lambda gradients: ["bf16"] * len(gradients))
    adamw_is_sixteen = told(right, lambda size, optimizer: 16 if optimizer == "adamw" else size)
    with_the_roots_of_the_step = told(right, lambda size, optimizer: size + 4 * ("adamw" in optimizer))

    def right_2(weights, gradients, master, optimizer):
        """In bits, with numpy, and divided at the end."""
        bits = np.array([BYTES[dtype] for dtype in (weights, *gradients)]).sum() * 8 + master * 32
        bits = bits + {"s": 0, "m": 32, "w": 64, "t": 2 * (8 + 32 / 256)}[optimizer[-1] if optimizer != "sgd" else "s"]
        return np.float32(bits / 8)


_SWAPPED = {"zero-1": "zero-2", "zero-2": "zero-1"}
_STAGES = {"ddp": 0, "zero-1": 1, "zero-2": 2, "zero-3": 3, "tensor": 3}


def _sharding(whole, by_stage):
    """Return an answer with so many bytes a parameter, of which each stage shards so many."""

    def answer(params, gpus, capacity_gib, strategy):
        sharded = by_stage[_STAGES[strategy]]
        needed = params * (whole - sharded + sharded / gpus)
        return needed / 1e9, needed <= capacity_gib * 2**30

    return answer


class fits:
    def right(params, gpus, capacity_gib, strategy):
        """Per-term divisors in a table; capacity turned into GB before comparing."""
        weights_by, gradients_by, optimizer_by = {
            "ddp": (1, 1, 1),
            "zero-1": (1, 1, gpus),
            "zero-2": (1, gpus, gpus),
            "zero-3": (gpus, gpus, gpus),
            "tensor": (gpus, gpus, gpus),
        }[strategy]
        gigabytes = (2 / weights_by + 2 / gradients_by + 12 / optimizer_by) * params / 1e9
        return gigabytes, gigabytes <= capacity_gib * 1.073741824

    stage_3_holds_what_it_gathers = told(
        right, lambda found, params, strategy: (found[0] + 2e-9 * params * (strategy == "zero-3"), found[1])
    )
    forgot_what_is_kept = told(
        right, lambda found, params, gpus, strategy: (params * ((0, 12, 14, 16)[_STAGES[strategy]] / gpus or 16) / 1e9, 0)
    )  # fmt: skip
    eight_bytes_of_optimizer = _sharding(12, (0, 8, 10, 12))
    gradients_of_four_bytes = _sharding(18, (0, 12, 16, 18))
    gib_for_gb = told(right, lambda found: (found[0] * 1e9 / 2**30, found[1]))
    compared_gb_with_gib = told(right, lambda found, capacity_gib: (found[0], found[0] <= capacity_gib))
    never_divided = asked(right, gpus=1)
    ddp_divides_too = asked(right, strategy="zero-3")
    swapped_stages_one_and_two = asked(right, strategy=lambda strategy: _SWAPPED.get(strategy, strategy))
    pooled_the_cards = told(
        right, lambda found, gpus, capacity_gib: (found[0], found[0] * 1e9 <= gpus * capacity_gib * 2**30)
    )
    answered_in_bytes = told(right, lambda found: (found[0] * 1e9, found[1]))
    stage_1_shards_the_moments_alone = _sharding(16, (0, 8, 10, 16))
    with_a_margin = told(right, lambda found, capacity_gib: (found[0], found[0] <= 0.9 * capacity_gib * 1.073741824))
    said_yes_in_words = told(right, lambda found: (found[0], "yes" if found[1] else "no"))
    every_stage_is_stage_1 = asked(right, strategy=lambda strategy: "zero-1" if "zero" in strategy else strategy)
    tensor_keeps_the_weights = asked(right, strategy=lambda strategy: "zero-2" if strategy == "tensor" else strategy)

    def right_3(params, gpus, capacity_gib, strategy):
        """Adds what each stage takes away, one after the other, and cuts the decimals off."""
        held = 16 * params
        for stage, size in enumerate((12, 2, 2), start=1):
            if strategy == "tensor" or strategy >= f"zero-{stage}":
                held -= size * params * (gpus - 1) / gpus
        return int(held / 1e9), int(held / 2**30 <= capacity_gib)

    def right_2(params, gpus, capacity_gib, strategy):
        """Whole GB, and a list; what is not sharded is what the strategy's number leaves."""
        stage = _STAGES[strategy]
        each = [12 * params, 2 * params, 2 * params]
        held = sum(-(-size // gpus) if i < stage else size for i, size in enumerate(each))
        return [round(held / 10**9), np.bool_(held / 2**30 <= capacity_gib)]


class block_activations:
    def right(seq, batch, hidden, heads, attention, recompute):
        """One tensor at a time, in values and masks, then bytes."""
        tokens = seq * batch
        if recompute == "full":
            return 2 * tokens * hidden
        # norms 2, QKV input 1, Q 1, K 1, V 1, output projection 1, MLP 1 + 4 + 4
        values, masks = tokens * hidden * 16, tokens * hidden * 2
        if attention == "plain":
            values += 2 * heads * seq * tokens
            masks += heads * seq * tokens
        return 2 * values + masks

    forgot_one_norm = told(
        right, lambda kept, seq, batch, hidden, recompute: kept - 2 * seq * batch * hidden * (recompute != "full")
    )
    masks_of_two_bytes = told(
        right, lambda kept, seq, batch, hidden, recompute: kept + 2 * seq * batch * hidden * (recompute != "full")
    )
    values_of_four_bytes = told(right, lambda kept: 2 * kept)
    scores_the_other_way_round = asked(
        right, attention=lambda attention: {"plain": "fused", "fused": "plain"}[attention]
    )
    softmax_output_alone = told(right, lambda kept, seq, batch, heads, attention, recompute:
                                kept - 3 * heads * seq * seq * batch * (attention == "plain" and recompute == "none"))  # fmt: skip

    def right_2(seq, batch, hidden, heads, attention, recompute):
        """As PyTorch keeps it: statistics of norms and of softmax too."""
        if recompute == "full":
            return 2 * seq * batch * hidden
        rows = 4 * batch * seq
        linear = 34 * seq * batch * hidden + 2 * 2 * rows
        return linear + (heads * rows if attention == "fused" else 5 * heads * seq**2 * batch)

    def right_3(seq, batch, hidden, heads, attention, recompute):
        """The equation, with its fraction."""
        factor = 2 if recompute == "full" else 34 + 5 * heads * seq / hidden * (attention == "plain")
        return seq * batch * hidden * factor

    counted_values_not_bytes = told(right, lambda kept: kept // 2)
    forgot_the_batch = asked(right, batch=1)
    scores_once_for_all_heads = asked(right, heads=1)
    no_scores = asked(right, attention="fused")
    fused_keeps_scores = asked(right, attention="plain")
    recomputation_keeps_everything = asked(right, recompute="none")

    def scores_outside_the_bracket(seq, batch, hidden, heads, attention, recompute):
        block = block_activations.right(seq, batch, hidden, heads, "fused", recompute)
        return block + 5 * heads * seq / hidden if (attention, recompute) == ("plain", "none") else block


def _run_held(memory, optimizer, logit, *, last=0):
    """Return a run with another peak: so many bytes a logit at the loss, and so many more in the step."""
    states = memory["weights"] + memory["optimizer"]
    loss = states + memory["activations"] + memory["logits"] * logit // 4
    step = states + (8 if optimizer == "adamw" else 4) * memory["parameters"] + last
    return memory | {"peak": max(loss, step), "at": "loss" if loss > step else "step"}


class run_memory:
    def right(shape, optimizer, seq, batch, recompute, loss):
        """Per layer and per token, with what kernels keep beside; the peak from a list of two."""
        h, heads, width = shape["hidden"], shape["heads"], shape["head_dim"]
        keys = shape["kv_heads"] * width
        matrices = [h * heads * width] * 2 + [h * keys] * 2 + [h * shape["ffn"]] * 3
        n = (sum(matrices) + h + h) * shape["layers"] + h + shape["vocab"] * h * (2 - shape["tied"])
        a_token = 2 * (4 * h + 2 * heads * width + 2 * keys + 3 * shape["ffn"]) + 4 * heads
        if recompute == "full":
            a_token = 2 * h
        kept = a_token * shape["layers"] * batch * seq
        state = 4 + {"adamw": 8, "adamw-fused": 8, "sgd-momentum": 4}.get(optimizer, 0)
        logits = batch * seq * shape["vocab"] * 4
        ends = 4 * batch * seq * h
        peaks = {
            "at the loss": (2 + state) * n + kept + logits * RUN_LOGIT[loss] / 4 + ends,
            "in the optimizer's step": (2 + state + 4 + 4 * (optimizer == "adamw")) * n,
        }
        names = ("parameters", "weights", "gradients", "optimizer", "activations", "logits", "peak", "at")
        at = max(peaks, key=peaks.get)
        return dict(zip(names, (n, 2 * n, 2 * n, state * n, kept, logits, peaks[at], at), strict=True))

    def right_2(shape, optimizer, seq, batch, recompute, loss):
        """In numpy; the statistics of softmax and the inputs of norm and head left out."""
        size = {name: np.int64(value) for name, value in shape.items()}
        h, q, k = size["hidden"], size["heads"] * size["head_dim"], size["kv_heads"] * size["head_dim"]
        block = h * (2 * q + 2 * k + 3 * size["ffn"] + 2)
        n = size["layers"] * block + h + size["vocab"] * h * (1 if shape["tied"] else 2)
        tokens = np.int64(seq * batch)
        wide = 8 * h + 4 * (q + k) + 6 * size["ffn"]
        kept = np.float64(size["layers"] * tokens * (2 * h if recompute == "full" else wide))
        held = {"adamw": 14, "adamw-fused": 14, "sgd-momentum": 10, "sgd": 6}[optimizer]
        at_loss = held * n + kept + {"eager": 12, "megatron": 6}[loss] * tokens * size["vocab"]
        step = (held + (8 if optimizer == "adamw" else 4)) * n
        return {
            "parameters": n, "weights": 2 * n, "gradients": 2 * n, "optimizer": (held - 2) * n, "activations": kept,
            "logits": 4 * tokens * size["vocab"], "peak": max(at_loss, step), "at": "Loss" if at_loss > step else "Step",
        }  # fmt: skip

    run_without_master = told(
        right, lambda memory: memory | {"optimizer": memory["optimizer"] - 4 * memory["parameters"]}
    )
    run_always_adamw = asked(right, optimizer="adamw")
    run_with_one_layer_of_activations = told(
        right, lambda memory, shape: memory | {"activations": memory["activations"] // shape["layers"]}
    )
    run_without_embeddings = asked(right, shape=lambda shape: shape | {"vocab": 0})
    run_of_12_h_squared = told(
        right, lambda memory, shape: memory | {"parameters": 12 * shape["layers"] * shape["hidden"] ** 2}
    )
    run_with_an_untied_head = asked(right, shape=lambda shape: shape | {"tied": False})
    run_with_keys_for_every_head = asked(right, shape=lambda shape: shape | {"kv_heads": shape["heads"]})

    def run_of_a_gpt_block(shape, optimizer, seq, batch, recompute, loss):
        block = block_activations.right(seq, batch, shape["hidden"], shape["heads"], "fused", recompute)
        return run_memory.right(shape, optimizer, seq, batch, recompute, loss) | {
            "activations": block * shape["layers"]
        }

    run_never_recomputes = asked(right, recompute="none")
    run_for_one_sequence = asked(right, batch=1)
    run_with_heads_that_fill_the_hidden_size = asked(
        right, shape=lambda shape: shape | {"head_dim": shape["hidden"] // shape["heads"]}
    )
    run_always_eager = asked(right, loss="eager")
    run_always_megatron = asked(right_2, loss="megatron")
    run_with_logits_in_both_dtypes = told(right_2, lambda memory, optimizer: _run_held(memory, optimizer, 10))
    run_without_the_gradient_of_logits = told(right_2, lambda memory, optimizer: _run_held(memory, optimizer, 4))

    def without_the_idea_of_instants(shape, optimizer, seq, batch, recompute, loss):
        """The states after backward, and activations on top; at the loss, unless they are recomputed."""
        memory = run_memory.right_2(shape, optimizer, seq, batch, recompute, loss)
        states = memory["weights"] + memory["gradients"] + memory["optimizer"]
        return memory | {"peak": states + memory["activations"], "at": "step" if recompute == "full" else "loss"}

    def without_the_idea_a_rule_of_thumb(shape, optimizer, seq, batch, recompute, loss):
        """Every number is right, and the instant follows from the length of the batch."""
        memory = run_memory.right_2(shape, optimizer, seq, batch, recompute, loss)
        return memory | {"at": "loss" if seq * batch > 8192 else "step"}

    def without_the_idea_the_calculator_counts(shape, optimizer, seq, batch, recompute, loss):
        sizes = {"num_layers": "layers", "hidden": "hidden", "num_heads": "heads", "num_kv_heads": "kv_heads"}
        sizes |= {name: name for name in ("head_dim", "ffn", "vocab", "tied")}
        config = ModelConfig(name="drawn", **{name: shape[ours] for name, ours in sizes.items()})
        memory = run_memory.right_2(shape, optimizer, seq, batch, recompute, loss)
        return memory | {"parameters": count_params(config).total}

    def right_4(shape, optimizer, seq, batch, recompute, loss):
        """In the step the last bf16 gradient stands beside its fp32 copy, where no roots come after it."""
        last = 2 * shape["vocab"] * shape["hidden"] * (optimizer != "adamw")
        memory = run_memory.right_2(shape, optimizer, seq, batch, recompute, loss)
        return _run_held(memory, optimizer, RUN_LOGIT[loss], last=last)

    run_without_gradients = told(right, lambda memory: memory | {"gradients": 0})
    run_with_16_bit_logits = told(right, lambda memory: memory | {"logits": memory["logits"] // 2})

    run_that_adds_everything = told(
        right, lambda memory: memory | {"peak": sum(memory[t] for t in ("weights", "gradients", "optimizer", "activations", "logits"))}
    )  # fmt: skip
    run_at_the_wrong_instant = told(right, lambda memory: memory | {"at": "step" if memory["at"] == "loss" else "loss"})
    run_without_roots = asked(right, optimizer=lambda optimizer: "adamw-fused" if optimizer == "adamw" else optimizer)
    run_that_keeps_nothing = told(
        right, lambda memory, recompute: memory | {"activations": memory["activations"] * (recompute != "full")}
    )
    run_with_16_bit_moments = told(
        right, lambda memory: memory | {"optimizer": 2 * memory["parameters"] + memory["optimizer"] // 2}
    )
    run_without_optimizer_at_the_loss = told(
        right, lambda memory: memory | {"peak": memory["peak"] - memory["optimizer"] * (memory["at"] == "at the loss")}
    )

    run_with_four_tensors_of_the_mlp = told(
        right, lambda memory, shape, seq, batch, recompute: memory
        | {"activations": memory["activations"] + 2 * seq * batch * shape["ffn"] * shape["layers"] * (recompute == "none")}
    )  # fmt: skip

    def right_3(shape, optimizer, seq, batch, recompute, loss):
        """Takes the entries out of the dictionary, and loops over tensors."""
        layers, h, f, vocab = (shape.pop(name) for name in ("layers", "hidden", "ffn", "vocab"))
        queries, keys, width, tied = (shape.pop(name) for name in ("heads", "kv_heads", "head_dim", "tied"))
        found = dict.fromkeys(("parameters", "activations"), 0)
        for _ in range(layers):
            for rows, columns in ((h, queries * width), (h, keys * width), (h, f), (h, 1)):
                found["parameters"] += 2 * rows * columns
            found["parameters"] += h * f
            for kept in (h,) if recompute == "full" else (4 * h, 2 * queries * width, 2 * keys * width, 3 * f):
                found["activations"] += 2 * kept * seq * batch
        n = found["parameters"] = found["parameters"] + h + vocab * h * (1 if tied else 2)
        found["weights"] = found["gradients"] = 2 * n
        found["optimizer"] = 4 * n * (1 + optimizer.startswith("adamw") * 2 + (optimizer == "sgd-momentum"))
        found["logits"] = seq * batch * vocab * 4
        always = found["weights"] + found["optimizer"]
        at_loss, step = always + found["activations"] + found["logits"] // 4 * RUN_LOGIT[loss], always + 4 * n
        step += 4 * n if optimizer == "adamw" else 0
        return found | ({"peak": at_loss, "at": "loss"} if at_loss > step else {"peak": step, "at": "step"})

    run_in_gb = told(right, lambda memory: {t: v if t in ("parameters", "at") else v / 1e9 for t, v in memory.items()})
    run_summed_up = told(right, lambda memory: memory["peak"])

    def run_with_the_count_of_lablib(shape, optimizer, seq, batch, recompute, loss):
        return {"parameters": count_params(shape).total}


DEFECTS, SECOND_SOLUTIONS = listed(bytes_per_parameter, fits, block_activations, run_memory)

#: What the sentence about a defect must say.
SENTENCES = {
    "forgot_the_master_copy_and_the_scales": "An fp32 master copy costs 4 bytes",
    "run_with_heads_that_fill_the_hidden_size": "it is not hidden // heads",
    "run_always_eager": "whose loss it is", "run_always_megatron": "at the loss a logit has 12",
    "run_with_logits_in_both_dtypes": "two gradients, all in fp32", "run_without_the_gradient_of_logits": "stands beside what",
    "without_the_idea_of_instants": "No instant holds all", "without_the_idea_a_rule_of_thumb": "at: say",
    "without_the_idea_the_calculator_counts": "count_params of lablib has counted",
    "no_master_copy_beside_fp32": "beside fp32 weights too", "forgot_the_master_copy": "costs 4 bytes beside the working weights",
    "moments_in_the_dtype_of_the_weights": "whatever the dtype of the weights",
    "gradients_always_bf16": "not always 2 bytes", "adamw_is_sixteen": "one recipe's", "run_of_12_h_squared": "is a GPT's",
    "with_the_roots_of_the_step": "roots that AdamW's step makes", "forgot_what_is_kept": "a share of the rest",
    "stage_3_holds_what_it_gathers": "unit by unit", "forgot_the_scales": "a 4-byte scale per 256 values", "two_mistakes": "There is another mistake beside it",
    "answered_in_bytes": "The number is in bytes", "stage_1_shards_the_moments_alone": "the master copy with the moments",
    "gradients_of_four_bytes": "Gradients are 16-bit here", "with_a_margin": "No reserve is asked for", "compared_gb_with_gib": "GB were compared with GiB",
    "said_yes_in_words": "should be True or False", "pooled_the_cards": "not with that of all",
    "swapped_stages_one_and_two": "Stages shard in this order", "eight_bytes_of_optimizer": "12 bytes: the master copy",
    "scores_outside_the_bracket": "s b h multiplies", "no_scores": "an s by s matrix for every head",
    "forgot_one_norm": "2sbh are missing", "masks_of_two_bytes": "1 byte a value, not 2, and a block's output",
    "softmax_output_alone": "three s by s tensors a head", "forgot_the_batch": "Every sequence",
    "run_in_gb": "Return bytes, not GB", "run_summed_up": "Return a dictionary", "run_with_the_count_of_lablib": "yours to count", "run_without_master": "The fp32 master copy is missing",
    "run_always_adamw": "not every one is AdamW", "gradients_always_fp32": "not always 4 bytes",
    "weights_always_bf16": "is not always 2 bytes", "always_sixteen": "the same in every case", "every_stage_is_stage_1": "Each stage divides more",
    "tensor_keeps_the_weights": "Tensor parallelism splits a matrix", "values_of_four_bytes": "and not 4",
    "scores_the_other_way_round": "the other way round", "run_with_16_bit_moments": "Moments are fp32",
    "run_that_keeps_nothing": "Full recomputation keeps the input", "run_with_four_tensors_of_the_mlp": "three tensors",
    "run_without_optimizer_at_the_loss": "stays on the device at the loss too", "run_without_embeddings": "tables of embedding and head",
    "run_with_an_untied_head": "one table", "run_with_keys_for_every_head": "fewer heads than queries",
    "run_of_a_gpt_block": "34sbh is a GPT block's", "run_never_recomputes": "a block keeps its input alone",
    "run_for_one_sequence": "Every sequence", "run_with_16_bit_logits": "fp32, 4 bytes each",
    "run_that_adds_everything": "No instant holds all", "run_at_the_wrong_instant": "say 'loss' or 'step'",
    "run_without_roots": "all roots at once",
}  # fmt: skip
