"""Worked exercises of rung 08, mixed precision."""

from __future__ import annotations

import torch
import torch.distributed as dist
from lablib.launch.precision import product_error, through


def what_breaks(name, activation, gradients, scale, weight, update, master):
    """Range above, range below, and precision: each is asked of a cast."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[name]

    def cast(value):
        return torch.tensor(value, dtype=torch.float64).to(dtype)

    smallest, largest = gradients
    broken = set()
    if cast(activation).isinf() or cast(scale * largest).isinf():
        broken.add("overflow")
    if cast(scale * smallest) == 0:
        broken.add("underflow")
    if not master and cast(weight + update) == weight:
        broken.add("stall")
    return broken


def train_step(model, optimizer, schedule, scaler, micro_batches, max_norm):
    """Average what still carries the scale, so that all ranks see one."""
    optimizer.zero_grad()
    for x, y in micro_batches:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x, y)
        scaler.scale(loss / len(micro_batches)).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    before = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() >= before:  # it falls if the step was skipped
        schedule.step()


def through_cast(x, dtype=torch.bfloat16):
    """Whether x has the bits of the dtype alone, whatever its own is."""
    return torch.equal(x, x.to(dtype).to(x.dtype))


def lost_bits(job):
    """All four phases on every rank, and the first with too few bits."""
    model, found = job.model(), []

    def look(tensors, phase, dtype=torch.bfloat16):
        for name, x in tensors:
            if through_cast(x, dtype):
                found.append((name.removesuffix(".weight"), phase))

    for name, part in model.named_modules():
        if name.endswith(("norm", "router")):  # meant to be fp32
            part.register_forward_hook(
                lambda part, args, y, name=name: look([(name, y)], "forward")
            )
    job.loss(model).backward()
    named = list(model.named_parameters())
    gradients = [(name, p.grad) for name, p in named]
    look(gradients, "backward", torch.float16)
    job.average(model)
    gradients = [(name, p.grad) for name, p in named]
    look(gradients, "average")
    job.update(model)
    look(named, "update")
    return found[0] if found else None


def block_recipe(units, layers, limit):
    """The fewest bits whose worst of three matmuls is good enough."""
    bits = {"nvfp4": 4.5, "mxfp8": 8.25, "fp8": 8, "bf16": 16}
    formats, kept = {}, 0
    for name, (x, w, g) in layers.items():
        formats[name] = "bf16"
        for candidate in ("nvfp4", "fp8", "mxfp8"):  # by bits
            # Rows lie along the dim that is summed over, so w and x are turned.
            forward = through(candidate, x) @ through(candidate, w).T
            g_in = through(candidate, g, gradient=True)
            of_input = g_in @ through(candidate, w.T).T
            g_out = through(candidate, g.T, gradient=True)
            of_weight = g_out @ through(candidate, x.T).T
            worst = max(
                product_error(forward, x @ w.T),
                product_error(of_input, g @ w),
                product_error(of_weight, g.T @ x),
            )
            if candidate in units and worst <= limit:
                formats[name] = candidate
                break
        form = formats[name]
        kept += x.numel() * bits[form] / 8 + 4 * (form in ("nvfp4", "fp8"))
    return {"formats": formats, "kept": kept}
