"""The picture of a pipeline: a bar an action, room to read, one scale."""

import pytest

pytest.importorskip("matplotlib")

import matplotlib.pyplot as plt

from lablib.calc.schedules import dualpipe_v, interleaved, one_f_one_b, simulate, zb_h1
from lablib.view.pipeline import pipeline
from lablib.view.style import themed_svg


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def bars(ax):
    return [path for collection in ax.collections for path in collection.get_paths()]


def test_a_bar_an_action_and_a_lane_of_idle_behind():
    timeline = simulate(one_f_one_b(4, 8))
    (ax,) = pipeline({"1F1B": timeline.events}).axes
    assert len(bars(ax)) == len(timeline.events) + 4
    assert ax.get_xlim() == (0, 33)
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"rank {i}" for i in range(4)]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # rank 0 on top
    labels = sorted(text.get_text() for text in ax.texts)
    assert labels == sorted(str(event.action.microbatch) for event in timeline.events)


def test_overlapped_actions_share_a_lane():
    timeline = simulate(dualpipe_v(2, 6))
    (ax,) = pipeline({"DualPipe-V": timeline.events}).axes
    assert len(bars(ax)) == sum(len(event.action.parts) for event in timeline.events) + 2


def test_panels_share_the_axis_and_the_legend_says_what_is_there():
    one, two = simulate(one_f_one_b(3, 4)), simulate(zb_h1(3, 4), communication=0.1)
    fig = pipeline({"a": one.events, "b": two.events}, messages={"b": two.messages}, unit="ms")
    first, second = fig.axes
    assert first.get_xlim() == second.get_xlim() == (0, max(one.makespan, two.makespan))
    assert second.get_xlabel() == "time (ms)"
    assert len(second.lines) == len(two.messages) == 2 * 4 * 2
    assert [text.get_text() for text in fig.legends[0].get_texts()] == [
        "forward",
        "backward",
        "backward: input",
        "backward: weight",
        "communication",
        "idle",
    ]


@pytest.mark.parametrize("timeline", [simulate(interleaved(4, 8, 2)), simulate(one_f_one_b(16, 24))])
def test_it_reads_on_a_narrow_screen(timeline):
    fig = pipeline({"x": timeline.events})
    assert fig.get_size_inches()[0] <= 5.2
    fig.canvas.draw()
    texts = [text for text in fig.findobj(plt.Text) if text.get_text()]
    assert min(text.get_fontsize() for text in texts) >= 9
    for ax in fig.axes:  # no number is wider than its bar
        for text in ax.texts:
            box = text.get_window_extent()
            left, right = ax.transData.inverted().transform([(box.x0, 0), (box.x1, 0)])[:, 0]
            event = next(e for e in timeline.events if e.start <= text.get_position()[0] <= e.end)
            assert right - left <= event.end - event.start
    assert themed_svg(fig, "a pipeline").startswith("<svg")


def test_colours_of_a_ranks_stages_differ():
    timeline = simulate(interleaved(2, 4, 2))
    (ax,) = pipeline({"x": timeline.events}).axes
    assert len({tuple(c.get_facecolor()[0]) for c in ax.collections}) == 4 + 1


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="at least one panel"):
        pipeline({})
    with pytest.raises(ValueError, match="an event in each"):
        pipeline({"x": []})
    with pytest.raises(ValueError, match="messages for 'y', but the panels are 'x'"):
        pipeline({"x": simulate(one_f_one_b(1, 1)).events}, messages={"y": []})
