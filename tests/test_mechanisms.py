"""Mechanisms that move: what is seen in each step is what the calculators, and the algorithms' own messages, say."""

import json
import re
from collections import Counter
from xml.etree import ElementTree

import pytest

from lablib.calc.communication import algorithm_rounds
from lablib.calc.parallel import ORDERS, busy_share, rank_loads, token_owners
from lablib.calc.schedules import schedule, simulate
from lablib.live import mechanisms
from lablib.live.svg import COLORS, WIDTH

CHOSEN = [[0, 1], [0, 2], [1, 0], [0, 3], [1, 2], [0, 1], [2, 0], [1, 3]]


def seen(markup):
    """Return the sentences, and of every piece its words, colours and places."""
    tree = ElementTree.fromstring(markup)
    pieces = []
    for node in tree.iter():
        if "data-at" in node.attrib:
            words = [each.text for each in node.iter() if each.tag.endswith("text")]
            fills = [each.get("fill") for each in node.iter() if each.tag.endswith("rect")]
            pieces.append((words[0] if words else "", fills, json.loads(node.get("data-at"))))
    return [item.text for item in tree.iter("li")], pieces


MADE = {
    "ring": lambda: mechanisms.ring_all_reduce(4),
    "ring of 2": lambda: mechanisms.ring_all_reduce(2),
    "schedules": lambda: mechanisms.schedules({n: simulate(schedule(n, 4, 8)) for n in ("gpipe", "1f1b", "zb_h1")}),
    "gather": lambda: mechanisms.gather_release(4),
    "attention": lambda: mechanisms.ring_attention(4),
    "experts": lambda: mechanisms.dispatch_combine(CHOSEN, ranks=2, experts=4),
}


@pytest.mark.parametrize("name", MADE)
def test_nothing_leaves_the_picture_and_every_step_has_its_sentence(name):
    markup = MADE[name]()
    sentences, pieces = seen(markup)
    _, _, wide, tall = map(float, re.search(r'viewBox="([^"]+)"', markup)[1].split())
    assert wide == WIDTH
    for _, _, places in pieces:
        assert len(places) == len(sentences) > 1
        assert any(places)
        assert all(0 <= place[0] < wide and 0 <= place[1] < tall for place in places if place)
    assert len(set(sentences)) == len(sentences)
    assert all(text.endswith(".") for text in sentences)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_the_ring_sends_the_messages_of_the_algorithm(ranks):
    """Each step's moves, by rank and chunk, are those of `_ring` up to where chunks begin; all sums are whole at the end."""
    sentences, pieces = seen(mechanisms.ring_all_reduce(ranks))
    rounds = algorithm_rounds("ring_all_reduce", ranks, ranks)
    assert len(sentences) == 1 + len(rounds)
    moves = [places for words, fills, places in pieces if fills == ["none"]]
    column = WIDTH / ranks
    for step, sends in enumerate(rounds, start=1):
        meant = Counter((send.source, send.target) for send in sends)
        ends = [(each[step - 1], each[step]) for each in moves if each[step - 1] and each[step]]
        assert Counter((int(a[0] // column), int(b[0] // column)) for a, b in ends) == meant
        assert all(a[1] == b[1] for a, b in ends), "a chunk stays in its row"
    last = [words for words, fills, places in pieces if words and places[-1]]
    assert last == ["1" * ranks] * ranks**2
    # Of a sum no rank is counted twice: digits are 1, and each step of the first half adds one of them.
    for step in range(ranks):
        held = [words.count("1") for words, _, places in pieces if words and places[step]]
        assert set("".join(words for words, _, places in pieces if words)) <= {"0", "1"}
        assert sum(held) == ranks**2 + step * (step + 1) // 2 * ranks


def test_a_unit_is_whole_on_every_rank_while_it_runs_and_a_shard_else():
    sentences, pieces = seen(mechanisms.gather_release(4))
    order = [re.match(r"(\S+) of (\w)", text)[0] for text in sentences[1:]]
    assert order == [
        "All-gather of A", "Forward of A", "All-gather of B", "Forward of B", "All-gather of B", "Backward of B",
        "Reduce-scatter of B", "All-gather of A", "Backward of A", "Reduce-scatter of A",
    ]  # fmt: skip
    for step, text in enumerate(sentences):
        for unit in "ab":
            for role, whole in (("weights", 16), ("gradients", 16)):
                held = sum(
                    bool(places[step])
                    for words, fills, places in pieces
                    if words[0] == unit and fills == [COLORS[role]]
                )
                runs = re.search(rf"(Forward|Backward) of {unit.upper()}", text)
                if role == "weights":
                    assert held in (4, whole)
                    assert held == whole or not runs
                elif runs and "Backward" in text:
                    assert held == whole
        if step == len(sentences) - 1:
            assert (
                sum(bool(places[step]) for *_, places in pieces) == 4 * 4
            )  # a shard of each of both, and of both gradients


@pytest.mark.parametrize("cp", [2, 4])
def test_every_block_under_the_mask_is_computed_once_by_the_rank_that_has_the_query(cp):
    sentences, pieces = seen(mechanisms.ring_attention(cp))
    blocks = [(words, places) for words, fills, places in pieces if words]
    parts = 2 * cp
    assert len(blocks) == len(ORDERS) * parts * (parts + 1) // 2
    for step in range(cp):
        new = Counter(words for words, places in blocks if places[step + 1] and not places[step])
        meant = Counter()
        for order in ORDERS:
            owner = token_owners(cp, order, parts)
            meant.update(
                str(owner[q]) for q in range(parts) for k in range(q + 1) if (owner[q] - owner[k]) % cp == step
            )
        assert new == meant
    for order in ("contiguous", "zigzag"):
        assert f"{busy_share(cp, order):.0%} ({order})" in sentences[-1]


def test_every_copy_reaches_its_expert_and_comes_home():
    sentences, pieces = seen(mechanisms.dispatch_combine(CHOSEN, ranks=2, experts=4))
    copies = [(words, places) for words, fills, places in pieces if words.isdigit()]
    half = WIDTH / 2
    loads = Counter(expert for picks in CHOSEN for expert in picks)
    for step in (2, 3):
        there = Counter(int(places[step][0] // half) for _, places in copies if places[step])
        assert [there[rank] for rank in (0, 1)] == rank_loads([loads[expert] for expert in range(4)], 2)
    for step in (1, 4):
        home = Counter(int(places[step][0] // half) for _, places in copies if places[step])
        assert home == {0: 8, 1: 8}
    crossing = sum(expert // 2 != token // 4 for token, picks in enumerate(CHOSEN) for expert in picks)
    assert f"{crossing} of 16 change ranks" in sentences[2]


def test_the_play_head_shows_what_a_schedule_holds():
    made = {name: simulate(schedule(name, 3, 5)) for name in ("gpipe", "1f1b")}
    sentences, _ = seen(mechanisms.schedules(made))
    for name, timeline in made.items():
        assert any(f"{name}: 3 of 3 ranks work" in text for text in sentences)
        most = max(
            float(n)
            for text in sentences
            for n in re.findall(rf"{name}: .*?hold ([\d., ]+?)(?:\.|$)", text)[0].split(", ")
        )
        assert most == max(timeline.peak_in_flight)
    assert sentences[-1].startswith(f"Time {max(t.makespan for t in made.values()):g}.")
