"""Schedules as data: notation, generators against published and closed forms, CSV, names, bad input."""

import re
from typing import get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lablib.calc import schedules
from lablib.calc.schedules import (
    Schedule,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    parse_schedule,
    peak_activations,
    schedule,
    schedule_names,
    simulate,
    stages,
    to_csv,
    validate,
    zb_h1,
    zb_h2,
)
from lablib.calc.schedules.actions import Overlap, parse_action
from lablib.calc.schedules.generators import dualpipe_v, zb_v
from lablib.cli.schedule import schedule as command
from tests.torch_schedules import from_csv

some = settings(max_examples=40, deadline=None)
ranks, factors, microbatches = st.integers(1, 9), st.integers(2, 5), st.integers(1, 24)
durations = st.floats(0.1, 10)


def made(name, p, m, v=2):
    """Return a schedule whatever the numbers: what one of them needs of p, m and v stands here."""
    if name == "interleaved":
        return interleaved(p, p * m, v)
    return schedule(name, p, m + 2 * p if name == "dualpipe-v" else m)


def overlaps(ours):
    """Say whether a rank runs a forward and a backward as one step."""
    return any(isinstance(step, Overlap) for steps in ours.ranks for step in steps)


# Published: t_F = 1, t_B = 2, and for the last two t_F = t_I = t_W = 1.


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "makespan", "over_ideal", "over_total", "in_flight"),
    [
        ("gpipe", 4, 4, 1, 21, 0.75, 0.428571, (4, 4, 4, 4)),
        ("1f1b", 4, 4, 1, 21, 0.75, 0.428571, (4, 3, 2, 1)),
        ("gpipe", 4, 8, 1, 33, 0.375, 0.272727, (8, 8, 8, 8)),
        ("1f1b", 4, 8, 1, 33, 0.375, 0.272727, (4, 3, 2, 1)),
        ("interleaved", 4, 8, 2, 28.5, 0.1875, 0.157895, (5.5, 4.5, 3.5, 2.5)),
        ("interleaved", 4, 8, 4, 26.25, 0.09375, 0.085714, (4.75, 4.25, 3.75, 3.25)),
        ("gpipe", 4, 32, 1, 105, 0.09375, 0.085714, (32, 32, 32, 32)),
        ("1f1b", 4, 32, 1, 105, 0.09375, 0.085714, (4, 3, 2, 1)),
    ],
)
def test_golden_values(name, p, m, v, makespan, over_ideal, over_total, in_flight):
    timeline = simulate(schedule(name, p, m, v), forward=1, backward=2)
    assert timeline.makespan == makespan
    assert timeline.bubble_over_ideal == pytest.approx(over_ideal, abs=1e-6)
    assert timeline.bubble_over_total == pytest.approx(over_total, abs=1e-6)
    assert timeline.peak_in_flight == in_flight


@pytest.mark.parametrize(("name", "makespan", "span_idle", "in_flight"), [("zb-h1", 27, 3, 4), ("zb-h2", 27, 0, 7)])
def test_golden_values_of_zero_bubble(name, makespan, span_idle, in_flight):
    timeline = simulate(schedule(name, 4, 8), forward=1, input=1, weight=1)
    assert timeline.makespan == makespan
    assert max(timeline.span_idle) == span_idle
    assert max(timeline.peak_in_flight) == in_flight
    assert simulate(one_f_one_b(4, 8), forward=1, input=1, weight=1).makespan == 33


# Closed forms


@some
@given(ranks, microbatches, durations, durations)
def test_bubble_of_gpipe_and_1f1b(p, m, forward, backward):
    for make in (gpipe, one_f_one_b):
        timeline = simulate(make(p, m), forward=forward, backward=backward)
        assert timeline.makespan == pytest.approx((m + p - 1) * (forward + backward))
        assert timeline.bubble_over_ideal == pytest.approx((p - 1) / m)
        assert timeline.bubble_over_total == pytest.approx((p - 1) / (m + p - 1))
        assert timeline.idle == pytest.approx([(p - 1) * (forward + backward)] * p)


@some
@given(ranks, microbatches)
def test_memory_of_gpipe_and_1f1b(p, m):
    assert simulate(gpipe(p, m)).peak_in_flight == (m,) * p
    assert simulate(one_f_one_b(p, m)).peak_in_flight == tuple(min(m, p - i) for i in range(p))


@some
@given(ranks, microbatches, durations)
def test_naive_keeps_one_rank_at_work(p, m, backward):
    timeline = simulate(naive(p, m), backward=backward)
    assert timeline.bubble_over_total == pytest.approx((p - 1) / p)
    assert timeline.bubble_over_ideal == pytest.approx(p - 1)
    assert timeline.peak_in_flight == (1,) * p


@some
@given(ranks, st.integers(1, 5), factors, durations, durations)
def test_interleaving_divides_the_bubble_by_v(p, rounds, v, forward, backward):
    m = p * rounds
    timeline = simulate(interleaved(p, m, v), forward=forward, backward=backward)
    assert timeline.bubble_over_ideal == pytest.approx((p - 1) / (v * m))
    assert timeline.makespan == pytest.approx((m + (p - 1) / v) * (forward + backward))
    if rounds > 1:  # with one round there are too few micro-batches to fill the pipeline
        assert timeline.peak_in_flight[0] == pytest.approx(p * (1 + (p - 1) / (p * v)))


@some
@given(st.integers(2, 9), st.integers(1, 5), st.integers(1, 5))
def test_memory_is_what_the_memory_calculator_says(p, rounds, v):
    m = p * rounds
    expected = [sum(stages.in_flight("interleaved", i, p, virtual_stages=v, num_microbatches=m)) / v for i in range(p)]
    assert simulate(interleaved(p, m, v)).peak_in_flight == pytest.approx(expected)


@some
@given(ranks, st.integers(0, 9), durations, st.floats(0, 1), durations)
def test_zero_bubble_tables(p, more, forward, part, input):
    """Table 2 of the paper, in words of this library: where W is the shortest, and m fills the pipeline."""
    m, weight = 2 * p - 1 + more, part * min(forward, input)
    work = forward + input + weight
    one, h1, h2 = (
        simulate(make(p, m), forward=forward, input=input, weight=weight) for make in (one_f_one_b, zb_h1, zb_h2)
    )
    assert max(one.span_idle) == pytest.approx((p - 1) * work)
    assert max(h1.span_idle) == pytest.approx((p - 1) * (forward + input - weight))
    expected = (p - 1) * (forward + input - 2 * weight)
    if expected >= 0:
        assert max(h2.span_idle) == pytest.approx(expected, abs=1e-9 * m * work)
        assert h2.span_bubble_rate == pytest.approx(expected / (m * work + expected), abs=1e-9)
    # What the paper's cost does not show: ranks start one after another, and the makespan has that in it.
    assert h2.makespan >= m * work + (p - 1) * forward - 1e-9 * m * work
    assert max(one.peak_in_flight) == max(h1.peak_in_flight) == p
    assert max(h2.peak_in_flight) == 2 * p - 1


@some
@given(ranks, st.integers(0, 9), st.floats(0, 1))
def test_memory_of_zero_bubble_by_worker(p, more, kept):
    m = 2 * p - 1 + more
    assert peak_activations(zb_h1(p, m), after_input=kept) == pytest.approx(
        [max(1, p - i + i * kept) for i in range(p)]
    )
    assert peak_activations(zb_h2(p, m), after_input=kept) == pytest.approx(
        [2 * p - 2 * i - 1 + 2 * i * kept for i in range(p)]
    )


@some
@given(st.integers(1, 8), st.integers(0, 9))
def test_zb_v_idles_nowhere_and_holds_p(p, more):
    timeline = simulate(zb_v(p, 2 * p - 1 + more))
    assert timeline.span_idle == pytest.approx([0] * p)
    assert timeline.makespan == pytest.approx(3 * (2 * p - 1 + more) + (p - 1) / 2)
    assert timeline.peak_in_flight == (p,) * p


@some
@given(st.integers(1, 8), st.integers(0, 9))
def test_dualpipe_v_bubble(p, more):
    """(p - 1)(t_F&B + t_B - 3 t_W) with times of one of a rank's two stages, as DeepSeek's table has it."""
    m = 2 * p + more
    timeline = simulate(dualpipe_v(p, m), forward=2, input=2, weight=2)
    assert max(timeline.idle) == pytest.approx((p - 1) * (3 + 2 - 3 * 1))
    assert max(timeline.peak_in_flight) == (2 * p + 1) / 2


# Notation, CSV, names


@pytest.mark.parametrize("text", ["", "2X0", "2f0", "(2F0)OVERLAP_F_B", "(2F0;3W0)OVERLAP_F_B"])
def test_what_is_no_action(text):
    with pytest.raises(ValueError, match="is not an action; write stage, kind, micro-batch"):
        parse_action(text)


@some
@given(st.sampled_from(schedule_names()), st.integers(1, 6), st.integers(1, 12), factors)
def test_every_schedule_is_valid_and_survives_csv_and_text(name, p, m, v):
    ours = made(name, p, m, v)
    validate(ours)
    assert ours.num_stages == p * ours.virtual_stages
    assert from_csv(to_csv(ours)) == ours
    assert parse_schedule(str(ours)) == ours
    assert {stage for rank in range(p) for stage in ours.stages_of(rank)} == set(range(ours.num_stages))


def test_csv_is_what_pytorch_writes(tmp_path):
    text = to_csv(one_f_one_b(2, 2))
    assert text.splitlines() == ["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"]
    (tmp_path / "s.csv").write_bytes(text.encode())
    assert from_csv(tmp_path / "s.csv") == one_f_one_b(2, 2)


def test_a_written_schedule_says_where_stages_live():
    schedule = parse_schedule(["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"], name="V")
    assert (schedule.placement, schedule.num_microbatches, schedule.virtual_stages) == ((0, 1, 1, 0), 1, 2)
    with pytest.raises(ValueError, match=r"stage 0 runs on rank 0 and on rank 1 \(0B0\)"):
        parse_schedule(["0F0", "0B0"])
    with pytest.raises(ValueError, match="no rank runs stage 1, but the schedule has a stage 2"):
        parse_schedule(["0F0 2F0"])
    with pytest.raises(ValueError, match="no rank runs stage 1, but the schedule has a stage 9999999999"):
        parse_schedule("0F0 0B0\n9999999999F0")  # at once, and not after a gigabyte of stages
    with pytest.raises(ValueError, match="micro-batch 999999999 has 1000000000 of them, but 2 actions"):
        parse_schedule("0F0 0B999999999")
    with pytest.raises(ValueError, match="the schedule has no action"):
        parse_schedule("")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: interleaved(4, 6, 2), r"interleaved with v=2 runs micro-batches p=4 at a time, .* m=6; use m=4 or 8"),
        (lambda: interleaved(4, 8, 0), "p=4, m=8, v=0: each must be a whole number, 1 or more"),
        (lambda: zb_h1(2, 2.5), r"p=2, m=2\.5"),
        (lambda: dualpipe_v(4, 7), "p=4 ranks has 8 stages .* m=7 is too few, use m=8 or more"),
        (lambda: schedule("1f1b", 4, 8, v=2), "1f1b has 1 stage on every rank, not v=2; use v=1, or interleaved"),
        (lambda: Schedule([[]], 1, [1]), "stage 0 lives on rank 1; the ranks are 0 to 0"),
        (lambda: peak_activations(gpipe(2, 2), after_input=2), "after_input=2"),
    ],
)
def test_bad_input_names_every_factor(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: schedule("1f1b", 4, 10**20),
            r"p=4, m=1\d+ make 8\d\d,[0,]+ actions, .* at most 500,000: make m smaller",
        ),
        (lambda: gpipe(4, 62_501), "make 500,008 actions"),
        (lambda: naive(10**9, 1), "make p smaller"),
        (lambda: interleaved(4, 8, 10**6), "make v smaller"),
        (lambda: zb_h1(4, 41_667), "make 500,004 actions"),
        (lambda: zb_v(10**9, 1), "make p smaller"),  # it is built with 2p - 1 micro-batches, and then cut
        (lambda: zb_v(300, 1), "make 1,078,200 actions"),
        (lambda: dualpipe_v(100_000, 200_000), "make m smaller"),
    ],
)
def test_more_actions_than_anybody_reads_are_refused_before_they_are_built(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.drawn
def test_the_largest_schedule_of_each_kind_is_built():
    assert sum(map(len, gpipe(4, 62_500).ranks)) == 500_000
    assert sum(map(len, zb_v(1, 83_333).ranks)) == 6 * 83_333


def test_names_are_forgiving():
    assert schedule("ZB_H1", 3, 5) == zb_h1(3, 5)
    assert schedule("Interleaved", 2, 4, 2) == interleaved(2, 4, 2)
    assert schedule("interleaved", 2, 3) == one_f_one_b(2, 3)
    assert schedule("zb-v", 2, 3, 2) == zb_v(2, 3)


def test_the_lists_for_readers_have_every_schedule():
    help_text = get_type_hints(command, include_extras=True)["name"].__metadata__[0].help
    assert re.findall(r"[\w-]+", help_text.replace(" or ", " ")) == schedule_names()
    rows = re.findall(r"(?m)^\| ([\w-]+) \| `(\w+)`", schedules.__doc__)
    assert [name for name, _ in rows] == schedule_names()
    assert {function for _, function in rows} <= set(schedules.__all__)
