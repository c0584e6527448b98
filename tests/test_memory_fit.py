"""Inverse questions: every answer is asked forwards again, and small cases are held to trying everything."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from itertools import combinations, product

import pytest

from lablib.calc.hardware import ACCELERATORS, LINKS, accelerator
from lablib.calc.layouts.fit import (
    RunSpec,
    cheapest_change,
    fewest_gpus,
    largest_micro_batch,
    last_within,
    longest_sequence,
    setup,
    size,
)
from lablib.calc.layouts.fit.answers import layouts
from lablib.calc.layouts.fit.changes import SAME, SLOW, TIE, candidate_changes
from lablib.calc.layouts.fit.settings import _planned, least_states, predicted_seconds, step_seconds
from lablib.calc.layouts.planner import host_bytes, plan, step_time
from lablib.calc.memory import LONGEST, RESERVE
from lablib.calc.memory.timeline import memory_timeline
from lablib.calc.models import ModelConfig, preset, preset_names
from lablib.calc.parallel import CPU_ADAM_BYTES, sequence_step
from lablib.calc.params import count_params
from lablib.calc.precision.recipes import RECIPES

TINY = ModelConfig(
    name="tiny", num_layers=4, hidden=48, num_heads=4, num_kv_heads=2, ffn=100, vocab=211, max_positions=512
)
GPT = ModelConfig(
    name="gpt", family="gpt2", num_layers=4, hidden=48, num_heads=4, ffn=192, vocab=211, max_positions=64,
    learned_positions=True, tied=True, norm="layernorm", gated_mlp=False, qkv_bias=True, attn_out_bias=True, mlp_bias=True,
)  # fmt: skip
EXPERTS = replace(TINY, num_experts=4, experts_per_token=2, expert_ffn=100, family="mixtral")
TIMELINE = ("gpt2", "qwen2.5-0.5b")


def card(budget: int):
    """An H100 with so many bytes."""
    return replace(accelerator("h100"), name="small", cuda_bytes=budget, context_bytes=0)


def forwards(spec: RunSpec) -> int:
    """The bytes that a rank needs, asked of the calculator itself."""
    settings = {field.name: getattr(spec.run, field.name) for field in fields(spec.run)}
    return memory_timeline(**settings, step=spec.step).peak_bytes


def draw(seed: int) -> RunSpec:
    """A random run on random cards; sizes that do not divide are drawn again."""
    rng = random.Random(seed)
    while True:
        implementation = rng.choice([*["paper"] * 7, "hf"])
        name = rng.choice(TIMELINE if implementation == "hf" else preset_names())
        split = implementation == "paper"
        chosen = {
            "implementation": implementation,
            "recipe": rng.choice(list(RECIPES)),
            "optimizer": rng.choice(["adamw", "sgd", "adamw-8bit"]),
            "tuning": rng.choice(["full", "full", "lora"]),
            "recompute": rng.choice(["none", "selective", "full"]),
            "attention": rng.choice(["fused", "plain"]),
            "offload": rng.choice(["none", "none", "optimizer"]),
            "zero": rng.choice([0, 1, 2, 3]),
            "tp": rng.choice([1, 2, 4, 8]) if split else 1,
            "sequence_parallel": split and rng.random() < 0.5,
            "cp": rng.choice([1, 1, 2]) if split else 1,
            "pp": rng.choice([1, 1, 2, 4]),
            "micro_batch": rng.randint(1, 3),
            "seq": rng.choice([64, 512, 1024]),
        }
        try:
            return setup(name, gpu=rng.choice(list(ACCELERATORS)), gpus=rng.choice([1, 4, 8, 16, 64]), **chosen)
        except ValueError:
            continue


def test_the_largest_micro_batch_and_the_longest_sequence_round_trip() -> None:
    for seed in range(8):
        spec = draw(seed)
        for ask, name in ((largest_micro_batch, "micro_batch"), (longest_sequence, "seq")):
            found = ask(spec)
            assert found.budget == spec.gpu.usable_bytes - RESERVE
            run = spec.run
            split = {"tp": run.tp, "cp": run.cp, "sequence_parallel": run.sequence_parallel, "cp_way": run.cp_way}
            grain = 1 if name == "micro_batch" else sequence_step(**split)
            if found.value:
                again = spec.replace(**{name: found.value})
                assert found.memory == forwards(again) <= found.budget, seed
                assert found.at == again
                assert found.room == found.budget - found.memory
            if found.beyond is None:
                most = spec.run.model.max_positions if spec.run.model.learned_positions else LONGEST
                assert found.value == most // grain * grain
            else:
                assert found.beyond == found.value + grain
                beyond = spec.replace(**{name: found.beyond})
                assert found.memory_beyond == forwards(beyond) > found.budget, seed


def test_more_sequences_and_tokens_never_need_less() -> None:
    # What halving relies on.
    for seed in range(12):
        spec = draw(seed)
        rng = random.Random(seed)
        for name, grain in (("micro_batch", 1), ("seq", spec.run.cp * spec.run.tp)):
            most = 1024 // grain if name == "seq" else 40
            few, many = sorted(rng.sample(range(1, most), 2))
            small, large = (forwards(spec.replace(**{name: grain * n})) for n in (few, many))
            assert small <= large, (seed, name, few, many)


@pytest.mark.drawn
@pytest.mark.parametrize("model", [TINY, GPT])
@pytest.mark.parametrize("implementation", ["paper", "toy", "hf"])
def test_no_larger_value_was_passed_over(model, implementation) -> None:
    model = replace(model, num_layers=1)
    spec = setup(model, gpu=card(900_000), reserve=0, implementation=implementation, recipe="fp32", seq=16)
    at_batch = [n for n in range(1, 20) if forwards(spec.replace(micro_batch=n)) <= spec.budget]
    assert largest_micro_batch(spec).value == max(at_batch)
    lengths = range(1, 65 if model.learned_positions else 200)
    fitting = [n for n in lengths if forwards(spec.replace(seq=n)) <= spec.budget]
    assert longest_sequence(spec).value == max(fitting)


def test_the_end_of_any_rising_need_is_found() -> None:
    # Straight, bent, with steps, with a wall: against trying every number.
    for seed in range(300):
        rng = random.Random(seed)
        slopes = [rng.choice([0, 1, 1, 7, 50]) for _ in range(60)]
        needs = [sum(slopes[: n + 1]) for n in range(60)] + [float("inf")] * 2000
        budget = rng.randint(0, 400)
        assert last_within(lambda n, needs=needs: needs[min(n, 2000) - 1], budget) == sum(
            one <= budget for one in needs
        ), seed
        square = last_within(lambda n: 3 * n * n + 5, budget)
        assert square == max([n for n in range(1, 40) if 3 * n * n + 5 <= budget], default=0)


def test_nothing_fits_is_an_answer() -> None:
    found = largest_micro_batch("llama-3-70b", gpu="h100", gpus=16)
    assert (found.value, found.memory, found.at, found.room, found.beyond) == (0, 0, None, 0, 1)
    assert found.memory_beyond == memory_timeline("llama-3-70b", dp=16).peak_bytes


def test_the_states_that_the_searches_skip_by_are_never_more_than_what_is_needed() -> None:
    for seed in range(60):
        spec = draw(seed)
        assert least_states(spec) <= forwards(spec), seed
    # And they are most of it where states are: a full model in one place.
    spec = setup("llama-3-8b", gpu="h100", seq=64)
    assert least_states(spec) == count_params(preset("llama-3-8b")).total * 14


def test_the_fewest_gpus_are_the_fewest_of_all_layouts() -> None:
    for model, given in (
        (TINY, {"seq": 64}),
        (TINY, {"seq": 64, "tp": 2}),
        (TINY, {"seq": 64, "zero": 3}),
        (GPT, {"recompute": "full"}),
        (GPT, {"implementation": "toy", "recompute": "full"}),
        (EXPERTS, {"seq": 64}),
        (EXPERTS, {"seq": 64, "implementation": "hf", "sharding": "fsdp2", "zero": 3}),
    ):
        alone = setup(model, gpu=card(10**12), reserve=0, **given).memory
        for share in (0.5, 0.2):
            spec = setup(model, gpu=card(int(share * alone)), reserve=0, gpus_per_node=4, gpus=8, **given)
            found = fewest_gpus(spec)
            numbers = [1, 2, 4, *range(8, 28, 4)]
            does = [n for n in numbers if any(forwards(one) <= spec.budget for one in layouts(spec, n))]
            assert (found.value if 0 < found.value < 28 else None) == min(does, default=None), (given, share)
            if not found.value:
                assert "no number of GPUs is enough" in found.trade
                continue
            assert found.memory == forwards(found.at) <= spec.budget
            assert found.at.gpus == found.value
            assert all(getattr(found.at.run, name) == value for name, value in given.items())
            if found.beyond is not None:
                least = min(forwards(one) for one in layouts(spec, found.beyond))
                assert found.memory_beyond == least > spec.budget


@pytest.mark.parametrize(
    ("how", "fewest"), [({"tp": 3, "gpus": 3}, 3), ({"tp": 3, "gpus": 24}, 3), ({"cp": 7, "seq": 700, "gpus": 7}, 7)]
)
def test_what_was_given_may_not_divide_a_node(how, fewest) -> None:
    spec = setup("gpt2", gpu="t4", **how)
    assert spec.within_budget
    found = fewest_gpus(spec)
    assert (found.value, found.beyond) == (fewest, None)
    assert found.memory == forwards(found.at)


def test_the_last_length_that_cp_divides_is_ended_by_the_positions() -> None:
    found = longest_sequence("gpt2", gpu="h100", cp=7, seq=700)
    assert (found.value, found.beyond) == (1022, None)
    assert "the 1,024 learned positions of gpt2 end it" in found.trade


def test_a_search_ends_where_the_implementation_was_not_measured() -> None:
    """A ring of Hugging Face's Mistral is counted below its window of 4,096 tokens, and two ranks cut four pieces."""
    settings = {"gpu": "a100-80gb", "cp": 2, "implementation": "hf", "recipe": "fp32"}
    small = setup("mistral-7b-v0.1", seq=2048, zero=3, recompute="full", **settings)
    found = longest_sequence(small)
    assert (found.value, found.beyond) == (4092, None)
    assert "longer ones are not counted: implementation='hf' with cp=2 does not know mistral-7b-v0.1" in found.trade
    with pytest.raises(ValueError, match="sliding window"):
        small.replace(seq=4096)
    assert small.replace(seq=4092).within_budget


def test_more_replicas_never_need_more() -> None:
    # What halving a shape relies on: from two replicas on, and two for each expert-parallel group.
    for seed in range(30):
        spec, rng = draw(seed), random.Random(seed)
        ep = rng.choice(
            [n for n in (1, 2, 4) if n == 1 or spec.run.model.num_experts % n == 0 < spec.run.model.num_experts]
        )
        few, many = sorted(rng.sample(range(2, 60), 2))
        at = [forwards(spec.replace(ep=ep, dp=ep * n)) for n in (few, many)]
        assert at[1] <= at[0], (seed, ep, few, many)


def test_fewer_gpus_than_states_need_is_never_an_answer() -> None:
    found = fewest_gpus("llama-3-70b", gpu="h100", seq=8192)
    states = count_params(preset("llama-3-70b")).total * 16
    assert found.value == 24  # 16 hold the states, and not the temporaries of PyTorch's foreach optimizer beside them
    assert fewest_gpus("llama-3-70b", gpu="h100", seq=8192, step="fused").value == 16
    assert states / 16 <= found.budget < states / 8
    # 131,072 tokens: activations decide, and only tp x cp divides those.
    found = fewest_gpus("llama-3.1-70b", gpu="h100")
    assert (found.value, found.at.run.tp * found.at.run.cp) == (64, 64)
    assert fewest_gpus("llama-3.1-70b", gpu="h100", recompute="full").value < 64
    none = fewest_gpus("llama-3.1-70b", gpu="h100", tp=1, cp=1, seq=131072)
    assert (none.value, none.at, none.beyond) == (0, None, None)
    assert none.trade.startswith("no number of GPUs is enough")


SETUPS = [
    ("llama-3-70b", {"gpu": "h100", "gpus": 16, "seq": 8192}),
    ("llama-3-8b", {"gpu": "a100", "gpus": 8, "seq": 4096, "micro_batch": 4}),
    ("llama-3-8b", {"gpu": "a10", "gpus": 4, "seq": 4096}),
    ("llama-3-8b", {"gpu": "h100", "seq": 4096, "implementation": "hf"}),
    ("mixtral-8x7b", {"gpu": "h100", "gpus": 32, "seq": 4096, "num_microbatches": 4}),
    ("gpt2-xl", {"gpu": "a10", "gpus": 2, "micro_batch": 6, "attention": "plain"}),
    ("llama-3-8b", {"gpu": "tpu-v4", "gpus": 8, "seq": 4096}),
]


@pytest.mark.parametrize(("model", "how"), SETUPS, ids=[f"{m}-{h['gpu']}" for m, h in SETUPS])
def test_every_change_fits_and_keeps_what_it_says(model, how) -> None:
    spec = setup(model, **how)
    changes = cheapest_change(spec)
    assert changes
    assert changes == cheapest_change(setup(model, **how)), "the same question has the same answer"
    for change in changes:
        after = change.at
        assert change.memory == forwards(after) <= change.budget
        assert after.gpus == spec.gpus
        for name, value in change.settings.items():
            got = after.step if name == "step" else getattr(after.run, name)
            assert value in (got, getattr(got, "name", None))
        assert size(change.memory) in change.trade
        assert change.seconds == predicted_seconds(after)
        if "seq" not in change.settings:
            assert after.sequences == spec.sequences
            assert after.run.seq == spec.run.seq
        if change.kind == SAME:
            kept = ("model", "recipe", "optimizer", "tuning", "seq", "offload", "implementation")
            assert all(getattr(after.run, name) == getattr(spec.run, name) for name in kept)
    kinds = [change.kind for change in changes]
    assert kinds == sorted(kinds, key=[SAME, "CPU memory", "other training"].index)


@pytest.mark.drawn
@pytest.mark.parametrize("number", [1, 5])
def test_no_cheaper_change_was_passed_over(number) -> None:
    # Every combination of up to three settings, put together here in another way.
    spec = setup(SETUPS[number][0], **SETUPS[number][1])
    values, fitting = candidate_changes(spec), []
    for count in (1, 2, 3):
        for names in combinations(values, count):
            for chosen in product(*(values[name] for name in names)):
                settings = {key: value for part in chosen for key, value in part.items()}
                run = spec.run
                width = 1
                for name in ("tp", "cp", "pp"):
                    width *= settings.get(name, getattr(run, name))
                batch = settings.get("micro_batch", run.micro_batch)
                if spec.gpus % width or spec.sequences % (spec.gpus // width * batch):
                    continue
                dp = spec.gpus // width
                if dp * settings.get("cp", run.cp) == 1 and "zero" in settings:
                    continue
                try:
                    after = spec.replace(**settings, dp=dp, num_microbatches=spec.sequences // (dp * batch))
                    if forwards(after) <= spec.budget:
                        fitting.append((step_seconds(after), set(names)))
                except ValueError:
                    continue
    found = [change for change in cheapest_change(spec) if change.kind == SAME]
    assert bool(found) == bool(fitting)
    if not fitting:
        return
    fastest = min(seconds for seconds, _ in fitting)
    assert fastest <= found[0].seconds <= TIE * fastest
    for one, other in combinations(found, 2):
        assert not one.settings.keys() <= other.settings.keys()
    assert all(change.seconds <= SLOW * found[0].seconds for change in found)


def test_what_fits_needs_no_change() -> None:
    assert cheapest_change("llama-3-8b", gpu="h100", gpus=8, zero=3, seq=2048) == []


def test_a_free_change_is_taken_before_one_that_costs() -> None:
    # DDP's second copy of the gradients is what is too much.
    how = {"gpus": 8, "seq": 1024, "recompute": "full"}
    need = setup("llama-3.2-1b", gpu="h100", gradient_as_bucket_view=True, **how).memory
    found = cheapest_change("llama-3.2-1b", gpu=card(need), reserve=0, **how)
    assert {"gradient_as_bucket_view": True} in [change.settings for change in found]
    plain = memory_timeline("gpt2", attention="fused", micro_batch=8).peak_bytes
    found = cheapest_change("gpt2", gpu=card(plain), reserve=0, micro_batch=8, attention="plain")
    assert found[0].settings == {"attention": "fused"}


def test_offload_is_timed_by_its_link_and_by_the_cpu() -> None:
    params = count_params(preset("llama-3-8b")).total
    spec = setup("llama-3-8b", gpu="h100", dp=8, zero=1, seq=4096)
    away = spec.replace(offload="optimizer")

    def crossing(spec: RunSpec) -> float:
        return host_bytes(*_planned(spec))

    assert crossing(spec) == 0
    assert crossing(away) == pytest.approx(4 * params / 8)
    assert crossing(spec.replace(offload="gradients", num_microbatches=3)) == pytest.approx((3 * 2 + 2) * params / 8)
    whole = spec.replace(offload="parameters", zero=3)
    assert crossing(whole) == pytest.approx((2 + 2 * 2) * params / 8)
    load, layout = _planned(spec)
    on_gpu = step_time(load.step_work(layout), load.rates())["optimizer"]  # which the CPU's update replaces
    extra = step_seconds(away) - step_seconds(spec) + on_gpu
    assert extra == pytest.approx((4 + CPU_ADAM_BYTES) * params / 8 / LINKS["pcie5-x16"].bandwidth)
    assert predicted_seconds(replace(away, gpu=accelerator("gb200"))) is None


def test_the_step_is_the_planners() -> None:
    result = plan("llama-3-8b", gpus=16, gpu="h100", seq=4096, global_batch=64, zero=3, schedule="1f1b")
    for candidate in result.candidates[:20]:
        layout = candidate.layout
        spec = setup(
            "llama-3-8b", gpu="h100", gpus=16, seq=4096, tp=layout.tp, cp=layout.cp, pp=layout.pp, zero=layout.zero,
            shard=layout.shard, micro_batch=layout.micro_batch, recompute=layout.recompute, sequence_parallel=True,
            num_microbatches=layout.num_microbatches(64),
        )  # fmt: skip
        assert spec.sequences == 64
        assert step_seconds(spec) == pytest.approx(candidate.step)


def test_layers_of_stages_are_those_given() -> None:
    """17 chunks on each of 2 stages: the first holds the embedding alone, and only a list says so."""
    job = {"gpu": "gb200", "gpus": 8, "seq": 512, "num_microbatches": 2}
    cut = {"pp": 2, "schedule": "interleaved", "virtual_stages": 17, "layers_per_stage": [16, 16]}
    spec = setup("llama-3-8b", **job, **cut)
    result = plan("llama-3-8b", gpu="gb200", gpus=8, seq=512, global_batch=8, pp=2, virtual_stages=17, dp=4, zero=0)
    mine = next(c for c in result.candidates if c.layout.micro_batch == 1 and c.layout.recompute == "none")
    assert (spec.memory, step_seconds(spec)) == (forwards(spec), pytest.approx(mine.step))
    other = setup("llama-3-8b", **job, pp=2, layers_per_stage=[15, 17])
    assert predicted_seconds(other) is None
    assert other.links()[0] == "No times: layers_per_stage=[15, 17]: the planner times its own cut alone, [16, 16]"
    assert spec.replace(pp=4, dp=2, virtual_stages=4, num_microbatches=4).run.layers_per_stage is None
    assert spec.replace(micro_batch=2).run.layers_per_stage == (16, 16)
    assert setup("gpt2", gpu="b200", gpus=8, recipe="fp32").links()[0].startswith("No times: B200 has no fp32")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"gpus": 12}, "gpus=12 are not whole nodes of gpus_per_node=8; use 8 or 16"),
        ({"gpus": 8, "pp": 5}, "tp=1 x cp=1 x pp=5 = 5 ranks of one replica do not divide gpus=8"),
        ({"gpus": 8, "tp": 2, "dp": 2}, "dp=2 x tp=2 x cp=1 x pp=1 = 4 ranks, but gpus=8"),
        ({"gpus": 0}, "gpus=0 must be a whole number"),
        ({"gpus": 8, "gpus_per_node": True}, "gpus_per_node=True must be"),
        ({"reserve": 10**12}, "reserve=1000000000000 bytes must be at least 0 and less than"),
        ({"gpu": "h1000"}, "unknown accelerator 'h1000'"),
        ({"nic": "fast"}, "unknown link 'fast'"),
        ({"intra": 0}, "intra=0 must be above 0"),
        ({"nic": [1]}, r"nic=\[1\] must be above 0"),
        ({"step": "slow"}, "unknown step 'slow'"),
        ({"zeroo": 3}, "unknown setting 'zeroo'"),
        (
            {"implementation": "toy", "tp": 2, "gpus": 2},
            "implementation='toy' with tp=2 is not known with recipe='mixed-bf16'",
        ),
        ({"step": "slow", "implementation": "hf"}, "unknown step 'slow'"),
    ],
)
def test_bad_input_names_every_factor(how, message) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        setup("llama-3-8b", **{"gpu": "h100", "seq": 4096} | how)
    with pytest.raises(ValueError, match="a RunSpec has all settings: leave out gpus"):
        longest_sequence(setup("gpt2", gpu="h100"), gpus=3)


def test_real_classes_get_context_parallelism_where_a_sequence_is_long() -> None:
    """Their ring is counted, so it is searched; a length is then a multiple of two chunks a rank."""
    job = {"gpu": "h100", "gpus": 16, "implementation": "hf", "sharding": "fsdp2", "recipe": "fsdp2-mixed", "zero": 3}
    spec = setup("llama-3-8b", seq=131072, recompute="full", attention="fused", **job)
    assert not spec.within_budget
    assert any(change.settings.get("cp", 1) > 1 for change in cheapest_change(spec))
    cut = spec.replace(cp=8, dp=2)
    assert longest_sequence(cut).value % 16 == 0
    torchtitan = setup("llama-3-8b", seq=131072, **job | {"implementation": "torchtitan"})
    assert not any(change.settings.get("cp", 1) > 1 for change in cheapest_change(torchtitan))
