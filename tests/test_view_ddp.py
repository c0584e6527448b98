"""The pictures of data parallelism draw what they are given, and refuse to draw nothing."""

import matplotlib.pyplot as plt
import pytest

from lablib.calc.ring import ring_states
from lablib.view import ddp
from lablib.view.timeline import Span, timeline


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def test_a_timeline_has_a_panel_per_case_and_a_bar_per_span():
    spans = [Span("backward", "backward", 0, 10, "L1"), Span("link", "communication", 10, 18)]
    fig = timeline({"first": spans, "second": spans[:1]})
    assert [len(ax.patches) for ax in fig.axes] == [2, 1]
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["first", "second"]
    assert fig.axes[-1].get_xlabel() == "time (ms)"
    assert "L1" in [text.get_text() for text in fig.axes[0].texts]


@pytest.mark.parametrize("panels", [{}, {"empty": []}])
def test_a_timeline_of_nothing_is_refused(panels):
    with pytest.raises(ValueError, match="span"):
        timeline(panels)


def test_ring_steps_write_every_count():
    states = {f"step {i}": [[len(c) for c in row] for row in held] for i, held in enumerate(ring_states(3))}
    fig = ddp.ring_steps(states)
    drawn = [ax for ax in fig.axes if ax.get_title()]
    assert [ax.get_title() for ax in drawn] == list(states)
    assert all(len(ax.patches) == 9 for ax in drawn)
    assert [t.get_text() for t in drawn[-1].texts].count("3") == 9


def test_curves_carry_units_and_names():
    fig = ddp.all_reduce_curves([2, 4, 8], {"ring": [0.1, 0.1, 0.1], "root": [0.1, 0.2, 0.4]})
    assert "ms" in fig.axes[0].get_ylabel()
    assert list(fig.axes[0].lines[1].get_ydata()) == [100, 200, 400]
    fig = ddp.hiding_curves([100, 1000], {"link": [2.0, 0.2]})
    assert "tokens" in fig.axes[0].get_xlabel()
    fig = ddp.bucket_curve([1, 10, 100], {"64 ranks": [0.3, 0.1, 0.2]}, default=25)
    assert "MiB" in fig.axes[0].get_xlabel()
    assert "25 MiB" in [t.get_text() for t in fig.axes[0].texts]


def test_a_step_is_computation_plus_exposed_communication():
    fig = ddp.step_split(["a", "b"], [0.010, 0.020], [0.005, -0.001], [0.016, 0.018])
    widths = [patch.get_width() for patch in fig.axes[0].patches]
    assert widths == pytest.approx([10, 20, 5, 0])
    assert list(fig.axes[0].lines[0].get_xdata()) == pytest.approx([16, 18])


def test_equal_loss_curves_are_both_visible():
    fig = ddp.loss_curves({"1 rank": [3.0, 2.0], "2 ranks": [3.0, 2.0]})
    first, second = fig.axes[0].lines
    assert first.get_linewidth() > second.get_linewidth()
