"""Planted defects for the checks of rung 01: each runs, keeps the units and types, and errs in one idea."""

# ruff: noqa: E731

from __future__ import annotations

from lablib.calc.params import count_params
from tests.planted import listed

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
MOMENTS = {"sgd": 0.0, "sgd-momentum": 4.0, "adamw": 8.0, "adamw-8bit": 2 + 8 / 256}


class bytes_per_parameter:
    def forgot_the_master_copy(weights, gradients, master, optimizer):
        return bytes_per_parameter.right(weights, gradients, False, optimizer)

    def forgot_the_gradients(weights, gradients, master, optimizer):
        return bytes_per_parameter.right(weights, (), master, optimizer)

    def counted_one_gradient_buffer(weights, gradients, master, optimizer):
        return bytes_per_parameter.right(weights, gradients[:1], master, optimizer)

    def always_two_fp32_moments(weights, gradients, master, optimizer):
        return bytes_per_parameter.right(weights, gradients, master, "adamw")

    def forgot_the_scales(weights, gradients, master, optimizer):
        if optimizer == "adamw-8bit":
            return bytes_per_parameter.right(weights, gradients, master, "sgd") + 2
        return bytes_per_parameter.right(weights, gradients, master, optimizer)

    def no_master_copy_beside_fp32(weights, gradients, master, optimizer):
        return bytes_per_parameter.right(weights, gradients, master and weights != "fp32", optimizer)

    def right(weights, gradients, master, optimizer):
        """Builds a list of buffers, then adds."""
        buffers = [BYTES[weights]]
        buffers += [BYTES[dtype] for dtype in gradients]
        buffers += [4] if master else []
        buffers += {"sgd": [], "sgd-momentum": [4], "adamw": [4, 4], "adamw-8bit": [1 + 1 / 64] * 2}[optimizer]
        return sum(buffers)


class fits:
    def eight_bytes_of_optimizer(params, gpus, capacity_gib, strategy):
        sharded = {"ddp": 0, "zero-1": 8, "zero-2": 10, "zero-3": 12, "tensor": 12}[strategy]
        needed = params * (12 - sharded + sharded / gpus)
        return needed / 1e9, needed <= capacity_gib * 2**30

    def gib_for_gb(params, gpus, capacity_gib, strategy):
        gigabytes, verdict = fits.right(params, gpus, capacity_gib, strategy)
        return gigabytes * 1e9 / 2**30, verdict

    def compared_gb_with_gib(params, gpus, capacity_gib, strategy):
        gigabytes, _ = fits.right(params, gpus, capacity_gib, strategy)
        return gigabytes, gigabytes <= capacity_gib

    def never_divided(params, gpus, capacity_gib, strategy):
        return fits.right(params, 1, capacity_gib, strategy)

    def ddp_divides_too(params, gpus, capacity_gib, strategy):
        return fits.right(params, gpus, capacity_gib, "zero-3")

    def swapped_stages_one_and_two(params, gpus, capacity_gib, strategy):
        other = {"zero-1": "zero-2", "zero-2": "zero-1"}.get(strategy, strategy)
        return fits.right(params, gpus, capacity_gib, other)

    def pooled_the_cards(params, gpus, capacity_gib, strategy):
        gigabytes, _ = fits.right(params, gpus, capacity_gib, strategy)
        return gigabytes, gigabytes * 1e9 <= gpus * capacity_gib * 2**30

    def answered_in_bytes(params, gpus, capacity_gib, strategy):
        gigabytes, verdict = fits.right(params, gpus, capacity_gib, strategy)
        return gigabytes * 1e9, verdict

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


class block_activations:
    def counted_values_not_bytes(seq, batch, hidden, heads, attention, recompute):
        return block_activations.right(seq, batch, hidden, heads, attention, recompute) // 2

    def forgot_the_batch(seq, batch, hidden, heads, attention, recompute):
        return block_activations.right(seq, 1, hidden, heads, attention, recompute)

    def scores_once_for_all_heads(seq, batch, hidden, heads, attention, recompute):
        return block_activations.right(seq, batch, hidden, 1, attention, recompute)

    def no_scores(seq, batch, hidden, heads, attention, recompute):
        return block_activations.right(seq, batch, hidden, heads, "fused", recompute)

    def fused_keeps_scores(seq, batch, hidden, heads, attention, recompute):
        return block_activations.right(seq, batch, hidden, heads, "plain", recompute)

    def recomputation_keeps_everything(seq, batch, hidden, heads, attention, recompute):
        return block_activations.right(seq, batch, hidden, heads, attention, "none")

    def scores_outside_the_bracket(seq, batch, hidden, heads, attention, recompute):
        block = block_activations.right(seq, batch, hidden, heads, "fused", recompute)
        return block + 5 * heads * seq / hidden if (attention, recompute) == ("plain", "none") else block

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


class run_memory:
    def run_without_master(config, optimizer, seq, batch):
        memory = run_memory.right(config, optimizer, seq, batch)
        return memory | {"optimizer": memory["optimizer"] - 4 * count_params(config).total}

    run_always_adamw = lambda config, optimizer, seq, batch: run_memory.right(config, "adamw", seq, batch)

    def run_with_one_layer_of_activations(config, optimizer, seq, batch):
        memory = run_memory.right(config, optimizer, seq, batch)
        return memory | {"activations": memory["activations"] // config.num_layers}

    def run_without_embeddings(config, optimizer, seq, batch):
        params = config.num_layers * (12 * config.hidden**2 + 13 * config.hidden)
        activations = run_memory.right(config, optimizer, seq, batch)["activations"]
        return {
            "weights": 2 * params,
            "gradients": 2 * params,
            "optimizer": (4 + MOMENTS[optimizer]) * params,
            "activations": activations,
        }

    def run_without_gradients(config, optimizer, seq, batch):
        return run_memory.right(config, optimizer, seq, batch) | {"gradients": 0}

    run_for_one_sequence = lambda config, optimizer, seq, batch: run_memory.right(config, optimizer, seq, 1)

    def run_with_scores(config, optimizer, seq, batch):
        block = block_activations.right(seq, batch, config.hidden, config.num_heads, "plain", "none")
        return run_memory.right(config, optimizer, seq, batch) | {"activations": block * config.num_layers}

    def run_without_masks(config, optimizer, seq, batch):
        memory = run_memory.right(config, optimizer, seq, batch)
        return memory | {"activations": 32 * seq * batch * config.hidden * config.num_layers}

    def run_in_gb(config, optimizer, seq, batch):
        return {term: size / 1e9 for term, size in run_memory.right(config, optimizer, seq, batch).items()}

    def run_summed_up(config, optimizer, seq, batch):
        return sum(run_memory.right(config, optimizer, seq, batch).values())

    def run_with_the_whole_report(config, optimizer, seq, batch):
        memory = run_memory.right(config, optimizer, seq, batch)
        return memory | {"weights": 2 * count_params(config)}

    def right(config, optimizer, seq, batch):
        """Counts parameters by hand: 12 h² + 13 h a block, tables, final norm."""
        h, layers = config.hidden, config.num_layers
        params = layers * (12 * h**2 + 13 * h) + config.vocab * h + config.max_positions * h + 2 * h
        return {
            "weights": params + params,
            "gradients": 2 * params,
            "optimizer": params * (4 + MOMENTS[optimizer]),
            "activations": seq * batch * h * 34 * layers,
        }


DEFECTS, SECOND_SOLUTIONS = listed(bytes_per_parameter, fits, block_activations, run_memory)

#: What the sentence about a defect must say.
SENTENCES = {
    "no_master_copy_beside_fp32": "also beside fp32 weights",
    "forgot_the_master_copy": "costs 4 bytes beside the working weights",
    "answered_in_bytes": "The number is in bytes", "scores_outside_the_bracket": "s b h multiplies",
    "no_scores": "an s by s matrix for every head", "run_with_scores": "does not keep the scores",
    "run_without_masks": "A dropout mask is kept too", "run_in_gb": "Return bytes, not GB",
    "run_summed_up": "Return a dictionary", "run_with_the_whole_report": "count_params(config).total",
}  # fmt: skip
