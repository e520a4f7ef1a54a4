"""Small images as PNG, without a library: one pixel a value."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence


def encode(rows: Sequence[Sequence[str]]) -> bytes:
    """A PNG of colours `#rrggbb`, one pixel each, all rows of one length; PNG specification, colour type 2."""
    width = len(rows[0])
    data = b"".join(b"\0" + b"".join(bytes.fromhex(color[1:]) for color in row) for row in rows)
    header = struct.pack(">IIBBBBB", width, len(rows), 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(data, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, body) for kind, body in chunks)


def data_uri(rows: Sequence[Sequence[str]]) -> str:
    """The same as a `data:` address, for a page that is one file."""
    return "data:image/png;base64," + base64.b64encode(encode(rows)).decode()


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
