"""What becomes of a learner's answers: tried against every "Done when", handed in, and put beside those of a class.

    graduation  answers taken out of notebooks, each judged in a process of its own
    submission  one file of verdicts, predictions and reports, made in a clean process, with a hash
    minutes     how long a chapter, a lab and an exercise take, by the rule of book/how_to_use.md
    classroom   the submissions of a room: who stands where, which wrong idea is how common, a board of plans

Read `graduation` first. The page on graduation, and the part on teaching.
"""

from lablib.checks.answers.classroom import SOLVED, Board, Class, board, read_class, read_jobs
from lablib.checks.answers.graduation import (
    GOALS,
    REQUIREMENTS,
    TIMEOUT_S,
    Goal,
    Outcome,
    Requirement,
    answer_source,
    examine,
    exercises,
    is_untouched,
    still_missing,
)
from lablib.checks.answers.minutes import A_GUESS, A_PROBLEM, A_TRY, CODE, READ, STUDY, WRITE, chapter_minutes, read_lab
from lablib.checks.answers.submission import is_as_written, judge_again, submit

__all__ = [
    "A_GUESS",
    "A_PROBLEM",
    "A_TRY",
    "CODE",
    "GOALS",
    "READ",
    "REQUIREMENTS",
    "SOLVED",
    "STUDY",
    "TIMEOUT_S",
    "WRITE",
    "Board",
    "Class",
    "Goal",
    "Outcome",
    "Requirement",
    "answer_source",
    "board",
    "chapter_minutes",
    "examine",
    "exercises",
    "is_as_written",
    "is_untouched",
    "judge_again",
    "read_class",
    "read_jobs",
    "read_lab",
    "still_missing",
    "submit",
]
