"""The Accelerate script on a CPU, its refusals, and its FSDP2 file as Accelerate itself reads it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM

from lablib.launch.fsdp import shard
from lablib.launch.runs import torchrun
from lablib.launch.torch_private import FakeStore
from lablib.toys.text import batches, text, tokens
from tests.scripts import ROOT, load

SCRIPTS = ROOT / "labs" / "scripts"
SCRIPT, CONFIG = SCRIPTS / "train_accelerate_fsdp.py", SCRIPTS / "accelerate_fsdp2.yaml"
SMALL = ["--steps", "3", "--layers", "1", "--hidden", "16", "--seq", "16", "--global-batch", "4"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load(SCRIPT)


def test_ddp_on_two_cpu_ranks_says_so_and_equals_one_process(script: ModuleType, tmp_path: Path) -> None:
    """fp32, and AdamW's first three steps of 1e-3: rounding stays below 1e-4, and a doubled step does not."""
    usual = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    usual["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    # The ranks are forks of torchrun: what takes longest, loading the libraries, happens once and not three times.
    libraries = ("accelerate", "transformers.models.qwen2.modeling_qwen2", "torch._dynamo")
    words = [*SMALL, "--losses", str(tmp_path / "losses")]
    job = torchrun(SCRIPT, *words, ranks=2, env=usual, preload=libraries)
    assert job.returncode == 0, job.log
    assert job.log.count("Accelerate runs no FSDP on a CPU") == 1
    assert "MULTI_CPU on 2 ranks" in job.log

    found, expected, doubled = (json.loads((tmp_path / "losses").read_text()), one_process(1e-3), one_process(2e-3))
    assert found == pytest.approx(expected, abs=1e-4)
    assert found != pytest.approx(doubled, abs=1e-3)


def one_process(lr: float) -> list[float]:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=256,
            hidden_size=16,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            use_cache=False,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    stream = batches(tokens(text()), batch=4, seq=16, seed=0)
    for _ in range(3):
        part = next(stream)[:, :-1]
        loss = model(input_ids=part, labels=part).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_file_means_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by `accelerate launch` itself, turned into its environment, and from there into the plugin."""
    assert load_config_from_file(str(CONFIG)).distributed_type == DistributedType.FSDP
    parser = launch_command_parser()
    args, _, _ = _validate_launch_command(parser.parse_args(["--config_file", str(CONFIG), str(SCRIPT)]))
    assert (args.use_fsdp, args.num_processes, args.mixed_precision) == (True, 2, "bf16")
    for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_"))]:
        monkeypatch.delenv(name)
    environment = prepare_multi_gpu_env(args)
    for name, value in environment.items():
        if name.startswith(("FSDP_", "ACCELERATE_")):
            monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.transformer_cls_names_to_wrap == ["Qwen2DecoderLayer"]
    assert plugin.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"
    assert not plugin.activation_checkpointing
    assert not plugin.cpu_ram_efficient_loading
    plugin.set_mixed_precision(os.environ["ACCELERATE_MIXED_PRECISION"])
    assert plugin.mixed_precision_policy.param_dtype == torch.bfloat16
    assert plugin.mixed_precision_policy.reduce_dtype == torch.bfloat16


def test_every_key_is_explained() -> None:
    for line in CONFIG.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith(("#", "fsdp_config")):
            assert "  # " in line, f"no comment: {line}"


@pytest.mark.parametrize(
    ("options", "ranks", "says"),
    [
        ("--global-batch 3", "2", "ranks=2 does not divide --global-batch 3"),
        ("--steps 0", "1", "--steps 0 must be at least 1"),
        ("--hidden 20", "1", "--hidden 20 must be a multiple of 8"),
    ],
)
def test_bad_options(script: ModuleType, monkeypatch, capsys, options: str, ranks: str, says: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    with pytest.raises(SystemExit):
        script.arguments(options.split())
    assert says in capsys.readouterr().err


def test_a_single_process_without_an_accelerator_is_refused(script: ModuleType, monkeypatch) -> None:
    """What `accelerate launch --cpu` starts."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit, match=r"This is a single process, without ranks.* torchrun --standalone"):
        script.make_accelerator()


@pytest.mark.parametrize(
    ("got", "ranks", "version_2", "says"),
    [
        (DistributedType.MULTI_GPU, 2, False, "asked for FSDP, but Accelerate runs MULTI_GPU"),
        (DistributedType.FSDP, 1, True, "2 ranks were started, but Accelerate counts 1"),
        (DistributedType.FSDP, 2, False, "this is FSDP1"),
        (DistributedType.FSDP, 2, True, None),
    ],
)
def test_it_wants_what_it_asked_for(script, monkeypatch, got, ranks: int, version_2: bool, says) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    fake = SimpleNamespace(distributed_type=got, num_processes=ranks, is_fsdp2=version_2)
    if says is None:
        script.check(fake, DistributedType.FSDP)
    else:
        with pytest.raises(SystemExit, match=says):
            script.check(fake, DistributedType.FSDP)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Rank 0 of two, played in this process: what is asked is how a model is cut, and nothing is sent for that."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def small_qwen() -> nn.Module:
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1))


def test_the_model_is_really_sharded(script: ModuleType, two_ranks: None) -> None:
    """The check of the model, on models that are sharded well and badly."""
    good, _ = shard(small_qwen())
    partly, _ = shard(small_qwen(), wrap=lambda name, module: name == "model.layers.1")
    assert script.check_sharded(good) == 3  # two blocks and the root
    for model in (small_qwen(), partly):
        with pytest.raises(SystemExit, match="2 blocks, but not each is a unit: check fsdp_transformer_layer"):
            script.check_sharded(model)
    blocks_alone = small_qwen()
    for block in blocks_alone.model.layers:
        fully_shard(block)
    with pytest.raises(SystemExit, match=r"parameters are not sharded, such as model\.embed_tokens\.weight"):
        script.check_sharded(blocks_alone)
