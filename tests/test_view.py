"""Every figure draws the numbers it is given, with units on its axes, in colours that follow the page."""

from __future__ import annotations

import math
import re

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex

from lablib.calc.layouts import mesh
from lablib.calc.schedules import interleaved, one_f_one_b, simulate, zb_h1
from lablib.calc.schedules.generators import dualpipe_v
from lablib.view import communication, memory, precision, recompute
from lablib.view import communication as fabric
from lablib.view import layouts as layout
from lablib.view import layouts as mesh_view
from lablib.view import layouts as parallelism
from lablib.view import runs as run
from lablib.view import runs as scaling
from lablib.view import schedules as pipeline_chart
from lablib.view.parallel import data as ddp
from lablib.view.parallel import experts as mixture
from lablib.view.parallel import fsdp, zero
from lablib.view.runs import Span, timeline
from lablib.view.schedules import pipeline
from lablib.view.style import COLORS, figure, show, themed_svg


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def _read(fig) -> dict:
    """What a figure shows: bars as (left, width, height), lines as their data, and words."""
    axes = fig.axes
    bars = [[p for p in ax.patches if hasattr(p, "get_width") and p.get_width()] for ax in axes]
    return {
        "widths": [p.get_width() for p in bars[0]],
        "lefts": [p.get_x() for p in bars[0]],
        "heights": [p.get_height() for p in bars[0]],
        "patches": [len(ax.patches) for ax in axes],
        "y": [list(line.get_ydata()) for ax in axes for line in ax.lines],
        "x": [list(line.get_xdata()) for ax in axes for line in ax.lines],
        "texts": {t.get_text() for ax in axes for t in ax.texts},
        "titles": [ax.get_title() or ax.get_title(loc="left") for ax in axes],
        "legend": [t.get_text() for legend in fig.legends for t in legend.get_texts()],
        "rows": [t.get_text() for t in axes[0].get_yticklabels()],
        "columns": [t.get_text() for t in axes[0].get_xticklabels()],
        "labels": {ax.get_xlabel() for ax in axes} | {ax.get_ylabel() for ax in axes},
    }


_SPANS = [Span("backward", "backward", 0, 10, "L1"), Span("link", "communication", 10, 18)]
_LANES = [Span("rank 0", "forward", 0, 3), Span("rank 0", "communication", 3, 10), Span("rank 1", "forward", 0, 9)]
_HELD = [{"weights": [True] * 3, "gradients": [r == p for p in range(3)], "optimizer": [False] * 3} for r in (0, 1)]
_CUT = [{"input": "kept", "rest": "again"}, {"input": "host", "rest": "again"}]
_POINTS = [("none", 0, 0, False, True), ("a", 1, 0, False, False), ("b", 3, 2, False, False), ("c", 4, 0, True, False)]
_PAPER = simulate(one_f_one_b(2, 2))
_MESH = mesh(tp=2, dp=2, pp=2, gpus_per_node=4)

#: By name: the figure, and what must be read from it. Sets are parts of what is there; lists begin it.
FIGURES = {
    "message_rounds": (
        lambda: fabric.message_rounds({"swap": [[(0, 1, 1.0), (1, 0, 0.5)]], "quiet": [[]]}, ranks=2),
        {"patches": [2, 0], "titles": ["swap", "quiet"]},
    ),
    "fabric": (lambda: fabric.fabric({"rails": [[0, 1], [0, 1]]}), {"titles": ["rails"]}),
    "time_curves": (
        lambda: communication.time_curves([1024, 2048], {"ring": [1, 2], "tree": [3, 4]}, points={"tree": [5, 6]}),
        {"y": [[1000, 2000], [3000, 4000], [5000, 6000]]},
    ),
    "fit_and_residuals": (
        lambda: communication.fit_and_residuals([1, 2], [2.0, 4.0], {"line": [3.0, 4.0]}),
        {},
    ),
    "efficiency_over_links": (
        lambda: communication.efficiency_over_links(["wide", "narrow"], [0.9, 0.5], [0.8, 0.4]),
        {"y": [[90, 50], [80, 40]]},
    ),
    "predicted_and_measured": (
        lambda: communication.predicted_and_measured({"a": (1, 2), "b": (3, 4)}, xlabel="ms"),
        {"widths": [2, 4], "x": [[1, 3]], "labels": {"ms"}},
    ),
    "timeline": (
        lambda: timeline({"first": _SPANS, "second": _SPANS[:1]}),
        {"patches": [2, 1], "titles": ["first", "second"], "labels": {"time (ms)"}, "texts": {"L1"}},
    ),
    "hiding_curves": (lambda: ddp.hiding_curves([100, 1000], {"link": [2.0, 0.2]}), {}),
    "bucket_curve": (
        lambda: ddp.bucket_curve([1, 10, 100], {"64 ranks": [0.3, 0.1, 0.2]}, default=25),
        {"texts": {"25 MiB"}},
    ),
    "step_split": (
        lambda: ddp.step_split(["a", "b"], [0.010, 0.020], [0.005, -0.001], [0.016, 0.018]),
        {"widths": [10, 20, 5], "x": [[16, 18]]},
    ),
    "loss_curves": (
        lambda: ddp.loss_curves({"1 rank": [3.0, 2.0], "2 ranks": [3.0, 2.0]}),
        {"y": [[3, 2], [3, 2]]},
    ),
    "layouts": (
        lambda: fsdp.layouts({"by rows": [[("a1", 0), ("b1", 1)], [("a2", 0), ("", None)]], "flat": [[("a1", 0)]]}),
        {"patches": [4, 1], "titles": ["by rows", "flat"], "texts": {"rank 0", "a1", "b1", "rank 1", "a2"}},
    ),
    "gathered": (
        lambda: fsdp.gathered({"per block": [(0, 1), (2, 3), (5, 0)], "none": [(0, 4), (5, 0)]}, unit="GB", xlabel="ms"),
        {"y": [[1, 3, 0], [4, 0]], "labels": {"ms"}},
    ),
    "bytes_by_degree": (
        lambda: mixture.bytes_by_degree([2, 4], {"far": {"a": [0, 1], "b": [0, 2]}, "near": {"a": [3, 4]}}, ylabel="MB"),
        {"y": [[0, 1], [0, 2], [3, 4]], "titles": ["far", "near"], "legend": ["a", "b"], "labels": {"MB"}},
    ),
    "balance_runs": (
        lambda: mixture.balance_runs({"none": [1, 2, 2], "bias": [1, 2, 1]}, {"none": [0.9, 0.1], "bias": [0.5, 0.5]}),
        {"y": [[1, 2, 2], [1, 2, 1]], "patches": [0, 4], "legend": ["none", "bias"]},
    ),
    "fsdp mesh": (
        lambda: fsdp.mesh([[0, 1], [0, 1]], rows="shard", columns="replicate"),
        {"texts": {"rank 3\nshard 1"}},
    ),
    "axis_bars": (
        lambda: layout.axis_bars({"fast": {"tp": 20.0, "pp": 0.0}, "slow": {"tp": 200.0, "pp": 3.0}}, xlabel="s"),
        {"widths": [20, 200, 3], "rows": ["tp", "pp", "tp", "pp"], "texts": {"20", "200", "3", "fast", "slow"}},
    ),
    "layout pairs": (
        lambda: layout.predicted_and_measured({"tp": (1, 2), "dp": (3, 4)}, ylabel="bytes"),
        {"heights": [1, 3, 2, 4], "columns": ["tp", "dp"], "legend": ["predicted", "measured"], "labels": {"bytes"}},
    ),
    "layout curves": (
        lambda: layout.curves([1, 2, 4], {"a": [0.5, 0.25, 0.1]}, xlabel="x", ylabel="y", rule=(4, "rule")),
        {"y": [[50, 25, 10]], "texts": {"rule"}, "labels": {"x", "y"}},
    ),
    "scores": (
        lambda: layout.scores({"x": {"planner": 1.0, "published": 1.3}, "y": {"planner": 1.0, "yours": 2.0}}, xlabel="s"),
        {"widths": [1, 1.3, 1, 2]},
    ),
    "mesh_figure": (
        lambda: mesh_view.mesh_figure({a: _MESH.groups(a) for a in ("tp", "dp", "pp")}, gpus_per_node=4),
        {"patches": [8, 8, 8], "texts": {"0 A", "4 A", "node 1"}},
    ),
    "step_parts": (
        lambda: mesh_view.step_parts({"one": {"matmul": 2.0, "bubble": 1.0}, "two": {"matmul": 2.5, "tp": 0.25}}),
        {"rows": ["one", "two"]},
    ),
    "predicted_over_measured": (
        lambda: mesh_view.predicted_over_measured({"a": [0.8, 1.0, 1.0, 1.3], "b": [0.5]}, unseen={"b"}),
        {"rows": ["a", "b"]},
    ),
    "stacked_bars": (
        lambda: memory.stacked_bars({"a": {"weights": 2, "gradients": 2, "optimizer": 12}}, xlabel="bytes"),
        {"widths": [2, 2, 12], "texts": {"16"}, "legend": ["weights", "gradients", "optimizer state"]},
    ),
    "memory curves": (
        lambda: memory.curves(
            [1, 2, 4],
            {"plain": ([1, 4, 16], "activations"), "fused": ([1, 2, 4], "activations")},
            xlabel="tokens",
            ylabel="MB",
            points={"measured": ([2], [4], "activations")},
            level=(8, "one card"),
        ),
        {"y": [[1, 4, 16], [1, 2, 4]], "labels": {"tokens", "MB"}},
    ),
    "speedup_curves": (lambda: scaling.speedup_curves([1, 2, 4], {"f = 10%": [1, 1.8, 3.1]}), {}),
    "cost_curves": (lambda: scaling.cost_curves([1e9, 1e12], {"20 tokens": [0.01, 1e4]}, {"a model": (1e11, 100)}), {}),
    "parallelism_map": (parallelism.parallelism_map, {}),
    "pipeline": (lambda: pipeline({"1F1B": _PAPER.events}, unit="ms"), {"rows": ["rank 0", "rank 1"], "labels": {"time (ms)"}}),
    "overlay": (lambda: pipeline_chart.overlay({"1F1B": _PAPER.events}, {"1F1B": _PAPER.events}), {}),
    "bubble_curves": (lambda: pipeline_chart.bubble_curves([1, 2, 4], {"p": [0.5, 0.3, 0.1]}, what="idle"), {}),
    "format_axis": (
        lambda: precision.format_axis({"small": (-9, -6, 8, 4), "large": (-149, -126, 128, 24)}, ticks=[-96, 0, 96]),
        {"texts": {"4 bits", "24 bits"}, "rows": ["small", "large"]},
    ),
    "gradient_histogram": (
        lambda: precision.gradient_histogram({-30: 7, -14: 2, 3: 1}, floor=-25, normal=-14, name="half"),
        {"legend": ["zero in half"]},
    ),
    "shares": (
        lambda: precision.shares({"before": {"a": 0.5, "b": 1.0}, "after": {"a": 0.0, "b": 0.25}}, xlabel="zeros (%)"),
        {"widths": [50, 100, 25], "legend": ["before", "after"], "labels": {"zeros (%)"}},
    ),
    "precision curves": (lambda: precision.curves({"fp32": [3.0, 2.0, 1.0]}, ylabel="a loss"), {"y": [[3, 2, 1]], "labels": {"a loss"}}),
    "loss_scale": (lambda: precision.loss_scale([24, 23, 22, 22], [0, 1]), {"y": [[24, 23, 22, 22], [24, 23]], "x": [[0, 1, 2, 3], [0, 1]]}),
    "sum_errors": (lambda: precision.sum_errors([2, 8], {"bf16": [0.2, 0.4]}, {"bf16": [0.25, 0.5]}), {"y": [[25, 50], [20, 40]]}),
    "history": (
        lambda: precision.history({"now": [1.0, 8.0]}, ylabel="magnitude", marks=[1], start=1),
        {"y": [[1, 8]], "x": [[1, 2], [1, 1]], "labels": {"magnitude"}},
    ),
    "tensor_bars": (
        lambda: recompute.tensor_bars([("q", "attention", 2), ("softmax", "scores", 5)], xlabel="MB"),
        {"widths": [2, 5], "rows": ["q", "softmax"], "labels": {"MB"}},
    ),
    "kept_over_time": (
        lambda: recompute.kept_over_time({"none": [0, 2, 4, 2, 0], "full": [0, 1, 2, 3, 1]}, forward=2, ylabel="numbers"),
        {"y": [[0, 2, 4, 2, 0], [0, 1, 2, 3, 1]], "labels": {"numbers"}},
    ),
    "frontier_plot": (
        lambda: recompute.frontier_plot(_POINTS, xlabel="saved", ylabel="paid", measured=[(1, 0)], places={"c": (-40, 30)}),
        {"texts": {"none", "a", "b", "c"}, "labels": {"saved", "paid"}},
    ),
    "segment_curves": (lambda: recompute.segment_curves([1, 2, 4], {"chain": [5, 4, 6]}, ylabel="tensors"), {"y": [[5, 4, 6], [4]], "x": [[1, 2, 4], [2]]}),
    "rank_timeline": (
        lambda: run.rank_timeline(_LANES, {"rank 0": "30%", "rank 1": "90%"}, header="computing"),
        {"widths": [3, 7, 9], "lefts": [0, 3, 0], "rows": ["rank 1", "rank 0"], "texts": {"computing", "30%", "90%"}},
    ),
    "run losses": (
        lambda: run.loss_curves({"calm": [(1, 5.0), (2, 4.0)], "killed": [(1, 5.0), (2, 4.0)]}, {"kill -9": 1.5}),
        {"y": [[5, 4], [5, 4]], "texts": {"kill -9"}},
    ),
    "memory_bars": (
        lambda: run.memory_bars({"batch 8": 10, "batch 16": 20}, {"batch 8": 11, "batch 16": None}, capacity=15),
        {"texts": {" does not fit"}, "x": [[15, 15]]},
    ),
    "checkpoint_interval": (
        lambda: run.checkpoint_interval([1, 10, 100], {"restarts": [0.1] * 3, "checkpoints": [0.4, 0.04, 0.01]}, {"best": 10}),
        {"texts": {"best"}, "columns": ["1", "2", "5", "10", "20", "50", "100"]},
    ),
    "run curves": (
        lambda: run.curves([512, 1024, 2**20], {"a": [1, 2, 3]}, xlabel="tokens", ylabel="%", marks={"here": 1024}),
        {"y": [[1, 2, 3]], "columns": ["512", "1K", "1M"], "labels": {"tokens", "%"}},
    ),
    "stage_grid": (lambda: zero.stage_grid({"some stage": _HELD}), {"texts": {"rank 0", "rank 1", "some stage"}}),
    "reduction_curves": (
        lambda: zero.reduction_curves([1, 2, 4], {"stage 1": [1, 1.6, 2.29]}, {"4x": 4}),
        {"y": [[1, 1.6, 2.29], [4, 4]], "texts": {"4x"}},
    ),
    "traffic_bars": (
        lambda: zero.traffic_bars({"stage 3": [("gather", "weights", 1), ("scatter", "gradients", 2)]}, xlabel="units"),
        {"lefts": [0, 1], "widths": [1, 2], "labels": {"units"}},
    ),
    "sharding": (lambda: zero.sharding([8, 4, 4], [0, 1, 0], 2), {}),
    "stage_times": (lambda: zero.stage_times({"stage 1": [3, 1, 2], "stage 2": [5, 4, 9]}), {"widths": [2, 5]}),
}  # fmt: skip


@pytest.mark.drawn
@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_shows_what_it_is_given(name):
    make, expected = FIGURES[name]
    fig = make()
    seen = _read(fig)
    for kind, values in expected.items():
        if isinstance(values, set):
            assert values <= seen[kind], (kind, seen[kind])
        elif kind in ("x", "y"):
            assert [pytest.approx(line) for line in values] == seen[kind][: len(values)], kind
        elif isinstance(values[0], str):
            assert values == [word for word in seen[kind] if word][: len(values)], kind
        else:
            assert values == pytest.approx(seen[kind]), kind
    svg = themed_svg(fig, 'what is "drawn"')
    assert 'aria-label="what is &quot;drawn&quot;"' in svg
    assert fig.get_figwidth() <= 5.2  # a phone
    # Text drawn in black would vanish in the dark theme.
    assert "fill: #000000" not in svg
    assert "currentColor" in svg
    ids = set(re.findall(r'\bid="([^"]+)"', svg))
    assert set(re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', svg)) <= ids
    assert not ids & set(re.findall(r'\bid="([^"]+)"', themed_svg(make(), "again")))


#: Units, by figure: a word that one of its labels must have.
UNITS = {
    "fit_and_residuals": "%", "hiding_curves": "tokens", "bucket_curve": "MiB",
    "gathered": "GB", "stage_times": "ms", "efficiency_over_links": "%",
}  # fmt: skip


@pytest.mark.parametrize("name", UNITS)
def test_axes_carry_units(name):
    assert any(UNITS[name] in label for label in _read(FIGURES[name][0]())["labels"])


# --- colours and marks that mean something -----------------------------------------------------------------


def _faces(ax, role=None):
    return [p for p in ax.patches if role is None or to_hex(p.get_facecolor()) == COLORS[role]]


def test_a_pipeline_has_a_bar_an_action_and_idle_lanes():
    one, two = simulate(one_f_one_b(4, 8)), simulate(zb_h1(4, 8), communication=0.1)
    fig = pipeline({"a": one.events, "b": two.events})
    first, second = fig.axes
    assert sum(len(c.get_paths()) for c in first.collections) == len(one.events) + 4
    assert first.get_xlim() == second.get_xlim() == (0, max(one.makespan, two.makespan))
    assert sorted(t.get_text() for t in first.texts) == sorted(str(e.action.microbatch) for e in one.events)
    thin = simulate(interleaved(4, 8, 2))  # half as wide, and each still with its number
    _, below = pipeline({"a": one.events, "thin": thin.events}).axes
    assert len(below.texts) == len(thin.events)
    (ax,) = pipeline({"DualPipe-V": (both := simulate(dualpipe_v(2, 6))).events}).axes
    bars = sum(len(c.get_paths()) for c in ax.collections)
    assert bars == sum(len(event.action.parts) for event in both.events) + 2


def test_a_grid_fills_what_a_rank_holds_and_outlines_the_rest():
    (ax,) = FIGURES["stage_grid"][0]().axes
    for role, filled in {"weights": 6, "gradients": 2, "optimizer": 0}.items():
        cells = [p for p in ax.patches if to_hex(p.get_edgecolor()) == COLORS[role]]
        assert (len(cells), sum(p.get_facecolor()[3] > 0 for p in cells)) == (6, filled)


def test_one_colour_means_one_thing():
    bars = FIGURES["scores"][0]().axes[0].patches
    assert bars[0].get_facecolor() == bars[2].get_facecolor() != bars[1].get_facecolor()
    ring, tree, dots = FIGURES["time_curves"][0]().axes[0].lines
    assert dots.get_color() == tree.get_color() != ring.get_color()
    cells = [p.get_facecolor() for p in FIGURES["fsdp mesh"][0]().axes[0].patches]
    assert cells[0] == cells[2] != cells[1] == cells[3]
    counts = {-30: 7, -25: 3, -14: 2, 3: 1, 17: 4}
    (ax,) = precision.gradient_histogram(counts, floor=-25, normal=-14, name="half", top=16).axes
    roles = {"backward": [-30], "gradients": [-25], "weights": [-14, 3], "activations": [17]}
    for role, powers in roles.items():  # zero, fewer bits, kept, infinite
        found = [(round(p.get_x()), p.get_height()) for p in _faces(ax, role)]
        assert found == [(p, counts[p]) for p in powers], role


def test_curves_that_coincide_are_both_seen_and_a_lost_run_is_marked():
    first, second = FIGURES["loss_curves"][0]().axes[0].lines
    assert first.get_linewidth() > second.get_linewidth()
    lines = precision.curves({"fp32": [3.0, 2.0, 1.0], "lost": [3.0, 2.5, math.nan]}, ylabel="loss").axes[0].lines
    assert (list(lines[2].get_xdata()), list(lines[2].get_ydata())) == ([1], [2.5])


def test_sums_stay_sums():
    heights = [[bar.get_height() for bar in ax.patches] for ax in FIGURES["sharding"][0]().axes]
    assert sorted(heights[0]) == [4, 4, 8]
    assert sum(heights[0]) == sum(heights[1]) == 16
    assert sum(_read(FIGURES["step_parts"][0]())["widths"]) == 5.75
    (ax,) = FIGURES["checkpoint_interval"][0]().axes
    tops = [collection.get_paths()[0].get_extents().y1 for collection in ax.collections]
    assert tops == pytest.approx([10, 50])
    assert list(FIGURES["fit_and_residuals"][0]().axes[1].lines[0].get_ydata()) == [50, 0]
    strips = [line for line in FIGURES["predicted_over_measured"][0]().axes[0].lines if line.get_marker() != "None"]
    # A dot's place is rounded to an eightieth of a factor of e, and equal ones do not hide each other.
    assert [list(line.get_xdata()) for line in strips] == [pytest.approx(xs, rel=1 / 160) for xs in ([0.8, 1, 1, 1.3], [0.5])]  # fmt: skip
    assert len(set(zip(strips[0].get_xdata(), strips[0].get_ydata(), strict=True))) == 4
    assert strips[0].get_color() != strips[1].get_color()


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda: timeline({}), "span"),
        (lambda: timeline({"empty": []}), "span"),
        (lambda: run.rank_timeline([], {}), "at least one span"),
        (lambda: pipeline({}), "at least one panel"),
        (lambda: pipeline({"x": []}), "an event in each"),
        (lambda: pipeline_chart.overlay({"1F1B": _PAPER.events}, {"GPipe": _PAPER.events}), "give the same"),
        (lambda: show(figure()[0], caption=" ", alt="x"), "caption"),
        (lambda: show(figure()[0], caption="x", alt=""), "alt"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw, words):
    with pytest.raises(ValueError, match=words):
        draw()


def test_colours_keep_contrast_on_light_and_dark():
    def luminance(color):
        rgb = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(a, b):
        low, high = sorted([luminance(a), luminance(b)])
        return (high + 0.05) / (low + 0.05)

    # WCAG 2.1, 1.4.11: graphics need 3:1. The dark page of the theme is #14181e.
    for role, color in COLORS.items():
        assert contrast(color, "#ffffff") >= 3, role
        assert contrast(color, "#14181e") >= 3, role
