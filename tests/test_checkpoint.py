"""Checkpoints: other ranks, crashes, damage, export.

What must be equal bit for bit: the loaded state on any number of ranks, the loss that it gives on the same samples,
and a run that went over 4 ranks and back without a step there.
Two steps taken on 4 ranks differ in rounding: a mean of 4 means is added up in another order. In fp32 a gradient then
carries an error of about 1e-7 of its terms, which are below 1; AdamW with eps = 1e-2 turns it into at most
lr / eps * 1e-7 = 1e-7 per weight and step; the loss moves by that times the sum of |gradient|, below 100: 1e-5 each
step, 2e-5 in all. One sample too many or too few moves it by more than 1e-3.
"""

from __future__ import annotations

import json
import os
import signal
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from lablib.launch.fsdp import checkpoint as checkpoint_files
from lablib.launch.fsdp import (
    export_safetensors,
    full_state_dict,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    shard,
)
from lablib.launch.ranks import RankError, run_ranks
from lablib.toys.transformer import Transformer, tiny_config

SIZES = {"hidden": 18, "num_heads": 3, "ffn": 37, "num_layers": 1, "vocab": 64, "max_positions": 16}
CONFIG = tiny_config("gpt2", **SIZES)
TOLERANCE = 2e-5


def build(**options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Transformer(CONFIG)
    if dist.is_initialized():
        model, _ = shard(model, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)


def batch(step: int) -> Tensor:
    return torch.randint(0, 64, (8, 9), generator=torch.Generator().manual_seed(step))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> list[float]:
    """Train on the samples of some steps; return the mean loss over all ranks of each."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(first, first + count):
        loss = model.loss(batch(step)[rank::ranks])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
    return losses


def whole_loss(model: nn.Module) -> float:
    """The loss of the same samples on every rank."""
    with torch.no_grad():
        return model.loss(batch(99)).item()


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value.full_tensor() if hasattr(value, "full_tensor") else value for value in values]


def first(folder: str) -> dict[str, object]:
    """Three steps, a save in the background while training goes on, then crashes."""
    warnings.simplefilter("error")
    model, optimizer = build()
    steps(model, optimizer, 0, 3)
    saving = save_checkpoint(folder, model, optimizer, 3, data={"sample": 24}, wait=False)
    result = {"state": full_state_dict(model), "moments": moments(optimizer), "loss": whole_loss(model)}
    result["random"] = torch.rand(3)
    result["later"] = steps(model, optimizer, 3, 2)
    result["path"] = str(saving.result())
    assert saving.done()

    write = dcp.FileSystemWriter.write_data
    if dist.get_rank() == 1:  # a full disk on one rank

        def full(*args: object) -> None:
            raise OSError("no space left on device")

        dcp.FileSystemWriter.write_data = full
    for wait in (True, False):
        with pytest.raises(RuntimeError, match=r"saving step-00000005 failed.*no space left on device"):
            save_checkpoint(folder, model, optimizer, 5, wait=wait).result()
        assert str(latest_checkpoint(folder)) == result["path"]
    result["left"] = sorted(path.name[:17] for path in Path(folder).iterdir())
    dcp.FileSystemWriter.write_data = write
    dist.barrier()
    with pytest.raises(ValueError, match="step-00000003 is there already"):
        save_checkpoint(folder, model, optimizer, 3)
    with pytest.raises(ValueError, match="keep=0 must be None or at least 1"):
        save_checkpoint(folder, model, optimizer, 6, keep=0)
    pruned, (layer, _) = Path(folder) / "pruned", shard(nn.Linear(3, 2), wrap="none")
    for step in (1, 2, 3):
        save_checkpoint(pruned, layer, torch.optim.SGD(layer.parameters()), step, keep=2, wait=step == 3)
    result["kept"] = sorted(path.name for path in pruned.iterdir())
    return result


def second(folder: str, path: str) -> dict[str, object]:
    """On 4 ranks: load, save at once, and take two steps."""
    warnings.simplefilter("error")
    model, optimizer = build(wrap="linear", mesh=(2, 2))  # sharded in another way, too
    progress = load_checkpoint(path, model, optimizer)
    result = {"state": full_state_dict(model), "moments": moments(optimizer), "loss": whole_loss(model)}
    save_checkpoint(Path(folder) / "four", model, optimizer, progress.step, data=progress.data)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    return result | {"progress": progress, "random": torch.rand(3), "later": steps(model, optimizer, 3, 2)}


def third(folder: str, path: str) -> None:
    """On 2 ranks again, from both checkpoints; then rank 0 is killed in a save, so results go by file."""
    result = {}
    for name, where in (("same", path), ("back", latest_checkpoint(Path(folder) / "four"))):
        model, optimizer = build()
        progress = load_checkpoint(where, model, optimizer)
        result[name] = {"random": torch.rand(3), "rng": progress.rng, "loss": whole_loss(model)}
        result[name]["later"] = steps(model, optimizer, 3, 2)
    torch.save(result, Path(folder) / f"third-{dist.get_rank()}")

    def half(path: Path, info: dict) -> None:
        """Every shard is on disk, and so is half of the last file; the checkpoint has no name yet."""
        path.write_text(json.dumps(info)[:20])
        os.kill(os.getpid(), signal.SIGKILL)

    checkpoint_files.write_json = half
    save_checkpoint(folder, model, optimizer, 5)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    one = run_ranks(first, 2, folder)
    path = one[0]["path"]
    four = run_ranks(second, 4, folder, path)
    with pytest.raises(RankError) as death:
        run_ranks(third, 2, folder, path)
    two = [torch.load(Path(folder) / f"third-{rank}") for rank in range(2)]
    return {"folder": folder, "first": one, "second": four, "third": two, "death": death.value}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_four_ranks_load_what_two_saved(runs: dict) -> None:
    """What was saved is the state at step 3, though training went on while it was written."""
    saved = runs["first"][0]
    for rank in runs["second"]:
        assert equal(rank["state"], saved["state"])
        assert rank["loss"] == saved["loss"]
        assert rank["later"] == pytest.approx(saved["later"], abs=TOLERANCE)
        progress = rank["progress"]
        assert (progress.step, progress.data, progress.ranks) == (3, {"sample": 24}, 2)
        assert progress.rng == "reseeded"
    assert abs(saved["later"][0] - saved["later"][1]) > 1e-3
    assert len({tuple(rank["random"].tolist()) for rank in runs["second"]}) == 4
    # The units are others, so the optimizer's order is; as a set the moments are the same.
    assert sorted(m.double().sum().item() for m in runs["second"][0]["moments"]) == pytest.approx(
        sorted(m.double().sum().item() for m in saved["moments"])
    )


def test_back_on_two_ranks_nothing_has_changed(runs: dict) -> None:
    """2 -> 4 -> 2 without a step in between: the same losses as the run that never stopped, bit for bit."""
    for before, after in zip(runs["first"], runs["third"], strict=True):
        for name in ("same", "back"):
            assert after[name]["loss"] == before["loss"]
            assert after[name]["later"] == before["later"]
        assert after["same"]["rng"] == "restored"
        assert torch.equal(after["same"]["random"], before["random"])


def test_a_crash_leaves_the_older_checkpoint(runs: dict) -> None:
    for rank in runs["first"]:
        assert rank["left"] == [".writing-00000005", "step-00000003"]
        assert rank["kept"] == ["step-00000002", "step-00000003"]


def test_killed_in_the_middle_of_a_save(runs: dict) -> None:
    """No handler runs after SIGKILL: what it leaves is no checkpoint, and the next save works and clears it away."""
    folder, older = Path(runs["folder"]), Path(runs["first"][0]["path"])
    assert runs["death"].rank == 0
    assert "SIGKILL" in runs["death"].traceback
    (dead,) = folder.glob(".writing-00000005-*")
    assert {file.name for file in dead.iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp", "training.json"}
    assert latest_checkpoint(folder) == older
    model, optimizer = build()
    assert load_checkpoint(latest_checkpoint(folder), model, optimizer).step == 3
    model.loss(batch(3)).backward()
    optimizer.step()
    again = save_checkpoint(folder, model, optimizer, 5).result()  # the very step that was lost
    assert latest_checkpoint(folder) == again
    assert not dead.exists()
    fresh, other = build()
    assert load_checkpoint(again, fresh, other).step == 5
    assert equal(fresh.state_dict(), model.state_dict())
    assert not equal(fresh.state_dict(), runs["first"][0]["state"])
    assert equal(dict(enumerate(moments(other))), dict(enumerate(moments(optimizer))))


# One process, no ranks


def test_export_and_load_without_ranks(runs: dict, tmp_path: Path) -> None:
    saved, path = runs["first"][0], runs["first"][0]["path"]
    file = export_safetensors(path, tmp_path / "out" / "model.safetensors")
    names = load_file(file)
    assert set(names) == saved["state"].keys() - {"head.weight"}  # tied: stored once
    model, optimizer = build()
    load_model(model, file)
    assert equal(model.state_dict(), saved["state"])
    assert {t.dtype for t in load_file(export_safetensors(path, file, torch.bfloat16)).values()} == {torch.bfloat16}
    assert [p.name for p in file.parent.iterdir()] == [file.name]

    model, optimizer = build()
    nn.init.zeros_(model.embed.weight)
    progress = load_checkpoint(path, model, optimizer)
    assert equal(model.state_dict(), saved["state"])
    assert model.head.weight is model.embed.weight
    assert progress.rng == "reseeded"
    assert all(state["step"] == 3 for state in optimizer.state.values())
    again = save_checkpoint(tmp_path / "alone", model, optimizer, 4).result()
    load_checkpoint(again, build()[0])
    assert equal(model.state_dict(), saved["state"])


def test_clear_errors(runs: dict, tmp_path: Path) -> None:
    model, optimizer = build()
    path = save_checkpoint(tmp_path, model, optimizer, 1).result()
    assert latest_checkpoint(tmp_path) == path
    assert latest_checkpoint(tmp_path / "nowhere") is None
    with pytest.raises(ValueError, match=r"nowhere is no complete checkpoint: it has no training.json"):
        load_checkpoint(tmp_path / "nowhere", model)
    with pytest.raises(ValueError, match=r"did you mean .*step-00000001\?"):
        load_checkpoint(tmp_path, model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    other = Transformer(tiny_config("gpt2", **SIZES | {"hidden": 24}))
    with pytest.raises(ValueError, match=r"of another model: blocks.0.attention.k.bias is \(18,\) there and \(24,\)"):
        load_checkpoint(path, other)
    llama = Transformer(tiny_config("llama", hidden=18, num_heads=3, num_layers=1, vocab=64))
    with pytest.raises(ValueError, match=r"it lacks blocks.0.mlp.gate.weight.*; the model has no blocks.0.attention"):
        load_checkpoint(path, llama)
    shards = path / "__0_0.distcp"
    content = shards.read_bytes()
    shards.write_bytes(content[:-100])
    for use in (lambda: load_checkpoint(path, model), lambda: export_safetensors(path, tmp_path / "x")):
        with pytest.raises(ValueError, match=rf"__0_0.distcp has {len(content) - 100} bytes and was written with"):
            use()
    shards.unlink()
    with pytest.raises(ValueError, match=r"__0_0.distcp is missing; use an older one"):
        load_checkpoint(path, model)
    assert equal(model.state_dict(), before)
    half = tmp_path / "step-00000009"
    half.mkdir()
    assert latest_checkpoint(tmp_path) == path  # a folder with a good name and nothing in it
    assert json.loads((path / "training.json").read_text())["tied"] == [["embed.weight", "head.weight"]]


def test_a_gpu_has_a_random_state_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout on a GPU draws from the GPU's generator: without its state a resumed run draws other numbers."""
    on_gpu = {"state": torch.arange(16, dtype=torch.uint8)}

    def keep(state: Tensor) -> None:
        on_gpu["state"] = state.clone()

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: on_gpu["state"].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", keep)
    model, optimizer = build()
    path = save_checkpoint(tmp_path, model, optimizer, 1).result()
    drawn, on_gpu["state"] = torch.rand(3), torch.zeros(16, dtype=torch.uint8)
    assert load_checkpoint(path, model, optimizer).rng == "restored"
    assert torch.equal(on_gpu["state"], torch.arange(16, dtype=torch.uint8))
    assert torch.equal(torch.rand(3), drawn)
    # The same checkpoint on a CPU is whole; one of a CPU has nothing for a GPU, and says so.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert load_checkpoint(path, model, optimizer).rng == "restored"
    path = save_checkpoint(tmp_path, model, optimizer, 2).result()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert load_checkpoint(path, model, optimizer).rng == "reseeded"


# Checkpoints at their edges: before the first step, damaged without a change of size, steps of many digits, errors


def build_layers(kind: str = "AdamW", seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    if dist.is_initialized():
        model, _ = shard(model, wrap="linear")
    options = {"momentum": 0.9, "weight_decay": 0.1} if kind == "SGD" else {}
    return model, getattr(torch.optim, kind)(model.parameters(), lr=1e-2, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        model(torch.full((2, 4), step + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> torch.Tensor:
    state = full_state_dict(model) if dist.is_initialized() else model.state_dict()
    return torch.cat([value.flatten() for value in state.values()]).clone()


def from_the_start(folder: str, kind: str) -> dict[str, torch.Tensor]:
    """Train without a save, with one before the first step, with one before it beside gradients, and from these."""
    warnings.simplefilter("ignore")
    result = {}
    model, optimizer = build_layers(kind)
    train(model, optimizer)
    result["calm"] = weights(model)
    for name in ("before", "between"):
        model, optimizer = build_layers(kind)
        if name == "between":
            model(torch.ones(2, 4)).square().mean().backward()
        gradients = [p.grad for p in model.parameters()]
        path = save_checkpoint(Path(folder) / name, model, optimizer, 0).result()
        assert not optimizer.state
        assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
        optimizer.zero_grad()
        train(model, optimizer)
        result[name] = weights(model)
        model, optimizer = build_layers(kind, seed=1)
        load_checkpoint(path, model, optimizer)
        train(model, optimizer)
        result[f"from {name}"] = weights(model)
    path = save_checkpoint(Path(folder) / "later", *build_trained(kind), 3).result()
    model, optimizer = build_layers(kind)
    model(torch.ones(2, 4)).square().mean().backward()  # gradients that are in the way of a state
    load_checkpoint(path, model, optimizer)
    optimizer.zero_grad()
    train(model, optimizer)
    result["resumed"] = weights(model)
    model, optimizer = build_trained(kind)
    train(model, optimizer)
    result["never stopped"] = weights(model)
    return result


def build_trained(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = build_layers(kind)
    train(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_before_the_first_step_changes_no_run(tmp_path: Path, kind: str, ranks: int) -> None:
    if ranks == 1:
        seen = from_the_start(str(tmp_path), kind)
    else:
        seen = run_ranks(from_the_start, ranks, str(tmp_path), kind)[0]
    resumed, never = seen.pop("resumed"), seen.pop("never stopped")
    assert torch.equal(resumed, never)
    for name, found in seen.items():
        assert torch.equal(found, seen["calm"]), name


def flip(path: Path, number: int = -1) -> str:
    """Change one bit in the middle of a shard; its size stays."""
    file = sorted(path.glob("*.distcp"))[number]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file.name


def damaged(folder: str) -> str:
    """Rank 1's shard has a flipped bit: both ranks say so, and nothing is changed."""
    warnings.simplefilter("ignore")
    model, optimizer = build_layers()
    train(model, optimizer)
    path = save_checkpoint(folder, model, optimizer, 3).result()
    if dist.get_rank() == 0:
        flip(path)
    dist.barrier()
    train(model, optimizer, 1)
    before = weights(model), [s["exp_avg"].to_local().clone() for s in optimizer.state.values()]
    random = torch.get_rng_state()
    with pytest.raises(ValueError, match="is not what was written; use an older one") as caught:
        load_checkpoint(path, model, optimizer)
    assert torch.equal(weights(model), before[0])
    after = [s["exp_avg"].to_local() for s in optimizer.state.values()]
    assert all(map(torch.equal, after, before[1]))
    assert torch.equal(torch.get_rng_state(), random)
    return str(caught.value)


def test_a_flipped_bit_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    for told in run_ranks(damaged, 2, str(tmp_path)):
        assert told == (
            f"checkpoint {tmp_path}/step-00000003 is damaged: the content of __1_0.distcp is not what was written; "
            "use an older one"
        )
    with pytest.raises(ValueError, match=r"the content of __1_0.distcp is not what was written"):
        export_safetensors(tmp_path / "step-00000003", tmp_path / "x")


def test_what_breaks_after_the_check_is_an_exception_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_checkpoint(tmp_path, *build_trained("AdamW"), 3).result()
    whole = checkpoint_files.verify_checkpoint

    def then_gone(path: Path) -> dict:
        info = whole(path)
        for file in path.glob("*.distcp"):
            file.unlink()
        return info

    monkeypatch.setattr(checkpoint_files, "verify_checkpoint", then_gone)
    model, optimizer = build_layers()
    with pytest.raises(RuntimeError, match="step-00000003 failed on the way, and the model is loaded in part"):
        load_checkpoint(path, model, optimizer)
    assert not optimizer.state


def test_steps_of_many_digits_are_found_in_their_order(tmp_path: Path) -> None:
    model, optimizer = build_layers()
    for step in (99_999_999, 100_000_000, 1_000_000_000, 999_999_999):
        saved = save_checkpoint(tmp_path, model, optimizer, step, keep=None).result()
        assert saved.name == f"step-{step}"
    assert latest_checkpoint(tmp_path).name == "step-1000000000"
    save_checkpoint(tmp_path, model, optimizer, 20_000_000_000, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1000000000", "step-20000000000"]
    assert load_checkpoint(latest_checkpoint(tmp_path), model, optimizer).step == 20_000_000_000


def test_a_save_that_fails_says_what_failed_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match=r"^saving step 1 failed. rank 0: (NotADirectory|FileExists)Error"):
        save_checkpoint(tmp_path / "file" / "folder", *build_layers(), 1)

    def full(*_: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    with pytest.raises(RuntimeError, match=r"^saving step-00000001 failed. rank 0: .*the disk is full"):
        save_checkpoint(tmp_path, *build_layers(), 1)
