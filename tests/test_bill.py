"""Bills of training runs: by published rates and prices, as sums of their parts, and as the command prints them."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from lablib.calc.layouts.planner import FRAMEWORKS, MEASURED_RUNS, Training, counted_flops, plan
from lablib.calc.memory import RESERVE
from lablib.calc.params import count_params
from lablib.calc.runs import LLAMA3_FAILURES, Bill, plan_bill
from lablib.calc.runs.bill import STORAGE
from lablib.cli.main import app

#: Meta's model card (meta-llama/llama-models, models/llama3_1/MODEL_CARD.md): H100 hours of the 405B.
LLAMA_405B_HOURS = 30.84e6
#: DeepSeek-V3 (arXiv 2412.19437), table 1: H800 hours of pre-training on 14.8T tokens, in dollars at 2 an hour.
DEEPSEEK_HOURS, DEEPSEEK_DOLLARS = 2.664e6, 5.328e6
JOB = ["plan", "llama-3-8b", "--gpus", "256", "--seq", "8192", "--global-batch", "512"]
EIGHT_B = {"gpus": 256, "seq": 8192, "global_batch": 512}


def bill(**changed):
    common = {"step": (9.0, 10.0, 12.0), "step_tokens": 4e6, "tokens": 1e12, "gpus": 512, "checkpoint_bytes": 1e12}
    return Bill(**common | {"storage": 2e10} | changed)


def test_llama_3_405b_took_the_hours_of_its_model_card():
    # Table 4 of the paper has 430, 400 and 380 TFLOP/s a GPU for its three stages; most of it was 400 on 16,384.
    run = next(run for run in MEASURED_RUNS if run.name == "405B on 16384, 8K")
    params = count_params(run.model).total
    steps = tuple(counted_flops(run, "none") / run.gpus / (rate * 1e12) for rate in (430, 400, 380))
    made = bill(
        step=steps, step_tokens=run.global_batch * run.seq, tokens=15.6e12, gpus=run.gpus, checkpoint_bytes=14 * params,
        storage=STORAGE * run.gpus,
    )  # fmt: skip
    low, _, high = made.gpu_hours
    assert low < LLAMA_405B_HOURS < high
    assert made.goodput > 0.9  # "higher than 90% effective training time", section 3.3.4
    assert made.mtbf == LLAMA3_FAILURES.mtbf


def test_the_predicted_bill_of_llama_s_layout_brackets_what_was_paid():
    published = {"tp": 8, "cp": 1, "pp": 16, "dp": 128, "zero": 2, "virtual_stages": 8, "recompute": "none"}
    framework = replace(FRAMEWORKS["paper"], attention="transformer-engine")
    found = plan(
        "llama-3.1-405b", gpus=16384, seq=8192, global_batch=2048, framework=framework, reserve=RESERVE, **published
    )
    low, _, high = plan_bill(found, tokens=15.6e12).gpu_hours
    assert low < LLAMA_405B_HOURS < high


def test_deepseek_v3_by_the_price_of_its_report():
    # "180K H800 GPU hours" for a trillion tokens, on 2,048: a step of 1e9 tokens takes 180e3 · 3600 / 2048 / 1000 s.
    step = 180e3 * 3600 / 2048 / 1000
    made = bill(step=(step,) * 3, step_tokens=1e9, tokens=14.8e12, gpus=2048, price=2.0)
    assert [hours * made.goodput for hours in made.gpu_hours] == pytest.approx([DEEPSEEK_HOURS] * 3)
    assert [dollars * made.goodput for dollars in made.dollars] == pytest.approx([DEEPSEEK_DOLLARS] * 3)


def test_a_bill_adds_up():
    made = bill(price=3.0, spares=24)
    assert made.steps == 250_000
    assert made.checkpoint == 50
    for step, days, hours, reserved, dollars in zip(
        made.step, made.days, made.gpu_hours, made.reserved_hours, made.dollars, strict=True
    ):
        assert days * 86_400 * made.goodput == pytest.approx(250_000 * step)
        assert hours == pytest.approx(24 * 512 * days)
        assert reserved == pytest.approx(24 * 536 * days)
        assert dollars == pytest.approx(3 * reserved)
    for worse in ({"gpu_mtbf": made.gpu_mtbf / 2}, {"storage": 1e10}, {"restart": 3600.0}, {"gpus": 4096}):
        assert bill(**worse).goodput < made.goodput
    for seconds in (0.5 * made.save_every, 2 * made.save_every):  # the interval is the one that loses least
        shorter_or_longer = made.checkpoint / seconds + seconds / (2 * made.mtbf)
        assert shorter_or_longer > made.checkpoint / made.save_every + made.save_every / (2 * made.mtbf)


def test_the_bill_of_a_plan_has_the_interval_of_runs_like_it_and_whole_nodes():
    found = plan("llama-3-8b", **EIGHT_B)
    made = plan_bill(found, tokens=1e12)
    step, (low, high) = found.best.step, found.like(found.best).interval(found.best.step)
    assert made.step == (min(low, step), step, max(high, step))
    assert made.step[0] < made.step[2]
    # 32 nodes: 5 % are 1.6, so two of 8 GPUs. Weights of 2 bytes, a master copy of 4 and two moments of 4.
    assert made.spares == 16
    assert made.checkpoint_bytes == 14 * count_params(found.load.model).total
    small = replace(found, load=replace(found.load, training=Training(tuning="lora"), cache={}))
    assert plan_bill(small, tokens=1e12).checkpoint_bytes < 0.01 * made.checkpoint_bytes
    assert made.dollars is None
    assert plan_bill(found, tokens=1e12, spares=0).reserved_hours == plan_bill(found, tokens=1e12, spares=0).gpu_hours


def test_where_no_run_is_like_it_the_bill_has_no_interval():
    found = plan("llama-3-8b", gpu="l40s", nic="100gbe", **EIGHT_B)
    made = plan_bill(found, tokens=1e12, price=1.0)
    assert made.step == (found.best.step,) * 3
    assert "No interval of s/step: no measured run is like this" in made.text
    assert " low" not in made.text


def test_the_command_prints_the_bill_of_python():
    made = plan_bill(plan("llama-3-8b", **EIGHT_B), tokens=15e12, price=2.5, storage=40e9, restart=300, spares=0.1)
    how = [*JOB, "--tokens", "15T", "--price", "2.5", "--storage", "40 GB/s", "--restart", "5", "--spares", "0.1"]
    out = CliRunner().invoke(app, how).stdout
    assert out.endswith("\n\n" + made.text + "\n")
    assert max(map(len, out.splitlines())) <= 80
    assert json.loads(CliRunner().invoke(app, [*how, "--json"]).stdout)["bill"] == json.loads(
        json.dumps(made.as_dict())
    )
    assert "Bill" not in CliRunner().invoke(app, JOB).stdout


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--price", "2"], "give --tokens too"),
        (["--storage", "2 GB/s"], "give --tokens too"),
        (["--tokens", "15T", "--price", "0"], "price=0.0 must be a positive number"),
        (["--tokens", "0"], "tokens=0 must be a positive number"),
        (["--tokens", "15T", "--spares", "5"], "give 0 to 1, 5 percent as 0.05"),
        (["--tokens", "15T", "--storage", "2TB"], "has no unit of bandwidth"),
        (["--tokens", "15T", "--export", "torchtitan"], "two different things"),
    ],
)
def test_what_makes_no_bill_is_one_sentence(more, message):
    done = CliRunner().invoke(app, [*JOB, *more])
    assert done.exit_code == 2
    assert message in done.stderr
