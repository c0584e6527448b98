"""How often to checkpoint: the formulas against published values, a simulator and each other; Llama 3's log.

The bounds for simulated jobs are six standard errors of the mean over independent stretches of a job, taken from the
stretches themselves: a seed outside them comes once in 500 million.
"""

from __future__ import annotations

import math
import random
from statistics import mean, stdev

import pytest
import torch

from lablib.calc.runs import LLAMA3_FAILURES as LLAMA3
from lablib.calc.runs import best_interval, daly_interval, lost_share, lost_time, young_interval
from lablib.calc.runs.failures import wall_time
from lablib.launch import failure_zoo as zoo
from lablib.launch.failure_zoo import FAULTS, Setting, Symptoms
from lablib.launch.measure import compare_flight_records
from lablib.launch.ranks import RankError

MINUTE, HOUR = 60.0, 3600.0


def simulate(work, interval, *, cost, gaps, restart=0.0):
    """Play a job through, back to the last complete checkpoint at each failure; return its seconds by kind."""
    upcoming = iter(gaps)
    left = next(upcoming, math.inf)  # until the next failure
    found = dict.fromkeys(("useful", "checkpoint", "rework", "restart", "failures"), 0.0)
    while found["useful"] < work * (1 - 1e-9):
        piece = min(interval, work - found["useful"])
        if left > piece + cost:
            left -= piece + cost
            found["useful"] += piece
            found["checkpoint"] += cost
            continue
        found["rework"] += left
        found["failures"] += 1
        while (left := next(upcoming, math.inf)) <= restart:
            found["restart"] += left
            found["failures"] += 1
        left -= restart
        found["restart"] += restart
    found["wall"] = sum(found.values()) - found["failures"]
    return found


def exponential_gaps(mtbf, seed):
    generator = random.Random(seed)
    while True:
        yield generator.expovariate(1 / mtbf)


@pytest.mark.parametrize(("hours", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_daly_interval_is_the_one_that_the_paper_prints(hours, minutes):
    # Captions of figures 3 to 5 of Daly 2006: δ = 5 min.
    found = daly_interval(5 * MINUTE, hours * HOUR) / MINUTE
    assert found == pytest.approx(minutes, abs=0.5 if minutes > 10 else 0.05)


def test_daly_interval_is_the_mtbf_where_a_checkpoint_takes_twice_as_long():
    assert daly_interval(20.0, 10.0) == 10.0
    assert daly_interval(50.0, 10.0) == 10.0


def test_the_orders_of_the_approximation():
    # x = δ/2M. Young leaves out terms of relative size sqrt(x), Daly those of x^(3/2).
    for cost in (1e-6, 1e-4, 1e-2):
        x = cost / 2
        best = best_interval(cost, 1.0)
        assert abs(young_interval(cost, 1.0) / best - 1) < 2 * math.sqrt(x)
        assert abs(daly_interval(cost, 1.0) / best - 1) < 2 * x**1.5 + 1e-12


def test_the_best_interval_is_the_smallest_wall_time_for_random_jobs():
    generator = random.Random(11)
    for _ in range(200):
        mtbf = 10 ** generator.uniform(1, 6)
        cost = mtbf * 10 ** generator.uniform(-6, 0.3)
        restart = mtbf * generator.uniform(0, 0.5)
        best = best_interval(cost, mtbf)
        smallest = wall_time(HOUR, best, cost=cost, mtbf=mtbf, restart=restart)
        for factor in (0.5, 0.9, 1.1, 2.0):
            assert wall_time(HOUR, factor * best, cost=cost, mtbf=mtbf, restart=restart) > smallest


def test_young_is_the_smallest_first_order_share():
    cost, mtbf = 7.0, 5000.0
    best = young_interval(cost, mtbf)
    assert best == math.sqrt(2 * 7 * 5000)
    share = lost_share(best, cost=cost, mtbf=mtbf)
    assert share == pytest.approx(math.sqrt(2 * cost / mtbf))
    assert lost_share(0.8 * best, cost=cost, mtbf=mtbf) > share < lost_share(1.25 * best, cost=cost, mtbf=mtbf)


def test_a_failure_by_hand():
    # 10 s of work, 1 s of checkpoint; the first failure after 14 s loses 3 s, the restart takes 5 s, and a second
    # failure 2 s into it makes that 2 + 5 s.
    assert simulate(30, 10, cost=1, restart=5, gaps=[14.0, 2.0]) == {
        "useful": 30, "checkpoint": 3, "rework": 3, "restart": 7, "failures": 2, "wall": 43
    }  # fmt: skip


@pytest.mark.parametrize(("interval", "cost", "restart"), [(600, 30, 400), (200, 30, 0), (4000, 300, 900)])
def test_the_simulator_confirms_the_formula(interval, cost, restart):
    mtbf, stretches = 3600.0, 400
    runs = [
        simulate(20 * interval, interval, cost=cost, restart=restart, gaps=exponential_gaps(mtbf, seed))
        for seed in range(stretches)
    ]
    truth = wall_time(20 * interval, interval, cost=cost, mtbf=mtbf, restart=restart)
    shares = lost_time(interval, cost=cost, mtbf=mtbf, restart=restart)
    expected = {
        "wall": truth,
        "checkpoint": shares.checkpoint * truth,
        "rework": shares.rework * truth,
        "restart": shares.restart * truth,
        "failures": shares.failures * 20 * interval,
    }
    for name, value in expected.items():
        seen = [run[name] for run in runs]
        error = stdev(seen) / math.sqrt(stretches)
        assert abs(mean(seen) - value) <= 6 * error + 1e-9 * value, name
        assert 6 * error < 0.35 * value or value == 0  # the bound says something


def test_shares_add_up_and_none_is_negative():
    for interval in (1.0, 50.0, 1000.0):
        shares = lost_time(interval, cost=5.0, mtbf=700.0, restart=60.0)
        parts = (shares.useful, shares.checkpoint, shares.rework, shares.restart)
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(1)
        assert shares.lost == pytest.approx(1 - shares.useful)


def test_the_first_order_is_what_the_exact_model_tends_to():
    exact = lost_time(100.0, cost=1.0, mtbf=1e6, restart=30.0)
    rough = lost_share(100.0, cost=1.0, mtbf=1e6, restart=30.0)
    assert exact.lost / exact.useful == pytest.approx(rough, rel=1e-3)


def test_llama3_interruptions_are_the_published_ones():
    assert (LLAMA3.unexpected, LLAMA3.planned, LLAMA3.gpus, LLAMA3.days) == (419, 47, 16_384, 54)
    assert LLAMA3.mtbf / HOUR == pytest.approx(3.1, abs=0.05)
    printed = {cause.name: cause.printed for cause in LLAMA3.causes}
    off = {
        cause.name
        for cause in LLAMA3.causes
        if abs(100 * cause.count / LLAMA3.unexpected - printed[cause.name]) > 0.051
    }
    assert off == {"Faulty GPU"}  # 148 of 419 is 35.3 %; 30.1 % is printed
    assert sum(printed.values()) == pytest.approx(100 - (35.3 - 30.1), abs=0.2)


def test_llama3_categories():
    counts = LLAMA3.by_category()
    assert sum(counts.values()) == 419
    assert counts["GPU"] == 268
    gpu = [cause for cause in LLAMA3.causes if cause.category == "GPU"]
    assert sum(cause.printed for cause in gpu) == pytest.approx(58.7, abs=0.05)  # what the text says
    assert LLAMA3.share("GPU") == pytest.approx(0.640, abs=5e-4)  # what the counts say
    assert LLAMA3.share("GPU", "Host") == pytest.approx((268 + 21) / 419)


def test_more_gpus_fail_more_often():
    assert LLAMA3.mtbf_on(16_384) == pytest.approx(LLAMA3.mtbf)
    assert LLAMA3.mtbf_on(1024) == pytest.approx(16 * LLAMA3.mtbf)
    assert LLAMA3.gpu_mtbf / (365 * 24 * HOUR) == pytest.approx(5.8, abs=0.05)  # years


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: young_interval(0, 10), "cost=0 s must be positive"),
        (lambda: daly_interval(1, -1), "mtbf=-1 s must be positive"),
        (lambda: best_interval(float("nan"), 1), "cost=nan s must be positive"),
        (lambda: wall_time(1, 1, cost=1, mtbf=1, restart=-1), "restart=-1 s must not be negative"),
        (lambda: wall_time(1, 1e6, cost=1, mtbf=1), "make the interval shorter"),
        (lambda: lost_share(0, cost=1, mtbf=1), "interval=0 s must be positive"),
        (lambda: LLAMA3.mtbf_on(0), "gpus=0 must be at least 1"),
        (lambda: LLAMA3.share("Moon"), "no category 'Moon'; it has GPU"),
    ],
)
def test_bad_input_is_one_sentence(call, text):
    with pytest.raises(ValueError, match=text):
        call()


# The failure zoo: every fault shows, and no healthy twin does

LETTER = {fault: letter for letter, fault in FAULTS.items()}


@pytest.fixture(scope="module")
def seen() -> dict[tuple[str, bool], tuple[Symptoms, Setting]]:
    """Every program and every twin, each with a seed, a size and a culprit of its own: (fault, healthy) to what it shows."""
    cases = []
    for i, (letter, healthy) in enumerate((letter, h) for letter in FAULTS for h in (False, True)):
        micro = 2 + i % 2 if letter == "F" else 1
        cases.append((letter, healthy, Setting(4 + i % 3, micro, 6 + 2 * (i % 4), (i // 2) % 2, seed=i)))
    runs = zoo.run_programs(cases)
    return {
        (FAULTS[letter], healthy): (run, setting) for (letter, healthy, setting), run in zip(cases, runs, strict=True)
    }


def mean_losses(symptoms: Symptoms) -> list[float]:
    return [sum(ranks) / len(ranks) for ranks in zip(*symptoms.losses, strict=True)]


def reduced(symptoms: Symptoms, rank: int = 0) -> list[int]:
    return [size for op, size in symptoms.calls[rank] if op == "all_reduce"]


@pytest.mark.parametrize("fault", list(LETTER))
def test_a_healthy_twin_learns_what_one_process_learns(seen, fault):
    symptoms, setting = seen[fault, True]
    assert not symptoms.hangs
    assert len(symptoms.losses[0]) == setting.steps
    # The same sums in another order: a few rounding errors of 6e-8 each, amplified by at most e in 6 steps of lr 0.1.
    assert mean_losses(symptoms) == pytest.approx(symptoms.expected["losses"], rel=1e-5)
    assert symptoms.job_losses == pytest.approx(symptoms.expected["losses"], rel=1e-5)
    assert symptoms.job_norms == pytest.approx(symptoms.expected["norms"], rel=1e-5)
    if symptoms.layout == "copies":
        assert symptoms.norms[0] == pytest.approx(symptoms.expected["norms"], rel=1e-5)
        assert reduced(symptoms) == [4 * symptoms.parameters] * setting.steps
    if symptoms.layout == "tensor parallel":
        assert symptoms.batches == [list(range(setting.steps))] * 2
        assert symptoms.losses[0] == pytest.approx(symptoms.losses[1], rel=1e-6)
        return
    dealt = [number for numbers in symptoms.batches for number in numbers]
    assert sorted(dealt) == list(range(2 * setting.steps * setting.micro_batches))


def test_mismatched_collectives(seen):
    symptoms, setting = seen["mismatched collectives", False]
    last = [calls[-1][0] for calls in symptoms.calls]
    assert last[setting.culprit] == "broadcast"
    assert last[1 - setting.culprit] == "all_reduce"
    assert [ended.partition("(")[0] for ended in symptoms.ended] == [f"dist.{op}" for op in last]


def test_skipped_batch(seen):
    symptoms, setting = seen["skipped batch", False]
    culprit, other = setting.culprit, 1 - setting.culprit
    assert symptoms.ended[culprit] == "returned"
    assert symptoms.ended[other] == "dist.all_reduce(gradient)"
    assert len(symptoms.calls[other]) == len(symptoms.calls[culprit]) + 1
    assert set(range(culprit, 2 * setting.steps, 2)) - set(symptoms.batches[culprit]) == {
        2 * (setting.steps // 2) + culprit
    }


def test_uneven_data(seen):
    symptoms, setting = seen["uneven data", False]
    assert symptoms.ended == ["dist.all_reduce(gradient)", "returned"]
    assert [len(numbers) for numbers in symptoms.batches] == [setting.steps + 1, setting.steps]


def test_forgotten_zero_grad(seen):
    symptoms, _ = seen["forgotten zero_grad", False]
    assert symptoms.norms[0][0] == pytest.approx(symptoms.expected["norms"][0], rel=1e-5)
    assert symptoms.norms[0][1] > 1.1 * symptoms.expected["norms"][1]


def test_unsharded_parameter(seen):
    symptoms, setting = seen["unsharded parameter", False]
    healthy, _ = seen["unsharded parameter", True]
    assert healthy.state_bytes == [2 * healthy.parameters] * 2  # half of 4 bytes; all sizes are even
    width = setting.width
    # The largest weight, (2 width, width), is kept whole.
    rest = symptoms.parameters - 2 * width * width
    assert symptoms.state_bytes == [2 * rest + 4 * 2 * width * width] * 2
    gathered = {size for op, size in symptoms.calls[0] if op == "all_gather"}
    assert gathered == {4 * rest}


def test_wrong_dtype(seen):
    symptoms, _ = seen["wrong-dtype reduction", False]
    assert set(reduced(symptoms)) == {2 * symptoms.parameters}
    assert mean_losses(symptoms) != pytest.approx(symptoms.expected["losses"], rel=1e-6)


def test_slow_rank(seen):
    symptoms, setting = seen["slow rank", False]
    late, other = symptoms.flops[setting.culprit], symptoms.flops[1 - setting.culprit]
    assert late == [3 * work for work in other] == symptoms.job_flops
    assert mean_losses(symptoms) == pytest.approx(symptoms.expected["losses"], rel=1e-5)


def test_accumulation_that_communicates(seen):
    symptoms, setting = seen["accumulation that communicates", False]
    assert len(reduced(symptoms)) == setting.steps * setting.micro_batches
    assert mean_losses(symptoms) == pytest.approx(symptoms.expected["losses"], rel=1e-5)


def test_equal_seeds(seen):
    symptoms, _ = seen["equal seeds", False]
    healthy, _ = seen["equal seeds", True]
    assert symptoms.weight_norms[0] == symptoms.weight_norms[1]
    assert symptoms.norms[0] == pytest.approx(symptoms.norms[1], rel=1e-6)  # and the halves stay copies
    assert healthy.weight_norms[0] != healthy.weight_norms[1]
    assert symptoms.job_losses[0] != pytest.approx(symptoms.expected["losses"][0], rel=1e-3)


def test_data_seen_again(seen):
    symptoms, setting = seen["data seen again", False]
    half = setting.steps // 2
    assert symptoms.job_losses[:half] == pytest.approx(symptoms.expected["losses"][:half], rel=1e-5)
    assert symptoms.batches[1] == [2 * place + 1 for place in (*range(half), *range(setting.steps - half))]


def test_silent_data_corruption(seen):
    symptoms, setting = seen["silent data corruption", False]
    equal = [len(set(step)) == 1 for step in zip(*symptoms.digests, strict=True)]
    assert equal == [step < setting.flip.step for step in range(setting.steps)]
    # Loss and norm are no witnesses: both are what they are expected to be, but for less than a ten-thousandth.
    assert symptoms.job_losses == pytest.approx(symptoms.expected["losses"], rel=1e-4)
    assert symptoms.job_norms == pytest.approx(symptoms.expected["norms"], rel=1e-4)


def test_a_straggler_that_comes_and_goes(seen):
    symptoms, setting = seen["straggler that comes and goes", False]
    usual = symptoms.flops[0][0]
    late = [[rank for rank in range(2) if symptoms.flops[rank][step] == 3 * usual] for step in range(setting.steps)]
    assert [step for step, ranks in enumerate(late) if ranks] == [1, setting.steps - 1]
    assert (late[1], late[-1]) == ([setting.culprit], [1 - setting.culprit])
    assert sum(symptoms.flops[0]) == sum(symptoms.flops[1]) == (setting.steps + 2) * usual
    assert sum(symptoms.job_flops) == (setting.steps + 4) * usual
    assert mean_losses(symptoms) == pytest.approx(symptoms.expected["losses"], rel=1e-5)


def test_only_corruption_parts_copies(seen):
    for (fault, healthy), (symptoms, _) in seen.items():
        assert [len(digests) for digests in symptoms.digests] == [len(losses) for losses in symptoms.losses]
        assert len({digest for rank in symptoms.digests for digest in rank}) >= len(symptoms.digests[0])  # all move
        corrupt = fault == "silent data corruption" and not healthy
        same = symptoms.digests[0] == symptoms.digests[1]
        # The halves of one model are equal only if both were drawn from one seed, which is that fault.
        drawn_alike = fault == "equal seeds" and not healthy
        assert same == (drawn_alike or (symptoms.layout == "copies" and not corrupt))


def test_one_bit_is_flipped_and_no_other():
    numbers = torch.tensor([1.0, -2.5, 0.0, 3e38])
    for bit in range(32):
        flipped = zoo.flip_bit(numbers, -2, bit)
        different = numbers.view(torch.int32) ^ flipped.view(torch.int32)
        assert [int(word) & 0xFFFFFFFF for word in different] == [0, 0, 1 << bit, 0]
        assert torch.equal(zoo.flip_bit(flipped, 2, bit), numbers)
    assert zoo.flip_bit(numbers, 0, 31).tolist()[0] == -1
    assert zoo.flip_bit(numbers, 0, 23).tolist()[0] == 0.5  # the exponent's lowest bit
    assert zoo.flip_bit(numbers, 0, 22).tolist()[0] == 1.5
    assert numbers.tolist() == pytest.approx([1.0, -2.5, 0.0, 3e38])  # the argument stays


def test_what_each_instrument_sees_of_a_flipped_bit():
    """Digests of replicas see what one rank alone has; a twin run sees all that is not rounded away; the loss little."""
    at, low, high = 3, 12, 30  # of mantissa and exponent
    cases = [(where, bit) for where in zoo.PLACES for bit in (low, high)]
    flips = [zoo.Flip(where, bit, step=at, number=-3) for where, bit in cases]
    every = zoo.watch_flips(flips, Setting(steps=6))
    assert [found.flip for found in every] == flips
    for (where, bit), found in zip(cases, every, strict=True):
        assert found.losses[:at] == found.undisturbed[:at]
        assert found.twin_differs == at
        assert found.ranks_differ == (at if where in ("weights", "received sum") else None)
        if bit == low:  # at most 2**-11 of one number of more than a hundred
            assert 0 < found.loss_moves < 1e-3
            assert found.norm_moves < 1e-3
        elif where == "input":  # tanh is saturated by whatever is large, and gives its usual 1
            assert 0.1 < found.loss_moves < math.inf
        else:  # a weight of the last layer, or its gradient, which is below 2, becomes one above 1e30
            assert found.loss_moves == found.norm_moves == math.inf
    # A gradient of a thousandth of its weight moves that by less than a rounding: nobody sees it, and nothing is wrong.
    (nothing,) = zoo.watch_flips([zoo.Flip("sum", 0, step=at, number=-3)], Setting(steps=6))
    assert (nothing.loss_moves, nothing.ranks_differ, nothing.twin_differs) == (0, None, None)


def test_symptoms_do_not_name_the_fault(seen):
    for (fault, _), (symptoms, _) in seen.items():
        assert fault not in str(symptoms)
        assert not any(line.startswith("def ") for line in symptoms.ended)


def test_the_flight_recorder_says_where_a_hang_began():
    setting = Setting(culprit=1, steps=4)
    told = compare_flight_records(zoo.recorded_hang(LETTER["mismatched collectives"], setting))
    assert told.startswith("call 1 is not the same on all ranks: rank 0: all_reduce of [178] Float")
    assert "rank 1: broadcast of [3] Float (failure_zoo.py, line" in told
    told = compare_flight_records(zoo.recorded_hang(LETTER["skipped batch"], setting))
    assert told.startswith("rank 1 never came to call 4, where rank 0 waits in all_reduce of [178] Float")


def test_a_bug_in_a_program_that_hangs_is_no_hang(monkeypatch):
    monkeypatch.setattr(zoo, "_play", _raise)
    with pytest.raises(RankError, match="a bug"):
        zoo.run("B")


def _raise(work):
    raise KeyError("a bug")


@pytest.mark.parametrize(
    ("program", "setting", "text"),
    [
        ("Z", Setting(), "there is no program 'Z'; use A, B"),
        ("A", Setting(width=7), "width=7 even"),
        ("F", Setting(), "F accumulates"),
        ("K", Setting(flip=zoo.Flip("disk")), "in one of 'weights', 'input', .* and not in 'disk'"),
        ("K", Setting(flip=zoo.Flip(bit=32)), "bit=32 in step=2: bits are 0 to 31, and steps 0 to 4"),
        ("K", Setting(flip=zoo.Flip(step=5)), "in step=5"),
        ("K", Setting(flip=zoo.Flip(number=178)), "number=178: there are 178 in 'weights' at width=8"),
        ("K", Setting(flip=zoo.Flip("input", number=-33)), "number=-33: there are 32 in 'input'"),
    ],
)
def test_bad_settings(program, setting, text):
    with pytest.raises(ValueError, match=text):
        zoo.run(program, setting=setting)
