"""Units: what they parse, what they refuse, and that writing and reading agree."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lablib.calc import units
from lablib.calc.units import GB, GiB


def test_bytes():
    read = {"80 GiB": 80 * 2**30, "80GB": 80e9, "1.5 TB": 1.5e12, "512 B": 512, "1,024 KiB": 2**20, 4096: 4096}
    assert {text: units.parse_bytes(text) for text in read} == read


@pytest.mark.parametrize(
    "text", ["80", "80 G", "80 Gb", "80 gb", "GB", "", "-1 GB", "7B params", "1e999 GB", "80 GB 2"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r"unit of bytes|not a size|must not be negative"):
        units.parse_bytes(text)


@pytest.mark.parametrize("read", [units.parse_bytes, units.parse_count, units.parse_bandwidth])
def test_numbers_that_nobody_means_are_refused_before_their_products_are_infinite(read):
    for number in ("1e308", "1e-300"):
        for unit in (" PB", "T", " GB/s"):
            with pytest.raises(ValueError, match=r"is out of bounds|has no unit|is not a count") as caught:
                read(number + unit)
            assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"is not|has no") as caught:
        read("x" * 5000)
    assert len(str(caught.value)) < 300


def test_a_count_is_never_bytes():
    assert units.parse_bytes("7 B") == 7
    assert units.parse_count("7B") == 7_000_000_000
    with pytest.raises(ValueError, match="not a count"):
        units.parse_count("7 GB")
    with pytest.raises(ValueError, match="a small b is a bit"):
        units.parse_bytes("400 Gb")


def test_counts():
    read = {"7B": 7e9, "124M": 124e6, "15.6T": 15.6e12, "50k": 50_000, "2048": 2048, "6.7e9": 6.7e9}
    assert {text: units.parse_count(text) for text in read} == read


@pytest.mark.parametrize("text", ["0.5", "1.5", "seven", "-7B", True, None, float("nan"), "7 b"])
def test_what_is_no_count_is_refused(text):
    with pytest.raises(ValueError, match=r"not a count|whole number|negative|infinite"):
        units.parse_count(text)


def test_tokens_are_counted_in_powers_of_two():
    read = {
        "8192": 8192,
        "8k": 8192,
        "8K": 8192,
        "1.5k": 1536,
        "128k": 131_072,
        "1M": 2**20,
        "4M": 2048 * 2048,
        512: 512,
    }
    assert {text: units.parse_tokens(text) for text in read} == read
    assert units.parse_tokens("4e6") == 4_000_000 != units.parse_tokens("4M")


@pytest.mark.parametrize("text", ["8kb", "8 GB", "15T", "long", "3.2M", "0.5", "-8k", "", None])
def test_what_is_no_number_of_tokens_is_refused(text):
    with pytest.raises(ValueError, match=r"number of tokens|must not be negative") as caught:
        units.parse_tokens(text)
    assert "\n" not in str(caught.value)


def test_bandwidth_knows_bits_from_bytes():
    read = {"450 GB/s": 450e9, "400 Gb/s": 50e9, "400 Gbps": 50e9, "200 Gbit/s": 25e9, "1 GiB/s": 2**30}
    assert {text: units.parse_bandwidth(text) for text in read} == pytest.approx(read, rel=1e-12)


@pytest.mark.parametrize("text", ["450 GB", "450", "450 GT/s", "fast"])
def test_what_is_no_bandwidth_is_refused(text):
    with pytest.raises(ValueError, match="bandwidth"):
        units.parse_bandwidth(text)


def test_gb_and_gib_are_different_functions():
    assert units.gb(80) == 80 * GB
    assert units.gib(80) == 80 * GiB
    assert units.gib(80) / units.gb(80) == pytest.approx(1.0737, abs=1e-4)


def test_formats():
    assert [units.format_bytes(n) for n in (112e9, 80 * GiB, 125e6)] == ["112 GB", "85.9 GB", "0.125 GB"]
    assert [units.format_count(n) for n in (124_439_808, 512)] == ["124M", "512"]
    assert [units.format_time(s) for s in (33.9 * 86400, 0.9999)] == ["33.9 days", "1 s"]


# About three digits are written: half a unit in the third is at most 0.5 percent.
@given(st.integers(min_value=1, max_value=10**18))
def test_reading_what_was_written_gives_it_back(n):
    assert units.parse_count(units.format_count(n)) == pytest.approx(n, rel=0.005)
    assert units.parse_bytes(units.format_bytes(n, "TiB")) == pytest.approx(n, rel=0.005, abs=1)


@given(st.floats(min_value=1e-9, max_value=1e12))
def test_time_has_a_readable_number(seconds):
    number, unit = units.format_time(seconds).split()
    assert unit in units.TIME_UNITS
    assert float(number.replace(",", "")) * units.TIME_UNITS[unit] == pytest.approx(seconds, rel=0.006)
