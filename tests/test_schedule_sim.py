"""The simulator against a second one, by relaxation; the validator against graphlib; charts, grids, pictures, CLI."""

import graphlib
import json
import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lablib.calc.schedules import (
    Action,
    Schedule,
    ScheduleError,
    check_chart,
    gpipe,
    interleaved,
    one_f_one_b,
    parse_schedule,
    schedule,
    schedule_names,
    simulate,
    time_grid,
    validate,
    zb_h1,
)
from lablib.calc.schedules.actions import Overlap
from lablib.calc.schedules.generators import zb_v
from lablib.calc.schedules.text import step_grid
from tests.test_schedules import made, overlaps

some = settings(max_examples=40, deadline=None)


def graph(ours):
    """Return what every step needs, spelled out from the rules alone."""
    step_of = {action: step for steps in ours.ranks for step in steps for action in step.parts}
    needs = {}
    for steps in ours.ranks:
        before = None
        for step in steps:
            needs[step] = {before} if before else set()
            for kind, s, k in step.parts:
                wanted = {"F": [Action("F", s - 1, k)], "W": [Action("I", s, k)]}.get(
                    kind, [Action("F", s, k), Action("B", s + 1, k), Action("I", s + 1, k)]
                )
                needs[step] |= {step_of[action] for action in wanted if action in step_of}
            before = step
    return needs


@some
@given(st.sampled_from(schedule_names()), st.integers(1, 5), st.integers(1, 8), st.integers(0, 10**6))
def test_simulate_is_the_longest_path(name, p, m, seed):
    dice = random.Random(seed)
    ours = made(name, p, m)
    times = {
        key: [dice.uniform(1, 3) for _ in range(ours.num_stages)] for key in ("forward", "backward", "input", "weight")
    }
    # Shorter than any action, so that no message waits for the one before it; overlapped pairs send two at a time.
    communication = 0 if overlaps(ours) else dice.uniform(0, 1)
    timeline = simulate(ours, communication=communication, **times)
    key = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}
    home = {step: rank for rank, steps in enumerate(ours.ranks) for step in steps}
    end = {}
    needs = graph(ours)
    for step in graphlib.TopologicalSorter(needs).static_order():
        arrivals = [end[other] + communication * (home[other] != home[step]) for other in needs[step]]
        duration = sum(times[key[part.kind]][part.stage] for part in step.parts)
        end[step] = max(arrivals, default=0) + duration
    assert {event.action: event.end for event in timeline.events} == pytest.approx(end)
    assert timeline.makespan == pytest.approx(max(end.values()))
    assert sum(timeline.busy) + sum(timeline.idle) == pytest.approx(p * timeline.makespan)


@some
@given(st.sampled_from(["1f1b", "zb-h1", "zb-v", "interleaved"]), st.integers(1, 4), st.integers(0, 10**6))
def test_validate_refuses_exactly_what_has_a_circle(name, p, seed):
    """Swap two steps of a rank: validate must agree with a topological sort."""
    dice = random.Random(seed)
    ours = made(name, p, 3)
    rows = [list(steps) for steps in ours.ranks]
    row = dice.choice(rows)
    i, j = dice.randrange(len(row)), dice.randrange(len(row))
    row[i], row[j] = row[j], row[i]
    changed = Schedule(rows, ours.num_microbatches, ours.placement)
    try:
        graphlib.TopologicalSorter(graph(changed)).prepare()
    except graphlib.CycleError:
        with pytest.raises(ScheduleError) as caught:
            validate(changed)
        assert "<-- here" in str(caught.value)
        assert caught.value.marks
        with pytest.raises(ScheduleError):
            simulate(changed)
    else:
        validate(changed)
        assert simulate(changed).makespan >= max(simulate(changed).busy)


@some
@given(st.sampled_from(schedule_names()), st.integers(1, 4), st.integers(0, 10**6))
def test_validate_finds_what_is_missing_or_double(name, p, seed):
    dice = random.Random(seed)
    ours = made(name, p, 3)
    for double in (False, True):
        rows = [list(steps) for steps in ours.ranks]
        rank = dice.randrange(p)
        step = dice.randrange(len(rows[rank]))
        rows[rank][step : step + 1] = [rows[rank][step]] * (2 if double else 0)
        with pytest.raises(ScheduleError) as caught:
            validate(Schedule(rows, ours.num_microbatches, ours.placement))
        assert any(str(part) in caught.value.reason for part in ours.ranks[rank][step].parts)
        assert "<-- here" in str(caught.value)


def reason(rows, **changes):
    with pytest.raises(ScheduleError) as caught:
        validate(parse_schedule(rows) if not changes else Schedule(rows, **changes))
    return caught.value


@pytest.mark.parametrize(
    ("rows", "expected", "marks"),
    [
        (["0F0 0B0", "1B0 1F0"], "rank 1, step 0: 1B0 needs 1F0, which rank 1 runs later, in step 1", [(1, 0)]),
        (["0F0 0B0", "1B0"], "rank 1, step 0: 1B0 needs 1F0, which never runs", [(1, 0)]),
        (["0F0 0B0", "1F0 1I0 1B0 1W0"], "1B0 repeats work of 1I0", [(1, 2)]),
        (["0F0 0B0", "1F0 1I0"], "1W0 is missing: stage 1 on rank 1 runs 0 of 1 weight halves", [(1, 2)]),
        (
            ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1"],
            "1B1 is missing: stage 1 on rank 1 runs 1 of 2 backwards; rank 0 waits for it in step 3",
            [(0, 3)],
        ),
        (
            ["0F0 0B0", "1F0 1B0 1F1 1B1"],
            "0F1 is missing: stage 0 on rank 0 runs 1 of 2 forwards; rank 1 waits for it in step 2",
            [(1, 2)],
        ),
        (["1F0 0F0 1B0 0B0"], "deadlock, a rank waits for itself", [(0, 0)]),
    ],
)
def test_what_the_validator_says(rows, expected, marks):
    error = reason(rows)
    assert expected in error.reason
    assert error.marks == marks
    assert "step  rank 0" in str(error)
    assert str(error).count("<-- here") == len({step for _, step in marks})


def test_the_wrong_step_is_marked_in_the_grid():
    assert str(reason(["0F0 0B0", "1B0 1F0"])).splitlines()[2:] == [
        "step  rank 0  rank 1",
        "   0  0F0     >1B0<   <-- here",
        "   1  0B0     1F0",
    ]


def test_an_error_travels_between_processes():
    error = reason(["0F0 0B0", "1B0 1F0"])
    twin = pickle.loads(pickle.dumps(error))
    assert (str(twin), twin.reason, twin.marks) == (str(error), error.reason, error.marks)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ("0F0", "'0F0' is not an action"),
        (Action("X", 0, 0), "0X0 has the kind 'X'; the kinds are F, B, I, W"),
        (Action("F", -1, 0), "num_stages=2"),
        (Action("F", 0, "0"), "is of micro-batch '0'"),
        (Overlap(Action("F", 0, 0), Action("B", 0, 0)), "0B0 needs 0F0, which runs in the same step"),
    ],
)
def test_steps_that_cannot_be(step, expected):
    other = [Action("F", 1, 0), Action("B", 1, 0)]
    error = reason([[step, Action("B", 0, 0)], other], num_microbatches=1, placement=[0, 1])
    assert error.reason.startswith("rank 0, step 0: ")
    assert expected in error.reason


# Charts as people draw them, one cell a slot


def test_a_possible_chart():
    chart = ["0F0 0F1 . . 0B0 . 0B1", ". 1F0 1B0 1F1 1B1 ."]
    assert check_chart(chart) == one_f_one_b(2, 2)
    assert check_chart([row.split() for row in chart]) == one_f_one_b(2, 2)
    assert check_chart(["0F0 . . . 0B0 :", ". 1F0 1B0 : . ."]) == gpipe(2, 1)


@pytest.mark.parametrize(
    ("chart", "expected"),
    [
        (["0F0 0F1 0B0 0B1", ". 1F0 1B0 1F1 1B1"], "rank 0, slot 2: 0B0 needs 1B0, which ends with this slot"),
        (["0F0 0F1 0B0 0B1", ". . . 1F0 1B0 1F1 1B1"], "0B0 needs 1B0, which ends with slot 4"),
        (["0F0 . 0B0", "1F0 1B0"], "rank 1, slot 0: 1F0 needs 0F0, which ends with this slot"),
        (["0F0 . . 0B0", ". 1F0"], "1B0 is missing"),
        (["0F0 . . 0B0 :", ". 1F0 1B0 :"], "rank 0, slot 3: 0B0 needs 1B0, which ends with this slot"),
        (["0F0 . . 0I0 0W0", ". 1F0 1I0 . . 1W0 1F0"], "runs a second time"),
    ],
)
def test_an_impossible_chart(chart, expected):
    with pytest.raises(ScheduleError) as caught:
        check_chart(chart)
    assert expected in caught.value.reason


# Times


def test_times_are_completed_from_what_is_given():
    def ends(**times):
        return simulate(zb_h1(1, 1), **times).makespan, simulate(gpipe(1, 1), **times).makespan

    assert ends() == (3, 3)
    assert ends(backward=4) == (5, 5)
    assert ends(input=3, weight=1) == (5, 5)
    assert ends(backward=3, input=2) == (4, 4)
    assert ends(backward=3, weight=1) == (4, 4)
    assert ends(backward=3, input=2, weight=2) == (5, 4)
    assert ends(forward=[5], backward=[4]) == (9, 9)


def test_a_number_is_a_rank_and_a_sequence_its_stages():
    whole = simulate(interleaved(2, 4, 2), forward=2, backward=4)
    assert whole.makespan == simulate(interleaved(2, 4, 2), forward=[1] * 4, backward=[2] * 4).makespan
    uneven = simulate(gpipe(2, 3), forward=[1, 5], backward=2)
    assert uneven.busy == (9, 21)
    assert uneven.idle == (uneven.makespan - 9, uneven.makespan - 21)
    assert uneven.bubble_over_ideal == pytest.approx(sum(uneven.idle) / 30)


def test_communication_lies_beside_computation_and_a_link_carries_one_message():
    hidden = simulate(one_f_one_b(1, 4), communication=9)
    assert (hidden.makespan, hidden.messages) == (12, ())
    timeline = simulate(gpipe(2, 2), forward=1, backward=1, communication=3)
    spans = [(str(m.action), m.sender, m.receiver, m.start, m.end) for m in timeline.messages]
    assert spans == [("0F0", 0, 1, 1, 4), ("0F1", 0, 1, 4, 7), ("1B0", 1, 0, 9, 12), ("1B1", 1, 0, 12, 15)]
    assert timeline.makespan == 16
    # On a V the turn stays on its rank: 2 (2p - 1) - 2 messages a micro-batch, not 2 (2p - 1).
    assert len(simulate(zb_v(3, 4), communication=0.1).messages) == 4 * (2 * 5 - 2)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({"forward": -1}, "forward=-1 must be 0 or more"),
        ({"communication": -1}, "communication=-1"),
        ({"forward": "1"}, "forward has 1 times, not 2"),
        ({"backward": 1e308}, r"backward=1e\+308 is out of bounds: a time is at most 1e\+30"),
        ({"forward": 1e-300, "backward": 0}, "every time is 0 or below 1e-30"),
        ({"weight": 3, "backward": 1}, "weight=3 is longer than the whole backward=1"),
    ],
)
def test_bad_times(times, message):
    with pytest.raises(ValueError, match=message):
        simulate(gpipe(2, 2), **times)


@pytest.mark.drawn
@pytest.mark.parametrize(("name", "v"), [("zb-v", 1), ("interleaved", 2)])  # the two with most actions
def test_sixty_four_ranks_and_a_thousand_micro_batches(name, v):
    timeline = simulate(schedule(name, 64, 1024, v))
    assert timeline.bubble_over_ideal < 0.1
    assert len(timeline.peak_in_flight) == 64


@pytest.mark.parametrize(("name", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)])
def test_what_ranks_hold_over_time_peaks_where_the_order_says(name, v):
    timeline = simulate(schedule(name, 4, 8, v), forward=1, input=1, weight=1)
    for points, peak in zip(timeline.held, timeline.peak_in_flight, strict=True):
        assert points[-1][1] == 0
        assert [when for when, _ in points] == sorted({when for when, _ in points})
        assert max(count for _, count in points) == peak * v


def test_time_grid():
    assert time_grid(simulate(one_f_one_b(2, 2))).splitlines() == [
        "time  rank 0  rank 1",
        "   0  0F0",
        "   1  0F1     1F0",
        "   2          1B0",
        "   3          :",
        "   4  0B0     1F1",
        "   5  :       1B1",
        "   6          :",
        "   7  0B1",
        "   8  :",
    ]
    assert "0F5+5B2" in time_grid(simulate(schedule("dualpipe-v", 3, 6)))
    assert step_grid([["a", None], ["b"]]).splitlines() == ["step  rank 0  rank 1", "   0  a       b", "   1"]


# The command


def test_command_prints_json_and_csv():
    from lablib.cli.schedule import schedule_text

    answer = json.loads(schedule_text("zb-h1", 4, 8, form="json", input=1.0, weight=None))
    assert (answer["makespan"], answer["peak_in_flight"], answer["times"]) == (27, [4] * 4, {"input": 1})
    assert answer["actions"][3][:2] == ["3F0", "3I0"]
    assert schedule_text("1f1b", 2, 1, form="csv").splitlines() == ["0F0,0B0", "1F0,1B0"]
    with pytest.raises(ValueError, match="unknown form"):
        schedule_text("1f1b", 2, 1, form="xml")


def test_command_through_typer():
    import typer
    from typer.testing import CliRunner

    from lablib.cli.schedule import schedule as command

    app = typer.Typer()
    app.command()(command)
    args = ["interleaved", "--stages", "4", "--microbatches", "8", "--virtual", "2"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0
    assert "makespan              28.5" in result.output
    assert json.loads(CliRunner().invoke(app, [*args, "--json"]).output)["bubble_over_ideal"] == 0.1875
