"""Accelerators and links: each number has a source, and they agree with each other."""

import pytest

from lablib.calc.hardware import ACCELERATORS, ALIASES, CUDA_CONTEXT, LINKS, accelerator, link


@pytest.mark.parametrize("key", ACCELERATORS)
def test_every_number_has_a_source(key):
    card = ACCELERATORS[key]
    seen = {"cuda"} if card.cuda_bytes else set()
    network = {"nic"} if card.nic else set()
    assert set(card.sources) == {"memory", "memory_bandwidth", "flops", "links"} | seen | network
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
    # Were the printed capacity GB and not GiB, CUDA would report less than 93 percent of it. ECC takes 1/16 of GDDR6,
    # and the driver keeps up to 4 percent.
    least = 0.90 if card.memory_note.startswith("GDDR6") else 0.97
    assert card.cuda_bytes is None or least < card.cuda_bytes / card.memory_bytes < 1
    assert 0 < card.usable_bytes <= card.memory_bytes - (card.context_bytes if card.cuda_bytes else 0)
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


@pytest.mark.parametrize(
    ("find", "name", "hint"),
    [
        (accelerator, "h1000", "unknown accelerator 'h1000'; did you mean .*h100"),
        (accelerator, "mi300", "did you mean mi300x"),
        (accelerator, "gaudi3", "use one of t4, .* others"),
        (link, "nvlink9", "unknown link 'nvlink9'; did you mean .*nvlink4"),
        (link, "efa", "'efa' has several rates: .* 50 GB/s on P5"),
        (link, "RoCE", "'RoCE' has several rates: .* 400gbe"),
    ],
)
def test_an_unknown_name_says_what_to_give(find, name, hint):
    with pytest.raises(ValueError, match=hint):
        find(name)


def test_second_editions_differ_from_the_first_in_what_is_said_of_them():
    h100, h20, gb200, gb300 = map(accelerator, ("h100-80gb", "h20", "gb200", "gb300"))
    assert h100 is accelerator("h100")
    assert (h20.neighbour_link(), h20.capability) == (h100.neighbour_link(), h100.capability)
    assert h20.peak() < h100.peak() / 6
    assert h20.memory_bandwidth > h100.memory_bandwidth
    assert (gb300.peak(), gb300.gpus_per_node) == (gb200.peak(), gb200.gpus_per_node)
    assert gb300.usable_bytes > accelerator("b300").usable_bytes > gb200.usable_bytes
    assert accelerator("mi325x").flops == accelerator("mi300x").flops
    assert accelerator("mi355x").peak() / accelerator("mi350x").peak() == pytest.approx(2400 / 2200, rel=1e-3)
    assert accelerator("trillium").peak() == 2 * accelerator("tpu-v5p").peak()
    assert accelerator("ironwood").peak("fp8") == 2 * accelerator("tpu-v7").peak()


def test_no_link_is_an_error_and_not_a_guess():
    with pytest.raises(ValueError, match="no link in the table"):
        accelerator("tpu-v4").neighbour_link()


@pytest.mark.parametrize("name", ["rtx-3090", "rtx-4090", "rtx-5090"])
def test_without_peer_access_a_ring_has_half_of_the_bus(name):
    card = accelerator(name)
    assert card.neighbour_link().bandwidth == LINKS[card.host].bandwidth / 2
    assert accelerator("l40s").neighbour_link() is LINKS["pcie4-x16"]


def test_capacity_is_what_cuda_reports_less_the_context():
    """In GiB, from messages of PyTorch on such cards; the sources are in the table."""
    seen = {"l40s": 44.39, "b200": 178.35, "h100": 79.11, "rtx-4090": 23.52, "mi300x": 191.98, "gh200": 94.5}
    for name, gib in seen.items():
        card = accelerator(name)
        assert card.cuda_bytes == round(gib * 2**30)
        assert card.usable_bytes == card.cuda_bytes - CUDA_CONTEXT
    assert accelerator("tpu-v4").usable_bytes == accelerator("tpu-v4").memory_bytes
    assert accelerator("b200").memory_bandwidth == 7.67e12
