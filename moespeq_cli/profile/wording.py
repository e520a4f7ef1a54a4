"""What the report says beside its pictures, and how the page looks."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1b1f24; --soft: #59636e; --line: #d8dee4; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15181d; --ink: #e6e9ed; --soft: #a2abb5; --line: #363c44; }
}
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  margin: 2rem auto; max-width: 1000px; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem }
h2 { font-size: 1.2rem; margin-top: 2.4rem }
h3 { font-size: 1rem }
p.sub, figcaption, summary { color: var(--soft) }
figure { margin: 1rem 0 1.6rem }
.wide { overflow-x: auto }
svg { display: block; max-width: 100%; height: auto }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif }
svg .grid { stroke: var(--line); fill: none }
table { border-collapse: collapse; margin: .6rem 0 }
th, td { border-bottom: 1px solid var(--line); padding: .25rem 0 .25rem 1rem; text-align: right;
  font-variant-numeric: tabular-nums; white-space: nowrap }
th:first-child, td:first-child { text-align: left; padding-left: 0 }
th { font-weight: 600; vertical-align: bottom; white-space: normal }
.settings td, .settings th { text-align: left }
th button { all: unset; cursor: pointer; font: inherit }
th button:focus-visible { outline: 2px solid var(--ink); outline-offset: 2px }
th button::after { content: " \\2195"; color: var(--soft) }
th[aria-sort=ascending] button::after { content: " \\2191" }
th[aria-sort=descending] button::after { content: " \\2193" }
.matrices { display: flex; flex-wrap: wrap; gap: 1rem }
.matrices figure { margin: 0 }
.matrices img { display: block; image-rendering: pixelated; outline: 1px solid var(--line) }
nav a { color: inherit; margin-right: 1rem; white-space: nowrap }
code { font-size: .92em; white-space: nowrap }
"""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

# Makes the heads of tables buttons that sort; "n/a" goes last. Without scripts the tables stay as they are.
SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const value = (row, column) => {
    const text = row.cells[column].textContent.trim(), number = text.match(/^[-+]?[0-9.]+(e[-+]?[0-9]+)?/i);
    return number ? Number(number[0]) : text === "n/a" ? null : text;
  };
  const compare = (a, b) => typeof a === typeof b && typeof a === "number" ? a - b
    : String(a).localeCompare(String(b), "en", { numeric: true });
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].map((row) => [value(row, column), row]);
      rows.sort(([a], [b]) => a === null || b === null ? (a === null) - (b === null) : (down ? -1 : 1) * compare(a, b));
      body.append(...rows.map(([, row]) => row));
    });
  });
}
"""

HEATMAP = """
White is balance: every expert gets the same share of the tokens. Orange is used more, blue less, each step of the scale
by a factor of two. Strong colours in one domain and not in another mark specialised experts.
"""

AGREEMENT = """
Both models read the same texts, each with hidden states of its own from the first token on. In the first layer with
experts nothing is quantised before the router, so both choose alike there. While <code>moespeq run</code> drafts, only
the drafted tokens are the draft's own: it reads the target's KV cache for all before, so less error builds up there.
"""

AGREEMENT_NEXT = """
Only the named layer computes with the draft's experts; all before it is the target's. The lower the agreement one layer
on, the more sensitive the layer. Measured on the first {tokens} tokens at most.
"""

KEPT = """
What a cache that keeps only the last token's experts would hold already. The dashed line is a router that chooses
evenly and anew for every token.
"""

REUSE = """
Read it as the share of uses that a cache would serve if it kept every expert for so many tokens. Above the dashed line
a text comes back to its experts sooner than chance; below it, at the right, are the experts that it seldom uses.
"""

PAIRS = """
Of each layer the pair that meets most often compared with chance, among pairs on at least 0.5&nbsp;% of the tokens.
<code>moespeq pack --profile</code> puts such experts into different shards, so that drives read them in parallel.
"""

ENTROPY = """
100&nbsp;% is an even use of all experts of the layer. The lower, the fewer experts do the work, and the more a small
cache holds of it.
"""

LOAD = """
The expert that a layer uses most, against an even use. It is what a shard or a device that holds it has to bear.
"""

CACHE = """
Choose <code>--expert-cache</code> from it: the recorded routing, replayed for caches that start empty. Look-ahead
evicts what it needs last; the clairvoyant cache knows all that is to come, and no cache does better. Nothing is fetched
ahead here: a prefetch moves a read in time and saves none.
"""

DIVERGENCE = """
0 is the same use, 1 bit nothing in common. Where the lines are low, one profile stands for both domains; where they are
high, it does not.
"""

SERVING = """
Each row holds the {held} experts that its domain uses most, {share} of all, and never changes them; a cell is the share
of the column's uses that these serve. The diagonal is a domain served by its own profile.
"""

SPECIALISTS = """
Experts of which one domain makes two thirds of the use or more, all domains taken as equally long, and that
serve at least 1&nbsp;% of its tokens: {total} of {experts}{shown}
"""

COACTIVATION = """
Each picture is a layer, expert by expert from the top left. Orange pairs are chosen together more often than chance has
it, blue ones less. Chance is a choice of different experts by nothing but how much each is used. Packs put orange pairs
into different shards.
"""

SENSITIVITY = """
How much the loss would feel the rounding of a linear to INT4: squared gradient of the loss times squared rounding
error, summed over its weights, on {tokens} predicted tokens. Half of it estimates what rounding that linear alone adds
to the loss in nats a token. Only routed experts are ever quantised; the others show what that spares.
"""

SENSITIVE_LAYERS = """
<code>moespeq quantize --profile</code> holds the layers at the top of this order in 8 bits: {ranking}.
"""

EXPERTS = """
White is the mean expert of the model; each step of the scale is a factor of two. An expert that few tokens reach has a
small gradient, whatever its error.
"""

PROBE = """
The linears of one class rounded to nearest, all else as it is, on {tokens} tokens. <em>Other experts</em> is the share
of a token's experts that are no longer chosen, <em>any other</em> the share of tokens and layers with at least one such
expert, both over all layers, each variant with hidden states of its own. KL is that of the next token's distribution
from the model's; the loss is given as what rounding adds to it. The model as it is has a loss of {loss} nats a
token.{answers}
"""

READINGS = {
    "entropy": ENTROPY,
    "load": LOAD,
    "agreement": AGREEMENT,
    "agreement-next": AGREEMENT_NEXT,
    "kept-from-previous": KEPT,
    "reuse-distance": REUSE,
}
