"""Accelerators and links: each number has a source, and they agree with each other."""

import pytest

from lablib.calc.hardware import ACCELERATORS, ALIASES, LINKS, accelerator, link


@pytest.mark.parametrize("key", ACCELERATORS)
def test_every_number_has_a_source(key):
    card = ACCELERATORS[key]
    assert set(card.sources) == {"memory", "memory_bandwidth", "flops", "links"} | ({"nic"} if card.nic else set())
    assert all(len(source) > 10 for source in card.sources.values())
    assert card.memory_note


@pytest.mark.parametrize("key", LINKS)
def test_every_link_has_a_source_and_one_direction(key):
    assert len(LINKS[key].source) > 10
    assert LINKS[key].bandwidth > 0
    assert LINKS[key].both_ways == 2 * LINKS[key].bandwidth


@pytest.mark.parametrize("key", ACCELERATORS)
def test_numbers_are_plausible_and_links_exist(key):
    card = ACCELERATORS[key]
    assert card.memory_gb / card.memory_gib == pytest.approx(2**30 / 1e9)
    assert card.memory_bytes % 2**30 == 0
    # Were the printed capacity GB and not GiB, the driver would report 93 percent of it at most. ECC takes 1/16.
    assert card.driver_bytes is None or 0.93 < card.driver_bytes / card.memory_bytes <= 1
    # Bytes a second are far fewer than FLOPs a second on every accelerator: a swapped unit would show.
    assert 20 < max(card.flops.values()) / card.memory_bandwidth < 1000
    assert all(name in LINKS for name in (card.scale_up, card.host, card.nic) if name)


def test_rates_are_dense_and_double_as_the_dtype_halves():
    # A sparse figure among dense ones would break the factor of two. One percent: datasheets round.
    for card in ACCELERATORS.values():
        if "fp8" in card.flops:
            assert card.flops["fp8"] == pytest.approx(2 * card.flops["bf16"], rel=0.015), card.name
        if "tf32" in card.flops:
            assert card.flops["tf32"] == pytest.approx(card.flops["bf16"] / 2, rel=0.015), card.name


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases_lead_somewhere(alias):
    assert accelerator(alias.upper()) is ACCELERATORS[ALIASES[alias]]


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown accelerator 'h1000'; known are .*h100"):
        accelerator("h1000")
    with pytest.raises(ValueError, match=r"unknown link 'nvlink9'; known are .*nvlink4"):
        link("nvlink9")


def test_no_link_is_an_error_and_not_a_guess():
    with pytest.raises(ValueError, match="no link in the table"):
        accelerator("tpu-v4").neighbour_link()
