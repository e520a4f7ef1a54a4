"""A built model where a run on a GPU wants it: dense part and draft on the device, exact experts in host memory."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moespeq_cli.bench.synthetic.architecture import Architecture, Role, TensorSpec
from moespeq_cli.bench.synthetic.residual import ResidualEncoder
from moespeq_cli.bench.synthetic.tensors import TensorMaker
from runtime.artifacts.record import align_up
from runtime.gpu.geometry import expert_shape
from runtime.gpu.host_tier import Arena, PinnedPool
from runtime.gpu.model import DeviceModel
from runtime.gpu.parts import Parts, Toolkit, make_bank
from runtime.gpu.residual_facts import ResidualFacts
from runtime.gpu.shortage import shortage
from runtime.kernels.layout import SlotLayout
from runtime.kernels.reference import quantize
from runtime.kernels.shape import Activation, WeightForm
from runtime.kernels.units import Codes
from runtime.memory.location import ExpertKey, name_of
from runtime.model.families import MoeSpec

DRAFT_FORM = WeightForm("int4", 128)
_AT_ONCE = 4  # experts that are rounded together: float32 copies of all of a layer would take gigabytes


def spec_of(architecture: Architecture) -> MoeSpec:
    """The facts that the stages share, of a model that has no folder."""
    return MoeSpec(
        model_type=architecture.model_type,
        num_layers=architecture.num_layers,
        moe_layers=tuple(range(architecture.first_moe_layer, architecture.num_layers)),
        num_experts=architecture.num_experts,
        top_k=architecture.top_k,
        hidden_size=architecture.hidden_size,
        moe_intermediate_size=architecture.moe_intermediate_size,
        dtype="BF16",
        has_bias=False,
        layout=0,
    )


class MadeRecords:
    """Sizes and names of records that were never on a disk.

    Args:
        slot_bytes: of the largest.
        sizes: of each; None where all are alike.
    """

    def __init__(self, slot_bytes: int, sizes: Mapping[ExpertKey, int] | None = None) -> None:
        self.max_record_bytes, self._sizes = slot_bytes, sizes

    def record_bytes(self, key: ExpertKey) -> int:
        """Padding included."""
        return self.max_record_bytes if self._sizes is None else self._sizes[key]

    def describe(self, key: ExpertKey) -> str:
        """Layer and expert."""
        return f"the built model ({name_of(key)})"


def build_parts(
    config: Any, toolkit: Toolkit, context: int, seed: int = 0, advance: Callable[[], None] = lambda: None
) -> Parts:
    """`build_encodings` with raw records alone."""
    return build_encodings(config, toolkit, context, seed, advance)["raw"]


def build_encodings(
    config: Any,
    toolkit: Toolkit,
    context: int,
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
    residual: bool = False,
) -> dict[str, Parts]:
    """Build a model straight into memory.

    Args:
        config: from `make_config`.
        toolkit: what will compute; tensors are made on its device.
        context: tokens of the KV cache.
        seed: of the weights.
        advance: called after each layer's experts.
        residual: whether to make residual records too.

    Returns:
        The model by the encoding of its exact experts, `raw` and as asked for `residual`: one dense part and one draft.

    Raises:
        PlanError: the host has not the memory for the exact experts, or the device for the others.
    """
    device = toolkit.accelerator.device
    maker = TensorMaker(Architecture.of(config), seed, device)
    spec = spec_of(maker.architecture)
    shape = expert_shape(spec, Activation.silu)
    tensors = {tensor.name: tensor for tensor in maker.architecture.tensors()}
    routed = {
        name: tensor
        for name, tensor in tensors.items()
        if ".experts." in name and tensor.role in (Role.gate, Role.routed_down)
    }
    dense = [name for name in tensors if name not in routed]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
        with shortage("device memory for the dense weights", "build fewer layers (--layers)"):
            model = DeviceModel(
                Path(folder), spec, lambda name: maker.make(tensors[name]), dense, device, context, toolkit.rows
            )
    exact = SlotLayout(shape, WeightForm("bf16"))
    pool = PinnedPool(spec.num_records, exact.slot_bytes)
    slots = {key: slot for slot, key in enumerate(spec.expert_keys())}
    encoder = ResidualEncoder(SlotLayout(shape, DRAFT_FORM), device) if residual else None
    records: dict[ExpertKey, Tensor] = {}

    def layers() -> Iterator[tuple[SlotLayout, Tensor]]:
        layout = SlotLayout(shape, DRAFT_FORM)
        for layer_id in spec.moe_layers:
            bank = layout.new_pool(spec.num_experts, device)
            for first in range(0, spec.num_experts, _AT_ONCE):
                experts = range(first, min(first + _AT_ONCE, spec.num_experts))
                made = [_expert(maker, routed, layer_id, expert_id) for expert_id in experts]
                gate_up, down = torch.stack([pair[0] for pair in made]), torch.stack([pair[1] for pair in made])
                for expert_id, record in zip(experts, exact.pack_bf16(gate_up, down), strict=True):
                    pool.tensor(slots[layer_id, expert_id]).copy_(record)
                codes = (
                    quantize(gate_up, DRAFT_FORM, short_scales=True),
                    quantize(down, DRAFT_FORM, short_scales=True),
                )
                layout.pack_codes(*codes, out=bank[first : first + len(experts)])
                if encoder is not None:
                    for i, expert_id in enumerate(experts):
                        one = [Codes(linear.codes[i : i + 1], linear.scales[i : i + 1]) for linear in codes]
                        records[layer_id, expert_id] = encoder.encode(*made[i], *one).cpu()
            advance()
            yield layout, bank

    bank = make_bank(layers(), toolkit, model)
    raw = Parts(
        model,
        Activation.silu,
        bank,
        MadeRecords(exact.slot_bytes),
        Arena(pool, slots),
        f"{spec.model_type}, built",
        lambda: None,
    )
    return {"raw": raw, "residual": _residual(raw, records, exact)} if residual else {"raw": raw}


def _residual(raw: Parts, records: dict[ExpertKey, Tensor], exact: SlotLayout) -> Parts:
    """The same model with residual records, which are moved; those that are no shorter stay as they are, `raw`."""
    spec, arena = raw.model.spec, raw.tier
    assert isinstance(arena, Arena)
    lengths = {key: record.numel() for key, record in records.items() if record.numel() < exact.payload_bytes}
    sizes = {key: align_up(lengths.get(key, exact.payload_bytes)) for key in spec.expert_keys()}
    pool = PinnedPool(spec.num_records, max(sizes.values()))
    slots = {key: slot for slot, key in enumerate(sizes)}
    for key, slot in slots.items():
        record = records.pop(key)
        payload = record if key in lengths else arena.record(key)
        pool.tensor(slot)[: payload.numel()].copy_(payload)
    return dataclasses.replace(
        raw,
        store=MadeRecords(max(sizes.values()), sizes),
        tier=Arena(pool, slots),
        name=f"{raw.name}, residual records",
        residual=ResidualFacts(lengths, spec),
    )


def _expert(maker: TensorMaker, routed: dict[str, TensorSpec], layer_id: int, expert_id: int) -> tuple[Tensor, Tensor]:
    """gate_up [2I, H] and down [H, I]; the tensors of an expert come in the order gate, up, down."""
    prefix = f"model.layers.{layer_id}."
    block = "mlp" if f"{prefix}mlp.experts.0.gate_proj.weight" in routed else "block_sparse_moe"
    names = ("gate_proj", "up_proj", "down_proj") if block == "mlp" else ("w1", "w3", "w2")
    gate, up, down = (maker.make(routed[f"{prefix}{block}.experts.{expert_id}.{name}.weight"]) for name in names)
    return torch.cat([gate, up]), down
