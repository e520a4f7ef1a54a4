"""An expert's two payloads, from the checkpoint and the quantized artifact."""

from __future__ import annotations

import torch

from moespeq_cli.pack.plan import PackPlan
from runtime.artifacts.encodings import ENCODINGS, encode_target
from runtime.artifacts.quantized import Quantized
from runtime.artifacts.record import DRAFT_LAYOUT, DraftRecord, RecordLayout, encode_draft, target_tensors
from runtime.memory.location import ExpertKey, name_of
from runtime.model.families import PROJECTIONS, ExpertWeights, read_expert


def encode_expert(plan: PackPlan, key: ExpertKey, draft_layout: RecordLayout) -> dict[str, tuple[str, torch.Tensor]]:
    """The payload and encoding of each side; the target's is decoded again and compared with the source."""
    weights = read_expert(plan.checkpoint, plan.spec, *key)
    draft = read_draft(plan.quantized, key, weights, draft_layout)
    encoding, target = encode_target(plan.encoding, weights, plan.target_layout, draft)
    decoded = ENCODINGS[encoding].decode(target, target.numel(), plan.target_layout, draft)
    assert same_bits(decoded, target_tensors(weights)), f"{encoding} does not give back the weights of {name_of(key)}"
    return {"target": (encoding, target), "draft": (DRAFT_LAYOUT, draft.data)}


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
