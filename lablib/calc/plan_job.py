"""From a layout to the work of a step: pieces of `plan_work`, put together stage by stage."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lablib.calc.comm import ring_all_gather_bytes
from lablib.calc.models import ModelConfig
from lablib.calc.plan_cluster import Cluster
from lablib.calc.plan_layout import Layout, layers_per_stage
from lablib.calc.plan_time import Job, Stage
from lablib.calc.plan_work import Passes, Work, head_work, layer_work
from lablib.calc.recipes import Recipe, recipe
from lablib.calc.tensors import embedding_tensors, head_tensors, layer_tensors


@dataclass
class Workload:
    """What is to be trained, where and how it is counted; it remembers the pieces that layouts share.

    Attributes:
        model: The model.
        cluster: The cluster.
        seq: Tokens in a sequence.
        global_batch: Sequences in a step.
        recipe: Dtypes of the states.
        attention: "fused" or "plain".
        sequence_parallel: Whether tp splits norms and residuals too.
    """

    model: ModelConfig
    cluster: Cluster
    seq: int
    global_batch: int
    recipe: Recipe = field(default_factory=lambda: recipe("mixed-bf16"))
    attention: str = "fused"
    sequence_parallel: bool = True
    _cache: dict = field(default_factory=dict, repr=False)

    @property
    def dropout(self) -> bool:
        """Whether the model trains with dropout: GPT-2 and GPT-3 shapes do, as `activations` assumes."""
        return self.model.family == "gpt2"

    def passes(self, layout: Layout) -> tuple[Passes, Passes, Passes]:
        """Return the work of one dense layer, one layer with experts, and the head."""
        key = "work", layout.tp, layout.cp, layout.ep, layout.micro_batch, layout.recompute
        if key not in self._cache:
            model = self.model
            size = {"micro_batch": layout.micro_batch, "seq": self.seq, "tp": layout.tp, "cp": layout.cp}
            size |= {
                "value": self.recipe.activation,
                "gradient": self.recipe.accumulation or self.recipe.gradients,
            }
            how = {
                "attention": self.attention,
                "sequence_parallel": self.sequence_parallel,
                "dropout": self.dropout,
            }
            layers = [
                layer_work(
                    model, self.cluster, layer=i, ep=layout.ep, recompute=layout.recompute, **size, **how
                )
                for i in (0, model.num_layers - 1)
            ]
            self._cache[key] = (*layers, head_work(model, self.cluster, **size))
        return self._cache[key]

    def params(self, tp: int, ep: int) -> dict[str, tuple[int, int]]:
        """Return (shared, expert) parameters of a rank: of a first layer, a last layer, embedding, and head."""
        key = "params", tp, ep
        if key not in self._cache:
            model = self.model
            units = {
                "first": layer_tensors(model, 0),
                "last": layer_tensors(model, model.num_layers - 1),
                "embedding": embedding_tensors(model),
                "head": head_tensors(model),
                "copy": embedding_tensors(model)[:1] if model.tied else [],
            }
            self._cache[key] = {
                name: tuple(
                    sum(t.local_params(tp, ep) for t in tensors if t.is_expert == expert)
                    for expert in (False, True)
                )
                for name, tensors in units.items()
            }
        return self._cache[key]

    def stages(self, pp: int, virtual_stages: int) -> list[tuple[int, int]]:
        """Return (dense layers, layers with experts) of every stage; dense ones are the first of the model."""
        key = "stages", pp, virtual_stages
        if key not in self._cache:
            sizes = layers_per_stage(self.model.num_layers, pp, virtual_stages)
            left = self.model.num_dense_layers if self.model.is_moe else self.model.num_layers
            split = []
            # With several chunks the first ones of every stage come first; a model's few dense layers are in them.
            for size in sizes:
                share = size // virtual_stages if virtual_stages > 1 and self.model.is_moe else size
                dense = min(left, share)
                left -= dense
                split.append((dense, size - dense))
            self._cache[key] = split
        return self._cache[key]

    def stage_params(self, layout: Layout, stage: int) -> tuple[int, int]:
        """Return (shared, expert) parameters of a rank of a stage.

        Args:
            layout: The layout.
            stage: Its number, from 0.
        """
        units = self.params(layout.tp, layout.ep)
        dense, sparse = self.stages(layout.pp, layout.virtual_stages)[stage]
        parts = [(dense, "first"), (sparse, "last"), (stage == 0, "embedding")]
        if stage == layout.pp - 1:
            parts += [(1, "head"), (layout.pp > 1, "copy")]
        shared, expert = (sum(n * units[name][i] for n, name in parts) for i in (0, 1))
        return shared, expert

    def job(self, layout: Layout) -> Job:
        """Return the step of a layout as work at full rates.

        Args:
            layout: A layout that `check_layout` accepts.
        """
        stages = self._stage_work(layout)
        scatter, gather, optimizer = self._data_parallel(layout)
        tokens = layout.micro_batch * self.seq / layout.cp
        split = layout.tp  # each rank sends its part of the stream; Narayanan et al., section 4.1
        cut = 0 if layout.pp == 1 else 2 * layout.virtual_stages
        link = self.cluster.bandwidth(layout.pp, layout.tp * layout.cp * layout.dp)
        return Job(
            stages=stages,
            micro_batches=layout.num_microbatches(self.global_batch),
            chunks=layout.virtual_stages,
            send=cut * tokens * self.model.hidden * self.recipe.activation / split / link,
            scatter=scatter,
            gather=gather,
            zero=layout.zero,
            optimizer=optimizer,
        )

    def _kinds(self, pp: int, virtual_stages: int) -> tuple[tuple[tuple[int, int, bool], int], ...]:
        """Stages by (dense layers, layers with experts, whether it is the last), and how many are alike."""
        key = "kinds", pp, virtual_stages
        if key not in self._cache:
            cuts = self.stages(pp, virtual_stages)
            found = Counter((*cut, stage == pp - 1) for stage, cut in enumerate(cuts))
            self._cache[key] = tuple(found.items())
        return self._cache[key]

    def _stage_work(self, layout: Layout) -> tuple[Stage, ...]:
        kinds = self._kinds(layout.pp, layout.virtual_stages)
        key = "stage work", layout.tp, layout.cp, layout.ep, layout.micro_batch, layout.recompute, kinds
        if key not in self._cache:
            first, last, head = self.passes(layout)
            found = []
            for (dense, sparse, is_last), count in kinds:
                forward, backward = first.forward.times(dense), first.backward.times(dense)
                if sparse:
                    forward = forward + last.forward.times(sparse)
                    backward = backward + last.backward.times(sparse)
                if is_last:
                    forward, backward = forward + head.forward, backward + head.backward
                found.append(Stage(Passes(forward, backward), count))
            self._cache[key] = tuple(found)
        return self._cache[key]

    def _data_parallel(self, layout: Layout) -> tuple[float, float, float]:
        """Seconds at full rate of scattering gradients, gathering weights, and the optimizer, of the largest stage."""
        key = (
            "data",
            layout.tp,
            layout.cp,
            layout.ep,
            layout.dp,
            layout.pp,
            layout.virtual_stages,
            layout.zero,
        )
        if key in self._cache:
            return self._cache[key]
        sends = [self.stage_params(layout, stage) for stage in {0, layout.pp // 2, layout.pp - 1}]
        shared, expert = max(sends, key=sum)
        ranks, link = layout.dp * layout.cp, self.cluster.bandwidth(layout.dp * layout.cp, layout.tp)
        outer = ranks // layout.ep
        outer_link = self.cluster.bandwidth(outer, layout.tp * layout.ep)
        values = (
            ring_all_gather_bytes(shared, ranks) / link + ring_all_gather_bytes(expert, outer) / outer_link
        )
        own = (shared / ranks + expert / outer) if layout.zero else shared + expert
        # Gradient, master copy and two moments are read, all but the gradient written, and the weight.
        traffic = own * (self.recipe.gradients + 2 * (self.recipe.master + 8) + self.recipe.weights)
        gathered = self.recipe.gathered if layout.zero else self.recipe.gradients
        found = (
            values * self.recipe.gradients,
            values * gathered,
            traffic / self.cluster.gpu.memory_bandwidth,
        )
        # Replicas reduce and gather the same gradients in one all-reduce: both halves wait for backward.
        self._cache[key] = (found[0] + found[1], 0.0, found[2]) if layout.zero == 0 else found
        return self._cache[key]


__all__ = ["Work", "Workload"]
