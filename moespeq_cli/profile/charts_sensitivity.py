"""What rounding would hurt, and what caches would hold, as charts."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from moespeq_cli.profile.charts import BarChart, Heatmap, LineChart, MatrixChart, line_alt, percent
from moespeq_cli.profile.domains import divergence
from moespeq_cli.profile.modules import CLASSES, module_class
from moespeq_cli.profile.pairs import lifts, strongest
from runtime.artifacts.profile import EXPERT_LINEARS, Profile, Sensitivity, expert_linear

LIFT_LIMIT = 2.0
POLICIES = {
    "belady": "clairvoyant (Belady)",
    "lookahead": "look-ahead over {window} tokens, by the {foresight}'s routing",
    "lru": "LRU",
}


def class_totals(sensitivity: Sensitivity) -> dict[str, float]:
    """By class of linears, the sum over all layers, the largest first."""
    totals: dict[str, float] = {}
    for name in sensitivity.figures.linears:
        kind = module_class(name)
        totals[kind] = totals.get(kind, 0.0) + sensitivity.total(name)
    return dict(sorted(totals.items(), key=lambda pair: -pair[1]))


def class_bars(sensitivity: Sensitivity) -> BarChart:
    """One bar a class of linears."""
    totals = {CLASSES[kind]: (value,) for kind, value in class_totals(sensitivity).items()}
    first = next(iter(totals))
    return BarChart(
        name="sensitivity-classes",
        title="Sensitivity by what a linear does",
        alt=f"Bars of {len(totals)} classes of linears. Most sensitive: {first}, {totals[first][0]:.3g}; least: "
        f"{list(totals)[-1]}, {totals[list(totals)[-1]][0]:.3g}.",
        x_label="squared gradient × squared INT4 error, nats a token, all layers",
        rows=totals,
        series=("all layers",),
    )


def layer_bars(profile: Profile, sensitivity: Sensitivity) -> BarChart:
    """One bar a layer: its routed experts, what expands and what contracts."""
    rows = {}
    for layer in profile.manifest.moe_layers:
        up = sum(sensitivity.total(expert_linear(layer, p)) for p in ("gate_proj", "up_proj"))
        rows[f"layer {layer}"] = (up, sensitivity.total(expert_linear(layer, "down_proj")))
    order = sorted(rows, key=lambda label: -sum(rows[label]))
    return BarChart(
        name="sensitivity-layers",
        title="Sensitivity of the routed experts by layer",
        alt=f"Bars of {len(rows)} layers. Most sensitive: {order[0]}, {sum(rows[order[0]]):.3g}; least: {order[-1]}, "
        f"{sum(rows[order[-1]]):.3g}.",
        x_label="squared gradient × squared INT4 error, nats a token",
        rows=rows,
        series=("gate and up", "down"),
    )


def expert_heatmap(profile: Profile, sensitivity: Sensitivity) -> Heatmap:
    """Layer by expert: sensitivity relative to the mean expert of the model."""
    layers = profile.manifest.moe_layers
    rows = [
        torch.stack([sensitivity.channels[expert_linear(n, p)].double().sum(1) for p in EXPERT_LINEARS]).sum(0).tolist()
        for n in layers
    ]
    mean = sum(map(sum, rows)) / sum(map(len, rows)) or 1.0
    flat = [(value, layers[row], expert) for row, line in enumerate(rows) for expert, value in enumerate(line)]
    high, low = max(flat), min(flat)
    return Heatmap(
        name="sensitivity-experts",
        title="Sensitivity of each routed expert relative to the mean expert",
        alt=f"Heatmap of {len(layers)} layers by {len(rows[0])} experts. Most sensitive: layer {high[1]}, expert "
        f"{high[2]}, {high[0] / mean:.2f} times the mean; least: layer {low[1]}, expert {low[2]}, "
        f"{low[0] / mean:.2f} times.",
        layers=layers,
        ratio=[[value / mean for value in line] for line in rows],
        counts=[[round(value * 1e9) for value in line] for line in rows],
        limit=3.0,
        unit="nano-nats a token",
        balance="the mean",
    )


def cache_chart(profile: Profile) -> LineChart | None:
    """Hit rate by cache size; None where no routing was recorded."""
    curve = profile.manifest.cache
    if curve is None:
        return None
    total = len(profile.manifest.moe_layers) * profile.manifest.num_experts
    series: dict[str, list[float | None]] = {
        words.format(window=curve.window, foresight=curve.foresight): list(curve.hits[name])
        for name, words in POLICIES.items()
    }
    chart = LineChart(
        name="cache-size",
        title="Hit rate by size of the expert cache",
        alt="",
        x_label="--expert-cache, share of all routed experts",
        y_label="share of the experts asked for that are there",
        x_ticks=tuple(f"{100 * slots / total:.0f}%" for slots in curve.slots),
        series=series,
        x_values=tuple(slots / total for slots in curve.slots),
    )
    return replace(
        chart, alt=line_alt("Predicted hit rate of an expert cache from its smallest to its full size", chart)
    )


def divergence_chart(profile: Profile) -> LineChart | None:
    """How differently domains route, layer by layer; None for a single domain."""
    names = profile.manifest.domain_names
    found = divergence(profile)
    pairs = [(a, b) for a in range(len(names)) for b in range(a + 1, len(names))]
    if not pairs:
        return None
    series = {f"{names[a]} and {names[b]}": [None if v != v else v for v in found[a, b].tolist()] for a, b in pairs}
    chart = LineChart(
        name="domain-divergence",
        title="How differently two domains use the experts",
        alt="",
        x_label="layer",
        y_label="Jensen-Shannon divergence, 0 to 1 bit",
        x_ticks=tuple(map(str, profile.manifest.moe_layers)),
        series=series,
        unit="bit",
    )
    return replace(chart, alt=line_alt("Jensen-Shannon divergence of two domains' use of the experts by layer", chart))


def coactivation_charts(profile: Profile) -> list[MatrixChart]:
    """One matrix a layer: uses of two experts by one token, relative to chance."""
    charts = []
    for row, layer in enumerate(profile.manifest.moe_layers):
        lift, pair = lifts(profile, row).tolist(), strongest(profile, row)
        told = "none" if pair is None else f"{pair.first} and {pair.second}, {pair.lift:.2f} times chance"
        share = "" if pair is None else f", on {percent(pair.share)} of the tokens"
        charts.append(
            MatrixChart(
                layer=layer,
                alt=f"Matrix of {len(lift)} by {len(lift)} experts of layer {layer}: chosen together against chance. "
                f"Strongest pair: {told}{share}.",
                lift=[[None if math.isnan(value) else value for value in line] for line in lift],
                limit=LIFT_LIMIT,
            )
        )
    return charts
