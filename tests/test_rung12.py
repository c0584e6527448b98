"""What the check of a wrong block draws: jobs of every kind, in which other ideas fail."""

import pytest

from lablib.checks import rung12


@pytest.mark.parametrize("seed", range(20))
def test_drawn_jobs_are_of_every_kind_and_one_is_healthy(seed):
    faults = [rung12._drawn(number) for number in rung12._picked(seed)]
    assert {fault and fault.what for fault in faults} == {None, "keys", "weights", "gradients"}
    assert faults.count(None) == 1
    assert all(0 <= fault.rank < 4 and 1 <= fault.step < 4 for fault in faults if fault)
    owners = {fault: (fault.rank - fault.step) % 4 for fault in faults if fault}
    assert any(owner not in (fault.step, 4 - fault.step) for fault, owner in owners.items())
