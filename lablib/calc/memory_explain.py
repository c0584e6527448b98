"""Where every byte of a moment comes from: each term with its formula, its numbers, its source and its proof.

    for line in explain_memory("gpt2", kernels="hf", micro_batch=8, seq=1024):
        print(line.term, line.bytes, line.formula, line.numbers, line.source)

Letters: ψ parameters of this rank, N ranks that share them, n tokens of a micro-batch on this rank, s tokens of a
sequence, b sequences, h hidden, a heads and k key heads of width d, f inner width, V vocabulary, L blocks, r the rank
of adapters.

A term is "exact" if it follows from counting, "measured" if tests hold it to PyTorch (real tensors, or its trackers
under fake ones), and "unproven" if no oracle on a CPU can see it.

Chapter: book/01_why_distributed.md
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from os import PathLike

from lablib.calc.memory_stage import Stage
from lablib.calc.memory_timeline import MemoryMoment, MemoryTimeline, memory_timeline
from lablib.calc.models import ModelConfig
from lablib.calc.run_config import RunConfig, run_config, takes_settings
from lablib.calc.timeline_walk import Step

ZERO = "Rajbhandari et al. 2019 (arXiv 1910.02054), section 3.1"
KORTHIKANTI = "Korthikanti et al. 2022 (arXiv 2205.05198), section 4"
AUTOGRAD = "PyTorch, tools/autograd/derivatives.yaml"
ENGINE = "PyTorch, torch/csrc/autograd/engine.cpp"
LOSS = "PyTorch, torch.nn.functional.cross_entropy: log_softmax and nll_loss"
FSDP = "PyTorch, torch/distributed/fsdp/_fully_shard"
PIPELINING = "PyTorch, torch.distributed.pipelining"
ADAM = "PyTorch, torch/optim/adam.py"

#: Term -> formula, source. Numbers are made in `_numbers`.
STATES = {
    "weights": ("bytes of a weight × ψ (/ N where weights are sharded)", ZERO),
    "gradients": ("bytes of a gradient × parameters whose backward is done (/ N where sharded)", ZERO),
    "gradient_accumulation": ("4 ψ", "The Ultra-Scale Playbook (Hugging Face)"),
    "gradient_copy": ("4 ψ / N", "Megatron-LM documentation, distributed optimizer"),
    "master_weights": ("4 ψ (/ N where the optimizer is sharded)", ZERO),
    "momentum": ("bytes of a moment × ψ (/ N)", "Kingma and Ba 2014 (arXiv 1412.6980)"),
    "variance": ("bytes of a moment × ψ (/ N)", "Kingma and Ba 2014 (arXiv 1412.6980)"),
    "quantized_weights": ("ψ / 2", "Dettmers et al. 2023 (arXiv 2305.14314), section 3"),
    "quantization_constants": (
        "ψ / 64 + 4 ψ / (64 × 256)",
        "Dettmers et al. 2023 (arXiv 2305.14314), section 3",
    ),
}
TRANSIENT = {
    "weight_casts": ("bytes of a cast × matrices used so far, until their backward", "PyTorch, torch.amp"),
    "logits": ("bytes of a value × n V", LOSS),
    "logits_fp32": ("4 n V: cross-entropy reads fp32", LOSS),
    "logits_gradients": ("4 n V for log-probabilities, 4 n V for fp32 logits, and the cast back", LOSS),
    "forward_values": ("what forward holds and backward will not need", AUTOGRAD),
    "recomputed_values": ("what the replay holds and backward will not need", AUTOGRAD),
    "recomputed_stream": ("the stream behind attention, which the replay of the block made", AUTOGRAD),
    "recomputed": ("what the replay of the block has made again for its backward", AUTOGRAD),
    "activation_gradients": ("gradients of activations that wait for an operator", ENGINE),
    "adapter_gradients": (
        "bytes of a value × n r: of A x, until A's backward has run, the last of a layer's",
        ENGINE,
    ),
    "operator_temporaries": ("what one operator's backward makes for itself", AUTOGRAD),
    "gathered_weights": ("root and unit in use, whole, at the bytes of a gathered value", FSDP),
    "arriving_weights": ("the unit that is copied out of its buffer, at the bytes of a gathered value", FSDP),
    "all_gather_buffers": ("buffers of the unit in use and of the next, as large as they are", FSDP),
    "unsharded_gradients": ("whole gradients of the unit in use", FSDP),
    "root_gradients": ("whole gradients of the root, which wait for the end of backward", FSDP),
    "new_gradients": ("gradients of parameters that the running operator makes", ENGINE),
    "reduce_scatter_buffers": ("the last unit's gradients, padded, in the dtype of the reduction", FSDP),
    "gradient_buckets": ("DDP's buckets, as large as all gradients", "PyTorch, DistributedDataParallel"),
    "communication_buckets": ("two buckets of ZeRO, or the largest unit", ZERO),
    "dequantized_weights": ("the largest matrix in the compute dtype", "arXiv 2305.14314, section 3"),
    "attention_mask": ("bytes of a value × b s²", "transformers, masking_utils"),
    "tied_gradient": ("bytes of a gradient × V h: the head's, the embedding's and their sum", ENGINE),
    "master_gradients": ("4 ψ / N: an fp32 copy for the optimizer", "torch.optim: one dtype a parameter"),
    "optimizer_temporaries": ("√variance of all tensors (foreach), or of the largest ones (for-loop)", ADAM),
    "stage_outputs": ("bytes of a value × n h × micro-batches in flight", PIPELINING),
    "received_gradient": ("bytes of a value × n h: held until the stage's backward ends", PIPELINING),
    "stage_inputs": ("bytes of a value × n h × micro-batches in flight", PIPELINING),
}
#: Terms that an operator makes, or needs.
WHILE = (
    "forward_values",
    "recomputed",
    "recomputed_stream",
    "recomputed_values",
    "activation_gradients",
    "adapter_gradients",
    "operator_temporaries",
    "new_gradients",
)
#: What no oracle on a CPU sees, and what one sees under FSDP2 alone.
UNPROVEN = ("communication_buckets", "dequantized_weights")
OF_FSDP2 = (
    "gathered_weights",
    "arriving_weights",
    "all_gather_buffers",
    "unsharded_gradients",
    "root_gradients",
    "reduce_scatter_buffers",
)


@dataclass(frozen=True)
class Explained:
    """One term of one moment.

    Attributes:
        term: Its name.
        bytes: Its size.
        formula: How it is counted, in the letters above.
        numbers: The same in this run's numbers.
        source: Where the formula can be checked.
        proof: "exact", "measured" or "unproven".
    """

    term: str
    bytes: int
    formula: str
    numbers: str
    source: str
    proof: str


@takes_settings
def explain_memory(
    model: RunConfig | ModelConfig | str | PathLike,
    *,
    at: str = "peak",
    step: str = "foreach",
    stage: int | None = None,
    out_of_place: bool = False,
    **settings: object,
) -> list[Explained]:
    """Return the terms of a moment, the largest first; their bytes sum to the moment's total.

    Args:
        model: As in `memory_timeline`.
        at: "peak", or the name of a moment of `memory_timeline`.
        step: As in `memory_timeline`.
        stage: As in `memory_timeline`.
        out_of_place: As in `memory_timeline`.
        **settings: Fields of `lablib.calc.run_config.RunConfig`, listed below.

    Raises:
        ValueError: As `memory_timeline`, and if there is no such moment.
    """
    run = run_config(model, **settings)
    return explain_moment(
        memory_timeline(run, step=step, stage=stage, out_of_place=out_of_place), at, run, step
    )


def explain_moment(
    timeline: MemoryTimeline, at: str, run: RunConfig, step: str = "foreach"
) -> list[Explained]:
    """Return the terms of a moment of a timeline, the largest first.

    Args:
        timeline: What `memory_timeline` returned.
        at: "peak" or a moment's name.
        run: The settings that it was made from.
        step: How the optimizer runs.

    Raises:
        ValueError: If there is no such moment.
    """
    moment = timeline.moment(at)
    facts = _Facts(run, timeline.stage, step, moment)
    found = [facts.explain(term, size) for term, size in moment.terms]
    return sorted(found, key=lambda line: -line.bytes)


class _Facts:
    """Numbers of a run that explanations need."""

    def __init__(self, run: RunConfig, stage: int, step: str, moment: MemoryMoment) -> None:
        self.run, self.moment = run, moment
        self.step = Step(Stage(run, stage), step, False)
        self.params = sum(self.step.stage.total_params.values())
        self.ranks = run.replicas(False)
        self.tokens = run.micro_batch * run.seq // run.cp
        c = run.model
        self.shapes = {
            "n f": self.tokens * (c.ffn // run.tp),
            "n h": self.tokens * c.hidden,
            "n a d": self.tokens * (c.q_width // run.tp),
            "n k d": self.tokens * (c.kv_width // run.tp),
            "n a": self.tokens * (c.num_heads // run.tp),
            "n V": self.tokens * -(-c.vocab // run.tp),
            "a b s²": self.tokens * run.seq * (c.num_heads // run.tp),
            "n": self.tokens,
        }
        if run.tuning != "full":
            self.shapes["n r"] = self.tokens * run.lora_rank

    def explain(self, term: str, size: int) -> Explained:
        if term.startswith("activations."):
            return self._activation(term, size)
        if term in STATES:
            formula, source = STATES[term]
            return Explained(term, size, formula, self._state(term, size), source, "exact")
        formula, source = TRANSIENT[term.partition(".")[0]]
        walked = self.run.kernels != "paper" or term == "optimizer_temporaries"
        seen = term not in UNPROVEN and walked and (term not in OF_FSDP2 or self.run.sharding == "fsdp2")
        return Explained(
            term, size, formula, self._transient(term, size), source, "measured" if seen else "unproven"
        )

    def _state(self, term: str, size: int) -> str:
        each = size / self.params
        shared = f", {self.ranks} ranks" if self.ranks > 1 else ""
        return f"ψ = {self.params:,}{shared}: {each:.3g} bytes a parameter"

    def _transient(self, term: str, size: int) -> str:
        value = {"logits_fp32": 4, "logits_gradients": 4, "logits": self.run.recipe.activation}.get(term)
        if value:
            words = self.shapes["n V"] // self.tokens
            return f"n = {self.tokens:,}, V = {words:,}: {size / self.shapes['n V']:g} bytes n V"
        if term == "optimizer_temporaries":
            return f"{self.moment.at}: {size:,} bytes for ψ = {self.params:,}"
        if term.partition(".")[0] in WHILE:
            return f"while {self.moment.at or 'nothing'} runs: {self.multiple(size)}"
        return f"{size:,} bytes, ψ = {self.params:,}, N = {self.ranks}"

    def _activation(self, term: str, size: int) -> Explained:
        source = KORTHIKANTI if self.run.kernels == "paper" else f"{AUTOGRAD}; kernels={self.run.kernels!r}"
        proof = "measured" if self.run.kernels != "paper" else "exact"
        kind = term.removeprefix("activations.")
        if kind in ("embedding", "tokens") or not self.step.blocks:
            what = "token ids" if kind == "tokens" else "positions or rotary tables"
            return Explained(term, size, what, f"{size:,}", source, proof)
        parts = []
        pieces = [("block", len(self.step.blocks), self.step.blocks[-1])]
        if "head" in self.step.ends:
            pieces.append(("head", 1, self.step.ends["head"]))
        for which, times, piece in pieces:
            tensors: Counter[str] = Counter()
            for of, name, bytes_ in piece.tape.kept():
                if (of or "input") == kind:
                    tensors[name] += bytes_
            if tensors:
                parts.append((which, times, tensors))
        formula = "; ".join(
            f"{'each block' if which == 'block' else 'end'}: "
            + " + ".join(f"{self.multiple(size)} ({name})" for name, size in tensors.items())
            for which, _, tensors in parts
        )
        numbers = ", ".join(
            f"{times} × {sum(tensors.values()):,}" if which == "block" else f"end {sum(tensors.values()):,}"
            for which, times, tensors in parts
        )
        return Explained(term, size, formula or "kept by blocks", numbers, source, proof)

    def multiple(self, size: int) -> str:
        """Return bytes as a multiple of one of the run's sizes: "4 n h"."""
        # Bytes of a value come first: 4 n h, and not 1 n f where f = 4 h.
        for times in (2, 4, 1, 6, 8, 12, 16):
            for name, numbers in self.shapes.items():
                if size == times * numbers:
                    return f"{times} {name}"
        return f"{size:,} B"
