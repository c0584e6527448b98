"""Where every byte of an instant comes from: each term with its formula, its numbers, its source and its proof.

    run = run_config("gpt2", implementation="hf", micro_batch=8, seq=1024)
    for line in explain_instant(memory_timeline(run), "peak", run):
        print(line.term, line.bytes, line.formula, line.numbers, line.source)

Letters: ψ parameters of this rank, N ranks that share them, n tokens of a micro-batch on this rank, s tokens of a
sequence, b sequences, h hidden, a heads and k key heads of width d, f inner width, V vocabulary, L blocks, r the rank
of adapters.

A term is "exact" if it follows from counting, "measured" if tests hold it to PyTorch (real tensors, or its trackers
under fake ones), and "unproven" if no oracle on a CPU can see it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lablib.calc.memory.config import RunConfig
from lablib.calc.memory.stage import Stage
from lablib.calc.memory.terms import AUTOGRAD, KORTHIKANTI, Term, find_term
from lablib.calc.memory.timeline.step import MemoryInstant, Step
from lablib.calc.memory.timeline.timeline import MemoryTimeline


@dataclass(frozen=True)
class Explained:
    """One term of one instant.

    Attributes:
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


def explain_instant(timeline: MemoryTimeline, at: str, run: RunConfig, step: str = "foreach") -> list[Explained]:
    """Return the terms of an instant of a timeline, the largest first.

    Args:
        at: "peak" or an instant's name.
        run: The settings that it was made from.

    Raises:
        ValueError: If there is no such instant.
    """
    instant = timeline.instant(at)
    facts = _Facts(run, timeline.stage, step, instant)
    found = [facts.explain(term, size) for term, size in instant.terms]
    return sorted(found, key=lambda line: -line.bytes)


class _Facts:
    """Numbers of a run that explanations need."""

    def __init__(self, run: RunConfig, stage: int, step: str, instant: MemoryInstant) -> None:
        self.run, self.instant = run, instant
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
        known = find_term(term)
        numbers = self._state(size) if known.proof == "exact" else self._transient(known, size)
        proof = known.proof
        if proof != "exact":
            walked = self.run.implementation.eager or term == "optimizer_temporaries"
            seen = proof == "measured" or (proof == "fsdp2" and self.run.sharding == "fsdp2")
            proof = "measured" if walked and seen else "unproven"
        return Explained(term, size, known.formula, numbers, known.source, proof)

    def _state(self, size: int) -> str:
        each = size / self.params
        shared = f", {self.ranks} ranks" if self.ranks > 1 else ""
        return f"ψ = {self.params:,}{shared}: {each:.3g} bytes a parameter"

    def _transient(self, known: Term, size: int) -> str:
        value = {"logits_fp32": 4, "logits_gradients": 4, "logits": self.run.recipe.activation}.get(known.name)
        if value:
            words = self.shapes["n V"] // self.tokens
            return f"n = {self.tokens:,}, V = {words:,}: {size / self.shapes['n V']:g} bytes n V"
        if known.name == "optimizer_temporaries":
            return f"{self.instant.at}: {size:,} bytes for ψ = {self.params:,}"
        if known.running:
            return f"while {self.instant.at or 'nothing'} runs: {self.multiple(size)}"
        return f"{size:,} bytes, ψ = {self.params:,}, N = {self.ranks}"

    def _activation(self, term: str, size: int) -> Explained:
        source = (
            f"{AUTOGRAD}; implementation={self.run.implementation!r}" if self.run.implementation.eager else KORTHIKANTI
        )
        proof = "measured" if self.run.implementation.eager else "exact"
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
