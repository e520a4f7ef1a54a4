"""An expert's two payloads, from the checkpoint and the quantized artifact."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moespeq_cli.pack.plan import PackPlan
from runtime.artifacts.encodings import ENCODINGS, RAW, encode_target
from runtime.artifacts.quantized import Quantized
from runtime.artifacts.record import DRAFT_LAYOUT, DraftRecord, RecordLayout, encode_draft, target_tensors
from runtime.artifacts.residual import ResidualCounts, ResidualEncoding
from runtime.memory.location import ExpertKey, name_of
from runtime.model.families import PROJECTIONS, ExpertWeights, read_expert


@dataclass(frozen=True, slots=True)
class EncodedExpert:
    """An expert as it will be written.

    Attributes:
        payloads: encoding and bytes by side.
        counts: of a residual target record, by matrix; empty for a raw one.
        why_raw: the reason for a raw target record; None for another.
    """

    payloads: dict[str, tuple[str, torch.Tensor]]
    counts: dict[str, ResidualCounts]
    why_raw: str | None


def encode_expert(plan: PackPlan, key: ExpertKey, draft_layout: RecordLayout) -> EncodedExpert:
    """The payload and encoding of each side; the target's is decoded again and compared with the source."""
    weights = read_expert(plan.checkpoint, plan.spec, *key)
    draft = read_draft(plan.quantized, key, weights, draft_layout)
    encoding, target = encode_target(plan.encoding, weights, plan.target_layout, draft)
    decoded = ENCODINGS[encoding].decode(target, target.numel(), plan.target_layout, draft)
    assert same_bits(decoded, target_tensors(weights)), f"{encoding} does not give back the weights of {name_of(key)}"
    payloads = {"target": (encoding, target), "draft": (DRAFT_LAYOUT, draft.data)}
    if encoding == RAW.name:
        return EncodedExpert(payloads, {}, plan.encoding.why_raw(plan.target_layout, draft))
    return EncodedExpert(payloads, ResidualEncoding().counts(target, plan.target_layout, draft), None)


def read_draft(quantized: Quantized, key: ExpertKey, weights: ExpertWeights, layout: RecordLayout) -> DraftRecord:
    """The draft record that a quantized artifact holds for an expert."""
    linears = {projection: quantized.linear(*key, projection) for projection in PROJECTIONS}
    return encode_draft(linears, weights, layout, name_of(key))


def same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors agree in every bit, NaNs and signed zeros included."""
    return left.keys() == right.keys() and all(
        tensor.dtype == right[name].dtype
        and tensor.shape == right[name].shape
        and torch.equal(tensor.reshape(-1).view(torch.uint8), right[name].reshape(-1).view(torch.uint8))
        for name, tensor in left.items()
    )
