"""The report in a real browser: no errors, tables that sort, pictures that are described, dark paper."""

from __future__ import annotations

import html
import json
import re
import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moespeq_cli.profile import svg
from moespeq_cli.profile.build import build
from moespeq_cli.profile.charts import BarChart, Heatmap, LineChart, MatrixChart
from moespeq_cli.profile.wording import STYLE
from tests.profile.test_artifact import job_of

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")

# Clicks every head of every table twice and leaves what it saw in the page, whose policy allows inline scripts.
HARNESS = """
<script>
const seen = { errors: window.seenErrors, tables: [], pictures: [] };
seen.dark = matchMedia("(prefers-color-scheme: dark)").matches;
for (const table of document.querySelectorAll("table.sortable")) {
  const order = (column) => [...table.tBodies[0].rows].map((row) => row.cells[column].textContent);
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = head.querySelector("button"), before = order(column);
    button.click();
    const up = order(column), sortedUp = head.getAttribute("aria-sort");
    button.click();
    seen.tables.push({ before, up, down: order(column), sortedUp, sortedDown: head.getAttribute("aria-sort") });
  });
}
for (const picture of document.querySelectorAll("img, svg")) {
  const words = picture.getAttribute("alt") || picture.getAttribute("aria-label") || "";
  const box = picture.getBoundingClientRect();
  seen.pictures.push({ kind: picture.tagName, words, width: box.width, height: box.height,
    loaded: picture.tagName !== "IMG" || picture.naturalWidth > 0 });
}
const sheet = getComputedStyle(document.body);
seen.paper = sheet.backgroundColor; seen.ink = sheet.color;
seen.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
document.title = "seen";
const out = document.createElement("pre");
out.id = "seen";
out.textContent = JSON.stringify(seen);
document.body.append(out);
</script>
"""
# Letters that leave their picture, and letters that touch others, of every picture in the page; and pages too wide.
LETTERS = """
<script>
const faults = [];
for (const picture of document.querySelectorAll("svg")) {
  const [, , wide, high] = picture.getAttribute("viewBox").split(" ").map(Number);
  const boxes = [...picture.querySelectorAll("text")].map((text) => [text.textContent, text.getBBox()]);
  boxes.forEach(([words, box], place) => {
    if (box.x < 0 || box.y < -1 || box.x + box.width > wide || box.y + box.height > high + 1)
      faults.push([picture.id, "leaves", words]);
    for (const [others, other] of boxes.slice(place + 1))
      if (box.x < other.x + other.width && other.x < box.x + box.width
        && box.y + 3 < other.y + other.height && other.y + 3 < box.y + box.height)
        faults.push([picture.id, "touches", words, others]);
  });
}
const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
const least = Math.min(...[...document.querySelectorAll("svg")].map((picture) => picture.getBoundingClientRect().width
  / picture.getAttribute("viewBox").split(" ")[2]));
const out = document.createElement("pre");
out.id = "seen";
out.textContent = JSON.stringify({ faults, wide, least });
document.body.append(out);
</script>
"""
CATCH = "<script>window.seenErrors = []; addEventListener('error', (event) => seenErrors.push(event.message));</script>"


@pytest.fixture(scope="module")
def page(model: Path, quantized: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with every section."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moespeq_cli.profile.pictures.available", lambda: False)
        job = replace(job_of(model, quantized, sensitivity_tokens=40), probe_tokens=40)
        return build(job, tmp_path_factory.mktemp("browser") / "profile").folder / "report.html"


def browse(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    common = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1000,1400"]
    profile = f"--user-data-dir={page.parent / 'browser'}"
    return subprocess.run(
        [CHROMIUM, *common, profile, *options, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )


def seen_in(printed: str) -> dict[str, Any]:
    """What a script left in the page."""
    found = re.search(r'<pre id="seen">(.*?)</pre>', printed, re.DOTALL)
    assert found is not None
    return dict(json.loads(html.unescape(found[1])))


@pytest.mark.parametrize("dark", [False, True])
def test_opens_from_disk_without_errors_sorts_and_describes(page: Path, tmp_path: Path, dark: bool) -> None:
    text = page.read_text(encoding="utf-8")
    probed = tmp_path / "probed.html"
    probed.write_text(text.replace("<style>", CATCH + "<style>", 1).replace("</body>", HARNESS + "</body>"))
    done = browse(probed, "--dump-dom", f"--blink-settings=preferredColorScheme={0 if dark else 1}")
    assert "CONSOLE" not in done.stderr, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    seen = seen_in(done.stdout)
    assert seen["errors"] == [] and seen["dark"] is dark and seen["wide"] <= 0
    light_paper, dark_paper = "rgb(255, 255, 255)", "rgb(21, 24, 29)"
    assert seen["paper"] == (dark_paper if dark else light_paper)
    assert len(seen["pictures"]) == 14 + 3
    for picture in seen["pictures"]:
        assert len(picture["words"]) > 40 and picture["loaded"], picture
    assert len(seen["tables"]) > 40
    for column in seen["tables"]:
        assert (column["sortedUp"], column["sortedDown"]) == ("ascending", "descending")
        assert sorted(column["before"]) == sorted(column["up"]) == sorted(column["down"])
        numbers = [_number(cell) for cell in column["up"] if cell != "n/a"]
        if all(number is not None for number in numbers):
            assert numbers == sorted(numbers), column["up"]
            back = [_number(cell) for cell in column["down"] if cell != "n/a"]
            assert back == sorted(numbers, reverse=True), column["down"]
        missing = column["up"].count("n/a")
        assert (
            column["up"][len(column["up"]) - missing :]
            == ["n/a"] * missing
            == column["down"][len(column["up"]) - missing :]
        )


def _number(cell: str) -> float | None:
    found = re.match(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?", cell)
    return float(found[0]) if found else None


def heatmap(layers: int, experts: int, highest: float) -> Heatmap:
    ratio = [[highest if row == expert == 0 else 1.25 for expert in range(experts)] for row in range(layers)]
    return Heatmap("h", "t", "a", tuple(range(layers)), ratio, [[9] * experts] * layers, 4.0)


def lines(series: int, points: int, low: float, high: float, unit: str = "%") -> LineChart:
    names = [f"a domain of mathematics {place}" for place in range(series)]
    ticks = tuple(str(place) for place in range(points))
    drawn: dict[str, list[float | None]] = {name: [low, *([high] * (points - 1))] for name in names}
    return LineChart("l", "t", "a", "layer", "share of all uses", ticks, drawn, [low] * points, "even", unit)


def test_letters_keep_apart_and_within_pictures_of_any_size(tmp_path: Path) -> None:
    bars = {f"layer {n}": (10.0 ** (n % 9 - 6), 1e-9) for n in range(61)}
    matrix = MatrixChart(0, "a", [[None, 99.0], [0.0, None]], 2.0)
    drawn = {f"heat {e}": svg.heatmap_svg(heatmap(n, e, 99.0)) for n, e in ((1, 4), (6, 16), (24, 60), (61, 256))}
    drawn |= {f"lines {low}": svg.lines_svg(lines(3, 24, low, 1.0)) for low in (0.0, 0.51, 0.9, 0.97, 0.985, 0.9995)}
    drawn |= {f"shares {high}": svg.lines_svg(lines(28, 61, 0.0, high)) for high in (0.04, 0.27, 0.5, 0.7)}
    drawn |= {f"plain {high}": svg.lines_svg(lines(1, 2, 0.0, high, "bit")) for high in (0.013, 7.3, 64.0)}
    drawn |= {
        "bars": svg.bars_svg(BarChart("b", "t", "a", "squared gradient, nats a token", bars, ("gate and up", "down"))),
        "key": svg.matrix_key([matrix]),
    }
    figures = "".join(
        f'<div class="wide">{text.replace("<svg", f"<svg id={name!r}", 1)}</div>' for name, text in drawn.items()
    )
    page = tmp_path / "pictures.html"
    page.write_text(f'<!doctype html><meta charset="utf-8"><style>{STYLE}</style><body>{figures}{LETTERS}')
    seen = seen_in(browse(page, "--dump-dom", "--window-size=500,1400").stdout)
    assert seen["faults"] == []
    assert seen["wide"] <= 0 and seen["least"] >= 0.79


def test_paints_something_at_the_size_of_a_window(page: Path, tmp_path: Path) -> None:
    shot = tmp_path / "shot.png"
    browse(page, f"--screenshot={shot}", "--hide-scrollbars")
    data = shot.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", data[16:24]) == (1000, 1400)
    assert len(data) > 30_000  # an empty page has a few thousand bytes
