"""The pictures of ZeRO draw what they are given."""

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex

from lablib.view import zero
from lablib.view.style import COLORS


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def _full(fig, role):
    cells = [patch for patch in fig.axes[0].patches if to_hex(patch.get_edgecolor()) == COLORS[role]]
    return len(cells), sum(patch.get_facecolor()[3] > 0 for patch in cells)


def test_a_grid_fills_what_a_rank_holds_and_outlines_the_rest():
    held = [
        {
            "weights": [True] * 3,
            "gradients": [rank == part for part in range(3)],
            "optimizer": [False] * 3,
        }
        for rank in range(2)
    ]
    fig = zero.stage_grid({"some stage": held})
    assert _full(fig, "weights") == (6, 6)
    assert _full(fig, "gradients") == (6, 2)
    assert _full(fig, "optimizer") == (6, 0)
    assert {"rank 0", "rank 1", "some stage"} <= {text.get_text() for text in fig.axes[0].texts}


def test_reduction_curves_show_factors_and_limits():
    fig = zero.reduction_curves([1, 2, 4], {"stage 1": [1, 1.6, 2.29]}, {"4x": 4})
    ax = fig.axes[0]
    assert list(ax.lines[0].get_ydata()) == [1, 1.6, 2.29]
    assert list(ax.lines[1].get_ydata()) == [4, 4]
    assert "4x" in [text.get_text() for text in ax.texts]


def test_traffic_adds_up_along_a_bar():
    fig = zero.traffic_bars(
        {"stage 3": [("gather", "weights", 1), ("scatter", "gradients", 2)]}, xlabel="units"
    )
    bars = fig.axes[0].patches
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [(0, 1), (1, 2)]
    assert fig.axes[0].get_xlabel() == "units"


def test_sharding_holds_the_whole_model_both_ways():
    fig = zero.sharding([8, 4, 4], [0, 1, 0], 2)
    heights = [[bar.get_height() for bar in ax.patches] for ax in fig.axes]
    assert sorted(heights[0]) == [4, 4, 8]
    assert sum(heights[0]) == sum(heights[1]) == 16
    assert len(heights[1]) == 6


def test_stage_times_show_the_median_and_every_sample():
    fig = zero.stage_times({"stage 1": [3, 1, 2], "stage 2": [5, 4, 9]})
    ax = fig.axes[0]
    assert [bar.get_width() for bar in ax.patches] == [2, 5]
    assert [sorted(line.get_xdata()) for line in ax.lines] == [[1, 2, 3], [4, 5, 9]]
    assert "ms" in ax.get_xlabel()


def test_offload_is_in_percent():
    fig = zero.offload_curves([2048, 4096], {"PCIe": [0.3, 0.5]}, xlabel="tokens")
    assert list(fig.axes[0].lines[0].get_ydata()) == [30, 50]
    assert "%" in fig.axes[0].get_ylabel()
