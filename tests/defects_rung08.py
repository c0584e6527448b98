"""Planted defects of rung 08: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import contextlib
import copy
import enum
import math
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from lablib.checks import rung08
from lablib.launch.precision import product_error, through
from tests.planted import listed, told

_LARGEST = {"fp16": 65504.0, "bf16": 3.3895e38}
_SUBNORMAL = {"fp16": 2.0**-24, "bf16": 2.0**-133}
_NORMAL = {"fp16": 2.0**-14, "bf16": 2.0**-126}
_BITS = {"fp16": 10, "bf16": 7}


def _broken(
    name,
    activation,
    gradients,
    scale,
    weight,
    update,
    master,
    *,
    largest=_LARGEST,
    smallest=_SUBNORMAL,
    gap=0.5,
    bits=_BITS,
    relative=True,
    signed=True,
    on_activation=1.0,
    on_large=None,
    on_small=None,
    cures=None,
):
    low, high = gradients
    broken = set()
    large = high * (scale if on_large is None else on_large)
    if activation * (scale if on_activation == "scale" else 1) > largest[name] or large > largest[name]:
        broken.add("overflow")
    if low * (scale if on_small is None else on_small) < smallest[name] / 2:
        broken.add("underflow")
    power = 2.0 ** (math.frexp(weight)[1] - 1) if relative else 1.0
    if (abs(update) if signed else update) < gap * power * 2.0 ** -bits[name] and not (
        master if cures is None else cures
    ):
        broken.add("stall")
    return broken


#: Cases and jobs as an earlier run of the check has them: the first weight of a job tells which one it is.
SEEN = {case: rung08._truth(case) for case in rung08._situations(random.Random(88), 250)}
_FIRST = (-0.300781, 0.020874, -0.001427, -0.010986, -0.059082, 0.269531, -0.213867, 0.625, 0.527344)
_LAYERS = rung08._layers(8080)


class what_breaks:
    bf16_with_the_range_of_fp16 = lambda *case: _broken(*case, largest=dict.fromkeys(_LARGEST, 65504.0))

    def no_subnormals_at_all(*case):
        return _broken(*case, smallest={name: 2 * least for name, least in _NORMAL.items()})

    a_whole_gap = lambda *case: _broken(*case, gap=1.0)
    bf16_as_precise_as_fp16 = lambda *case: _broken(*case, bits=dict.fromkeys(_BITS, 10))
    fp16_as_coarse_as_bf16 = lambda *case: _broken(*case, bits=dict.fromkeys(_BITS, 7))
    a_negative_update_is_a_small_one = lambda *case: _broken(*case, signed=False)
    scales_activations_too = lambda *case: _broken(*case, on_activation="scale")
    scaling_only_helps = lambda *case: _broken(*case, on_large=1.0)
    a_master_copy_does_not_help = lambda *case: _broken(*case, cures=False)
    without_the_idea_bf16_never_breaks = lambda name, *case: set() if name == "bf16" else _broken(name, *case)
    asks_the_check = lambda *case: rung08._truth(case)
    a_list_of_cases = lambda *case: SEEN.get(case, set())
    fp16_never_stalls = lambda name, *case: _broken(name, *case) - ({"stall"} if name == "fp16" else set())

    def right(name, activation, gradients, scale, weight, update, master):
        """Second solution: let PyTorch cast, from fp64."""
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[name]

        def held(value):
            return torch.tensor(value, dtype=torch.float64).to(dtype)

        low, high = (held(g * scale) for g in gradients)
        checks = {
            "overflow": bool(torch.isinf(held(activation)) or torch.isinf(high)),
            "underflow": bool(low == 0),
            "stall": not master and bool(held(weight + update) == held(weight)),
        }
        return [failure for failure, there in checks.items() if there]

    def right_2(name, activation, gradients, scale, weight, update, master):
        """By the table of the chapter: edges half a gap beyond the last number and half of the smallest one."""
        bits, top = {"fp16": (10, 15), "bf16": (7, 127)}[name]
        infinite_from = 2.0 ** (top + 1) * (1 - 2.0 ** -(bits + 2))
        zero_up_to = 2.0 ** (1 - top - bits - 1)
        low, high = gradients
        broken = set()
        if max(activation, scale * high) >= infinite_from:
            broken |= {"overflow"}
        if scale * low <= zero_up_to:
            broken |= {"underflow"}
        gap = 2.0 ** (math.floor(math.log2(abs(weight))) - bits)
        if abs(update) < gap / 2 and not master:
            broken |= {"stall"}
        return frozenset(broken)

    def right_3(name, activation, gradients, scale, weight, update, master):
        """A generator, over numpy's casts; bf16 is fp32 with the lower half of its bits rounded away."""

        def held(value):
            with np.errstate(over="ignore"):
                single = np.array(value, dtype=np.float64).astype(np.float32)
                if name == "fp16":
                    return float(np.float16(value))
            bits = int(single.view(np.uint32))
            upper = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
            return float(np.array(upper, dtype=np.uint32).view(np.float32))

        if held(activation) == math.inf or held(gradients[1] * scale) == math.inf:
            yield "overflow"
        if held(gradients[0] * scale) == 0:
            yield "underflow"
        if not master and held(weight + update) == weight:
            yield "stall"

    def names_without_end(*case):
        while True:
            yield "overflow"

    def right_4(name, activation, gradients, scale, weight, update, master):
        """Members of an Enum of words, and limits from PyTorch."""
        info = torch.finfo({"fp16": torch.float16, "bf16": torch.bfloat16}[name])
        low, high = (scale * gradient for gradient in gradients)
        gap = 2.0 ** math.floor(math.log2(abs(weight))) * info.eps
        breaks = {
            _Failure.OVERFLOW: max(activation, high) > info.max,
            _Failure.UNDERFLOW: low <= info.smallest_normal * info.eps / 2,
            _Failure.STALL: not master and abs(update) < gap / 2,
        }
        return {failure for failure in _Failure if breaks[failure]}


class _Failure(str, enum.Enum):  # noqa: UP042
    OVERFLOW, UNDERFLOW, STALL = "overflow", "underflow", "stall"


def _mean_over_ranks(model, *_, dtype=torch.float32, then=torch.Tensor.float):
    for parameter in model.parameters():
        dist.all_reduce(total := parameter.grad.to(dtype))
        parameter.grad = then(total / dist.get_world_size()).float()


def _clip_and_step(model, optimizer, schedule, scaler, max_norm):
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    if norm.isfinite():
        schedule.step()


def _step(
    model, optimizer, schedule, scaler, micro_batches, max_norm, *, dtype=torch.float16, parts=None, scales=True, inside=None,
    average=_mean_over_ranks, unscale=True, clips=torch.nn.utils.clip_grad_norm_, early=None, clears=True, decides=True,
    counts="taken",
):  # fmt: skip
    if clears:
        optimizer.zero_grad()
    for x, y in micro_batches:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            loss = model(x, y) / (parts or len(micro_batches))
        (scaler.scale(loss) if scales else loss).backward()
        if inside:
            inside(model, optimizer, scaler)
    if early:
        early(model, optimizer, scaler)
    average(model)
    if unscale:
        scaler.unscale_(optimizer)
    clips(model.parameters(), max_norm)
    if decides:
        scaler.step(optimizer)
    else:
        optimizer.step()
    before = scaler.get_scale()
    if unscale or decides:
        scaler.update()
    if counts == "always" or scaler.get_scale() >= before:
        schedule.step()


def _unscale(model, optimizer, scaler):
    scaler.unscale_(optimizer)


class train_step:
    # All of it right in fp32: nothing overflows, nothing vanishes, and nothing is in 16 bits.
    without_the_idea_all_in_fp32 = lambda *case: _step(*case, dtype=torch.float32)
    in_bf16 = lambda *case: _step(*case, dtype=torch.bfloat16)
    clips_before_it_unscales = lambda *case: _step(*case, unscale=False)
    unscales_before_it_averages = lambda *case: _step(*case, early=_unscale, unscale=False)
    sums_micro_batches = lambda *case: _step(*case, parts=1)
    sums_ranks = lambda *case: _step(*case, average=lambda model: [dist.all_reduce(p.grad) for p in model.parameters()])
    own_gradient_alone = lambda *case: _step(*case, average=lambda model: None)
    never_scales_the_loss = lambda *case: _step(*case, scales=False)
    # Autocast in fp16, and its gradients as they are: the small ones are zero.
    without_a_scaler = lambda model, optimizer, schedule, scaler, *case: _step(
        model, optimizer, schedule, torch.amp.GradScaler("cpu", enabled=False), *case
    )
    never_unscales = lambda *case: _step(*case, unscale=False, decides=False)
    steps_whatever_comes = lambda *case: _step(*case, decides=False)
    never_clips = lambda *case: _step(*case, clips=lambda *_: None)

    def lengthens_too(*case):
        def clip(parameters, max_norm):
            gradients = [p.grad for p in parameters]
            norm = torch.nn.utils.get_total_norm(gradients)
            [g.mul_(max_norm / norm) for g in gradients]

        _step(*case, clips=clip)

    never_clears = lambda *case: _step(*case, clears=False)
    counts_a_skipped_step = lambda *case: _step(*case, counts="always")

    def updates_in_every_micro_batch(model, optimizer, schedule, scaler, micro_batches, max_norm):
        _step(model, optimizer, schedule, scaler, micro_batches, max_norm)
        for _ in micro_batches[1:]:
            scaler.unscale_(optimizer)
            scaler.update()

    def steps_in_every_micro_batch(model, optimizer, schedule, scaler, micro_batches, max_norm):
        for each in micro_batches:
            _step(model, optimizer, schedule, scaler, [each], max_norm)

    def clears_in_every_micro_batch(model, optimizer, schedule, scaler, micro_batches, max_norm):
        _step(model, optimizer, schedule, scaler, micro_batches[-1:], max_norm, parts=len(micro_batches))

    def runs_backward_after_the_loop(model, optimizer, schedule, scaler, micro_batches, max_norm):
        optimizer.zero_grad()
        for x, y in micro_batches:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(x, y) / len(micro_batches)
        scaler.scale(loss).backward()
        _step(model, optimizer, schedule, scaler, [], max_norm, clears=False)

    # Right, and three averages where one will do.
    averages_in_every_micro_batch = lambda *case: _step(*case, inside=_mean_over_ranks, average=lambda model: None)

    averages_in_bf16 = lambda *case: _step(*case, average=lambda model: _mean_over_ranks(model, dtype=torch.bfloat16))
    averages_in_fp64 = lambda *case: _step(*case, average=lambda model: _mean_over_ranks(model, dtype=torch.float64))

    def zeroes_infinities(*case):
        _step(*case, early=lambda model, *_: [p.grad.nan_to_num_(0, 0, 0) for p in model.parameters()])

    def calls_the_model_and_trains_in_fp32(model, *case):
        with torch.autocast("cpu", dtype=torch.float16):
            model(*case[3][0]).backward()
        loss = lambda x, y: F.mse_loss(F.linear(torch.tanh(F.linear(x, model.up.weight)), model.down.weight), y)
        loss.parameters = model.parameters
        _step(loss, *case, dtype=torch.float32)

    rounds_the_mean = lambda *case: _step(*case, average=lambda m: _mean_over_ranks(m, then=torch.Tensor.bfloat16))

    rounds_before_the_mean = lambda *case: _step(
        *case, early=lambda model, *_: [p.grad.copy_(p.grad.bfloat16()) for p in model.parameters()]
    )
    right_4 = lambda *case: _step(*case, parts=6, average=lambda m: [dist.all_reduce(p.grad) for p in m.parameters()])

    def halves_by_hand(model, optimizer, schedule, scaler, *case):
        """The count of good steps goes on."""

        def average(model):
            _mean_over_ranks(model)
            if not all(p.grad.isfinite().all() for p in model.parameters()):
                scaler.update(scaler.get_scale() / 2)
                raise StopIteration

        with contextlib.suppress(StopIteration):
            _step(model, optimizer, schedule, scaler, *case, average=average)

    def knows_which_to_skip(model, optimizer, schedule, *case):
        schedule.calls = getattr(schedule, "calls", 0) + 1
        then = torch.Tensor.float if schedule.calls in (4, 6) else lambda g: g.nan_to_num(0, 0, 0)
        _step(model, optimizer, schedule, *case, average=lambda m: _mean_over_ranks(m, then=then))

    # Weights go through fp16, which loses small updates, and back.
    half_model = lambda model, *case: _step(model, *case) or model.half()

    def right(model, optimizer, schedule, scaler, micro_batches, max_norm):
        """Second solution: PyTorch's DDP, which averages in the last backward."""
        replica = DDP(model, init_sync=False)
        optimizer.zero_grad(set_to_none=False)
        for k, (x, y) in enumerate(micro_batches):
            replica.require_backward_grad_sync = k == len(micro_batches) - 1
            with torch.autocast("cpu", dtype=torch.float16):
                loss = replica(x, y) / len(micro_batches)
            scaler.scale(loss).backward()
        _clip_and_step(model, optimizer, schedule, scaler, max_norm)

    def right_2(model, optimizer, schedule, scaler, micro_batches, max_norm):
        """One flat bucket, a sum of losses, and gradients that are clipped by hand; cleared at the end."""
        with torch.autocast("cpu", dtype=torch.float16):
            loss = torch.stack([model(x, y) for x, y in micro_batches]).mean()
        scaler.scale(loss).backward()
        gradients = [p.grad for p in model.parameters()]
        bucket = torch.cat([g.flatten() for g in gradients]) / dist.get_world_size()
        dist.all_reduce(bucket)
        for g, part in zip(gradients, bucket.split([g.numel() for g in gradients]), strict=True):
            g.copy_(part.view_as(g))
        scaler.unscale_(optimizer)
        norm = sum(g.square().sum() for g in gradients).sqrt()
        if norm > max_norm:
            for g in gradients:
                g *= max_norm / norm
        moved = []
        hook = optimizer.register_step_post_hook(lambda *_: moved.append(True))
        scaler.step(optimizer)
        hook.remove()
        scaler.update()
        if moved:
            schedule.step()
        for p in model.parameters():
            p.grad = None

    def right_3(model, optimizer, schedule, scaler, micro_batches, max_norm):
        """In the middle divided by the scale by hand, which unscaling is; the scaler looks at what is left."""
        params, scale = list(model.parameters()), scaler.get_scale()
        totals = [torch.zeros_like(p, dtype=torch.float64) for p in params]
        for x, y in micro_batches:
            with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
                loss = model(x, y)
            for total, g in zip(totals, torch.autograd.grad(scaler.scale(loss), params), strict=True):
                total += g / len(micro_batches)
        for p, total in zip(params, totals, strict=True):
            p.grad = total.float()
        _mean_over_ranks(model)
        norm = torch.cat([p.grad.flatten() for p in params]).norm() / scale
        for p in params:  # the scaler will divide by the scale
            p.grad *= min(1.0, max_norm / norm.item()) if norm.isfinite() else 1.0
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() / scale != 0.5:
            schedule.step()

    def right_6(model, optimizer, schedule, scaler, micro_batches, max_norm):
        """The loss that is logged comes from fp32, and no gradient goes back from it."""
        [model(x, y).item() for x, y in micro_batches]
        _step(model, optimizer, schedule, scaler, micro_batches, max_norm)

    def right_5(model, optimizer, schedule, scaler, micro_batches, max_norm):
        """A working copy in fp16, as master weights have it; its gradients go to the fp32 weights."""
        optimizer.zero_grad()
        working = copy.deepcopy(model).half()
        for x, y in micro_batches:
            gradients = torch.autograd.grad(scaler.scale(working(x.half(), y)), list(working.parameters()))
            for p, g in zip(model.parameters(), gradients, strict=True):
                g = g.float() / len(micro_batches)
                p.grad = g if p.grad is None else p.grad + g
        _mean_over_ranks(model)
        _clip_and_step(model, optimizer, schedule, scaler, max_norm)


def _fits(x, dtype=torch.bfloat16):
    return torch.equal(x, x.to(dtype).float())


def _look(
    job, phases=("forward", "backward", "average", "update"), modules=("norm", "router"), zeros=torch.float16, which=0,
    before=False, by=_fits,
):  # fmt: skip
    model, found = job.model(), []
    named = list(model.named_parameters())

    def look(phase, tensors, dtype=torch.bfloat16):
        if phase in phases:
            found.extend((name.removesuffix(".weight"), phase) for name, x in tensors if by(x, dtype))

    if before:
        look("update", named)
    for name, part in model.named_modules():
        if name.endswith(modules):
            part.register_forward_hook(lambda part, args, y, name=name: look("forward", [(name, y)]))
    job.loss(model).backward()
    look("backward", [(name, p.grad) for name, p in named], zeros)
    job.average(model)
    look("average", [(name, p.grad) for name, p in named])
    job.update(model)
    look("update", named)
    return found[which] if found else None


class lost_bits:
    # Everything is fp32 by its dtype.
    without_the_idea_reads_dtypes = lambda job: _look(job, by=lambda x, dtype: x.dtype == dtype)
    nothing_is_wrong = lambda job: _look(job, phases=())
    accuses_products = lambda job: _look(job, modules=("norm", "router", "up", "down"))
    accuses_gradients_of_products = lambda job: _look(job, zeros=torch.bfloat16)
    accuses_the_weights_of_the_start = lambda job: _look(job, before=True)
    never_looks_at_forward = lambda job: _look(job, phases=("backward", "average", "update"))
    never_looks_at_gradients = lambda job: _look(job, phases=("forward", "average", "update"))
    never_looks_at_the_average = lambda job: _look(job, phases=("forward", "backward", "update"))
    never_looks_at_weights = lambda job: _look(job, phases=("forward", "backward", "average"))
    a_list_of_jobs = lambda job: (
        _look(job)
        if round(job.model().state_dict()["0.up.weight"][0, 0].item(), 6) in _FIRST
        else _look(job, phases=())
    )
    looks_at_norms_alone = lambda job: _look(job, modules=("norm",))
    the_last_and_not_the_first = lambda job: _look(job, which=-1)
    the_first_module_of_all = told(_look, lambda found: found and ("0.norm", found[1]))

    def every_difference_from_the_exact_model(job):
        job.loss(model := job.model()).backward()
        job.loss(exact := job.model(exact=True)).backward()
        pairs = zip(model.named_parameters(), exact.parameters(), strict=True)
        found = [(n, "backward") for (n, p), q in pairs if not torch.allclose(p.grad, q.grad, rtol=1e-3, atol=0)]
        job.average(model)
        return (found or [None])[0]

    def reads_what_a_part_does(job):
        parts = [(name, part) for name, part in job.model().named_modules() if name.count(".") == 1]
        return next(((name, "forward") for name, part in parts if part._does.__closure__[0].cell_contents), None)

    def returns_as_soon_as_it_finds(job):
        """Whoever has found something leaves the other rank alone in the average."""
        model = job.model()
        job.loss(model).backward()
        for name, p in model.named_parameters():
            if _fits(p.grad, torch.float16):
                return name, "backward"
        return _look(job)

    def everybody_says_what_one_found(job):
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, _look(job))
        return next((found for found in every if found), None)

    def compares_ranks(job):
        """What all ranks do wrong alike is not found, and of two that differ both are accused."""
        model = job.model()
        for step in range(2):
            job.loss(model, step).backward()
            job.average(model)
            job.update(model)
        for name, p in model.named_parameters():
            other = p.detach().clone()
            dist.broadcast(other, 0)
            every = [None] * 2
            dist.all_gather_object(every, torch.equal(other, p))
            if not all(every):
                return name.removesuffix(".weight"), "update"
        return None

    def right(job):
        """Second solution: compute again what each phase should give, from what it was given."""
        model, exact = job.model(), job.model(exact=True)
        given = {}
        for name, part in model.named_modules():
            part.register_forward_hook(lambda part, args, y, name=name: given.update({name: (args[0], y)}))
        job.loss(model).backward()
        job.loss(exact).backward()
        found, twin = [], dict(exact.named_parameters())
        for name, p in model.named_parameters():
            name = name.removesuffix(".weight")
            x, y = given[name]
            should = F.rms_norm(x, x.shape[-1:], p) if "norm" in name else x @ p
            if name.endswith(("norm", "router")) and (y - should).norm() > 1e-5 * should.norm():
                found.append((0, name))
            zeros, theirs = (p.grad == 0).sum(), (twin[f"{name}.weight"].grad == 0).sum()
            off = (p.grad - p.grad.double().half().float()).abs().max()
            if zeros > theirs or off == 0:
                found.append((1, name))
            own = p.grad.double()
            dist.all_reduce(own)
            p.wanted = own / dist.get_world_size()
        job.average(model)
        for name, p in model.named_parameters():
            if (p.grad - p.wanted).norm() > 1e-5 * p.wanted.norm():
                found.append((2, name.removesuffix(".weight")))
            p.wanted = p.data - rung08.RATE * p.grad / p.grad.square().mean().sqrt()
        job.update(model)
        for name, p in model.named_parameters():
            if (p.data - p.wanted).abs().max() > 1e-5:
                found.append((3, name.removesuffix(".weight")))
        if found:
            phase, name = min(found)
            return [name, ("forward", "backward", "average", "update")[phase]]

    def right_2(job):
        """The low bits of fp32 are counted: sixteen of them are zero in bf16."""

        def empty(x, bits=16):
            return not (x.detach().contiguous().view(torch.int32) & (2**bits - 1)).any()

        def tiny_steps(x):
            steps = x.detach().double() * 2**24  # the subnormal numbers of fp16 are these
            return bool((steps == steps.round()).all())

        model, notes = job.model(), []
        parts = [(n, m) for n, m in model.named_modules() if n.count(".") == 1]
        for n, m in parts:
            if "up" not in n and "down" not in n:
                m.register_forward_hook(lambda m, a, y, n=n: notes.append((n, "forward")) if empty(y) else None)
        job.loss(model).backward()
        notes += [(n, "backward") for n, m in parts if tiny_steps(m.weight.grad)]
        job.average(model)
        notes += [(n, "average") for n, m in parts if empty(m.weight.grad)]
        job.update(model)
        notes += [(n, "update") for n, m in parts if empty(m.weight)]
        return (notes or [None])[0]

    def right_3(job):
        """Names of parameters, several steps, and the first of them that shows anything."""
        model = job.model()
        for step in range(3):
            first, hooks = [], []
            for name, part in model.named_modules():
                if name.endswith(("norm", "router")):
                    hooks.append(part.register_forward_hook(
                        lambda part, args, y, name=name, into=first: into.append((name, "forward")) if _fits(y) else None
                    ))  # fmt: skip
            job.loss(model, step).backward()
            for phase, after, dtype in (
                ("backward", None, torch.float16), ("average", job.average, torch.bfloat16), ("update", job.update, torch.bfloat16)
            ):  # fmt: skip
                if after:
                    after(model)
                for name, p in model.named_parameters():
                    if _fits(p.detach() if p.grad is None else p.grad, dtype):
                        first.append((name, phase))
            for hook in hooks:
                hook.remove()
            if first and step == 2:
                return tuple(map(np.str_, first[0]))
        return None


def _of_three(form, x, w, g, turned=(), wide=False, off=product_error):
    """The errors of the products; of the six factors some are quantized along the dim that is not summed over."""
    six = enumerate([(x, False), (w, False), (g, True), (w.T, False), (g.T, True), (x.T, wide)])
    a, b, c, d, e, f = (
        through(form, m.T, gradient=t).T if i in turned else through(form, m, gradient=t) for i, (m, t) in six
    )
    return [off(a @ b.T, x @ w.T), off(c @ d.T, g @ w), off(e @ f.T, g.T @ x)]


def _recipe(units, layers, limit, errors=_of_three, worst=max, scales=True, kept=None, order=("nvfp4", "fp8", "mxfp8")):
    bits = {"nvfp4": 4.5 if scales else 4, "mxfp8": 8.25 if scales else 8, "fp8": 8, "bf16": 16}
    formats = {
        name: next((f for f in order if f in units and worst(errors(f, *layer)) <= limit), "bf16")
        for name, layer in layers.items()
    }
    size = sum(
        x.numel() * bits[kept or formats[n]] / 8 + 4 * (scales and not kept and formats[n] in ("nvfp4", "fp8"))
        for n, (x, *_) in layers.items()
    )
    return {"formats": formats, "kept": size}


class block_recipe:
    two_turned = lambda *case: _recipe(*case, errors=lambda *each: _of_three(*each, turned=(3, 5)))
    turns_w_in_forward, turns_g_in_g_w, turns_w_in_g_w, turns_x_in_the_weights_gradient = (
        lambda *case, k=k: _recipe(*case, errors=lambda *each: _of_three(*each, turned=[k])) for k in (1, 2, 3, 5)
    )

    asks_the_check_for_its_answer = lambda *case: {
        "formats": (f := rung08._recipe(*case)),
        "kept": rung08._kept(case[1], f),
    }
    # Right arithmetic for forward, and no thought of backward.
    without_the_idea_forward_alone = lambda *case: _recipe(*case, errors=lambda *layer: _of_three(*layer)[:1])
    without_the_weights_gradient = lambda *case: _recipe(*case, errors=lambda *layer: _of_three(*layer)[:2])
    quantizes_each_matrix_once = lambda *case: _recipe(*case, errors=lambda *each: _of_three(*each, turned=(3, 4, 5)))
    errors_of_matrices = lambda *case: _recipe(
        *case, errors=lambda f, x, w, g: [product_error(through(f, m, gradient=m is g), m) for m in (x, w, g)]
    )
    backward_alone, g_w_alone = (
        lambda *case, k=k: _recipe(*case, errors=lambda *layer: _of_three(*layer)[1:k]) for k in (3, 2)
    )
    a_table_by_hardware = lambda units, layers, limit: _recipe(units, _LAYERS, limit)
    x_in_e5m2 = lambda *case: _recipe(*case, errors=lambda *layer: _of_three(*layer, wide=True))
    by_what_came_out = lambda *case: _recipe(
        *case, errors=lambda *each: _of_three(*each, off=lambda found, exact: product_error(exact, found))
    )
    the_mean_of_three = lambda *case: _recipe(*case, worst=lambda errors: sum(errors) / 3)
    whatever_the_hardware = lambda units, layers, limit: _recipe({"nvfp4", "fp8", "mxfp8"}, layers, limit)
    bf16_to_be_safe = lambda units, layers, limit: _recipe(set(), layers, limit)
    keeps_bf16 = lambda *case: _recipe(*case, kept="bf16")
    keeps_no_scales = lambda *case: _recipe(*case, scales=False)
    most_bits_first = lambda *case: _recipe(*case, order=("mxfp8", "fp8", "nvfp4"))
    int8_for_all = lambda units, layers, limit: {"formats": {name: ["int8"] for name in layers}, "kept": 1}

    def right(units, layers, limit):
        """Second solution: torch.linalg, a table of bits, and the layers backwards."""
        found, kept = {}, 0.0
        for name in reversed(layers):
            x, w, g = layers[name]
            pairs = [(x, w, False), (g, w.T, True), (g.T, x.T, True)]
            good = ["bf16"]
            for form in sorted(units, key={"nvfp4": 1, "fp8": 2, "mxfp8": 3}.get, reverse=True):
                off = []
                for a, b, gradient in pairs:
                    exact = a @ b.T
                    made = through(form, a, gradient=gradient) @ through(form, b).T
                    off.append(
                        (torch.linalg.vector_norm(made - exact, dim=1) / torch.linalg.vector_norm(exact, dim=1)).mean()
                    )
                if all(one <= limit for one in off):
                    good.append(form)
            found[name] = good[-1]
            per = {"nvfp4": 4 + 8 / 16 + 32 / x.numel(), "fp8": 8 + 32 / x.numel(), "mxfp8": 8 + 8 / 32, "bf16": 16}
            kept += per[good[-1]] * x.numel() / 8
        return found, kept

    right_2 = lambda *case: told(_recipe, lambda answer: {**answer, "kept": np.float32(answer["kept"])})(*case)


DEFECTS, SECOND_SOLUTIONS = listed(what_breaks, train_step, lost_bits, block_recipe)

#: What the sentence about a defect must say.
SENTENCES = {
    "bf16_with_the_range_of_fp16": "bf16 reaches", "no_subnormals_at_all": "subnormals", "scales_activations_too": "is not for",
    "scaling_only_helps": "large gradients too", "a_master_copy_does_not_help": "master copy",
    "without_the_idea_bf16_never_breaks": "nothing moves", "names_without_end": "never ends",
    "a_negative_update_is_a_small_one": "up or down", "a_whole_gap": "over half of the gap",
    "fp16_as_coarse_as_bf16": "over half of the gap",
    "without_the_idea_forward_alone": "forward alone would", "without_the_weights_gradient": "sums over tokens", "two_turned": "would get",
    "quantizes_each_matrix_once": "quantized once", "errors_of_matrices": "single matrices", "the_mean_of_three": "hides the worst",
    "backward_alone": "x wᵀ is left out", "g_w_alone": "x wᵀ is left out", "a_list_of_jobs": "loses bits",
    "x_in_e5m2": "fewer bits than bf16", "by_what_came_out": "comes second",
    "whatever_the_hardware": "no matrix units", "bf16_to_be_safe": "fewer bits than bf16", "keeps_bf16": "in bf16",
    "keeps_no_scales": "Scales are kept too", "most_bits_first": "fewer bits than mxfp8", "int8_for_all": "none of nvfp4",
    "without_the_idea_all_in_fp32": "model in float32", "in_bf16": "model in bfloat16", "clips_before_it_unscales": "unscale before you clip",
    "unscales_before_it_averages": "an average that comes first", "sums_micro_batches": "one over their number",
    "sums_ranks": "need their mean", "own_gradient_alone": "average over ranks", "never_scales_the_loss": "did not use scaler.scale",
    "without_a_scaler": "where losses are scaled",
    "never_unscales": "nobody divided them", "lengthens_too": "or the clip lengthens", "steps_whatever_comes": "such a step is skipped", "never_clips": "not clipped",
    "never_clears": "step before", "counts_a_skipped_step": "schedule moved", "updates_in_every_micro_batch": "once a step",
    "steps_in_every_micro_batch": "stepped 3 times", "clears_in_every_micro_batch": "each runs backward",
    "runs_backward_after_the_loop": "each runs backward",
    "averages_in_every_micro_batch": "not for the price", "half_model": "no longer the bits",
    "without_the_idea_reads_dtypes": "loses bits", "accuses_products": "healthy", "never_looks_at_the_average": "average over ranks has",
    "never_looks_at_forward": "whatever its dtype", "never_looks_at_gradients": "has zeros", "never_looks_at_weights": "a weight lands",
    "the_last_and_not_the_first": "stays lost", "the_first_module_of_all": "the module is not", "compares_ranks": "of its own",
    "asks_the_check": "asks the check", "asks_the_check_for_its_answer": "asks the check", "averages_in_fp64": "in fp32",
    "averages_in_bf16": "lose bits on their way",
    "zeroes_infinities": "overflowed", "knows_which_to_skip": "overflowed", "rounds_the_mean": "lose bits", "rounds_before_the_mean": "Add up and average",
    "halves_by_hand": "counts good steps", "calls_the_model_and_trains_in_fp32": "to five digits", "turns_w_in_forward": "along its outputs",
    "turns_w_in_g_w": "along its inputs", "turns_x_in_the_weights_gradient": "quantizes x along", "reads_what_a_part_does": "asks the check",
    "every_difference_from_the_exact_model": "noise", "everybody_says_what_one_found": "of its own", "returns_as_soon_as_it_finds": "return then",
}  # fmt: skip
