"""Every lab and every chapter keeps the shape that readers rely on, and this test can tell when one does not."""

import ast
import builtins
import copy
import json
import re
from pathlib import Path
from unittest.mock import MagicMock

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "labs" / "_template.ipynb"
LABS = [TEMPLATE, *sorted((ROOT / "labs").glob("[0-9][0-9]_*.ipynb"))]
CHAPTERS = sorted((ROOT / "book").glob("[0-9][0-9]_*.md"))
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
#: Sections of a chapter that need no takeaway of their own.
FURNITURE = re.compile(
    r"notation|claims you will meet|five questions|problems|exercises|done when|reading guide|what('s| comes)? next|where to go",
    re.I,
)


def _source(cell):
    return "".join(cell["source"])


def _bullets(text):
    """Return the first list of a text, each item on one line."""
    items = []
    for line in text.splitlines():
        if re.match(r"[-*] ", line):
            items.append(line[2:])
        elif items and line.startswith("  "):
            items[-1] += " " + line.strip()
        elif items:
            break
    return items


def _stems(text):
    """Return the first five letters of each longer word: enough to see `count` in `counted`."""
    words = set(re.findall(r"[a-z]{4,}", text.lower()))
    return {word[:5] for word in words - {"with", "what", "that", "from", "your", "have", "this", "which", "when"}}


def _last_call(source):
    """Return the name of the function that the last statement of a cell calls, or ''."""
    body = ast.parse(source).body
    value = getattr(body[-1], "value", None) if body else None
    return ast.unparse(value.func) if isinstance(value, ast.Call) else ""


class _Anything(MagicMock):
    def __format__(self, spec):
        return str(self)


class _Names(dict):
    """Names of a cell; what another cell or a library has made is there too, as something that takes any use."""

    def __missing__(self, name):
        return self.setdefault(name, getattr(builtins, name) if hasattr(builtins, name) else _Anything(name=name))


class _Typing(ast.NodeTransformer):
    """Type 1, 2, 3, ... in place of each None that a learner finds: in a call of `predict` or in a dict of guesses."""

    def __init__(self):
        self.typed = []

    def _number(self, node):
        if not (isinstance(node, ast.Constant) and node.value is None):
            return self.visit(node)
        self.typed.append(len(self.typed) + 1)
        return ast.Constant(self.typed[-1])

    def visit_Dict(self, node):
        node.values = [self._number(value) for value in node.values]
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        if _predicts(node) and len(node.args) > 1:
            node.args[1] = self._number(node.args[1])
        return node


def _predicts(node):
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "predict"


def _predictions(source, parameters=""):
    """Return what a cell predicts as shipped, the numbers typed into it, and what it predicts with these.

    Only its calls of `predict` run, with the loops around them and what these name.
    """
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return [], [], []
    kept = [node for node in body if any(map(_predicts, ast.walk(node))) and not isinstance(node, ast.FunctionDef)]
    used = {name.id for node in kept for name in ast.walk(node) if isinstance(name, ast.Name)}
    for node in body:
        targets = {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
        if isinstance(node, ast.Assign | ast.AugAssign) and targets & used and node not in kept:
            kept.append(node)
    cell = ast.Module([node for node in body if node in kept], [])

    def run():
        log, names = MagicMock(), _Names()
        names["P"] = names["log"] = log
        exec(compile(parameters, "parameters", "exec"), names)
        exec(compile(ast.fix_missing_locations(cell), "cell", "exec"), names)
        return [call.args[1] for call in log.predict.call_args_list]

    shipped, typing = run(), _Typing()
    cell = typing.visit(cell)
    return shipped, typing.typed, run()


def problems_of_lab(notebook, number):
    """Return one sentence for each way in which a lab breaks the contract.

    Args:
        notebook: The notebook as JSON.
        number: Two digits.
    """
    cells = notebook["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    text = [_source(cell) for cell in cells if cell["cell_type"] == "markdown"]
    sources = [_source(cell) for cell in code]
    found = []

    def hold(condition, sentence):
        if not condition:
            found.append(sentence)

    hold((notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5), "nbformat is 4.5")
    hold(notebook["metadata"] == METADATA, "metadata is kernelspec and language_info, nothing else")
    ids = [cell.get("id", "") for cell in cells]
    hold(len(set(ids)) == len(ids), "cell ids are unique")
    hold(all(re.fullmatch(rf"r{number}-[a-z0-9-]+", i) for i in ids), f"cell ids look like r{number}-03")
    hold(all(set(cell["metadata"]) <= {"tags"} for cell in cells), "cells carry tags and no other metadata")
    hold(not any(cell["outputs"] for cell in code), "stored without outputs")
    hold(all(cell["execution_count"] is None for cell in code), "stored without execution counts")

    first, last = text[0], "\n".join(text).split("## Summary")[-1]
    hold(cells[0]["cell_type"] == "markdown" and first.startswith("# "), "the first cell starts with an H1")
    hold(sum(len(re.findall(r"(?m)^# ", t)) for t in text) == 1, "there is one H1")
    promises, summary = _bullets(first), _bullets(last)
    hold(3 <= len(promises) <= 5, "the first cell has three to five promise bullets")
    hold("\n## Summary" in "\n" + "\n".join(text), "there is a section Summary")
    mirrored = len(promises) == len(summary) and all(
        len(_stems(a) & _stems(b)) >= 2 for a, b in zip(promises, summary, strict=True)
    )
    hold(mirrored, "the bullets of the summary mirror the promises, in their order")
    hold(re.search(r"\d+ min|minutes:?\*{0,2}:? \d", first, re.I), "the first cell says how many minutes")
    hold(re.search(r"hardware", first, re.I), "the first cell says what hardware")
    hold(re.search(r"(what('s| comes)? next|\*\*next)", last, re.I), "the end says what's next")

    parameters = [cell for cell in code if "parameters" in cell["metadata"].get("tags", [])]
    hold(len(parameters) == 1, "exactly one cell is tagged parameters")
    hold(any("predict(" in s for s in sources), "something is predicted")
    hold(any("compare(" in s for s in sources), "something is compared")
    hold(any(re.search(r"(?m)^\s*assert ", s) for s in sources), "a claim is an assert")
    stubs = [i for i, s in enumerate(sources) if "raise NotImplementedError" in s]
    hold(len(stubs) >= 2, "there are two exercises or more")
    for i in stubs:
        name = re.search(r"def (\w+)[^§]*?raise NotImplementedError", sources[i])
        near = "\n".join(sources[i : i + 2])
        checked = name and re.search(rf"\b(?:checks|rung\d\d)\.\w+\({name[1]}\b", near)
        hold(checked, f"the stub of {ids[cells.index(code[i])]} is followed by its check")

    hold(
        any(re.search(r"(?m)^print\(\w+\.summary\(\)\)$", s) for s in sources[-2:]),
        "the summary says what was guessed and passed",
    )
    hold(not re.search(r"(?m)^(You|By now you)\b", last), "the summary praises nobody who has only run the lab")

    given = "\n".join(map(_source, parameters))
    for cell in code:
        source = _source(cell)
        hold(len(source.splitlines()) <= 25, f"{cell['id']} has at most 25 lines")
        hold(max(map(len, source.splitlines()), default=0) <= 78, f"{cell['id']} has lines of at most 78 characters")
        shipped, typed, arrived = _predictions(source, given)
        hold(shipped == [None] * len(shipped), f"{cell['id']} ships its prediction empty")
        hold(sorted(arrived) == typed, f"{cell['id']} has a None to type over for each prediction, {typed}: {arrived}")
        hold("tqdm" not in source, f"{cell['id']} shows no progress bar")
        if re.search(r"\b(?:plt|ax|axes)\.\w", source):
            shown = _last_call(source) in {"show", "plt.show", "style.show"} or source.startswith("def ")
            hold(shown, f"{cell['id']} ends with plt.show() or show(...)")
    return found


def problems_of_chapter(text, stem):
    """Return one sentence for each way in which a chapter breaks the contract.

    Args:
        text: The Markdown of the chapter.
        stem: NN_slug.
    """
    found = []

    def hold(condition, sentence):
        if not condition:
            found.append(sentence)

    fences = r"(?ms)^(?P<fence>`{3,}|:{3,})\{code-cell\}.*?^(?P=fence)[ ]*$"
    code = "\n".join(match[0] for match in re.finditer(fences, text))
    prose = re.sub(fences, "", text)
    start = re.split(r"(?m)^## ", prose)[0]
    sections = {part.splitlines()[0]: part for part in re.split(r"(?m)^## ", prose)[1:]}

    hold(len(re.findall(r"(?m)^# ", prose)) == 1, "there is one H1")
    hold("format_name: myst" in text.split("---")[1], "the head has jupytext's format")
    hold(re.search(r"question", start, re.I) and "?" in start, "the start asks its question")
    hold(re.search(r"what you need first", start, re.I), "the start says what you need first")
    after = list(sections)[list(sections).index("Done when") :] if "Done when" in sections else []
    for title, section in sections.items():
        taught = not FURNITURE.match(title) and title not in after  # reference stands there, folded
        box = re.search(r"(?m)^[`:]{3,}\{admonition\} Takeaway.*\n[`:]?:?class: tip", section)
        hold(box or not taught, f"section {title!r} has a boxed takeaway")
    hold(len(re.findall(r"(?m)^\s*show(?:_steps)?\(", code)) >= 2, "two figures or more are drawn")
    hold(
        re.search(r"\{admonition\} Claims you will meet.*\n:?:?class: warning", prose),
        "there is a box Claims you will meet",
    )
    hold(any(t.startswith("Problems") for t in sections), "there are problems")
    folded = re.search(r"\{admonition\} (Solution|Answer).*\n:class: dropdown", sections.get("Problems", ""))
    hold(folded, "problems have folded answers")
    done = "".join(part for title, part in sections.items() if title.startswith("Done when"))
    hold(f"rung{stem[:2]}" in done, "Done when names the check that proves it")
    guide = "".join(part for title, part in sections.items() if title.startswith("Reading guide"))
    hold(guide.count("{cite") >= 2, "the reading guide leads to the papers")
    hold(f"labs/{stem}" in prose, "the chapter leads to its lab")
    hold(re.search(r"`lablib[./]\w", prose), "the chapter leads to its module")
    hold(f"<code-{stem}>" in prose, "the chapter leads to the map of its code")
    hold(f"../labs/solutions/rung{stem[:2]}.py" in prose, "the solutions are folded into the chapter")

    # A result is computed where it stands; a number with a fraction and a unit in plain text was typed in.
    # Published numbers stand with their citation, claims in quotation marks.
    for line in prose.splitlines():
        bare = re.sub(r"\{eval\}`[^`]*`|\"[^\"]*\"|\$[^$]*\$", "", line)
        unit = r"(?:GB|GiB|TB|TiB|MB|MiB|ms|s|GB/s|TFLOP/s|percent|%|million|billion|days|hours)\b"
        typed = re.search(rf"\b\d[\d,]*\.\d+ ?{unit}", bare)
        hold(not typed or "{cite" in line, f"typed-in result {typed[0] if typed else ''!r}: compute it")
    return found


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_lab_keeps_the_contract(path):
    number = "00" if path == TEMPLATE else path.stem[:2]
    assert problems_of_lab(json.loads(path.read_text(encoding="utf-8")), number) == []


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_chapter_keeps_the_contract(path):
    assert problems_of_chapter(path.read_text(encoding="utf-8"), path.stem) == []


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_is_an_evening_and_not_a_book(path):
    assert len(path.read_text(encoding="utf-8").split()) <= 5_500


def test_every_chapter_has_its_lab_and_both_are_in_the_table_of_contents():
    contents = (ROOT / "_toc.yml").read_text(encoding="utf-8")
    stems = [path.stem for path in CHAPTERS]
    assert stems == [path.stem for path in LABS if path != TEMPLATE]
    assert stems
    for stem in stems:
        assert f"file: book/{stem}\n" in contents
        assert f"file: labs/{stem}\n" in contents


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_shows_only_code_that_exists(path):
    include = r"\{literalinclude\} (\S+)\n(?:[:`]*:?\w+:.*\n)*?:+pyobject: (\S+)"
    shown = re.findall(include, path.read_text(encoding="utf-8"))
    assert shown
    for file, name in shown:
        node = ast.parse((path.parent / file).resolve().read_text(encoding="utf-8"))
        for part in name.split("."):
            named = [child for child in node.body if getattr(child, "name", None) == part]
            assert named, f"{file} has no {name}"
            node = named[0]


@pytest.mark.parametrize("word", ["rank", "process group", "collective", "node", "NIC"])
def test_a_basic_word_is_explained_where_the_course_first_uses_it(word):
    """The rank of a matrix, of which LoRA speaks, is another word."""
    entry = (ROOT / "book/glossary.md").read_text(encoding="utf-8").split(f"\n{word}\n")[1].split("\n\n")[0]
    for path in CHAPTERS:
        text = re.sub(r"(?ms)^(`{3,})\{code-cell\}.*?^\1[ ]*$", "", path.read_text(encoding="utf-8"))
        lines = [line for line in text[text.index("\n## ") :].splitlines() if not re.search("LoRA|low rank|^#", line)]
        used = [number for number, line in enumerate(lines) if re.search(rf"\b{word}s?\b", line)]
        if used:
            assert f"({path.name})" in entry, f"the glossary leads elsewhere than to {path.stem}"
            near = "\n".join(lines[used[0] : used[0] + 2])
            assert re.search(rf"\{{term\}}`(?:[^`]*<)?{word}>?`", near), near
            return


def _cell(notebook, tag_or_text):
    return next(
        cell
        for cell in notebook["cells"]
        if tag_or_text in cell["metadata"].get("tags", []) or tag_or_text in _source(cell)
    )


def _edit(text_of, old, new):
    def change(notebook):
        cell = _cell(notebook, text_of)
        cell["source"] = _source(cell).replace(old, new)

    return change


BROKEN_LABS = {
    "stored without outputs": lambda nb: _cell(nb, "assert smallest")["outputs"].append({}),
    "stored without execution counts": lambda nb: _cell(nb, "assert smallest").update(execution_count=1),
    "cell ids are unique": lambda nb: nb["cells"][1].update(id=nb["cells"][0]["id"]),
    "cell ids look like": lambda nb: nb["cells"][1].update(id="8f2a91c4"),
    "metadata is": lambda nb: nb["metadata"]["language_info"].update(version="3.11.7"),
    "no other metadata": lambda nb: nb["cells"][2]["metadata"].update(collapsed=True),
    "tagged parameters": lambda nb: _cell(nb, "parameters")["metadata"].clear(),
    "there is one H1": _edit("## Summary", "## Summary", "# Summary"),
    "three to five": _edit("After this lab", "- ", ""),
    "mirror the promises": _edit(
        "every exercise passed, you can", "- compare a prediction with its measurement", "- look at things"
    ),
    "how many minutes": _edit("**Minutes:**", "10", "few"),
    "what hardware": _edit("**Minutes:**", "Hardware", "Needs"),
    "what's next": _edit("What's next", "What's next", "The end"),
    "something is predicted": _edit("log.predict", "predict(", "note("),
    "what was guessed and passed": _edit("log.summary", "summary", "table"),
    "praises nobody": _edit(
        "every exercise passed, you can", "With every prediction made and every exercise passed, y", "Y"
    ),
    "a None to type over for each": _edit("log.predict", "log.", "for n in (1, 2): log."),
    "ships its prediction empty": _edit("log.predict", "None", "world_size"),
    "at most 78 characters": _edit("assert smallest", "assert smallest", "# " + "why " * 20 + "\nassert smallest"),
    "an assert": _edit("assert smallest", "assert ", "print("),
    "two exercises": _edit("raise NotImplementedError", "raise NotImplementedError", "return 16"),
    "followed by its check": _edit("rung01.bytes_per_parameter(", "rung01.bytes_per_parameter(", "print("),
    "at most 25 lines": _edit("world_size = 2", "world_size", "# why\n" * 30 + "world_size"),
    "no progress bar": _edit("import torch", "import torch", "from tqdm import tqdm"),
    "ends with plt.show()": _edit("ax.bar", "show(", "print("),
}


@pytest.mark.parametrize("sentence", BROKEN_LABS)
def test_a_broken_lab_is_named(sentence):
    notebook = copy.deepcopy(json.loads(TEMPLATE.read_text(encoding="utf-8")))
    BROKEN_LABS[sentence](notebook)
    assert [p for p in problems_of_lab(notebook, "00") if sentence in p]


BROKEN_CHAPTERS = {
    "there is one H1": ("## Problems", "# Problems"),
    "asks its question": ("?", "."),
    "boxed takeaway": ("{admonition} Takeaway", "{note}"),
    "two figures": ("show", "draw"),
    "Claims you will meet": ("{admonition} Claims you will meet", "{note} Claims"),
    "folded answers": (":class: dropdown", ""),
    "names the check": ("rung", "step"),
    "leads to the papers": ("{cite}", ""),
    "map of its code": ("<code-", "<no-"),
    "typed-in result": ("## Problems", "It takes 12.8 GB.\n\n## Problems"),
}


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
@pytest.mark.parametrize("sentence", BROKEN_CHAPTERS)
def test_a_broken_chapter_is_named(path, sentence):
    broken = path.read_text(encoding="utf-8").replace(*BROKEN_CHAPTERS[sentence])
    assert [p for p in problems_of_chapter(broken, path.stem) if sentence in p]


GUESSES = {
    "guesses = {'a': None, 'b': None}\nfor n, g in guesses.items():\n    P.predict(f'{n}: time', g, '')": (
        [None] * 2,
        [1, 2],
    ),
    "one, two = {1: None}, {1: None}\nfor t in given:\n    P.predict('a', one.get(t), '')\n    P.predict('b', two[t], '')": (
        [None] * 2,
        [1, 2],
    ),
    "P.predict('a', None, '');": ([None], [1]),
    "for n in 'ab':\n    P.predict(n, None, '')": ([None] * 2, [1, 1]),
    "[P.predict(n, None, '') for n in 'ab']": ([None] * 2, [1, 1]),
    "P.predict('a', given[0], '')": ([1], [1]),
    "guesses = {'a': None, 'b': 3}\nfor n, g in guesses.items():\n    P.predict(n, g, '')": ([None, 3], [1, 3]),
}


@pytest.mark.parametrize("source", GUESSES)
def test_a_number_typed_in_place_of_none_is_one_prediction(source):
    shipped, typed, arrived = _predictions(source, "given = [1]")
    assert (shipped, arrived) == GUESSES[source]
    assert typed == list(range(1, 1 + source.count("None")))


GUIDES = ("book/how_to_use.md", "README.md")


def _quoted_sections(text):
    """Return the titles that a guide sends a reader to: what stands in quotation marks and begins like a heading."""
    return re.findall(r'"([A-Z0-9][^"\n]{8,})"', re.sub(r"(?ms)^```.*?^```$|`[^`\n]*`", "", text))


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_sends_to_sections_that_exist(guide):
    pages = [*(ROOT / "book").glob("*.md"), ROOT / "index.md"]
    headings = {h for page in pages for h in re.findall(r"(?m)^#+ (.+?)\s*$", page.read_text(encoding="utf-8"))}
    headings |= {heading.partition(":")[0] for heading in headings}
    named = _quoted_sections((ROOT / guide).read_text(encoding="utf-8"))
    assert len(named) >= 4
    assert [title for title in named if title not in headings] == []


TEXT = {".md", ".py", ".ipynb", ".yml", ".yaml", ".toml", ".json", ".bib", ".css", ".sh", ".svg", ".txt", ""}
OURS = ["book", "labs", "lablib", "tests", "tools", "_ext", "_static", ".github", ".ci", ".devcontainer"]


def _texts():
    folders = [p for folder in OURS for p in (ROOT / folder).rglob("*")]
    here = [p for p in ROOT.iterdir() if p.name != ".git" and not p.name.startswith((".env", ".cover"))]
    files = {p for p in folders + here if p.is_file() and p.suffix in TEXT}
    return sorted(p for p in files if not {"__pycache__", ".ipynb_checkpoints"} & set(p.parts))


@pytest.mark.parametrize("path", _texts(), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_unfinished_and_nothing_foreign(path):
    # Put together from parts, so that this file does not name what it looks for.
    forbidden = {
        "unfinished": r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b",
        "a path of one machine": r"(?<![\w.})\]])/(wo" + r"rk|ro" + r"ot)/",
        "a picture in place of a word": "[\U0001f300-\U0001faff\u2705\u274c\u26a0]",
    }
    text = path.read_text(encoding="utf-8")
    assert {why: m[0] for why, pattern in forbidden.items() if (m := re.search(pattern, text))} == {}


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda path: path.stem)
def test_a_test_waits_for_nothing_and_skips_nothing_silently(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"time\.sle" + r"ep\(|mark\.sk" + r"ip\(", text)
