from __future__ import annotations

from tests.decode.conftest import pack_of

__all__ = ["pack_of"]
