"""Every check passes right answers of any kind, reports the stub, catches each planted defect, and gives hints."""

import ast
import copy
import functools
import importlib
import itertools
import json
import pickle
import re

import cloudpickle
import numpy as np
import pytest

from lablib.calc.models import preset
from lablib.calc.params import count_params
from lablib.checks import rung05
from lablib.checks.judging import Verdict, Wrong, check, close, compare, numbers, recognize, refuse, whole
from lablib.checks.judging import ranks as judging_ranks
from lablib.checks.judging.guard import Answer
from tests.planted import answers_with, of_floats, of_numpy, share_of
from tests.scripts import ROOT, load
from tests.standing_ranks import standing_ranks

RUNGS = sorted(path.stem for path in (ROOT / "lablib" / "checks").glob("rung*.py"))


def _load(rung: str):
    checks = importlib.import_module(f"lablib.checks.{rung}")
    names = [name for name, value in vars(checks).items() if getattr(value, "is_check", False)]
    return checks, names


def _defects(rung: str):
    return importlib.import_module(f"tests.defects_{rung}")


CHECKS = [(rung, name) for rung in RUNGS for name in _load(rung)[1]]
#: Checks that run an answer on processes: their answers share the ranks, and a drawn solution has new ones.
ON_RANKS = [
    (rung, name)
    for rung, name in CHECKS
    if getattr(_load(rung)[0], name).kind == "fault"
    or "on_ranks" in getattr(_load(rung)[0], name).__wrapped__.__code__.co_names
]
ALONE = [each for each in CHECKS if each not in ON_RANKS]
DEFECTS = [(rung, name, i) for rung, name in ALONE for i in range(len(_defects(rung).DEFECTS.get(name, ())))]
RIGHT = [(rung, name, i) for rung, name in ALONE for i in range(len(_defects(rung).SECOND_SOLUTIONS.get(name, ())))]
#: Answers that write into what they are given, or return tensors: there is no other type to try.
IN_PLACE = {*("split_mlp", "zero2_step", "ring_all_reduce", "fast_all_reduce", "make_hook")}

#: Checks that draw their cases, and how many other draws are tried.
DRAWN = {
    "rung01": (2, ("bytes_per_parameter", "train_within", "run_memory")),
    "rung02": (1, ("ddp_bottleneck",)),
    "rung04": (1, ("explain_1f1b",)),
    "rung05": (1, ("zero_tradeoffs",)),
    "rung06": (1, ("choose_wrapping",)),
    "rung07": (1, ("plan_cluster",)),
    "rung10": (1, ("fast_all_reduce",)),
    "rung12": (1, ("choose_split",)),
    "rung13": (1, ("route", "expert_bytes")),
    "rung14": (1, ("choose_timeout", "take_part", "plan_groups")),
}
ANY_DRAW = [(rung, name, seed) for rung, (draws, names) in DRAWN.items() for name in names for seed in range(draws)]


def test_every_rung_has_checks():
    assert {rung for rung, _ in CHECKS} == set(RUNGS)
    assert [f"rung{number:02d}" for number in range(1, 15)] == sorted(RUNGS)


@pytest.mark.parametrize(("rung", "name"), CHECKS)
def test_at_least_three_planted_defects(rung, name):
    assert len(_defects(rung).DEFECTS[name]) >= 3


@pytest.mark.drawn
@pytest.mark.parametrize(("rung", "name", "i"), RIGHT)
def test_a_differently_written_solution_passes(rung, name, i):
    assert getattr(_load(rung)[0], name)(_defects(rung).SECOND_SOLUTIONS[name][i]).status == "passed"


@pytest.mark.drawn
@pytest.mark.parametrize(("rung", "name"), ON_RANKS)
def test_right_and_wrong_are_told_apart_on_ranks(rung, name, monkeypatch):
    judge, planted = getattr(_load(rung)[0], name), _defects(rung)
    with standing_ranks() as ranks:
        monkeypatch.setattr(judging_ranks, "run_ranks", ranks)
        for right in (getattr(load(f"labs/solutions/{rung}.py"), name), *share_of(planted.SECOND_SOLUTIONS[name])):
            assert judge(right).status == "passed", right.__name__
        for defect in share_of(planted.DEFECTS[name]):
            _is_refused(judge, defect, planted)
        assert judge(_stub).status == "not attempted"


@pytest.mark.parametrize(("rung", "name"), CHECKS)
def test_at_least_three_right_solutions(rung, name):
    assert 1 + len(_defects(rung).SECOND_SOLUTIONS[name]) >= 3


@pytest.mark.drawn
@pytest.mark.parametrize("convert", [of_numpy, of_floats])
@pytest.mark.parametrize(("rung", "name"), [each for each in CHECKS if each[1] not in IN_PLACE])
def test_an_answer_may_have_any_sensible_type(rung, name, convert):
    answer = answers_with(convert, getattr(load(f"labs/solutions/{rung}.py"), name))
    assert getattr(_load(rung)[0], name)(answer).status == "passed"


@pytest.mark.parametrize(("rung", "name"), CHECKS)
def test_hints_lead_from_the_idea_to_the_solution(rung, name, capsys):
    check = getattr(_load(rung)[0], name)
    for _ in range(5):
        check.hint()
    said = capsys.readouterr().out
    solution = (ROOT / "labs" / "solutions" / f"{rung}.py").read_text(encoding="utf-8")
    assert f"def {name}(" in solution
    assert said.count(f"def {name}(") == 2  # the last step stays the last
    assert said.index("Idea: ") < said.index("Section: ") < said.index("Line: ") < said.index("Solution:")
    chapters = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "book").glob(f"{rung[4:]}_*.md"))
    assert re.search(rf"(?m)^##+ {re.escape(check.hints.section)}$", chapters), check.hints.section
    assert all(len(text) > 20 and text.endswith(".") for text in (check.hints.idea, check.hints.line))


@pytest.mark.parametrize("rung", RUNGS)
def test_done_when_refuses_an_answer_that_has_the_arithmetic_and_not_the_idea(rung):
    """That it is refused, with its sentence, is one of the planted defects' tests."""
    (chapter,) = (ROOT / "book").glob(f"{rung[4:]}_*.md")
    section = re.search(r"(?ms)^## Done when\n(.*?)^## ", chapter.read_text(encoding="utf-8"))[1]
    proofs = re.findall(rf"lablib\.checks\.{rung}\.(\w+)", section)
    planted = [defect.__name__ for name in proofs for defect in _defects(rung).DEFECTS[name]]
    assert any(name.startswith("without_the_idea") for name in planted)


@pytest.mark.parametrize(("rung", "name"), [each for each in CHECKS if getattr(_load(each[0])[0], each[1]).kind])
def test_what_is_written_at_work_and_a_fault_need_their_idea(rung, name):
    assert any(defect.__name__.startswith("without_the_idea") for defect in _defects(rung).DEFECTS[name])


@pytest.mark.parametrize(("rung", "name"), CHECKS)
def test_an_exercise_stands_in_its_lab_and_its_solution_in_the_chapter(rung, name):
    (lab,), (chapter,) = (ROOT / "labs").glob(f"{rung[4:]}_*.ipynb"), (ROOT / "book").glob(f"{rung[4:]}_*.md")
    assert name in getattr(_load(rung)[0], "__all__", [name])
    assert re.search(rf"\b{rung}\.{name}\(", lab.read_text(encoding="utf-8"))
    assert re.search(rf"(?m)^:pyobject: {name}$", chapter.read_text(encoding="utf-8"))


def _stub(*args, **kwargs):
    raise NotImplementedError


@pytest.mark.parametrize(("rung", "name"), ALONE)
def test_the_untouched_stub_is_not_attempted(rung, name):
    assert getattr(_load(rung)[0], name)(_stub).status == "not attempted"


@pytest.mark.drawn
@pytest.mark.parametrize(("rung", "name", "i"), DEFECTS)
def test_a_planted_defect_is_caught_with_a_sentence(rung, name, i):
    _is_refused(getattr(_load(rung)[0], name), _defects(rung).DEFECTS[name][i], _defects(rung))


def _is_refused(judge, defect, planted):
    verdict = judge(defect)
    assert verdict.status == "wrong", f"the defect {defect.__name__} is accepted"
    # A defect runs: what the learner reads is about the idea, not a traceback or a dump of tensors.
    assert "Your answer stopped with" not in verdict.message, verdict.message
    assert "tensor(" not in verdict.message
    assert verdict.message.strip().endswith(".")
    assert getattr(planted, "SENTENCES", {}).get(defect.__name__, "") in verdict.message
    assert len(verdict.message) < 400


@pytest.mark.drawn
@pytest.mark.parametrize(("rung", "name", "seed"), ANY_DRAW)
def test_right_and_wrong_are_told_apart_whatever_is_drawn(rung, name, seed):
    judge, planted = getattr(_load(rung)[0], name), _defects(rung)
    assert judge(planted.SECOND_SOLUTIONS[name][0], seed).status == "passed"
    for defect in planted.DEFECTS[name]:
        assert judge(defect, seed).status == "wrong", defect.__name__


@pytest.mark.drawn
@pytest.mark.parametrize(("rung", "name"), ALONE)
def test_the_printed_solution_passes_where_it_is_pasted(rung, name, capsys):
    """In an empty namespace, so in its lab's too, whatever cells were run; it changes no name that the lab made."""
    check = getattr(_load(rung)[0], name)
    for _ in range(4):
        check.hint()
    pasted = {}
    exec(capsys.readouterr().out.rpartition("Solution:\n")[2], pasted)
    assert check(pasted[name]).status == "passed"
    (lab,) = (ROOT / "labs").glob(f"{rung[4:]}_*.ipynb")
    cells = json.loads(lab.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    made = {n.id for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    assert {key for key in pasted if not key.startswith("__")} & made == set()


@pytest.mark.drawn
@pytest.mark.parametrize(("rung", "name"), ON_RANKS)
def test_the_printed_solution_passes_on_ranks_of_its_own(rung, name, capsys):
    test_the_printed_solution_passes_where_it_is_pasted(rung, name, capsys)


def test_a_check_reports_an_exception_of_the_answer_with_its_line(capsys):
    @check
    def doubled(answer):
        if answer(2) != 4:
            raise Wrong("Two times two is four.")

    assert doubled(lambda x: 2 * x) == Verdict("doubled", "passed", "")
    assert doubled(lambda x: x).message == "Two times two is four."
    message = doubled(lambda x: x / 0).message
    assert "stopped in line " in message
    assert "x / 0" in message
    assert message.endswith("ZeroDivisionError: division by zero")
    assert "doubled: passed." in capsys.readouterr().out


class _Textless(Exception):
    def __str__(self):
        raise ValueError("no text")


class _Exits(Exception):
    def __str__(self):
        raise SystemExit


class _Tells(Exception):
    def __str__(self):
        while True:
            pass


@pytest.mark.parametrize(
    "error", [SystemExit(1), GeneratorExit(), _Textless(), _Exits(), _Tells(), RecursionError("deep"), MemoryError()]
)
def test_nothing_that_an_answer_raises_leaves_its_check(error):
    @check
    def once(answer):
        answer()

    def raises():
        raise error

    verdict = once(raises)
    assert verdict.status == "wrong"
    assert type(error).__name__ in verdict.message


@pytest.mark.parametrize(
    ("rung", "name", "endless"),
    [
        ("rung02", "all_reduce_mean", "while True: pass"),
        ("rung03", "split_qkv", "yield from itertools.count()"),
        ("rung09", "checkpoint", "while True: yield 1"),
    ],
)
def test_an_answer_without_end_is_a_wrong_one(rung, name, endless):
    names = {"itertools": itertools}
    exec(f"def answer(*case):\n    {endless}", names)
    verdict = getattr(_load(rung)[0], name)(names["answer"])
    assert verdict.status == "wrong"


def test_an_interrupt_of_the_learner_goes_through():
    @check
    def once(answer):
        answer()

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        once(interrupted)


def test_a_job_does_not_tell_an_answer_where_its_fault_is():
    job = rung05.jobs(1)[0]
    for look in (
        lambda: job._ill,
        lambda: job.__dict__,
        lambda: vars(job),
        lambda: job.__reduce_ex__(2),
        lambda: pickle.dumps(job),
    ):
        with pytest.raises(Wrong, match="where it planted the fault"):
            look()
    assert pickle.loads(cloudpickle.dumps(copy.deepcopy(job))).seed == job.seed


def test_what_a_judge_walks_through_is_guarded_too():
    class Endless:
        def __iter__(self):
            while True:
                pass

    @check
    def listed(answer):
        list(answer())

    assert "never ends" in listed(Endless).message


SLIPS = [
    ("Twice is not thrice", lambda x, y: 3 * x + y),
    ("The second counts once", lambda x, y: 2 * x + (2 * y if y > 4 else y)),
    ("A half is not rounded", lambda x, y: (2 * x + y) * (1 + 4e-5)),
]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (SLIPS[0][1], "Twice is not thrice (2 and 5). This explains all 4 wrong answers, as another mistake might."),
        # What explains a part, or the wrong ones alone, two at once, and a slip that is as good as right where the answer is off by little.
        (lambda x, y: 3 * x + (2 * y if y > 4 else y), "not one that the check knows. One wrong case: 2 and 5"),
        (lambda x, y: 3 * x + y if x < 9 else 7, "not one that the check knows. One wrong case: 2 and 5"),
        (lambda x, y: (2 + (x > 2)) * x + y, "not one that the check knows. One wrong case: 3 and 4"),
        (lambda x, y: (2 * x + y) * (1 + 1e-5), "not one that the check knows. One wrong case: 2 and 5"),
        (lambda x, y: 17, "The answer is the same in every case"),
        (lambda x, y: x * y, "not one that the check knows. One wrong case: 2 and 5 gives 10, and should give 9"),
    ],
)
def test_a_table_names_what_gives_all_answers(answer, said):
    cases = [(2, 5), (3, 4), (4, 4), (10, 7)]
    with pytest.raises(Wrong) as wrong:
        compare(answer, cases, lambda x, y: 2 * x + y, SLIPS, "{0} and {1}")
    assert said in str(wrong.value)


def test_a_table_passes_what_is_right_and_lets_no_answer_change_the_case():
    cases = [([3, 1, 2],), ([5, 4],)]
    rows = compare(lambda values: values.sort() or values[0], cases, min, [], "{0}")
    assert [row.truth for row in rows] == [1, 4]
    assert cases == [([3, 1, 2],), ([5, 4],)]


def test_the_first_sign_that_is_there_is_said_and_none_behind_it_is_looked_at():
    refuse("case", ("One", []))
    with pytest.raises(Wrong, match=r"^Two \(case\)\.$"):
        refuse("case", ("One", []), (lambda: "Two", lambda: 1), ("Three", lambda: 1 / 0))
    with pytest.raises(Wrong, match=r"^Twice\. Another mistake may give the same\.$"):
        recognize(6, "", [("Thrice", 9), ("Twice", 6.0)])


def test_an_answer_knows_what_its_own_lines_have_called():
    def counts(config):
        return next(count_params(each).total for each in config) + len(json.dumps({}))

    answer = Answer(counts)
    assert answer([preset("gpt2")]) > 10**8
    own = [name for name in answer.called if name.startswith("lablib.calc.params")]
    assert own == [
        "lablib.calc.params.count_params",
        "lablib.calc.params.ParamCount.total",
    ]  # and what these call is not
    assert list(Answer(functools.partial(count_params)).called) == [
        "lablib.calc.params.count_params"
    ]  # itself one of them


def test_an_answer_without_end_is_ended_and_a_long_import_is_none():
    def waits(n):
        while n:
            pass

    def works(n):
        # A hundred thousand lines of a library are no loop of the learner's.
        return len(json.dumps([[0, [0]]] * n, indent=1, cls=type("Slow", (json.JSONEncoder,), {})))

    # On one line it jumps to itself, where Python 3.11 counts no line.
    names = {}
    exec("def spins(n):\n    while True: pass", names)
    for endless in (waits, names["spins"]):
        with pytest.raises(Wrong, match="not ended for 3 after 10,000 of its lines: a loop never ends"):
            Answer(endless, lines=10_000)(3)
    assert Answer(works, lines=1000)(5000) > 5000
    # Nor is what a dataclass of a library has written for itself.
    assert len(Answer(lambda n: list(map(Verdict, *[["passed"] * n] * 3)), lines=100)(1000)) == 1000


def test_numbers_of_any_type_are_read_and_text_is_none():
    assert close(np.array([2.5]), 2.5)
    assert whole(np.float32(3)) == whole(3.0) == whole(np.int8(3)) == 3
    assert numbers(np.arange(3)) == numbers(range(3)) == numbers((0, 1, 2)) == [0, 1, 2]
    for wrong in ("2.5", None, [2.5, 1]):
        with pytest.raises(Wrong, match="should be a number"):
            close(wrong, 2.5)
    with pytest.raises(Wrong, match="whole number"):
        whole(2.5)
    with pytest.raises(Wrong, match="should be a list"):
        numbers("012")
