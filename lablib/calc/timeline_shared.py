"""Pieces of a timeline that many walks share.

The stages of a pipeline run the same blocks; so do runs that differ in ranks or in ZeRO. A tape is written and played
once for all of them: what it depends on is the key, and nobody changes a piece that was handed out.

Chapter: book/01_why_distributed.md
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from lablib.calc.tape_blocks import BlockSetting, block_tape
from lablib.calc.tape_ends import embedding_tape, head_tape
from lablib.calc.timeline_piece import Piece

MAKERS = {"block": block_tape, "head": head_tape, "embedding": embedding_tape}
MOST = 512  # of about 20 KB each


def shared_piece(
    which: str, setting: BlockSetting, out_of_place: bool, accumulating: bool, holds: bool
) -> Piece:
    """Return the tape of a block, of the head or of the embedding, and its events; not to be changed.

    Args:
        which: "block", "head" or "embedding".
        setting: How it runs; of the layer's number it matters whether that layer has experts.
        out_of_place: As in `Piece`.
        accumulating: As in `Piece`.
        holds: As in `Piece`.
    """
    config = setting.config
    alike = config.num_layers - 1 if config.has_experts(setting.layer) else 0
    return _piece(which, replace(setting, layer=alike), out_of_place, accumulating, holds)


@lru_cache(maxsize=MOST)
def _piece(which: str, setting: BlockSetting, out_of_place: bool, accumulating: bool, holds: bool) -> Piece:
    return Piece(MAKERS[which](setting), out_of_place, accumulating, holds)
