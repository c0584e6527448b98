"""Local SGD and DiLoCo between two hosts with a slow link: seconds, bytes and losses beside what is predicted.

    python -m tests.evidence local-sgd             the committed runs summed up, and the bytes of every way counted anew
    python -m tests.evidence local-sgd --write     train on two hosts, a quarter of an hour on two cores, and keep all of
                                                   it in book/data/local_sgd.json

The hosts are network namespaces (labs/scripts/two_hosts.py), one rank each. Every way takes the same number of steps from
the same weights, with the same batches on each host; a way of its own exchanges nothing and says what a step costs.
From that, and from the bandwidth of the link, `exchange_cost` predicts the others, with nothing fitted and nothing
overlapped. The ways take turns, 50 steps each in an order drawn anew, so that a slow moment of the machine meets all.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lablib.calc.communication import tcp_bandwidth
from lablib.calc.layouts import exchange_cost
from lablib.calc.layouts.local_sgd import Exchange
from lablib.calc.units import parse_bandwidth
from lablib.launch.measure import record_comms
from lablib.launch.ranks import run_ranks
from lablib.launch.records import git_commit, this_machine, utc_now, write_json
from lablib.toys.data_parallel import BucketedDDP, DiLoCo, LocalSGD
from lablib.toys.text import batches, tokens, windows
from lablib.toys.transformer import Transformer, tiny_config
from tests.scripts import lab_script

two_hosts = lab_script("two_hosts")

TABLE = Path(__file__).resolve().parents[2] / "book" / "data" / "local_sgd.json"
HOSTS, RATE = 2, "200 Mb/s"
SEEDS, STEPS, BLOCK, LR, WARM, BATCH, SEQ = 6, 300, 50, 2e-3, 30, 4, 64
HELD_OUT = 0.1  # of the text, its end
T = 2.571  # Student's t at 97.5 percent for six seeds
MEASURED = ("seconds", "sent")  # of every block, on each host
CONFIG = tiny_config("llama", max_positions=SEQ)
WIRE = 4  # bytes of a value: gradients are fp32 here, as the weights are


@dataclass(frozen=True)
class Way:
    """A method of `exchange_cost`, or "" for replicas that never exchange, and its H."""

    method: str
    inner_steps: int = 1

    def cost(self, step_seconds: float) -> Exchange:
        """Return what is predicted where a step takes so many seconds without the others."""
        link = {"replicas": HOSTS, "bandwidth": tcp_bandwidth(parse_bandwidth(RATE)), "wire_bytes": WIRE}
        steps = {"tokens_per_step": BATCH * SEQ, "step_seconds": step_seconds, "inner_steps": self.inner_steps}
        return exchange_cost(self.method, CONFIG, **link, **steps)


ALONE, EVERY_STEP = "no exchange", "gradients, every step"
WAYS: dict[str, Way] = {
    ALONE: Way("", STEPS + 1),
    EVERY_STEP: Way("ddp"),
    "local SGD, H = 10": Way("local-sgd", 10),
    "local SGD, H = 50": Way("local-sgd", 50),
    "DiLoCo, H = 10": Way("diloco", 10),
    "DiLoCo, H = 50": Way("diloco", 50),
}


# --- on a rank ----------------------------------------------------------------------------------------------


def training(way: Way, seed: int, block: int) -> Iterator[Any]:
    """Train on this rank from the seed's weights with its own batches: the model first, then seconds and bytes of a block."""
    torch.manual_seed(seed)
    model, rank = Transformer(CONFIG), dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    if way.method == "ddp":
        trainer = BucketedDDP(model, first_bytes=2**30)  # one message, after backward
    else:
        trainer = (DiLoCo if way.method == "diloco" else LocalSGD)(model, optimizer, way.inner_steps)
    stream = batches(parts()[0], batch=BATCH, seq=SEQ, seed=1000 * seed + rank)
    yield model
    for first in itertools.count(0, block):
        dist.barrier()
        before, start = card_bytes(), time.perf_counter()
        for step in range(first, first + block):
            optimizer.param_groups[0]["lr"] = LR * min(1, (step + 1) / WARM)
            model.loss(next(stream)).backward()
            if way.method == "ddp":
                trainer.sync()
                optimizer.step()
                optimizer.zero_grad()
            else:
                trainer.step()
        dist.barrier()
        yield time.perf_counter() - start, card_bytes() - before


def parts() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the text to train on and the text held out."""
    text = tokens()
    return text[: (cut := round((1 - HELD_OUT) * len(text)))], text[cut:]


@torch.no_grad()
def held_out_loss(model: Transformer) -> float:
    """Return the mean loss of a token of the held-out text."""
    chunks = windows(parts()[1], SEQ).split(32)
    return math.fsum(model.loss(chunk).item() * len(chunk) for chunk in chunks) / sum(map(len, chunks))


def card_bytes() -> int:
    """Return what this host's network card has sent since it was made, headers included; 0 without such a card."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[9]) for line in lines if line.split()[0] == f"{two_hosts.CARD}:")


def train_all(seed: int) -> dict[str, dict[str, Any]]:
    """Train in every way on this rank; seconds and bytes are those of each block."""
    torch.set_num_threads(1)
    order, runs = random.Random(seed), {name: training(way, seed, BLOCK) for name, way in WAYS.items()}
    models, blocks = {name: next(run) for name, run in runs.items()}, {name: [] for name in WAYS}
    for _ in range(STEPS // BLOCK):
        for name in order.sample(list(WAYS), len(WAYS)):
            blocks[name].append(next(runs[name]))
    measured = {
        name: dict(zip(MEASURED, map(list, zip(*rows, strict=True)), strict=True)) for name, rows in blocks.items()
    }
    return {name: row | {"loss": held_out_loss(models[name])} for name, row in measured.items()}


def count_all() -> dict[str, float]:
    """Return the bytes that this rank sends between two exchanges of every way, by the recorder."""
    sent = {}
    for name, way in WAYS.items():
        if way.method:
            run = training(way, 0, way.inner_steps)
            next(run)
            with record_comms() as log:
                next(run)
            sent[name] = log.ring_bytes_sent()
    return sent


# --- the table ----------------------------------------------------------------------------------------------


def summary(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each way: medians over all blocks, what was predicted for them, and losses beside every step's.

    Seconds are those of the slower host, bytes those of the one that sent more, both of a block. `off` is the predicted time
    over the measured one, less 1, with its quarters; a prediction takes a step's seconds from the block that exchanges nothing
    in the same round. `half` is half of the 95 percent interval of a mean: of the loss, and of its difference to the run with
    the same seed that exchanges in every step.
    """
    of = {name: sorted((s for s in samples if s["way"] == name), key=lambda s: s["seed"]) for name in WAYS}
    worst = {
        key: {n: [max(b) for s in rows for b in zip(*s[key], strict=True)] for n, rows in of.items()}
        for key in MEASURED
    }
    losses = {name: [statistics.fmean(s["loss"]) for s in rows] for name, rows in of.items()}
    table = []
    for name, way in WAYS.items():
        row = {
            "way": name,
            **_spread("seconds", worst["seconds"][name]),
            "sent": statistics.median(worst["sent"][name]),
        }
        row |= {"loss": statistics.fmean(losses[name]), "half": _half(losses[name])}
        if way.method:
            exchanges, costs = BLOCK // way.inner_steps, [way.cost(alone / BLOCK) for alone in worst["seconds"][ALONE]]
            told = [exchanges * (cost.compute + cost.communicate) for cost in costs]
            off = [a / b - 1 for a, b in zip(told, worst["seconds"][name], strict=True)]
            apart = [a - b for a, b in zip(losses[name], losses[EVERY_STEP], strict=True)]
            row |= {"told": statistics.median(told), "message": costs[0].message, "exchanges": exchanges}
            row |= {**_spread("off", off), "above": statistics.fmean(apart), "above_half": _half(apart)}
        table.append(row)
    return table


def _spread(name: str, values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {name: middle, f"{name}_low": low, f"{name}_high": high}


def _half(values: list[float]) -> float:
    return T * statistics.stdev(values) / math.sqrt(len(values))


def text(table: list[dict[str, Any]]) -> str:
    """Return the table as lines."""
    lines = [
        f"{'':24}{'seconds':>9}{'predicted':>11}{'off':>8}{'MB sent':>9}{'loss':>8}{'95%':>7}{'above':>8}{'95%':>7}"
    ]
    for row in table:
        told = f"{row['told']:11.1f}{row['off']:8.1%}" if "told" in row else " " * 19
        above = f"{row['above']:8.3f}{row['above_half']:7.3f}" if "told" in row else ""
        lines.append(f"{row['way']:24}{row['seconds']:9.1f}{told}{row['sent'] / 1e6:9.1f}")
        lines[-1] += f"{row['loss']:8.3f}{row['half']:7.3f}{above}"
    return "\n".join(lines)


def make(*, write: bool, say: Callable[[str], None]) -> list[str]:
    """Count, and measure or read; return what is wrong."""
    refused = two_hosts.why_not() if write else None
    if refused:
        return [f"no cluster on this machine: {refused}"]
    counted, told = (
        run_ranks(count_all, HOSTS, timeout=300)[0],
        {n: way.cost(1).message for n, way in WAYS.items() if way.method},
    )
    wrong = [
        f"{n}: {sent:,.0f} bytes recorded, {told[n]:,.0f} predicted" for n, sent in counted.items() if sent != told[n]
    ]
    if not write:
        old = json.loads(TABLE.read_text(encoding="utf-8"))
        say(text(old["table"]))
        return wrong + ["the table is not what its samples say"] * (summary(old["samples"]) != old["table"])
    samples = []
    for seed in range(SEEDS):
        with two_hosts.Cluster(HOSTS, rate=RATE) as cluster:
            ranks = cluster.run_ranks(train_all, seed, timeout=900)
        for name in WAYS:
            of_hosts = {key: [rank[name][key] for rank in ranks] for key in (*MEASURED, "loss")}
            samples.append({"way": name, "seed": seed, **of_hosts})
        say(f"seed {seed}: {', '.join(f'{name} {ranks[0][name]}' for name in WAYS)}")
    table = summary(samples)
    say(text(table))
    how = {"hosts": HOSTS, "rate": RATE, "seeds": SEEDS, "steps": STEPS, "block": BLOCK, "lr": LR, "warm": WARM}
    how |= {"batch": BATCH, "seq": SEQ, "layers": CONFIG.num_layers, "hidden": CONFIG.hidden}
    how |= {"params": int(table[1]["message"] / WIRE)}
    where = {"command": "python -m tests.evidence local-sgd --write", "commit": git_commit(), "date": utc_now()}
    machine = this_machine() | {"gpus": [], "gpu_details": []}
    content = {"how": how, **where, "machine": machine, "recorded": counted, "table": table, "samples": samples}
    say(f"wrote {write_json(TABLE, content)}")
    return wrong
