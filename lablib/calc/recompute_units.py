"""What one unit of a recomputation strategy stores, adds, computes again and moves; `recompute` adds units up.

Bytes are sums over the tensors of `saved_tensors`; FLOPs are one layer's share of `flops.forward_flops`.

Chapter: book/09_activation_checkpointing.md
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lablib.calc.activations import layer_activations
from lablib.calc.flops import forward_flops
from lablib.calc.models import ModelConfig
from lablib.calc.recompute_plan import Unit
from lablib.calc.saved_tensors import FP32, MASK, SavedTensor, block_tensors


@dataclass(frozen=True)
class UnitCost:
    """One unit's share.

    Attributes:
        unit: Which blocks.
        stored: Bytes that it keeps on the device from forward to backward.
        transient: Bytes that it adds while its backward runs.
        released: Bytes of `stored` that backward has let go of by then: selective recomputation starts in the
            middle of a block, when its MLP is done with.
        extra_flops: FLOPs that it computes again.
        host: Bytes that go to the host in forward and come back in backward.
    """

    unit: Unit
    stored: int
    transient: int = 0
    extra_flops: int = 0
    host: int = 0
    released: int = 0


class Blocks:
    """Costs of a model's units; blocks of one kind, dense or with experts, cost the same."""

    def __init__(self, config: ModelConfig, how: dict, early_stop: bool, reentrant: bool) -> None:
        self.config, self.how, self.early_stop, self.reentrant = config, how, early_stop, reentrant
        self.toy = how["kernels"] == "toy"
        self.fused = how["attention"] == "fused"
        self.batch, self.seq, self.value = how["batch"], how["seq"], how["bytes_per_value"]
        self.n = self.batch * self.seq
        self.boundary = self.n * config.hidden * self.value
        self._known: dict[tuple[bool, str], dict[str, int]] = {}

    def cost(self, unit: Unit) -> UnitCost:
        """Return the unit's share."""
        return getattr(self, "_" + unit.kind.replace("+", "_"))(unit)

    @cached_property
    def tensors(self) -> list[SavedTensor]:
        """What one block keeps, by name; a ValueError where that is not known."""
        return block_tensors(self.config, **self.how)

    def _kept(self, layer: int, recompute: str = "none") -> dict[str, int]:
        key = (self.config.has_experts(layer), recompute)
        if key not in self._known:
            self._known[key] = layer_activations(self.config, layer=layer, recompute=recompute, **self.how)
        return self._known[key]

    def _inside(self, unit: Unit) -> int:
        return sum(sum(self._kept(unit.first + i).values()) for i in range(unit.length))

    @property
    def _input_is_kept(self) -> int:
        """The block's input, if its first norm keeps that very tensor and not a cast of it."""
        cast = self.toy and self.config.norm == "rmsnorm" and self.value != FP32
        return 0 if cast else self.boundary

    def _none(self, unit: Unit) -> UnitCost:
        return UnitCost(unit, self._inside(unit))

    def _full(self, unit: Unit) -> UnitCost:
        transient = self._inside(unit) - self._input_is_kept + (self.boundary if self.reentrant else 0)
        return UnitCost(unit, self.boundary, transient, self._replay_flops(unit))

    def _selective(self, unit: Unit) -> UnitCost:
        c, width = self.config, self.n * self.config.attn_width * self.value
        kept = self._kept(unit.first)
        again = self._kept(unit.first, "selective")
        mask = self.n * c.hidden * (self.value if self.toy else MASK) if self.how["dropout"] else 0
        # Backward comes from behind: MLP, all norms but the first and the output projection are done with.
        norms = kept["norms"] * (c.norms_per_layer - 1) // c.norms_per_layer
        behind = sum(size for kind, size in kept.items() if kind not in ("norms", "attention", "scores"))
        transient = self._toy_core() if self.toy else sum(kept.values()) - sum(again.values())
        if self.reentrant and not (self.toy and self.fused):  # the toy's fused kernel keeps its output anyway
            transient += width
        flops = self._flops(unit.first)["scores"]
        if self.early_stop and not self.fused:
            # q kᵀ runs again; of the product with v backward needs the factors alone.
            flops -= 2 * self.batch * self.seq**2 * c.num_heads * c.value_dim
        return UnitCost(unit, sum(again.values()), transient, flops, released=norms + behind + width + mask)

    def _toy_core(self) -> int:
        """What the toy's attention core keeps when it runs again on stored q, k and v."""
        c, width = self.config, self.n * self.config.q_width * self.value
        if self.fused:
            return width + self.n * c.num_heads * FP32
        # Heads are views of the projections; a batched product needs (B, N) as one dim, and copies unless it is.
        copied = self.batch > 1 and self.seq > 1 and c.num_heads > 1
        repeated = c.num_kv_heads < c.num_heads
        keys = 2 * width if repeated or copied else 0
        return self._kept(0)["scores"] + (width if copied else 0) + keys

    def _matmuls(self, unit: Unit) -> UnitCost:
        c, n, v = self.config, self.n, self.value
        _ = self.tensors  # raises where they are not known
        scores = n * c.num_heads * FP32 if self.fused else c.num_heads * self.batch * self.seq**2 * v
        products = n * v * (2 * c.q_width + 2 * c.kv_width + (2 if c.gated_mlp else 1) * c.ffn + 2 * c.hidden)
        stored = self.boundary + products + scores
        kept = self._inside(unit) + self.boundary - self._input_is_kept
        if self.toy and self.early_stop and not self.how["dropout"]:
            kept += n * c.hidden * v  # the output of the down projection, which nothing asks for
        return UnitCost(unit, stored, kept - stored)

    def _offload(self, unit: Unit) -> UnitCost:
        operators: dict[str, int] = {}
        for tensor in self.tensors:
            for keeper in tensor.keepers if self.toy else tensor.keepers[:1]:
                operators[keeper] = operators.get(keeper, 0) + tensor.bytes
        if self.toy:
            for keeper, values in self._weights().items():
                operators[keeper] = operators.get(keeper, 0) + values * self.value
        return UnitCost(unit, 0, max(operators.values()), host=sum(operators.values()))

    def _full_offload(self, unit: Unit) -> UnitCost:
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
        flops = forward_flops(c, batch=self.batch, seq=self.seq)
        sparse = c.num_layers - c.num_dense_layers if c.is_moe else 0
        parts = ("router", "experts", "shared_experts") if c.has_experts(layer) else ("mlp",)
        number = {"attention": c.num_layers, "scores": c.num_layers, "mlp": c.num_layers - sparse}
        return {
            name: flops[name] // number.get(name, sparse)
            for name in ("attention", "scores", *parts)
            if name in flops
        }

    def _replay_flops(self, unit: Unit) -> int:
        flops = sum(sum(self._flops(unit.first + i).values()) for i in range(unit.length))
        c = self.config
        # Nothing asks for the down projection's output, unless dropout or a norm comes behind it.
        last = not self.how["dropout"] and c.norms_per_layer == 2 and not c.is_moe
        return flops - (2 * self.n * c.ffn * c.hidden if self.early_stop and last else 0)
