"""What the checks of rung 08 say: the sentence names the idea that is wrong, and odd answers stop nothing."""

import pytest

from lablib.checks import rung08


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
