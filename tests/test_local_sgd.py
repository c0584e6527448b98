"""Bytes across data centres: against DDP's count, by hand, and in limits."""

from __future__ import annotations

import pytest

from lablib.calc.communication import data_parallel_bytes
from lablib.calc.layouts import exchange_cost, needed_inner_steps
from lablib.calc.layouts.local_sgd import METHODS
from lablib.calc.models import preset
from lablib.calc.models.presets import PRESETS
from lablib.calc.params import count_params

JOB = {"replicas": 4, "tokens_per_step": 2**20, "step_seconds": 5.0, "bandwidth": 1.25e9}


def test_two_replicas_by_hand() -> None:
    """gpt2, 124,439,808 parameters: on two replicas each sends the array once."""
    size = 124_439_808
    ddp = exchange_cost("ddp", "gpt2", **JOB | {"replicas": 2})
    assert ddp.message == 2 * size
    assert ddp.bytes_per_token == 2 * size / 2**21
    outer = exchange_cost("diloco", "gpt2", inner_steps=500, **JOB | {"replicas": 2})
    assert outer.message == 4 * size
    # 500 times fewer exchanges of twice the bytes.
    assert ddp.bytes_per_token / outer.bytes_per_token == pytest.approx(250)
    alike = exchange_cost("diloco", "gpt2", inner_steps=500, wire_bytes=2, **JOB | {"replicas": 2})
    assert ddp.bytes_per_token / alike.bytes_per_token == pytest.approx(500)
    assert outer.extra_memory == 2 * 4 * size
    assert ddp.extra_memory == exchange_cost("local-sgd", "gpt2", **JOB).extra_memory == 0


def test_ddp_is_the_count_of_chapter_two() -> None:
    for replicas in (1, 2, 3, 7):
        found = exchange_cost("ddp", "llama-3-8b", **JOB | {"replicas": replicas})
        psi = count_params(preset("llama-3-8b")).total
        assert found.message == pytest.approx(data_parallel_bytes(2 * psi, replicas))
        assert found.communicate == pytest.approx(found.message / 1.25e9)


def test_local_steps_divide_the_bytes_of_a_token_and_not_those_of_a_message() -> None:
    base = exchange_cost("local-sgd", "llama-3-8b", **JOB)
    for steps in (2, 8, 500):
        found = exchange_cost("local-sgd", "llama-3-8b", inner_steps=steps, **JOB)
        assert found.message == base.message
        assert found.bytes_per_token == pytest.approx(base.bytes_per_token / steps)
        assert found.share == pytest.approx(base.communicate / (base.communicate + steps * 5))


def test_the_least_h_is_the_least() -> None:
    for share in (0.5, 0.1, 0.01):
        need = {key: JOB[key] for key in ("replicas", "step_seconds", "bandwidth")}
        steps = needed_inner_steps("llama-3.1-405b", most_share=share, **need)
        assert exchange_cost("diloco", "llama-3.1-405b", inner_steps=steps, **JOB).share <= share + 1e-12
        assert steps > 1
        assert exchange_cost("diloco", "llama-3.1-405b", inner_steps=steps - 1, **JOB).share > share
    assert needed_inner_steps("gpt2", replicas=1, step_seconds=1, bandwidth=1e9) == 1


def test_bad_input() -> None:
    assert "gpt2" in PRESETS
    assert METHODS == ("ddp", "local-sgd", "diloco")
    refused = (
        ("fedavg", {}, "unknown method 'fedavg'"),
        ("ddp", {"inner_steps": 2}, "in every step; use local-sgd or diloco"),
        ("diloco", {"replicas": 0}, "replicas=0 must be a whole number"),
        ("diloco", {"inner_steps": 1.5}, "inner_steps=1.5"),
        ("diloco", {"step_seconds": 0}, "step_seconds=0 must be above 0"),
        ("diloco", {"wire_bytes": 0}, "wire_bytes=0"),
        ("diloco", {"bandwidth": 0}, "bandwidth=0"),
    )
    for method, fields, message in refused:
        with pytest.raises(ValueError, match=message):
            exchange_cost(method, "gpt2", **JOB | fields)
    with pytest.raises(ValueError, match="most_share=1"):
        needed_inner_steps("gpt2", replicas=2, step_seconds=1, bandwidth=1e9, most_share=1)
