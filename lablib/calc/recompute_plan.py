"""Strategies of activation recomputation, each as a list of units: which blocks, and what happens to them.

| strategy | what is kept of the blocks | known as |
|---|---|---|
| none | everything | |
| selective | all but the attention core, which runs again | Korthikanti et al. 2022; Megatron `selective` |
| matmuls | a block's input and the outputs of its matrix products | PyTorch's selective policy |
| full | the input of every block | Megatron `full`, `uniform`, 1 layer |
| every:k | the input of every k-th block; k blocks run again at once | Megatron `uniform`, k layers |
| sqrt | every:k with k about the root of the number of blocks | Chen et al. 2016 (arXiv 1604.06174) |
| first:n | full in the first n blocks, everything in the rest | Megatron `block`, n layers |
| one-in:k | full in every k-th block, everything in the rest | |
| offload | everything, in the host's memory | `torch.autograd.graph.save_on_cpu` |
| full+offload | the input of every block, in the host's memory | both together |

Chapter: book/09_activation_checkpointing.md
"""

from __future__ import annotations

from dataclasses import dataclass

STRATEGIES = ("none", "selective", "matmuls", "full", "sqrt", "offload", "full+offload")
WITH_NUMBER = ("every", "first", "one-in")


@dataclass(frozen=True)
class Unit:
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


def plan(strategy: str, num_layers: int) -> list[Unit]:
    """Return the units of a strategy, from the first block to the last; a last segment may be shorter.

    Args:
        strategy: One of the table above; "every:3", "first:2" and "one-in:2" carry their number.
        num_layers: L.

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
        return [Unit(block, 1, strategy) for block in range(num_layers)]
    if not (number.isdecimal() and 1 <= int(number) <= num_layers):
        raise ValueError(f"strategy={strategy!r} needs a number from 1 to the {num_layers} layers: {name}:2")
    k = int(number)
    if name == "every":
        return segments(k, num_layers)
    again = {block for block in range(num_layers) if (block < k if name == "first" else block % k == 0)}
    return [Unit(block, 1, "full" if block in again else "none") for block in range(num_layers)]


def segments(k: int, num_layers: int) -> list[Unit]:
    """Cut the blocks into segments of k, the last one of what is left."""
    return [Unit(first, min(k, num_layers - first), "full") for first in range(0, num_layers, k)]


def chen_cost(num_layers: int, k: int) -> int:
    """Return what a chain of L equal tensors keeps at most when every k-th is stored: `⌈L / k⌉ + k`.

    `⌈L / k⌉` inputs of segments, and the k tensors of the segment that runs again.
    The sum of `L / k` and `k` is least where they are equal, at `k = √L`, and is `2 √L` there
    (Chen et al. 2016, arXiv 1604.06174: sublinear memory at the price of one more forward pass).

    Args:
        num_layers: L.
        k: Tensors in a segment.

    Raises:
        ValueError: If k is not from 1 to L.
    """
    if not 1 <= k <= num_layers:
        raise ValueError(f"k={k} must be from 1 to the {num_layers} layers")
    return -(-num_layers // k) + k


def sqrt_segment(num_layers: int) -> int:
    """Return the k with the least `chen_cost`: about √L, and the smallest one where several are equal.

    Args:
        num_layers: L.
    """
    return min(range(1, num_layers + 1), key=lambda k: chen_cost(num_layers, k))


def ideal_segment(num_layers: int, boundary: float, inside: float) -> float:
    """Return the segment length with the least peak when layers keep more than their input, not rounded.

    `(L / k) boundary + k inside` is least at `k = √(L boundary / inside)`: Narayanan et al. 2021
    (arXiv 2104.04473), section 3.5, who write it for the number of checkpoints `L / k`.
    With 34 h bytes inside and 2 h at the boundary k exceeds 1 only from 17 layers on.

    Args:
        num_layers: L.
        boundary: Bytes of a block's input.
        inside: Bytes that a whole block keeps.

    Raises:
        ValueError: If a number is not positive.
    """
    if min(num_layers, boundary, inside) <= 0:
        raise ValueError(f"num_layers={num_layers}, boundary={boundary}, inside={inside} must be positive")
    return (num_layers * boundary / inside) ** 0.5
