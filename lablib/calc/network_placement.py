"""Where to put which parallelism on two hosts: count the bytes that leave a host in a step, and take the fewest.

Four ranks, two hosts of two. Two axes of two ranks each, and one of them must cross the link:

    layout                what crosses          bytes that leave a host in one step
    tp inside, dp across  gradients             2 ranks · all-reduce of G/2 between 2         G
    pp across, dp inside  activations           2 ranks · what a boundary sends              B·S·h·bytes
    tp across, dp inside  a block's sums        2 ranks · (4 all-reduces a block and a few)  (4·L + 2)·B·S·h·bytes
    dp over all           gradients             a ring of 4                                  1.5·G

G are the bytes of all gradients, B the sequences of all ranks together, h the width, L the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from lablib.calc.comm import ring_all_reduce_bytes
from lablib.calc.models import ModelConfig
from lablib.calc.network_rows import Sample, link_bandwidth, payload, seconds_of
from lablib.calc.params import count_params
from lablib.calc.tensor_parallel import rank_params

#: The layouts; the first has the fewest bytes to send for a model that is small beside its batch.
LAYOUTS = ("pp across, dp inside", "tp inside, dp across", "dp over all", "tp across, dp inside")


@dataclass(frozen=True)
class PlacementRow:
    """One layout at one rate.

    Attributes:
        layout: One of `LAYOUTS`.
        rate: Of the link, as text, or None.
        bytes_across: Bytes that leave a host in a step, by the formula.
        counted: The same, counted by the network card, without what headers take.
        link_seconds: What those bytes take at least, bytes_across / W; 0 on a link that is not throttled.
        predicted: link_seconds and the step's time on the link that is not throttled, one after the other. What
            overlaps makes the step shorter, but never shorter than link_seconds.
        measured: Median seconds of a step.
        loss: Of the last step; the same for all layouts.
        samples: The raw seconds.
    """

    layout: str
    rate: str | None
    bytes_across: float
    counted: float
    link_seconds: float
    predicted: float
    measured: float
    loss: float
    samples: tuple[float, ...]


def layout_bytes(
    layout: str, config: ModelConfig, *, batch: int, seq: int, bytes_per_value: int = 4
) -> float:
    """Return the bytes that leave the busier host in one training step, on two hosts of two ranks.

    Args:
        layout: One of `LAYOUTS`.
        config: A dense model without tied embeddings.
        batch: B, sequences of all ranks together.
        seq: S, tokens in a sequence.
        bytes_per_value: 4 for fp32.

    Raises:
        ValueError: If the layout is unknown, or the model's embeddings are tied, which a pipeline would send too.
    """
    if config.tied:
        raise ValueError("tied embeddings would cross the link too; use a config with tied=False")
    stream = batch * seq * config.hidden
    values = {
        "dp over all": lambda: ring_all_reduce_bytes(count_params(config).total, 4),
        # Both ranks of a host send the half that they hold, and every norm is on both.
        "tp inside, dp across": lambda: 2 * ring_all_reduce_bytes(rank_params(config, 2), 2),
        "pp across, dp inside": lambda: float(stream),
        # f and g of every block, the embedding's sum and the gradient of the head's input; then the cross-entropy:
        # its highest logit, its sum and its target, for every token.
        "tp across, dp inside": lambda: float((4 * config.num_layers + 2) * stream + 3 * batch * seq),
    }
    if layout not in values:
        raise ValueError(f"layout={layout!r} is unknown; use one of {'; '.join(LAYOUTS)}")
    return bytes_per_value * values[layout]()


def placement_rows(samples: Sequence[Sample]) -> list[PlacementRow]:
    """Return every layout of the study at the throttled rate, fewest bytes first: that is the predicted order."""
    steps = [s for s in samples if s["part"] == "placement"]
    rate = next(s["rate"] for s in steps if s["rate"] is not None)
    rows = []
    for layout in LAYOUTS:
        last = [s for s in steps if s["layout"] == layout and s["rate"] == rate][-1]
        raw = tuple(seconds_of(steps, layout=layout, rate=rate))
        link = last["bytes_across"] / link_bandwidth(rate)
        rows.append(
            PlacementRow(
                layout,
                rate,
                last["bytes_across"],
                payload(last["card_bytes"]),
                link,
                link + median(seconds_of(steps, layout=layout, rate=None)),
                median(raw),
                last["loss"],
                raw,
            )
        )
    return sorted(rows, key=lambda row: row.bytes_across)
