"""Strategies of activation recomputation: bytes kept, bytes needed in backward, FLOPs repeated, bytes moved to the host.

| strategy | what is kept of the blocks | known as |
|---|---|---|
| none | everything | |
| selective | all but the attention core, which runs again | Korthikanti et al. 2022; Megatron `selective` |
| matmuls | a block's input and the outputs of its matrix products | PyTorch's selective policy |
| full | the input of every block | Megatron `full`, `uniform`, 1 layer |
| every:k | the input of every k-th block; k blocks run again at once | Megatron `uniform`, k layers |
| sqrt | every:k with k about the root of the number of blocks | Chen et al. 2016 (arXiv 1604.06174) |
| first:n | full in the first n blocks, everything in the rest | Megatron `block`, n layers |
| first:n+matmuls | full in the first n blocks, matmuls in the rest; so with +selective | |
| one-in:k | full in every k-th block, everything in the rest | |
| offload | everything, in the host's memory | `torch.autograd.graph.save_on_cpu` |
| full+offload | the input of every block, in the host's memory | both together |

A strategy is a list of units (`recompute_units`): which blocks, and what happens to them. The most that is ever kept is

    peak = max( embedding + Σ stored + head,  max over units i of  embedding + Σ_{j ≤ i} stored_j + transient_i - released_i )

Gradients of activations and workspaces are not in it; `lablib.calc.memory.timeline` has them. FLOPs are those of
`lablib.calc.flops`, matrix products alone; where PyTorch stops a replay early (`early_stop`), the down projection, the
last product of a unit, is not run again unless dropout follows it: `2 n f h` FLOPs less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from lablib.calc.flops import forward_flops, skipped_by_early_stop, step_flops
from lablib.calc.memory.activations.block import embedding_activations, head_activations, layer_activations
from lablib.calc.memory.activations.saved_tensors import SavedTensor, block_tensors
from lablib.calc.memory.implementation import current_names
from lablib.calc.memory.tape import FP32, MASK, BlockSetting
from lablib.calc.models import ModelConfig

NO_WINDOW = {"window": 0, "window_layers": ()}

STRATEGIES = ("none", "selective", "matmuls", "full", "sqrt", "offload", "full+offload")
WITH_NUMBER = ("every", "first", "one-in")
RESTS = ("", "+selective", "+matmuls")  # what "first:n" may do to the rest


@dataclass(frozen=True)
class RecomputeUnit:
    """Consecutive blocks that are treated alike and, if they run again, run again together.

    Attributes:
        first: The first block, from 0.
        length: How many blocks.
        kind: "none", "selective", "matmuls", "full", "offload" or "full+offload".
    """

    first: int
    length: int
    kind: str

    @property
    def name(self) -> str:
        """Its blocks in words: "block 3" or "blocks 3 to 5"."""
        last = self.first + self.length - 1
        return f"block {self.first}" if self.length == 1 else f"blocks {self.first} to {last}"


def recompute_units(strategy: str, num_layers: int) -> list[RecomputeUnit]:
    """Return the units of a strategy, from the first block to the last; a last segment may be shorter.

    Args:
        strategy: One of the table above; "every:3", "first:2+matmuls" and "one-in:2" carry their number.

    Raises:
        ValueError: If the strategy is unknown, or its number is missing, not positive or more than L.
    """
    if num_layers < 1:
        raise ValueError(f"num_layers={num_layers} must be at least 1")
    name, _, number = strategy.partition(":")
    if name not in WITH_NUMBER:
        if strategy not in STRATEGIES:
            known = ", ".join([*STRATEGIES, *(f"{name}:NUMBER" for name in WITH_NUMBER)])
            raise ValueError(f"strategy={strategy!r} is not known; use one of {known}")
        if strategy == "sqrt":
            return segments(sqrt_segment(num_layers), num_layers)
        return [RecomputeUnit(block, 1, strategy) for block in range(num_layers)]
    number, _, rest = number.partition("+") if strategy.endswith(RESTS[1:]) and name == "first" else (number, "", "")
    if not (number.isdecimal() and 1 <= int(number) <= num_layers):
        raise ValueError(f"strategy={strategy!r} needs a number from 1 to the {num_layers} layers: {name}:2")
    k = int(number)
    if name == "every":
        return segments(k, num_layers)
    again = {block for block in range(num_layers) if (block < k if name == "first" else block % k == 0)}
    return [RecomputeUnit(block, 1, "full" if block in again else rest or "none") for block in range(num_layers)]


def every_strategy(num_layers: int) -> list[str]:
    """Return all strategies of the table above, with every number that a model of so many layers allows."""
    numbers = range(1, num_layers + 1)
    first = [f"first:{n}{rest}" for n in numbers[:-1] for rest in RESTS]
    return [*STRATEGIES, *first, *(f"{name}:{k}" for name in ("every", "one-in") for k in numbers)]


def segments(k: int, num_layers: int) -> list[RecomputeUnit]:
    """Cut the blocks into segments of k, the last one of what is left."""
    return [RecomputeUnit(first, min(k, num_layers - first), "full") for first in range(0, num_layers, k)]


@dataclass(frozen=True)
class UnitCost:
    """One unit's share.

    Attributes:
        stored: Bytes that it keeps on the device from forward to backward.
        transient: Bytes that it adds while its backward runs.
        released: Bytes of `stored` that backward has let go of by then: selective recomputation starts in the
            middle of a block, when its MLP is done with.
        extra_flops: FLOPs that it computes again.
        host: Bytes that go to the host in forward and come back in backward.
    """

    unit: RecomputeUnit
    stored: int
    transient: int = 0
    extra_flops: int = 0
    host: int = 0
    released: int = 0


@dataclass(frozen=True)
class RecomputeCost:
    """The cost of a strategy for one micro-batch on one device.

    Attributes:
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
    def replayed_bytes(self) -> int:
        """Bytes that all units add, one after the other, while their backward runs."""
        return sum(unit.transient for unit in self.units)

    @property
    def instants(self) -> list[tuple[str, int]]:
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
        return max(size for _, size in self.instants)

    @property
    def peak_at(self) -> str:
        """When that is: "end of forward" or "backward of block 3"."""
        return max(self.instants, key=lambda pair: pair[1])[0]

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

    def seconds(self, flops: float) -> float:
        """Return the time that it adds to a step: FLOPs again, `flops` of them a second, and copies that nothing hides."""
        if self.host_bytes and self.host_seconds is None:
            raise ValueError(f"strategy={self.strategy!r} moves bytes to the host: give recompute_cost a bandwidth")
        return self.extra_flops / flops + (self.host_seconds or 0)


class _Blocks:
    """Costs of a model's units; blocks of one kind, dense or with experts, cost the same."""

    def __init__(self, setting: BlockSetting, early_stop: bool, reentrant: bool) -> None:
        self.config, self.early_stop, self.reentrant = setting.config, early_stop, reentrant
        self.toy, self.fused, self.drops = setting.implementation == "toy", setting.fused, setting.dropout > 0
        self.batch, self.seq, self.value = setting.batch, setting.seq, setting.value
        names = ("batch", "seq", "bytes_per_value", "dropout", "implementation", "attention")
        self.how = {name: getattr(setting, name) for name in names}
        self.n = self.batch * self.seq
        self.boundary = self.n * self.config.hidden * self.value
        self._known: dict[tuple[bool, str], dict[str, int]] = {}

    def cost(self, unit: RecomputeUnit) -> UnitCost:
        """Return the unit's share."""
        return getattr(self, "_" + unit.kind.replace("+", "_"))(unit)

    @cached_property
    def tensors(self) -> list[SavedTensor]:
        """The tensors that one block keeps; a ValueError where they are not known."""
        return block_tensors(self.config, **self.how)

    def _kept(self, layer: int, recompute: str = "none") -> dict[str, int]:
        key = (self.config.has_experts(layer), recompute)
        if key not in self._known:
            self._known[key] = layer_activations(self.config, layer=layer, recompute=recompute, **self.how)
        return self._known[key]

    def _inside(self, unit: RecomputeUnit) -> int:
        return sum(sum(self._kept(unit.first + i).values()) for i in range(unit.length))

    @property
    def _input_is_kept(self) -> int:
        """The block's input, if its first norm keeps that very tensor and not a cast of it."""
        cast = self.toy and self.config.norm == "rmsnorm" and self.value != FP32
        return 0 if cast else self.boundary

    def _none(self, unit: RecomputeUnit) -> UnitCost:
        return UnitCost(unit, self._inside(unit))

    def _full(self, unit: RecomputeUnit) -> UnitCost:
        transient = self._inside(unit) - self._input_is_kept + (self.boundary if self.reentrant else 0)
        return UnitCost(unit, self.boundary, transient, self._replay_flops(unit))

    def _selective(self, unit: RecomputeUnit) -> UnitCost:
        c, width = self.config, self.n * self.config.attn_width * self.value
        kept = self._kept(unit.first)
        again = self._kept(unit.first, "selective")
        mask = self.n * c.hidden * (self.value if self.toy else MASK) if self.drops else 0
        # Backward comes from behind: MLP, all norms but the first and the output projection are done with.
        norms = kept["norms"] * (c.norms_per_layer - 1) // c.norms_per_layer
        behind = sum(size for kind, size in kept.items() if kind not in ("norms", "attention", "scores"))
        transient = self._toy_core() if self.toy else sum(kept.values()) - sum(again.values())
        if self.reentrant and not (self.toy and self.fused):  # the toy's fused kernel keeps its output anyway
            transient += width
        flops = self._flops(unit.first)["scores"]
        if self.early_stop and not self.fused:
            # q kᵀ runs again; of the product with v backward needs the factors alone.
            flops -= flops * c.value_dim // (c.head_dim + c.value_dim)
        return UnitCost(unit, sum(again.values()), transient, flops, released=norms + behind + width + mask)

    def _toy_core(self) -> int:
        """Bytes that the toy's attention core keeps when it runs again on stored q, k and v."""
        c, width = self.config, self.n * self.config.q_width * self.value
        if self.fused:
            return width + self.n * c.num_heads * FP32
        # Heads are views of the projections; a batched product needs (B, N) as one dim, and copies unless it is.
        copied = self.batch > 1 and self.seq > 1 and c.num_heads > 1
        repeated = c.num_kv_heads < c.num_heads
        keys = 2 * width if repeated or copied else 0
        return self._kept(0)["scores"] + (width if copied else 0) + keys

    def _matmuls(self, unit: RecomputeUnit) -> UnitCost:
        c, n, v = self.config, self.n, self.value
        _ = self.tensors  # raises where they are not known
        scores = n * c.num_heads * FP32 if self.fused else c.num_heads * self.batch * self.seq**2 * v
        products = n * v * (2 * c.q_width + 2 * c.kv_width + (2 if c.gated_mlp else 1) * c.ffn + 2 * c.hidden)
        stored = self.boundary + products + scores
        kept = self._inside(unit) + self.boundary - self._input_is_kept
        if self.toy and self.early_stop and not self.drops:
            kept += n * c.hidden * v  # the output of the down projection, which nothing asks for
        return UnitCost(unit, stored, kept - stored)

    def _offload(self, unit: RecomputeUnit) -> UnitCost:
        operators: dict[str, int] = {}
        for tensor in self.tensors:
            for keeper in tensor.keepers if self.toy else tensor.keepers[:1]:
                operators[keeper] = operators.get(keeper, 0) + tensor.bytes
        if self.toy:
            for keeper, values in self._weights().items():
                operators[keeper] = operators.get(keeper, 0) + values * self.value
        return UnitCost(unit, 0, max(operators.values()), host=sum(operators.values()))

    def _full_offload(self, unit: RecomputeUnit) -> UnitCost:
        rotary = self.toy and not self.config.learned_positions
        tables = 2 * self.seq * self.config.head_dim * self.value if rotary else 0
        # Backward inside backward holds the output, and the input even where the first norm keeps a cast of it.
        held = 2 * self.boundary - self._input_is_kept if self.reentrant else 0
        transient = self._inside(unit) + tables + held
        return UnitCost(unit, 0, transient, self._replay_flops(unit), host=self.boundary + tables)

    def _weights(self) -> dict[str, int]:
        """Values that a block's operators keep beside activations: weights, and rotary tables a layer shares."""
        c = self.config
        q, kv, f = c.hidden * c.q_width, c.hidden * c.kv_width, c.hidden * c.ffn
        kept = {"q projection": q, "k projection": kv, "v projection": kv, "output projection": q}
        kept |= {"up projection": f, "down projection": f} | ({"gate projection": f} if c.gated_mlp else {})
        for number in (1, 2):
            rms = c.norm == "rmsnorm"
            kept[f"weight of norm {number}" if rms else f"norm {number}"] = c.hidden * (1 if rms else 2)
        if not c.learned_positions:
            # Queries and keys are each multiplied with cosines and with sines.
            table = self.seq * c.head_dim
            kept |= {f"{what} of {of}": table for what in ("cosines", "sines") for of in ("q", "k")}
        return kept

    def _flops(self, layer: int) -> dict[str, int]:
        """Forward FLOPs of one layer by component."""
        c = self.config
        dense = int(c.is_moe and not c.has_experts(layer))
        windows = {"window": c.window, "window_layers": (0,)} if layer in c.window_layers else NO_WINDOW
        flops = forward_flops(
            replace(c, num_layers=1, num_dense_layers=dense, **windows), batch=self.batch, seq=self.seq
        )
        return {name: count for name, count in flops.items() if name != "head"}

    def _replay_flops(self, unit: RecomputeUnit) -> int:
        flops = sum(sum(self._flops(unit.first + i).values()) for i in range(unit.length))
        stops = self.early_stop and not self.drops
        return flops - (skipped_by_early_stop(self.config, self.n) if stops else 0)


def recompute_cost(
    config: ModelConfig,
    strategy: str,
    *,
    attention: str = "fused",
    early_stop: bool = False,
    reentrant: bool = False,
    bandwidth: float | None = None,
    **sizes: object,
) -> RecomputeCost:
    """Return what a strategy keeps, needs during backward, computes again and moves, for one micro-batch.

    Args:
        strategy: "none", "selective", "matmuls", "full", "every:k", "sqrt", "first:n", "one-in:k", "offload" or
            "full+offload".
        attention: "plain" or "fused".
        early_stop: Count FLOPs as PyTorch runs them, which leaves out the end of each replay that nothing needs; a
            replay of experts is counted whole. False: a replay is a whole forward pass, as in the papers.
        reentrant: Replays hold their output too, from which backward inside backward starts; never stops early.
        bandwidth: Bytes per second to the host, per direction.
        **sizes: batch, seq, implementation ("paper" or "toy"), bytes_per_value and dropout, as in `layer_activations`.

    Raises:
        ValueError: As `layer_activations` and `recompute_units`; if the bandwidth is not positive; or if "matmuls" or
            "offload" meet experts or latent attention, whose tensors are not listed one by one.
    """
    if bandwidth is not None and bandwidth <= 0:
        raise ValueError(f"bandwidth={bandwidth} must be a positive number of bytes per second")
    sizes = current_names(sizes)
    if sizes.get("implementation") == "hf":
        raise ValueError(
            "implementation='hf' is walked through by memory_timeline(recompute=...); use 'paper' or 'toy'"
        )
    setting = BlockSetting(config=config, attention=attention, **sizes)
    block = _Blocks(setting, early_stop and not reentrant, reentrant)
    units = tuple(block.cost(unit) for unit in recompute_units(strategy, config.num_layers))
    embedding = embedding_activations(config, **sizes)
    if block.toy and not config.learned_positions and all("offload" in unit.unit.kind for unit in units):
        embedding["positions"] = 0  # blocks alone keep the rotary tables, and they keep them on the host
    return RecomputeCost(
        strategy=strategy,
        units=units,
        embedding=sum(embedding.values()),
        head=sum(head_activations(config, **sizes).values()),
        model_flops=step_flops(config, batch=setting.batch, seq=setting.seq).model,
        bandwidth=bandwidth,
    )


@dataclass(frozen=True)
class FrontierPoint:
    """One strategy on the plane of bytes saved and FLOPs paid.

    Attributes:
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
    config: ModelConfig, strategies: Iterable[str], *, batch: int, seq: int, **how: object
) -> list[FrontierPoint]:
    """Return each strategy's bytes saved against extra FLOPs, and which of them another one beats.

    Settings and errors are those of `recompute_cost`: a number larger than the model's layers is one.
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


def cheapest_first(costs: Iterable[RecomputeCost], *, flops: float) -> list[RecomputeCost]:
    """Return strategies from the cheapest on, without those that a cheaper one beats: the first that fits is the cheapest.

    Cheap is what adds little time; of equals what brings back fewer bytes, then what peaks lower.

    Args:
        costs: Those of the strategies that may be taken, `every_strategy` for all, with a bandwidth to the host.
        flops: FLOP/s that the device reaches.
    """
    found: list[RecomputeCost] = []
    for cost in sorted(costs, key=lambda cost: (cost.seconds(flops), cost.replayed_bytes, cost.peak_bytes)):
        if not found or cost.peak_bytes < found[-1].peak_bytes:
            found.append(cost)
    return found


def largest_batch(
    budget_bytes: int, config: ModelConfig, strategy: str, *, seq: int, fixed_bytes: int = 0, **how: object
) -> int:
    """Return the largest batch whose peak fits the budget, 0 if not even one sequence does.

    Args:
        fixed_bytes: What is there whatever the batch: weights, gradients, optimizer.
        **how: As in `recompute_cost`, and so is `strategy`.

    Raises:
        ValueError: As `recompute_cost`, or if a number of bytes is negative.
    """
    if min(budget_bytes, fixed_bytes) < 0:
        raise ValueError(f"budget_bytes={budget_bytes} and fixed_bytes={fixed_bytes} must not be negative")

    def fits(batch: int) -> bool:
        cost = recompute_cost(config, strategy, batch=batch, seq=seq, **how)
        return fixed_bytes + cost.peak_bytes <= budget_bytes

    return largest_that_fits(fits)


def largest_that_fits(fits: Callable[[int], bool]) -> int:
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


def chen_cost(num_layers: int, k: int) -> int:
    """Return what a chain of L equal tensors keeps at most when every k-th is stored: `⌈L / k⌉ + k`.

    Source: Chen et al. 2016 (arXiv 1604.06174).

    Raises:
        ValueError: If k is not from 1 to L.
    """
    if not 1 <= k <= num_layers:
        raise ValueError(f"k={k} must be from 1 to the {num_layers} layers")
    return -(-num_layers // k) + k


def sqrt_segment(num_layers: int) -> int:
    """Return the k with the least `chen_cost`: about √L, and the smallest one where several are equal."""
    return min(range(1, num_layers + 1), key=lambda k: chen_cost(num_layers, k))


def ideal_segment(num_layers: int, boundary: float, inside: float) -> float:
    """Return the segment length with the least peak when layers keep more than their input: `√(L boundary / inside)`.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 3.5, who write it for the number of checkpoints `L / k`.

    Args:
        inside: Bytes that a whole block keeps.

    Raises:
        ValueError: If a number is not positive.
    """
    if min(num_layers, boundary, inside) <= 0:
        raise ValueError(f"num_layers={num_layers}, boundary={boundary}, inside={inside} must be positive")
    return (num_layers * boundary / inside) ** 0.5


def first_blocks(num_layers: int, boundary: int, block: int, room: int) -> int | None:
    """Return how many blocks must run again so that the blocks' bytes never exceed `room`; None if no number does.

    `n = ⌈(L A - M) / (A - x)⌉`. The last block gains nothing: it would be back before anything is gone.

    Args:
        boundary: Bytes of a block's input, x.
        block: Bytes that a whole block keeps, its input included, A.
        room: Bytes that are there for the blocks, M.

    Raises:
        ValueError: If there is no layer, or a block does not keep more than its input.
    """
    if num_layers < 1 or not 0 < boundary < block:
        raise ValueError(
            f"num_layers={num_layers} must be positive, and boundary={boundary} between 0 and block={block}"
        )
    n = max(0, -((room - num_layers * block) // (block - boundary)))
    return n if n < num_layers else None


def hiding_width(flops: float, bandwidth: float, kept: float = 34) -> float:
    """Return the width of a GPT from which on moving activations to the host hides behind the forward pass.

    A token of a block has `kept h` bytes to move and `24 h²` FLOPs to hide them: `h ≥ kept F / (24 W)`.

    Args:
        flops: FLOP/s that the device reaches, F.
        bandwidth: Bytes per second to the host, per direction, W.
        kept: Bytes to move for a token, in units of h; 34 for all of a block, 2 for its input.

    Raises:
        ValueError: If a number is not positive.
    """
    if min(flops, bandwidth, kept) <= 0:
        raise ValueError(f"flops={flops}, bandwidth={bandwidth}, kept={kept} must be positive")
    return kept * flops / (24 * bandwidth)
