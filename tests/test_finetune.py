"""Pretrained weights into shards, supervised fine-tuning, LoRA: on a tiny random Qwen2 with sums to learn.

Losses on other numbers of ranks may differ as in test_trainer: 2e-5 covers six steps with eps = 1e-2.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Qwen2ForCausalLM

from lablib.calc.flops import step_flops
from lablib.launch.fsdp import full_state_dict, shard
from lablib.launch.ranks import run_ranks
from lablib.launch.runs import launched_ranks
from lablib.launch.training import (
    IGNORE_INDEX,
    FineTuning,
    TrainConfig,
    Trainer,
    add_lora,
    addition_examples,
    export_merged,
    read_examples,
    read_metrics,
    save_adapters,
    tiny_qwen2,
)
from lablib.launch.training.finetune import Example, encode, load_pretrained, pad_example, write_safetensors
from lablib.launch.training.lora import adapters, load_adapters, merge

TOLERANCE = 2e-5
EXAMPLES = addition_examples(
    40, largest=9, seed=2
)  # answers of one or two digits: samples differ in their number of targets
SEQ = 12


def config(folder: str, **more: Any) -> TrainConfig:
    usual = {"model": "", "steps": 4, "global_batch": 8, "seq": SEQ, "lr": 1e-2, "eps": 1e-2, "precision": "fp32"}
    return TrainConfig(folder=folder, **usual | more)


def meta_qwen(folder: str) -> nn.Module:
    with torch.device("meta"):
        return Qwen2ForCausalLM(Qwen2ForCausalLM.config_class.from_pretrained(folder))


def odd() -> nn.Module:
    """Rows that 2 ranks do not share evenly, and one that they cannot share."""
    return nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 1))


def read_by_rows(folder: str) -> dict[str, Any]:
    """The tied model in several files, and rows that do not divide."""
    model, _ = shard(meta_qwen(f"{folder}/tied"))
    load_pretrained(model, f"{folder}/tied")
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    logits = model(input_ids=torch.arange(10)[None]).logits.detach()
    with torch.device("meta"):
        small, _ = shard(odd(), wrap="linear")
    load_pretrained(small, f"{folder}/odd")
    both = full_state_dict(model), full_state_dict(small)
    return {"states": both, "tied": tied, "logits": logits, "kept": small[0].weight.to_local().shape[0]}


def tune(folder: str, pretrained: str) -> dict[str, Any]:
    """All weights, then adapters; the adapters through a resume, and in bf16."""
    ranks, result = dist.get_world_size(), {}
    whole = Trainer(config(f"{folder}/whole-{ranks}"), task=FineTuning(config("x"), pretrained, EXAMPLES))
    whole.run()
    result["whole"] = [m["loss"] for m in read_metrics(whole.folder, whole.rank)]
    result["targets"] = [m["targets"] for m in read_metrics(whole.folder, whole.rank)]

    run = config(f"{folder}/lora-{ranks}", micro_batch=2)
    task = FineTuning(run, pretrained, EXAMPLES, lora_rank=3)
    trainer = Trainer(run, task=task)
    parameters = dict(trainer.model.named_parameters())
    trained = {name for name, p in parameters.items() if p.requires_grad}
    assert trained == {name for name in parameters if "lora_" in name}
    assert all(isinstance(p, DTensor) for p in parameters.values())
    kept = torch.tensor(float(sum(p.to_local().numel() for p in parameters.values())))
    dist.all_reduce(kept)
    result["kept"], result["whole size"] = int(kept), sum(p.numel() for p in parameters.values())
    trainer.run(until=2)
    trainer.save()
    trainer.run()
    result["lora"] = [m["loss"] for m in read_metrics(trainer.folder, trainer.rank)]
    result["state"] = full_state_dict(trainer.model)
    result["moments"] = len(trainer.optimizer.state), len(trained)
    save_adapters(trainer.model, f"{folder}/adapters-{ranks}", base=pretrained)
    if trainer.rank == 0:  # alone, as the script does: a merge that waited for the other ranks would never end
        export_merged(pretrained, f"{folder}/adapters-{ranks}", f"{folder}/merged-{ranks}")
    inputs_BS, _ = task.read([0, 1, 2])
    with torch.no_grad():
        result["logits"] = trainer.model(input_ids=inputs_BS).logits
    if ranks == 2:
        fresh = Trainer(run, task=FineTuning(run, pretrained, EXAMPLES, lora_rank=3))
        fresh.resume()
        fresh.run()
        result["resumed"] = [m["loss"] for m in read_metrics(fresh.folder, fresh.rank)]
        half = config(f"{folder}/bf16", precision="bf16", steps=2, lr_steps=4, recompute="full")
        task = FineTuning(half, pretrained, EXAMPLES, lora_rank=3, frozen_dtype=torch.bfloat16)
        mixed = Trainer(half, task=task)
        assert {p.dtype for p in mixed.model.parameters() if not p.requires_grad} == {torch.bfloat16}
        assert {p.dtype for p in mixed.model.parameters() if p.requires_grad} == {torch.float32}
        mixed.run()
        result["bf16"] = [m["loss"] for m in read_metrics(mixed.folder, mixed.rank)]
        result["rows"] = read_by_rows(folder)
    return result


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen2(tmp_path_factory.mktemp("pretrained"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, pretrained: Path) -> dict[Any, Any]:
    folder = str(tmp_path_factory.mktemp("runs"))
    tiny_qwen2(folder + "/tied", hidden=40, tied=True, seed=3)
    split(Path(folder) / "tied")
    torch.manual_seed(1)
    (Path(folder) / "odd").mkdir()
    write_safetensors(odd(), f"{folder}/odd/model.safetensors")
    with launched_ranks("cpu"):
        one = tune(folder, str(pretrained))
    return {1: [one], 2: run_ranks(tune, 2, folder, str(pretrained)), "folder": Path(folder)}


def split(folder: Path) -> None:
    """Cut a model's file in two, with the index that large models have."""
    state, index = load_file(folder / "model.safetensors"), {}
    assert "lm_head.weight" not in state  # stored once, under the embedding's name
    for number in (0, 1):
        part = sorted(state)[number::2]
        save_file({name: state[name] for name in part}, folder / f"part{number}.safetensors")
        index |= dict.fromkeys(part, f"part{number}.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def by_hand(model: nn.Module, examples: list[Example]) -> float:
    """The mean over all answer tokens of -log p(token | everything before it), one token at a time."""
    total, count = 0.0, 0
    for example in examples:
        ids = [*example.prompt, *example.answer]
        with torch.no_grad():
            scores = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        for place in range(len(example.prompt), len(ids)):
            total -= scores[place - 1, ids[place]].item()
            count += 1
    return total / count


# The masked loss


def test_one_example_by_hand() -> None:
    """What the module's head draws."""
    inputs, targets = pad_example(Example((1, 2, 3), (4, 5, 9)), seq=7)
    assert inputs == [1, 2, 3, 4, 5, 9, 0]
    assert targets == [IGNORE_INDEX, IGNORE_INDEX, 4, 5, 9, IGNORE_INDEX, IGNORE_INDEX]
    assert pad_example(Example((1, 2), (3, 4)), seq=3) == ([1, 2, 3], [IGNORE_INDEX, 3, 4])
    for example, says in (
        (Example((1, 2), (3, 4, 5)), "an example has 5 tokens and seq=3 takes 4"),
        (Example((), (3,)), "needs a prompt and an answer"),
        (Example((3,), ()), "needs a prompt and an answer"),
    ):
        with pytest.raises(ValueError, match=says):
            pad_example(example, seq=3)


def test_the_first_loss_is_the_one_computed_by_hand(runs: dict, pretrained: Path) -> None:
    """Of the global batch of step 1, whatever the ranks: fp32 losses near 5.5 agree to 1e-5."""
    task = FineTuning(config("x"), pretrained, EXAMPLES)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:8].tolist()
    model = Qwen2ForCausalLM.from_pretrained(pretrained)
    batch = [EXAMPLES[i] for i in order]
    wanted = by_hand(model, batch)
    lengths = [len(e.answer) for e in batch]
    assert len(set(lengths)) > 1
    for rank in (*runs[1], *runs[2]):
        assert rank["whole"][0] == pytest.approx(wanted, abs=1e-5)
        assert rank["lora"][0] == pytest.approx(wanted, abs=1e-5)  # B is zero: the pretrained model
        assert rank["targets"][0] == sum(lengths)
    # A mean of the ranks' means is another number.
    halves = [by_hand(model, batch[rank::2]) for rank in (0, 1)]
    assert sum(lengths[::2]) != sum(lengths[1::2])
    assert abs(sum(halves) / 2 - wanted) > 1e-4
    assert len(task) == 40


def test_ranks_and_micro_batches_change_nothing(runs: dict) -> None:
    for kind in ("whole", "lora"):
        assert runs[2][0][kind] == runs[2][1][kind]
        assert runs[2][0][kind] == pytest.approx(runs[1][0][kind], abs=TOLERANCE)
    assert runs[2][0]["whole"][-1] < runs[2][0]["whole"][0] - 0.3
    assert runs[2][0]["lora"][-1] < runs[2][0]["lora"][0] - 0.05
    assert runs[2][0]["resumed"] == runs[2][0]["lora"]
    # bf16 keeps 8 bits of every weight and logit; the logits are below 1.
    assert runs[2][0]["bf16"] == pytest.approx(runs[2][0]["lora"][:2], abs=2**-6)


# LoRA


def test_only_adapters_are_trained_and_everything_is_sharded(runs: dict, pretrained: Path) -> None:
    base = load_file(pretrained / "model.safetensors")
    for rank in runs[2]:
        assert rank["kept"] == rank["whole size"]
        assert rank["moments"][0] == rank["moments"][1] == 2 * 7 * 2
        assert all(torch.equal(rank["state"][name], value) for name, value in base.items())
        new = {name: v for name, v in rank["state"].items() if name not in base}
        assert all("lora_" in name for name in new)
        assert all(v.abs().max() > 0 for v in new.values())  # B has left zero


def test_adapters_are_saved_loaded_and_merged(runs: dict, pretrained: Path, tmp_path: Path) -> None:
    """In float64 a matmul's error is about 1e-16 of its terms; 1e-10 is far above it, and far below the adapters' work."""
    folder = runs["folder"] / "adapters-2"
    task = FineTuning(config("x"), pretrained, EXAMPLES)
    inputs_BS, _ = task.read([0, 1, 2])
    plain = Qwen2ForCausalLM.from_pretrained(pretrained)
    loaded = load_adapters(Qwen2ForCausalLM.from_pretrained(pretrained), folder)
    for rank in runs[2]:
        assert torch.equal(
            loaded.state_dict()["model.layers.1.mlp.up_proj.lora_B"], rank["state"]["model.layers.1.mlp.up_proj.lora_B"]
        )
        assert torch.allclose(loaded(input_ids=inputs_BS).logits, rank["logits"], atol=1e-5)
    wide = loaded.double()
    with torch.no_grad():
        adapted = wide(input_ids=inputs_BS).logits
        assert (adapted - plain.double()(input_ids=inputs_BS).logits).abs().max() > 1e-3
        merged = merge(wide)(input_ids=inputs_BS).logits
    assert not list(adapters(wide))
    assert {type(m) for m in wide.modules() if "Linear" in type(m).__name__} == {nn.Linear}
    assert (merged - adapted).abs().max() < 1e-10

    for target in (export_merged(pretrained, folder, tmp_path / "merged"), runs["folder"] / "merged-2"):
        again = Qwen2ForCausalLM.from_pretrained(target)
        # Weights below 1 are rounded to fp32 once more: 2^-25 each, 64 terms a product, 3 products deep.
        assert (again(input_ids=inputs_BS).logits.double() - adapted).abs().max() < 1e-4
    with pytest.raises(ValueError, match="is the pretrained model: merge into another folder"):
        export_merged(pretrained, folder, pretrained)


def test_the_files_have_the_names_of_peft(runs: dict) -> None:
    folder = runs["folder"] / "adapters-2"
    names = load_file(folder / "adapter_model.safetensors")
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert len(names) == 28
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (3, 16.0, "LORA")


# peft asks for it, not the course
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_peft_reads_what_we_write_and_we_read_what_it_writes(runs: dict, pretrained: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft, the extra peft, is not installed")
    ids, folder = torch.arange(10)[None], runs["folder"] / "adapters-2"
    theirs = peft.PeftModel.from_pretrained(Qwen2ForCausalLM.from_pretrained(pretrained), folder)
    theirs.save_pretrained(tmp_path)
    for adapters_of in (folder, tmp_path):
        ours = load_adapters(Qwen2ForCausalLM.from_pretrained(pretrained), adapters_of)
        assert torch.allclose(theirs(input_ids=ids).logits, ours(input_ids=ids).logits, atol=1e-6)


def test_frozen_matrices_cost_two_products_of_three(pretrained: Path) -> None:
    task = FineTuning(config("x"), pretrained, EXAMPLES, lora_rank=3)
    task.build()
    whole = step_flops(task.shape, batch=8, seq=SEQ)
    scores = whole.forward_by_component["scores"]
    # 7 matrices a layer: 4 of attention (2 heads of width 8 for keys and values), 3 of the MLP.
    widths = 32 + 32 + (32 + 16) * 2 + 32 + 32 + 3 * (32 + 96)
    flops = task.flops(8, "none")
    assert flops.model == 3 * scores + 2 * (whole.forward - scores) + 6 * 8 * SEQ * 2 * 3 * widths
    assert flops.hardware == flops.model
    assert task.flops(8, "full").hardware > flops.hardware


# Pretrained weights


def test_each_rank_reads_its_rows(runs: dict, tmp_path: Path) -> None:
    folder = runs["folder"] / "tied"
    reference = Qwen2ForCausalLM.from_pretrained(folder)
    small = load_file(runs["folder"] / "odd" / "model.safetensors")
    for number, rank in enumerate(runs[2]):
        rows = rank["rows"]
        assert rows["tied"]
        for state, wanted in zip(rows["states"], (reference.state_dict(), small), strict=True):
            assert state.keys() == wanted.keys()
            assert all(torch.equal(value, wanted[name]) for name, value in state.items())
        assert rows["kept"] == (4, 3)[number]
        # Rotary frequencies are in no file: the logits would show it.
        assert torch.allclose(rows["logits"], reference(input_ids=torch.arange(10)[None]).logits, atol=1e-5)
    whole = load_pretrained(meta_qwen(str(folder)), folder)
    assert all(torch.equal(v, reference.state_dict()[n]) for n, v in whole.state_dict().items())

    other = tiny_qwen2(tmp_path, tied=True)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is \(256, 40\) there and \(256, 32\) in the model"):
        load_pretrained(meta_qwen(str(other)), folder)
    state = load_file(other / "model.safetensors")
    del state["model.norm.weight"]
    save_file(state, other / "model.safetensors")
    with pytest.raises(ValueError, match=r"the safetensors have no model\.norm\.weight"):
        load_pretrained(meta_qwen(str(other)), other)
    with pytest.raises(ValueError, match="has no safetensors"):
        load_pretrained(meta_qwen(str(other)), tmp_path / "nowhere")


# Refusals


def test_refusals(pretrained: Path, tmp_path: Path) -> None:
    for options, says in (
        ({"examples": []}, "there are no examples"),
        ({"examples": [Example((300,), (1,))]}, "token 300 is not in the model's vocabulary of 256"),
        ({"config": TrainConfig(folder="x")}, "a fine-tuned model comes from its folder"),
        ({"config": config("x", recompute="selective")}, "a Hugging Face model takes 'none' or 'full'"),
        ({"config": config("x", seq=200)}, "seq=200 is longer than the model's 128 positions"),
        ({"folder": tmp_path}, "cannot read"),
    ):
        usual = {"config": config("x"), "folder": pretrained, "examples": EXAMPLES}
        with pytest.raises(ValueError, match=says):
            FineTuning(**usual | options)
    with pytest.raises(ValueError, match="no linear layer is called c_attn; there are down_proj"):
        add_lora(meta_qwen(str(pretrained)), targets=["c_attn"])
    with pytest.raises(ValueError, match="rank=0 must be at least 1"):
        add_lora(meta_qwen(str(pretrained)), rank=0)
    with pytest.raises(ValueError, match="has no adapters: call add_lora"):
        save_adapters(meta_qwen(str(pretrained)), tmp_path)
    with pytest.raises(ValueError, match=r"holds no adapters: it has no adapter_config\.json"):
        load_adapters(meta_qwen(str(pretrained)), tmp_path)


def test_examples_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n\n{"prompt": "é", "answer": "e"}\n')
    assert read_examples(file) == [encode("1+1=", "2"), Example((0xC3, 0xA9), (0x65, 0))]
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": 3}\n')
    with pytest.raises(ValueError, match=r'data.jsonl, line 2: expected .* got \'{"prompt": 3}\''):
        read_examples(file)
    with pytest.raises(ValueError, match="cannot read"):
        read_examples(tmp_path / "nowhere")
