"""The pictures as inline SVG: text takes the page's colour, so they read on light and on dark paper."""

from __future__ import annotations

import math
from dataclasses import replace
from html import escape

from moespeq_cli.profile.charts import BarChart, Heatmap, LineChart, MatrixChart
from moespeq_cli.profile.colors import REFERENCE, UNUSED, diverging, ink_on, series_style
from moespeq_cli.profile.png import data_uri

LEFT, TOP = 56.0, 30.0
BAR_STEP = 50.0  # between the powers of two on a scale of colours
GRID_WIDTH = 840.0  # the cells of a heatmap fill at most this
PLOT_LEFT, PLOT_WIDTH, PLOT_HEIGHT = 68.0, 640.0, 250.0
LEAST_SCALE = 0.8  # of a picture's size, on a narrow page, below which it is scrolled: its letters stay legible
MATRIX_WIDTH = 180  # pixels at most, unless a pair of experts has but one


def heatmap_svg(chart: Heatmap) -> str:
    """One rectangle a layer and expert, with its figures as a tooltip and, where it fits, in the cell."""
    experts = len(chart.ratio[0])
    wide = min(46.0, max(6.0, GRID_WIDTH / experts))
    high = min(28.0, max(10.0, 560 / len(chart.layers)))
    width, grid_high = LEFT + wide * experts + 10, high * len(chart.layers)
    parts = [_text(LEFT + wide * experts / 2, 12, "expert", "middle")]
    step = _label_step(wide, 2 + 7 * len(str(experts - 1)))
    for expert in range(0, experts, step):
        parts.append(_text(LEFT + wide * (expert + 0.5), TOP - 5, str(expert), "middle"))
    every = _label_step(high, 12)
    for row, layer in enumerate(chart.layers):
        if row % every == 0:
            label = f"layer {layer}" if row == 0 else str(layer)
            parts.append(_text(LEFT - 6, TOP + high * (row + 0.5) + 4, label, "end"))
        for expert, ratio in enumerate(chart.ratio[row]):
            box = (LEFT + wide * expert, TOP + high * row, wide, high)
            amount = f"{chart.counts[row][expert]} {chart.unit}"
            tip = f"layer {layer}, expert {expert}: {amount}, {ratio:.2f} × {chart.balance}"
            parts.append(_cell(box, ratio, chart.limit, tip))
    parts.append(_color_bar(LEFT, TOP + grid_high + 16, chart, "never used"))
    return _svg(max(width, LEFT + 2 * BAR_STEP * chart.limit + 140), TOP + grid_high + 54, chart.alt, parts)


def _cell(box: tuple[float, float, float, float], ratio: float, limit: float, tip: str) -> str:
    x, y, wide, high = box
    color = diverging(math.log2(ratio) / limit) if ratio > 0 else UNUSED
    gap = 1.0 if wide >= 12 else 0.4
    cell = f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide - gap:.1f}" height="{high - gap:.1f}" fill="{color}"/>'
    if wide >= 32 and high >= 18:
        value = f"{ratio:.2f}" if ratio > 0 else "0"
        cell += _text(x + (wide - gap) / 2, y + high / 2 + 4, value, "middle", ink_on(color))
    elif ratio == 0:
        cell += f'<path d="M{x:.1f} {y:.1f}l{wide - gap:.1f} {high - gap:.1f}" stroke="#000" stroke-width="1"/>'
    return f"<g><title>{escape(tip)}</title>{cell}</g>"


def _color_bar(x: float, y: float, chart: Heatmap | MatrixChart, grey: str) -> str:
    labels = chart.bar_labels()
    steps, wide = 64, BAR_STEP * (len(labels) - 1)
    parts = [
        f'<rect x="{x + wide * i / steps:.2f}" y="{y}" width="{wide / steps + 0.3:.2f}" height="10" '
        f'fill="{diverging(2 * (i + 0.5) / steps - 1)}"/>'
        for i in range(steps)
    ]
    parts = [f'<g shape-rendering="crispEdges">{"".join(parts)}</g>']
    parts += [_text(x + wide * (power / chart.limit + 1) / 2, y + 24, label, "middle") for power, label in labels]
    parts.append(f'<rect x="{x + wide + 40}" y="{y}" width="14" height="10" fill="{UNUSED}"/>')
    parts.append(_text(x + wide + 60, y + 9.5, grey, "start"))
    return "".join(parts)


def lines_svg(chart: LineChart) -> str:
    """One line a domain, each with a colour, a marker and its name beside it."""
    scale = _Scale(chart)
    parts = [_text(4, 14, chart.y_label, "start"), _axes(chart, scale)]
    if chart.reference is not None:
        dashes = _polyline([(scale.x(i), scale.y(value)) for i, value in enumerate(chart.reference)])
        parts.append(f'<polyline {dashes} stroke="{REFERENCE}" stroke-dasharray="5 4"/>')
    for index, (name, line) in enumerate(chart.series.items()):
        color, marker = series_style(index)
        defined = [(place, value) for place, value in enumerate(line) if value is not None]
        path = _polyline([(scale.x(place), scale.y(value)) for place, value in defined])
        parts.append(f'<polyline {path} stroke="{color}" stroke-width="2"/>')
        for place, value in defined:
            tip = f"{name}, {chart.x_label} {chart.x_ticks[place]}: {chart.label(value)}"
            point = _marker(marker, scale.x(place), scale.y(value), color)
            parts.append(f"<g><title>{escape(tip)}</title>{point}</g>")
    parts.append(_legend(chart))
    names = [*chart.series, chart.reference_label]
    width = PLOT_LEFT + PLOT_WIDTH + 50 + 7.2 * max(len(name) for name in names)
    lines = len(names) + 1
    return _svg(width, max(TOP + PLOT_HEIGHT + 48, TOP + 20 * lines), chart.alt, parts)


def bars_svg(chart: BarChart) -> str:
    """One bar a row, its parts in the colour of their series and, from the second on, hatched."""
    longest = max(chart.totals().values(), default=0.0) or 1.0
    left = 24 + 6.6 * max(len(label) for label in chart.rows)
    width, high = 560.0, 20.0
    parts = [_hatches(), _text(4, 14, chart.x_label, "start")]
    for row, (label, values) in enumerate(chart.rows.items()):
        x, y = left, TOP + high * row
        parts.append(_text(left - 8, y + 14, label, "end"))
        for index, value in enumerate(values):
            wide = width * value / longest
            box = f'x="{x:.1f}" y="{y + 2:.1f}" width="{wide:.1f}" height="{high - 5:.1f}"'
            tip = f"{label}, {chart.series[index]}: {value:.3g}" if len(chart.series) > 1 else f"{label}: {value:.3g}"
            hatch = f'<rect {box} fill="url(#hatch)"/>' if index else ""
            color = series_style(index)[0]
            parts.append(f'<g><title>{escape(tip)}</title><rect {box} fill="{color}"/>{hatch}</g>')
            x += wide
        parts.append(_text(x + 6, y + 14, f"{sum(values):.3g}", "start"))
    bottom = TOP + high * len(chart.rows)
    if len(chart.series) > 1:
        x = left
        for index, name in enumerate(chart.series):
            box = f'x="{x:.1f}" y="{bottom + 8:.1f}" width="14" height="12"'
            parts.append(f'<rect {box} fill="{series_style(index)[0]}"/>')
            parts.append(f'<rect {box} fill="url(#hatch)"/>' if index else "")
            parts.append(_text(x + 20, bottom + 18, name, "start"))
            x += 40 + 7.2 * len(name)
    return _svg(left + width + 70, bottom + (28 if len(chart.series) > 1 else 4), chart.alt, parts)


def _hatches() -> str:
    return (
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<path d="M0 0v6" stroke="#fff" stroke-width="2.5"/></pattern></defs>'
    )


def matrix_image(chart: MatrixChart) -> str:
    """An image of one pixel a pair of experts, enlarged by the page; a whole number of times, so that all are alike."""
    colors = [
        [UNUSED if lift is None else diverging(-1.0 if lift <= 0 else math.log2(lift) / chart.limit) for lift in row]
        for row in chart.lift
    ]
    side = len(colors) * max(1, MATRIX_WIDTH // len(colors))
    return f'<img src="{data_uri(colors)}" alt="{escape(chart.alt)}" width="{side}" height="{side}">'


def matrix_key(charts: list[MatrixChart]) -> str:
    """What the colours of matrices mean, for all of them."""
    every = replace(charts[0], lift=[row for chart in charts for row in chart.lift])
    alt = "Scale of colours: how often two experts are chosen together, from blue, less than chance, to orange, more."
    grey = "the same expert, or one never used"
    width = LEFT + 2 * BAR_STEP * every.limit + 70 + 7.2 * len(grey)
    return _svg(width, 34, alt, [_color_bar(LEFT, 4, every, grey)])


class _Scale:
    """Where values lie on the paper."""

    def __init__(self, chart: LineChart) -> None:
        self.low, self.high = chart.y_range
        places = [chart.place(point) for point in range(len(chart.x_ticks))]
        self.xs = [PLOT_LEFT + PLOT_WIDTH * place for place in places]
        self.step = PLOT_WIDTH / max(len(self.xs) - 1, 1)

    def x(self, place: int) -> float:
        return self.xs[place]

    def y(self, value: float) -> float:
        return TOP + PLOT_HEIGHT * (self.high - value) / (self.high - self.low)


def _axes(chart: LineChart, scale: _Scale) -> str:
    parts = []
    for level in chart.y_ticks:
        parts.append(f'<path class="grid" d="M{PLOT_LEFT} {scale.y(level):.1f}h{PLOT_WIDTH}"/>')
        parts.append(_text(PLOT_LEFT - 8, scale.y(level) + 4, chart.tick(level), "end"))
    for place in _labelled(chart, scale):
        parts.append(_text(scale.x(place), TOP + PLOT_HEIGHT + 18, chart.x_ticks[place], "middle"))
    parts.append(_text(PLOT_LEFT + PLOT_WIDTH / 2, TOP + PLOT_HEIGHT + 38, chart.x_label, "middle"))
    return "".join(parts)


def _labelled(chart: LineChart, scale: _Scale) -> list[int]:
    """The points that are named on the axis, so that their names do not touch."""
    needed = 8 + 7 * max((len(tick) for tick in chart.x_ticks), default=1)
    if chart.x_values is None:
        return list(range(0, len(chart.x_ticks), _label_step(scale.step, needed)))
    named: list[int] = []
    for place in range(len(chart.x_ticks)):
        if not named or scale.x(place) - scale.x(named[-1]) >= needed:
            named.append(place)
    return named


def _legend(chart: LineChart) -> str:
    x, parts = PLOT_LEFT + PLOT_WIDTH + 26, []
    for index, name in enumerate(chart.series):
        color, marker = series_style(index)
        parts.append(_marker(marker, x, TOP + 14 + 20 * index, color))
        parts.append(_text(x + 12, TOP + 18 + 20 * index, name, "start"))
    if chart.reference is not None:
        y = TOP + 14 + 20 * len(chart.series)
        parts.append(f'<path d="M{x - 9} {y}h18" stroke="{REFERENCE}" stroke-dasharray="5 4"/>')
        parts.append(_text(x + 12, y + 4, chart.reference_label, "start"))
    return "".join(parts)


def _polyline(points: list[tuple[float, float]]) -> str:
    return f'points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" fill="none"'


def _marker(kind: str, x: float, y: float, color: str) -> str:
    shapes = {
        "circle": f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>',
        "square": f'<rect x="{x - 3.6:.1f}" y="{y - 3.6:.1f}" width="7.2" height="7.2" fill="{color}"/>',
        "triangle": f'<path d="M{x:.1f} {y - 5:.1f}l4.6 8.4h-9.2z" fill="{color}"/>',
        "wedge": f'<path d="M{x:.1f} {y + 5:.1f}l4.6 -8.4h-9.2z" fill="{color}"/>',
        "diamond": f'<path d="M{x:.1f} {y - 5.2:.1f}l5.2 5.2l-5.2 5.2l-5.2 -5.2z" fill="{color}"/>',
    }
    return shapes[kind]


def _label_step(spacing: float, needed: float) -> int:
    """Every how many labels to write, so that they do not touch."""
    return next((step for step in (1, 2, 4, 5, 8, 10, 16, 20, 32, 64) if step * spacing >= needed), 128)


def _text(x: float, y: float, text: str, anchor: str, color: str = "") -> str:
    style = f' style="fill:{color}"' if color else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _svg(width: float, height: float, alt: str, parts: list[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        f'style="min-width:{LEAST_SCALE * width:.0f}px" role="img" '
        f'aria-label="{escape(alt)}">{"".join(parts)}</svg>'
    )
