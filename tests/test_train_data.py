"""Token files, the order of samples, the learning rate and the configuration of a run; no ranks."""

from __future__ import annotations

import json
import random
from itertools import chain, combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from lablib.calc.models import preset
from lablib.calc.params import count_params
from lablib.calc.runs import cosine_lr, shuffled_place
from lablib.launch.records import JsonLines
from lablib.launch.training import (
    SampleOrder,
    TokenWindows,
    TrainConfig,
    config_from_args,
    open_tokens,
    read_metrics,
    text_tokens,
    train_model,
    train_parser,
)
from lablib.launch.training.token_data import write_tokens
from lablib.launch.training.train_config import MODELS, SAME_RUN, describe, differences
from lablib.toys.text import text, tokens, windows
from lablib.toys.transformer import Transformer

# The order of samples


def test_the_global_batch_is_the_same_set_on_any_number_of_ranks(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        count, batch = draw.randint(1, 50), 4 * draw.randint(1, 5)
        order, start = SampleOrder(count, draw.randint(0, 99)), draw.randint(0, 200)
        for step in range(5):
            first = start + step * batch
            alone = order.take(first, batch)
            for ranks in (1, 2, 4):
                shares = [order.share(first, batch, rank, ranks) for rank in range(ranks)]
                assert {len(share) for share in shares} == {batch // ranks}
                assert sorted(chain(*shares)) == sorted(alone)
                # Micro-batches of all ranks together follow the order, too: rank r holds places r, r + ranks, ...
                assert [shares[i % ranks][i // ranks] for i in range(batch)] == alone


def test_every_epoch_is_a_permutation_and_no_step_ends_one(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(5, 60)
    order, whole = SampleOrder(count, seed), []
    while len(whole) < 4 * count:  # steps of 7 run over the ends of epochs
        whole += order.take(len(whole), 7)
    epochs = [whole[i * count : (i + 1) * count] for i in range(4)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    again = SampleOrder(count, seed)  # a resumed run: anywhere, with another global batch
    for _ in range(20):
        first, many = draw.randrange(3 * count), draw.randint(1, count)
        assert again.take(first, many) == whole[first : first + many]


# Token files


def test_written_and_mapped(tmp_path: Path, seed: int) -> None:
    for vocab, size in ((256, 2), (1 << 16, 2), (50_257, 2), (128_256, 4)):
        ids = np.random.default_rng(seed).integers(0, vocab, size=1001)
        path = write_tokens(tmp_path / f"{vocab}.npy", ids if size == 2 else torch.from_numpy(ids), vocab=vocab)
        mapped = open_tokens(path)
        assert isinstance(mapped, np.memmap)
        assert not mapped.flags.writeable
        assert mapped.dtype.itemsize == size
        assert np.array_equal(mapped, ids)
        assert np.array_equal(np.load(path), ids)  # NumPy's own format
        with path.open("rb+") as file:
            file.truncate(path.stat().st_size - 2)
        with pytest.raises(ValueError, match="is no token file"):
            open_tokens(path)
    assert [p.suffix for p in tmp_path.iterdir()] == [".npy"] * 4


def test_the_default_text(tmp_path: Path) -> None:
    path = text_tokens(tmp_path)
    assert bytes(open_tokens(path).astype(np.uint8)).decode() == text()
    assert text_tokens(tmp_path) == path
    (tmp_path / "mine.txt").write_text("another text")
    other = text_tokens(tmp_path, str(tmp_path / "mine.txt"))
    assert other != path  # a folder with two texts keeps both
    assert bytes(open_tokens(other).astype(np.uint8)) == b"another text"


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "a.npy", np.arange(5), vocab=10)
    for ids, says in (
        (np.arange(11), r"token ids from 0 to 10 are not in 0\.\.9"),
        (np.array([-1]), "from -1 to -1"),
        (np.zeros((2, 2), int), r"shape \(2, 2\) for .*; they are 1-D"),
        (np.array([], int), "at least one"),
    ):
        with pytest.raises(ValueError, match=says):
            write_tokens(path, ids, vocab=10)
    assert list(tmp_path.iterdir()) == [path]
    assert open_tokens(path).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"must end with \.npy"):
        write_tokens(tmp_path / "a.bin", np.arange(5), vocab=10)
    np.save(tmp_path / "floats.npy", np.zeros(3))
    with pytest.raises(ValueError, match="holds float64"):
        open_tokens(tmp_path / "floats.npy")


def test_windows_are_those_of_the_toy(tmp_path: Path) -> None:
    data = TokenWindows(open_tokens(text_tokens(tmp_path)), seq=37, vocab=256)
    wanted = windows(tokens(), 37)
    assert len(data) == len(wanted)
    picked = [0, len(data) - 1, 5]
    assert torch.equal(data.read(picked), wanted[picked])
    with pytest.raises(ValueError, match="is not in the model's vocabulary of 100"):
        TokenWindows(data.ids, seq=37, vocab=100).read([0])
    with pytest.raises(ValueError, match="seq=9 needs 10 tokens, the file has 9"):
        TokenWindows(np.arange(9), seq=9, vocab=10)


# Learning rate


def test_the_schedule_is_pytorchs() -> None:
    """Against LinearLR, then CosineAnnealingLR; torch computes each rate from the one before, in 40 roundings."""
    peak, floor, warmup, steps = 3e-4, 3e-5, 7, 40
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, total_iters=warmup - 1)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - warmup, eta_min=floor)
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], [warmup - 1])
    for step in range(1, steps + 1):
        ours = cosine_lr(step, peak=peak, steps=steps, warmup=warmup, floor=floor)
        assert ours == pytest.approx(both.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        both.step()
    assert ours == pytest.approx(floor)
    assert cosine_lr(steps + 9, peak=peak, steps=steps, warmup=warmup, floor=floor) == floor
    assert cosine_lr(1, peak=peak, steps=1) == peak


# Configuration


def test_the_models_are_of_their_size() -> None:
    """Built on the meta device, the course's transformer has the parameters of the published model."""
    sizes = {"10m": 10.1e6, "gpt2-124m": 124.4e6, "llama-3.2-1b": 1.236e9, "qwen2-7b": 7.616e9}
    published = {"gpt2-124m": "gpt2", "llama-3.2-1b": "llama-3.2-1b", "qwen2-7b": "qwen2-7b"}
    for name in MODELS:
        with torch.device("meta"):
            built = sum(p.numel() for p in Transformer(train_model(name)).parameters())
        assert built == count_params(train_model(name)).total
        assert built == pytest.approx(sizes.get(name, built), rel=0.005)
        if name in published:
            assert built == count_params(preset(published[name])).total


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": "gpt5"}, "model='gpt5' is unknown; use tiny, 10m"),
        ({"global_batch": 8, "micro_batch": 3}, "micro_batch=3 does not divide the 8 sequences"),
        ({"recompute": "some"}, "some"),
        ({"warmup": 100}, "warmup=100 must be from 0 to steps - 1 = 99"),
        ({"clip": 0.0}, "clip=0.0 must be above 0"),
    ],
)
def test_bad_configurations(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TrainConfig(folder="unused", **options)


def test_batches_of_a_rank() -> None:
    config = TrainConfig(folder="unused", global_batch=24, micro_batch=3)
    assert [config.split_batch(ranks) for ranks in (1, 2, 4, 8)] == [(3, 8), (3, 4), (3, 2), (3, 1)]
    with pytest.raises(ValueError, match="5 ranks do not divide global_batch=24"):
        config.split_batch(5)
    assert "4 micro-batches of 3 on each of 2 ranks" in describe(config, 2)


def test_settings_survive_json_and_their_differences_are_named() -> None:
    config = TrainConfig(folder="unused", clip=float("inf"))
    settings = json.loads(json.dumps(config.settings()))
    assert set(settings) == set(SAME_RUN)
    assert differences(settings, config.settings()) == ""
    json.dumps(config.as_dict(), allow_nan=False)
    other = TrainConfig(folder="elsewhere", clip=float("inf"), lr=2e-3, steps=200, lr_steps=100, micro_batch=1)
    assert differences(settings, other.settings()) == "lr was 0.001 and is 0.002"


def test_the_command_line_has_every_setting(tmp_path: Path) -> None:
    parser = train_parser("A test.", model="10m")
    config = config_from_args(parser.parse_args(["--folder", str(tmp_path)]))
    assert config == TrainConfig(folder=str(tmp_path), model="10m")
    words = "--steps 7 --clip inf --betas 0.8 0.9 --compile --no-reshard --recompute full --lr 2e-4"
    config = config_from_args(parser.parse_args(["--folder", "a", *words.split()]))
    assert (config.steps, config.clip, config.betas) == (7, float("inf"), (0.8, 0.9))
    assert (config.compile, config.reshard, config.recompute, config.lr) == (True, False, "full", 2e-4)
    assert all(action.help for action in parser._actions)


# Metrics files


def test_a_step_that_was_taken_again_counts_once(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "metrics-rank3.jsonl")
    for step in (1, 2, 3, 4, 5):
        file.write({"step": step, "loss": step + 0.1})
    with file.path.open("a") as torn:
        torn.write('{"step": 6, "lo')  # killed while it wrote
    file = JsonLines(tmp_path / "metrics-rank3.jsonl")  # the restarted rank, from a checkpoint of step 2
    for step in (3, 4):
        file.write({"step": step, "loss": step + 0.2})
    assert read_metrics(tmp_path, 3) == [
        {"step": 1, "loss": 1.1},
        {"step": 2, "loss": 2.1},
        {"step": 3, "loss": 3.2},
        {"step": 4, "loss": 4.2},
    ]
    assert [m["step"] for m in read_metrics(tmp_path, 3, every_attempt=True)] == [1, 2, 3, 4, 5, 3, 4]
    with pytest.raises(ValueError, match=r"metrics-rank0\.jsonl is not there"):
        read_metrics(tmp_path)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"lr": float("inf")}, "lr=inf must be a finite number"),
        ({"seed": 10**16}, "seed=10000000000000000 must lie between"),
    ],
)
def test_a_number_that_would_spoil_the_run_is_refused(setting: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(folder="a", **setting)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 64, 65, 1000])
def test_every_epoch_of_the_computed_order_has_each_sample_once(count):
    for epoch in (0, 1, 7):
        places = range(epoch * count, (epoch + 1) * count)
        assert sorted(shuffled_place(place, count, seed=3) for place in places) == list(range(count))


def test_the_computed_order_differs_by_epoch_and_seed_and_mixes():
    orders = [
        [shuffled_place(100 * epoch + i, 100, seed=seed) for i in range(100)]
        for epoch, seed in ((0, 0), (1, 0), (0, 1))
    ]
    for a, b in combinations([*orders, list(range(100))], 2):
        # Two permutations of 100 drawn at random agree in one place on average, and in ten with a chance of 1e-7.
        assert sum(x == y for x, y in zip(a, b, strict=True)) < 10
    assert 0 <= shuffled_place(10**13 + 5, 10**10) < 10**10  # at once, wherever it is
    with pytest.raises(ValueError, match="place=-1"):
        shuffled_place(-1, 10)
