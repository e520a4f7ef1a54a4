"""The draft's experts on the device: all of them, in the form that the kernels read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from runtime.artifacts.pack import Pack
from runtime.artifacts.record import DraftFormat, LinearFormat, unpack_codes
from runtime.decode.draft_records import read_drafts
from runtime.errors import InputError
from runtime.kernels.dispatch import Backend
from runtime.kernels.layout import Biases, SlotLayout
from runtime.kernels.shape import ExpertShape, Kind, WeightForm
from runtime.kernels.units import Codes
from runtime.memory.location import ExpertKey, name_of
from runtime.model.families import MoeSpec

_KINDS: dict[int, Kind] = {4: "int4", 8: "int8"}


def bank_form(fmt: DraftFormat, spec: MoeSpec) -> WeightForm:
    """The form in which a layer's draft experts lie on the device.

    INT4 and INT8 in groups, or with one scale a row, stay codes. A layer of which a linear was kept, or whose linears
    differ in bits or groups, lies there in BF16.
    """
    pair = (fmt.gate_up, spec.hidden_size), (fmt.down, spec.moe_intermediate_size)
    bits = {linear.bits for linear, _ in pair}
    if len(bits) == 1 and (kind := _KINDS.get(bits.pop())):
        for group_size in (-1, fmt.gate_up.group_size, fmt.down.group_size):
            if group_size != -1 and (group_size < 32 or group_size % 32):
                continue
            form = WeightForm(kind, group_size)
            if all(form.group_columns(columns) == linear.group_size for linear, columns in pair):
                return form
    return WeightForm("bf16")


def bank_bytes(pack: Pack, shape: ExpertShape) -> int:
    """Device memory of all draft experts."""
    spec = pack.spec
    forms = (bank_form(pack.draft_format(layer_id), spec) for layer_id in spec.moe_layers)
    return sum(spec.num_experts * SlotLayout(shape, form).slot_bytes for form in forms)


Layers = Iterator[tuple[SlotLayout, Tensor]]
"""Each layer's layout and its slots, uint8 [num_experts, slot_bytes] on the device, in the order of the model."""


def pack_layers(pack: Pack, shape: ExpertShape, device: torch.device, direct_io: bool) -> Layers:
    """The draft records of a pack, a layer at a time, as slots.

    Raises:
        ArtifactError: a record fails its checksum or its file is cut.
        InputError: codes with zeros of their own, which the kernels do not compute.
    """
    spec = pack.spec
    experts: list[dict[str, Tensor]] = []
    for key, record in read_drafts(pack, 1, direct_io):
        experts.append({name: view.to(device, copy=True) for name, view in record.views().items()})
        if len(experts) == spec.num_experts:
            fmt = pack.draft_format(key[0])
            layout = SlotLayout(shape, bank_form(fmt, spec))
            yield layout, _slots(layout, fmt, experts, key)
            experts = []


def _slots(layout: SlotLayout, fmt: DraftFormat, experts: list[dict[str, Tensor]], key: ExpertKey) -> Tensor:
    def stacked(name: str) -> Tensor:
        return torch.stack([expert[name] for expert in experts])

    biases = Biases(stacked("gate_up_bias"), stacked("down_bias")) if layout.shape.has_bias else None
    columns = {"gate_up": layout.shape.hidden_size, "down": layout.shape.moe_intermediate_size}
    if layout.form.is_coded:
        gate_up, down = (
            Codes(
                torch.stack([unpack_codes(expert[f"{name}.codes"], columns[name]) for expert in experts]),
                stacked(f"{name}.scales"),
            )
            for name in columns
        )
        for name in columns:
            if not bool((stacked(f"{name}.zeros") == layout.form.zero).all()):
                raise _asymmetric(key)
        return layout.pack_codes(gate_up, down, biases)
    weights = [_weights(stacked, name, linear, columns[name]) for name, linear in _linears(fmt)]
    return layout.pack_bf16(weights[0], weights[1], biases)


def _linears(fmt: DraftFormat) -> tuple[tuple[str, LinearFormat], ...]:
    return ("gate_up", fmt.gate_up), ("down", fmt.down)


def _weights(stacked: Callable[[str], Tensor], name: str, linear: LinearFormat, columns: int) -> Tensor:
    """BF16 [experts, rows, columns] of a linear in any format."""
    if linear.bits == 0:
        return stacked(f"{name}.weight").to(torch.bfloat16)
    scales, zeros = stacked(f"{name}.scales").float(), stacked(f"{name}.zeros").float()
    packed = stacked(f"{name}.codes")
    codes = unpack_codes(packed.flatten(0, 1), columns).view(*scales.shape, -1).float()
    return ((codes - zeros[..., None]) * scales[..., None]).flatten(2).to(torch.bfloat16)


def _asymmetric(key: ExpertKey) -> InputError:
    return InputError(
        expected=f"symmetric codes in the draft of {name_of(key)}, as the GPU's kernels compute them",
        found="zeros of their own",
        mend="quantize again with symmetric codes (the default of `moespeq quantize`), or run with --device cpu",
    )


class ResidentBank:
    """Computes the draft's layers.

    Args:
        layers: all of them.
        kernels: makes what computes layers of a layout; layers of one layout share it.
        device: where they lie.

    Attributes:
        num_bytes: device memory that it takes.
    """

    def __init__(self, layers: Layers, kernels: Callable[[SlotLayout], Backend], device: torch.device) -> None:
        made: dict[tuple[int, WeightForm], Backend] = {}
        self._layers: list[tuple[Backend, Tensor, Tensor]] = []
        self._layouts: list[SlotLayout] = []
        self.num_bytes = 0
        for layout, slots in layers:
            key = layout.slot_bytes, layout.form
            if key not in made:
                made[key] = kernels(layout)
            self._layers.append((made[key], slots, torch.arange(len(slots), dtype=torch.int32, device=device)))
            self.num_bytes += slots.numel()
            self._layouts.append(layout)

    def layer(self, place: int) -> tuple[SlotLayout, Tensor]:
        """How a layer lies on the device, counting those with experts from 0, and its slots, one an expert."""
        return self._layouts[place], self._layers[place][1]

    def unload(self) -> None:
        """Give the memory back; nothing can be computed after it."""
        self._layers.clear()

    def run(self, place: int, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, out: Tensor) -> None:
        """Queue a layer: bfloat16 x and out [M, H], int32 top_k_index [M, k], float32 top_k_weights [M, k]."""
        kernels, slots, slot_of = self._layers[place]
        kernels.run(slots, slot_of, x, top_k_index, top_k_weights, out)
