"""Colours that tell apart for every kind of colour vision, on light and on dark paper."""

from __future__ import annotations

# Below balance blue, above it orange: the pair that red-green blindness leaves apart. Ends dark, middle pale.
DIVERGING = (
    "#08306b", "#2171b5", "#6baed6", "#c6dbef", "#f7f7f7", "#fdd0a2", "#fd8d3c", "#d94801", "#7f2704",
)  # fmt: skip
# Four of Okabe and Ito's, and two for those of theirs that one of the papers would swallow: all stand out from both.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#9f4c35", "#b95cff")
MARKERS = ("circle", "square", "triangle", "diamond", "wedge")
REFERENCE = "#888888"
UNUSED = "#9a9a9a"


def diverging(place: float) -> str:
    """The colour at `place`, -1 (lowest) to 1 (highest), values outside held at the ends."""
    position = (min(max(place, -1.0), 1.0) + 1) / 2 * (len(DIVERGING) - 1)
    low = min(int(position), len(DIVERGING) - 2)
    mix = position - low
    channels = (
        round(a + (b - a) * mix) for a, b in zip(_channels(DIVERGING[low]), _channels(DIVERGING[low + 1]), strict=True)
    )
    return "#" + "".join(f"{channel:02x}" for channel in channels)


def ink_on(background: str) -> str:
    """Black or white, whichever reads better on a colour (WCAG contrast)."""
    red, green, blue = (_linear(channel / 255) for channel in _channels(background))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"


def series_style(index: int) -> tuple[str, str]:
    """Colour and marker of a series; both change, so that neither alone has to be seen, and 30 are told apart."""
    return SERIES[index % len(SERIES)], MARKERS[index % len(MARKERS)]


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else float(((channel + 0.055) / 1.055) ** 2.4)


def _channels(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)
