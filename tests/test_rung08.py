"""What the checks of rung 08 say: the sentence names the idea that is wrong, and odd answers stop nothing."""

import pytest

from lablib.checks import rung08
from tests import defects_rung08 as planted

SENTENCES = [
    ("round_to", planted.cuts_off_the_rest, "cut off"),
    ("round_to", planted.halves_go_up, "even mantissa"),
    ("round_to", planted.no_subnormals, "subnormals"),
    ("round_to", planted.gap_shrinks_for_ever, "no longer shrinks"),
    ("round_to", planted.saturates, "gives infinity"),
    ("round_to", planted.infinite_from_the_largest_on, "still rounds back"),
    ("round_to", planted.gap_of_the_power_above, "twice the right one"),
    ("round_to", planted.infinity_without_its_sign, "sign of the number"),
    ("round_to", planted.one_bit_too_many, "more bits|even mantissa"),
    ("scaler_step", planted.never_unscales, "divide by it"),
    ("scaler_step", planted.unscales_in_fp16, "fp32 first"),
    ("scaler_step", planted.doubles_before_it_divides, "carry the scale that came in"),
    ("scaler_step", planted.looks_at_the_first_tensor, "reached the weights"),
    ("scaler_step", planted.skips_only_what_is_infinite, "whole step"),
    ("scaler_step", planted.counts_on_after_an_overflow, "again at zero"),
    ("scaler_step", planted.grows_a_step_late, "doubled"),
    ("what_breaks", planted.bf16_with_the_range_of_fp16, "bf16 reaches"),
    ("what_breaks", planted.no_subnormals_at_all, "subnormals"),
    ("what_breaks", planted.scales_activations_too, "for gradients"),
    ("what_breaks", planted.scaling_only_helps, "large gradients too"),
    ("what_breaks", planted.a_master_copy_does_not_help, "master copy"),
    ("what_breaks", planted.bf16_never_breaks, "nothing moves"),
    ("fp8_round_trip", planted.one_scale_for_all, "'tensor' scaling"),
    ("fp8_round_trip", planted.blocks_of_consecutive_values, "rectangle"),
    ("fp8_round_trip", planted.never_scales_back, "multiplied by their scales"),
    ("fp8_round_trip", planted.largest_not_magnitude, "magnitude"),
    ("fp8_round_trip", planted.e5m2_for_e4m3, "E5M2"),
    ("fp8_round_trip", planted.divides_by_zero, "zeros"),
    ("fp8_round_trip", planted.forgets_to_cast, "cast"),
]


@pytest.mark.parametrize(
    ("name", "defect", "idea"), SENTENCES, ids=lambda value: getattr(value, "__name__", None)
)
def test_the_sentence_names_the_idea(name, defect, idea):
    verdict = getattr(rung08, name)(defect)
    assert verdict.status == "wrong"
    assert any(part in verdict.message for part in idea.split("|")), verdict.message


@pytest.mark.parametrize("answer", [None, "none", 7, (), {"overflow": True}, [1, 2, 3]], ids=repr)
@pytest.mark.parametrize("name", rung08.__all__)
def test_an_odd_answer_is_wrong_and_stops_nothing(name, answer):
    assert getattr(rung08, name)(lambda *args: answer).status == "wrong"


def test_every_situation_is_there_for_both_formats():
    # "Done when" asks for the difference between the two: each failure must occur in each, and be absent in each.
    import random

    from lablib.checks.rung08 import _situations, _truth

    cases = _situations(random.Random(88), 250)
    for name in ("fp16", "bf16"):
        found = [_truth(case) for case in cases if case[0] == name]
        assert len(found) > 80
        for failure in ("overflow", "underflow", "stall"):
            assert 5 < sum(failure in truth for truth in found) < len(found) - 5, (name, failure)
        assert any(not truth for truth in found)
