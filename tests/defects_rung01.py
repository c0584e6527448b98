"""Planted defects for the checks of rung 01: each runs, keeps the units and types, and errs in one idea."""

# ruff: noqa: E731

from __future__ import annotations

import dataclasses
import enum
import functools

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from lablib.calc.models import ModelConfig
from lablib.calc.params import count_params
from lablib.calc.precision import recipe
from lablib.launch.measure import LiveBytes, measure_states
from tests.planted import asked, listed, told

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
RUN_LOGIT = {"eager": 12, "megatron": 6}
OWN = enum.Enum("OWN", {name: name for name in ("loss", "step", "forward", "backward", "update", "clear")}, type=str)
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
    forgot_momentum = asked(right, optimizer=lambda optimizer: "sgd" if optimizer == "sgd-momentum" else optimizer)
    a_set_of_dtypes = asked(right, gradients=lambda gradients, weights: [g for g in gradients if g != weights])
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
    weights_always_fp32 = asked(right, weights="fp32")
    forgot_the_weights = told(right, lambda size, weights: size - BYTES[weights])
    forgot_the_moments = asked(right, optimizer="sgd")
    forgot_the_moments_of_adamw = asked(right, optimizer=lambda optimizer: "sgd" if optimizer == "adamw" else optimizer)
    with_a_master_copy_of_two = told(right, lambda size, master: size - 2 * master)
    gradients_always_bf16 = asked(right, gradients=lambda gradients: ["bf16"] * len(gradients))
    adamw_is_sixteen = told(right, lambda size, optimizer: 16 if optimizer == "adamw" else size)
    with_an_fp32_sum = told(right, lambda size, gradients: size + 4 * ("fp32" not in gradients))
    with_six_for_a_master_copy = told(right, lambda size, master: size + 2 * master)
    with_fp32_gradients = told(right, lambda size, gradients, master: size + 4 * (master and "fp32" not in gradients))
    with_the_roots_of_the_step = told(right, lambda size, optimizer: size + 4 * ("adamw" in optimizer))

    with_roots_of_momentum_too = told(right, lambda size, optimizer: size + 4 * (optimizer != "sgd"))
    with_an_fp32_copy_of_fp16_gradients = told(right, lambda size, gradients: size + 4 * ("fp16" in gradients))
    with_two_bytes_more = told(right, lambda size: size + 2)
    first_gradient_or_master_copy = told(right, lambda size, gradients, master: size - BYTES[gradients[0]] * master)
    one_fp32_gradient = asked(right, gradients=["fp32"])
    master_copy_of_16_bit_weights = asked(right, master=lambda weights: weights != "fp32")
    with_k_of_twelve = told(right, lambda size, optimizer: size + 4 * (optimizer == "adamw"))
    with_two_master_copies = told(right, lambda size, master: size + 4 * master)
    a_short_mean = told(right, lambda size, weights, optimizer: size - (4 - BYTES[weights]) * (optimizer == "adamw"))
    with_fp32_for_a_master = asked(right, gradients=lambda gradients, master: ["fp32"] if master else gradients)
    without_a_first_of_several = asked(right, gradients=lambda gradients: gradients[1:] or gradients)
    weights_twice = told(right, lambda size, weights: size + BYTES[weights])

    def without_the_idea_lablib_adds_up(weights, gradients, master, optimizer):
        sizes = [BYTES[dtype] for dtype in gradients]
        held = {"weights": BYTES[weights], "gradients": sizes[0], "accumulation": sum(sizes[1:]), "master": 4 * master}
        return dataclasses.replace(recipe("fp32"), **held).bytes_per_param(optimizer)

    def without_the_idea_a_table(weights, gradients, master, optimizer):
        """Rows of what lablib said beforehand, up to two buffers of gradients."""
        return bytes_per_parameter.right(weights, gradients, master, optimizer) if len(gradients) < 3 else 16

    def right_2(weights, gradients, master, optimizer):
        """In bits, with numpy, and divided at the end."""
        bits = np.array([BYTES[dtype] for dtype in (weights, *gradients)]).sum() * 8 + master * 32
        bits = bits + {"s": 0, "m": 32, "w": 64, "t": 2 * (8 + 32 / 256)}[optimizer[-1] if optimizer != "sgd" else "s"]
        return np.float32(bits / 8)


def _search(order=None, share=None, clear=True, lasting=True, loss_of=sum, fresh=False, lines=None, **how):
    """Return somebody who takes the first choice that fits, of sequences at a time and blocks that run again or not."""

    def train(model, batches, adamw, device):
        make = lambda: adamw(model.parameters(), **how or {"fused": True})
        optimizer, own, losses = make(), [lines(block) if lines else block.forward for block in model.blocks], []
        choices = order or [(size, again) for again in (False, True) for size in range(6, 0, -1)]

        def passes(batch, size, again):
            for block, run in zip(model.blocks, own, strict=True):
                block.forward = functools.partial(checkpoint, run, use_reentrant=False) if again else run
            parts, found = batch.split(size), []
            for part in parts:
                weight = share(part, parts) if share else len(part) / len(batch)
                loss = model.loss(part)
                (loss * weight).backward()
                found.append(loss.item() * len(part) / len(batch))
            return loss_of(found)

        for batch in batches:
            for choice in choices:
                try:
                    losses.append(passes(batch, *choice))
                    break
                except torch.OutOfMemoryError:
                    if not lasting and losses:
                        raise
                if clear:
                    optimizer.zero_grad()
            else:
                losses.append(passes(batch, 1, True))
            choices = choices[choices.index(choice):]  # fmt: skip
            optimizer.step()
            optimizer.zero_grad()
            optimizer = make() if fresh else optimizer
        return losses

    return train


class train_within:
    no_care = _search([(6, False)], foreach=True)
    one_sequence_at_a_time = _search([(1, False)])
    without_the_idea_the_least_of_everything = _search([(1, True)])
    without_the_idea_the_least_without_replays = _search([(1, False), (1, True)])
    recomputes_first = _search([(size, again) for size in range(6, 0, -1) for again in (False, True)],
                               lines=lambda b: lambda x: x + b.down(torch.nn.functional.gelu(b.up(x))))  # fmt: skip
    never_tries_one = _search([(size, again) for again in (False, True) for size in range(6, again < 1, -1)])
    an_optimizer_of_its_own = lambda model, batches, adamw, device: _search()(model, batches, torch.optim.AdamW, device)
    a_model_in_bf16 = lambda model, *more: _search()(model.bfloat16(), *more)
    under_autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)(_search())
    without_the_idea_four_constants = _search([(6, False), (3, False), (2, False), (2, True)])
    halves_the_batch = _search([(size, again) for again in (False, True) for size in (6, 3, 1)])
    step_of_a_gpu = _search(foreach=True)
    sums_the_micro_batches = _search(share=lambda part, parts: 1)
    all_micro_batches_alike = _search(share=lambda part, parts: 1 / len(parts))
    keeps_what_an_attempt_left = _search(clear=False)
    settled_in_the_first_step = _search(lasting=False)
    loss_of_the_last_part = _search(loss_of=lambda found: found[-1])
    an_optimizer_each_step = _search(fresh=True)
    another_rate = _search(fused=True, lr=3e-4)
    another_decay = _search(fused=True, weight_decay=0)
    other_betas = _search(fused=True, betas=(0.9, 0.95))
    clips = _search(share=lambda part, parts: 0.31 * len(part) / 6)
    trains_the_blocks_alone = lambda model, batches, adamw, device: _search()(
        model, batches, lambda _, **how: adamw(model.blocks.parameters(), **how), device)  # fmt: skip

    def sets_the_capacity(model, batches, adamw, device):
        device.capacity = 10**12
        return _search([(6, False)])(model, batches, adamw, device)

    def tries_for_ever(model, batches, *_):
        while True:
            model.loss(batches[0][:1])

    def retries_inside_the_except_clause(model, batches, adamw, device):
        optimizer, losses = adamw(model.parameters(), fused=True), []

        def passes(batch, size):
            total = 0.0
            if not size:
                raise torch.OutOfMemoryError("not even one")
            try:
                for part in batch.split(size):
                    loss = model.loss(part) * (len(part) / 6)
                    loss.backward()
                    total += loss.item()
            except torch.OutOfMemoryError:
                optimizer.zero_grad()
                return passes(batch, size // 2)
            return total

        for batch in batches:
            losses.append(passes(batch, 6))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    def steps_after_each_part(model, batches, adamw, device):
        optimizer, losses = adamw(model.parameters(), foreach=False), []
        for batch in batches:
            losses.append(0)
            for part in batch:
                loss = model.loss(part[None])
                loss.backward()
                losses[-1] += loss.item() / 6
                optimizer.step()
                optimizer.zero_grad()
        return losses

    def right(model, batches, adamw, device):
        """Measures ever more sequences first, twice, and adds the moments that are not there yet; passes in a closure."""
        optimizer = adamw(model.parameters(), foreach=False)
        weights, own = device.live, [block.forward for block in model.blocks]

        def run(part, again):
            for block, plain in zip(model.blocks, own, strict=True):
                block.forward = functools.partial(checkpoint, plain, use_reentrant=False) if again else plain
            loss = model.loss(part)
            (loss * len(part) / 6).backward()
            return loss.item() * len(part) / 6

        def fitting(again):
            for size in range(1, 7):
                optimizer.zero_grad()
                device.peak = device.live
                try:
                    for _ in range(2 if size < 6 else 1):
                        run(batches[0][:size], again)
                except torch.OutOfMemoryError:
                    return size - 1
                if device.peak + 2 * weights > device.capacity:
                    return size - 1
            return size

        found = [(fitting(again), again) for again in (False, True)]
        size, again = found[0] if found[0][0] else found[1]
        losses = []
        for batch in batches:
            model.zero_grad()
            losses.append(optimizer.step(lambda batch=batch: sum(run(part, again) for part in batch.split(size))))
        return np.array(losses)

    def right_2(model, batches, adamw, device):
        """Fewer and fewer passes of nearly equal size, each loss given as it comes; the table as a function."""
        optimizer = adamw(list(model.parameters()), fused=True)
        parts, kept = 1, [block.forward for block in model.blocks]
        for batch in batches:
            done = False
            while not done:
                try:
                    total = sum(self_backward(model, part, len(batch)) for part in np.array_split(batch, parts))
                    done = True
                except torch.OutOfMemoryError:
                    total = None
                if not done:
                    optimizer.zero_grad(set_to_none=True)
                    parts += 1
                    if parts > len(batch):
                        parts = 1
                        for block, forward in zip(model.blocks, kept, strict=True):
                            block.forward = functools.partial(checkpoint, forward, use_reentrant=False)
            optimizer.step()
            optimizer.zero_grad()
            yield total


def self_backward(model, part, sequences):
    part = torch.as_tensor(part)
    stream = torch.nn.functional.embedding(part[:, :-1], model.tokens.weight)
    logits = torch.nn.Sequential(*model.blocks, model.head)(stream).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, part[:, 1:].flatten()) * (len(part) / sequences)
    loss.backward()
    return float(loss.detach())


def _measured(job, held=lambda live: (live.live, live.peak)):
    """Return for each step and part what this rank holds, at the end and at most, and the same of the other rank."""
    job.start()
    mine = {}
    with LiveBytes() as live:
        for step in range(job.steps):
            for part in job.parts:
                live.peak = live.live
                getattr(job, part)(step)
                mine[step, part] = held(live)
    both = [None] * dist.get_world_size()
    dist.all_gather_object(both, mine)
    return mine, both[1 - dist.get_rank()]


def _over(job, more=lambda mine, other: mine > other, parts=("forward", "backward", "update", "clear"), **how):
    """Return the diagnosis of somebody who finds the first of these parts of which this is true."""
    mine, other = _measured(job, **how)
    for step, part in mine:
        if part in parts and any(map(more, mine[step, part], other[step, part])):
            left = [mine[later, "clear"][0] - other[later, "clear"][0] for later in range(step, job.steps)]
            return part, step, left[-1] > left[0]
    return None


class find_surplus:
    every_job_is_well = lambda job: None
    the_first_rank_is_ill = lambda job: ("forward", 1, True) if dist.get_rank() == 0 else None
    any_difference = lambda job: _over(job, lambda mine, other: mine != other)
    without_the_idea_between_steps = lambda job: _over(job, parts=("clear",))
    without_the_idea_held_alone = lambda job: _over(job, held=lambda live: (live.live,))
    without_the_idea_peaks_alone = lambda job: _over(job, held=lambda live: (live.peak,))

    def without_the_idea_of_another_rank(job):
        """Looks for what grows here."""
        mine, _ = _measured(job)
        peaks = [mine[step, "forward"][1] for step in range(job.steps)]
        step = next((step for step in range(1, job.steps) if peaks[step] > peaks[step - 1]), None)
        return None if step is None else ("forward", step, True)

    def states_alone(job):
        """Weighs weights, gradients and moments, and nothing that autograd or a log has."""
        return _over(job, held=lambda live: (sum(measure_states(job.model, job.optimizer).values()),))

    never_grows = lambda job: (found := _over(job)) and (*found[:2], False)
    always_grows = lambda job: (found := _over(job)) and (*found[:2], True)
    counts_steps_from_one = lambda job: (found := _over(job)) and (found[0], found[1] + 1, found[2])
    names_the_last_step = lambda job: (found := _over(job)) and (found[0], job.steps - 1, found[2])
    where_it_was_made = lambda job: (found := _over(job)) and ("forward" if found[2] else found[0], *found[1:])

    def right(job):
        """Give the other rank a tensor, and read from the end which part was the first."""
        mine, other = (np.array(list(rows.values())) for rows in _measured(job))
        over = (mine > other).any(1)
        if not over.any():
            return None
        step, part = divmod(int(over.argmax()), 4)
        left = (mine - other)[3::4, 0][step:]
        return [OWN(job.parts[part]), np.int64(step), np.bool_(left[-1] > left[1] > 0 and left[1] > left[0])]

    def right_2(job):
        """Reduce the least of both ranks number by number, and see whether what a step leaves gets more by one more step."""
        job.start()
        names = [(part, step) for step in range(job.steps) for part in job.parts]
        rows = []
        with LiveBytes() as live:
            for part, step in names:
                live.peak = live.live
                getattr(job, part)(step=step)
                rows += [live.live, live.peak]
        least = torch.tensor(rows)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        over = (torch.tensor(rows) - least).tolist()
        for i, name in enumerate(names):
            if over[2 * i] or over[2 * i + 1]:
                return *name, over[-2] > over[-10] > 0


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
        block = (2 if recompute == "full" else 34) * seq * batch * shape["hidden"]
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
    run_with_a_buffer_of_gradients = told(right_2, lambda memory: memory | {
        "peak": memory["peak"] + 2 * memory["gradients"] * (memory["at"] == "Loss")})  # fmt: skip
    run_that_keeps_logits_in_both_dtypes = told(right_2, lambda memory: memory | {"logits": memory["logits"] * 1.5})
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
        """In the step the last bf16 gradient stands beside its fp32 copy; every kernel's statistics count."""
        last = 2 * shape["vocab"] * shape["hidden"]
        memory = run_memory.right(shape, optimizer, seq, batch, recompute, loss)
        memory["activations"] += 8 * shape["layers"] * seq * batch * (recompute == "none")
        return _run_held(memory, optimizer, RUN_LOGIT[loss], last=last)

    without_the_idea_a_table_of_instants = told(right_2, lambda memory, optimizer, recompute: memory | {
        "at": "loss" if (optimizer in ("sgd-momentum", "adamw-fused")) != (recompute == "full") else "step"})  # fmt: skip
    run_of_one_token_less = asked(right_2, seq=lambda seq: seq - 1)
    run_with_one_moment = told(
        right, lambda memory, optimizer: memory | {"optimizer": memory["optimizer"] - 4 * memory["parameters"] * ("adamw" in optimizer)}
    )  # fmt: skip
    run_with_fp32_gradients_in_the_optimizer = told(
        right, lambda memory: memory | {"optimizer": memory["optimizer"] + 4 * memory["parameters"]}
    )
    run_without_parameters = told(right, lambda memory: memory | {"parameters": 0})
    run_with_logits_of_one_sequence = told(right, lambda memory, batch: memory | {"logits": memory["logits"] // batch})
    run_without_gradients = told(right, lambda memory: memory | {"gradients": 0})
    run_with_16_bit_logits = told(right, lambda memory: memory | {"logits": memory["logits"] // 2})

    run_that_adds_everything = told(
        right, lambda memory: memory | {"peak": sum(memory[t] for t in ("weights", "gradients", "optimizer", "activations", "logits"))}
    )  # fmt: skip
    run_at_the_wrong_instant = told(right, lambda memory: memory | {"at": "step" if memory["at"] == "loss" else "loss"})
    run_without_roots = asked(right, optimizer=lambda optimizer: "adamw-fused" if optimizer == "adamw" else optimizer)
    run_that_drops_activations = told(right, lambda memory, recompute: memory
        | {"peak": memory["peak"] - memory["activations"] * (recompute == "full" and memory["at"] == "at the loss")})  # fmt: skip
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
        return found | ({"peak": at_loss, "at": OWN.loss} if at_loss > step else {"peak": step, "at": OWN.step})

    right_5 = told(right_2, lambda memory: memory | {t: np.float32(memory[t]) for t in ("activations", "peak")})
    run_that_keeps_outputs_too = told(right_2, lambda memory, recompute: memory | {
        "activations": memory["activations"] * (1 + (recompute == "full"))})  # fmt: skip
    run_with_two_masters = told(right_2, lambda memory: memory | {"peak": memory["peak"] + 4 * memory["parameters"]})
    run_in_gb = told(right, lambda memory: {t: v if t in ("parameters", "at") else v / 1e9 for t, v in memory.items()})
    run_summed_up = told(right, lambda memory: memory["peak"])

    def run_with_the_count_of_lablib(shape, optimizer, seq, batch, recompute, loss):
        return {"parameters": count_params(shape).total}


DEFECTS, SECOND_SOLUTIONS = listed(bytes_per_parameter, train_within, find_surplus, run_memory)

#: What the sentence about a defect must say.
SENTENCES = {
    "master_copy_of_16_bit_weights": "Where there is no master copy it costs 0",
    **dict.fromkeys(("with_roots_of_momentum_too", "with_an_fp32_copy_of_fp16_gradients", "with_two_bytes_more",
                     "first_gradient_or_master_copy", "one_fp32_gradient", "weights_twice", "a_short_mean",
                     "with_fp32_for_a_master", "without_a_first_of_several"), "This mistake is not one"),
    "with_k_of_twelve": "K = 12 has the master copy", "with_two_master_copies": "counts once",
    "other_betas": "Leave betas", "run_with_fp32_gradients_in_the_optimizer": "not 12 in all",
    "with_an_fp32_sum": "lets them go", "with_six_for_a_master_copy": "A master copy is fp32", "with_fp32_gradients": "lets them go", "clips": "nothing clips", "trains_the_blocks_alone": "train all weights",
    "run_with_a_buffer_of_gradients": "Megatron's buffer", "run_that_keeps_logits_in_both_dtypes": "no bf16 value",
    "no_care": "without that it fits", "one_sequence_at_a_time": "passes, and",
    "never_tries_one": "without that it fits", "without_the_idea_four_constants": "without that it fits",
    "without_the_idea_a_table": "This mistake is not one", "under_autocast": "in fp32",
    "step_of_a_gpu": "inside of the optimizer's step", "settled_in_the_first_step": "moments are there too",
    "retries_inside_the_except_clause": "inside of the except clause", "sums_the_micro_batches": "times those of the whole batch",
    "all_micro_batches_alike": "counts by its sequences", "keeps_what_an_attempt_left": "an attempt that stopped",
    "loss_of_the_last_part": "Return the loss of each batch", "an_optimizer_each_step": "one AdamW, its moments",
    "without_the_idea_the_least_of_everything": "without that it fits", "recomputes_first": "without that it fits",
    "without_the_idea_the_least_without_replays": "passes, and", "halves_the_batch": "passes, and",
    "sets_the_capacity": "the memory that it has", "tries_for_ever": "never ends",
    "steps_after_each_part": "18 steps for 3 batches (", "without_the_idea_between_steps": "at its end or at its most.", "any_difference": "Both ranks accuse",
    "without_the_idea_held_alone": "read the peak of each part", "without_the_idea_of_another_rank": "Both ranks accuse",
    "every_job_is_well": "", "the_first_rank_is_ill": "accused", "never_grows": "more and more", "always_grows": "does not grow",
    "counts_steps_from_one": "has the number 0", "names_the_last_step": "not from 5.", "where_it_was_made": "alive until backward anyway",
    "forgot_the_master_copy_and_the_scales": "This mistake is not one",
    "run_with_heads_that_fill_the_hidden_size": "it is not hidden // heads",
    "run_always_eager": "whose loss it is", "run_always_megatron": "at the loss a logit has 12",
    "run_with_logits_in_both_dtypes": "two gradients, all in fp32", "run_without_the_gradient_of_logits": "stands beside what",
    "without_the_idea_of_instants": "No instant holds all", "without_the_idea_a_rule_of_thumb": "at: say",
    "without_the_idea_a_table_of_instants": "at: say", "run_with_one_moment": "and 8 of this optimizer's fp32 moments, not 8",
    "run_without_parameters": "not one that the check knows", "run_with_logits_of_one_sequence": "Every token has logits",
    "forgot_momentum": "one fp32 buffer", "a_set_of_dtypes": "has bytes of its own",
    "without_the_idea_the_calculator_counts": "count_params of lablib was called",
    "no_master_copy_beside_fp32": "beside fp32 weights too", "forgot_the_master_copy": "costs 4 bytes beside the working weights",
    "moments_in_the_dtype_of_the_weights": "whatever the dtype of the weights",
    "gradients_always_bf16": "not always 2 bytes", "adamw_is_sixteen": "one recipe's", "run_of_12_h_squared": "is a GPT's",
    "with_the_roots_of_the_step": "roots of the step are no model states",
    "forgot_the_scales": "a 4-byte scale per 256 values", "two_mistakes": "This mistake is not one",
    "run_that_keeps_outputs_too": "its input alone, in bf16", "run_with_two_masters": "Another mistake may",
    "run_in_gb": "Return bytes, not GB", "run_summed_up": "Return a dictionary", "run_with_the_count_of_lablib": "yours to count", "run_without_master": "of fp32 master copy and 4 of this optimizer's",
    "run_always_adamw": "not 12 in all", "gradients_always_fp32": "not always 4 bytes",
    "weights_always_bf16": "is not always 2 bytes", "weights_always_fp32": "A weight has its own dtype, and is not always 4",
    "forgot_the_weights": "beside a master copy too", "forgot_the_moments": "by every optimizer but plain SGD", "forgot_the_moments_of_adamw": "AdamW keeps two fp32 moments, 8 bytes",
    "with_a_master_copy_of_two": "A master copy is fp32", "an_optimizer_of_its_own": "`adamw` begins 0 steps", "a_model_in_bf16": "in fp32",
    "run_that_drops_activations": "not one that the check knows", "always_sixteen": "the same in every case",
    "run_with_16_bit_moments": "and 4 of this optimizer's fp32 moments, not 6",
    "run_that_keeps_nothing": "Full recomputation keeps the input", "run_with_four_tensors_of_the_mlp": "three tensors",
    "run_without_optimizer_at_the_loss": "stays on the device at the loss too", "run_without_embeddings": "tables of embedding and head",
    "run_with_an_untied_head": "one table", "run_with_keys_for_every_head": "fewer heads than queries",
    "run_of_a_gpt_block": "34sbh is a GPT block's", "run_never_recomputes": "a block keeps its input alone",
    "run_for_one_sequence": "Every sequence", "run_with_16_bit_logits": "fp32, 4 bytes each",
    "run_that_adds_everything": "No instant holds all", "run_at_the_wrong_instant": "say 'loss' or 'step'",
    "run_without_roots": "all roots at once", "run_of_one_token_less": "not one that the check knows",
    "without_the_idea_lablib_adds_up": "a function of lablib was called", "another_rate": "its default lr", "another_decay": "at their defaults",
}  # fmt: skip
