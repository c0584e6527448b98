"""The bench harness tells a held limit from a missed one, and its exit code says which."""

import pytest

from tests.bench import harness
from tests.bench.harness import Result


@pytest.fixture
def bench(monkeypatch):
    """A bench in place of all others, whose one result a test may set."""

    class Bench:
        result = None

        @classmethod
        def results(cls):
            return [cls.result]

    monkeypatch.setattr(harness.importlib, "import_module", lambda _: Bench)
    return Bench


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (Result("time", 0.2, 0.25, "s"), "ok"),
        (Result("time", 0.3, 0.25, "s"), "MISSED"),
        (Result("against theirs", 5.0, 1.0, "ms", against="theirs", at_most=None), "-"),
        (Result("successes", 20, 20, "", more_is_better=True), "ok"),
        (Result("successes", 19, 20, "", more_is_better=True), "MISSED"),
        (Result("nothing left", 0, 0, ""), "ok"),
        (Result("something left", 1, 0, ""), "MISSED"),
    ],
)
def test_a_missed_limit_is_seen_printed_and_fatal(result, verdict, bench, capsys, monkeypatch):
    kept = {}
    monkeypatch.setattr(harness, "save_record", lambda name, rows, command: kept.update({name: (rows, command)}))
    bench.result = result
    assert harness.main(["ranks", "--record"]) == (verdict == "MISSED")
    assert capsys.readouterr().out.split()[-1] == verdict
    ((row,), command) = kept["bench_ranks"]
    assert row["good"] is (verdict != "MISSED")
    assert command == "make bench BENCH='ranks --record'"


def test_an_unknown_bench_is_refused(capsys):
    with pytest.raises(SystemExit):
        harness.main(["nosuch"])
    assert "there are" in capsys.readouterr().err


def test_what_a_bench_lacks_is_said_before_another_starts(bench, capsys):
    bench.missing = staticmethod(lambda: "pages: this needs a Chromium")
    bench.results = staticmethod(lambda: pytest.fail("a bench has started"))
    with pytest.raises(SystemExit):
        harness.main(["ranks", "pages"])
    assert "this needs a Chromium" in capsys.readouterr().err
