"""The pictures of a run draw what they are given."""

import matplotlib.pyplot as plt
import pytest

from lablib.view import run
from lablib.view.style import COLORS, themed_svg
from lablib.view.timeline import Span


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def _texts(ax):
    return [text.get_text() for text in ax.texts]


def _bars(ax):
    """Return (left, width, row) of the bars that are not only there for the legend."""
    patches = [patch for patch in ax.patches if patch.get_width()]
    return [(p.get_x(), p.get_width(), round(p.get_y() + p.get_height() / 2, 6)) for p in patches]


SPANS = [
    Span("rank 0", "forward", 0, 3),
    Span("rank 0", "communication", 3, 10),
    Span("rank 1", "forward", 0, 9),
]


def test_a_timeline_has_a_lane_for_every_rank_the_first_on_top():
    fig = run.rank_timeline(SPANS, {"rank 0": "30%", "rank 1": "90%"}, header="computing")
    (ax,) = fig.axes
    assert _bars(ax) == [(0, 3, 1), (3, 7, 1), (0, 9, 0)]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 1", "rank 0"]
    assert _texts(ax) == ["computing", "30%", "90%"]
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["computing", "communication"]
    assert ax.get_xlim()[1] > 10
    with pytest.raises(ValueError, match="at least one span"):
        run.rank_timeline([], {})


def test_loss_curves_keep_their_points_and_marks():
    fig = run.loss_curves({"calm": [(1, 5.0), (2, 4.0)], "killed": [(1, 5.0), (2, 4.0)]}, {"kill -9": 1.5})
    (ax,) = fig.axes
    calm, killed, mark = ax.lines
    assert list(calm.get_ydata()) == list(killed.get_ydata()) == [5.0, 4.0]
    # Two runs that coincide are both to be seen.
    assert calm.get_linewidth() > 2 * killed.get_linewidth()
    assert list(mark.get_xdata()) == [1.5, 1.5]
    assert _texts(ax) == ["kill -9"]


def test_memory_shows_what_did_not_fit_as_text():
    fig = run.memory_bars({"batch 8": 10, "batch 16": 20}, {"batch 8": 11, "batch 16": None}, capacity=15)
    (ax,) = fig.axes
    assert sorted(width for _, width, _ in _bars(ax)) == [10, 11, 20]
    assert " does not fit" in _texts(ax)
    assert list(ax.lines[0].get_xdata()) == [15, 15]


def test_the_interval_is_stacked_to_the_sum():
    fig = run.checkpoint_interval(
        [1, 10, 100], {"restarts": [0.1] * 3, "checkpoints": [0.4, 0.04, 0.01]}, {"best": 10}
    )
    (ax,) = fig.axes
    tops = [collection.get_paths()[0].get_extents().y1 for collection in ax.collections]
    assert tops == pytest.approx([10, 50])
    assert ax.get_ylim() == pytest.approx((0, 50))
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1", "2", "5", "10", "20", "50", "100"]
    assert _texts(ax) == ["best"]


def test_curves_name_sizes_in_powers_of_two():
    fig = run.curves([512, 1024, 2**20], {"a": [1, 2, 3]}, xlabel="tokens", ylabel="%", marks={"here": 1024})
    (ax,) = fig.axes
    assert [t.get_text() for t in ax.get_xticklabels()] == ["512", "1K", "1M"]
    assert list(ax.lines[0].get_ydata()) == [1, 2, 3]
    assert ax.get_yscale() == "linear"
    both = run.curves([1, 2], {"a": [1, 100]}, xlabel="", ylabel="", log="xy").axes[0]
    assert both.get_yscale() == "log"


@pytest.mark.parametrize(
    "draw",
    [
        lambda: run.rank_timeline(SPANS, {}),
        lambda: run.loss_curves({"calm": [(1, 5.0)]}, {}),
        lambda: run.memory_bars({"batch 8": 10}, {}, capacity=15),
        lambda: run.checkpoint_interval([1, 10], {"work done again": [0.1, 0.2]}, {}),
        lambda: run.curves([1, 2], {"a": [1, 2]}, xlabel="x", ylabel="y", bottom=0),
    ],
)
def test_every_picture_takes_the_page_s_colours_and_fits_a_phone(draw):
    fig = draw()
    assert fig.get_size_inches()[0] <= 5.2
    svg = themed_svg(fig, "a picture")
    assert "currentColor" in svg
    assert any(color in svg for color in COLORS.values())
