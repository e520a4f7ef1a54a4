"""What the target records of a layer cost, added up while they are written."""

from __future__ import annotations

from collections import Counter
from typing import Any, Self

from moespeq_cli.pack.encode import EncodedExpert
from runtime.artifacts.record import RecordLayout

MATRICES = ("gate_up", "down")


class TargetTally:
    """Sums over target records, by matrix.

    Attributes:
        weights: by matrix.
        size_bytes: by matrix, of its blocks or its raw tensor.
        zero_codes, exceptions: by matrix, of residual records.
        raw: records stored raw, by reason.
    """

    def __init__(self) -> None:
        self.weights: Counter[str] = Counter()
        self.size_bytes: Counter[str] = Counter()
        self.zero_codes: Counter[str] = Counter()
        self.exceptions: Counter[str] = Counter()
        self.raw: Counter[str] = Counter()

    def add(self, expert: EncodedExpert, layout: RecordLayout) -> None:
        """Count an expert; `layout` is that of raw records."""
        if expert.why_raw is not None:
            self.raw[expert.why_raw] += 1
        for field in layout.fields:
            if field.name in MATRICES:
                counts = expert.counts.get(field.name)
                self.weights[field.name] += field.shape[0] * field.shape[1]
                self.size_bytes[field.name] += field.size_bytes if counts is None else counts.block_bytes
                self.zero_codes[field.name] += 0 if counts is None else counts.zero_codes
                self.exceptions[field.name] += 0 if counts is None else counts.exceptions

    def join(self, other: TargetTally) -> None:
        """Count what another tally has counted."""
        for name, counter in vars(other).items():
            getattr(self, name).update(counter)

    def bits(self) -> dict[str, float]:
        """Bits a weight of each matrix, tables and padding of the record aside."""
        return {name: round(8 * self.size_bytes[name] / self.weights[name], 4) for name in MATRICES}

    def as_json(self) -> dict[str, Any]:
        """For the journal of a run that may be stopped."""
        return {name: dict(counter) for name, counter in vars(self).items()}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Self:
        """What `as_json` gave."""
        tally = cls()
        for name in vars(tally):
            getattr(tally, name).update(body[name])
        return tally
