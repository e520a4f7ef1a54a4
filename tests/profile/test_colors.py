"""Colours for eyes of every kind: simulated colour vision, contrast on both papers, scales that fall on either side."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from moespeq_cli.profile import colors
from moespeq_cli.profile.wording import STYLE

# Of linear RGB, complete deficiency; Machado, Oliveira and Fernandes 2009, table 1.
VISION = {
    "all": [1, 0, 0, 0, 1, 0, 0, 0, 1],
    "no red cones": [0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216, -0.003882, -0.048116, 1.051998],
    "no green cones": [0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413, -0.011820, 0.042940, 0.968881],
    "no blue cones": [1.255528, -0.076749, -0.178779, -0.078411, 0.930809, 0.147602, 0.004733, 0.691367, 0.303900],
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


def linear(color: str) -> np.ndarray:
    channels = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(color: str, vision: str) -> np.ndarray:
    """CIE L*a*b* of what an eye sees."""
    xyz = TO_XYZ @ np.clip(np.reshape(VISION[vision], (3, 3)) @ linear(color), 0, 1) / (TO_XYZ @ np.ones(3))
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""
    light, dark = sorted((float(TO_XYZ[1] @ linear(color)) for color in (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("vision", VISION)
def test_more_and_less_are_two_colours_and_grow_darker_from_the_middle(vision: str) -> None:
    places = np.linspace(0, 1, 9)[1:]
    for place in places:
        less, more = lab(colors.diverging(-place), vision), lab(colors.diverging(place), vision)
        assert np.linalg.norm((less - more)[1:]) > 8 * place, (vision, place)  # by hue, not by lightness alone
    for sign in (-1, 1):
        lightness = [lab(colors.diverging(sign * place), vision)[0] for place in (0.0, *places)]
        assert all(a - b > 2 for a, b in itertools.pairwise(lightness)), vision


@pytest.mark.parametrize("vision", VISION)
def test_lines_differ_in_marker_or_clearly_in_colour(vision: str) -> None:
    for (a, first), (b, second) in itertools.combinations([colors.series_style(n) for n in range(30)], 2):
        assert first != second or np.linalg.norm(lab(a, vision) - lab(b, vision)) > 15, (a, b, vision)
    assert len({colors.series_style(n) for n in range(30)}) == 30
    first, second = (lab(colors.series_style(n)[0], vision) for n in range(2))
    assert np.linalg.norm(first - second) > 40  # the two that most pictures have


def test_lines_and_words_stand_out_from_both_papers() -> None:
    light, dark = (dict(re.findall(r"--(\w+): (#\w+)", block)) for block in re.findall(r":root {([^}]*)}", STYLE))
    for paper in (light, dark):
        assert contrast(paper["ink"], paper["paper"]) > 7 and contrast(paper["soft"], paper["paper"]) > 4.5
        for color in (*colors.SERIES, colors.REFERENCE):
            assert contrast(color, paper["paper"]) >= 3, (color, paper)
