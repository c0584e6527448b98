"""Explorers: every state of every control computed, held to the calculators, drawn as sound SVG, and shipped whole."""

import importlib
import json
import math
import pkgutil
import random
import re
import subprocess
import sys
from dataclasses import replace
from html import unescape
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from lablib import live
from lablib.calc.communication import data_parallel_bytes
from lablib.calc.hardware import accelerator
from lablib.calc.layouts.export import EXPORTERS
from lablib.calc.layouts.planner import FIELDS, Layout, peak_and_step, plan
from lablib.calc.memory import verdict
from lablib.calc.memory.timeline import memory_timeline
from lablib.calc.models import preset
from lablib.calc.parallel import max_params, zero_state_bytes
from lablib.calc.params import count_params
from lablib.calc.schedules import schedule
from lablib.cli.main import app as rung
from lablib.live import cluster as explore_cluster
from lablib.live import mesh as explore_mesh
from lablib.live import pipeline as explore_pipeline
from lablib.live import planner as explore_planner
from lablib.live import svg
from lablib.live import training as explore_training
from lablib.live import zero as explore_zero
from lablib.live.explorer import PARTS, Control, answer_json, find_explorer
from lablib.live.steps import Piece, stepped
from lablib.view.schedules import ACTION_COLORS
from lablib.view.style import COLORS
from tests.scripts import ROOT, load
from tests.test_models import LLAMA_3_8B

TRAINING, ZERO, CLUSTER = explore_training.EXPLORER, explore_zero.EXPLORER, explore_cluster.EXPLORER
PIPELINE, MESH, PLANNER = explore_pipeline.EXPLORER, explore_mesh.EXPLORER, explore_planner.EXPLORER
#: Every module of lablib.live that has one.
EXPLORERS = {
    name: module.EXPLORER
    for name in sorted(f"lablib.live.{found.name}" for found in pkgutil.iter_modules(live.__path__))
    if hasattr(module := importlib.import_module(name), "EXPLORER")
}


def test_every_explorer_is_on_a_page_and_at_the_door():
    pages = [ROOT / "index.md", *(ROOT / "book").glob("*.md")]
    shown = re.findall(r"\{livecalc\} (\S+)", "".join(page.read_text(encoding="utf-8") for page in pages))
    assert set(shown) == set(EXPLORERS)
    assert {f"lablib.live.{name}" for name in re.findall(r"(?m)^    (\w+)", live.__doc__)} >= set(EXPLORERS)


def some(explorer, states, count):
    """Return all states, or some of them, drawn with a printed seed, of an explorer whose answers take seconds."""
    if not explorer.button:
        return states
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed).sample(states, count)


def around(explorer):
    """Return the first state, and every state that differs from it in one control, or some of these."""
    first = explorer.state()
    moved = [first | {c.name: value} for c in explorer.controls for value, _ in c.options if value != c.first]
    return [first, *some(explorer, moved, 4)]


def at_random(explorer, count):
    """Return states drawn from all of them, the seed printed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    drawn = [{c.name: draw.choice(c.options)[0] for c in explorer.controls} for _ in range(count)]
    return some(explorer, drawn, min(count, 3))


def memory_of(state, **other):
    settings = {name: value for name, value in state.items() if name not in ("model", "device")}
    blocks = other.pop("blocks", None)
    model = preset(state["model"])
    shape = model if blocks is None else replace(model, num_layers=blocks)
    return memory_timeline(shape, **settings | other).peak


def edges(explorer):
    """Return every model with the least and the most of all other controls at once, and some of each one's own."""
    models, *others = explorer.controls
    ends = [{c.name: c.options[0][0] for c in others}, {c.name: c.options[-1][0] for c in others}]
    apart = [{name: value} for end in ends for name, value in end.items()]
    first = explorer.state()
    states = []
    for n, (model, _) in enumerate(models.options):
        # Each of these moves meets a fifth of the models.
        states += [first | {models.name: model} | moved for moved in (*ends, *apart[n % 5 :: 5])]
    return some(explorer, states, 6)


@pytest.mark.drawn
@pytest.mark.parametrize("explorer", EXPLORERS.values(), ids=lambda e: e.name)
def test_no_state_is_without_an_answer(explorer):
    drawn = bool(explorer.answer()["picture"])  # the formulas are a table
    for state in edges(explorer):
        answer = explorer.answer(state)
        assert bool(answer["picture"]) == drawn, state
        assert all(answer[part] for part in ("caption", "table", "call", "numbers")), state
        if not answer["clipped"]:
            assert answer["state"] == state


@pytest.mark.parametrize(("model", "most"), [("gpt2", "1,024"), ("gpt2-xl", "1,024"), ("gpt3-175b", "2,048")])
def test_what_a_control_cannot_take_is_clipped_and_said(model, most):
    answer = TRAINING.answer({"model": model})
    assert answer["clipped"] == f"tokens in a sequence: {most}, the most that {model} has positions for."
    assert answer["state"] == TRAINING.state({"model": model, "seq": most.replace(",", "")})
    assert answer | {"clipped": ""} == TRAINING.answer(answer["state"])
    assert not TRAINING.answer({"model": "llama-3-8b"})["clipped"]


def test_what_has_no_answer_is_a_sentence_for_the_page():
    reply = json.loads(answer_json("lablib.live.zero", json.dumps({"stage": "7"})))
    assert set(reply) == {"error"}
    assert "unknown stage '7'" in reply["error"]


def test_the_training_explorer_shows_the_peak():
    for state in around(TRAINING) + at_random(TRAINING, 20):
        answer = TRAINING.answer(state)
        state = answer["state"]
        memory = memory_of(state)
        found = verdict(memory.total, state["device"])
        expected = dict(memory.terms) | {"total": memory.total, "headroom": found.room}
        assert {name: answer["numbers"][name] for name in expected} == expected, state
        assert f"{memory.total / 1e9:,.2f} GB" in answer["table"]
        assert f": {found.word}, " in answer["caption"]


def test_it_stops_fitting_where_it_says():
    """The calculator is asked at the size that the explorer names and at the next one."""
    sizes = {"blocks": 4000, "micro_batch": math.inf, "seq": math.inf}  # a thousand blocks take a while

    def fits(state, **other):
        return verdict(memory_of(state, **other).total, state["device"]).word == "fits"

    seen = dict.fromkeys(sizes, 0)
    small = [state | {"model": "llama-3.2-3b", "recompute": "full"} for state in around(TRAINING)[::3]]
    for asked in around(TRAINING)[::2] + small + at_random(TRAINING, 10):
        answer = TRAINING.answer(asked)
        numbers, state, model = answer["numbers"], answer["state"], preset(asked["model"])
        for name, most in sizes.items():
            n = numbers[f"largest_{name}"]
            if n > most:
                continue
            if n:
                assert fits(state, **{name: n}), (state, name, n)
            last = name == "seq" and model.learned_positions and n == model.max_positions
            if not last:
                assert not fits(state, **{name: n + 1}), (state, name, n)
            seen[name] += bool(n)
    assert min(seen.values()) >= 10, seen


def test_the_zero_explorer_shows_what_is_held_and_sent():
    for asked in around(ZERO) + at_random(ZERO, 20):
        answer = ZERO.answer(asked)
        state, numbers = answer["state"], answer["numbers"]
        params, ranks, k = count_params(preset(state["model"])).total, state["ranks"], state["micro_batches"]
        unit = 2 * params * (ranks - 1) / ranks
        for stage, units in ((0, 2), (1, 2), (2, k + 1), (3, 3 * k)):
            assert numbers[f"held_{stage}"] == zero_state_bytes(params, ranks, stage)
            assert numbers[f"sent_{stage}"] == pytest.approx(units * unit, rel=1e-12, abs=1)
            if k == 1:
                assert numbers[f"sent_{stage}"] == round(data_parallel_bytes(2 * params, ranks, stage=stage))
            # Before the update all states are there, and what is unsharded for a while comes on top in stages 2 and 3.
            more = numbers[f"peak_{stage}"] - numbers[f"held_{stage}"]
            assert (
                -1
                <= more
                <= (1 if stage < 2 else 4 * params + 8 * min(state["units"], preset(state["model"]).num_layers) + 8)
            ), (state, stage, more)
        # FSDP2 keeps its root gathered for backward, so that it is gathered once less in each micro-batch.
        assert numbers["sent_3"] >= numbers["sent_4"] >= numbers["sent_3"] - k * unit
        assert numbers["held_4"] == numbers["held_3"]
        capacity, zero = accelerator(state["device"]).usable_bytes, min(state["stage"], 3)
        least = numbers["least_ranks"]
        if least:
            assert zero_state_bytes(params, least, zero) <= capacity
        if least != 1:
            fewer = least - 1 if least else explore_zero.MAX_RANKS
            assert zero_state_bytes(params, fewer, zero) > capacity
        assert numbers["largest_params"] == max_params(capacity, ranks, zero)
        # One thing after the other takes no less time, and the device computes as much.
        slow = ZERO.answer(state | {"overlap": 0})["numbers"]
        for stage in explore_zero.STAGES:
            assert slow[f"step_us_{stage}"] >= numbers[f"step_us_{stage}"] - 1
            waits = [each[f"step_us_{stage}"] - each[f"exposed_us_{stage}"] for each in (slow, numbers)]
            assert abs(waits[0] - waits[1]) <= 2


@pytest.mark.parametrize("explorer", EXPLORERS.values(), ids=lambda e: e.name)
def test_the_call_gives_the_numbers_of_the_page(explorer, capsys):
    for state in at_random(explorer, 8):
        answer = explorer.answer(state)
        names = {}
        exec(compile(unescape(answer["call"]), "call", "exec"), names)
        SAME_NUMBERS[explorer.name](names, answer, state, capsys.readouterr().out)


def _same_training(names, answer, state, printed):
    assert names["step"].peak_bytes == answer["numbers"]["total"]
    assert str(answer["numbers"]["headroom"]) in printed


def _same_zero(names, answer, state, printed):
    found, numbers, stage = names["found"], answer["numbers"], answer["state"]["stage"]
    assert (sum(found.held.values()), round(found.sent)) == (numbers[f"held_{stage}"], numbers[f"sent_{stage}"])
    assert round(1e6 * found.step.seconds) == numbers[f"step_us_{stage}"]
    assert str(found.peak) in printed


def _same_formulas(names, answer, state, printed):
    examples = [each.example(names["chosen"]) for each in names["FORMULAS"]]
    assert all(example in unescape(answer["table"]) and example in printed for example in examples)


def _same_cluster(names, answer, state, printed):
    one, numbers, result = names["one"], answer["numbers"], names["result"]
    assert one.peak.total == numbers["total"]
    assert one.peak.terms.items() <= numbers.items()
    assert bool(answer["question"]) == (not result.candidates)
    if result.candidates:
        low, high = result.like(one).interval(one.step) or (one.step, one.step)
        assert [round(1e6 * value) for value in (low, one.step, high)] == [
            numbers[name] for name in ("low_us", "step_us", "high_us")
        ]


def _same_pipeline(names, answer, state, printed):
    timeline, numbers = names["timeline"], answer["numbers"]
    assert round(1000 * timeline.makespan) == numbers["makespan"]
    assert round(1e6 * timeline.bubble_over_ideal) == numbers["over_ideal"]
    assert round(1e6 * timeline.bubble_over_total) == numbers["over_total"]
    held = [numbers[f"held_{rank}"] for rank in range(timeline.schedule.num_ranks)]
    assert [round(1000 * most) for most in timeline.peak_in_flight] == held


def _same_mesh(names, answer, state, printed):
    mine, numbers = names["mine"], answer["numbers"]
    held = (
        sum(map(len, mine.samples)),
        sum(map(len, mine.tokens)),
        len(mine.layers),
        len(mine.heads),
        len(mine.experts),
    )
    assert held == tuple(numbers[name] for name in ("samples", "tokens", "layers", "heads", "experts"))
    assert {f"{name} ranks": len(group) for name, group in mine.groups.items()}.items() <= numbers.items()
    assert str(mine.groups) in printed


def _same_planner(names, answer, state, printed):
    numbers, listed = answer["numbers"], names["result"].candidates and names["result"].listed(5)
    assert [one.total_memory for one in listed or []] == [numbers[f"bytes_{n + 1}"] for n in range(numbers["listed"])]
    assert [round(1e6 * one.step) for one in listed or []] == [
        numbers[f"step_us_{n + 1}"] for n in range(numbers["listed"])
    ]
    assert not numbers.get("files") or names["file"].text in text_of(answer)


#: By explorer: that what its call computes and prints is what its page shows. A new one is missed here.
SAME_NUMBERS = {
    "training": _same_training,
    "zero": _same_zero,
    "formulas": _same_formulas,
    "cluster": _same_cluster,
    "pipeline": _same_pipeline,
    "mesh": _same_mesh,
    "planner": _same_planner,
}


def test_the_cluster_explorer_its_command_and_its_changes_are_one_truth():
    """`rung plan` prints the peak and the step that the page shows; `rung fit` prints the peak, and its changes fit."""
    seen = {"plan": 0, "fit": 0}
    small = [{"model": name, "gpus": n} for name in ("llama-3.2-1b", "mixtral-8x7b", "llama-3-70b") for n in (8, 64)]
    for asked in [given | {"recompute": how} for given in small for how in ("none", "full")]:
        answer = CLUSTER.answer(asked | {"rounds": 2})
        state, numbers = answer["state"], answer["numbers"]
        words = unescape(answer["command"]).split()
        found = json.loads(CliRunner().invoke(rung, [*words[1:], "--json"]).stdout)
        seen[words[1]] += 1
        if words[1] == "plan":
            first, hours = found["layouts"][0], numbers["step_us"] / 3.6e9 * state["gpus"]
            assert (first["memory_bytes"], first["dp"]) == (numbers["total"], numbers["dp"])
            assert round(1e6 * first["step_seconds"]) == numbers["step_us"]
            tokens = state["seq"] * state["rounds"] * numbers["dp"]
            assert numbers["cents"] == pytest.approx(hours * state["price"] * 1e9 / tokens, abs=1)
            continue
        assert found["memory"] == numbers["total"] > found["budget"]
        rows = CLUSTER.reply(**CLUSTER.state(asked | {"rounds": 2}))
        assert found["changes"]
        for change in found["changes"]:
            assert f"{change['memory'] / 1e9:.1f} GB" in rows
            assert change["memory"] <= found["budget"]
    assert min(seen.values()) >= 3, seen


def text_of(answer):
    """Return the texts of the files of an answer as they stand in its folds, and hold what their links save to them."""
    files = re.findall(
        r'(?s)<code>(.*?)</code></details><a download="[\w.]+" href="data:[^,]*,([^"]*)"', answer["files"]
    )
    assert [unescape(folded) for folded, _ in files] == [unquote(saved) for _, saved in files]
    return [unquote(saved) for _, saved in files]


@pytest.mark.parametrize(
    ("asked", "ties"),
    [
        ({"model": "llama-3-8b", "gpus": 8, "global_batch": 64, "which": 2}, 5),
        ({"model": "llama-3.2-1b", "gpus": 8, "axes": "no-pp", "recompute": "full"}, 4),
        ({"model": "gpt2", "gpus": 8, "recompute": "full", "optimizer": "adamw-8bit"}, 1),
    ],
)
def test_the_planner_explorer_lists_what_rung_plan_lists_and_saves_what_it_exports(asked, ties):
    """The order, the ties, time and memory are the command's; the picture has the tie apart from what is behind it."""
    answer = PLANNER.answer(asked)
    numbers, words = answer["numbers"], unescape(answer["command"]).split()
    found = json.loads(CliRunner().invoke(rung, [*words[1:], "--json"]).stdout)
    rows = found["layouts"]
    assert [row["memory_bytes"] for row in rows] == [numbers[f"bytes_{n}"] for n in range(1, numbers["listed"] + 1)]
    assert [round(1e6 * row["step_seconds"]) for row in rows] == [
        numbers[f"step_us_{n}"] for n in range(1, len(rows) + 1)
    ]
    degrees = [f"{n}. tp={row['tp']} cp={row['cp']} pp={row['pp']} dp={row['dp']} " for n, row in enumerate(rows, 1)]
    shown = [shape.text or "" for shape in ElementTree.fromstring(answer["picture"])]
    places = [next(n for n, words in enumerate(shown) if words.startswith(name)) for name in degrees]
    behind = next((n for n, words in enumerate(shown) if words == explore_planner.BEHIND), len(shown))
    assert [place < behind for place in places] == [row["ties"] for row in rows]
    assert numbers["ties"] == sum(row["ties"] for row in rows) == ties
    said = PLANNER.reply(**PLANNER.state(asked))
    assert [unescape(line) for line in re.findall("<li>(.*?)</li>", said)] == found["why"]
    # A file is what the command exports with the degrees of the layout, and a framework without one has a reason.
    chosen = rows[asked.get("which", 1) - 1]
    texts, words = text_of(answer), words[: words.index("--tokens")]
    for name in EXPORTERS:
        degrees = [word for each in ("tp", "cp", "pp") for word in (f"--{each}", str(chosen[each]))]
        ran = CliRunner().invoke(rung, [*words[1:], *degrees, "--export", name])
        assert (ran.stdout in texts) == (ran.exit_code == 0)
    assert len(texts) == numbers["files"] == len(EXPORTERS) - answer["table"].count("<td>no file: ")
    assert answer["table"].count("for 1B tokens") == len(rows) + len(texts)


def test_the_planner_explorer_says_when_a_job_is_too_small():
    """GPT-2 gives 1,024 GPUs less than two percent of a step to compute, and one node enough."""
    words = "too small for so many GPUs"
    assert words in PLANNER.answer({"model": "gpt2", "gpus": 1024})["caption"]
    assert words not in PLANNER.answer({"model": "gpt2", "gpus": 8})["caption"]


def test_the_cluster_explorer_draws_the_peak():
    for state in at_random(CLUSTER, 30):
        state = CLUSTER.answer(state)["state"]
        model, settings = explore_cluster.job(**state)
        result = plan(model, **settings)
        degrees = {name: settings[name] for name in FIELDS if name in settings}
        layout = Layout(dp=state["gpus"] // (state["tp"] * state["pp"] * state["cp"]), **degrees)
        peak, step = peak_and_step(result.load, layout, result.counting)
        every = [instant.total for instant in step.instants() if instant.phase != "states"]
        drawn = explore_cluster.drawn_instants(step, peak)
        assert max(instant.total for instant in drawn) == peak.total == max(every)


def test_a_pasted_config_is_counted_and_a_broken_one_is_said():
    config = json.dumps(LLAMA_3_8B)
    pasted = CLUSTER.answer({"config": config})
    preset = CLUSTER.answer({"model": "llama-3-8b"})
    assert pasted["numbers"] == preset["numbers"]
    assert "rung plan config.json " in pasted["command"]
    for text, said in (
        ("{", "the pasted config.json is not JSON: "),
        ("[1]", "must be an object"),
        ("{}", "model_type is missing"),
        (config.replace("32,", "-32,", 1), "num_hidden_layers"),
    ):
        reply = json.loads(answer_json("lablib.live.cluster", json.dumps({"config": text})))
        assert said in reply["error"], reply


def test_the_pipeline_explorer_keeps_to_the_formulas_and_its_command():
    for name, bubble, held in (("gpipe", 3 / 8, 8), ("1f1b", 3 / 8, 4), ("naive", 3, 1)):
        answer = PIPELINE.answer({"name": name, "p": 4, "m": 8})
        assert answer["numbers"]["over_ideal"] == round(1e6 * bubble)
        assert answer["numbers"]["held_0"] == 1000 * held
        assert f"Idle over ideal time is {bubble:.1%}" in answer["caption"]
        words = unescape(answer["command"]).split()[1:]
        found = json.loads(CliRunner().invoke(rung, [*words, "--json"]).stdout)
        assert round(1000 * found["makespan"]) == answer["numbers"]["makespan"]
    # A slow last stage is waited for by all: 8 micro-batches of 1.5 times 3 each.
    slow = PIPELINE.answer({"name": "1f1b", "p": 4, "m": 8, "last": 150})
    assert slow["numbers"]["makespan"] == 1000 * (8 * 4.5 + 3 * 3)
    assert slow["command"] == ""


@pytest.mark.parametrize(
    ("own", "said", "marks"),
    [
        ("0F0 0B0 0F1 0B1\n1F0 1B0 1B1 1F1", "1B1 needs 1F1, which rank 1 runs later, in step 3", {"step_1": 2}),
        ("0F0 0F1 0B1 0B0\n1F0 1B0 1F1", "1B1 is missing", {"step_0": 2}),
        ("0F0 1F0 0B0 1B0", "rank 0, step 2: 0B0 needs 1B0, which rank 0 runs in step 3", {"step_0": 2}),
    ],
)
def test_a_wrong_step_of_an_own_schedule_is_marked(own, said, marks):
    answer = PIPELINE.answer({"own": own})
    assert said in unescape(answer["caption"])
    assert answer["numbers"].items() >= marks.items()
    outlined = [shape for shape in ElementTree.fromstring(answer["picture"]) if shape.get("fill") == "none"]
    assert len(outlined) == answer["numbers"]["marks"] == len(marks)


def test_an_own_schedule_is_timed_as_the_one_of_that_name():
    text = "\n".join(" ".join(map(str, steps)) for steps in schedule("zb-h1", 3, 6).ranks)
    own, named = (PIPELINE.answer(state)["numbers"] for state in ({"own": text}, {"name": "zb-h1", "p": 3, "m": 6}))
    assert own == named
    with pytest.raises(ValueError, match="is not an action"):
        PIPELINE.answer({"own": "forward"})


def test_the_mesh_explorer_marks_the_groups_of_the_chosen_rank():
    for asked in around(MESH) + at_random(MESH, 20):
        answer = MESH.answer(asked)
        state, names = answer["state"], {}
        exec(unescape(answer["call"]), names)
        cells = [cell for cell in ElementTree.fromstring(answer["picture"]).iter() if "data-set" in cell.attrib]
        assert [cell.get("data-set") for cell in cells] == [f"rank={rank}" for rank in range(state["gpus"])]
        assert all(cell.get("aria-label").startswith(f"rank {rank}; node ") for rank, cell in enumerate(cells))
        for name, value in (("aria-checked", "true"), ("tabindex", "0")):
            assert [rank for rank, cell in enumerate(cells) if cell.get(name) == value] == [state["rank"]]
        for name in ("tp", "cp", "dp", "pp", *(("ep", "edp") if state["ep"] > 1 else ())):
            marked = [rank for rank, cell in enumerate(cells) if name in [shape.text for shape in cell]]
            assert marked == [rank for rank in names["mine"].groups[name] if rank != state["rank"]], (name, state)


def test_the_mesh_explorer_says_which_part_of_its_experts_a_rank_has():
    """Without ep each expert is split as tp splits; a stage of dense layers has none, and no group of experts either."""
    split, whole = MESH.answer({"tp": 2, "ep": 1}), MESH.answer({"tp": 2, "ep": 8})
    assert "1/2 of each of experts 0 to 7" in split["caption"]
    assert "of each of expert" not in whole["caption"]
    dense = {"model": "deepseek-v3", "gpus": 64, "tp": 2, "cp": 1, "pp": 16, "ep": 2}
    tables = {stage: MESH.answer(dense | {"rank": 4 * stage})["table"] for stage in (0, 1)}
    assert {stage: "ep: other experts" in table for stage, table in tables.items()} == {0: False, 1: True}


def test_whether_a_step_fits_is_asked_of_blocks_and_not_of_what_is_drawn():
    """In 8 units a rank would gather 16 layers of 405B at a time, more than a GPU has; in blocks one, as FSDP2 is used."""
    job = {"model": "llama-3.1-405b", "ranks": 1024}
    blocks, drawn = ZERO.answer(job), ZERO.answer(job | {"units": 8})
    assert blocks["numbers"]["peak_3"] == blocks["numbers"]["peak_blocks"] == drawn["numbers"]["peak_blocks"]
    assert drawn["numbers"]["peak_3"] > accelerator("h100").usable_bytes > blocks["numbers"]["peak_blocks"]
    assert "It fits" in blocks["caption"]
    assert "It fits" in drawn["caption"]


@pytest.mark.parametrize(
    ("given", "refused"), [({"ep": 4}, False), ({"ep": 8}, True), ({"model": "llama-3-8b"}, True), ({"pp": 1}, False)]
)
def test_the_mesh_explorer_says_what_megatron_refuses(given, refused):
    """Of megatron/core/parallel_state.py 0.19.2: where pp is not last, edp must be dp or there be no pipeline."""
    answer = MESH.answer({"order": "tp-cp-ep-pp-dp"} | given)
    assert ("refuses" in answer["table"]) == refused
    assert "refuses" not in MESH.answer(given)["table"]


@pytest.mark.drawn
@pytest.mark.parametrize("explorer", EXPLORERS.values(), ids=lambda e: e.name)
def test_every_picture_is_sound(explorer):
    for state in around(explorer) + at_random(explorer, 10):
        answer = explorer.answer(state)
        if not answer["picture"]:
            continue
        whole = ElementTree.fromstring(answer["picture"])
        tree = whole if whole.tag.endswith("svg") else next(node for node in whole if node.tag.endswith("svg"))
        assert tree.get("role") == ("img" if "data-set" not in answer["picture"] else "group")
        assert tree.get("aria-label")
        left, top, wide, tall = map(float, tree.get("viewBox").split())
        for shape in tree.iter():
            assert "id" not in shape.attrib
            numbers = {name: float(shape.get(name, 0)) for name in ("x", "y", "x1", "x2", "y1", "y2")}
            ends = [numbers["x"] + float(shape.get("width", 0)), numbers["y"] + float(shape.get("height", 0))]
            corners = [tuple(map(float, corner.split(","))) for corner in shape.get("points", "").split()]
            across = [numbers["x"], numbers["x1"], numbers["x2"], ends[0], *(x for x, _ in corners)]
            down = [numbers["y"], numbers["y1"], numbers["y2"], ends[1], *(y for _, y in corners)]
            assert min(across) >= left, state
            assert max(across) <= wide, state
            assert min(down) >= top, state
            assert max(down) <= tall, state
        ElementTree.fromstring(f"<div>{answer['table']}</div>")
        # Every colour of the picture has its name in it.
        used = {shape.get("fill") for shape in tree.iter() if shape.tag.endswith(("rect", "polygon"))} - {"none"}
        named = {svg.COLORS[shape.text] for shape in tree.iter() if shape.text in svg.COLORS}
        assert used <= named


def test_a_picture_that_is_stepped_through_has_a_place_and_a_sentence_for_each_step():
    for state in around(ZERO)[::5]:
        tree = ElementTree.fromstring(ZERO.answer(state)["picture"])
        sentences = [item.text for item in tree.iter("li")]
        assert len(sentences) == len(set(sentences)) or len(sentences) > 10
        moving = [node for node in tree.iter() if "data-at" in node.attrib]
        assert moving
        slider = next(tree.iter("input"))
        first = int(slider.get("value"))
        assert int(slider.get("max")) == len(sentences) - 1
        assert next(p.text for p in tree.iter("p")) == sentences[first]
        for node in moving:
            places = json.loads(node.get("data-at"))
            assert len(places) == len(sentences)
            shown = [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", node.get("style"))]
            assert shown == (places[first] or [0])
            assert all(0 <= x <= svg.WIDTH for x, *_ in filter(None, places))
    with pytest.raises(ValueError, match="a piece has 1 places for 2 steps"):
        stepped([], [Piece(shape="", at=[(0, 0)])], ["one", "two"], height=1, alt="")


def test_a_colour_means_the_same_as_in_the_figures():
    known = COLORS | dict(ACTION_COLORS.values()) | {"buffers": COLORS["neutral"]}
    assert {role: known[role] for role in svg.COLORS} == svg.COLORS


def test_what_cannot_be_chosen_is_refused():
    with pytest.raises(ValueError, match=r"unknown control of the zero explorer 'rank'.*ranks"):
        ZERO.answer({"rank": 4})
    with pytest.raises(ValueError, match="unknown stage '7'"):
        ZERO.answer({"stage": 7})
    with pytest.raises(ValueError, match="has no EXPLORER"):
        find_explorer("lablib.calc.units")


def test_text_from_an_address_reads_like_the_value():
    number = Control(name="n", label="n", options=((1, "one"), (8, "eight")), first=1)
    assert [number.read("8"), number.read(8), number.read(1)] == [8, 8, 1]
    assert ZERO.answer({"ranks": "16"}) == ZERO.answer({"ranks": 16})


@pytest.mark.parametrize("module", EXPLORERS)
def test_every_control_can_be_moved_and_has_its_label(module):
    explorer = EXPLORERS[module]
    html = load("_ext/livecalc.py").markup(explorer, module, explorer.state())
    answer = explorer.answer()
    for control in explorer.controls:
        assert len(control.options) >= 2 or control.free
        assert control.first in dict(control.options)
        values = [value for value, _ in control.options]
        assert values == sorted(values) or not control.slider
        assert f'<label for="livecalc-{explorer.name}-{control.name}">' in html
    # Until a script can answer them the controls are not there; the first answer is.
    assert "hidden>" in html.split("</form>")[0]
    for part in PARTS:
        assert answer[part] in html
    assert ("More settings" in html) == any(control.fold for control in explorer.controls)


@pytest.mark.parametrize("module", EXPLORERS)
def test_what_the_browser_gets_runs_on_the_standard_library_alone(tmp_path, module):
    """The zip file in a Python that finds nothing else: what Pyodide does, without a browser."""
    archive = tmp_path / "lablib.zip"
    page = load("_ext/livecalc.py")
    page.zip_live(archive)
    first = archive.read_bytes()
    page.zip_live(archive)
    assert archive.read_bytes() == first
    # Each control at its last value, as text: so an address has it.
    state = {control.name: str(control.options[-1][0]) for control in EXPLORERS[module].controls}
    program = (
        "import sys; sys.path = [sys.argv[1], *(p for p in sys.path if 'site-packages' not in p)]\n"
        "from lablib.live.explorer import answer_json\n"
        "import lablib; assert lablib.__file__.startswith(sys.argv[1]), lablib.__file__\n"
        "print(answer_json(sys.argv[2], sys.argv[3]))"
    )
    arguments = [sys.executable, "-I", "-S", "-c", program, str(archive), module]
    done = subprocess.run([*arguments, json.dumps(state)], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip("\n") == answer_json(module, json.dumps(state))
