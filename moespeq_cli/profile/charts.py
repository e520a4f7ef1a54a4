"""What the pictures show, as numbers: made from a profile once, drawn as SVG for the page and as PNG files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from moespeq_cli.profile.domains import entropy, use_rates
from runtime.artifacts.profile import Profile


@dataclass(frozen=True, slots=True)
class Heatmap:
    """Layer by expert: how often an expert is chosen, relative to a balanced router (1 is balanced)."""

    name: str  # of the file
    title: str
    alt: str
    layers: tuple[int, ...]
    ratio: list[list[float]]  # [layers][experts]
    counts: list[list[int]]
    limit: float  # the colours span 2 ** -limit to 2 ** limit; what lies beyond has the colour of the end
    unit: str = "tokens"  # of the counts
    balance: str = "balanced"  # what a ratio of 1 is

    def bar_labels(self) -> list[tuple[int, str]]:
        """Powers of two on the scale and how they are written."""
        return scale_labels(int(self.limit), self.ratio)


@dataclass(frozen=True, slots=True)
class LineChart:
    """Values by layer, by distance or by size; one line a domain, a policy or a pair of domains."""

    name: str
    title: str
    alt: str
    x_label: str
    y_label: str
    x_ticks: tuple[str, ...]
    series: dict[str, list[float | None]]
    reference: list[float] | None = None
    reference_label: str = ""
    unit: str = "%"  # "%": values are shares; anything else is written behind plain values
    x_values: tuple[float, ...] | None = None  # where the points lie, 0 to 1; None spaces them evenly

    @property
    def y_range(self) -> tuple[float, float]:
        """Ends of the axis; of shares 0 to 1, or an end of it in steps of 1, 5 or 10 % where all lie there."""
        values = [value for line in self.series.values() for value in line if value is not None]
        values += self.reference or []
        if self.unit != "%":
            return 0.0, _round_up(max(values, default=1.0))
        lowest, highest = min(values, default=0.0), max(values, default=1.0)
        if lowest >= 0.5:
            steps = 100 if lowest >= 0.98 else 20 if lowest >= 0.9 else 10
            return math.floor(lowest * steps - 0.1) / steps, 1.0
        return 0.0, (math.ceil(highest * 10 + 0.1) / 10 if highest <= 0.5 else 1.0)

    @property
    def y_ticks(self) -> list[float]:
        """Round values on the axis."""
        low, high = self.y_range
        if self.unit != "%":
            return [high * i / 5 for i in range(6)]
        step = next((step for step in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1) if (high - low) / step <= 6.01), 0.2)
        return [round(low + step * i, 4) for i in range(round((high - low) / step) + 1)]

    def tick(self, value: float) -> str:
        """A value on the axis."""
        return f"{100 * value:g} %" if self.unit == "%" else f"{value:.3g} {self.unit}"

    def label(self, value: float | None, digits: int = 2) -> str:
        """A value for people; "n/a" where it is not defined."""
        if self.unit == "%" or value is None:
            return percent(value, digits)
        return f"{value:.{digits + (2 if self.unit == 'bit' else 1)}f} {self.unit}"

    def place(self, point: int) -> float:
        """Where a point lies, 0 to 1."""
        if self.x_values is not None:
            return self.x_values[point]
        return point / (len(self.x_ticks) - 1) if len(self.x_ticks) > 1 else 0.5


@dataclass(frozen=True, slots=True)
class BarChart:
    """One bar a row, in parts that stand for a series each."""

    name: str
    title: str
    alt: str
    x_label: str
    rows: Mapping[str, tuple[float, ...]]  # by label, one value a series
    series: tuple[str, ...]

    def totals(self) -> dict[str, float]:
        """The length of each bar."""
        return {label: sum(values) for label, values in self.rows.items()}


@dataclass(frozen=True, slots=True)
class MatrixChart:
    """Expert by expert of one layer: how often two are chosen together, relative to chance."""

    layer: int
    alt: str
    lift: list[list[float | None]]  # None on the diagonal and where a product of uses is 0
    limit: float  # the colours span 2 ** -limit to 2 ** limit

    def bar_labels(self) -> list[tuple[int, str]]:
        """Powers of two on the scale and how they are written."""
        return scale_labels(int(self.limit), self.lift)


def scale_labels(ends: int, values: Sequence[Sequence[float | None]]) -> list[tuple[int, str]]:
    """The powers of two from 2 ** -ends to 2 ** ends; the ends say so where they stand for what lies beyond too."""
    labels = [f"{2**power}×" if power >= 0 else f"1/{2**-power}×" for power in range(-ends, ends + 1)]
    labels[0] = f"≤ {labels[0]}"
    if any(value is not None and value > 2**ends for row in values for value in row):
        labels[-1] = f"≥ {labels[-1]}"
    return list(zip(range(-ends, ends + 1), labels, strict=True))


def _round_up(value: float) -> float:
    """The least number of the list, times a power of ten, that is not below; all are easily divided by five."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 7.5, 10) if step * power >= value * 0.9999)


def heatmaps(profile: Profile) -> list[Heatmap]:
    """One heatmap a domain, all with the same colours."""
    manifest = profile.manifest
    counts = profile.tensors["counts"]
    balanced = manifest.top_k / manifest.num_experts
    ratios = [
        (counts[place].double() / max(manifest.domains[name], 1) / balanced).tolist()
        for place, name in enumerate(manifest.domain_names)
    ]
    highest = max((value for ratio in ratios for row in ratio for value in row), default=1.0)
    limit = float(min(max(math.ceil(math.log2(max(highest, 1.0))), 1), 4))
    return [
        Heatmap(
            name=f"heatmap-{slug(name, place)}",
            title=f"Routing of {name}: share of tokens relative to a balanced router",
            alt=_heatmap_alt(name, ratios[place], manifest.moe_layers),
            layers=manifest.moe_layers,
            ratio=ratios[place],
            counts=counts[place].tolist(),
            limit=limit,
        )
        for place, name in enumerate(manifest.domain_names)
    ]


def slug(name: str, place: int) -> str:
    """A domain's name as part of a file name; its place in front keeps names apart that become alike."""
    plain = "".join(c if c.isascii() and c.isalnum() else "-" for c in name.lower()).strip("-")
    return f"{place}-{plain}" if plain else str(place)


def line_charts(profile: Profile) -> list[LineChart]:
    """Agreement with the draft where it was measured, then spread of the load, and reuse."""
    charts = [_entropy(profile), _load(profile), _kept(profile), _reuse(profile)]
    if profile.manifest.draft is not None:
        following = [_agreement_next(profile)] if len(profile.manifest.moe_layers) > 1 else []
        charts = [_agreement(profile), *following, *charts]
    return charts


def percent(value: float | None, digits: int = 1) -> str:
    """A share for people; "n/a" where it is not defined."""
    return "n/a" if value is None or math.isnan(value) else f"{100 * value:.{digits}f} %"


def _by_layer(profile: Profile, tensor: str) -> dict[str, list[float | None]]:
    rows = profile.tensors[tensor]
    return {name: _defined(rows[place]) for place, name in enumerate(profile.manifest.domain_names)}


def _defined(values: Tensor) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]


def _layer_ticks(profile: Profile) -> tuple[str, ...]:
    return tuple(str(layer) for layer in profile.manifest.moe_layers)


def _agreement(profile: Profile) -> LineChart:
    series = _by_layer(profile, "agreement")
    return LineChart(
        name="agreement",
        title="Routing agreement of draft and target",
        alt=_line_alt("Share of the target's experts that the draft's router also chooses, by layer", series),
        x_label="layer",
        y_label="share of the target's experts that the draft chooses too",
        x_ticks=_layer_ticks(profile),
        series=series,
    )


def _agreement_next(profile: Profile) -> LineChart:
    series = {name: line[:-1] for name, line in _by_layer(profile, "agreement_next").items()}
    return LineChart(
        name="agreement-next",
        title="What one layer's quantised experts do to the next layer's routing",
        alt=_line_alt("Routing agreement in the next layer when one layer alone has the draft's experts", series),
        x_label="layer with the draft's experts",
        y_label="routing agreement in the next layer",
        x_ticks=_layer_ticks(profile)[:-1],
        series=series,
    )


def _entropy(profile: Profile) -> LineChart:
    manifest = profile.manifest
    counts = profile.tensors["counts"].double()
    shares = entropy(counts / counts.sum(-1, keepdim=True)) / math.log2(manifest.num_experts)
    series = {name: _defined(shares[place]) for place, name in enumerate(manifest.domain_names)}
    return LineChart(
        name="entropy",
        title="How evenly the experts of a layer are used: entropy",
        alt=_line_alt("Entropy of the use of experts by layer, as a share of the most there can be", series),
        x_label="layer",
        y_label="entropy of the experts' use, as a share of that of an even use",
        x_ticks=_layer_ticks(profile),
        series=series,
    )


def _load(profile: Profile) -> LineChart:
    manifest = profile.manifest
    busiest = use_rates(profile).amax(-1) * manifest.num_experts / manifest.top_k
    series = {name: _defined(busiest[place]) for place, name in enumerate(manifest.domain_names)}
    return LineChart(
        name="load",
        title="Load of the busiest expert",
        alt=_line_alt("Uses of the busiest expert by layer, relative to an even use", series, unit="×"),
        x_label="layer",
        y_label="uses of the busiest expert, relative to an even use",
        x_ticks=_layer_ticks(profile),
        series=series,
        reference=[1.0] * len(manifest.moe_layers),
        reference_label="even",
        unit="×",
    )


def _kept(profile: Profile) -> LineChart:
    manifest = profile.manifest
    series = _by_layer(profile, "kept_from_previous")
    return LineChart(
        name="kept-from-previous",
        title="Experts that a token shares with the token before it",
        alt=_line_alt("Share of a token's experts that the previous token used, by layer", series),
        x_label="layer",
        y_label="share of a token's experts that the one before used",
        x_ticks=_layer_ticks(profile),
        series=series,
        reference=[manifest.top_k / manifest.num_experts] * len(manifest.moe_layers),
        reference_label="balanced, independent",
    )


def _reuse(profile: Profile) -> LineChart:
    manifest = profile.manifest
    histogram, first_uses = profile.tensors["reuse_histogram"], profile.tensors["first_uses"]
    series: dict[str, list[float | None]] = {}
    for place, name in enumerate(manifest.domain_names):
        buckets = histogram[place].sum(0)
        uses = int(buckets.sum() + first_uses[place].sum())
        series[name] = [value / uses for value in buckets.cumsum(0).tolist()] if uses else [None] * len(buckets)
    ends = [edge - 1 for edge in manifest.reuse_edges[1:]]
    balanced = 1 - manifest.top_k / manifest.num_experts
    return LineChart(
        name="reuse-distance",
        title="How long ago an expert was last used",
        alt=_line_alt("Share of uses whose expert was used at most so many tokens before, all layers", series),
        x_label="tokens since the expert's last use, at most",
        y_label="share of all uses",
        x_ticks=tuple(str(end) for end in ends),
        series=series,
        reference=[1 - balanced**end for end in ends],
        reference_label="balanced, independent",
    )


def _heatmap_alt(name: str, ratio: list[list[float]], layers: tuple[int, ...]) -> str:
    flat = [(value, layers[row], expert) for row, line in enumerate(ratio) for expert, value in enumerate(line)]
    low, high = min(flat), max(flat)
    return (
        f"Heatmap of {len(layers)} layers by {len(ratio[0])} experts for {name}. Most used: layer {high[1]}, expert "
        f"{high[2]}, {high[0]:.2f} times balance; least used: layer {low[1]}, expert {low[2]}, {low[0]:.2f} times."
    )


def _line_alt(what: str, series: dict[str, list[float | None]], unit: str = "%") -> str:
    return line_alt(what, LineChart("", "", "", "", "", (), series, unit=unit))


def line_alt(what: str, chart: LineChart) -> str:
    """What a chart shows in words, with the least and the greatest value of each line."""
    parts = []
    for name, line in chart.series.items():
        values = [value for value in line if value is not None]
        ends = f"{chart.label(min(values), 1)} to {chart.label(max(values), 1)}" if values else "n/a"
        parts.append(f"{name} {ends}")
    return f"{what}: {'; '.join(parts)}."
