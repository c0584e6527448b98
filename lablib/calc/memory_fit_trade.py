"""What one setup trades for another, in sentences whose numbers are computed from both.

    ZeRO-3 over 8 ranks in place of 0: a rank sends 41.8 GB a step for data parallelism, 1.5 times 27.9 GB

Chapter: book/07_3d_parallelism.md
"""

from __future__ import annotations

from collections.abc import Callable

from lablib.calc.choices import plural
from lablib.calc.flops import step_flops
from lablib.calc.hardware import LINKS
from lablib.calc.memory import training_memory
from lablib.calc.memory_fit_cost import host_seconds
from lablib.calc.memory_fit_setup import Setup, size
from lablib.calc.memory_fit_traffic import (
    context_bytes,
    data_bytes,
    host_bytes,
    pipeline_bytes,
    rank_params,
    tensor_bytes,
)
from lablib.calc.units import format_bandwidth, format_time


def trades(before: Setup, after: Setup) -> tuple[str, ...]:
    """Return what `after` saves and what it pays, compared with `before`.

    Args:
        before: A setup.
        after: The same training with other settings.
    """
    return (saved(before, after), *(text for pay in _PAYS for text in pay(before, after)))


def saved(before: Setup, after: Setup) -> str:
    """Return what a GPU needs before and after, by group of terms.

    Args:
        before: A setup.
        after: Another one.
    """
    if before.card != after.card:
        return (
            f"the same {size(after.memory)} on one {after.card.name}, which has {size(after.budget)} for them"
        )
    old, new = (training_memory(**have.settings()) for have in (before, after))
    parts = []
    for name in ("states", "activations", "buffers"):
        had, has = getattr(old, name), getattr(new, name)
        if size(had) != size(has):
            parts.append(
                f"{name} {size(had)} -> {size(has)}"
                if had and has
                else f"{name} {size(has)} (none before)"
                if has
                else f"no {name} ({size(had)} before)"
            )
    text = f"a GPU needs {size(after.memory)} in place of {size(before.memory)}"
    return f"{text}{_parts_of(after)}{', '.join(parts)}" if parts else text


def needs(have: Setup) -> str:
    """Return what a GPU needs, by group of terms.

    Args:
        have: A setup.
    """
    memory = training_memory(**have.settings())
    groups = {name: getattr(memory, name) for name in ("states", "activations", "buffers")}
    parts = ", ".join(f"{name} {size(number)}" for name, number in groups.items() if number)
    return f"a GPU needs {size(have.memory)}{_parts_of(have)}{parts}"


def _parts_of(have: Setup) -> str:
    # Groups of terms add up to the sum of training_memory, not to the peak of the timeline.
    return ": " if not have.run.kernels.eager else "; term by term, before they are put in time: "


def _changed(before: Setup, after: Setup, *names: str) -> bool:
    return any(getattr(before.run, name) != getattr(after.run, name) for name in names)


def _recomputation(before: Setup, after: Setup) -> list[str]:
    if not _changed(before, after, "recompute"):
        return []
    run = after.run
    how = {"batch": run.micro_batch, "seq": run.seq}
    old, new = (
        step_flops(run.model, recompute=kind, **how) for kind in (before.run.recompute, run.recompute)
    )
    return [
        f"recompute={run.recompute!r} runs {(new.recompute - old.recompute) / new.model:.1%} of a step's FLOPs "
        f"again, {(new.recompute - old.recompute) / new.forward:.0%} of a forward pass"
    ]


def _data_parallelism(before: Setup, after: Setup) -> list[str]:
    if not _changed(before, after, "dp", "zero", "cp", "num_microbatches", "tuning"):
        return []
    old, new, run = data_bytes(before), data_bytes(after), after.run
    if run.dp * run.cp == 1:
        return [f"data parallelism sends nothing (one replica); a rank sent {size(old)}"] if old else []
    if round(old) == round(new):
        return ["ZeRO sends no more than replicas do"] if _changed(before, after, "zero") and run.zero else []
    ratio = f", {new / old:.2g} times {size(old)}" if old else ""
    what = f"ZeRO-{run.zero}" if run.zero else "data parallelism"
    return [f"{what} over {run.dp * run.cp} ranks: a rank sends {size(new)} in a step{ratio}"]


def _tensor_parallelism(before: Setup, after: Setup) -> list[str]:
    run = after.run
    if not _changed(before, after, "tp") or run.tp == 1:
        return []
    old = f", {size(tensor_bytes(before))} before" if before.run.tp > 1 else ""
    return [
        f"tp={run.tp}: a rank sends {size(tensor_bytes(after))} of activations in a step, not hidden{old}"
    ]


def _context_parallelism(before: Setup, after: Setup) -> list[str]:
    run = after.run
    if not _changed(before, after, "cp") or run.cp == 1:
        return []
    return [
        f"cp={run.cp}: {plural(run.seq // run.cp, 'token')} of a sequence on a rank, which sends "
        f"{size(context_bytes(after))} of keys, values and their gradients in a step"
    ]


def _pipeline(before: Setup, after: Setup) -> list[str]:
    run, m = after.run, after.micro_batches
    if not _changed(before, after, "pp") or run.pp == 1:
        return []
    bubble = (run.pp - 1) / (m * run.virtual_stages)
    return [
        f"pp={run.pp}: a bubble of {bubble:.1%} of the ideal time with {m} micro-batches; a middle stage sends "
        f"{size(pipeline_bytes(after))} in a step"
    ]


def _accumulation(before: Setup, after: Setup) -> list[str]:
    (old, batch), (new, now) = ((have.micro_batches, have.run.micro_batch) for have in (before, after))
    if (old, batch) == (new, now):
        return []
    one = "micro-batch" if new == 1 else "micro-batches"
    return [f"{new} {one} of {plural(now, 'sequence')} a replica in place of {old} of {batch}: the same step"]


def _offload(before: Setup, after: Setup) -> list[str]:
    run = after.run
    if not _changed(before, after, "offload") or run.offload == "none":
        return []
    link = LINKS[after.card.host]
    held = training_memory(**after.settings()).host
    return [
        f"{size(held)} a GPU live in CPU memory; {size(host_bytes(after))} cross {link.name} "
        f"({format_bandwidth(link.bandwidth)}) in a step, which with AdamW on the CPU takes "
        f"{format_time(host_seconds(after))} if nothing hides it"
    ]


def _training(before: Setup, after: Setup) -> list[str]:
    run, old = after.run, before.run
    found = []
    if run.tuning != old.tuning:
        every, trained = rank_params(run)
        found.append(
            f"tuning={run.tuning!r} trains {trained / every:.2%} of the parameters: another kind of training, timed "
            "as if all were trained"
        )
    if run.optimizer != old.optimizer:
        found.append(f"{run.optimizer.name}: {run.optimizer.summary}; the updates are not the same numbers")
    if run.recipe != old.recipe:
        found.append(
            f"recipe {run.recipe.name}: {run.recipe.summary}; small updates are lost without a master copy"
        )
    if run.seq != old.seq:
        found.append(
            f"sequences of {plural(run.seq, 'token')}, {1 - run.seq / old.seq:.0%} shorter: as many of them in a step"
        )
    return found


def _free(before: Setup, after: Setup) -> list[str]:
    found = []
    if _changed(before, after, "gradient_as_bucket_view"):
        found.append("gradient_as_bucket_view=True keeps gradients in DDP's buckets: it costs nothing")
    if before.step != after.step:
        found.append(f"step={after.step!r}: one kernel updates all, without temporaries; it costs nothing")
    if _changed(before, after, "attention"):
        found.append("attention='fused' never stores the scores: it costs nothing and is faster")
    return found


#: What is paid, what matters most first.
_PAYS: tuple[Callable[[Setup, Setup], list[str]], ...] = (
    _training, _offload, _free, _recomputation, _tensor_parallelism, _context_parallelism, _pipeline,
    _data_parallelism, _accumulation,
)  # fmt: skip
