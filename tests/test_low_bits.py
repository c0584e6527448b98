"""Few bits: blocks, moments and NF4 beside torchao and bitsandbytes, bit for bit; training in them; their bytes."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lablib.calc.memory import run_config, training_memory
from lablib.calc.memory.formulas import nf4_bytes
from lablib.calc.memory.stage import Stage
from lablib.calc.precision import FORMATS as NUMBERS
from lablib.calc.precision import LEAST_QUANTIZED, MX_ROUNDINGS, find_optimizer, mx_scale
from lablib.calc.precision.recipes import OPTIMIZERS
from lablib.launch.precision import libraries
from lablib.launch.ranks import run_ranks
from lablib.toys.precision import LowBitAdamW, Recipe4, fp4, quantize, quantize_mxfp4, quantize_nvfp4, swap_linears
from lablib.toys.precision.fp8 import E4M3, Fp8Linear
from lablib.toys.precision.low_bit_adamw import FORMATS, State, dynamic_table, nearest, quantized_zeros, tables
from lablib.toys.precision.nf4 import TABLE, quantiles, quantize_nf4
from lablib.toys.transformer import Transformer, tiny_config
from tests.evidence import low_bits
from tests.evidence.facts import ROOT, installed, unpacked

SEED = random.randrange(2**31)
LIBRARIES = {"torchao": "0.18.0", "bitsandbytes": "0.50.2"}


def _with_libraries(*command: str) -> str:
    """Run a module in a process that can import both libraries, and return what it printed."""
    try:
        paths = [str(unpacked(name, version)) for name, version in LIBRARIES.items() if installed(name) != version]
    except (LookupError, OSError) as error:  # not fetched, or nowhere to unpack it
        pytest.skip(str(error))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), *paths))}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def compared() -> dict[str, dict]:
    return json.loads(_with_libraries("tests.low_bit_oracles", str(SEED)))


@pytest.mark.drawn
def test_block_formats_are_torchao_s_bit_for_bit(compared: dict) -> None:
    for kind, least in (("mx", 150_000), ("nvfp4", 50_000)):
        found = compared[kind]
        assert found["blocks"] > least
        assert (found["scales"], found["codes"]) == (0, 0), (kind, SEED)
    assert compared["mx"]["smallest"] < compared["mx"]["blocks"] / 5  # what is excused is the least of the blocks


@pytest.mark.parametrize("states", [name for name in FORMATS if name != "bf16"])
def test_states_are_torchao_s_bit_for_bit(compared: dict, states: str) -> None:
    found = compared[states]
    assert [found[what] for what in ("codes", "scales", "plain", "weights")] == [0, 0, 0, 0], SEED
    assert found["bytes"] == found["their_bytes"]


def test_bitsandbytes_has_the_same_table_and_rounds_on_a_grid(compared: dict) -> None:
    found = compared["bitsandbytes"]
    for moment in ("momentum", "variance"):
        assert found[f"{moment}: table"] == 0
        assert found[f"{moment}: scale"] < 2.0**-22  # a gradient's square, or a product, in another order
        # Its reciprocal of the scale rounds once more: a value on an edge of the grid may fall on the other side.
        assert found[f"{moment}: codes on the grid"] <= 1e-3 * found["values"], SEED
    assert found["variance: codes"] > 10 * found["variance: codes on the grid"]


def test_nf4_is_bitsandbytes_s_bit_for_bit(compared: dict) -> None:
    found = compared["nf4"]
    assert (found["codes"], found["second_scale"]) == (0, 0), SEED
    assert found["mean"] < 2.0**-22
    assert found["scale codes on the grid"] <= 0.01 * found["values"] / 64
    assert found["bytes"] == found["their_bytes"] == sum(nf4_bytes(found["values"]))


@pytest.mark.drawn
def test_real_optimizers_hold_what_the_calculator_says() -> None:
    """The tiny cases of the committed file, measured again."""
    committed = json.loads(low_bits.TABLE.read_text(encoding="utf-8"))
    said = _with_libraries("tests.evidence", "low-bits", "--only", "tiny").splitlines()
    rows = [row for part in ("optimizers", "qlora") for row in committed[part] if "tiny" in row["name"]]
    assert said
    if installed("torch") == committed["how"]["torch"]:
        assert [line.partition(":")[0] for line in said] == [row["name"] for row in rows]
    assert all("states exact" in line for line in said)


def test_the_committed_file_says_what_the_pages_do() -> None:
    committed = json.loads(low_bits.TABLE.read_text(encoding="utf-8"))
    assert low_bits.summary(committed["losses"]) == committed["training"]
    for row in committed["optimizers"]:
        assert row["exact"]
        assert row["predicted_peak"] == pytest.approx(row["peak"], rel=1e-4)
    for row in committed["qlora"]:
        assert row["exact"]
        assert 0 <= row["predicted_peak"] - row["peak"] <= row["matrix"]
    runs, seeds = {row["name"]: row["diverged"] for row in committed["training"]}, committed["how"]["hard_seeds"]
    lost = {states: runs[f"no warm-up, {states} moments"] for states in ("fp32", "8bit", "fp8", "4bit")}
    # Fisher's exact test against none of fp32's, one-sided: the chance that all that diverged lie on one side of two.
    chance = {s: math.comb(seeds, n) / math.comb(2 * seeds, n) for s, n in lost.items()}
    assert [s for s in lost if chance[s] < 0.05] == ["fp8"]
    assert {row["optimizer"] for row in committed["optimizers"]} == {n for n, o in OPTIMIZERS.items() if o.bits}


# --- formats --------------------------------------------------------------------------------------------------


def test_one_input_per_rounding() -> None:
    """448 ends the top binade of E4M3 at 1.75: what each rounding makes of a block whose largest is m * 256."""
    cut = {
        largest: {name: mx_scale(largest, rounding=name) * 448 < largest for name in MX_ROUNDINGS}
        for largest in (256.0, 448.0, 480.0, 495.0, 497.0, 511.0)
    }
    assert not any(any(by.values()) for largest, by in cut.items() if largest <= 448)
    for largest in (480.0, 495.0):
        assert cut[largest] == {"rceil": False, "floor": True, "even": True, "ceil": False}
    for largest in (497.0, 511.0):
        assert cut[largest] == {"rceil": False, "floor": True, "even": False, "ceil": False}
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(64, 32, generator=generator) * torch.exp2(torch.arange(-32, 32))[:, None]
    for name in MX_ROUNDINGS:
        scale = quantize(x, "mx32" if name == "rceil" else f"mx32-{name}").scale_RC.flatten().tolist()
        assert scale == [mx_scale(row.abs().max().item(), rounding=name) for row in x]
        _, fours = quantize_mxfp4(x, name)
        assert fours.flatten().tolist() == [mx_scale(r.abs().max().item(), 6.0, epsilon=0.5, rounding=name) for r in x]


def test_a_linear_layer_in_four_bits_is_its_three_matmuls() -> None:
    generator = torch.Generator().manual_seed(SEED)
    plain = Recipe4(stochastic=False, turned=False)
    layer = Fp8Linear(48, 32, recipe=plain)
    x = torch.randn(2, 16, 48, generator=generator).requires_grad_()
    g = torch.randn(2, 16, 32, generator=generator)
    layer(x).backward(g)
    flat, g_MN, weight = x.detach().flatten(0, 1), g.flatten(0, 1), layer.weight.detach()

    def back(x, **how):
        return quantize_nvfp4(x, **how).dequantize()

    torch.testing.assert_close(layer(x.detach()), (back(flat) @ back(weight, square=True).T + layer.bias).view_as(g))
    torch.testing.assert_close(x.grad.flatten(0, 1), back(g_MN) @ back(weight, square=True))  # one cast of w for both
    torch.testing.assert_close(layer.weight.grad, back(g_MN.T) @ back(flat.T).T)
    exact = g_MN.T @ flat
    draws = [Recipe4(generator=generator).weight_gradient(g_MN, flat) for _ in range(200)]
    off = [((torch.stack(made).mean(0) - exact).norm() / exact.norm()).item() for made in (draws, draws[:1])]
    # x is rounded to nearest in every draw, each time turned otherwise; g by chance. Both average out.
    assert off[0] < off[1] / 3, SEED


def test_scales_without_a_second_level_end_at_a_64th() -> None:
    small = torch.full((1, 16), 1e-5)
    assert quantize_nvfp4(small).dequantize() == pytest.approx(small, rel=0.04)  # half a gap of the block's E4M3 scale
    tiny = torch.tensor([[0.0, -0.0, 2.0**-140, *[0.0] * 13]])  # whose scale has no finite inverse
    assert quantize_nvfp4(tiny).dequantize().flatten()[[0, 1, 3]].tolist() == [0.0] * 3
    alone = quantize_nvfp4(small, two_level=False)
    assert alone.scale_RC.item() == 2.0**-6
    assert not alone.dequantize().any()


@pytest.mark.parametrize("switch", [field.name for field in fields(Recipe4) if field.name != "generator"])
def test_each_ingredient_changes_the_gradients(switch: str) -> None:
    found = []
    by_chance = Recipe4(stochastic=switch != "turned")  # the turn draws signs, and would shift what chance rounds
    for recipe in (by_chance, replace(by_chance, **{switch: False})):
        torch.manual_seed(SEED)
        model = Transformer(tiny_config("gpt2", num_layers=1, hidden=32, max_positions=16))
        swap_linears(model, recipe=replace(recipe, generator=torch.Generator().manual_seed(SEED)))
        model.loss(torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(SEED))).backward()
        found.append(model.blocks[0].mlp.up.weight.grad)
    assert not torch.equal(*found)


def test_mxfp4_is_e2m1_with_a_power_of_two() -> None:
    values, scale = quantize_mxfp4(torch.tensor([[0.3, -5.0, *[0.0] * 30]]))
    assert (scale.item(), values[0, :2].tolist()) == (1.0, [0.5, -4.0])  # -5 lies halfway, and 4 has the even mantissa
    assert NUMBERS["e2m1"].max == fp4.TOP


# --- states ---------------------------------------------------------------------------------------------------


def test_tables() -> None:
    for bits in (4, 8):
        for signed in (True, False):
            table = dynamic_table(bits, signed=signed) if (bits, signed) != (4, False) else tables("4bit")[1]
            assert len(table) == 2**bits
            assert table.diff().min() > 0
            assert table[-1] == 1
            assert (0 in table) is ((bits, signed) != (4, False))
    assert nearest(torch.tensor([-2.0, 2.0]), dynamic_table(8, signed=True)).tolist() == [0, 255]
    torch.testing.assert_close(quantiles(), TABLE, rtol=0, atol=2.0**-22)


@pytest.mark.parametrize("states", ["8bit", "4bit", "fp8"])
def test_no_value_is_further_off_than_half_a_gap_of_its_block(states: str) -> None:
    generator = torch.Generator().manual_seed(SEED)
    block, pair = FORMATS[states], tables(states) or (None, None)
    for moment, table in zip(("momentum", "variance"), pair, strict=True):
        x = torch.randn(LEAST_QUANTIZED // block * 4, block, generator=generator)
        x = (x if moment == "momentum" else x.square()) * torch.logspace(-6, 2, len(x))[:, None]
        state = quantized_zeros(x, table, block)
        state.write(x)
        error = (state.read() - x).abs() / x.abs().amax(1, keepdim=True)
        if table is None:
            gaps = 2.0**-4  # E4M3: half of an eighth
        else:  # half of the widest gap, or what lies below the first value
            gaps = max((table.diff().max() / 2).item(), (table[0] + (1 if moment == "momentum" else 0)).abs().item())
        assert error.max() <= gaps * (1 + 1e-5), (moment, SEED)
        assert (error.amax(1) > gaps / 50).all()  # and every block is rounded, whatever its size


@pytest.mark.parametrize("states", list(FORMATS))
def test_bytes_follow_from_sizes(states: str) -> None:
    torch.manual_seed(SEED)
    sizes = [(64, 128), (100,), (70, 61), (512, 96)]
    parameters = [nn.Parameter(torch.randn(size)) for size in sizes]
    optimizer = LowBitAdamW(parameters, states=states)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    known = find_optimizer(f"adamw-{states}")
    assert optimizer.state_bytes() == sum(known.bytes_of_tensors([math.prod(size) for size in sizes]).values())
    one = known.bytes_of_tensors([256 * 100])["momentum"]
    assert one == known.moment_bytes(256 * 100)["momentum"] + 4 * known.table
    # bf16 moments do not depend on sizes; the others keep small tensors, and torchao those without whole blocks.
    kept = {type(optimizer.state[p]["momentum"]) is State for p in parameters[1:3]}
    assert kept == {False}


def test_blocks_begin_where_shards_begin() -> None:
    """Whole blocks on a rank are the blocks of one process; others are not, or none are left."""

    def states_of(rows: int, columns: int) -> bool:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        generator = torch.Generator().manual_seed(3)
        whole, gradient = (torch.randn(rows, columns, generator=generator) for _ in range(2))
        read = []
        for of in (lambda x: x, lambda x: x.chunk(ranks)[rank].contiguous()):
            parameter = nn.Parameter(of(whole).clone())
            optimizer = LowBitAdamW([parameter])
            parameter.grad = of(gradient)
            optimizer.step()
            state = optimizer.state[parameter]["momentum"]
            read.append(state.read() if isinstance(state, State) else state)
        return torch.equal(read[0].chunk(ranks)[rank], read[1])

    cases = ((128, 96), (66, 256), (128, 98), (64, 96))
    assert [run_ranks(states_of, 2, *case) for case in cases] == [
        [True, True],
        [True, True],
        [False, False],
        [False] * 2,
    ]


def test_fsdp2_counts_the_shards_of_rank_0() -> None:
    """A tensor whose shard is not in whole blocks stays in fp32: more ranks can mean more bytes a parameter."""
    model = tiny_config("llama", num_layers=2, hidden=96)
    how = {"recipe": "fsdp2-mixed-fp32-reduce", "sharding": "fsdp2", "zero": 3, "seq": 64, "implementation": "toy"}
    for ranks in (1, 2, 3, 8):
        found = training_memory(model, dp=ranks, optimizer="adamw-8bit", **how).terms["momentum"]
        shapes = [tuple(p.shape) for p in Transformer(model).parameters()]
        sizes = [math.ceil(shape[0] / ranks) * math.prod(shape[1:]) for shape in shapes]
        quantized = [n for n in sizes if n >= LEAST_QUANTIZED and n % 256 == 0]
        assert found == sum(n + 4 * n // 256 + 1024 for n in quantized) + 4 * (sum(sizes) - sum(quantized))


def test_a_shared_table_is_one_with_experts_too() -> None:
    for zero in (0, 1):
        held = training_memory("mixtral-8x7b", seq=64, zero=zero, optimizer="adamw-8bit-bnb").terms["momentum"]
        stage = Stage(run_config("mixtral-8x7b"), 0)
        sizes = [*stage.sizes("trained", False), *stage.sizes("trained", True)]
        assert held == find_optimizer("adamw-8bit-bnb").bytes_of_tensors(sizes)["momentum"]
        assert sum(sizes) == sum(stage.total_params.values())


def test_nf4_reads_back_within_half_a_gap() -> None:
    x = torch.randn(256, 130, generator=torch.Generator().manual_seed(SEED))
    made = quantize_nf4(x)
    blocks = made.scale.repeat_interleave(64)[: x.numel()].view(x.shape)
    # Half of the widest gap of the table; the scale is off by half a gap of the second table, 0.0035 of its block's.
    bound = (TABLE.diff().max() / 2 + 0.02) * blocks.abs().max()
    assert (made.dequantize() - x).abs().max() < bound
    assert made.nbytes == sum(nf4_bytes(x.numel()))


def test_what_is_missing_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    for name, extra in libraries.EXTRAS.items():
        assert f"pip install -e '.[{extra}]'" in libraries.missing(name)
    with pytest.raises(ValueError, match="torchao is not installed"):
        libraries.mx_blocks(torch.zeros(1, 32), E4M3, "floor")
    with pytest.raises(ValueError, match="unknown states '8 bit'; did you mean 8bit"):
        LowBitAdamW([nn.Parameter(torch.zeros(1))], states="8 bit")
