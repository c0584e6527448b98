"""The pictures of communication draw what they are given."""

import matplotlib.pyplot as plt
import pytest

from lablib.view import communication, fabric


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def test_every_message_is_an_arrow_as_thick_as_its_share():
    fig = fabric.message_rounds({"swap": [[(0, 1, 1.0), (1, 0, 0.5)]], "quiet": [[]]}, ranks=2)
    swap, quiet = fig.axes
    thick, thin = swap.patches
    assert thick.get_linewidth() > thin.get_linewidth()
    assert not quiet.patches
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["swap", "quiet"]


def test_cards_are_wired_to_the_leaves_that_are_named():
    fig = fabric.fabric({"rails": [[0, 1], [0, 1]]})
    ax = fig.axes[0]
    wires = [line for line in ax.lines if list(line.get_ydata()) == [0.75, 2.8]]
    assert len({wire.get_xdata()[1] for wire in wires}) == 2
    # Two leaves with a link to the spine each, and four cards.
    assert (len(ax.lines), len(wires)) == (6, 4)


def test_cost_bars_put_bytes_after_latency():
    fig = communication.cost_bars({"ring": (3, 1), "tree": (1, 5)}, xlabel="µs")
    bars = [(bar.get_x(), bar.get_width()) for bar in fig.axes[0].patches]
    assert bars == [(0, 3), (0, 1), (3, 1), (1, 5)]


def test_curves_and_points_of_one_name_share_a_color():
    fig = communication.time_curves([1024, 2048], {"ring": [1, 2], "tree": [3, 4]}, points={"tree": [5, 6]})
    ring, tree, dots = fig.axes[0].lines
    assert list(dots.get_ydata()) == [5000, 6000]
    assert dots.get_color() == tree.get_color() != ring.get_color()


def test_residuals_are_percent_of_the_measured_time():
    fig = communication.fit_and_residuals([1, 2], [2.0, 4.0], {"line": [3.0, 4.0]})
    assert list(fig.axes[1].lines[0].get_ydata()) == [50, 0]


def test_efficiency_is_shown_in_percent():
    fig = communication.efficiency_over_links(["wide", "narrow"], [0.9, 0.5], [0.8, 0.4])
    assert [list(line.get_ydata()) for line in fig.axes[0].lines] == [[90, 50], [80, 40]]


def test_a_prediction_is_a_mark_on_its_own_row():
    fig = communication.predicted_and_measured({"a": (1, 2), "b": (3, 4)}, xlabel="ms")
    assert [bar.get_width() for bar in fig.axes[0].patches] == [2, 4]
    assert list(fig.axes[0].lines[0].get_xdata()) == [1, 3]


def test_a_ratio_above_one_has_another_color():
    fig = communication.ratio_bars({"slow": 2.0, "fast": 0.5}, xlabel="ours/theirs")
    slow, fast = fig.axes[0].patches
    assert slow.get_facecolor() != fast.get_facecolor()


def test_tails_keep_their_values():
    fig = communication.tail_curves([1, 2, 4], {"p": [1, 2, 3]}, ylabel="%")
    assert list(fig.axes[0].lines[0].get_ydata()) == [1, 2, 3]
