"""How a token is chosen from logits, by the draft and by the target, so that the text is the target's.

Three rules stand behind one question: given the target's logits at a position and what the draft proposed there, which
token comes next? The proposal is accepted exactly when the answer equals it.

* temperature 0: the most likely token.
* `coupled` (the default when sampling): draft and target both take the largest of log-probability plus the same Gumbel
  noise, which depends on the seed and the position alone. The target's choice ignores the proposal, so a seed gives the
  same text with and without speculation, at any window (Daliri, Musco, Suresh: arXiv 2408.07978).
* `rejection`: accept with probability min(1, target / draft), else draw from the positive part of their difference
  (Leviathan, Kalman, Matias: arXiv 2211.17192). Proposals are accepted more often; the text of a seed depends on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.errors import InputError

RULES = ("coupled", "rejection")
_NOISE, _DRAFT, _ACCEPT, _RESAMPLE = range(4)
_LIKELY = 1024  # tokens among which top-p is looked for first


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """What the user asked for.

    Attributes:
        temperature: 0 is greedy.
        top_p: keep the most likely tokens that together reach this probability; 1 keeps all.
        sample_top_k: keep so many of the most likely tokens; 0 keeps all.
        seed: of all random choices.
        rule: `coupled` or `rejection`.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    sample_top_k: int = 0
    seed: int = 0
    rule: str = "coupled"

    @property
    def depends_on_proposals(self) -> bool:
        """Whether the text of a seed is another one where other tokens are proposed."""
        return self.temperature > 0 and self.rule == "rejection"

    def __post_init__(self) -> None:
        checks = (
            (0 <= self.temperature < float("inf"), "a finite --temperature of 0 or more", self.temperature),
            (0 < self.top_p <= 1, "a --top-p above 0 and at most 1", self.top_p),
            (self.sample_top_k >= 0, "a --sample-top-k of 0 (all) or more", self.sample_top_k),
            (0 <= self.seed < 2**63, "a --seed from 0 to 2**63 - 1", self.seed),
            (self.rule in RULES, f"an --accept rule of {', '.join(RULES)}", self.rule),
        )
        for good, expected, found in checks:
            if not good:
                raise InputError(expected=expected, found=str(found), mend="correct the option")


@dataclass(frozen=True, slots=True)
class Scores:
    """Logits of one position that lie on another device.

    Attributes:
        top: the most likely token.
        values: gives all of them, float32 [vocab_size], in this machine's memory.
    """

    top: int
    values: Callable[[], Tensor]

    def argmax(self) -> int:
        """As a tensor's."""
        return self.top


Logits = Tensor | Scores


@dataclass(frozen=True, slots=True)
class Proposal:
    """A drafted token and, where the rule needs it, the distribution that it was drawn from: float64 [vocab_size]."""

    token: int
    probs: Tensor | None = None


class Chooser:
    """Chooses tokens by the settings; all randomness comes from (seed, position, purpose)."""

    def __init__(self, settings: SamplingSettings) -> None:
        self.settings = settings
        self._noise: dict[int, Tensor] = {}  # of drafted positions, until the target has taken its turn

    def draft(self, logits: Logits, position: int) -> Proposal:
        """The draft's proposal for a position, from its logits [vocab_size]."""
        if self.settings.temperature == 0:
            return Proposal(int(logits.argmax()))
        probs = self.distribution(logits)
        if self.settings.rule == "coupled":
            return Proposal(self._gumbel_max(probs, position, last_use=False))
        return Proposal(self._draw(probs, position, _DRAFT), probs)

    def target(self, logits: Logits, position: int, proposal: Proposal | None) -> int:
        """The token at a position, from the target's logits [vocab_size]; equal to the proposal means accepted."""
        if self.settings.temperature == 0:
            return int(logits.argmax())
        probs = self.distribution(logits)
        if self.settings.rule == "coupled":
            return self._gumbel_max(probs, position, last_use=True)
        if proposal is None or proposal.probs is None:
            return self._draw(probs, position, _RESAMPLE)
        ratio = probs[proposal.token] / proposal.probs[proposal.token]
        if self._uniform(1, position, _ACCEPT)[0] < ratio:
            return proposal.token
        rest = (probs - proposal.probs).clamp_min(0)
        return self._draw(rest / rest.sum(), position, _RESAMPLE)

    def distribution(self, logits: Logits) -> Tensor:
        """float64 [vocab_size]: softmax at the temperature, cut by top-k, then by top-p, and made to sum to 1."""
        settings = self.settings
        if isinstance(logits, Scores):
            logits = logits.values()
        scaled = (logits.double() - logits.max()) / settings.temperature
        if 0 < settings.sample_top_k < scaled.numel():
            lowest = scaled.topk(settings.sample_top_k).values[-1]
            scaled = scaled.masked_fill(scaled < lowest, float("-inf"))
        probs = scaled.softmax(dim=-1)
        return _nucleus(probs, settings.top_p) if settings.top_p < 1 else probs

    def _gumbel_max(self, probs: Tensor, position: int, last_use: bool) -> int:
        noise = self._noise.pop(position, None) if last_use else self._noise.get(position)
        if noise is None:
            noise = -torch.log(-torch.log(self._uniform(probs.numel(), position, _NOISE)))
            if not last_use:
                self._noise[position] = noise
        return int((probs.log() + noise).argmax())

    def _draw(self, probs: Tensor, position: int, purpose: int) -> int:
        mark = self._uniform(1, position, purpose)
        return min(int(torch.searchsorted(probs.cumsum(dim=-1), mark)[0]), int(probs.nonzero()[-1]))

    def _uniform(self, count: int, position: int, purpose: int) -> Tensor:
        """float64 [count] in (0, 1), a stream of its own for each seed, position and purpose."""
        philox = np.random.Philox(key=[self.settings.seed, 4 * position + purpose])
        return torch.from_numpy(np.random.Generator(philox).random(count)).clamp_(1e-300, 1 - 2**-53)


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """The most likely tokens that together reach `top_p`, made to sum to 1; the rest 0."""
    count = probs.numel()
    index = torch.arange(count)
    if count > _LIKELY and (likely := probs.topk(_LIKELY)).values.sum() >= top_p:
        index = likely.indices.sort().values
    values, order = probs[index].sort(descending=True, stable=True)  # of equals the first comes first
    index = index[order]
    keep = values.cumsum(dim=-1) - values < top_p
    kept = torch.zeros_like(probs).index_copy_(0, index[keep], values[keep])
    return kept / kept.sum()
