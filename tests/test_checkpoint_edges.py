"""Checkpoints at their edges: before the first step, damaged without a change of size, steps of many digits, errors."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from lablib.launch.fsdp import (
    checkpoint,
    export_safetensors,
    full_state_dict,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    shard,
)
from lablib.launch.ranks import run_ranks


def build(kind: str = "AdamW", seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
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
    model, optimizer = build(kind)
    train(model, optimizer)
    result["calm"] = weights(model)
    for name in ("before", "between"):
        model, optimizer = build(kind)
        if name == "between":
            model(torch.ones(2, 4)).square().mean().backward()
        gradients = [p.grad for p in model.parameters()]
        path = save_checkpoint(Path(folder) / name, model, optimizer, 0).result()
        assert not optimizer.state
        assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
        optimizer.zero_grad()
        train(model, optimizer)
        result[name] = weights(model)
        model, optimizer = build(kind, seed=1)
        load_checkpoint(path, model, optimizer)
        train(model, optimizer)
        result[f"from {name}"] = weights(model)
    path = save_checkpoint(Path(folder) / "later", *build_trained(kind), 3).result()
    model, optimizer = build(kind)
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
    model, optimizer = build(kind)
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
    model, optimizer = build()
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
    whole = checkpoint.verify_checkpoint

    def then_gone(path: Path) -> dict:
        info = whole(path)
        for file in path.glob("*.distcp"):
            file.unlink()
        return info

    monkeypatch.setattr(checkpoint, "verify_checkpoint", then_gone)
    model, optimizer = build()
    with pytest.raises(RuntimeError, match="step-00000003 failed on the way, and the model is loaded in part"):
        load_checkpoint(path, model, optimizer)
    assert not optimizer.state


def test_steps_of_many_digits_are_found_in_their_order(tmp_path: Path) -> None:
    model, optimizer = build()
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
        save_checkpoint(tmp_path / "file" / "folder", *build(), 1)

    def full(*_: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    with pytest.raises(RuntimeError, match=r"^saving step-00000001 failed. rank 0: .*the disk is full"):
        save_checkpoint(tmp_path, *build(), 1)
