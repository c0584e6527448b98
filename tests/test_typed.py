"""No result is typed: captions, alternative texts and sentences about results take their numbers from code.

What is given and no result, the size of an example or a fact of a paper, stands in quotation marks, in mathematics or with
its citation, or its line ends with `<!-- given -->`.
"""

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Minutes of the course are plans and no results; tests/test_course_plan.py holds the page to them.
PLANS = {"how_to_use"}
PAGES = sorted(p for p in (ROOT / "book").glob("*.md") if p.stem not in {"glossary", "references", "versions"} | PLANS)
LABS = sorted((ROOT / "labs").glob("[0-9][0-9]_*.ipynb"))
FENCE = re.compile(r"(?ms)^(?P<fence>`{3,}|:{3,})\{(?P<kind>[\w-]+)\}[^\n]*\n(?P<body>.*?)^(?P=fence)[ ]*$")
GIVEN = "<!-- given"
UNITS = (
    r"GB|GiB|TB|TiB|MB|MiB|kB|KiB|ns|us|µs|ms|s|seconds?|minutes?|min|hours?|h|days?|years?|GB/s|TB/s|Gb/s|MB/s|[TPG]FLOP/s"
    r"|tokens/s|tokens a second|percent|%|times|x|fold|dollars?"
)
#: A number with a unit, alone or joined to a word ("7-fold").
RESULT = re.compile(rf"(?<![\w.^{{/-])[~<>]?\d[\d,]*(?:\.\d+)?(?:[- ]?(?:{UNITS}))\b|(?<![\w.])\d[\d,.]*%", re.I)
#: Names with digits in them, which are no numbers.
NAMES = re.compile(
    r"\b(?:rung|lab|chapter|section|table|figure|eq|appendix|stage|rank|step|layer|GPU|node|block|micro-batch"
    r"|Llama|Qwen|OLMo|PCIe|CUDA|Mixtral) \d+(?:\.\d+)?",
    re.I,
)


def typed_in(text):
    """Return the results typed into a text: one a line."""
    text = re.sub(r"\{eval\}`[^`]*`|\{\w+\}`[^`]*`|``[^`]*``|`[^`]*`|\"[^\"\n]*\"|\$[^$\n]*\$", "", text)
    found = []
    for line in re.sub(r"(?s)\$\$.*?\$\$", "", text).splitlines():
        match = RESULT.search(NAMES.sub("", line))
        if match and GIVEN not in line and "{cite" not in line:
            found.append(f"{match[0].strip()!r} in: {line.strip()[:90]}")
    return found


def _prose(text):
    """Return the sentences of a page: no code, no citations, no mathematics."""
    text = text.split("---", 2)[-1]
    # A line with a citation is a fact of the paper that it names; the marker goes with its line.
    text = "\n".join("" if "{cite" in line else line for line in text.splitlines())
    text = re.sub(r"(?ms)^(`{3,}|:{3,})\{code-cell\}.*?^\1[ ]*$", "", text)
    text = re.sub(r"(?ms)^\$\$.*?^\$\$", "", text)
    kept, opened = [], []  # the fences around a line: a directive's or a listing's
    for line in text.splitlines():
        fence = re.match(r"(`{3,}|:{3,})(.*)", line)
        if fence and opened and line.rstrip() == opened[-1][0]:
            opened.pop()
        elif fence:
            opened.append((fence[1], fence[2].startswith("{") and fence[2] != "{math}"))
        elif all(directive for _, directive in opened):
            kept.append(line)
    return "\n".join(kept)


def strings_with_digits(source):
    """Return captions and alternative texts of a cell in which a number is typed."""
    found = []
    try:
        tree = ast.parse(re.sub(r"(?m)^:\w+:.*$|^[%!].*$", "", source))
    except SyntaxError:
        return found
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        for keyword in call.keywords:
            if keyword.arg not in ("caption", "alt"):
                continue
            text = "".join(node.value for node in _typed_strings(keyword.value))
            if match := LOOSE.search(NAMES.sub("", text)):
                found.append(f"{match[0]!r} in {keyword.arg}: {text[:90]}")
    return found


#: A number that is no part of a name such as 1F1B, bf16, ZeRO-3, GPT-3 or H100, and no label of two or more of them.
LOOSE = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?![\w])%?", re.I)


def _typed_strings(node):
    """Yield the constants of a text that are no part of an expression in braces."""
    if isinstance(node, ast.JoinedStr):
        for value in node.values:
            if isinstance(value, ast.Constant):
                yield value
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node
    elif isinstance(node, ast.BinOp):
        yield from _typed_strings(node.left)
        yield from _typed_strings(node.right)


def _cells(path):
    if path.suffix == ".md":
        text = path.read_text(encoding="utf-8")
        return [match["body"] for match in FENCE.finditer(text) if match["kind"] == "code-cell"]
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_no_sentence_types_a_result(path):
    text = path.read_text(encoding="utf-8")
    if path.stem == "errata":  # the first cell of a row is the claim, as people make it
        text = re.sub(r"(?m)^\| .*? \| (?=.* \|$)", "| ", text)
    assert typed_in(_prose(text)) == []


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_no_text_of_a_lab_types_a_result(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells[1:] if cell["cell_type"] == "markdown"]
    assert [found for text in texts for found in typed_in(text)] == []


@pytest.mark.parametrize("path", [*PAGES, *LABS], ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_no_caption_and_no_alternative_text_types_a_number(path):
    assert [found for cell in _cells(path) for found in strings_with_digits(cell)] == []


def test_a_typed_result_is_found():
    assert typed_in("It takes 12.8 GB.") != []
    assert typed_in("It is 3 times as fast.") != []
    assert typed_in("It saves 40 percent.") != []
    assert typed_in("It takes 90 minutes.") != []
    assert typed_in("It takes 90 minutes. <!-- given -->") == []
    assert typed_in('"It takes 90 minutes" is a claim.') == []
    assert typed_in("It takes {eval}`t` GB, and rung 12 s it.") == []
    assert typed_in("Four ranks hold bf16 weights of Llama 3 8B on H100.") == []
    assert strings_with_digits('show(fig, caption="It takes 3 steps.", alt=f"{n} bars of ZeRO-3.")') != []
    assert strings_with_digits('show(fig, caption=f"It takes {n} steps.", alt="GPT-3 in bf16 by 1F1B.")') == []
