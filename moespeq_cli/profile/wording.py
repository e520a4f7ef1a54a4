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
code { font-size: .92em; white-space: nowrap }
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
Of each layer the pair that meets most often compared with chance, among pairs on at least 0.5 % of the tokens.
<code>moespeq pack --profile</code> puts such experts into different shards, so that drives read them in parallel.
"""

READINGS = {
    "agreement": AGREEMENT,
    "agreement-next": AGREEMENT_NEXT,
    "kept-from-previous": KEPT,
    "reuse-distance": REUSE,
}
