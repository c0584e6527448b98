"""The bench harness tells a held limit from a missed one, and its exit code says which."""

import json

import pytest

from tests.bench import harness
from tests.bench.harness import Result, interleaved, table


@pytest.mark.parametrize(
    ("result", "good"),
    [
        (Result("time", 0.2, 0.25, "s"), True),
        (Result("time", 0.3, 0.25, "s"), False),
        (Result("against theirs", 1.04, 1.0, "ms", against="theirs", at_most=1.05), True),
        (Result("against theirs", 1.06, 1.0, "ms", against="theirs", at_most=1.05), False),
        (Result("successes", 20, 20, "", more_is_better=True), True),
        (Result("successes", 19, 20, "", more_is_better=True), False),
        (Result("nothing left", 0, 0, ""), True),
        (Result("something left", 1, 0, ""), False),
    ],
)
def test_a_missed_limit_is_seen_printed_and_fatal(result, good, monkeypatch, tmp_path, capsys):
    class Bench:
        @staticmethod
        def results():
            return [result]

    monkeypatch.setattr(harness.importlib, "import_module", lambda _: Bench)
    path = tmp_path / "bench.json"
    assert harness.main(["ranks", "--json", str(path)]) == (0 if good else 1)
    assert capsys.readouterr().out.rstrip().endswith("ok" if good else "MISSED")
    written = json.loads(path.read_text())
    assert written["results"][0]["good"] is good
    assert written["machine"]["cpus"] >= 1


def test_the_table_lines_up():
    lines = table([Result("a", 1, 2, "s"), Result("a longer name", 10, 2, "s")]).splitlines()
    assert len({line.index("ours") if i == 0 else line.index("1") for i, line in enumerate(lines)}) == 1


def test_an_unknown_bench_is_refused(capsys):
    with pytest.raises(SystemExit):
        harness.main(["nosuch"])
    assert "there are" in capsys.readouterr().err


def test_what_a_bench_lacks_is_said_before_another_starts(monkeypatch, capsys):
    class Bench:
        @staticmethod
        def missing():
            return "pages: this needs a Chromium"

        @staticmethod
        def results():
            raise AssertionError("a bench has started")

    monkeypatch.setattr(harness.importlib, "import_module", lambda _: Bench)
    with pytest.raises(SystemExit):
        harness.main(["ranks", "pages"])
    assert "this needs a Chromium" in capsys.readouterr().err


def test_variants_are_timed_in_turn():
    calls = []
    seconds = interleaved(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3, warmup=1
    )
    assert calls == list("baabbaab")
    assert {name: len(samples) for name, samples in seconds.items()} == {"a": 3, "b": 3}


def test_a_bench_that_times_nothing_is_recorded_alone(monkeypatch, capsys):
    """Its counts need no quiet machine; times that are compared come from one run of all."""
    from tests.bench import bench_attack, bench_ddp

    counted = Result("cases", 3.0, 3.0, "cases", "all", more_is_better=True)
    monkeypatch.setattr(bench_attack, "results", lambda: [counted])
    monkeypatch.setattr(bench_ddp, "results", lambda: pytest.fail("timed"))
    kept = {}
    monkeypatch.setattr(
        harness, "save_record", lambda name, rows, command: kept.update({name: (rows, command)})
    )
    assert harness.main(["attack", "--record"]) == 0
    ((rows, command),) = kept.values()
    assert (list(kept), command) == (["attacked_toys"], "make bench BENCH='attack --record'")
    assert [row["ours"] for row in rows] == [3.0]
    with pytest.raises(SystemExit):
        harness.main(["attack", "ddp", "--record"])
    assert "--record keeps one run" in capsys.readouterr().err
