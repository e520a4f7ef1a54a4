"""The decoder of residual records that a process uses: compiled code, or NumPy on machines without a compiler."""

from __future__ import annotations

import ctypes
import functools
import math

import torch
from torch import Tensor

from runtime.artifacts.record import DraftRecord, RecordLayout
from runtime.artifacts.residual import WORK_BYTES, ResidualEncoding
from runtime.artifacts.residual_native import SOURCE, NativeDecoder
from runtime.model.families import ExpertWeights
from runtime.native import NotCompiled, load


class FastResidualEncoding(ResidualEncoding):
    """Residual records, decoded by compiled code where there is some."""

    def decode(
        self,
        buffer: Tensor,
        payload_bytes: int,
        layout: RecordLayout,
        draft: DraftRecord | None,
        room: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """As `ResidualEncoding.decode`, into `room` where it can; what compiled code refuses, the reference names."""
        decoder = compiled_decoder()
        if decoder is not None and draft is not None:
            room = torch.empty(layout.payload_bytes, dtype=torch.uint8) if room is None else room
            if decoder.decode(buffer, payload_bytes, layout, draft, room):
                return layout.views(room)
        return super().decode(buffer, payload_bytes, layout, draft)


def compiled_decoder() -> NativeDecoder | None:
    """The compiled decoder, or None where `why_slow` has a reason."""
    found = _find_decoder()
    return None if isinstance(found, str) else found


def why_slow() -> str | None:
    """Why residual records are decoded by NumPy in this process; None where compiled code does it."""
    found = _find_decoder()
    return found if isinstance(found, str) else None


def work_bytes(layout: RecordLayout) -> int:
    """Memory that decoding one record at a time takes."""
    if compiled_decoder() is not None:
        return layout.payload_bytes
    return WORK_BYTES * sum(math.prod(field.shape) for field in layout.fields if len(field.shape) == 2)


@functools.cache
def _find_decoder() -> NativeDecoder | str:
    try:
        return NativeDecoder(load(SOURCE, _agrees))
    except NotCompiled as reason:
        return str(reason)


def _agrees(library: ctypes.CDLL) -> bool:
    """Whether compiled code gives back a small record of any bits: units cut on both sides, zero codes, exceptions."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate_up": (36, 272), "down": (272, 18)}
    layout = RecordLayout.of("raw", [(name, "BF16", shape) for name, shape in shapes.items()])
    tensors = []
    for name, (rows, columns) in shapes.items():
        tensors += [
            (f"{name}.codes", "U8", (rows, columns // 2)),
            (f"{name}.scales", "F16", (rows, columns // 2)),
            (f"{name}.zeros", "U8", (rows, columns // 2)),
        ]
    coding = RecordLayout.of("rows", tensors)
    draft = DraftRecord(coding, torch.zeros(coding.payload_bytes, dtype=torch.uint8))
    for name, view in draft.views().items():
        view.copy_(torch.randint(0, 256 if name.endswith("codes") else 16, view.shape, generator=generator))
    words = {
        name: torch.randint(-(1 << 15), 1 << 15, shape, generator=generator).to(torch.int16)
        for name, shape in shapes.items()
    }
    gate, up = words["gate_up"].view(torch.bfloat16).chunk(2)
    payload = ResidualEncoding().encode(ExpertWeights(gate, up, words["down"].view(torch.bfloat16)), layout, draft)
    assert payload is not None
    room = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
    done = NativeDecoder(library).decode(payload, payload.numel(), layout, draft, room)
    found = layout.views(room)
    return done and all(torch.equal(found[name].view(torch.int16), words[name]) for name in shapes)
