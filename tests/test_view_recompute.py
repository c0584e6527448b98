"""The pictures of recomputation draw what they are given."""

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex

from lablib.view import recompute
from lablib.view.style import COLORS


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def test_a_bar_for_each_tensor_in_the_colour_of_its_kind():
    fig = recompute.tensor_bars([("q", "attention", 2), ("softmax", "scores", 5)], xlabel="MB")
    bars = fig.axes[0].patches
    assert [bar.get_width() for bar in bars] == [2, 5]
    assert [to_hex(bar.get_facecolor()) for bar in bars] == [COLORS["activations"], COLORS["backward"]]
    assert [label.get_text() for label in fig.axes[0].get_yticklabels()] == ["q", "softmax"]
    assert {text.get_text() for text in fig.legends[0].get_texts()} == {"attention", "scores"}


def test_what_is_kept_over_time_is_a_step_line_with_the_end_of_forward():
    fig = recompute.kept_over_time(
        {"none": [0, 2, 4, 2, 0], "full": [0, 1, 2, 3, 1]}, forward=2, ylabel="numbers"
    )
    ax = fig.axes[0]
    assert list(ax.lines[0].get_ydata()) == [0, 2, 4, 2, 0]
    assert ax.lines[0].get_drawstyle() == "steps-post"
    assert list(ax.lines[2].get_xdata()) == [2, 2]


def test_a_grid_has_a_cell_for_every_part_and_outlines_what_runs_again():
    cells = [{"input": "kept", "rest": "again"}, {"input": "host", "rest": "again"}]
    fig = recompute.unit_grid({"some": cells}, ("input", "rest"))
    patches = fig.axes[0].patches
    assert len(patches) == 4
    assert [patch.get_facecolor()[3] > 0 for patch in patches] == [True, False, True, False]
    words = {text.get_text() for text in fig.legends[0].get_texts()}
    assert words == {"kept", "computed again", "on the host"}
    assert {"some", "block 0", "block 1"} <= {text.get_text() for text in fig.axes[0].texts}


def test_the_frontier_joins_what_nothing_beats_and_marks_runs():
    points = [
        ("none", 0, 0, False, True),
        ("a", 1, 0, False, False),
        ("b", 3, 2, False, False),
        ("c", 4, 0, True, False),
    ]
    fig = recompute.frontier_plot(points, xlabel="saved", ylabel="paid", measured=[(1, 0)])
    ax = fig.axes[0]
    assert [line.get_marker() for line in ax.lines[:4]] == ["o", "o", "o", "s"]
    assert [line.get_markerfacecolor() == "none" for line in ax.lines[:4]] == [True, False, False, False]
    assert list(ax.lines[4].get_xdata()) == [1]
    assert list(ax.lines[5].get_xdata()) == [1, 3]
    assert {"none", "a", "b", "c"} == {text.get_text() for text in ax.texts}


def test_a_name_far_from_its_mark_gets_a_line_to_it():
    points = [("near", 0, 0, False, False), ("far", 1, 1, False, False)]
    fig = recompute.frontier_plot(points, xlabel="saved", ylabel="paid", places={"far": (-40, 30)})
    near, far = fig.axes[0].texts
    assert near.arrow_patch is None
    assert far.arrow_patch is not None
    assert far.get_ha() == "right"


def test_segment_curves_mark_the_least_peak():
    fig = recompute.segment_curves([1, 2, 4], {"chain": [5, 4, 6]}, ylabel="tensors")
    line, mark = fig.axes[0].lines
    assert list(line.get_ydata()) == [5, 4, 6]
    assert (list(mark.get_xdata()), list(mark.get_ydata())) == ([2], [4])


def test_step_times_show_samples_median_and_prediction():
    fig = recompute.step_times({"none": [3, 1, 2], "full": [5, 4, 9]}, {"full": 6})
    ax = fig.axes[0]
    assert [bar.get_width() for bar in ax.patches] == [2, 5]
    assert [sorted(line.get_xdata()) for line in ax.lines] == [[1, 2, 3], [4, 5, 9], [6, 6]]
