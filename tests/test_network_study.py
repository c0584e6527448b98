"""The study of the two-host cluster: rows from samples whose answer is known, a real job, and the committed record.

Nothing here is judged by this machine's clock: bytes are counted by the network card, losses must agree, and
what was faster is asked of the record.
"""

from __future__ import annotations

import math

import pytest
import torch

from lablib.calc.communication import collective_time
from lablib.calc.runs import (
    STUDY_LAYOUTS,
    STUDY_VARIANTS,
    StudySettings,
    layout_bytes,
    link_bandwidth,
    placement_rows,
    savings_rows,
    scaling_rows,
)
from lablib.calc.runs.network_study import (
    all_reduce_rows,
    crossing,
    link_fit,
    predicted_ddp_step,
    seconds_of,
    two_hosts,
)
from lablib.launch.records import RECORD_SWITCH, recorded
from lablib.toys.transformer import Transformer, tiny_config
from tests.scripts import lab_script

script = lab_script("network_study")
NAME = "10_network_study"
REFUSED = script.why_not()
needs_hosts = pytest.mark.skipif(REFUSED is not None, reason=f"no cluster on this machine: {REFUSED}")
RATE = "200 Mb/s"
WIDE = 1e9  # bytes per second inside a host
SMALL = StudySettings(
    link_rate=RATE,
    link_sizes=(64, 2**16),
    reduce_sizes=(2**12,),
    ddp_rates=(),
    savings_rate=RATE,
    placement_rate=RATE,
    turns=1,
    width=128,
    tokens=64,
    bucket_bytes=2**16,
    seq=64,
)


def link_samples(pair: float, ring: float) -> list[dict]:
    """Return exchanges that take exactly α + S/W."""
    across = link_bandwidth(RATE)
    ways = {"inside": (pair, WIDE), "across": (pair, across), "ring": (ring, across)}
    return [
        {"part": "link", "where": where, "rate": RATE, "bytes": size, "turn": turn, "seconds": alpha + size / w}
        for where, (alpha, w) in ways.items()
        for size in (64, 4096, 2**18)
        for turn in range(3)
    ]


def ddp_sample(variant: str, rate: str | None, seconds: float, **more: object) -> dict:
    """Return a step with four buckets of 250 kB."""
    facts = {
        "part": "ddp",
        "variant": variant,
        "rate": rate,
        "micro_batches": 1,
        "ranks": 4,
        "gradient_bytes": 10**6,
        "buckets": [250_000] * 4,
        "bytes_across": 1.5e6,
        "forward": 0.01,
        "backward": 0.02,
    }
    return {**facts, "seconds": seconds, "card_bytes": 0, "turn": 0, **more}


def test_exact_times_give_back_the_link() -> None:
    """Points on a line: the fit finds it, and predicts a ring as the formula does."""
    samples = link_samples(2e-4, 5e-4)
    fit = link_fit(samples)
    assert fit.line.latency == pytest.approx(2e-4)
    assert fit.line.bandwidth == pytest.approx(link_bandwidth(RATE))
    assert link_fit(samples, "inside").line.bandwidth == pytest.approx(WIDE)
    cluster, size = two_hosts(samples), 2**20
    for algorithm in ("ring_all_reduce", "recursive_doubling_all_reduce"):
        # In a ring one rank's messages cross the link, in recursive doubling those of both ranks of a host do, once.
        per_rank = collective_time(algorithm, size, 4, bandwidth=link_bandwidth(RATE), latency=5e-4)
        inside = 0.0
        if algorithm.startswith("recursive"):
            inside = size / WIDE - size / link_bandwidth(RATE)  # one of its two rounds stays in the host
            per_rank += size / link_bandwidth(RATE)  # and the other carries twice as much
        assert cluster.seconds(algorithm, size) == pytest.approx(per_rank + inside)
    # A tree has rounds of two messages and of one, and never four: it pays a pair's latency.
    assert cluster.seconds("tree_all_reduce", 4) == pytest.approx(4 * 2e-4, rel=0.01)
    # Halving-doubling and the hierarchical one let S bytes leave a host, the ring 1.5 S, the tree 4 S.
    waits = {"ring_all_reduce": 6 * 5e-4, "tree_all_reduce": 4 * 2e-4, "halving_doubling_all_reduce": 4 * 5e-4}
    times = {"ring_all_reduce": 1.5, "tree_all_reduce": 4, "halving_doubling_all_reduce": 1}
    for algorithm, share in times.items():
        on_the_link = cluster.seconds(algorithm, 2**24) - waits[algorithm]
        assert on_the_link == pytest.approx(share * 2**24 / link_bandwidth(RATE), rel=0.06)  # and inside at 1 GB/s
    with pytest.raises(ValueError, match="use 'inside'"):
        link_fit(samples, "outside")
    with pytest.raises(ValueError, match="no sample has"):
        seconds_of(samples, part="ddp")


def test_ddp_by_hand() -> None:
    """10 ms forward, 20 ms backward, 1.5 MB through 23.9 MB/s: the last three buckets are exposed."""
    samples = [
        *link_samples(0.0, 0.0),
        ddp_sample("compute", None, 0.03, buckets=[], bytes_across=0.0),
        ddp_sample("buckets", None, 0.04),
        ddp_sample("buckets", RATE, 0.08),
        ddp_sample("one bucket", RATE, 0.1, buckets=[10**6]),
        ddp_sample("accumulate", RATE, 0.15, micro_batches=4),
        ddp_sample("bf16", RATE, 0.05, buckets=[125_000] * 4, bytes_across=0.75e6),
        ddp_sample("hierarchical", RATE, 0.06, bytes_across=1e6),
    ]
    wire = 1.5e6 / link_bandwidth(RATE)
    wide, narrow = scaling_rows(samples)
    assert (wide.rate, wide.predicted, wide.predicted_efficiency) == (None, pytest.approx(0.03), pytest.approx(1))
    assert (wide.efficiency, narrow.efficiency) == pytest.approx((0.75, 0.375))
    assert narrow.predicted == pytest.approx(0.03 - 0.02 * 3 / 4 + wire)  # it starts after a quarter of backward
    rows = {row.variant: row for row in savings_rows(samples)}
    assert tuple(rows) == STUDY_VARIANTS
    assert rows["one bucket"].predicted == pytest.approx(0.03 + wire)
    assert rows["accumulate"].predicted == pytest.approx((4 * 0.03 - 0.02 * 3 / 4 + wire) / 4)
    assert rows["accumulate"].bytes_across == pytest.approx(1.5e6 / 4)
    assert rows["bf16"].predicted == pytest.approx(0.03 - 0.02 * 3 / 4 + wire / 2)
    assert rows["hierarchical"].predicted == pytest.approx(0.03 - 0.02 * 3 / 4 + wire * 2 / 3)
    assert [row.bought for row in rows.values()] == pytest.approx([1, 0.8, 0.08 / 0.0375, 1.6, 0.08 / 0.06])
    assert predicted_ddp_step(samples, samples[-1]).communication == pytest.approx(wire * 2 / 3)


def test_bytes_of_the_layouts_by_hand() -> None:
    """Two blocks of width 64: the table of the module, with every number counted here."""
    config = tiny_config("llama", hidden=64, num_layers=2)
    whole = sum(p.numel() for p in Transformer(config).parameters())
    norms = sum(p.numel() for name, p in Transformer(config).named_parameters() if "norm" in name)
    sizes = {name: layout_bytes(name, config, batch=8, seq=32) for name in STUDY_LAYOUTS}
    stream = 4 * 8 * 32 * 64
    assert sizes["dp over all"] == pytest.approx(1.5 * 4 * whole)
    assert sizes["tp inside, dp across"] == pytest.approx(4 * (whole + norms))  # norms are on both ranks of a host
    assert sizes["pp across, dp inside"] == stream
    assert sizes["tp across, dp inside"] == 10 * stream + 4 * 3 * 8 * 32
    with pytest.raises(ValueError, match="use one of"):
        layout_bytes("pp inside", config, batch=8, seq=32)
    with pytest.raises(ValueError, match="tied=False"):
        layout_bytes("dp over all", tiny_config("gpt2"), batch=8, seq=32)


@pytest.mark.drawn
@needs_hosts
def test_a_real_job_counts_the_predicted_bytes() -> None:
    """The cards of the hosts carry what the formulas say, and all layouts train the same model."""
    samples = script.measure(SMALL)
    counted = {"ddp": [], "placement": []}
    for sample in samples:
        assert sample["seconds"] > 0
        if sample["part"] in counted and sample["bytes_across"]:
            counted[sample["part"]].append(sample["card_bytes"] / sample["bytes_across"])
    assert len(counted["ddp"]) == 1 + len(STUDY_VARIANTS)
    assert len(counted["placement"]) == 2 * len(STUDY_LAYOUTS)
    # Above 1 by headers (5 % where packets are small), acknowledgements, and the barriers around a step of 100 kB.
    assert all(1 <= ratio <= 1.3 for ratios in counted.values() for ratio in ratios), counted
    rows = placement_rows(samples)
    assert [row.layout for row in rows] == sorted(
        STUDY_LAYOUTS, key=lambda name: {r.layout: r.bytes_across for r in rows}[name]
    )
    config = tiny_config("llama", hidden=SMALL.hidden, num_layers=SMALL.blocks)
    windows = torch.randint(config.vocab, (SMALL.batch, SMALL.seq + 1), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model, losses = Transformer(config), []
    for _ in range(3):  # one process: a warm step, then one that counts on each of the two links
        model.zero_grad()
        loss = model.loss(windows)
        loss.backward()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.1)
    assert losses[0] - losses[2] > 1e-3  # it learns, so that a wrong gradient would show
    for row in rows:
        assert row.loss == pytest.approx(losses[2], abs=1e-5)  # sums in another order
    assert {row.algorithm for row in all_reduce_rows(samples)} == {
        s["algorithm"] for s in samples if s["part"] == "all-reduce"
    }


def test_without_a_cluster_the_record_is_replayed(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.delenv(RECORD_SWITCH, raising=False)
    monkeypatch.setattr(script, "why_not", lambda: "this kernel has no namespaces")
    assert script.study(SMALL) == {"samples": recorded(NAME).samples, "refused": "this kernel has no namespaces"}
    assert f"replaying {NAME}" in capsys.readouterr().out


def test_what_the_record_says() -> None:
    """The claims of the chapter, on the committed record: its numbers do not change under test."""
    record = recorded(NAME)
    samples = record.samples
    assert record.machine["cpu"]
    assert record.command
    fit = link_fit(samples)
    assert fit.line.bandwidth == pytest.approx(link_bandwidth(fit.rate), rel=0.15)
    rows = all_reduce_rows(samples)
    short = crossing(rows, "tree_all_reduce", "ring_all_reduce", measured=False)
    found = crossing(rows, "tree_all_reduce", "ring_all_reduce", measured=True)
    assert abs(math.log2(found / short)) < 2
    scaling = scaling_rows(samples)
    assert [row.rate for row in scaling] == [None, "2 Gb/s", "500 Mb/s", "100 Mb/s"]
    assert scaling[-1].measured == pytest.approx(scaling[-1].predicted, rel=0.15)
    assert scaling[-1].efficiency < 0.6 * min(row.efficiency for row in scaling[:-1])
    savings = {row.variant: row for row in savings_rows(samples)}
    for row in savings.values():
        assert row.measured == pytest.approx(row.predicted, rel=0.15)
    for variant in ("accumulate", "bf16", "hierarchical"):
        assert savings[variant].bought > 1.1
    placed = placement_rows(samples)
    assert placed[-1].layout == "tp across, dp inside"
    assert all(placed[-1].measured > 2 * row.measured for row in placed[:-1])
    assert placed[0].measured == min(row.measured for row in placed)
