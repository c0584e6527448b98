"""Kinds of memory: one vocabulary for the calculator and for PyTorch's trackers, and no byte without a kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lablib.calc.memory.tape import Tape
from lablib.calc.memory.timeline import MemoryInstant, MemoryTimeline, memory_timeline
from lablib.proof.cases import Case
from lablib.proof.grid import grid
from lablib.proof.oracles import measure_case
from lablib.proof.oracles import measurement as memory_tracker
from lablib.proof.oracles.measurement import MomentTracker
from lablib.proof.verdict import KINDS, by_kind, predict


def timeline_of(case: Case) -> MemoryTimeline:
    """As the verdict asks for it."""
    return memory_timeline(step=case.step, out_of_place=True, **case.settings())


def test_both_sides_speak_of_the_same_kinds() -> None:
    assert {*memory_tracker.KINDS.values(), "gradient buckets"} == set(KINDS)


def test_every_byte_of_every_moment_has_a_kind() -> None:
    for case in grid():
        if case.implementation == "paper":
            continue
        for moment in timeline_of(case).instants:
            found = by_kind(moment, recompute=case.recompute, fsdp2=case.shards)
            assert sum(found.values()) == moment.total, (case.name, moment.name)
            assert set(found) <= set(KINDS)
            assert all(size > 0 for size in found.values())


def test_a_term_that_nobody_measured_has_no_kind() -> None:
    moment = MemoryInstant("states", "states", None, (("dequantized_weights", 8),))
    with pytest.raises(ValueError, match="'dequantized_weights' has no kind"):
        by_kind(moment)


def test_a_prediction_is_split_at_the_moment_that_is_asked_for() -> None:
    case = Case(implementation="hf", family="gpt2")
    timeline = timeline_of(case)
    own, other = predict(case), predict(case, "backward of block 2")
    assert own["peak_terms_at"] == own["peak_at"] == timeline.peak.name
    assert sum(own["peak_terms"].values()) == own["peak"]
    assert other["peak_terms_at"] == "backward of block 2"
    assert other["peak"] == own["peak"]
    assert sum(other["peak_terms"].values()) == timeline.instant("backward of block 2").total
    with pytest.raises(ValueError, match="unknown instant 'noon'"):
        predict(case, "noon")


def test_the_gradient_of_a_tied_table_is_nobody_s_while_it_waits() -> None:
    """It is the head's alone until the embedding's comes; then there are both, and their sum."""
    tied = Case(family="qwen2")
    free = replace(tied.model, tied=False)
    table = tied.model.vocab * tied.model.hidden * 4
    settings = tied.settings()
    with_it, without = (
        memory_timeline(out_of_place=True, step=tied.step, **settings | {"model": replace(model, family="llama")})
        for model in (tied.model, free)
    )
    for name in ("backward of block 3", "backward of block 0"):
        assert with_it.instant(name).term("tied_gradient") == table
        assert without.instant(name).term("tied_gradient") == 0
        assert with_it.instant(name).term("gradients") == without.instant(name).term("gradients") - table
    assert with_it.instant("backward of the embedding").term("tied_gradient") == 3 * table
    in_place = memory_timeline(step=tied.step, **settings)
    assert in_place.instant("backward of the embedding").term("tied_gradient") == 2 * table


def test_a_tracker_labels_gradients_when_a_parameter_has_them() -> None:
    """What `new_gradients` and `tied_gradient` rest on, seen in PyTorch's tracker with nothing of the course between."""
    first, last = nn.Linear(7, 7, bias=False), nn.Linear(7, 7, bias=False)
    shared = nn.Sequential(first, last, first)
    x = torch.zeros(3, 7)
    seen: list[tuple[int, int]] = []  # gradients and temporaries, in bytes
    tracker = MomentTracker(shared, x)
    tracker.start()

    def look(_: object) -> None:
        held = tracker.held()
        seen.append((held.get("gradients", 0), held.get("temporary", 0)))

    with tracker:
        out = shared(x)
        last.weight.register_post_accumulate_grad_hook(look)
        first.weight.register_post_accumulate_grad_hook(look)
        out.sum().backward()
    one = 7 * 7 * 4
    # Of the matrix used twice nothing is labelled before its second gradient is there.
    assert [gradients for gradients, _ in seen] == [one, 2 * one]
    assert seen[0][1] >= one > seen[1][1]


@pytest.mark.parametrize(
    "case",
    [
        Case(family="gpt2"),
        Case(implementation="hf", family="gpt2", micro_batch=2),
        Case(implementation="hf", recipe="pure-bf16", recompute="full"),
        Case(family="qwen2", recipe="autocast-bf16", recompute="full", attention="plain", micro_batch=2),
        Case(family="gpt2", recipe="mixed-bf16", pp=2, recompute="selective", attention="plain"),
        Case(recipe="fsdp2-mixed", sharding="fsdp2", dp=4, recompute="full"),
        Case(implementation="hf", family="qwen2", recompute="full", sharding="fsdp2-keep", dp=4, tuning="lora"),
        Case(family="llama", accumulate=3, recipe="pure-bf16", optimizer="sgd-momentum"),
    ],
    ids=lambda case: case.name,
)
def test_every_moment_of_backward_agrees_kind_by_kind(case: Case) -> None:
    """Not the peak alone: who is right at one moment by chance is wrong at the others."""
    found, timeline = measure_case(case), timeline_of(case)
    assert found.peak_terms == found.moments[found.peak_at]
    # Counters of the optimizer, 4 bytes a tensor, buffers of a model, loss and its gradient: below two kilobytes.
    slack = 2048
    compared = 0
    for moment in timeline.instants:
        # With FSDP2 the embedding's backward ends in a reduction, which the tracker does not tell apart.
        joined = case.shards and moment.name == "backward of the embedding"
        if moment.phase not in ("backward", "optimizer") or joined:
            continue
        mine = by_kind(moment, recompute=case.recompute, fsdp2=case.shards)
        kinds = found.moments[moment.name]
        for kind in {*mine, *kinds}:
            assert abs(mine.get(kind, 0) - kinds.get(kind, 0)) <= slack, (moment.name, kind)
        compared += 1
    assert compared >= case.model.num_layers // case.pp + 1


def test_a_loss_over_frozen_weights_holds_what_hugging_face_has_variables_for() -> None:
    case = Case(implementation="hf", family="qwen2", recipe="autocast-bf16", recompute="full", tuning="lora")
    loss = timeline_of(case).instant("loss").total
    # Counters of 56 adapters, two tables of frequencies, and the loss.
    assert 0 <= measure_case(case).totals["loss"] - loss <= 4 * 56 + 24 + 8


def test_a_replay_waits_for_who_needs_it_and_stops_when_nobody_does() -> None:
    tape = Tape()
    tape.recomputing = True
    x = tape.input("x", 32)
    y = tape.op("exp", [x], 32, keeps_output=True)
    z = tape.op("square", [y], 32, keeps=[y])
    tape.op("double", [z], 32)
    played = [(event.direction, event.operator) for event in tape.play()]
    # Doubling needs nothing of forward. Squaring needs its input, which is there before it runs again.
    assert played[3:] == [("backward", "double"), ("replay", "exp"), ("backward", "square"), ("backward", "exp")]


def test_a_pipeline_holds_the_gradient_that_it_received() -> None:
    case = Case(pp=2)
    stream = 64 * 48 * 4
    timeline = timeline_of(case)
    for name in ("backward of block 1", "backward of block 0", "backward of the embedding"):
        assert timeline.instant(name).term("received_gradient") == stream
    assert timeline.instant("forward of block 1").term("received_gradient") == 0
    alone = timeline_of(replace(case, pp=1))
    assert all(moment.term("received_gradient") == 0 for moment in alone.instants)
    # The token ids of the whole step are there from its first moment to its last.
    assert timeline.instant("optimizer step").term("activations.tokens") == 3 * 65 * 8
