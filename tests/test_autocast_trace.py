"""What autocast casts: the trace against autograd's own dtypes, PyTorch's header, and what it costs in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lablib.calc.memory import training_memory
from lablib.launch.precision import gpu_policy, trace_autocast
from lablib.launch.precision.autocast import OpCast
from lablib.toys.transformer import Transformer, tiny_config

WINDOWS = torch.arange(36).view(2, 18) % 256


def _model(family: str = "gpt2", layers: int = 2) -> Transformer:
    return Transformer(tiny_config(family, num_layers=layers, hidden=32))


def test_matmuls_run_low_and_norms_and_loss_run_full() -> None:
    trace = trace_autocast(_model().loss, WINDOWS)
    assert trace.dtypes("addmm") == {"bf16"}
    assert trace.dtypes("mm") == {"bf16"}
    assert trace.dtypes("native_layer_norm") == {"fp32"}
    assert trace.dtypes("_log_softmax") == {"fp32"}
    # Of four additions to the stream in two layers each is fp32 + bf16, which is fp32.
    assert trace.forward[OpCast("add", ("fp32", "bf16"), ("fp32",))] == 4


def test_without_autocast_nothing_is_cast() -> None:
    trace = trace_autocast(_model().loss, WINDOWS, dtype=None)
    assert trace.casts() == trace.casts("backward") == 0
    assert {name for cast in trace.forward for name in (*cast.inputs, *cast.outputs)} == {"fp32"}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_every_weight_is_cast_once(family: str) -> None:
    model, seen = _model(family), {}
    trace = trace_autocast(model.loss, WINDOWS, backward=False)
    # The casts of matrices are the calculator's; biases and activations are cast too.
    casts = training_memory(model.config, recipe="autocast-bf16", seq=17).terms["weight_casts"]
    assert trace.cast_bytes > casts
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    weights = len({m.weight for m in linears})
    biases = sum(m.bias is not None for m in linears)
    readers = 7 if family == "llama" else 4 + 2  # matmuls of a layer: q, k, v, out, up, down (and gate)
    narrowed = trace.forward[OpCast("_to_copy", ("fp32",), ("bf16",))]
    # Inputs that are fp32: those of q, k, v, of up (and gate) and of the head. Those of out and down are bf16 already
    # in GPT-2, and in Llama too; Llama casts its turned queries and keys for attention.
    turned = 2 * 2 if family == "llama" else 0
    inputs = 2 * (readers - 2) + 1
    assert narrowed == weights + biases + inputs + turned, seen


def test_gradients_come_back_in_fp32() -> None:
    model = _model()
    trace = trace_autocast(model.loss, WINDOWS)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert trace.casts("backward") > 0
    assert {name for cast in trace.backward if cast.op == "mm" for name in cast.inputs} == {"bf16"}


def test_gpu_lists_from_pytorchs_header() -> None:
    policy = gpu_policy()
    low = {"linear", "matmul", "mm", "bmm", "addmm", "conv2d", "scaled_dot_product_attention"}
    assert {policy[name] for name in low} == {"lower"}
    assert {policy[name] for name in ("layer_norm", "exp", "log", "pow", "nll_loss", "softmax", "sum")} == {"fp32"}
    assert {policy[name] for name in ("addcdiv", "bilinear", "index_put")} == {"promote"}
    assert "gelu" not in policy
    assert "embedding" not in policy


def test_cpu_and_gpu_lists_differ() -> None:
    # On a GPU softmax, layer_norm and pow are on the list for fp32. A trace on the CPU says what happens there.
    x = torch.randn(4, 4, dtype=torch.bfloat16, requires_grad=True)
    on_cpu = {
        "softmax": trace_autocast(lambda: torch.softmax(x, -1)).dtypes("_softmax"),
        "layer_norm": trace_autocast(lambda: nn.functional.layer_norm(x, (4,))).dtypes("native_layer_norm"),
        "pow": trace_autocast(lambda: x**2).dtypes("pow"),
    }
    policy = gpu_policy()
    assert {policy[name] for name in on_cpu} == {"fp32"}
    assert any(dtypes == {"bf16"} for dtypes in on_cpu.values()), on_cpu
