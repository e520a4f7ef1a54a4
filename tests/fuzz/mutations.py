"""Values and files as somebody who means harm, or a failing disk, would leave them."""

from __future__ import annotations

import copy
import os
import random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

TIMES = int(os.environ.get("MOESPEQ_FUZZ", "0"))
"""How many times as many examples as in the suite, drawn anew; 0 takes the suite's, the same every time."""


def bounded(examples: int) -> settings:
    """So many examples, or MOESPEQ_FUZZ times as many at random."""
    return settings(
        max_examples=examples * max(TIMES, 1),
        deadline=None,
        derandomize=not TIMES,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**63, 2**64, 10**30, -(2**63)]) | st.integers()
SCALARS = (
    st.none()
    | st.booleans()
    | NUMBERS
    | st.floats()
    | st.sampled_from(["", "F32", "BF16", "I4", "..", "/etc/passwd", "a" * 300, "\ud800", "\0", "1", "[1]"])
    | st.text(max_size=6)
)
NESTED = st.recursive(
    SCALARS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=6), values, max_size=3),
    max_leaves=6,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container and key inside a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(value, key), *places(value[key])]]


@st.composite
def changed(draw: st.DrawFn, value: Any, most: int = 3) -> Any:
    """A JSON value with one to three things replaced, removed, added or copied from elsewhere in it."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, most))):
        options = places(value)
        if not options:
            return draw(NESTED)
        container, key = draw(st.sampled_from(options))
        change = draw(st.sampled_from(["replace", "replace", "remove", "add", "copy"]))
        if change == "replace":
            container[key] = draw(NESTED)
        elif change == "remove":
            del container[key]
        elif change == "copy":
            container[key] = copy.deepcopy(draw(st.sampled_from([inside[name] for inside, name in options])))
        elif isinstance(container, dict):
            container[draw(st.text(max_size=6))] = draw(NESTED)
        else:
            container.insert(key, draw(NESTED))
    return value


def damage(data: bytes, seed: int) -> bytes:
    """Bytes with some flipped, a piece cut out, doubled or zeroed, or the end lost; a seed is short to report."""
    draw, body = random.Random(seed), bytearray(data)
    for _ in range(draw.randint(1, 3)):
        if not body:
            break
        at, length = draw.randrange(len(body)), draw.randint(1, 64)
        way = draw.choice(["flip", "flip", "cut", "double", "end", "zero"])
        if way == "flip":
            body[at] ^= draw.randint(1, 255)
        elif way == "cut":
            del body[at : at + length]
        elif way == "double":
            body[at:at] = body[at : at + length]
        elif way == "end":
            del body[at:]
        else:
            body[at : at + length] = bytes(min(length, len(body) - at))
    return bytes(body)


SEEDS = st.integers(0, 2**32 - 1)


def damaged(data: bytes) -> st.SearchStrategy[bytes]:
    """`damage` of every seed."""
    return SEEDS.map(lambda seed: damage(data, seed))
