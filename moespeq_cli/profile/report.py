"""One HTML page that shows a profile: no network, no scripts, readable on light and on dark paper."""

from __future__ import annotations

import math
from html import escape

from moespeq_cli.profile import charts, svg
from moespeq_cli.profile.charts import LineChart, percent
from moespeq_cli.profile.wording import HEATMAP, PAIRS, READINGS, STYLE
from runtime.artifacts.profile import Profile


def page(profile: Profile, next_layer_tokens: int) -> str:
    """The whole page as HTML.

    Args:
        profile: what it shows.
        next_layer_tokens: on how many tokens the one-layer agreement was measured at most.
    """
    manifest = profile.manifest
    title = f"Routing profile of {manifest.model_type}"
    facts = (
        f"{len(manifest.moe_layers)} layers with experts, {manifest.num_experts} experts a layer, "
        f"{manifest.top_k} a token; {sum(manifest.domains.values())} tokens in "
        f"{sum(manifest.sequences.values())} sequences; model {manifest.model_digest[:16]}"
    )
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="sub">{escape(facts)}</p>']
    parts.append(f"<h2>At a glance</h2>{_summary(profile)}")
    parts.append(f"<h2>Which experts are used</h2><p>{HEATMAP}</p>")
    for heatmap in charts.heatmaps(profile):
        parts.append(_figure(svg.heatmap_svg(heatmap), heatmap.title))
    lines = charts.line_charts(profile)
    for heading, names in (
        ("How well the draft tells what the target needs", ("agreement", "agreement-next")),
        ("How soon experts come back", ("kept-from-previous", "reuse-distance")),
    ):
        chosen = [chart for chart in lines if chart.name in names]
        if chosen:
            parts.append(f"<h2>{heading}</h2>")
        for chart in chosen:
            parts.append(f"<h3>{escape(chart.title)}</h3>")
            parts.append(f"<p>{READINGS[chart.name].format(tokens=next_layer_tokens)}</p>")
            parts.append(_figure(svg.lines_svg(chart), "") + _numbers(chart))
    parts.append("<h2>Experts that fire together</h2>" + _pairs(profile))
    parts.append(f'<h2>How it was measured</h2><div class="settings">{_settings(profile)}</div>')
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def table(head: list[str], rows: list[list[str]]) -> str:
    """An HTML table; the first column names the row."""
    heads = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _summary(profile: Profile) -> str:
    manifest, tensors, draft = profile.manifest, profile.tensors, profile.manifest.draft
    head = [
        "domain",
        "tokens",
        "busiest expert and its share of tokens",
        "never used",
        "kept from previous token",
        "mean reuse distance",
    ]
    if draft is not None:
        head += ["routing agreement", "same greedy token", "expected acceptance, sampled"]
    rows = []
    for place, name in enumerate(manifest.domain_names):
        counts = tensors["counts"][place]
        tokens = manifest.domains[name]
        row, expert = divmod(int(counts.argmax()), manifest.num_experts)
        busiest = percent(int(counts.max()) / tokens if tokens else None, 0)
        cells = [
            name,
            str(tokens),
            f"layer {manifest.moe_layers[row]}, expert {expert}: {busiest}",
            str(int((counts == 0).sum())),
            percent(float(tensors["kept_from_previous"][place].mean())),
            _tokens(float(tensors["reuse_mean"][place].mean())),
        ]
        if draft is not None:
            cells += [percent(draft.agreement[name]), percent(draft.greedy[name]), percent(draft.overlap[name])]
        rows.append(cells)
    return table(head, rows)


def _tokens(value: float) -> str:
    return "n/a" if math.isnan(value) else f"{value:.1f} tokens"


def _numbers(chart: LineChart) -> str:
    head = [chart.x_label, *chart.series]
    rows = [
        [tick, *(percent(line[place]) for line in chart.series.values())] for place, tick in enumerate(chart.x_ticks)
    ]
    return f"<details><summary>The numbers</summary>{table(head, rows)}</details>"


def _pairs(profile: Profile) -> str:
    """Of each layer, the pair of experts that meets most often compared with chance."""
    manifest = profile.manifest
    tokens = sum(manifest.domains.values())
    rows = []
    for row, layer in enumerate(manifest.moe_layers):
        together = profile.tensors["coactivation"][row].double()
        alone = together.diagonal()
        expected = alone[:, None] * alone[None, :] / max(tokens, 1)
        lift = (together / expected.clamp(min=1)).triu(1)
        lift[together < tokens / 200] = 0  # pairs too rare to say anything about
        first, second = divmod(int(lift.argmax()), manifest.num_experts)
        if float(lift.max()) > 0:
            share = percent(float(together[first, second]) / tokens)
            rows.append([str(layer), f"{first} and {second}", share, f"{float(lift[first, second]):.2f} ×"])
    return f"<p>{PAIRS}</p>" + table(["layer", "experts", "of all tokens", "against independent choice"], rows)


def _settings(profile: Profile) -> str:
    manifest = profile.manifest
    rows = [[name, value] for name, value in sorted(manifest.settings.items())]
    rows += [[f"sequences of {name}", str(count)] for name, count in sorted(manifest.sequences.items())]
    rows.append(["tokens in the trace", str(manifest.trace_tokens)])
    return table(["setting", "value"], rows)


def _figure(picture: str, caption: str) -> str:
    words = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure>{words}<div class="wide">{picture}</div></figure>'
