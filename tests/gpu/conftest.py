from __future__ import annotations

from tests.decode.conftest import embedded, pack_of

__all__ = ["embedded", "pack_of"]
