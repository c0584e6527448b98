"""The pictures of FSDP draw what they are given."""

import matplotlib.pyplot as plt
import pytest

from lablib.view import fsdp
from lablib.view.style import themed_svg


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def _texts(ax):
    return [text.get_text() for text in ax.texts]


def test_a_layout_has_a_cell_for_every_number_and_leaves_padding_empty():
    fig = fsdp.layouts({"by rows": [[("a1", 0), ("b1", 1)], [("a2", 0), ("", None)]], "flat": [[("a1", 0)]]})
    first, second = fig.axes
    assert [patch.get_facecolor()[3] > 0 for patch in first.patches] == [True, True, True, False]
    assert len({patch.get_facecolor() for patch in first.patches[:2]}) == 2
    assert _texts(first) == ["rank 0", "a1", "b1", "rank 1", "a2"]
    assert (len(second.patches), second.get_title()) == (1, "flat")


def test_gathered_memory_is_a_step_that_holds_until_the_next_point():
    fig = fsdp.gathered(
        {"per block": [(0, 1), (2, 3), (5, 0)], "none": [(0, 4), (5, 0)]}, unit="GB", xlabel="ms"
    )
    (ax,) = fig.axes
    assert [line.get_drawstyle() for line in ax.lines] == ["steps-post"] * 2
    assert list(ax.lines[0].get_ydata()) == [1, 3, 0]
    assert "GB" in ax.get_ylabel()


def test_unit_size_shows_time_above_memory_and_the_floor():
    fig = fsdp.unit_size(
        [1, 8, 64], [3, 2, 4], [16, 2, 0.3], computing=1.5, names={1: "none", 8: "block", 64: "linear"}
    )
    top, bottom = fig.axes
    assert list(top.lines[0].get_ydata()) == [3, 2, 4]
    assert list(top.lines[1].get_ydata()) == [1.5, 1.5]
    assert list(bottom.lines[0].get_ydata()) == [16, 2, 0.3]
    assert [t for t in _texts(top) if t in ("none", "block", "linear")] == ["none", "block", "linear"]


def test_a_mesh_gives_ranks_of_a_column_one_colour():
    fig = fsdp.mesh([[0, 1], [0, 1]], rows="shard", columns="replicate")
    (ax,) = fig.axes
    colors = [patch.get_facecolor() for patch in ax.patches]
    assert colors[0] == colors[2] != colors[1] == colors[3]
    assert "rank 3\nshard 1" in _texts(ax)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: fsdp.layouts({"a": [[("x", 0), ("", None)]]}),
        lambda: fsdp.gathered({"a": [(0, 1), (1, 0)]}, unit="GB", xlabel="ms"),
        lambda: fsdp.unit_size([1, 2], [1, 2], [2, 1], computing=1, names={}),
        lambda: fsdp.mesh([[0, 1]], rows="a", columns="b"),
    ],
)
def test_figures_take_their_colours_from_the_page(draw):
    fig = draw()
    svg = themed_svg(fig, "what is drawn")
    assert fig.get_figwidth() <= 5.2
    assert "currentColor" in svg
    assert "fill: #000000" not in svg
