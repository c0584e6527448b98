"""What a strategy of activation recomputation keeps, needs for a moment, computes again and moves to the host.

Backward starts with everything that forward stored, and walks back. A unit (see `recompute_plan`) that runs again
adds what its blocks keep, until backward has passed it. So the most that is ever kept is

    peak = max( embedding + Σ stored + head,  max over units i of  embedding + Σ_{j ≤ i} stored_j + transient_i - released_i )

The head is gone once the last block's backward starts. Forward passes under no_grad, gradients of activations and
the workspaces of kernels are not in it: this is what autograd keeps.

FLOPs are those of `lablib.calc.flops`, matrix products alone: "full" runs every block's forward again.
PyTorch stops a replay as soon as it has all that backward asks for (`early_stop`), and the last product of a unit,
the down projection, is then not needed unless dropout follows it: `2 n f h` FLOPs less.

Chapter: book/09_activation_checkpointing.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lablib.calc.activations import embedding_activations, head_activations
from lablib.calc.flops import step_flops
from lablib.calc.implementations import find_implementation
from lablib.calc.models import ModelConfig
from lablib.calc.recompute_plan import plan
from lablib.calc.recompute_units import Blocks, UnitCost

FRONTIER = ("none", "selective", "matmuls", "one-in:2", "full", "every:2", "sqrt", "offload", "full+offload")


@dataclass(frozen=True)
class RecomputeCost:
    """What a strategy costs for one micro-batch on one device.

    Attributes:
        strategy: Its name.
        units: Each unit's share, from the first block to the last.
        embedding: Bytes kept before the first block.
        head: Bytes kept behind the last block: final norm, logits and loss.
        model_flops: Forward and backward without recomputation, the numerator of MFU.
        bandwidth: Bytes per second to the host, per direction; None if not given.
    """

    strategy: str
    units: tuple[UnitCost, ...]
    embedding: int
    head: int
    model_flops: int
    bandwidth: float | None = None

    @property
    def blocks_bytes(self) -> int:
        """Bytes that all blocks keep on the device when forward ends."""
        return sum(unit.stored for unit in self.units)

    @property
    def saved_bytes(self) -> int:
        """Bytes on the device when forward ends: embedding, blocks and head."""
        return self.embedding + self.blocks_bytes + self.head

    @property
    def transient_bytes(self) -> int:
        """The most that one unit adds while its backward runs."""
        return max(unit.transient for unit in self.units)

    @property
    def moments(self) -> list[tuple[str, int]]:
        """Bytes kept at the end of forward and at each unit's backward, in the order of time."""
        found = [("end of forward", self.saved_bytes)]
        stored = self.embedding + self.blocks_bytes
        for unit in reversed(self.units):
            found.append((f"backward of {unit.unit.name}", stored + unit.transient - unit.released))
            stored -= unit.stored
        return found

    @property
    def peak_bytes(self) -> int:
        """The most that is ever kept."""
        return max(size for _, size in self.moments)

    @property
    def peak_at(self) -> str:
        """When that is: "end of forward" or "backward of block 3"."""
        return max(self.moments, key=lambda moment: moment[1])[0]

    @property
    def extra_flops(self) -> int:
        """FLOPs that are computed again."""
        return sum(unit.extra_flops for unit in self.units)

    @property
    def hardware_flops(self) -> int:
        """Forward, backward and recomputation, the numerator of HFU."""
        return self.model_flops + self.extra_flops

    @property
    def overhead(self) -> float:
        """Extra FLOPs over model FLOPs: 1/3 if the whole forward pass runs again."""
        return self.extra_flops / self.model_flops

    @property
    def host_bytes(self) -> int:
        """Bytes that go to the host in forward; as many come back in backward."""
        return sum(unit.host for unit in self.units)

    @property
    def host_seconds(self) -> float | None:
        """Time of both ways, one after the other, if nothing hides them; None without a bandwidth."""
        return None if self.bandwidth is None else 2 * self.host_bytes / self.bandwidth


def recompute_cost(
    config: ModelConfig,
    strategy: str,
    *,
    batch: int,
    seq: int,
    kernels: str = "paper",
    bytes_per_value: int = 2,
    attention: str = "fused",
    dropout: float | None = None,
    early_stop: bool = False,
    reentrant: bool = False,
    bandwidth: float | None = None,
) -> RecomputeCost:
    """Return what a strategy keeps, needs for a moment, computes again and moves, for one micro-batch.

    Args:
        config: The model.
        strategy: "none", "selective", "matmuls", "full", "every:k", "sqrt", "first:n", "one-in:k", "offload" or
            "full+offload"; see `recompute_plan`.
        batch: Sequences in the micro-batch.
        seq: Tokens in a sequence.
        kernels: "paper", or "toy" for what `lablib.toys.transformer` keeps, exactly.
        bytes_per_value: 2 or 4.
        attention: "plain" or "fused".
        dropout: As in `layer_activations`.
        early_stop: Count FLOPs as PyTorch runs them, which leaves out the end of each replay that nothing needs.
            False: a replay is a whole forward pass, as papers and `step_flops` count it. Replays of experts are
            counted whole in either case.
        reentrant: Replays hold their output too, from which backward inside backward starts; never stops early.
        bandwidth: Bytes per second to the host, per direction.

    Raises:
        ValueError: As `layer_activations` and `plan`; if the bandwidth is not positive; or if "matmuls" or "offload"
            meet experts or latent attention, whose tensors are not listed one by one.

    Chapter: book/09_activation_checkpointing.md
    """
    if bandwidth is not None and bandwidth <= 0:
        raise ValueError(f"bandwidth={bandwidth} must be a positive number of bytes per second")
    sizes = {"batch": batch, "seq": seq, "kernels": kernels, "bytes_per_value": bytes_per_value}
    if kernels == "hf":
        raise ValueError(
            "kernels='hf' is walked through by memory_timeline(recompute=...); use 'paper' or 'toy'"
        )
    if dropout is None:
        dropout = find_implementation(kernels).default_dropout(config)
    how = {**sizes, "attention": attention, "dropout": dropout}
    block = Blocks(config, how, early_stop and not reentrant, reentrant)
    units = tuple(block.cost(unit) for unit in plan(strategy, config.num_layers))
    embedding = embedding_activations(config, dropout=dropout, **sizes)
    if block.toy and not config.learned_positions and all("offload" in unit.unit.kind for unit in units):
        embedding["positions"] = 0  # blocks alone keep the rotary tables, and they keep them on the host
    return RecomputeCost(
        strategy=strategy,
        units=units,
        embedding=sum(embedding.values()),
        head=sum(head_activations(config, **sizes).values()),
        model_flops=step_flops(config, batch=batch, seq=seq).model,
        bandwidth=bandwidth,
    )


@dataclass(frozen=True)
class FrontierPoint:
    """One strategy on the plane of bytes saved and FLOPs paid.

    Attributes:
        cost: What it costs.
        bytes_saved: Peak bytes less than without recomputation.
        extra_flops: FLOPs that it computes again.
        dominated_by: A strategy that saves at least as much for no more FLOPs and no more bytes to the host, and
            is better in one of them; "" if there is none.
    """

    cost: RecomputeCost
    bytes_saved: int
    extra_flops: int
    dominated_by: str = ""

    @property
    def strategy(self) -> str:
        """Its name."""
        return self.cost.strategy


def frontier(
    config: ModelConfig, strategies: Iterable[str] = FRONTIER, *, batch: int, seq: int, **how: object
) -> list[FrontierPoint]:
    """Return each strategy's bytes saved against extra FLOPs, and which of them another one beats.

    Args:
        config: The model.
        strategies: Which ones; those whose number is larger than the model's layers are an error.
        batch: Sequences.
        seq: Tokens.
        **how: As in `recompute_cost`.

    Raises:
        ValueError: As `recompute_cost`.
    """
    nothing = recompute_cost(config, "none", batch=batch, seq=seq, **how).peak_bytes
    costs = [recompute_cost(config, strategy, batch=batch, seq=seq, **how) for strategy in strategies]
    price = {c.strategy: (c.peak_bytes, c.extra_flops, c.host_bytes) for c in costs}
    points = []
    for cost in costs:
        own = price[cost.strategy]
        better = (
            name
            for name, other in price.items()
            if other != own and all(theirs <= mine for theirs, mine in zip(other, own, strict=True))
        )
        points.append(FrontierPoint(cost, nothing - cost.peak_bytes, cost.extra_flops, next(better, "")))
    return points


def best_segment(config: ModelConfig, *, batch: int, seq: int, **how: object) -> int:
    """Return the k for which "every:k" has the least peak, by trying all of them; the smallest of equals.

    Args:
        config: The model.
        batch: Sequences.
        seq: Tokens.
        **how: As in `recompute_cost`.
    """
    return min(
        range(1, config.num_layers + 1),
        key=lambda k: recompute_cost(config, f"every:{k}", batch=batch, seq=seq, **how).peak_bytes,
    )


def largest_batch(
    budget_bytes: int, config: ModelConfig, strategy: str, *, seq: int, fixed_bytes: int = 0, **how: object
) -> int:
    """Return the largest batch whose peak fits the budget, 0 if not even one sequence does.

    Args:
        budget_bytes: What there is.
        config: The model.
        strategy: As in `recompute_cost`.
        seq: Tokens in a sequence.
        fixed_bytes: What is there whatever the batch: weights, gradients, optimizer.
        **how: As in `recompute_cost`.

    Raises:
        ValueError: As `recompute_cost`, or if a number of bytes is negative.
    """
    if min(budget_bytes, fixed_bytes) < 0:
        raise ValueError(f"budget_bytes={budget_bytes} and fixed_bytes={fixed_bytes} must not be negative")

    def fits(batch: int) -> bool:
        cost = recompute_cost(config, strategy, batch=batch, seq=seq, **how)
        return fixed_bytes + cost.peak_bytes <= budget_bytes

    return largest(fits)


def largest(fits: Callable[[int], bool]) -> int:
    """Return the largest number from 1 on for which `fits` holds, by doubling and halving; 0 if it fails at 1.

    Args:
        fits: A function of a whole number that holds up to some number and fails from there on.
    """
    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
