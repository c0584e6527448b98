"""The tensors of a run as FSDP2 meets them: shapes, unit by unit, and what rank 0 keeps of each.

A tensor of 10 x 3 on 4 ranks: each keeps ceil(10 / 4) = 3 rows, and the last one has 1. ZeRO's one flat array would
give ceil(30 / 4) = 8 numbers to each. Sums over a model differ by a row a tensor at most, and states are exact only
if it is counted.

Chapter: book/06_fsdp.md. Source: `torch.distributed.fsdp.fully_shard`.
"""

from __future__ import annotations

from collections.abc import Iterable

from lablib.calc.fsdp_units import Shape, padded
from lablib.calc.run_config import RunConfig
from lablib.calc.tensors import Tensor


def tensor_shapes(run: RunConfig, tensors: Iterable[Tensor]) -> list[Shape]:
    """Return the shapes of a rank's tensors, one entry for each copy, before data parallelism shards them.

    Hugging Face's GPT-2 keeps q, k and v in one tensor, and its matrices with inputs first.

    Args:
        run: The run.
        tensors: Some of its tensors.
    """
    shapes: list[Shape] = []
    together = run.kernels.joins_qkv(run.model)
    for tensor in tensors:
        outputs, inputs = tensor.shape(run.tp)
        copies = tensor.local_copies(run.ep)
        if together and tensor.component in ("attention", "mlp"):
            shapes += _conv1d(tensor, outputs, inputs, run.model.hidden)
        else:
            shapes += [(outputs, inputs) if tensor.inputs > 1 else (outputs,)] * copies
    return shapes


def _conv1d(tensor: Tensor, outputs: int, inputs: int, hidden: int) -> list[Shape]:
    matrix = tensor.inputs > 1
    if tensor.component == "mlp" or (matrix and tensor.split == "inputs") or not tensor.split:
        return [(inputs, outputs) if matrix else (outputs,)]
    # q comes alone and stands for all three; k and v come as two copies of one tensor.
    if tensor.copies == 2:
        return []
    return [(inputs, 3 * outputs) if matrix else (3 * outputs,)]


def adapter_shapes(run: RunConfig, tensors: Iterable[Tensor]) -> list[Shape]:
    """Return the shapes of the adapters of these tensors: A is (r, inputs), B is (outputs, r).

    Args:
        run: The run.
        tensors: Some of its tensors.
    """
    if run.tuning == "full":
        return []
    shapes: list[Shape] = []
    for tensor in tensors:
        if tensor.is_adapted and run.lora_targets in ("all", tensor.component):
            outputs, inputs = tensor.shape(run.tp)
            shapes += [(run.lora_rank, inputs), (outputs, run.lora_rank)] * tensor.local_copies(run.ep)
    return shapes


def unit_shapes(run: RunConfig, tensors: Iterable[Tensor]) -> tuple[list[Shape], list[Shape]]:
    """Return the shapes of trained and of frozen tensors.

    Args:
        run: The run.
        tensors: The tensors of a unit.
    """
    whole = tensor_shapes(run, tensors)
    return (whole, []) if run.tuning == "full" else (adapter_shapes(run, tensors), whole)


def shard_params(shapes: Iterable[Shape], ranks: int) -> int:
    """Return the parameters that rank 0 keeps: `Σ ceil(rows / ranks) · row`.

    Args:
        shapes: Shapes of whole tensors.
        ranks: Ranks that share each of them.
    """
    return padded(list(shapes), ranks) // ranks


def in_order(run: RunConfig, tensors: Iterable[Tensor]) -> list[Shape]:
    """Return the shapes of trained tensors in the order in which a model registers them, which is the optimizer's.

    Ours and GPT-2's blocks begin with a norm; in Hugging Face's Llama both norms come behind the MLP. A bias follows
    its matrix.

    Args:
        run: The run.
        tensors: The tensors of a unit.
    """
    tensors = list(tensors)
    norms = unit_shapes(run, [t for t in tensors if "norm" in t.component])[0]
    attention = _with_biases(unit_shapes(run, [t for t in tensors if t.component == "attention"])[0])
    others = [t for t in tensors if "norm" not in t.component and t.component != "attention"]
    rest = _with_biases(unit_shapes(run, others)[0])
    if run.kernels.norms_last(run.model):
        return attention + rest + norms
    half = len(norms) // 2
    return norms[:half] + attention + norms[half:] + rest


def _with_biases(shapes: list[Shape]) -> list[Shape]:
    biases = [shape for shape in shapes if len(shape) == 1]
    ordered: list[Shape] = []
    for shape in shapes:
        if len(shape) > 1:
            ordered.append(shape)
            mine = next((bias for bias in biases if bias[0] in shape), None)
            if mine:
                biases.remove(mine)
                ordered.append(mine)
    return ordered + biases
