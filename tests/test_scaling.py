"""Scaling: timelines drawn by hand, of which the answer is known; reports that say what their records say."""

import json
import math
import random
import re

import pytest
from bs4 import BeautifulSoup
from typer.testing import CliRunner

from lablib.calc.runs import predicted_step, scaling_loss, spread
from lablib.calc.runs.scaling import PARTS, middle_half, split_step
from lablib.cli.main import app
from lablib.cli.report import summary
from lablib.launch.runs import ScalingReport, compare_reports, report_differences, report_rows, scaling_records
from lablib.launch.training import METRIC_KEYS


def _rank(**phases):
    return {"seconds": sum(phases.values()), **phases}


ALONE = [[_rank(data=1.0, compute=7.0)]]  # eight seconds, one of them data


def test_perfect_weak_scaling_loses_nothing():
    loss = scaling_loss(ALONE, [[_rank(data=1.0, compute=7.0)] * 4], scaling="weak")
    assert loss.efficiency == 1
    assert loss.parts == dict.fromkeys(PARTS, 0.0)


def test_perfect_strong_scaling_takes_the_nth_part():
    loss = scaling_loss(ALONE, [[_rank(data=0.25, compute=1.75)] * 4], scaling="strong")
    assert loss.efficiency == 1
    assert loss.ideal == 2
    assert loss.parts == dict.fromkeys(PARTS, 0.0)


@pytest.mark.parametrize(
    ("ranks", "parts"),
    [
        # Everybody sends for two seconds: communication, and nothing else.
        ([_rank(data=1.0, compute=7.0, communication=2.0)] * 2, {"communication": 2.0}),
        # Rank 1 computes two seconds longer; rank 0 waits for it inside the collective, which itself takes one.
        (
            [_rank(data=1.0, compute=7.0, communication=3.0), _rank(data=1.0, compute=9.0, communication=1.0)],
            {"communication": 1.0, "imbalance": 1.0, "compute": 1.0},
        ),
        # Rank 1 waits two seconds for its disk, and rank 0 for rank 1.
        (
            [_rank(data=1.0, compute=7.0, communication=3.0), _rank(data=3.0, compute=7.0, communication=1.0)],
            {"communication": 1.0, "imbalance": 1.0, "data": 1.0},
        ),
        # A pipeline of two stages, one micro-batch each way: each stage idles while the other one works.
        ([_rank(data=1.0, compute=7.0, bubble=7.0), _rank(data=1.0, compute=7.0, bubble=7.0)], {"bubble": 7.0}),
        # Rank 0 was done early and waits for nothing: the step is as long as rank 1's.
        ([_rank(data=1.0, compute=7.0), _rank(data=1.0, compute=9.0)], {"imbalance": 1.0, "compute": 1.0}),
    ],
    ids=["communication", "slow rank", "slow disk", "bubble", "done early"],
)
def test_hand_made_timelines(ranks, parts):
    loss = scaling_loss(ALONE, [ranks], scaling="weak")
    assert loss.parts == pytest.approx(dict.fromkeys(PARTS, 0.0) | parts)
    assert loss.seconds == max(rank["seconds"] for rank in ranks)
    assert loss.largest == max(parts, key=parts.get)


def test_the_order_of_ranks_plays_no_part_and_all_always_adds_up():
    seed = random.SystemRandom().randrange(10**9)
    print("seed", seed)
    dice = random.Random(seed)
    for _ in range(50):
        n, steps = dice.randint(1, 6), dice.randint(1, 9)

        def run(n=n, steps=steps):
            names = ("data", "compute", "communication", "bubble")
            return [[_rank(**{name: dice.random() for name in names}) for _ in range(n)] for _ in range(steps)]

        one, many = run(1), run()
        for scaling in ("weak", "strong"):
            loss = scaling_loss(one, many, scaling=scaling)
            # Sums of at most 9 * 6 * 5 numbers below 1: rounding is far below 1e-9.
            assert sum(loss.parts.values()) == pytest.approx(loss.seconds - loss.ideal, abs=1e-9)
            assert loss.efficiency + sum(loss.shares.values()) == pytest.approx(1, abs=1e-9)
            turned = scaling_loss(one, [step[::-1] for step in many], scaling=scaling)
            assert turned.parts == pytest.approx(loss.parts, abs=1e-9)
            assert min(loss.parts[part] for part in ("imbalance", "bubble")) >= -1e-9


def test_an_outlier_is_outside_the_middle_half():
    steps = [[_rank(compute=1.0)]] * 7 + [[_rank(compute=100.0)]]
    assert len(middle_half(steps)) == 4
    assert scaling_loss(steps, steps, scaling="weak").seconds == 1
    assert middle_half(steps[-3:]) == steps[-3:]


def test_spread_is_median_and_quartiles():
    assert spread([4.0, 1.0, 2.0, 3.0, 5.0]) == spread(range(1, 6))
    assert (spread([1.0, 2.0, 3.0, 4.0, 5.0]).low, spread([1.0, 2.0, 3.0, 4.0, 5.0]).high) == (2, 4)
    assert spread([7.0]).median == 7
    with pytest.raises(ValueError, match="warm-up"):
        spread([])


@pytest.mark.parametrize(
    ("one", "many", "message"),
    [
        ([], ALONE, "one needs steps"),
        (ALONE, [[_rank(compute=1.0)], [_rank(compute=1.0)] * 2], "many needs steps, all with the same"),
        ([[_rank(compute=1.0)] * 2], ALONE, "has 2 ranks and needs 1"),
        (ALONE, [[{"seconds": 1.0, "compute": 2.0}]], "nor longer than their step"),
        (ALONE, [[{"seconds": 1.0, "compute": -2.0}]], "must not be negative"),
    ],
)
def test_what_makes_no_sense_is_refused(one, many, message):
    with pytest.raises(ValueError, match=message):
        scaling_loss(one, many, scaling="weak")
    with pytest.raises(ValueError, match="at least one rank"):
        split_step([])


def test_a_predicted_step_by_hand():
    # 8 bytes of weights on 4 ranks at 1 byte/s: 6 s for a gather; 4 bytes of gradients: 3 s to scatter them.
    times = {"forward": 2.0, "backward": 10.0, "other": 1.0}
    link = {"gather_bytes": 8, "scatter_bytes": 4, "ranks": 4, "bandwidth": 1.0}
    open_ = predicted_step(**times, **link, hidden=False)
    assert open_ == {"compute": 13.0, "communication": 15.0, "exposed": 15.0, "step": 28.0}
    # Behind 2 s of forward 4 of the 6 s are exposed; behind 10 s of backward none of the 9.
    assert predicted_step(**times, **link, hidden=True)["exposed"] == 4.0
    assert predicted_step(**times, **(link | {"ranks": 1}), hidden=True)["step"] == 13.0
    with pytest.raises(ValueError, match="bandwidth=0"):
        predicted_step(**times, **(link | {"bandwidth": 0}), hidden=True)


# A report says what its records say, is rebuilt from them alone, and stands on its own


def _run(folder, ranks, seconds, data=0.0, *, tokens=1000, steps=8, slow_data=0.0, settings=None, **more):
    """The files of a run whose numbers are known; the two steps of the warm-up are ten times as long."""
    folder.mkdir(parents=True)
    for rank in range(ranks):
        lines = []
        for step in range(1, steps + 1):
            factor = 10 if step <= 2 else 1
            reading = data + (slow_data if rank else 0.0)
            line = dict.fromkeys(METRIC_KEYS, 0) | {
                "step": step, "rank": rank, "world_size": ranks, "seconds": factor * seconds,
                "data_seconds": factor * reading, "tokens_per_second": tokens / seconds,
                "mfu": None, "memory_bytes": 2 * 10**9, **more,
            }  # fmt: skip
            lines.append(json.dumps(line))
        (folder / f"metrics-rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
    machine = {"gpus": [], "cpu": "a <CPU>", "cpus": 2, "torch": "2.13.0", "python": "3.11.2"}
    config = {"model": "10m", "seq": 64} | (settings or {})
    (folder / "run.json").write_text(json.dumps({"config": config, "machine": machine, "keys": METRIC_KEYS}))
    return folder


@pytest.fixture
def report(tmp_path):
    """One rank takes 100 ms, 10 of them data; two take 140 weak and 65 strong."""
    made = ScalingReport("by-hand", tmp_path / "a")
    made.add(_run(tmp_path / "one", 1, 0.100, 0.010), scaling="one")
    made.add(_run(tmp_path / "weak", 2, 0.140, 0.010, tokens=2000), scaling="weak", predicted={"step": 0.126})
    made.add(_run(tmp_path / "strong", 2, 0.065, 0.005, slow_data=0.004), scaling="strong")
    return made.folder


def test_the_rows_are_what_was_put_in(report):
    one, weak, strong = report_rows(report)
    assert [row["run"] for row in (one, weak, strong)] == ["1 rank", "2 ranks, weak", "2 ranks, strong"]
    assert one["seconds"] == pytest.approx({"median": 0.1, "low": 0.1, "high": 0.1, "count": 6})
    # 2 x 100 / 140; 40 of 140 ms are lost, all of it communication.
    assert weak["speedup"] == pytest.approx(2 / 1.4)
    assert weak["efficiency"] == pytest.approx(1 / 1.4)
    assert weak["loss"] == pytest.approx(
        {"communication": 40 / 140, "imbalance": 0, "bubble": 0, "data": 0, "compute": 0}, abs=1e-9
    )
    assert weak["error"] == pytest.approx(-0.1)
    # Ideal 50. Rank 1 reads 4 ms longer, so 2 in the mean, and rank 0 waits for it: 2 in the mean, too.
    assert strong["efficiency"] == pytest.approx(50 / 65)
    assert strong["loss_seconds"] == pytest.approx(
        {"communication": 0.011, "imbalance": 0.002, "bubble": 0, "data": 0.002, "compute": 0}, abs=1e-9
    )
    assert strong["largest"] == "communication"
    assert strong["predicted"] is None


def test_two_predictions_stand_beside_the_measurement_and_the_losses_are_compared(tmp_path):
    made = ScalingReport("both", tmp_path / "a")
    made.add(_run(tmp_path / "one", 1, 0.100, loss=4.0), scaling="one", predicted={"step": 0.09, "memory_bytes": 2.2e9})
    told = {"step": 0.06, "memory_bytes": 1.5e9, "links": "Links: PCIe 4 x16, 31.5 GB/s inside a node of 8 (assumed)"}
    yours = {"step": 0.055, "speedup": 1.8, "memory_bytes": 1e9}
    made.add(_run(tmp_path / "two", 2, 0.065, loss=4.25), scaling="strong", predicted=told, yours=yours)
    one, strong = report_rows(made.folder)
    assert (one["yours"], strong["yours"]) == ({}, yours)
    assert strong["predicted_speedup"] == pytest.approx(1.5)
    assert strong["loss_apart"] == pytest.approx(0.25)
    said = summary([one, strong])
    assert "Predicted. Links: PCIe 4 x16, 31.5 GB/s inside a node of 8 (assumed)." in said
    assert said[1].startswith(
        "2 ranks, strong: 65.0 ms a step, predicted 60.0 (-8%), you said 55.0 (-15%); "
        "speedup 1.54, predicted 1.50, you said 1.80; efficiency 77%"
    )
    assert said[2] == "2 ranks, strong: the losses differ from those of one rank by at most 0.2."
    CliRunner().invoke(app, ["report", str(made.folder)])
    lines = BeautifulSoup((made.folder / "report.html").read_text(), "html.parser").find_all("tr")
    head, *cells = [[cell.text for cell in line.find_all(["th", "td"])] for line in lines]
    two = dict(zip(head, cells[1], strict=True))
    assert (two["predicted ms"], two["your ms"]) == ("60.0", "55.0")
    assert (two["predicted speedup"], two["your speedup"]) == ("1.50", "1.80")
    assert (two["GB"], two["predicted GB"], two["your GB"]) == ("2.00", "1.50", "1.00")
    assert cells[0][head.index("your ms")] == "-"
    # The run's own files are there when its folder is gone.
    assert (made.folder / "metrics" / "strong-2" / "metrics-rank1.jsonl").read_text().count("\n") == 8
    for wrong in ({"speed": 1.0}, {"step": 0.0}):
        with pytest.raises(ValueError, match=r"yours=.* must be above 0 and one of step, speedup, memory_bytes"):
            made.add(tmp_path / "two", scaling="strong", yours=wrong)


def test_communication_that_was_measured_is_believed(tmp_path):
    made = ScalingReport("profiled", tmp_path / "a")
    made.add(_run(tmp_path / "one", 1, 0.100), scaling="one")
    made.add(_run(tmp_path / "two", 2, 0.130, communication_seconds=0.010), scaling="weak", warm_up=3)
    loss = report_rows(made.folder)[1]["loss_seconds"]
    assert loss == pytest.approx(
        {"communication": 0.01, "compute": 0.02, "imbalance": 0, "bubble": 0, "data": 0}, abs=1e-9
    )


def test_a_record_has_every_raw_line_and_where_it_came_from(report):
    record = scaling_records(report)[1]
    assert [len(lines) for lines in record["samples"]] == [8, 8]
    assert set(METRIC_KEYS) <= set(record["samples"][1][0])
    assert {"command", "commit", "date", "machine", "topology", "lablib", "warm_up"} <= set(record)


def test_the_page_is_drawn_from_the_records_alone_stands_alone_and_follows_the_theme(report):
    assert sorted(path.name for path in report.iterdir()) == ["metrics", "runs"]
    result = CliRunner().invoke(app, ["report", str(report)])
    assert result.exit_code == 0
    assert "2 ranks, weak: 140.0 ms a step, predicted 126.0 (-10%); speedup 1.43" in result.output
    assert json.loads((report / "rows.json").read_text())["rows"] == report_rows(report)
    text = (report / "report.html").read_text()
    soup = BeautifulSoup(text, "html.parser")
    assert not soup.find_all(["script", "link", "img", "iframe"])
    # The only addresses are the names of formats, which nobody opens.
    names = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\"' )]+", text)) <= names
    assert "prefers-color-scheme: dark" in text
    assert len(soup.find_all("svg")) == 3
    assert all(svg.get("aria-label") for svg in soup.find_all("svg"))
    assert "a <CPU>" in soup.text  # escaped
    assert "MFU" not in [cell.text for cell in soup.find_all("th")]  # nobody knows a laptop's peak
    cells = [[cell.text for cell in line.find_all("td")] for line in soup.find_all("tr")[1:]]
    assert cells[1][:6] == ["2 ranks, weak", "140.0", "140.0 to 140.0", "126.0", "14,286", "1.43"]
    drawn = {"step_times.svg", "every_step.svg", "loss.svg"}
    assert {path.name for path in (report / "figures").iterdir()} == drawn


def _paths(found, path=()):
    yield path
    items = found.items() if isinstance(found, dict) else enumerate(found[:1]) if isinstance(found, list) else ()
    for key, inner in items:
        yield from _paths(inner, (*path, key))


ODD = (None, -1, 0, math.nan, math.inf, 1e308, 10**40, "x", "", {}, [], [[[[]]]], {"a": {"b": 1}}, True, 2.5)


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["one-1", "strong-2"])
def test_a_record_of_other_types_is_refused_with_its_name_or_gives_finite_rows(report, name):
    path = report / "runs" / f"{name}.json"
    good = json.loads(path.read_text())
    good["samples"] = [lines[:4] for lines in good["samples"]]
    for where in list(_paths(good))[1:]:
        for value in (*ODD, "nothing"):
            bad = json.loads(json.dumps(good))
            *outer, last = where
            inner = bad
            for key in outer:
                inner = inner[key]
            if value == "nothing":
                del inner[last]
            else:
                inner[last] = value
            path.write_text(json.dumps(bad))
            try:
                json.dumps(report_rows(report), allow_nan=False)
                report_differences(report, report)
            except ValueError as error:  # and no other error leaves
                said = str(error)
            else:
                said = f"{path} is good enough"
            assert said.startswith(str(path)), (where, value)
            assert "\n" not in said


def test_two_reports_are_compared_with_what_is_not_the_same(report, tmp_path):
    other = ScalingReport("again", tmp_path / "b")
    other.add(_run(tmp_path / "one2", 1, 0.110, settings={"seq": 128}), scaling="one")
    (row,) = compare_reports(report, other.folder)
    assert row["run"] == "1 rank"
    assert row["ratio"] == pytest.approx(1.1)
    assert row["apart"]
    assert report_differences(report, other.folder) == ["config.seq: 64 and 128"]
    first = other.folder / "runs" / "one-1.json"
    first.write_text(json.dumps(json.loads(first.read_text()) | {"topology": {"matrix": "GPU0 NV18"}}))
    assert report_differences(report, other.folder)[1].startswith("links: ")
    result = CliRunner().invoke(app, ["compare", str(report), str(other.folder)])
    assert "1.100  differs" in result.output
    assert "config.seq: 64 and 128" in result.output
    assert not compare_reports(report, report)[1]["apart"]


def test_what_makes_no_report_is_refused(tmp_path):
    made = ScalingReport("x", tmp_path / "a")
    run = _run(tmp_path / "two", 2, 0.1)
    for options, message in (
        ({"scaling": "one"}, "'one' does not go with 2 ranks"),
        ({"scaling": "sideways"}, "use one of one, weak, strong"),
        ({"scaling": "weak", "warm_up": 8}, "has 8 steps, and warm_up=8 leaves none"),
        ({"scaling": "weak", "predicted": {"step": 0.0}}, "above 0 seconds"),
    ):
        with pytest.raises(ValueError, match=message):
            made.add(run, **options)
    with pytest.raises(ValueError, match="holds no report"):
        scaling_records(made.folder)
    made.add(run, scaling="weak")
    with pytest.raises(ValueError, match=r"runs/one-1\.json is missing"):
        report_rows(made.folder)
    (run / "metrics-rank1.jsonl").unlink()
    with pytest.raises(ValueError, match="metrics-rank1"):
        made.add(run, scaling="weak")
    with pytest.raises(ValueError, match="letters, digits"):
        ScalingReport("a/b")
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code == 2
