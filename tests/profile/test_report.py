"""The page and the pictures: self-contained, described in words, right where figures are missing."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from moespeq_cli.profile import charts, colors, domains, pictures, report, svg
from moespeq_cli.profile.build import build
from runtime.artifacts.profile import Profile
from tests.profile.test_artifact import job_of

VOID = {"meta", "br", "hr", "img", "input"}
DOMAIN = '<code> & "prose"'


class Page(HTMLParser):
    """Collects tags, attributes and text, and checks that tags nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def profile(model: Path, quantized: Path, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    job = replace(job_of(model, quantized, sensitivity_tokens=60), probe_tokens=40)
    return build(job, tmp_path_factory.mktemp("report") / "profile")


def test_the_page_refers_to_nothing_outside_itself(profile: Profile) -> None:
    text = (profile.folder / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    plain = re.sub(r'"data:image/png;base64,[A-Za-z0-9+/=]*"', '""', text)
    assert "http:" not in plain and "https:" not in plain and "//" not in plain and "@import" not in plain
    assert set(re.findall(r"url\([^)]*\)", plain)) == {"url(#hatch)"}
    assert "default-src 'none'" in text and not re.search(r"fetch\(|XMLHttp|WebSocket|import\(", plain)
    tags = {tag for tag, _, _ in page.attributes} | {"body"}
    assert not tags & {"link", "iframe", "object", "embed"}
    for tag, name, value in page.attributes:
        assert name not in ("data", "action") and name[:2] != "on"
        assert name != "href" or value.startswith("#")
        assert name != "src" or (tag == "img" and value.startswith("data:image/png;base64,"))
    assert "prefers-color-scheme: dark" in text and "color-scheme: light dark" in text


def test_every_picture_is_described_and_well_formed(profile: Profile) -> None:
    text = (profile.folder / "report.html").read_text(encoding="utf-8")
    found = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(found) == 2 + 2 + 1 + 4 + 1 + 1 + 3  # heatmaps, load, cache, agreement, domains, pairs' key, sensitivity
    images = [value for tag, name, value in Page(text).attributes if (tag, name) == ("img", "alt")]
    assert len(images) == 3 and all("Strongest pair" in alt for alt in images)
    for picture in found:
        root = ElementTree.fromstring(picture)
        assert root.get("role") == "img" and len(root.get("aria-label", "")) > 40
    heat = found[0]
    assert len(re.findall("<title>layer", heat)) == 3 * 8
    assert re.search(r"Most used: layer \d, expert \d, \d\.\d\d times balance", heat)


def test_tables_hold_the_measured_figures(profile: Profile) -> None:
    words = " ".join(Page(report.page(profile, 4096)).words)
    draft = profile.manifest.draft
    assert draft is not None
    for name in ("code", "prose"):
        assert charts.percent(draft.agreement[name]) in words and charts.percent(draft.greedy[name]) in words
    assert "60 tokens in 3 sequences" in words
    sensitivity, probe = profile.sensitivity(), profile.manifest.probe
    for name in ("layers.1.mlp.gate", "layers.2.mlp.experts.down_proj", "lm_head"):
        assert f"{sensitivity.total(name):.3e}" in words
    assert probe is not None
    for row in probe.rows:
        assert f"{row.kl['prose']:.5f}" in words


def test_missing_figures_are_not_available_rather_than_zero(profile: Profile) -> None:
    """H18: no draft, or one that nothing was compared with; names that would break the page."""
    bare = {"sensitivity": None, "probe": None, "cache": None}
    manifest = replace(profile.manifest, domains={DOMAIN: 1}, sequences={DOMAIN: 1}, **bare)
    draft = manifest.draft
    assert draft is not None
    nothing = {DOMAIN: None}
    draft = replace(draft, agreement=nothing, agreement_next=nothing, greedy=nothing, overlap=nothing)
    tensors = {name: tensor[:1].clone() for name, tensor in profile.tensors.items()}
    tensors["coactivation"] = profile.tensors["coactivation"]
    for name in ("agreement", "agreement_next", "reuse_mean", "kept_from_previous"):
        tensors[name] = torch.full((1, 3), float("nan"), dtype=torch.float64)
    tensors["reuse_histogram"] = torch.zeros_like(tensors["reuse_histogram"])
    page = Page(report.page(Profile(profile.folder, replace(manifest, draft=draft), tensors), 4096))
    assert page.words.count("n/a") >= 5 and not any(word == "nan" for word in page.words)
    assert page.words.count(DOMAIN) >= 4
    without = report.page(Profile(profile.folder, replace(manifest, draft=None), tensors), 4096)
    assert "agreement" not in " ".join(Page(without).words)


def test_experts_that_are_never_used_look_different() -> None:
    heatmap = charts.Heatmap("h", "t", "a" * 50, (0, 5), [[0.0, 2.0], [1.0, 1.0]], [[0, 4], [2, 2]], 1.0)
    drawn = svg.heatmap_svg(heatmap)
    assert drawn.count(f'fill="{colors.UNUSED}"') == 2 and "layer 5, expert 1: 2 tokens, 1.00 × balanced" in drawn


@pytest.mark.parametrize(("layers", "experts"), [(1, 4), (6, 16), (24, 60), (48, 128), (61, 256)])
def test_heatmaps_fit_the_page_at_every_size(layers: int, experts: int) -> None:
    ratio = [[1.0] * experts for _ in range(layers)]
    counts = [[1] * experts for _ in range(layers)]
    drawn = svg.heatmap_svg(charts.Heatmap("h", "t", "a", tuple(range(layers)), ratio, counts, 2.0))
    width, height = re.findall(r'viewBox="0 0 (\d+) (\d+)"', drawn)[0]
    assert int(width) <= 1700 and int(height) <= 760
    labels = [float(x) for x in re.findall(r'<text x="([\d.]+)" y="25.0"', drawn)]
    assert all(right - left >= 12 for left, right in itertools.pairwise(labels))


@pytest.mark.parametrize("highest", [8.0, 8.1])
def test_the_end_of_a_scale_says_when_it_stands_for_more(highest: float) -> None:
    heatmap = charts.Heatmap("h", "t", "a", (0,), [[highest, 0.01]], [[4, 1]], 3.0)
    labels = dict(heatmap.bar_labels())
    assert list(labels) == list(range(-3, 4)) and (labels[-3], labels[0]) == ("≤ 1/8×", "1×")
    assert labels[3] == ("8×" if highest == 8 else "≥ 8×") and escape(labels[3]) in svg.heatmap_svg(heatmap)
    matrix = charts.MatrixChart(0, "a", [[None, highest], [highest, None]], 3.0)
    assert matrix.bar_labels() == heatmap.bar_labels()


@example([0.98046875])  # from 0.97 on, which 1 is 0.030000000000000027 away from
@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6))
def test_an_axis_of_shares_holds_all_of_them_in_even_steps(values: list[float]) -> None:
    chart = charts.LineChart("l", "t", "a", "x", "y", tuple(map(str, range(len(values)))), {"a": list(values)})
    low, high = chart.y_range
    assert low <= min(values) and max(values) <= high and (low == 0 or high == 1)
    steps = {round(b - a, 6) for a, b in itertools.pairwise(chart.y_ticks)}
    assert len(steps) == 1 and chart.y_ticks[0] == pytest.approx(low) and chart.y_ticks[-1] == pytest.approx(high)
    assert 2 <= len(chart.y_ticks) <= 7
    if min(values) >= 0.98:
        assert round(high - low, 6) <= 0.03
    if max(values) < 0.5:
        assert high <= max(values) + 0.12


def test_routed_experts_are_listed_where_other_linears_are_more_sensitive(profile: Profile) -> None:
    """In a model of many layers attention alone fills a list of the most sensitive."""
    sensitivity = profile.sensitivity()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "LINEARS_SHOWN", 2)
        text = report.page(profile, 4096)
    routed, others = re.findall(
        r"<h3>(?:Linears of the routed experts|All other linears)</h3>(.*?</table>)", text, re.S
    )
    names = sorted(sensitivity.figures.linears, key=lambda name: -sensitivity.total(name))
    for table, wanted in ((routed, True), (others, False)):
        first = [name for name in names if (".experts." in name) is wanted][:2]
        assert re.findall(r"<tr><td>([^<]*)", table) == first


def test_every_domains_order_of_layers_is_told(profile: Profile) -> None:
    text = report.page(profile, 4096)
    table = re.search(r"The order in each domain</summary>(.*?)</details>", text, re.DOTALL)
    assert table is not None
    rows = re.findall(r"<tr>((?:<td>[^<]*</td>)+)</tr>", table[1])
    columns = list(zip(*(re.findall(r"<td>([^<]*)", row) for row in rows), strict=True))
    rankings = domains.sensitive_rankings(profile)
    assert [list(map(int, column)) for column in columns] == [[1, 2, 3], *rankings.values()]


def test_diverging_colours_are_pale_in_the_middle_and_dark_at_both_ends() -> None:
    assert colors.diverging(0) == "#f7f7f7" and colors.ink_on(colors.diverging(0)) == "#000000"
    assert colors.diverging(-9) == colors.DIVERGING[0] and colors.diverging(9) == colors.DIVERGING[-1]
    assert colors.ink_on(colors.diverging(-1)) == colors.ink_on(colors.diverging(1)) == "#ffffff"


def test_pngs_are_made_and_say_what_they_are(profile: Profile) -> None:
    names = sorted(path.name for path in profile.folder.glob("*.png"))
    assert names == [
        "agreement-next.png", "agreement.png", "cache-size.png", "coactivation.png", "domain-divergence.png",
        "entropy.png", "heatmap-0-code.png", "heatmap-1-prose.png", "kept-from-previous.png", "load.png",
        "reuse-distance.png", "sensitivity-classes.png", "sensitivity-experts.png", "sensitivity-layers.png",
    ]  # fmt: skip
    for name in names:
        data = (profile.folder / name).read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(data[16:20]) >= 800


def test_without_matplotlib_the_page_is_all_there(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pictures, "available", lambda: False)
    made = build(job_of(model, None), tmp_path / "profile")
    assert not list(made.folder.glob("*.png"))
    assert (made.folder / "report.html").read_text(encoding="utf-8").count("<svg") == 2 + 2 + 1 + 2 + 1 + 1
    assert Profile.open(made.folder).manifest.draft is None


def test_file_names_of_domains_are_plain_and_different() -> None:
    assert charts.slug("Maths & more/..", 0) == "0-maths---more"
    assert charts.slug("散文", 1) == "1"


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "none of 24."), (15, "15 of 24, the most specialised first:"), (16, "16 of 24, the 15 most specialised:")],
)
def test_specialists_are_counted_in_words_that_fit(
    profile: Profile, number: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [domains.Specialist(1, place, "code", 0.9, {"code": 0.3, "prose": 0.01}) for place in range(number)]
    monkeypatch.setattr(domains, "specialists", lambda _: found)
    text = report.page(profile, 4096)
    assert f"of its tokens: {words}" in text
    assert text.count("<td>code</td><td>90.0 %</td>") == min(number, 15)
