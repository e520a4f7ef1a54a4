"""What the pictures show, as numbers: made from a profile once, drawn as SVG for the page and as PNG files."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

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
    limit: float  # the colours span 2 ** -limit to 2 ** limit, of which little lies above and much may lie below

    def bar_labels(self) -> list[tuple[int, str]]:
        """Powers of two on the scale and how they are written."""
        ends = int(self.limit)
        labels = [(power, f"{2**power}×" if power >= 0 else f"1/{2**-power}×") for power in range(-ends, ends + 1)]
        return [(power, f"≤ {label}" if power == -ends else label) for power, label in labels]


@dataclass(frozen=True, slots=True)
class LineChart:
    """Shares by layer or by distance, one line a domain."""

    name: str
    title: str
    alt: str
    x_label: str
    y_label: str
    x_ticks: tuple[str, ...]
    series: dict[str, list[float | None]]
    reference: list[float] | None = None
    reference_label: str = ""

    @property
    def y_range(self) -> tuple[float, float]:
        """Ends of the axis, multiples of 5 or 10 %: a part of 0 to 1 where all lines lie in the upper half."""
        values = [value for line in self.series.values() for value in line if value is not None]
        values += self.reference or []
        lowest = min(values, default=0.0)
        if lowest >= 0.9:
            return math.floor(lowest * 20 - 0.2) / 20, 1.0
        return (math.floor(lowest * 10 - 0.2) / 10 if lowest >= 0.5 else 0.0), 1.0

    @property
    def y_ticks(self) -> list[float]:
        """Round values on the axis."""
        low, high = self.y_range
        step = next((step for step in (0.01, 0.02, 0.05, 0.1) if (high - low) / step <= 6.01), 0.2)
        return [round(low + step * i, 4) for i in range(round((high - low) / step) + 1)]


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
    """Agreement with the draft where it was measured, then reuse."""
    charts = [_kept(profile), _reuse(profile)]
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


def _line_alt(what: str, series: dict[str, list[float | None]]) -> str:
    parts = []
    for name, line in series.items():
        values = [value for value in line if value is not None]
        parts.append(f"{name} {percent(min(values))} to {percent(max(values))}" if values else f"{name} n/a")
    return f"{what}: {'; '.join(parts)}."
