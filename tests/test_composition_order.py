"""Orders of application, each run on four ranks: the verdicts are PyTorch's own, and the numbers behind them."""

from __future__ import annotations

import re

import pytest

from lablib.launch.layouts import try_orders
from lablib.launch.layouts.orders import CASES, VERDICTS, Outcome

REFUSED = {
    "fsdp-tp": "ValueError: Cannot distribute a DTensor",
    "tp-ddp": "mixed torch.Tensor and DTensor|Attempted to flatten multiple dimensions",  # torch 2.11 stops earlier
    "root-blocks": "RuntimeError",
    "fsdp-stages": "mixed torch.Tensor and DTensor",
    "clip": "must have the same mesh",
}
WARNED = {"recompute-tp", "compile-tp", "ddp-tp"}


@pytest.fixture(scope="module")
def seen() -> dict[str, Outcome]:
    return {one.name: one for one in try_orders()}


def test_every_order_was_tried(seen: dict[str, Outcome]) -> None:
    assert list(seen) == list(CASES)
    assert {one.verdict for one in seen.values()} == set(VERDICTS)


def test_the_right_order_trains_what_one_process_trains(seen: dict[str, Outcome]) -> None:
    one = seen["right"]
    assert one.verdict == "right"
    assert one.order == ("tp", "recompute", "compile", "FSDP", "optimizer")
    assert one.numbers["off"] < 1e-5


def test_some_orders_are_refused(seen: dict[str, Outcome]) -> None:
    assert {name for name, one in seen.items() if one.verdict == "refused"} == set(REFUSED)
    for name, text in REFUSED.items():
        assert re.search(text, seen[name].seen)
        assert seen[name].fix


def test_a_plan_that_finds_nothing_only_warns(seen: dict[str, Outcome]) -> None:
    """The names have changed: nothing is split, the loss is right, and only warnings tell."""
    for name in WARNED:
        one = seen[name]
        assert one.verdict == "silently wrong"
        assert one.numbers["held"] == one.numbers["whole"]
        assert one.numbers["loss"] == pytest.approx(one.numbers["right"], abs=1e-5)
        assert one.warned >= 6


def test_an_optimizer_made_too_early_trains_nothing_or_a_part(seen: dict[str, Outcome]) -> None:
    sharded, split = seen["optimizer-fsdp"].numbers, seen["optimizer-tp"].numbers
    assert sharded["loss"] == pytest.approx(sharded["before"], abs=1e-5)
    assert split["right"] + 1e-2 < split["loss"] < split["before"] - 1e-3
    assert {seen[name].verdict for name in ("optimizer-fsdp", "optimizer-tp")} == {"silently wrong"}


def test_replicas_drift_apart_when_stages_are_cut_out_of_ddp(seen: dict[str, Outcome]) -> None:
    assert seen["ddp-stages"].numbers["all_reduces"] == 0
    assert seen["ddp-stages"].numbers["apart"] > 0.01


def test_splitting_before_cutting_sends_every_stage(seen: dict[str, Outcome]) -> None:
    numbers = seen["tp-stages"].numbers
    # Two equal stages but for the ends, which are equal too: a table and a head of one size.
    assert numbers["bytes"] == 2 * numbers["bytes_of_own_stage"]


def test_recompute_around_fsdp_gathers_no_more(seen: dict[str, Outcome]) -> None:
    one = seen["fsdp-recompute"]
    assert one.verdict == "no difference"
    assert one.numbers["all_gathers"] == one.numbers["usual_all_gathers"] > 0


def test_clipping_mesh_by_mesh_is_right(seen: dict[str, Outcome]) -> None:
    numbers = seen["clip-by-mesh"].numbers
    assert numbers["norm"] == pytest.approx(numbers["right"], rel=1e-5)
    assert numbers["clipped"] == pytest.approx(numbers["right"] / 2, rel=1e-5)


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown order tp-jax; use some of right"):
        try_orders(["tp-jax"])
