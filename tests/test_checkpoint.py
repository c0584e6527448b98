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
