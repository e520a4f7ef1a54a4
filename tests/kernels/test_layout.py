"""Packing into slots: every byte where the kernels look for it, and back without loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.artifacts.record import target_layout
from runtime.errors import ShapeError
from runtime.kernels.layout import Biases, SlotLayout
from runtime.kernels.shape import Activation, ExpertShape, WeightForm
from runtime.kernels.units import Codes
from runtime.model.families import MoeSpec

SIZES = (8, 40, 64, 96, 128, 136, 200)
GROUPS = (32, 64, 96, 128, 160, 256, -1)


def random_codes(form: WeightForm, count: int, rows: int, columns: int, seed: int = 0) -> Codes:
    """Codes over the whole range and scales that are all different from 0."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << form.bits, (count, rows, columns), generator=generator, dtype=torch.uint8)
    scales = torch.rand(count, rows, form.groups(columns), generator=generator) + 0.01
    return Codes(codes, scales.half())


def random_biases(layout: SlotLayout, count: int) -> Biases | None:
    if not layout.shape.has_bias:
        return None
    generator = torch.Generator().manual_seed(5)
    inner, hidden = layout.shape.moe_intermediate_size, layout.shape.hidden_size
    gate_up = torch.randn(count, 2 * inner, generator=generator).bfloat16()
    return Biases(gate_up, torch.randn(count, hidden, generator=generator).bfloat16())


def same(left: Biases | None, right: Biases | None) -> bool:
    if left is None or right is None:
        return left is right
    return torch.equal(left.gate_up, right.gate_up) and torch.equal(left.down, right.down)


shapes = st.builds(
    ExpertShape,
    num_experts=st.just(3),
    top_k=st.just(2),
    hidden_size=st.sampled_from(SIZES),
    moe_intermediate_size=st.sampled_from(SIZES),
    activation=st.just(Activation.silu),
    has_bias=st.booleans(),
)


@settings(deadline=None, max_examples=60)
@given(shape=shapes, kind=st.sampled_from(["int4", "int8"]), group=st.sampled_from(GROUPS), count=st.integers(1, 3))
def test_codes_come_back(shape: ExpertShape, kind: str, group: int, count: int) -> None:
    layout = SlotLayout(shape, WeightForm(kind, group))
    inner, hidden = shape.moe_intermediate_size, shape.hidden_size
    gate_up = random_codes(layout.form, count, 2 * inner, hidden, 1)
    down = random_codes(layout.form, count, hidden, inner, 2)
    biases = random_biases(layout, count)
    slots = layout.pack_codes(gate_up, down, biases)
    assert slots.shape == (count, layout.slot_bytes)
    back_gate_up, back_down, back_biases = layout.unpack_codes(slots)
    for want, got in ((gate_up, back_gate_up), (down, back_down)):
        assert torch.equal(want.codes, got.codes) and torch.equal(want.scales, got.scales)
    assert same(biases, back_biases)


@settings(deadline=None, max_examples=30)
@given(shape=shapes, count=st.integers(1, 3))
def test_bf16_comes_back_and_is_the_target_record(shape: ExpertShape, count: int) -> None:
    layout = SlotLayout(shape, WeightForm("bf16"))
    inner, hidden = shape.moe_intermediate_size, shape.hidden_size
    gate_up = torch.randn(count, 2 * inner, hidden).bfloat16()
    down = torch.randn(count, hidden, inner).bfloat16()
    biases = random_biases(layout, count)
    slots = layout.pack_bf16(gate_up, down, biases)
    back_gate_up, back_down, back_biases = layout.views_bf16(slots)
    assert torch.equal(back_gate_up, gate_up) and torch.equal(back_down, down) and same(biases, back_biases)
    spec = MoeSpec("x", 1, (0,), 3, 2, hidden, inner, "BF16", shape.has_bias, 0)
    record = target_layout(spec)
    tensors = {"gate_up": gate_up[0], "down": down[0]}
    if biases is not None:
        tensors |= {"gate_up_bias": biases.gate_up[0], "down_bias": biases.down[0]}
    assert torch.equal(slots[0, : record.payload_bytes], record.fill(tensors))
    assert layout.slot_bytes == record.padded_bytes


def expected_code(linear: Codes, form: WeightForm, row: int, column: int) -> int:
    rows, columns = linear.codes.shape[1:]
    return int(linear.codes[0, row, column]) if 0 <= row < rows and column < columns else form.zero


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("group", [32, 64, 96, 128, 160, -1])
def test_every_code_and_scale_lies_where_the_kernels_look(kind: str, group: int) -> None:
    """From the formula for a lane's registers, element by element, with NumPy."""
    shape, form = ExpertShape(1, 1, 200, 24), WeightForm(kind, group)
    layout = SlotLayout(shape, form)
    gate_up, down = random_codes(form, 1, 48, 200, 3), random_codes(form, 1, 200, 24, 4)
    slot = layout.pack_codes(gate_up, down)[0].numpy()
    for linear, part, grid in (
        (gate_up, layout.gate_up, layout.gate_up_grid),
        (down, layout.down, layout.down_grid),
    ):
        units = slot[part.offset_bytes : part.end_bytes].reshape(grid.tiles, grid.units_per_tile, form.unit_bytes)
        for tile in range(grid.tiles):
            rows = [_row(grid.rows, grid.paired, tile, i) for i in range(16)]
            for unit in range(grid.units_per_tile):
                _check_codes(units[tile, unit], linear, form, rows, unit)
                _check_scales(units[tile, unit], linear, form, rows, unit)


def _row(rows: int, paired: bool, tile: int, row: int) -> int:
    """The linear's row of a unit's row, -1 for padding."""
    if not paired:
        return tile * 16 + row if tile * 16 + row < rows else -1
    inner = tile * 8 + row % 8
    return inner + (row // 8) * (rows // 2) if inner < rows // 2 else -1


def _check_codes(unit: np.ndarray, linear: Codes, form: WeightForm, rows: list[int], unit_index: int) -> None:
    codes = unit[: form.code_bytes]
    words = codes.view(np.uint32)
    for lane in range(32):
        r, q = lane // 4, lane % 4
        for s in range(8):
            for j in range(4):
                kh, rh = j // 2, j % 2
                for high in range(2):
                    column = unit_index * 128 + (s // 2) * 32 + q * 8 + (s % 2) * 4 + kh * 2 + high
                    want = expected_code(linear, form, rows[r + 8 * rh], column)
                    if form.kind == "int4":
                        word = int(words[(s // 4) * 128 + lane * 4 + s % 4])
                        got = (word >> (4 * (j + 4 * high))) & 15
                    else:
                        word = int(words[(s // 2) * 128 + lane * 4 + (s % 2) * 2 + rh])
                        got = (word >> (8 * (2 * high + kh))) & 255
                    assert got == want, (lane, s, j, high)


def _check_scales(unit: np.ndarray, linear: Codes, form: WeightForm, rows: list[int], unit_index: int) -> None:
    scales = unit[form.code_bytes :].view(np.float16).reshape(form.scale_sets, 8, 2)
    columns = linear.codes.shape[2]
    for chunk in range(form.scale_sets):
        column = unit_index * 128 + chunk * 128 // form.scale_sets
        for row in range(16):
            want = 0.0
            if rows[row] >= 0 and column < columns:
                want = float(linear.scales[0, rows[row], column // form.group_columns(columns)])
            assert float(scales[chunk, row % 8, row // 8]) == want


def test_packs_into_rows_of_a_pool() -> None:
    layout = SlotLayout(ExpertShape(4, 2, 64, 40), WeightForm("int4", 32))
    pool = layout.new_pool(4, "cpu")
    gate_up, down = random_codes(layout.form, 2, 80, 64), random_codes(layout.form, 2, 64, 40)
    layout.pack_codes(gate_up, down, out=pool[1:3])
    assert torch.equal(pool[1:3], layout.pack_codes(gate_up, down))
    assert not pool[0].any() and not pool[3].any()


@pytest.mark.parametrize(
    ("kind", "group", "unit_bytes", "sets"),
    [("int4", 128, 1056, 1), ("int4", 96, 1152, 4), ("int4", 192, 1088, 2), ("int8", -1, 2080, 1), ("bf16", 128, 0, 0)],
)
def test_unit_sizes(kind: str, group: int, unit_bytes: int, sets: int) -> None:
    form = WeightForm(kind, group)
    assert (form.unit_bytes, form.scale_sets) == (unit_bytes, sets)


def test_refuses_what_kernels_cannot_take() -> None:
    with pytest.raises(ShapeError, match="multiple of 32"):
        WeightForm("int4", 48)
    with pytest.raises(ShapeError, match="weight form"):
        WeightForm("int3")
    with pytest.raises(ShapeError, match="multiple of 8"):
        ExpertShape(4, 2, 60, 40)
    with pytest.raises(ShapeError, match="top_k"):
        ExpertShape(4, 5, 64, 40)
    with pytest.raises(ShapeError, match="experts"):
        ExpertShape(0, 0, 64, 40)


def test_refuses_tensors_that_do_not_fit() -> None:
    layout = SlotLayout(ExpertShape(4, 2, 64, 40), WeightForm("int4", 32))
    gate_up, down = random_codes(layout.form, 1, 80, 64), random_codes(layout.form, 1, 64, 40)
    with pytest.raises(ShapeError, match="down codes"):
        layout.pack_codes(gate_up, gate_up)
    with pytest.raises(ShapeError, match="no biases"):
        layout.pack_codes(gate_up, down, Biases(torch.zeros(1, 80), torch.zeros(1, 64)))
    with pytest.raises(ShapeError, match="bf16 layout"):
        layout.pack_bf16(torch.zeros(1, 80, 64).bfloat16(), torch.zeros(1, 64, 40).bfloat16())
