"""The pictures as PNG files, for slides and documents; needs matplotlib, the extra `report`."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from moespeq_cli.profile.charts import BarChart, Heatmap, LineChart, MatrixChart
from moespeq_cli.profile.colors import DIVERGING, REFERENCE, UNUSED, diverging, ink_on, series_style
from runtime.artifacts.folder import require_writable
from runtime.errors import InputError

MARKER_CODES = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D", "wedge": "v"}
LEGEND_INSIDE = 5  # so many lines at most are named within the axes


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require_file(path: Path) -> None:
    """Fail before long work where a picture could not be drawn to `path`."""
    if path.suffix != ".png" or path.is_dir():
        raise InputError(expected="a PNG file for the picture", found=str(path), mend="name one, such as curve.png")
    if not available():
        raise InputError(
            expected="matplotlib to draw a picture", found="none", mend="install it: pip install 'moespeq[report]'"
        )
    require_writable("the picture", path)


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
    what = "relative to balance" if chart.balance == "balanced" else f"relative to {chart.balance}"
    bar.set_label(f"{what} (grey: never used)" if _has_unused(chart) else what)
    return _save(figure, folder, chart.name)


def save_lines(chart: LineChart, folder: Path) -> Path:
    """Draw one line chart to `<name>.png`."""
    figure, axes = _figure(8.0, 4.2)
    places = [chart.place(point) for point in range(len(chart.x_ticks))]
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
    axes.set_yticks(chart.y_ticks, [chart.tick(tick) for tick in chart.y_ticks])
    _ticks(axes.set_xticks, list(chart.x_ticks), 16, places)
    axes.grid(axis="y", color="#dddddd")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    beside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if len(chart.series) > LEGEND_INSIDE else {}
    axes.legend(frameon=False, **beside)
    return _save(figure, folder, chart.name)


def save_bars(chart: BarChart, folder: Path) -> Path:
    """Draw one bar chart to `<name>.png`."""
    figure, axes = _figure(8.0, min(1.4 + 0.3 * len(chart.rows), 12.0))
    labels, starts = list(chart.rows), [0.0] * len(chart.rows)
    for index, name in enumerate(chart.series):
        values = [chart.rows[label][index] for label in labels]
        hatch = "///" if index else None
        axes.barh(labels, values, left=starts, color=series_style(index)[0], edgecolor="white", hatch=hatch, label=name)
        starts = [start + value for start, value in zip(starts, values, strict=True)]
    for place, total in enumerate(starts):
        axes.text(total, place, f" {total:.3g}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_title(chart.title, fontsize=11)
    axes.set_xlabel(chart.x_label)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if len(chart.series) > 1:
        axes.legend(frameon=False, loc="lower right")
    return _save(figure, folder, chart.name)


def save_matrices(charts: list[MatrixChart], folder: Path, name: str, title: str) -> Path:
    """Draw the layers' matrices side by side to `<name>.png`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    columns = min(len(charts), 6)
    rows = -(-len(charts) // columns)
    figure = Figure(figsize=(2.1 * max(columns, 4), 2.3 * rows + 0.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    colors = LinearSegmentedColormap.from_list("balance", list(DIVERGING)).with_extremes(bad=UNUSED)
    image: Any = None
    for place, chart in enumerate(charts):
        axes = figure.add_subplot(rows, columns, place + 1)
        values = [[_log(lift, chart.limit) for lift in row] for row in chart.lift]
        image = axes.imshow(values, cmap=colors, vmin=-chart.limit, vmax=chart.limit, interpolation="nearest")
        axes.set_title(f"layer {chart.layer}", fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
    figure.suptitle(title, fontsize=11)
    labels = replace(charts[0], lift=[row for chart in charts for row in chart.lift]).bar_labels()
    bar = figure.colorbar(image, ax=figure.axes, ticks=[power for power, _ in labels], fraction=0.03)
    bar.ax.set_yticklabels([label for _, label in labels])
    return _save(figure, folder, name)


def _log(lift: float | None, limit: float) -> float:
    if lift is None:
        return math.nan
    return math.log2(lift) if lift > 0 else -limit


def _figure(width: float, height: float) -> tuple[Any, Any]:
    """A figure that no window system and no global state knows of."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _ticks(put: Any, labels: list[str], most: int, places: list[float] | None = None) -> None:
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if len(labels) / step <= most)
    put((list(range(len(labels))) if places is None else places)[::step], labels[::step])


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
