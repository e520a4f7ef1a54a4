"""Layers whose exact weights are residual records beside a resident INT4 bank, made from weights or at random."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.artifacts.record import DraftFormat, DraftRecord, LinearFormat, align_up, target_layout
from runtime.artifacts.residual import ResidualEncoding
from runtime.errors import ShapeError
from runtime.kernels.layout import Biases, SlotLayout
from runtime.kernels.reference import quantize
from runtime.kernels.residual import ResidualPool, least_record_bytes, require_admitted
from runtime.kernels.shape import ExpertShape, WeightForm
from runtime.kernels.units import Codes
from runtime.model.families import ExpertWeights, MoeSpec


@dataclass(frozen=True, slots=True)
class ExactExperts:
    """Some experts in BF16 with the codes of their draft; on the CPU.

    Attributes:
        layout: of the bank's slots, int4.
        gate_up, down: bfloat16 [B, 2I, H] and [B, H, I].
        gate_up_codes, down_codes: of the draft.
        biases: or None.
    """

    layout: SlotLayout
    gate_up: Tensor
    down: Tensor
    gate_up_codes: Codes
    down_codes: Codes
    biases: Biases | None = None

    @classmethod
    def quantized(
        cls,
        shape: ExpertShape,
        form: WeightForm,
        gate_up: Tensor,
        down: Tensor,
        biases: Biases | None = None,
        short_scales: bool = True,
    ) -> ExactExperts:
        """With the nearest codes."""
        codes = quantize(gate_up, form, short_scales), quantize(down, form, short_scales)
        return cls(SlotLayout(shape, form), gate_up, down, *codes, biases)

    @classmethod
    def random(
        cls, shape: ExpertShape, form: WeightForm, count: int, seed: int = 0, short_scales: bool = True
    ) -> ExactExperts:
        """Normal weights of about 1 / sqrt(inputs), as trained ones are, and their nearest codes."""
        generator = torch.Generator().manual_seed(seed)
        inner, hidden = shape.moe_intermediate_size, shape.hidden_size

        def normal(*sizes: int) -> Tensor:
            return torch.randn(count, *sizes, generator=generator).mul_(sizes[-1] ** -0.5).bfloat16()

        biases = Biases(normal(2 * inner), normal(hidden)) if shape.has_bias else None
        return cls.quantized(shape, form, normal(2 * inner, hidden), normal(hidden, inner), biases, short_scales)

    def bank(self) -> Tensor:
        """The bank's slots, uint8 [B, slot_bytes]."""
        return self.layout.pack_codes(self.gate_up_codes, self.down_codes, self.biases)

    def exact(self) -> Tensor:
        """BF16 slots, uint8 [B, bytes of one]."""
        layout = SlotLayout(self.layout.shape, WeightForm("bf16"))
        return layout.pack_bf16(self.gate_up, self.down, self.biases)

    def records(self) -> list[Tensor]:
        """Residual records as a pack has them, uint8 [payload_bytes] each.

        Raises:
            ShapeError: a draft that no residual record refers to.
        """
        shape, encoding, made = self.layout.shape, ResidualEncoding(), []
        inner, hidden = shape.moe_intermediate_size, shape.hidden_size
        spec = MoeSpec("mixtral", 1, (0,), 2, 1, hidden, inner, "BF16", shape.has_bias, 0)
        linears = [LinearFormat(4, self.layout.form.group_columns(columns)) for columns in (hidden, inner)]
        draft_layout = DraftFormat(*linears).layout(spec)
        for expert in range(len(self.gate_up)):
            tensors: dict[str, Tensor] = {}
            for name, linear in (("gate_up", self.gate_up_codes), ("down", self.down_codes)):
                codes, scales = linear.codes[expert], linear.scales[expert]
                tensors[f"{name}.codes"] = codes[:, 0::2] | codes[:, 1::2] << 4
                tensors[f"{name}.scales"] = scales
                tensors[f"{name}.zeros"] = torch.full(scales.shape, self.layout.form.zero, dtype=torch.uint8)
            gate, up = self.gate_up[expert].chunk(2)
            weights = ExpertWeights(gate, up, self.down[expert])
            if self.biases is not None:
                tensors["gate_up_bias"], tensors["down_bias"] = self.biases.gate_up[expert], self.biases.down[expert]
                weights.gate_bias, weights.up_bias = self.biases.gate_up[expert].chunk(2)
                weights.down_bias = self.biases.down[expert]
            draft = DraftRecord(draft_layout, draft_layout.fill(tensors))
            record = encoding.encode(weights, target_layout(spec), draft)
            if record is None:
                raise ShapeError(expected="finite scales", found="others", mend="quantize again")
            made.append(record)
        return made

    def slots(self, records: list[Tensor]) -> Tensor:
        """Records in slots that hold any of them: uint8 [B, slot_bytes], noise behind their ends."""
        size = align_up(max(least_record_bytes(self.layout), *(len(record) for record in records)))
        made = torch.randint(0, 256, (len(records), size), dtype=torch.uint8)
        for slot, record in zip(made, records, strict=True):
            slot[: len(record)] = record
        return made


def resident(experts: ExactExperts, order: Tensor, device: str = "cuda") -> tuple[ResidualPool, list[int]]:
    """A pool on a device with expert e's record in slot `order[e]` and its codes in the bank's slot e; admitted.

    Experts of the pool that `experts` has not are its own in turn.

    Returns:
        The pool, and the length of every expert's record.
    """
    records = experts.records()
    slots, bank = experts.slots(records).to(device), experts.bank().to(device)
    which = torch.arange(len(order), device=device) % len(records)
    placed = slots.new_zeros(len(order), slots.shape[1])
    placed[order.long()] = slots[which]
    pool = ResidualPool.of(experts.layout, placed, bank[which])
    lengths = torch.tensor([len(record) for record in records], dtype=torch.int64, device=device)[which]
    faults = torch.zeros(len(order), dtype=torch.int32, device=device)
    pool.admit(order.int(), torch.arange(len(order), dtype=torch.int32, device=device), lengths, faults)
    require_admitted(faults, [f"expert {expert}" for expert in range(len(order))])
    return pool, lengths.tolist()
