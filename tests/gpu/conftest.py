from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.decode.conftest import embedded, pack_of

__all__ = ["embedded", "pack_of"]


@pytest.fixture(autouse=True)
def quick_turns() -> Iterator[None]:
    """A pass in a thread of its own takes turns with the host's: at Python's usual 5 ms a test may take minutes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)
