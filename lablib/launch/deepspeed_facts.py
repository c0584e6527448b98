"""What DeepSpeed holds on every rank, counted tensor by tensor on gloo, and its record.

    python -m lablib.launch.deepspeed_facts            # measures anew and compares with the record
    python -m lablib.launch.deepspeed_facts --write    # makes the record: book/data/memory_deepspeed.json

It needs the optional extra: pip install -c constraints.txt -e '.[deepspeed]'.

The counting asks DeepSpeed's optimizer for the tensors behind each name, counts every storage once, and then looks
for tensors that no name has: they must be next to nothing, or a term was forgotten.

Chapter: book/05_zero.md. Source: DeepSpeed, runtime/zero/stage_1_and_2.py and stage3.py.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lablib.calc.memory_cases import case_model
from lablib.calc.memory_headline import TABLE, read_table
from lablib.launch.experiments import write_json
from lablib.launch.peers import installed_version
from lablib.launch.ranks import run_ranks
from lablib.toys.transformer import Transformer

RECORD = TABLE.with_name("memory_deepspeed.json")
#: Ranks, family, stage, recipe, and what differs in zero_optimization from DeepSpeed's defaults.
ROWS: tuple[tuple[int, str, int, str, dict[str, Any]], ...] = (
    (2, "llama", 0, "mixed-bf16", {}),
    (2, "llama", 1, "mixed-bf16", {"reduce_bucket_size": 20_000, "overlap_comm": True}),
    (2, "llama", 3, "mixed-bf16", {"reduce_bucket_size": 20_000}),
    (3, "gpt2", 1, "mixed-bf16", {"reduce_bucket_size": 30_000}),
    (3, "gpt2", 2, "fp32", {"reduce_bucket_size": 20_000}),
    (3, "gpt2", 3, "fp32", {"reduce_bucket_size": 20_000, "stage3_param_persistence_threshold": 0}),
    (4, "gpt2", 2, "mixed-bf16", {"reduce_bucket_size": 5_000, "overlap_comm": True}),
    (4, "llama", 2, "mixed-bf16", {"reduce_bucket_size": 20_000}),
    (4, "gpt2", 3, "mixed-bf16", {"reduce_bucket_size": 20_000, "stage3_param_persistence_threshold": 1000}),
)
Row = dict[str, Any]


def measure_rows(rows: Iterable[tuple[int, str, int, str, dict[str, Any]]] = ROWS) -> list[Row]:
    """Return a row for each setting, with the bytes by term of every rank.

    Args:
        rows: As in `ROWS`; those of equal numbers of ranks share processes.

    Raises:
        ModuleNotFoundError: If DeepSpeed is not installed.
    """
    rows = list(rows)
    found: list[Row] = []
    for ranks in dict.fromkeys(row[0] for row in rows):
        own = [row[1:] for row in rows if row[0] == ranks]
        of_ranks = run_ranks(count_rows, ranks, own, timeout=900, env={"DS_ACCELERATOR": "cpu"})
        for number, (family, stage, recipe, changes) in enumerate(own):
            how = {"ranks": ranks, "family": family, "stage": stage, "recipe": recipe, "changes": changes}
            found.append(how | {"measured": [rank[number] for rank in of_ranks]})
    return found


def count_rows(rows: list[tuple[str, int, str, dict[str, Any]]]) -> list[dict[str, int]]:
    """Count this rank's bytes for each row; to be called inside of a process group.

    Args:
        rows: Family, stage, recipe and changes of each.
    """
    warnings.simplefilter("ignore")
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    import deepspeed

    # Its all-reduce through shared memory would be compiled first, which takes minutes and changes no byte here.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    logging.disable(logging.WARNING)
    return [_count(deepspeed, *row) for row in rows]


def _count(deepspeed: Any, family: str, stage: int, recipe: str, changes: dict[str, Any]) -> dict[str, int]:
    gc.collect()
    before = sum(_alive().values())
    model = Transformer(case_model(family, "tiny"))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, **changes},
        # PyTorch's AdamW: DeepSpeed's own would be compiled.
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": recipe == "mixed-bf16"},
    }
    parameters = list(model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters, config=config, dist_init_required=False
    )
    buckets = [0]
    _note_buckets(engine.optimizer, buckets)
    _train(engine)
    engine.step()
    _train(engine)
    gc.collect()  # hooks and what they watch hold each other
    terms, claimed = {}, {}
    for name, tensors in _terms(engine.optimizer, parameters, stage).items():
        storages = _storages(tensors)
        terms[name] = sum(size for place, size in storages.items() if place not in claimed)
        claimed |= storages
    terms["communication_buckets"] = max(buckets[0], terms["communication_buckets"])
    terms["other"] = sum(size for place, size in _alive().items() if place not in claimed) - before
    engine.step()
    engine.destroy()
    return terms


def _train(engine: Any) -> None:
    tokens = torch.arange(33)[None]
    logits = engine(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    engine.backward(loss)


def _note_buckets(optimizer: Any, largest: list[int]) -> None:
    """Look at the buckets of stages 1 and 2 whenever they are emptied; behind backward they are gone."""
    if not hasattr(optimizer, "reduce_ipg_grads"):
        return
    reduce = optimizer.reduce_ipg_grads

    def noted(*args: Any, **how: Any) -> Any:
        largest[0] = max(largest[0], sum(buffer.nbytes for buffer in _buckets(optimizer)))
        return reduce(*args, **how)

    optimizer.reduce_ipg_grads = noted


def _buckets(optimizer: Any) -> list[Tensor]:
    buffers = [bucket.buffer for bucket in getattr(optimizer, "ipg_buckets", {}).values()]
    lists = [buffer if isinstance(buffer, list) else [buffer] for buffer in buffers]
    return [buffer for several in lists for buffer in several if buffer is not None]


def _terms(optimizer: Any, parameters: list[nn.Parameter], stage: int) -> dict[str, list[Tensor | None]]:
    """Name DeepSpeed's tensors; a storage counts for the first name that has it."""
    terms: dict[str, list[Tensor | None]] = {}
    if stage == 3:
        terms["weights"] = [p.ds_tensor for p in parameters]
        terms["persistent_weights"] = [p.data for p in parameters]
        terms["gradients"] = [optimizer.grad_partitions_flat_buffer]
        masters = optimizer.fp32_partitioned_groups_flat
    else:
        terms["weights"] = [p.data for p in parameters]
        kept = getattr(optimizer, "averaged_gradients", {}).values()
        terms["gradients"] = [p.grad for p in parameters] + [t for group in kept if group for t in group]
        masters = (
            [p for group in optimizer.fp32_groups for p in group]
            if stage == 0
            else optimizer.single_partition_of_fp32_groups
        )
    terms["master_weights"] = masters
    states = list(optimizer.optimizer.state.values())
    terms["momentum"] = [state["exp_avg"] for state in states]
    terms["variance"] = [state["exp_avg_sq"] for state in states]
    terms["communication_buckets"] = _buckets(optimizer)
    return terms


def _storages(tensors: Iterable[Tensor | None]) -> dict[int, int]:
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def _alive() -> dict[int, int]:
    # isinstance() would ask proxies that importing frameworks leaves around.
    return _storages(
        found for found in gc.get_objects() if issubclass(type(found), Tensor) and found.device.type == "cpu"
    )


def record(rows: list[Row]) -> dict[str, Any]:
    """Return the record of rows with the versions that made it.

    Args:
        rows: From `measure_rows`.
    """
    return {"versions": {name: installed_version(name) for name in ("deepspeed", "torch")}, "rows": rows}


def main(arguments: list[str], path: Path = RECORD) -> int:
    """Measure, and write the record or compare with it; return 0 if they agree.

    Args:
        arguments: "--write" or nothing.
        path: Of the record.
    """
    found = record(measure_rows())
    if "--write" in arguments:
        write_json(path, found)
        print(f"wrote {path}")
        return 0
    old = read_table(path)
    moved = [new for new, was in zip(found["rows"], old["rows"], strict=True) if new != was]
    for row in moved:
        print(f"moved: {row}")
    print(
        f"{len(old['rows']) - len(moved)} of {len(old['rows'])} rows are as recorded with {old['versions']}"
    )
    return 1 if moved else 0


if __name__ == "__main__":
    # By its own name, so that ranks can import what they run.
    from lablib.launch.deepspeed_facts import main as run

    sys.exit(run(sys.argv[1:]))
