"""What a run on a GPU must know of residual records before it has any: which there are, and what they take beside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runtime.artifacts.encodings import RAW
from runtime.artifacts.pack import Pack
from runtime.artifacts.record import LinearFormat
from runtime.errors import InputError
from runtime.gpu.bank import bank_form
from runtime.kernels.layout import SlotLayout
from runtime.kernels.residual import DIRECTORY_BYTES, units_per_expert
from runtime.kernels.shape import ExpertShape, WeightForm
from runtime.memory.location import ExpertKey
from runtime.model.families import MoeSpec

_SCRATCH_BYTES = 512 << 20  # of BF16 slots that records are decoded to for a prompt's block, or one slot
PLAIN = WeightForm("bf16")


@dataclass(frozen=True, slots=True)
class ResidualFacts:
    """Which records of a model are residual ones.

    Attributes:
        payload_bytes: of each residual record; those of other experts are `raw`.
        spec: of the model.
    """

    payload_bytes: Mapping[ExpertKey, int]
    spec: MoeSpec

    @classmethod
    def of(cls, pack: Pack) -> ResidualFacts | None:
        """Those of a pack; None where all records are `raw`.

        Raises:
            InputError: some lean on another draft than the kernels read; the first such layer is named.
        """
        entries = pack.records["target"]
        found = {key: entry.payload_bytes for key, entry in entries.items() if entry.encoding != RAW.name}
        for layer_id in sorted({layer_id for layer_id, _ in found}):
            fmt = pack.draft_format(layer_id)
            if bank_form(fmt, pack.spec).kind != "int4":
                raise InputError(
                    expected="residual records beside INT4 codes in groups of one size, a multiple of 32, for a run "
                    "on a GPU",
                    found=f"gate_up in {_named(fmt.gate_up)} and down in {_named(fmt.down)} in layer {layer_id} of "
                    f"{pack.folder}",
                    mend="make a pack with --encoding raw, quantize without sensitive layers, or run with --device cpu",
                )
        return cls(found, pack.spec) if found else None

    @property
    def all_residual(self) -> bool:
        """Whether no record is raw."""
        return len(self.payload_bytes) == self.spec.num_records

    def layer(self, layer_id: int) -> list[bool]:
        """By expert, whether its record is a residual one."""
        return [(layer_id, expert_id) in self.payload_bytes for expert_id in range(self.spec.num_experts)]


def _named(linear: LinearFormat) -> str:
    return f"INT{linear.bits} in groups of {linear.group_size}" if linear.bits else "unquantised weights"


def directory_bytes(shape: ExpertShape) -> int:
    """Device memory beside each slot: where the parts of its record lie."""
    return units_per_expert(SlotLayout(shape, WeightForm("int4"))) * DIRECTORY_BYTES


def scratch_experts(shape: ExpertShape) -> int:
    """Experts of a prompt's block that are decoded to BF16 at a time."""
    return max(1, min(shape.num_experts, _SCRATCH_BYTES // SlotLayout(shape, PLAIN).slot_bytes))


def scratch_bytes(shape: ExpertShape) -> int:
    """Device memory that they are decoded to."""
    return scratch_experts(shape) * SlotLayout(shape, PLAIN).slot_bytes
