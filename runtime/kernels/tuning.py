"""The measured table of which backend computes a layer at which number of tokens, as a profile holds it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.errors import InputError
from runtime.kernels.shape import BITS, ExpertShape, WeightForm

BACKENDS = ("fused", "gemm", "grouped", "loop")
INVARIANT_TOKENS = 16  # up to here a row must give the same bits in any batch, so one backend computes all of them


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Up to how many tokens a backend computes; None is any number."""

    up_to_tokens: int | None
    backend: str


@dataclass(frozen=True, slots=True)
class DispatchEntry:
    """The ranges of one layer geometry and weight form, ascending; the last one has no end.

    Raises:
        InputError: an unknown form or backend, no ranges, or ranges that do not ascend, end early, or part the first
            `INVARIANT_TOKENS` tokens.
    """

    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    top_k: int
    form: str
    ranges: tuple[TokenRange, ...]

    def __post_init__(self) -> None:
        where = f"kernel_dispatch of {self.form} {self.num_experts}:{self.top_k}:" + (
            f"{self.hidden_size}x{self.moe_intermediate_size}"
        )
        ends = [part.up_to_tokens for part in self.ranges]
        inner = [end for end in ends[:-1] if end is not None]
        checks: tuple[tuple[bool, str, object], ...] = (
            (self.form in BITS, f"a form of {', '.join(BITS)}", self.form),
            (bool(ends) and ends[-1] is None, "a last range without an end (up_to_tokens: null)", ends),
            (len(inner) == len(ends) - 1, "an end for every range but the last", ends),
            (all(a < b for a, b in itertools.pairwise(inner)), "ranges that ascend", ends),
            (
                all(end >= INVARIANT_TOKENS for end in inner),
                f"one backend up to {INVARIANT_TOKENS} tokens, where a row's bits may not depend on its batch",
                ends,
            ),
            (
                all(part.backend in BACKENDS for part in self.ranges),
                f"backends of {', '.join(BACKENDS)}",
                [part.backend for part in self.ranges],
            ),
        )
        for good, expected, found in checks:
            if not good:
                raise InputError(
                    expected=f"{expected} in {where}", found=repr(found), mend="measure again with bench kernels --tune"
                )

    @property
    def key(self) -> tuple[int, int, int, int, str]:
        """What a layer is found by."""
        return self.hidden_size, self.moe_intermediate_size, self.num_experts, self.top_k, self.form

    def backend(self, num_tokens: int) -> str:
        """What computes this many tokens."""
        return next(
            part.backend for part in self.ranges if part.up_to_tokens is None or num_tokens <= part.up_to_tokens
        )


@dataclass(frozen=True, slots=True)
class DispatchTable:
    """Entries of several layers, each geometry and form once; empty where nothing was measured."""

    entries: tuple[DispatchEntry, ...] = ()

    def find(self, shape: ExpertShape, form: WeightForm) -> DispatchEntry | None:
        """What was measured for such a layer, or None. Group sizes share an entry: they change little."""
        key = shape.hidden_size, shape.moe_intermediate_size, shape.num_experts, shape.top_k, form.kind
        return next((entry for entry in self.entries if entry.key == key), None)

    def merged(self, newer: DispatchTable) -> DispatchTable:
        """This table with the entries of a newer one, which win."""
        entries = {entry.key: entry for entry in (*self.entries, *newer.entries)}
        return DispatchTable(tuple(entries.values()))

    def to_list(self) -> list[dict[str, Any]]:
        """Plain lists and mappings, for YAML and JSON."""
        return [dataclasses.asdict(entry) | {"ranges": _plain(entry.ranges)} for entry in self.entries]

    @classmethod
    def from_list(cls, value: object, where: str) -> DispatchTable:
        """The inverse of `to_list`.

        Args:
            value: what YAML gave.
            where: the file, for messages.

        Raises:
            InputError: a field missing, unknown or of another type, a layer twice, or an impossible entry.
        """
        entries = []
        for item in _sequence(value, f"kernel_dispatch of {where}"):
            fields = _fields(item, DispatchEntry, f"kernel_dispatch of {where}")
            ranges = [
                TokenRange(**_fields(part, TokenRange, f"ranges of {where}"))
                for part in _sequence(fields["ranges"], f"ranges of {where}")
            ]
            entries.append(DispatchEntry(**fields | {"ranges": tuple(ranges)}))
        table = cls(tuple(entries))
        if len({entry.key for entry in entries}) < len(entries):
            raise InputError(
                expected=f"each layer and form once in kernel_dispatch of {where}",
                found=str(sorted(entry.key for entry in entries)),
                mend="remove the entry that is no longer true",
            )
        return table


def _plain(ranges: Iterable[TokenRange]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(part) for part in ranges]


def _sequence(value: object, where: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise InputError(expected=f"a list as {where}", found=repr(value), mend="correct the profile")
    return value


_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "str": (str,), "int | None": (int, type(None))}


def _fields(value: object, cls: type, where: str) -> dict[str, Any]:
    names = {field.name: str(field.type) for field in dataclasses.fields(cls)}
    if not isinstance(value, Mapping) or set(value) != set(names):
        raise InputError(
            expected=f"{', '.join(names)} in an item of {where}", found=repr(value), mend="correct the profile"
        )
    for name, kind in names.items():
        if kind in _KINDS and type(value[name]) not in _KINDS[kind]:
            raise InputError(
                expected=f"{name} as {kind} in {where}", found=repr(value[name]), mend="correct the profile"
            )
    return dict(value)
