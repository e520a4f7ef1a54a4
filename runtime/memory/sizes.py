"""Sizes as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

from runtime.errors import InputError

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{middle}b": base**power
    for middle, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("kmgt", start=1)
}
_PATTERN = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*|%)", re.IGNORECASE)


def parse_size(text: str | int, whole: int | None = None) -> int:
    """Bytes of "12GB", "512MiB", "1.5 GiB", "196608", or "25%" of `whole`; fractions of a byte are dropped.

    Decimal units are powers of 1000 (GB = 10**9), those with an i are powers of 1024 (GiB = 2**30); case does not
    matter.

    Raises:
        InputError: not a size, negative, over 100 %, or a share where nothing can be shared.
    """
    found = _PATTERN.fullmatch(str(text).strip()) if not isinstance(text, bool) else None
    if found is None:
        raise _refusal(text)
    number, unit = Fraction(found[1]), found[2].lower()
    if unit == "%":
        if whole is None or number > 100:
            raise _refusal(text)
        return int(number * whole / 100)
    if unit not in _UNITS:
        raise _refusal(text)
    return int(number * _UNITS[unit])


def format_size(num_bytes: int) -> str:
    """The size in the largest decimal unit that leaves a whole digit: "12.0 GB", "196.6 kB", "512 B"."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (1000, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} B"


def _refusal(text: object) -> InputError:
    return InputError(
        expected="a size such as 12GB, 512MiB or, for an expert cache, 25%",
        found=repr(text),
        mend="write a number and one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, or up to 100%",
    )
