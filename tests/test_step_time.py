"""The measurement of rung 02: what it returns, and how a trace becomes bars. Never how long anything takes."""

import pytest

from lablib.launch.measure import linear_stack, medians, step_times, trace_spans
from lablib.launch.measure.step_time import MODES


def test_every_mode_of_every_configuration_is_sampled():
    samples = step_times(widths=[16, 32], tokens=[4], ranks=[1, 2], repeats=2)
    params = [sum(p.numel() for p in linear_stack(width).parameters()) for width in (16, 32)]
    assert params == [4 * 16 * 17, 4 * 32 * 33]
    expected = {(1, p, "compute", i) for p in params for i in range(2)}
    expected |= {(2, p, mode, i) for p in params for mode in MODES for i in range(2)}
    assert {(s["ranks"], s["params"], s["mode"], s["repeat"]) for s in samples} == expected
    assert len(samples) == len(expected)
    assert all(s["seconds"] > 0 and s["tokens"] == 4 and s["grad_bytes"] == 4 for s in samples)
    rows = medians(samples)
    assert [(row["ranks"], row["params"]) for row in rows] == [(n, p) for n in (1, 2) for p in params]
    assert set(MODES) <= set(rows[-1])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"widths": []}, "widths"),
        ({"tokens": [0]}, "tokens"),
        ({"ranks": [-1]}, "ranks"),
        ({"repeats": 0}, "repeats"),
        ({"modes": ["compute", "magic"]}, "magic"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        step_times(**{"widths": [16], "tokens": [4], "ranks": [1], **wrong})


def test_a_trace_becomes_bars():
    events = [
        ("forward", 0, 0.0),
        ("gradient", 0, 0.010),
        ("launch", 0, 0.011),
        ("gradient", 1, 0.015),
        ("gradient", 1, 0.020),
        ("launch", 1, 0.021),
        ("sync", 0, 0.022),
        ("reduced", 0, 0.030),
        ("reduced", 1, 0.041),
    ]
    bars = trace_spans([(event, message, 500 + seconds) for event, message, seconds in events])
    assert [(lane, label) for lane, _, _, _, label in bars] == [
        ("backward", "0"),
        ("backward", "1"),
        ("all-reduce", "0"),
        ("all-reduce", "1"),
    ]
    assert [(start, end) for _, _, start, end, _ in bars] == [
        (0.0, pytest.approx(10)),
        (pytest.approx(10), pytest.approx(20)),
        (pytest.approx(11), pytest.approx(30)),
        (pytest.approx(30), pytest.approx(41)),
    ]
