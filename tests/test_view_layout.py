"""The pictures of layouts draw what they are given."""

import matplotlib.pyplot as plt
import pytest

from lablib.view import layout
from lablib.view.mesh import predicted_against_published


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def test_a_box_for_each_node_in_the_colour_of_its_replica():
    fig = layout.node_map({"one": [("a", 0), ("b", 0), ("c", 1)], "two": [("a", 0), ("b", 1)]}, columns=2)
    one, two = fig.axes
    assert [len(ax.patches) for ax in fig.axes] == [3, 2]
    colors = [patch.get_facecolor() for patch in one.patches]
    assert colors[0] == colors[1] != colors[2]
    assert [(patch.get_x() // 1, patch.get_y() // 1) for patch in one.patches] == [(0, 0), (1, 0), (0, -1)]
    assert [text.get_text() for text in two.texts] == ["node 0\na", "node 1\nb"]


def test_bars_of_axes_are_logarithmic_and_zero_is_no_bar():
    fig = layout.axis_bars({"fast": {"tp": 20.0, "pp": 0.0}, "slow": {"tp": 200.0, "pp": 3.0}}, xlabel="s")
    ax = fig.axes[0]
    assert ax.get_xscale() == "log"
    assert [bar.get_width() for bar in ax.patches] == [20, 200, 3]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["tp", "pp", "tp", "pp"]
    assert {"20", "200", "3", "fast", "slow"} == {text.get_text() for text in ax.texts}
    low, high = ax.get_xlim()
    assert low < 3
    assert high > 200


def test_a_pair_of_bars_for_each_group():
    fig = layout.predicted_and_measured({"tp": (1, 2), "dp": (3, 4)}, ylabel="bytes")
    assert [bar.get_height() for bar in fig.axes[0].patches] == [1, 3, 2, 4]
    assert [label.get_text() for label in fig.axes[0].get_xticklabels()] == ["tp", "dp"]
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["predicted", "measured"]


def test_curves_are_percent_and_the_rule_is_a_line():
    fig = layout.curves([1, 2, 4], {"a": [0.5, 0.25, 0.1]}, xlabel="x", ylabel="y", rule=(4, "rule"))
    ax = fig.axes[0]
    assert list(ax.lines[0].get_ydata()) == [50, 25, 10]
    assert list(ax.lines[1].get_xdata()) == [4, 4]
    assert [text.get_text() for text in ax.texts] == ["rule"]
    assert len(layout.curves([1, 2], {"a": [1, 0]}, xlabel="x", ylabel="y").axes[0].lines) == 1


def test_scores_have_one_colour_a_name_and_one_entry_in_the_legend():
    fig = layout.scores(
        {"x": {"planner": 1.0, "published": 1.3}, "y": {"planner": 1.0, "yours": 2.0}}, xlabel="s"
    )
    bars = fig.axes[0].patches
    assert [bar.get_width() for bar in bars] == [1, 1.3, 1, 2]
    assert bars[0].get_facecolor() == bars[2].get_facecolor() != bars[1].get_facecolor()
    assert sorted(text.get_text() for text in fig.legends[0].get_texts()) == ["planner", "published", "yours"]


def test_published_rates_lie_where_they_are_and_every_point_is_inside():
    ax = predicted_against_published([("a", 44, 49), ("a", 138, 110), ("b", 430, 465)]).axes[0]
    points = [line for line in ax.lines if line.get_marker() != "None"]
    assert [list(line.get_xdata()) for line in points] == [[44, 138], [430]]
    assert [list(line.get_ydata()) for line in points] == [[49, 110], [465]]
    assert ax.get_xlim() == ax.get_ylim()
    assert ax.get_xlim()[0] < 44
    assert ax.get_xlim()[1] > 465
