"""Files of strangers: one reader, which bounds size and depth and names what is wrong."""

import json
import re
from pathlib import Path

import pytest

from lablib.calc.errors import DEEPEST, json_text, one_of, read_bounded, read_json

LABLIB = Path(__file__).resolve().parents[1] / "lablib"
#: What these read is the course's own: shipped with it, or written by the very process that reads it.
OWN = {
    "calc/errors.py",
    "calc/layouts/planner/calibration.py",
    "calc/torch_versions.py",
    "checks/answers/graduation.py",
    "checks/answers/minutes.py",
    "cli/copies.py",
    "live/explorer.py",
}


def test_json_is_read_in_one_place():
    readers = {
        path.relative_to(LABLIB).as_posix()
        for path in LABLIB.rglob("*.py")
        if re.search(r"\bjson\.loads?\(", path.read_text(encoding="utf-8"))
    }
    assert readers == OWN


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not JSON: Expecting value"),
        (b'{"a": 1', "is not JSON: Expecting"),
        (b"\xff\xfe\x00", "is not JSON: 'utf-8' codec"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a":' * (DEEPEST + 1) + b"1" + b"}" * (DEEPEST + 1), "nested too deep"),
        (b'{"layers": 32, "layers": 1}', "'layers' stands there twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number has 5,000 digits"),
        (b'"' + b"x" * 1000 + b'"', "is too large to be read"),
    ],
)
def test_what_cannot_be_read_is_one_sentence_with_the_files_name(tmp_path, content, said):
    path = tmp_path / "stranger.json"
    path.write_bytes(content)
    most = 1000 if b"xxx" in content else 2**20
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))} ") as caught:
        read_json(path, most)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 120


def test_as_deep_as_allowed_is_read(tmp_path):
    path = tmp_path / "deep.json"
    path.write_text("[" * DEEPEST + "]" * DEEPEST)
    assert json.dumps(read_json(path)) == path.read_text()


def test_what_never_ends_is_not_read_to_its_end():
    with pytest.raises(ValueError, match="/dev/zero is too large to be read: it has more than 1 MiB"):
        read_bounded("/dev/zero", 2**20)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), [{"a": -float("inf")}]])
def test_json_that_is_written_is_json(value):
    with pytest.raises(ValueError, match="infinite or no number"):
        json_text(value)


def test_a_message_stays_short_whatever_was_typed_and_however_much_is_known():
    with pytest.raises(ValueError, match=r"^unknown instant 'xxx") as caught:
        one_of("instant", "x" * 5000, [f"forward of block {number}" for number in range(1000)])
    assert len(str(caught.value)) < 500
    assert "and 984 others" in str(caught.value)
