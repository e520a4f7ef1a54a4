"""The pictures as PNG files, for slides and documents; needs matplotlib, the extra `report`."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

from moespeq_cli.profile.charts import Heatmap, LineChart
from moespeq_cli.profile.colors import DIVERGING, REFERENCE, UNUSED, diverging, ink_on, series_style

MARKER_CODES = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D"}


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def save_heatmap(chart: Heatmap, folder: Path) -> Path:
    """Draw one heatmap to `<name>.png`."""
    from matplotlib.colors import LinearSegmentedColormap

    experts, layers = len(chart.ratio[0]), len(chart.layers)
    width = min(max(4.0 + 0.42 * experts, 7.0), 16.0)
    figure, axes = _figure(width, min(max(1.9 + 0.34 * layers, 3.2), 10.0))
    colors = LinearSegmentedColormap.from_list("balance", list(DIVERGING)).with_extremes(bad=UNUSED)
    values = [[math.log2(value) if value > 0 else math.nan for value in row] for row in chart.ratio]
    span = {"vmin": -chart.limit, "vmax": chart.limit}
    image = axes.imshow(values, cmap=colors, aspect="auto", interpolation="nearest", **span)
    axes.set_title(chart.title, fontsize=11, pad=10)
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    _ticks(axes.set_xticks, [str(expert) for expert in range(experts)], 36)
    _ticks(axes.set_yticks, [str(layer) for layer in chart.layers], 30)
    if experts <= 24 and layers <= 40:
        _write_values(axes, chart)
    labels = chart.bar_labels()
    bar = figure.colorbar(image, ax=axes, ticks=[power for power, _ in labels], pad=0.02)
    bar.ax.set_yticklabels([label for _, label in labels])
    bar.set_label("relative to balance (grey: never used)" if _has_unused(chart) else "relative to balance")
    return _save(figure, folder, chart.name)


def save_lines(chart: LineChart, folder: Path) -> Path:
    """Draw one line chart to `<name>.png`."""
    figure, axes = _figure(8.0, 4.2)
    places = list(range(len(chart.x_ticks)))
    for index, (name, line) in enumerate(chart.series.items()):
        color, marker = series_style(index)
        values = [math.nan if value is None else value for value in line]
        axes.plot(places, values, color=color, marker=MARKER_CODES[marker], label=name, linewidth=1.8)
    if chart.reference is not None:
        axes.plot(places, chart.reference, color=REFERENCE, linestyle="--", label=chart.reference_label, linewidth=1.2)
    axes.set_title(chart.title, fontsize=11)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    low, high = chart.y_range
    axes.set_ylim(low, high + 0.02 * (high - low))
    axes.set_yticks(chart.y_ticks, [f"{100 * tick:g} %" for tick in chart.y_ticks])
    _ticks(axes.set_xticks, list(chart.x_ticks), 16)
    axes.grid(axis="y", color="#dddddd")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False)
    return _save(figure, folder, chart.name)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    """A figure that no window system and no global state knows of."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _ticks(put: Any, labels: list[str], most: int) -> None:
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if len(labels) / step <= most)
    put(list(range(0, len(labels), step)), labels[::step])


def _write_values(axes: Any, chart: Heatmap) -> None:
    for row, line in enumerate(chart.ratio):
        for expert, ratio in enumerate(line):
            color = diverging(math.log2(ratio) / chart.limit) if ratio > 0 else UNUSED
            text = f"{ratio:.2f}" if ratio > 0 else "0"
            axes.text(expert, row, text, ha="center", va="center", fontsize=8, color=ink_on(color))


def _has_unused(chart: Heatmap) -> bool:
    return any(value == 0 for row in chart.ratio for value in row)


def _save(figure: Any, folder: Path, name: str) -> Path:
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=130, metadata={"Software": None})
    return path
