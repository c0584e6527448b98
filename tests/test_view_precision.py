"""The pictures of precision draw what they are given."""

import math

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex

from lablib.view import precision as draw
from lablib.view.style import COLORS


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def _bars(ax, role):
    return [bar for bar in ax.patches if to_hex(bar.get_facecolor()) == COLORS[role]]


def test_a_format_is_a_bar_of_full_precision_and_one_of_subnormals():
    fig = draw.format_axis({"small": (-9, -6, 8.8, 4), "large": (-149, -126, 128, 24)}, ticks=[-96, 0, 96])
    ax = fig.axes[0]
    full = [(bar.get_x(), bar.get_width()) for bar in _bars(ax, "weights")]
    assert full == [(-6, pytest.approx(14.8)), (-126, 254)]
    assert [(bar.get_x(), bar.get_width()) for bar in _bars(ax, "gradients")] == [(-9, 3), (-149, 23)]
    assert [text.get_text() for text in ax.texts] == ["4 bits", "24 bits"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["small", "large"]
    assert ax.get_xlim()[0] < -149


def test_bits_kept_over_magnitude():
    fig = draw.bits_kept([-32, -16, 0], {"narrow": [0, 5, 11], "wide": [8, 8, 8]})
    ax = fig.axes[0]
    assert [list(line.get_ydata()) for line in ax.lines] == [[0, 5, 11], [8, 8, 8]]
    assert list(ax.get_xticks()) == [-32, -16, 0]


def test_a_histogram_tells_zero_fewer_bits_and_kept_apart():
    counts = {-30: 7, -25: 3, -14: 2, 3: 1, 17: 4}
    fig = draw.gradient_histogram(counts, floor=-25, normal=-14, name="half", top=16)
    ax = fig.axes[0]
    for role, powers in {
        "backward": [-30],
        "gradients": [-25],
        "weights": [-14, 3],
        "activations": [17],
    }.items():
        bars = _bars(ax, role)
        assert [round(bar.get_x()) for bar in bars] == powers, role
        assert [bar.get_height() for bar in bars] == [counts[p] for p in powers], role
    assert [line.get_xdata()[0] for line in ax.lines] == [-25, -14]
    far = draw.gradient_histogram(counts | {-90: 1, -26: 5000}, floor=-25, normal=-14, name="half")
    assert far.axes[0].get_xlim()[0] > -40
    assert "zero in half" in [text.get_text() for text in fig.legends[0].get_texts()]


def test_shares_are_in_percent():
    fig = draw.shares({"before": {"a": 0.5, "b": 1.0}, "after": {"a": 0.0, "b": 0.25}}, xlabel="zeros (%)")
    assert [bar.get_width() for bar in fig.axes[0].patches] == [50, 100, 0, 25]
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["before", "after"]
    alone = draw.shares({"only": {"a": 0.5}}, xlabel="zeros (%)")
    assert not alone.legends


def test_curves_mark_where_a_run_is_lost():
    fig = draw.curves({"fp32": [3.0, 2.0, 1.0], "lost": [3.0, 2.5, math.nan]}, ylabel="a loss")
    reference, lost, cross = fig.axes[0].lines
    assert list(reference.get_ydata()) == [3, 2, 1]
    assert reference.get_linewidth() > lost.get_linewidth()
    assert [math.isnan(y) for y in lost.get_ydata()] == [False, False, True]
    assert (list(cross.get_xdata()), list(cross.get_ydata())) == ([1], [2.5])
    assert fig.axes[0].get_ylabel() == "a loss"


def test_the_loss_scale_marks_skipped_steps_where_they_are():
    fig = draw.loss_scale([24, 23, 22, 22], [0, 1])
    scale, skipped = fig.axes[0].lines
    assert list(scale.get_ydata()) == [24, 23, 22, 22]
    assert (list(skipped.get_xdata()), list(skipped.get_ydata())) == ([0, 1], [24, 23])
    flat = draw.loss_scale([16, 16], [])
    assert list(flat.axes[0].get_yticks()) == [16]


def test_sum_errors_are_points_on_lines_in_percent():
    fig = draw.sum_errors([2, 8], {"bf16": [0.002, 0.004]}, {"bf16": [0.0021, 0.0041]})
    line, points = fig.axes[0].lines
    assert list(line.get_ydata()) == pytest.approx([0.21, 0.41])
    assert list(points.get_ydata()) == pytest.approx([0.2, 0.4])
    assert points.get_linestyle() == "None"
    assert [label.get_text() for label in fig.axes[0].get_xticklabels()] == ["2", "8"]


def test_history_marks_steps():
    fig = draw.history({"now": [1.0, 8.0], "covered": [1.0, 1.0]}, ylabel="magnitude", marks=[1], start=1)
    now, covered, mark = fig.axes[0].lines
    assert (list(now.get_ydata()), list(covered.get_ydata())) == ([1, 8], [1, 1])
    assert list(now.get_xdata()) == [1, 2]
    assert list(mark.get_xdata()) == [1, 1]
    assert fig.axes[0].get_yscale() == "log"
