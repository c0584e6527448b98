"""Units: what they parse, what they refuse, and that writing and reading agree."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lablib.calc import units
from lablib.calc.units import GB, GiB


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80 GiB", 80 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5 TB", 1_500_000_000_000),
        ("25 MiB", 25 * 2**20),
        ("512 B", 512),
        ("1,024 KiB", 2**20),
        (4096, 4096),
    ],
)
def test_bytes(text, expected):
    assert units.parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["80", "80 G", "80 Gb", "80 gb", "GB", "", "-1 GB", "7B params", "1e999 GB", "80 GB 2"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r"unit of bytes|not a size|must not be negative"):
        units.parse_bytes(text)


def test_a_count_is_never_bytes():
    assert units.parse_bytes("7 B") == 7
    assert units.parse_count("7B") == 7_000_000_000
    with pytest.raises(ValueError, match="not a count"):
        units.parse_count("7 GB")
    with pytest.raises(ValueError, match="a small b is a bit"):
        units.parse_bytes("400 Gb")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7B", 7 * 10**9),
        ("124M", 124 * 10**6),
        ("15.6T", 15_600 * 10**9),
        ("50k", 50_000),
        ("2048", 2048),
        ("6.7e9", 6_700_000_000),
    ],
)
def test_counts(text, expected):
    assert units.parse_count(text) == expected


@pytest.mark.parametrize("text", ["0.5", "1.5", "seven", "-7B", True, None, float("nan"), "7 b"])
def test_what_is_no_count_is_refused(text):
    with pytest.raises(ValueError, match=r"not a count|whole number|negative|infinite"):
        units.parse_count(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("450 GB/s", 450e9),
        ("400 Gb/s", 50e9),
        ("400 Gbps", 50e9),
        ("200 Gbit/s", 25e9),
        ("1 GiB/s", 2**30),
        ("3.35 TB/s", 3.35e12),
    ],
)
def test_bandwidth_knows_bits_from_bytes(text, expected):
    assert units.parse_bandwidth(text) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("text", ["450 GB", "450", "450 GT/s", "fast"])
def test_what_is_no_bandwidth_is_refused(text):
    with pytest.raises(ValueError, match="bandwidth"):
        units.parse_bandwidth(text)


def test_gb_and_gib_are_different_functions():
    assert units.gb(80) == 80 * GB
    assert units.gib(80) == 80 * GiB
    assert units.gib(80) / units.gb(80) == pytest.approx(1.0737, abs=1e-4)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (units.format_bytes(112e9), "112 GB"),
        (units.format_bytes(80 * GiB, "GiB"), "80 GiB"),
        (units.format_bytes(80 * GiB), "85.9 GB"),
        (units.format_bytes(16e12), "16,000 GB"),
        (units.format_bytes(0), "0 GB"),
        (units.format_bytes(125e6), "0.125 GB"),
        (units.format_count(8_030_261_248), "8.03B"),
        (units.format_count(124_439_808), "124M"),
        (units.format_count(999_999_999), "1B"),
        (units.format_count(512), "512"),
        (units.format_bandwidth(31.5e9), "31.5 GB/s"),
        (units.format_time(0.0209), "20.9 ms"),
        (units.format_time(33.9 * 86400), "33.9 days"),
        (units.format_time(3600), "1 h"),
        (units.format_time(0.9999), "1 s"),
    ],
)
def test_formats(written, expected):
    assert written == expected


def test_an_unknown_unit_is_refused():
    with pytest.raises(ValueError, match="unit='Gb' must be one of"):
        units.format_bytes(1, "Gb")


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
