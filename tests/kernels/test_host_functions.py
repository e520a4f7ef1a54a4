"""The integer functions of `layout.cuh`, compiled for the host, against NumPy and against what packing writes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from runtime.kernels.shape import UNIT_COLUMNS, UNIT_ROWS, WeightForm
from runtime.kernels.units import Codes, UnitGrid
from tests.kernels.host import Function, Host, compile_for_host

I4, UNSIGNED, WIDE = ("int",) * 4, "unsigned", "unsigned long long"
FUNCTIONS = (
    Function("unit_k", "int", I4),
    Function("unit_row", "int", I4[:2]),
    Function("int4_byte", "int", I4),
    Function("int4_shift", "int", I4[:1]),
    Function("int8_byte", "int", I4),
    Function("scale_byte", "int", I4[:3]),
    Function("part_first", "int", I4[:3]),
    Function("part_count", "int", I4[:3]),
    Function("tile_offset", WIDE, (WIDE,) * 6),
    Function("bf16_piece", "int", I4[:2]),
    Function("int4_bits", UNSIGNED, (UNSIGNED, "int")),
    Function("int8_low", UNSIGNED, (UNSIGNED, "int")),
    Function("int8_base", UNSIGNED, (UNSIGNED, "int")),
)
LANES, STEPS = range(32), range(8)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    return compile_for_host(tmp_path_factory.mktemp("host"), ["layout.cuh"], FUNCTIONS)


def one_unit(form: WeightForm, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A packed unit as bytes, its codes [16, 128] and scales [16, groups]."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 1 << form.bits, (UNIT_ROWS, UNIT_COLUMNS), dtype=np.uint8)
    scales = random.random((UNIT_ROWS, form.groups(UNIT_COLUMNS))).astype(np.float16)
    grid = UnitGrid(form, UNIT_ROWS, UNIT_COLUMNS, paired=False)
    unit = grid.pack(Codes(torch.from_numpy(codes)[None], torch.from_numpy(scales)[None]))
    return unit[0].numpy(), codes, scales


def elements(host: Host) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Lane, step, register, low or high half, and the row and column that this names."""
    for lane, step, register, low in product(LANES, STEPS, range(4), range(2)):
        row = host.unit_row(lane // 4, register % 2)
        yield lane, step, register, low, row, host.unit_k(lane % 4, step, register // 2, low)


def bf16(bits: int) -> float:
    return float(np.array([bits << 16], dtype=np.uint32).view(np.float32)[0])


def halves(bits: int) -> tuple[float, float]:
    return bf16(bits & 0xFFFF), bf16(bits >> 16)


def test_fragments_cover_a_unit_once(host: Host) -> None:
    places = [(row, column) for *_, row, column in elements(host)]
    assert sorted(places) == list(product(range(UNIT_ROWS), range(UNIT_COLUMNS)))


def test_lanes_of_a_row_read_neighbouring_activations(host: Host) -> None:
    """For two steps the four lanes of a row take 32 columns, 8 each, in order."""
    for pair in range(4):
        for q in range(4):
            columns = [host.unit_k(q, 2 * pair + s, kh, low) for s, kh, low in product(range(2), repeat=3)]
            assert columns == list(range(32 * pair + 8 * q, 32 * pair + 8 * q + 8))


def test_int4_codes_lie_where_packing_puts_them(host: Host) -> None:
    unit, codes, _ = one_unit(WeightForm("int4", 128), 1)
    seen = set()
    for lane, step, register, low, row, column in elements(host):
        byte, shift = host.int4_byte(lane, step, register, low), host.int4_shift(register)
        assert unit[byte] >> shift & 15 == codes[row, column], (lane, step, register, low)
        seen.add((byte, shift))
    assert seen == set(product(range(1024), (0, 4)))


def test_int8_codes_lie_where_packing_puts_them(host: Host) -> None:
    unit, codes, _ = one_unit(WeightForm("int8", -1), 2)
    seen = set()
    for lane, step, register, low, row, column in elements(host):
        byte = host.int8_byte(lane, step, register, low)
        assert unit[byte] == codes[row, column], (lane, step, register, low)
        seen.add(byte)
    assert seen == set(range(2048))


@pytest.mark.parametrize(("kind", "group"), [("int4", 128), ("int4", 64), ("int4", 32), ("int4", 96), ("int8", -1)])
def test_scales_lie_where_packing_puts_them(host: Host, kind: str, group: int) -> None:
    form = WeightForm(kind, group)  # type: ignore[arg-type]
    unit, _, scales = one_unit(form, 3)
    for number, r, rh in product(range(form.scale_sets), range(8), range(2)):
        at = form.code_bytes + host.scale_byte(number, r, rh)
        found = unit[at : at + 2].view(np.float16)[0]
        column = number * UNIT_COLUMNS // form.scale_sets
        assert found == scales[host.unit_row(r, rh), column // form.group_columns(UNIT_COLUMNS)]


def test_int4_words_become_registers(host: Host) -> None:
    """A register holds two codes as the BF16 numbers 128 + code."""
    unit, codes, _ = one_unit(WeightForm("int4", 128), 4)
    for lane, step, register, low, row, column in elements(host):
        at = host.int4_byte(lane, step, 0, 0)  # a lane's word of a step
        assert at % 4 == 0
        word = int(unit[at : at + 4].view(np.uint32)[0])
        assert halves(host.int4_bits(word, register))[low] == 128 + codes[row, column]


def test_int8_words_become_registers(host: Host) -> None:
    """Two BF16 numbers, both exact, whose difference is the value of the code."""
    unit, codes, _ = one_unit(WeightForm("int8", -1), 5)
    for lane, step, register, low, row, column in elements(host):
        at = host.int8_byte(lane, step, register % 2, 0)  # a lane's word of a step and a half of the rows
        assert at % 4 == 0
        word, kh = int(unit[at : at + 4].view(np.uint32)[0]), register // 2
        first, second = halves(host.int8_low(word, kh))[low], halves(host.int8_base(word, kh))[low]
        assert first - second == int(codes[row, column]) - 128


@pytest.mark.parametrize("code", [0, 1, 127, 128, 129, 255])
def test_every_byte_of_an_int8_word_is_apart_from_the_others(host: Host, code: int) -> None:
    for place in range(4):
        for others in (0, 255):
            data = [others] * 4
            data[place] = code
            word = int.from_bytes(bytes(data), "little")
            low, base = host.int8_low(word, place % 2), host.int8_base(word, place % 2)
            values = [a - b for a, b in zip(halves(low), halves(base), strict=True)]
            assert values[place // 2] == code - 128
            assert values[1 - place // 2] == others - 128


@pytest.mark.parametrize(("n", "parts"), [(1, 1), (1, 4), (7, 3), (88, 132), (132, 132), (1792, 131), (40000, 264)])
def test_parts_cover_all_and_differ_by_one_at_most(host: Host, n: int, parts: int) -> None:
    counts = [host.part_count(n, parts, s) for s in range(parts)]
    assert [host.part_first(n, parts, s) for s in range(parts)] == [sum(counts[:s]) for s in range(parts)]
    assert sum(counts) == n
    assert max(counts) - min(counts) <= 1
    assert counts[0] == min(counts)


@pytest.mark.parametrize("group", [1, 2, 8])
def test_tiles_of_a_pool_do_not_meet(host: Host, group: int) -> None:
    """Two sections of 5 and 3 tiles fill each group of slots, one expert's tile beside the next one's."""
    slots, sections = 2 * group, ((0, 5, 96), (480, 3, 160))  # first byte, tiles, bytes of a tile
    slot_bytes = 480 + 3 * 160
    spans = []
    for slot in range(slots):
        for section, tiles, tile_bytes in sections:
            for tile in range(tiles):
                at = host.tile_offset(slot, tile, slot_bytes, tile_bytes, section, group)
                spans.append((at, at + tile_bytes))
                if group == 1:
                    assert at == slot * slot_bytes + section + tile * tile_bytes
    spans.sort()
    assert spans[0][0] == 0 and spans[-1][1] == slots * slot_bytes
    assert all(before[1] == after[0] for before, after in pairwise(spans))


def test_offsets_pass_four_gibibytes(host: Host) -> None:
    slot_bytes = 350 << 20
    assert host.tile_offset(255, 3, slot_bytes, 1 << 20, 200 << 20, 1) == 255 * slot_bytes + (203 << 20)
    assert host.tile_offset(255, 3, slot_bytes, 1 << 20, 200 << 20, 8) == (248 * slot_bytes) + (
        8 * (200 << 20) + (3 * 8 + 7) * (1 << 20)
    )


def test_two_rows_of_bf16_fill_all_banks(host: Host) -> None:
    places = [host.bf16_piece(row, piece) for row, piece in product(range(16), range(8))]
    assert sorted(places) == list(range(128))
    for row, first in product(range(0, 16, 2), (0, 4)):
        touched = [host.bf16_piece(row + i, first + q) % 8 for i, q in product(range(2), range(4))]
        assert sorted(touched) == list(range(8))
