"""Sharded training against one process, the ZeRO-3 toy and the calculator's counts.

Why 1e-7: comparisons run in float64, where one gradient carries a rounding error of about 1e-15 from another order
of summation. AdamW divides by sqrt(v) + eps, so an error grows by at most lr / eps = 1e-2 / 1e-8 = 1e6 in a step, and
two steps stay below 1e-8. A slip in the idea (a sum for a mean, a lost micro-batch) moves a weight by lr = 1e-2.
"""

from __future__ import annotations

import random
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lablib.calc.parallel import FSDPTraffic, fsdp_traffic
from lablib.calc.torch_versions import torch_facts
from lablib.launch.fsdp import (
    clip_grad_norm,
    forecast,
    full_state_dict,
    init_transformer,
    make_mesh,
    materialize,
    no_sync,
    shard,
)
from lablib.launch.fsdp.sharding import ShardReport
from lablib.launch.measure import record_comms
from lablib.launch.ranks import run_ranks
from lablib.toys.transformer import Transformer, tiny_config
from lablib.toys.zero import ZeRO3
from tests.processes import new_seed

TOLERANCE = 1e-7
STEPS = 2
MAX_NORM = 0.05  # below the norms that occur, so that clipping does something

#: What is asked of `shard`, and how the step is taken. Four ranks where it takes four, two otherwise. Options that
#: have nothing to do with each other share a run: gradients, weights and messages must be right with all of them.
ON_FOUR: dict[str, dict] = {
    "hybrid": {"mesh": (2, 2)},
    "groups of two": {"reshard_after_forward": 2, "root_reshard": 2},
}
ON_TWO: dict[str, dict] = {
    "none": {"wrap": "none"},
    "block": {"wrap": "block"},
    "linear": {"wrap": "linear"},
    "nested, clip": {"wrap": lambda name, module: name in ("blocks.1", "blocks.1.mlp", "blocks.2"), "clip": True},
    "zero-2": {"reshard_after_forward": False},
    "all, prefetch": {"root_reshard": True, "prefetch": 2},
    "recompute, accumulate": {"recompute": True, "micro_batches": 2, "keep": ("blocks.2",)},
    "no_sync": {"micro_batches": 2, "sync_every": False},
    "keep gathered": {"micro_batches": 2, "sync_every": False, "keep_gathered": True},
}
VARIANTS = ON_FOUR | ON_TWO


def build(seed: int) -> Transformer:
    """GPT-2 with sizes that 4 ranks do not divide, tied, in float64."""
    sizes = random.Random(seed)
    hidden = 6 * sizes.randrange(2, 5)
    config = tiny_config(
        "gpt2", num_layers=3, hidden=hidden, num_heads=3, ffn=sizes.randrange(21, 60, 2), vocab=sizes.randrange(31, 60)
    )
    torch.manual_seed(seed)
    return Transformer(config).double()


def samples(seed: int, vocab: int) -> Tensor:
    """Eight windows for each step, to be shared by the ranks and their micro-batches."""
    return torch.randint(0, vocab, (STEPS, 8, 10), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, windows_BT: Tensor) -> Tensor:
    logits = model(windows_BT[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), windows_BT[:, 1:].flatten())  # all in float64


def adamw(parameters: object) -> torch.optim.Optimizer:
    # One call for all parameters: DTensors pay for every operation.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-8, weight_decay=0.1, fused=True)


def alone(seed: int, clip: bool) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """The same training in one process: weights, losses, gradient norms."""
    model, losses, norms = build(seed), [], []
    optimizer = adamw(model.parameters())
    for windows_BT in samples(seed, model.config.vocab):
        loss = loss_of(model, windows_BT)
        loss.backward()
        if clip:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model.state_dict(), losses, norms


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def mean(value: Tensor) -> float:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def own(windows_BT: Tensor) -> Tensor:
    """This rank's share of a batch."""
    return windows_BT.chunk(dist.get_world_size())[dist.get_rank()]


def traffic_of(report: ShardReport, **accumulation: object) -> FSDPTraffic:
    """The collectives of a step of this model, as the calculator counts them."""
    how = {
        name: getattr(report, name) for name in ("replicas", "reshard", "root_reshard", "param_bytes", "reduce_bytes")
    }
    return fsdp_traffic(report.units, report.shards, **how, **accumulation)


def train(seed: int, variant: str) -> dict[str, object]:
    options = dict(VARIANTS[variant])
    parts = options.pop("micro_batches", 1)
    clip = options.pop("clip", False)
    accumulation = {name: options.pop(name) for name in ("sync_every", "keep_gathered") if name in options}
    model, report = shard(build(seed), **options)
    optimizer = adamw(model.parameters())
    losses, norms = [], []
    for windows_BT in samples(seed, model.config.vocab):
        mine = own(windows_BT).chunk(parts)
        with record_comms() as log:
            total = torch.zeros((), dtype=torch.float64)
            for number, part in enumerate(mine, start=1):
                loss = loss_of(model, part) / parts
                if number < parts and not accumulation.get("sync_every", True):
                    with no_sync(model, keep_gathered=accumulation.get("keep_gathered", False)):
                        loss.backward()
                else:
                    loss.backward()
                total += loss.detach()
        if clip:
            norms.append(clip_grad_norm(model, MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(total))
    traffic = traffic_of(report, micro_batches=parts, **accumulation)
    return {
        "state": full_state_dict(model),
        "losses": losses,
        "norms": norms,
        "seen": sorted((e.op, e.bytes, e.group_size) for e in log.events),
        "counted": sorted((m.op, m.bytes, m.ranks) for m in traffic.messages),
        "sent": (log.ring_bytes_sent(), traffic.ring_bytes_sent()),
    }


def train_on_four(seed: int) -> dict[str, dict[str, object]]:
    result = {variant: train(seed, variant) for variant in ON_FOUR}
    start = build(seed)
    toy = ZeRO3(start, adamw)
    for windows_BT in samples(seed, start.config.vocab):
        toy.backward(loss_of(toy, own(windows_BT)))
        toy.step()
    return result | {"toy": {"state": toy.full_state_dict()}}


def train_on_two(seed: int) -> dict[str, dict[str, object]]:
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # of wrap="linear"
    return {variant: train(seed, variant) for variant in ON_TWO}


@pytest.fixture(scope="module")
def runs() -> tuple[int, dict[str, list[dict]]]:
    """Of every variant, and of everything else that is asked of two ranks, what each rank returned."""
    seed = new_seed()
    by_variant: dict[str, list[dict]] = {}
    for ranks, work in ((4, train_on_four), (2, work_of_two)):
        results = run_ranks(work, ranks, seed, timeout=120)
        by_variant |= {variant: [result[variant] for result in results] for variant in results[0]}
    return seed, by_variant


@pytest.mark.parametrize("variant", [*VARIANTS, "toy"])
def test_equals_one_process(runs: tuple[int, dict], variant: str) -> None:
    """Losses, gradient norms and weights after two steps; and every rank agrees."""
    seed, results = runs
    state, losses, norms = alone(seed, clip=VARIANTS.get(variant, {}).get("clip", False))
    assert distance(state, build(seed).state_dict()) > 1e-3
    for mine in results[variant]:
        assert distance(mine["state"], state) < TOLERANCE
        if variant != "toy":
            assert mine["losses"] == pytest.approx(losses, abs=TOLERANCE)
            assert mine["norms"] == pytest.approx(norms, rel=1e-9)
    if norms:
        assert min(norms) > MAX_NORM


@pytest.mark.parametrize("variant", VARIANTS)
def test_sends_what_the_calculator_says(runs: tuple[int, dict], variant: str) -> None:
    """Every message of the last step: operation, bytes with padding, ranks of its group."""
    for result in runs[1][variant]:
        assert result["seen"] == result["counted"]
        assert result["sent"][0] == pytest.approx(result["sent"][1])


# Hugging Face models, precision, meta device, compile


def hf(name: str) -> nn.Module:
    """A tiny model of Hugging Face's; imported here, since most ranks need none."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 36, "num_key_value_heads": 1}
    if name == "Qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True))
    if name == "Llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
    sizes = {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def train_hf(name: str, **options: object) -> tuple[list[float], dict[str, Tensor], object, bool]:
    torch.manual_seed(3)
    model, optimizer_steps, losses = hf(name).double(), 2, []
    tokens = torch.randint(0, 61, (2, 4, 9), generator=torch.Generator().manual_seed(4))
    agreed, report = True, None
    share = own if options else lambda windows: windows
    if options:
        model, report = shard(model, **options)
    optimizer = adamw(model.parameters())
    for windows in tokens[:optimizer_steps]:
        with record_comms() as log:
            loss = model(input_ids=share(windows), labels=share(windows)).loss
            loss.backward()
        if report is not None:
            agreed &= dict(log.bytes) == dict(traffic_of(report).bytes) and log.calls == traffic_of(report).calls
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = full_state_dict(model) if report else model.state_dict()
    return losses, state, report, agreed


def hugging_face() -> dict[str, object]:
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    result: dict[str, object] = {}
    for name, options in (
        ("Qwen2", {"wrap": "block", "recompute": True}),
        ("Llama", {"wrap": "block", "prefetch": 1}),
        ("GPT-2", {"wrap": "linear"}),
    ):
        losses, state, report, agreed = train_hf(name, **options)
        expected_losses, expected, _, _ = train_hf(name)
        result[f"{name} {options['wrap']}"] = {
            "far": distance(state, expected),
            "agreed": agreed,
            "notes": report.notes,
            "loss": abs(mean(torch.tensor(losses[0], dtype=torch.float64)) - expected_losses[0]),
        }
    return result


def reductions() -> dict[str, object]:
    """By policy: bytes of a value that travels, of one that accumulates unreduced, and what the report says."""
    tokens, found = torch.zeros(1, 9, dtype=torch.long), {}
    stored = {"default": (None, torch.float32), "bf16": (torch.bfloat16, torch.float32)}
    stored |= {"fp32": (torch.float32, torch.float32), "bf16 shards": (None, torch.bfloat16)}
    for name, (reduced, dtype) in stored.items():
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
        model, report = shard(build(1).to(dtype), precision=policy)
        assert {p.dtype for p in model.parameters()} == {dtype}, "shards keep the dtype that the parameters had"
        with record_comms() as log:
            model.loss(tokens).backward()
        values = traffic_of(report).bytes["reduce_scatter"] // report.reduce_bytes
        with no_sync(model):
            model.loss(tokens).backward()
        model.blocks[0].unshard()
        held = {p.grad.itemsize for p in model.blocks[0].parameters() if p.grad is not None}
        found[name] = (log.bytes["reduce_scatter"] / values, held, report.reduce_bytes, report.precision)
    return found


def precision() -> dict[str, object]:
    """bf16: what the blocks see, what is kept, and what is sent."""
    torch.manual_seed(0)
    model, report = shard(Transformer(tiny_config("llama", num_layers=2, hidden=16)), precision="bf16")
    seen = []
    model.blocks[1].mlp.up.register_forward_hook(lambda m, args, out: seen.append((args[0].dtype, out.dtype)))
    with record_comms() as log:
        model.loss(torch.randint(0, 256, (1, 9))).backward()
    return {
        "seen": seen,
        "kept": {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()},
        "bytes": (dict(log.bytes), dict(traffic_of(report).bytes)),
        "text": str(report),
        "reductions": reductions(),
    }


def from_meta() -> dict[str, object]:
    """The toy bit for bit, and a Hugging Face model with its buffers."""
    config = tiny_config("gpt2", num_layers=2, hidden=12, num_heads=3)
    torch.manual_seed(5)
    reference = Transformer(config)
    torch.manual_seed(6)
    reference.init_weights()
    with torch.device("meta"):
        model = Transformer(config)
    model, report = shard(model)
    torch.manual_seed(6)
    materialize(model, init_transformer(config))
    tied = model.head.weight is model.embed.weight
    optimizer = adamw(model.parameters())
    state = full_state_dict(model)
    model.loss(torch.randint(0, 256, (1, 9))).backward()
    optimizer.step()
    with torch.device("meta"):
        qwen = hf("Qwen2")
        qwen.tie_weights()
    qwen, _ = shard(qwen)
    torch.manual_seed(7)
    materialize(qwen)
    frequencies = dict(hf("Qwen2").named_buffers())
    loss = qwen(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss
    loss.backward()
    return {
        "equal": all(torch.equal(state[name], value) for name, value in reference.state_dict().items()),
        "tied": tied,
        "notes": report.notes,
        "steps": len(optimizer.state) == len(list(reference.parameters())),
        "buffers": all(torch.equal(value, frequencies[name]) for name, value in qwen.named_buffers()),
        "loss": loss.item(),
        "state": full_state_dict(qwen),
        "sharded": all(isinstance(p, DTensor) for p in qwen.parameters()),
    }


def compiled() -> float:
    """The backend that generates no code: what is compiled is the block alone, under FSDP's hooks."""
    states = []
    for backend in (False, "eager"):
        torch.manual_seed(2)
        config = tiny_config("gpt2", num_layers=1, hidden=12, num_heads=3)
        model, report = shard(Transformer(config).double(), compile_blocks=backend, recompute=True)
        optimizer = adamw(model.parameters())
        loss_of(model, samples(2, 256)[0, :2]).backward()
        optimizer.step()
        states.append(full_state_dict(model))
    assert report.order == ("recompute", "compile (eager)", "fully_shard")
    return distance(*states)


def refusals() -> None:
    """Every one before anything is changed."""
    model = build(0)
    for options, says in (
        ({"offload": True}, "offload=True moves shards from an accelerator"),
        ({"mesh": (2, 3)}, r"mesh=\(2, 3\) is 2 x 3 = 6 ranks, but there are 2"),
        ({"mesh": (1, 1, 2)}, "use .2,. or .replicas, shards. with product 2"),
        ({"reshard_after_forward": 2}, "reshard_after_forward=2 must divide shards=2"),
        ({"precision": "fp8"}, "precision='fp8' is unknown; use fp32, bf16, fp16"),
        ({"prefetch": 0}, "prefetch=0 must be at least 1"),
        ({"keep": ("head",)}, "'head' is no unit; use blocks.0"),
        ({"wrap": "none", "recompute": True}, "wrap='none' has no units"),
        ({"compile_blocks": "nvcc"}, "compile_blocks='nvcc' is no backend"),
        ({"wrap": "layers"}, "wrap='layers' is unknown"),
    ):
        with pytest.raises(ValueError, match=says):
            shard(model, **options)
    assert not any(isinstance(m, FSDPModule) for m in model.modules())
    scalar = nn.Sequential(nn.Linear(2, 2))
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="scale: FSDP2 splits the first dim, and a scalar has none"):
        shard(scalar, wrap="none")
    with pytest.raises(ValueError, match=r"torch.bfloat16 and torch.float32: a unit is reduced in one dtype"):
        shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()))
    turned = nn.Sequential(nn.Linear(4, 4), nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last))
    with pytest.raises(ValueError, match=r"1\.weight: FSDP2 shards plain memory layouts alone"):
        shard(turned)
    assert type(turned[0].weight) is nn.Parameter
    with pytest.raises(ValueError, match="Transformer is not sharded: call shard"), no_sync(model):
        pass
    with pytest.raises(ValueError, match="max_norm=0 must be above 0"):
        clip_grad_norm(model, 0)
    with pytest.raises(ValueError, match="a process group is there already"):
        forecast(lambda: model, world_size=2, batch=1, seq=4)
    attention, _ = shard(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), wrap="linear")
    assert attention(torch.ones(1, 3, 8)).shape == (1, 3, 8)
    shard(model)
    with pytest.raises(ValueError, match="the model is sharded already"):
        shard(model)
    with pytest.raises(ValueError, match=r"is on cpu: build the model under torch.device"):
        materialize(build(0))
    with torch.device("meta"):
        toy = Transformer(tiny_config("llama", num_layers=1, hidden=16))
    with pytest.raises(ValueError, match=r"norm1 .RMSNorm. has no reset_parameters"):
        materialize(toy)


def work_of_two(seed: int) -> dict[str, object]:
    """One launch for all that two ranks must do: a rank loads its libraries once."""
    refusals()
    others = {"hf": hugging_face(), "bf16": precision(), "meta": from_meta(), "compiled": compiled()}
    return train_on_two(seed) | others


@pytest.fixture(scope="module")
def others(runs: tuple[int, dict[str, list[dict]]]) -> list[dict]:
    """Of each of two ranks what it found besides the variants."""
    results = runs[1]
    return [{name: results[name][rank] for name in ("hf", "bf16", "meta", "compiled")} for rank in range(2)]


def test_hugging_face_models(others: list[dict]) -> None:
    for rank in others:
        for name, result in rank["hf"].items():
            assert result["far"] < TOLERANCE, name
            assert result["loss"] < 1e-6, name  # Hugging Face takes the mean over tokens in fp32
            assert result["agreed"], name
        tied = [name for name, result in rank["hf"].items() if any("tied:" in n for n in result["notes"])]
        assert tied == ["Qwen2 block", "GPT-2 linear"]
        assert any("use_cache" in note for note in rank["hf"]["Qwen2 block"]["notes"])


def test_bf16_computes_in_bf16_and_keeps_fp32(others: list[dict]) -> None:
    seen = others[0]["bf16"]
    assert seen["seen"] == [(torch.bfloat16, torch.bfloat16)]
    assert seen["kept"] == {torch.float32}
    assert seen["bytes"][0] == seen["bytes"][1]
    for says in ("2 cpu ranks share every parameter", "gathered and computed in bfloat16", "blocks.0 ... blocks.1, 2"):
        assert says in seen["text"]


def test_the_dtype_of_the_reduction_is_what_travels(others: list[dict]) -> None:
    """Without `reduce_dtype` versions differ; the bytes are those of the recorded reduce-scatters."""
    seen = others[0]["bf16"]["reductions"]
    default = 4 if torch_facts(torch.__version__).fsdp2_reduces_as_stored else 2
    assert {name: found[0] for name, found in seen.items()} == {
        "default": default,
        "bf16": 2,
        "fp32": 4,
        "bf16 shards": 2,
    }
    assert seen["default"][1] == {default}
    for travels, _, says, words in seen.values():
        assert says == travels
        assert words.endswith("gradients reduced in " + ("float32" if travels == 4 else "bfloat16"))


def test_meta_device(others: list[dict]) -> None:
    first, second = (rank["meta"] for rank in others)
    for seen in (first, second):
        assert all(seen[fact] for fact in ("equal", "tied", "steps", "buffers", "sharded")), seen
        assert any("call materialize" in note for note in seen["notes"])
        assert abs(seen["loss"] - 4.11) < 0.3  # ln 61: untrained
    assert distance(first["state"], second["state"]) == 0
    assert len(first["state"]["model.embed_tokens.weight"].unique()) > 800  # drawn, and not repeated by rank


def test_compiled_blocks(others: list[dict]) -> None:
    assert max(rank["compiled"] for rank in others) < TOLERANCE


def test_no_process_group() -> None:
    with pytest.raises(ValueError, match="no process group: call this inside run_ranks"):
        make_mesh()
