"""What a run did, counted while it decodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.memory.location import ExpertKey
from runtime.memory.stats import CacheStats


@dataclass(slots=True)
class DecodeStats:
    """Counts and seconds of decoding; the expert cache counts its own in `cache`.

    Attributes:
        new_tokens: tokens given out; those of a block that the caller no longer takes (a stop text) do not count.
        proposals_judged: drafted tokens that met the target's choice, verified or compared with its next token.
        proposals_right: those that were equal.
        accepted_by_round: how many proposals were accepted, by how many were verified: {"2": {"0": 3, "2": 40}}.
        trace: what the target asked the expert cache for, in order: one list of experts a layer and block of the
            prompt, then one a layer and row; kept where an engine was asked to.
    """

    cache: CacheStats
    prompt_tokens: int = 0
    new_tokens: int = 0
    rounds: int = 0
    proposals_verified: int = 0
    proposals_accepted: int = 0
    draft_steps: int = 0
    verify_passes: int = 0
    verify_rows: int = 0
    prefill_s: float = 0.0
    prefill_read_bytes: int = 0
    prefill_wait_s: float = 0.0
    prefill_link_s: float = 0.0
    prefill_idle_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    total_s: float = 0.0
    experts_compared: int = 0
    experts_agreed: int = 0
    proposals_judged: int = 0
    proposals_right: int = 0
    accepted_by_round: dict[int, Counter[int]] = field(default_factory=dict)
    trace: list[list[ExpertKey]] = field(default_factory=list)

    def prefill_done(self, tokens: int, seconds: float, before: CacheStats) -> None:
        """A prompt of so many tokens is in the KV cache; `before` are the cache's counts when it began."""
        self.prompt_tokens += tokens
        self.prefill_s += seconds
        self.prefill_read_bytes += self.cache.read_bytes - before.read_bytes
        self.prefill_wait_s += self.cache.wait_s - before.wait_s
        self.prefill_link_s += self.cache.link_busy_s - before.link_busy_s
        self.prefill_idle_s += self.cache.link_idle_s - before.link_idle_s

    def round_done(self, tried: int, accepted: int) -> None:
        """A verification of `tried` proposals accepted so many."""
        self.rounds += 1
        self.proposals_verified += tried
        self.proposals_accepted += accepted
        self.accepted_by_round.setdefault(tried, Counter())[accepted] += 1

    def pass_done(self, rows: int, seconds: float) -> None:
        """The target ran so many rows, waiting included."""
        self.verify_passes += 1
        self.verify_rows += rows
        self.verify_s += seconds

    def row_done(self, route: Sequence[ExpertKey], drafted: Sequence[ExpertKey] | None, right: bool) -> None:
        """A row was kept.

        Args:
            route: the target's experts.
            drafted: the draft's experts for the same input, None where nothing was drafted from it.
            right: whether the drafted token is the target's.
        """
        if drafted is not None:
            self.proposals_judged += 1
            self.proposals_right += right
            self.experts_compared += len(route)
            self.experts_agreed += len(set(route) & set(drafted))

    def as_json(self) -> dict[str, Any]:
        """All figures as one JSON object; rates are null where nothing was counted."""
        generated_s = self.total_s - self.prefill_s
        busy_s, idle_s = self.cache.link_busy_s - self.prefill_link_s, self.cache.link_idle_s - self.prefill_idle_s
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "ms_per_token": _ratio(1e3 * generated_s, self.new_tokens),
            "tokens_per_s": _ratio(self.new_tokens, generated_s),
            "rounds": self.rounds,
            "tokens_per_round": _ratio(self.new_tokens, self.rounds),
            "acceptance": _ratio(self.proposals_right, self.proposals_judged),
            "proposals_judged": self.proposals_judged,
            "proposals_verified": self.proposals_verified,
            "proposals_accepted": self.proposals_accepted,
            "accepted_per_round": _ratio(self.proposals_accepted, self.rounds),
            "accepted_by_round": {
                str(tried): {str(n): count for n, count in sorted(counts.items())}
                for tried, counts in sorted(self.accepted_by_round.items())
            },
            "routing_agreement": _ratio(self.experts_agreed, self.experts_compared),
            "draft_steps": self.draft_steps,
            "verify_passes": self.verify_passes,
            "verify_rows": self.verify_rows,
            "seconds": {
                "prefill": self.prefill_s,
                "draft": self.draft_s,
                "verify": self.verify_s,
                "waiting_for_experts": self.cache.wait_s - self.prefill_wait_s,
                "waiting_for_experts_of_prompts": self.prefill_wait_s,
                "total": self.total_s,
            },
            "prefill_read_bytes": self.prefill_read_bytes,
            "bytes_per_token": _ratio(self.cache.read_bytes - self.prefill_read_bytes, self.new_tokens),
            "link_utilisation": _ratio(busy_s, generated_s),
            "link_utilisation_while_missing": _ratio(busy_s, busy_s + idle_s),
            "link_bytes_per_s": _ratio(self.cache.read_bytes, self.cache.link_busy_s),
            "expert_cache": self.cache.snapshot(),
        }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
