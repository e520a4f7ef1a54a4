"""Caches on recorded routing: what each policy would have read, without the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runtime.artifacts.profile import CacheCurve, Profile, TracedSequence
from runtime.memory.clairvoyant import Replay, Trace, belady, replay
from runtime.memory.eviction import make_policy
from runtime.memory.location import ExpertKey

SHARES = (0.05, 0.1, 0.15, 0.25, 0.35, 0.5, 0.65, 0.8, 1.0)  # of all experts
WINDOW = 16  # tokens, as `moespeq run` drafts by default
MAX_DEMANDS = 6144  # replayed at most: a token is as many demands as there are layers with experts
PIECE_TOKENS = 128  # of a sequence, before the next one comes: texts alternate, as they do for a service


@dataclass(frozen=True, slots=True)
class Recording:
    """Some recorded tokens as demands in order, and as the draft foresaw them.

    Attributes:
        trace: one demand a token and layer.
        foreseen: the draft's routing in the same form; None where no draft was measured.
        num_layers: demands of a token.
        num_experts: different ones that there are.
    """

    trace: Trace
    foreseen: Trace | None
    num_layers: int
    num_experts: int

    @classmethod
    def of(cls, profile: Profile, sequences: Sequence[TracedSequence]) -> Recording:
        """Pieces of the sequences in turn, until enough are there or none is left."""
        layers = profile.manifest.moe_layers
        tokens = max(1, MAX_DEMANDS // len(layers))
        longest = max((len(sequence.target) for sequence in sequences), default=0)
        pieces = [
            (sequence, slice(start, start + PIECE_TOKENS))
            for start in range(0, longest, PIECE_TOKENS)
            for sequence in sequences
        ]
        target = [row for sequence, piece in pieces for row in sequence.target[piece].tolist()][:tokens]
        draft = [row for s, piece in pieces if s.draft is not None for row in s.draft[piece].tolist()][:tokens]
        foreseen = _demands(draft, layers) if profile.manifest.draft is not None else None
        return cls(_demands(target, layers), foreseen, len(layers), len(layers) * profile.manifest.num_experts)

    @property
    def tokens(self) -> int:
        """How many are replayed."""
        return len(self.trace) // self.num_layers

    def lookahead(self, num_slots: int, window: int, sizes: Mapping[ExpertKey, int] | None = None) -> Replay:
        """Eviction by the draft's rows of so many tokens, the running one included."""
        return replay(
            self.trace,
            num_slots,
            make_policy("lookahead"),
            record_bytes=None if sizes is None else sizes.__getitem__,
            window=window,
            foreseen=self.foreseen,
            row_demands=self.num_layers,
        )


def _demands(tokens: list[list[list[int]]], layers: Sequence[int]) -> Trace:
    """[token][layer][place] of expert numbers to one demand a token and layer."""
    return [[(layer, expert) for expert in chosen] for row in tokens for layer, chosen in zip(layers, row, strict=True)]


def cache_curve(profile: Profile) -> CacheCurve | None:
    """Hit rates by cache size; None where no routing was recorded."""
    recording = Recording.of(profile, list(profile.traces()))
    if not recording.trace:
        return None
    slots = tuple(sorted({max(1, round(share * recording.num_experts)) for share in SHARES}))
    hits: dict[str, list[float]] = {"lru": [], "lookahead": [], "belady": []}
    for count in slots:
        lru = replay(recording.trace, count, make_policy("lru"))
        hits["lru"].append(lru.hit_rate or 0.0)
        hits["lookahead"].append(recording.lookahead(count, WINDOW).hit_rate or 0.0)
        hits["belady"].append(1 - belady(recording.trace, count) / lru.requests)
    return CacheCurve(
        tokens=recording.tokens,
        window=WINDOW,
        foresight="target" if recording.foreseen is None else "draft",
        slots=slots,
        hits={name: tuple(values) for name, values in hits.items()},
    )
