"""One HTML page that shows a profile: no network, readable on light and on dark paper, by eyes of every kind."""

from __future__ import annotations

import math
from html import escape

from moespeq_cli.profile import charts, domains, svg
from moespeq_cli.profile.charts import LineChart, percent
from moespeq_cli.profile.charts_sensitivity import (
    cache_chart,
    class_bars,
    coactivation_charts,
    divergence_chart,
    expert_heatmap,
    layer_bars,
)
from moespeq_cli.profile.modules import CLASSES, ROUTED, module_class
from moespeq_cli.profile.pairs import strongest
from moespeq_cli.profile.wording import (
    CACHE,
    COACTIVATION,
    DIVERGENCE,
    EXPERTS,
    HEATMAP,
    PAIRS,
    POLICY,
    PROBE,
    READINGS,
    SCRIPT,
    SENSITIVE_LAYERS,
    SENSITIVITY,
    SERVING,
    SPECIALISTS,
    STYLE,
)
from runtime.artifacts.profile import Profile, Sensitivity

LINEARS_SHOWN = 40
SPECIALISTS_SHOWN = 15


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
    sections = {
        "At a glance": _summary(profile),
        "Which experts are used": _use(profile),
        "How large a cache": _cache(profile),
        "How well the draft tells what the target needs": _lines(
            profile, ("agreement", "agreement-next"), next_layer_tokens
        ),
        "How soon experts come back": _lines(profile, ("kept-from-previous", "reuse-distance"), next_layer_tokens),
        "How the domains differ": _domains(profile),
        "Experts that fire together": _pairs(profile) + _matrices(profile),
        "What rounding would hurt": _sensitivity(profile),
        "One class of linears rounded": _probe(profile),
        "How it was measured": f'<div class="settings">{_settings(profile)}</div>',
    }
    there = [(heading, body) for heading, body in sections.items() if body]
    links = " ".join(f'<a href="#s{place}">{heading}</a>' for place, (heading, _) in enumerate(there))
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="sub">{escape(facts)}</p>', f"<nav>{links}</nav>"]
    parts += [f'<h2 id="s{place}">{heading}</h2>{body}' for place, (heading, body) in enumerate(there)]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><style>{STYLE}</style></head>\n'
        f"<body>{''.join(parts)}<script>{SCRIPT}</script></body></html>\n"
    )


def table(head: list[str], rows: list[list[str]]) -> str:
    """An HTML table whose heads sort it, where scripts run; the first column names the row."""
    heads = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="wide"><table class="sortable"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
    )


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


def _use(profile: Profile) -> str:
    figures = [_figure(svg.heatmap_svg(heatmap), heatmap.title) for heatmap in charts.heatmaps(profile)]
    return f"<p>{HEATMAP}</p>" + "".join(figures) + _lines(profile, ("entropy", "load"))


def _lines(profile: Profile, names: tuple[str, ...], next_layer_tokens: int = 0) -> str:
    found = [chart for chart in charts.line_charts(profile) if chart.name in names]
    return "".join(_line(chart, READINGS[chart.name].format(tokens=next_layer_tokens)) for chart in found)


def _line(chart: LineChart, words: str) -> str:
    return f"<h3>{escape(chart.title)}</h3><p>{words}</p>" + _figure(svg.lines_svg(chart), "") + _numbers(chart)


def _cache(profile: Profile) -> str:
    chart = cache_chart(profile)
    curve = profile.manifest.cache
    if chart is None or curve is None:
        return ""
    return _line(chart, f"{CACHE} {curve.tokens} recorded tokens of all domains in turn.")


def _domains(profile: Profile) -> str:
    chart = divergence_chart(profile)
    if chart is None:
        return ""
    names = profile.manifest.domain_names
    held, matrix = domains.serving(profile)
    rows = [[f"hot for {n}", *map(percent, row)] for n, row in zip((*names, "all alike"), matrix.tolist(), strict=True)]
    words = SERVING.format(held=held, share=percent(domains.CACHE_SHARE, 0))
    serving = f"<h3>One domain served by another's profile</h3><p>{words}</p>" + table(["experts held", *names], rows)
    return _line(chart, DIVERGENCE) + serving + _specialists(profile)


def _specialists(profile: Profile) -> str:
    found, names = domains.specialists(profile), profile.manifest.domain_names
    shown = found[:SPECIALISTS_SHOWN]
    total = len(profile.manifest.moe_layers) * profile.manifest.num_experts
    listed = f", the {len(shown)} most specialised:" if len(shown) < len(found) else ", the most specialised first:"
    words = SPECIALISTS.format(total=len(found) or "none", experts=total, shown=listed if found else ".")
    head = ["layer", "expert", "domain", "of its use", *(f"of {name} tokens" for name in names)]
    rows = [
        [str(s.layer), str(s.expert), s.domain, percent(s.share), *(percent(s.rates[name]) for name in names)]
        for s in shown
    ]
    return f"<h3>Specialists</h3><p>{words}</p>" + (table(head, rows) if rows else "")


def _matrices(profile: Profile) -> str:
    charts = coactivation_charts(profile)
    figures = [
        f"<figure><figcaption>layer {chart.layer}</figcaption>{svg.matrix_image(chart)}</figure>" for chart in charts
    ]
    key = _figure(svg.matrix_key(charts), "")
    return f'<h3>All pairs</h3><p>{COACTIVATION}</p>{key}<div class="matrices">{"".join(figures)}</div>'


def _sensitivity(profile: Profile) -> str:
    if profile.manifest.sensitivity is None:
        return ""
    sensitivity = profile.sensitivity()
    classes, layers = class_bars(sensitivity), layer_bars(profile, sensitivity)
    heatmap = expert_heatmap(profile, sensitivity)
    rankings = domains.sensitive_rankings(profile)
    tokens = sum(sensitivity.figures.tokens.values())
    ranking = ", ".join(map(str, rankings["all"]))
    return (
        f"<p>{SENSITIVITY.format(tokens=tokens)}</p>{_figure(svg.bars_svg(classes), classes.title)}"
        f"{_figure(svg.bars_svg(layers), layers.title)}<p>{SENSITIVE_LAYERS.format(ranking=ranking)}</p>"
        f"{_orders(rankings)}{_figure(svg.heatmap_svg(heatmap), heatmap.title)}<p>{EXPERTS}</p>"
        f"{_linears(profile, sensitivity)}"
    )


def _orders(rankings: dict[str, list[int]]) -> str:
    """The layers in the order of each domain; nothing where there is but one."""
    if len(rankings) < 3:
        return ""
    rows = [[str(place + 1), *map(str, layers)] for place, layers in enumerate(zip(*rankings.values(), strict=True))]
    whole = table(["place", *(f"by {name}" for name in rankings)], rows)
    return f"<details><summary>The order in each domain</summary>{whole}</details>"


def _linears(profile: Profile, sensitivity: Sensitivity) -> str:
    """The most sensitive linears: of the routed experts, those of one projection in one layer together; and others."""
    names = profile.manifest.domain_names
    measured = [name for name in names if sensitivity.figures.tokens[name]]
    routed: list[list[str]] = []
    others: list[list[str]] = []
    for place, name in enumerate(sensitivity.figures.linears):
        channels = sensitivity.channels[name].flatten()
        worst = float(channels.max()) / (float(channels.double().sum()) or 1.0)
        by_domain = [f"{float(sensitivity.domains[place, names.index(n)]):.3e}" for n in measured]
        kind = module_class(name)
        row = [name, CLASSES[kind], f"{sensitivity.total(name):.3e}", *by_domain, percent(worst)]
        (routed if kind in ROUTED else others).append(row)
    head = ["linear", "class", "all", *measured, "most in one channel"]
    return "".join(
        f"<h3>{heading}</h3>{table(head, sorted(rows, key=lambda row: -float(row[2]))[:LINEARS_SHOWN])}"
        + (f"<p>The {LINEARS_SHOWN} most sensitive of {len(rows)}.</p>" if len(rows) > LINEARS_SHOWN else "")
        for heading, rows in (("Linears of the routed experts", routed), ("All other linears", others))
    )


def _probe(profile: Profile) -> str:
    probe = profile.manifest.probe
    if probe is None:
        return ""
    names = [name for name in profile.manifest.domain_names if probe.tokens[name]]
    routing, outputs = [], []
    for row in probe.rows:
        cells = [CLASSES[row.module_class], str(row.bits)]
        shares = [percent(_less(part[name])) for part in (row.agreement, row.same_set) for name in names]
        routing.append([*cells, str(row.weights), *shares])
        cells += ["n/a" if (kl := row.kl[name]) is None else f"{kl:.5f}" for name in names]
        cells += [_change(row.loss[name], probe.loss[name]) for name in names]
        outputs.append([*cells, percent(row.exact_match)] if probe.problems else cells)
    heads = [[f"{what}, {name}" for name in names] for what in ("other experts", "any other", "KL", "added loss")]
    routing_head = ["class", "bits", "weights", *heads[0], *heads[1]]
    outputs_head = ["class", "bits", *heads[2], *heads[3], *(["problems right"] if probe.problems else [])]
    answers = ""
    if probe.problems:
        answers = f" It answers {percent(probe.exact_match)} of {probe.problems} held-out problems."
    losses = ", ".join(f"{loss:.4f} ({escape(name)})" for name, loss in probe.loss.items() if loss is not None)
    words = PROBE.format(tokens=sum(probe.tokens.values()), loss=losses, answers=answers)
    return f"<p>{words}</p><h3>Routing</h3>{table(routing_head, routing)}<h3>Outputs</h3>{table(outputs_head, outputs)}"


def _less(share: float | None) -> float | None:
    return None if share is None else 1 - share


def _change(loss: float | None, before: float | None) -> str:
    return "n/a" if loss is None or before is None else f"{loss - before:+.5f}"


def _numbers(chart: LineChart) -> str:
    head = [chart.x_label, *chart.series]
    rows = [
        [tick, *(chart.label(line[place], 1) for line in chart.series.values())]
        for place, tick in enumerate(chart.x_ticks)
    ]
    return f"<details><summary>The numbers</summary>{table(head, rows)}</details>"


def _pairs(profile: Profile) -> str:
    """Of each layer, the pair of experts that meets most often compared with chance."""
    found = [pair for row in range(len(profile.manifest.moe_layers)) if (pair := strongest(profile, row))]
    rows = [[str(p.layer), f"{p.first} and {p.second}", percent(p.share), f"{p.lift:.2f} ×"] for p in found]
    return f"<p>{PAIRS}</p>" + table(["layer", "experts", "of all tokens", "against chance"], rows)


def _settings(profile: Profile) -> str:
    manifest = profile.manifest
    rows = [[name, value] for name, value in sorted(manifest.settings.items())]
    rows += [[f"sequences of {name}", str(count)] for name, count in sorted(manifest.sequences.items())]
    rows.append(["tokens in the trace", str(manifest.trace_tokens)])
    return table(["setting", "value"], rows)


def _figure(picture: str, caption: str) -> str:
    words = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure>{words}<div class="wide">{picture}</div></figure>'
