"""The ways to write an expert's exact weights, by name."""

from __future__ import annotations

from typing import Protocol

import torch

from runtime.artifacts.record import DraftRecord, RecordLayout, target_tensors
from runtime.artifacts.residual_decoder import FastResidualEncoding
from runtime.errors import ArtifactError
from runtime.model.families import ExpertWeights


class TargetEncoding(Protocol):
    """A way to write an expert's exact weights.

    Records may differ in length, and one that an encoding would not make smaller is stored `raw`: the index of a
    pack names each record's own encoding and length, and a slot must hold `max_bytes`.
    """

    @property
    def name(self) -> str: ...

    def max_bytes(self, layout: RecordLayout) -> int:
        """The longest payload this encoding writes for experts of this (raw) layout."""

    def encode(self, weights: ExpertWeights, layout: RecordLayout, draft: DraftRecord | None) -> torch.Tensor | None:
        """The payload, uint8 [payload_bytes]; None asks for `raw` instead."""

    def decode(
        self,
        buffer: torch.Tensor,
        payload_bytes: int,
        layout: RecordLayout,
        draft: DraftRecord | None,
        room: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Exact `gate_up`, `down` and biases from a payload and, where the encoding needs it, the draft record.

        Args:
            buffer: uint8 [>= payload_bytes]; the tensors may be views of it.
            payload_bytes: of the record.
            layout: of raw records.
            draft: the expert's.
            room: uint8 [>= layout.payload_bytes] for the tensors, so that none is allocated; they may be elsewhere.

        Raises:
            ArtifactError: the payload contradicts itself or the draft record.
        """

    def why_raw(self, layout: RecordLayout, draft: DraftRecord | None) -> str:
        """Why a record of another name than this encoding's was stored `raw`, in a few words."""


class RawEncoding:
    """The stored weights as they are; decoding copies nothing."""

    name = "raw"

    def max_bytes(self, layout: RecordLayout) -> int:
        return layout.payload_bytes

    def encode(self, weights: ExpertWeights, layout: RecordLayout, draft: DraftRecord | None) -> torch.Tensor | None:
        return layout.fill(target_tensors(weights))

    def decode(
        self,
        buffer: torch.Tensor,
        payload_bytes: int,
        layout: RecordLayout,
        draft: DraftRecord | None,
        room: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        if payload_bytes != layout.payload_bytes:
            raise ArtifactError(
                expected=f"a raw record of {layout.payload_bytes} bytes",
                found=f"{payload_bytes} bytes",
                mend="make the pack again with `moespeq pack --force`",
            )
        return layout.views(buffer)

    def why_raw(self, layout: RecordLayout, draft: DraftRecord | None) -> str:
        return "asked for"


RAW = RawEncoding()
ENCODINGS: dict[str, TargetEncoding] = {encoding.name: encoding for encoding in (RAW, FastResidualEncoding())}


def encode_target(
    encoding: TargetEncoding, weights: ExpertWeights, layout: RecordLayout, draft: DraftRecord | None
) -> tuple[str, torch.Tensor]:
    """One target record and the name of the encoding it ended up in."""
    data = encoding.encode(weights, layout, draft)
    if data is not None and (encoding.name == RAW.name or data.numel() < layout.payload_bytes):
        return encoding.name, data
    return RAW.name, layout.fill(target_tensors(weights))
