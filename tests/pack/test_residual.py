"""Residual records: their bytes against a reader written from docs/format.md, and every bit back."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.artifacts.encodings import encode_target
from runtime.artifacts.record import (
    DraftFormat,
    DraftRecord,
    LinearFormat,
    RecordLayout,
    target_layout,
    target_tensors,
    unpack_codes,
)
from runtime.artifacts.residual import ResidualEncoding
from runtime.artifacts.residual_decoder import compiled_decoder, why_slow
from runtime.artifacts.unit_order import unit_index
from runtime.errors import ArtifactError
from runtime.model.families import ExpertWeights, MoeSpec

RESIDUAL = ResidualEncoding()
LINEAR = st.sampled_from([(4, 2), (4, 16), (4, 32), (8, 1), (8, 32)])  # bits, group_size
GOLDEN = "916d63d770aa8adb5d08692f119be4fbcea41fbdeb9f9bbf1cd24cec1f658af4"
GOLDEN_ZERO_CODES, GOLDEN_EXCEPTIONS = 1932, 701


def spec(hidden: int, inner: int, dtype: str = "BF16", has_bias: bool = False) -> MoeSpec:
    return MoeSpec("mixtral", 1, (0,), 2, 1, hidden, inner, dtype, has_bias, 0)


def random_bits(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """BF16 of any bits: NaNs, infinities, subnormals and both zeros among them."""
    return torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, generator=generator).view(torch.bfloat16)


def make_draft(facts: MoeSpec, formats: DraftFormat, seed: int, wild: bool) -> DraftRecord:
    """A draft of random codes; `wild` scales are any finite float16, others as those of a model."""
    generator = torch.Generator().manual_seed(seed)
    layout = formats.layout(facts)
    record = DraftRecord(layout, torch.zeros(layout.padded_bytes, dtype=torch.uint8))
    for name, view in record.views().items():
        if name.endswith(".scales"):
            bits = torch.randint(-(1 << 15), 1 << 15, view.shape, dtype=torch.int16, generator=generator)
            scales = bits.view(torch.float16) if wild else torch.rand(view.shape, generator=generator).half() / 64
            view.copy_(torch.where(scales.isfinite(), scales, torch.zeros(())))
        elif name.endswith(".zeros"):
            top = 16 if getattr(formats, name.split(".")[0]).bits == 4 else 256
            view.copy_(torch.randint(0, top, view.shape, dtype=torch.uint8, generator=generator))
        elif view.dtype == torch.uint8:
            view.copy_(torch.randint(0, 256, view.shape, dtype=torch.uint8, generator=generator))
    return record


def draft_values(record: DraftRecord, name: str, columns: int) -> Tensor:
    views = record.views()
    scales = views[f"{name}.scales"].float()
    steps = unpack_codes(views[f"{name}.codes"], columns).float().view(*scales.shape, -1)
    return ((steps - views[f"{name}.zeros"][:, :, None].float()) * scales[:, :, None]).flatten(1)


def make_weights(facts: MoeSpec, draft: DraftRecord, seed: int, share_wild: float) -> ExpertWeights:
    """The draft's values with an error below half a step, and a share of them replaced by any bits."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = facts.hidden_size, facts.moe_intermediate_size

    def near(name: str, rows: int, columns: int) -> Tensor:
        values = draft_values(draft, name, columns)
        step = draft.views()[f"{name}.scales"].float().abs().repeat_interleave(
            columns // draft.views()[f"{name}.scales"].shape[1], 1
        )  # fmt: skip
        values = (values + (torch.rand(rows, columns, generator=generator) - 0.5) * step).bfloat16()
        swap = torch.rand(rows, columns, generator=generator) < share_wild
        return torch.where(swap, random_bits((rows, columns), generator), values)

    gate, up = near("gate_up", 2 * inner, hidden).chunk(2)
    weights = ExpertWeights(gate, up, near("down", hidden, inner))
    if facts.has_bias:
        weights.gate_bias, weights.up_bias = random_bits((inner,), generator), random_bits((inner,), generator)
        weights.down_bias = random_bits((hidden,), generator)
    return weights


def same(found: dict[str, Tensor], weights: ExpertWeights) -> bool:
    wanted = target_tensors(weights)
    assert list(found) == list(wanted)
    return all(torch.equal(found[name].view(torch.int16), wanted[name].view(torch.int16)) for name in wanted)


def read_by_the_page(payload: bytes, facts: MoeSpec, draft: DraftRecord) -> dict[str, Tensor]:
    """What docs/format.md says, one weight after the other."""
    hidden, inner = facts.hidden_size, facts.moe_intermediate_size
    views, found, at = draft.views(), {}, 0
    matrices = [("gate_up", 2 * inner, hidden), ("down", hidden, inner)]

    def tiles(name: str, rows: int) -> int:
        return -(-rows // 2 // 8) if name == "gate_up" else -(-rows // 16)

    tables = {}
    for name, rows, columns in matrices:
        units = -(-columns // 128)
        blocks = tiles(name, rows) * -(-units // 8)
        tables[name] = struct.unpack_from(f"<{blocks + 1}I", payload, at)
        at = -(-(at + 4 * (blocks + 1)) // 64) * 64
    for name, count in (("gate_up_bias", 2 * inner), ("down_bias", hidden)) if facts.has_bias else ():
        found[name] = torch.frombuffer(bytearray(payload[at : at + 2 * count]), dtype=torch.bfloat16)
        at = -(-(at + 2 * count) // 64) * 64
    for name, rows, columns in matrices:
        units, groups = -(-columns // 128), views[f"{name}.scales"].shape[1]
        codes = unpack_codes(views[f"{name}.codes"], columns).numpy()
        scales, zeros = views[f"{name}.scales"].float(), views[f"{name}.zeros"].numpy()
        words = np.zeros((rows, columns), np.uint16)
        for number in range(tiles(name, rows) * -(-units // 8)):
            tile, first = number // -(-units // 8), number % -(-units // 8) * 8
            size = min(8, units - first)
            block = payload[16 * tables[name][number] : 16 * tables[name][number + 1]]
            ends = struct.unpack_from(f"<{2 * (size + 1)}H", block, 2048 * size)
            nibbles_at = -(-(2048 * size + 4 * (size + 1)) // 16) * 16
            places_at = nibbles_at + 4 * ends[2 * size]
            listed = struct.unpack_from(f"<{ends[-1]}H", block, places_at)
            for unit in range(size):
                wrong = dict(
                    zip(
                        listed[ends[2 * unit + 1] : ends[2 * unit + 3]],
                        block[places_at + 2 * ends[-1] :][ends[2 * unit + 1] : ends[2 * unit + 3]],
                        strict=True,
                    )
                )
                zero_codes = 0
                for place in range(2048):
                    lane, e = divmod(place, 64)
                    step, kh, rh, lo = e // 8, e // 4 % 2, e // 2 % 2, e % 2
                    column = 128 * (first + unit) + 32 * (step // 2) + 8 * (lane % 4) + 4 * (step % 2) + 2 * kh + lo
                    row = 16 * tile + 8 * rh + lane // 4
                    if name == "gate_up":
                        row = 8 * tile + lane // 4 + rows // 2 * rh if 8 * tile + lane // 4 < rows // 2 else rows
                    inside = row < rows and column < columns
                    group = column * groups // columns
                    zero = not inside or codes[row, column] == zeros[row, group]
                    nibble = 0
                    if zero:
                        position = 8 * ends[2 * unit] + zero_codes
                        nibble = block[nibbles_at + position // 2] >> 4 * (position % 2) & 15
                        zero_codes += 1
                    if not inside:
                        continue
                    low = block[2048 * unit + 512 * (step // 2) + 16 * lane + 8 * (step % 2) + 4 * rh + 2 * lo + kh]
                    steps = 1 if zero else int(codes[row, column]) - int(zeros[row, group])
                    value = int((scales[row, group] * steps).bfloat16().view(torch.int16)) & 0xFFFF
                    if place in wrong:
                        high = wrong[place]
                    elif zero:
                        high = nibble // 8 * 128 | max((value >> 8 & 127) - nibble % 8, 0)
                    else:
                        high = (value + 127 - low & 0xFFFF) >> 8
                    words[row, column] = high << 8 | low
        found[name] = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)
    return {field.name: found[field.name] for field in target_layout(facts).fields}


def decode(buffer: Tensor, payload_bytes: int, layout: RecordLayout, draft: DraftRecord | None) -> dict[str, Tensor]:
    """By the reference, after compiled code has done or refused the same and stayed inside its room."""
    compiled = compiled_decoder()
    if compiled is None and os.environ.get("MOESPEQ_REQUIRE_CXX"):
        pytest.fail(f"nothing compiled: {why_slow()}")
    margins = torch.full((layout.payload_bytes + 128,), 0xA5, dtype=torch.uint8)
    room = margins[64:-64]
    taken = compiled is not None and draft is not None and compiled.decode(buffer, payload_bytes, layout, draft, room)
    assert (margins[:64] == 0xA5).all() and (margins[-64:] == 0xA5).all()
    try:
        found = RESIDUAL.decode(buffer, payload_bytes, layout, draft)
    except ArtifactError:
        assert not taken, "compiled code takes what the reference refuses"
        raise
    if compiled is not None:
        assert taken, "compiled code refuses what the reference takes"
        for name, view in layout.views(room).items():
            assert torch.equal(view.view(torch.int16), found[name].view(torch.int16)), name
    return found


def totals(payload: Tensor, layout: RecordLayout, draft: DraftRecord) -> tuple[int, ...]:
    """Weights, zero codes, exceptions and block bytes of both matrices."""
    counts = RESIDUAL.counts(payload, layout, draft).values()
    return tuple(sum(number) for number in zip(*(dataclasses.astuple(count) for count in counts), strict=True))


def case(hidden: int, inner: int, gate: tuple[int, int], down: tuple[int, int], has_bias: bool = False) -> Any:
    facts = spec(hidden, inner, has_bias=has_bias)
    return facts, DraftFormat(LinearFormat(*gate), LinearFormat(*down))


@pytest.mark.parametrize(
    ("hidden", "inner", "gate", "down", "has_bias"),
    [(128, 16, (4, 32), (4, 16), False), (1122, 6, (4, 2), (8, 1), True), (20, 1034, (8, 1), (4, 2), False)],
)
def test_a_reader_written_from_the_page_gives_back_every_bit(
    hidden: int, inner: int, gate: tuple[int, int], down: tuple[int, int], has_bias: bool
) -> None:
    facts, formats = case(hidden, inner, gate, down, has_bias)
    draft = make_draft(facts, formats, 1, wild=False)
    weights = make_weights(facts, draft, 2, 0.05)
    payload = RESIDUAL.encode(weights, target_layout(facts), draft)
    assert payload is not None
    assert same(read_by_the_page(bytes(payload.numpy()), facts, draft), weights)
    assert same(decode(payload, payload.numel(), target_layout(facts), draft), weights)


def test_bytes_do_not_change_between_versions() -> None:
    facts, formats = case(256, 40, (4, 32), (4, 20), has_bias=True)
    layout = target_layout(facts)
    draft = make_draft(facts, formats, 0, wild=False)
    for name, view in draft.views().items():
        mixed = torch.arange(view.numel()) * 40503 % 65521 >> 4
        view.copy_((0.002 + mixed / 2**18 if name.endswith(".scales") else mixed % 256).view(view.shape))
        if name.endswith(".zeros"):
            view.fill_(8)
    made = {}
    for name, rows, columns in (("gate_up", 80, 256), ("down", 256, 40)):
        values = draft_values(draft, name, columns)
        words = torch.where(values == 0, 0.015, values).bfloat16().view(torch.int16)
        made[name] = (words + (torch.arange(rows * columns) * 7919 % 141 - 70).view(rows, columns)).to(torch.int16)
    gate, up = made["gate_up"].view(torch.bfloat16).chunk(2)
    weights = ExpertWeights(gate, up, made["down"].view(torch.bfloat16))
    weights.gate_bias, weights.up_bias, weights.down_bias = gate[:, 0], up[:, 0], weights.down_proj[:, 0]
    payload = RESIDUAL.encode(weights, layout, draft)
    assert payload is not None
    assert totals(payload, layout, draft)[:3] == (30720, GOLDEN_ZERO_CODES, GOLDEN_EXCEPTIONS)
    assert hashlib.sha256(bytes(payload.numpy())).hexdigest() == GOLDEN
    assert same(read_by_the_page(bytes(payload.numpy()), facts, draft), weights)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31), inner=st.integers(1, 9), hidden=st.integers(1, 9), gate=LINEAR, down=LINEAR,
    wild=st.booleans(), share=st.sampled_from([0.0, 0.02, 1.0]), has_bias=st.booleans(),
)  # fmt: skip
def test_every_bit_comes_back(
    seed: int, inner: int, hidden: int, gate: tuple[int, int], down: tuple[int, int], wild: bool, share: float,
    has_bias: bool,
) -> None:  # fmt: skip
    """Any BF16 at any finite scale: zero, subnormal or negative ones too."""
    facts, formats = case(hidden * gate[1] * 2, inner * down[1] * 2, gate, down, has_bias)
    draft = make_draft(facts, formats, seed, wild)
    weights = make_weights(facts, draft, seed + 1, share)
    layout = target_layout(facts)
    payload = RESIDUAL.encode(weights, layout, draft)
    assert payload is not None
    slot = torch.full((payload.numel() + 100,), 255, dtype=torch.uint8)  # a slot is longer and keeps what was in it
    slot[: payload.numel()] = payload
    assert same(decode(slot, payload.numel(), layout, draft), weights)


def test_every_bf16_comes_back_under_every_code() -> None:
    facts, formats = case(65536, 16, (4, 4096), (4, 16))
    draft = make_draft(facts, formats, 0, wild=False)
    views = draft.views()
    code = torch.arange(32, dtype=torch.uint8)[:, None] % 16
    views["gate_up.codes"].copy_((code | code << 4).expand(32, 32768))
    views["gate_up.zeros"].fill_(8)
    every = torch.arange(65536).to(torch.int16).view(torch.bfloat16)
    weights = make_weights(facts, draft, 1, 0.0)
    weights.gate_proj, weights.up_proj = every.expand(16, 65536), every.flip(0).expand(16, 65536)
    payload = RESIDUAL.encode(weights, target_layout(facts), draft)
    assert payload is not None
    assert same(decode(payload, payload.numel(), target_layout(facts), draft), weights)


def test_a_rounded_gaussian_takes_nine_bits_a_weight() -> None:
    generator = torch.Generator().manual_seed(5)
    facts, formats = case(512, 512, (4, 128), (4, 128))
    draft = make_draft(facts, formats, 6, wild=False)
    made = {}
    for name, rows in (("gate_up", 1024), ("down", 512)):
        weight = 0.02 * torch.randn(rows, 4, 128, generator=generator).bfloat16().float()
        scales = (weight.abs().amax(2) / 7.5).half()
        codes = (weight / scales[:, :, None].float()).round().clamp(-8, 7).add(8).to(torch.uint8).flatten(1)
        views = draft.views()
        views[f"{name}.codes"].copy_(codes[:, 0::2] | codes[:, 1::2] << 4)
        views[f"{name}.scales"].copy_(scales)
        views[f"{name}.zeros"].fill_(8)
        made[name] = weight.flatten(1).bfloat16()
    gate, up = made["gate_up"].chunk(2)
    weights, layout = ExpertWeights(gate, up, made["down"]), target_layout(facts)
    name, payload = encode_target(RESIDUAL, weights, layout, draft)
    num_weights, zero_codes, exceptions, block_bytes = totals(payload, layout, draft)
    assert name == "residual" and num_weights == 3 * 512 * 512
    codes = torch.cat([unpack_codes(draft.views()[f"{n}.codes"], 512).flatten() for n in ("gate_up", "down")])
    assert zero_codes == int((codes == 8).sum())
    assert exceptions < num_weights / 1000
    assert 8 * payload.numel() / num_weights < 9 and 0 < payload.numel() - block_bytes < 2000


def test_what_would_not_become_shorter_or_has_no_codes_stays_raw() -> None:
    facts, formats = case(256, 128, (4, 32), (4, 32))
    draft, layout = make_draft(facts, formats, 1, wild=False), target_layout(facts)
    near = make_weights(facts, draft, 2, 0.0)
    assert encode_target(RESIDUAL, near, layout, draft)[0] == "residual"
    any_bits = make_weights(facts, draft, 2, 1.0)
    assert encode_target(RESIDUAL, any_bits, layout, draft)[0] == "raw"
    assert encode_target(RESIDUAL, near, layout, None)[0] == "raw"
    draft.views()["down.scales"][3, 1] = float("inf")
    assert encode_target(RESIDUAL, near, layout, draft)[0] == "raw"
    kept = DraftFormat(LinearFormat(4, 32), LinearFormat(0, 0)).layout(facts)
    kept_draft = DraftRecord(kept, torch.zeros(kept.padded_bytes, dtype=torch.uint8))
    assert encode_target(RESIDUAL, near, layout, kept_draft)[0] == "raw"
    for dtype, kind in (("F16", torch.float16), ("F32", torch.float32)):
        other = ExpertWeights(near.gate_proj.to(kind), near.up_proj.to(kind), near.down_proj.to(kind))
        assert encode_target(RESIDUAL, other, target_layout(spec(256, 128, dtype)), draft)[0] == "raw"


def encoded() -> tuple[RecordLayout, DraftRecord, Tensor]:
    facts, formats = case(256, 32, (4, 32), (4, 32), has_bias=True)
    draft = make_draft(facts, formats, 7, wild=False)
    payload = RESIDUAL.encode(make_weights(facts, draft, 8, 0.01), target_layout(facts), draft)
    assert payload is not None
    return target_layout(facts), draft, payload


def test_a_payload_without_its_draft_is_refused() -> None:
    layout, draft, payload = encoded()
    with pytest.raises(ArtifactError, match="finite scales, for a residual record; found none"):
        decode(payload, payload.numel(), layout, None)
    kept = DraftFormat(LinearFormat(4, 32), LinearFormat(0, 0)).layout(spec(256, 32, has_bias=True))
    with pytest.raises(ArtifactError, match="found another draft"):
        decode(payload, payload.numel(), layout, DraftRecord(kept, torch.zeros(kept.padded_bytes, dtype=torch.uint8)))
    draft.views()["gate_up.codes"].bitwise_xor_(0x88)  # another expert's draft: zero codes elsewhere
    with pytest.raises(ArtifactError, match="nibbles for the"):
        decode(payload, payload.numel(), layout, draft)


def test_a_payload_cut_anywhere_is_refused() -> None:
    layout, draft, payload = encoded()
    for length in [*range(0, 400, 7), *range(400, payload.numel(), 331), payload.numel() - 1]:
        for buffer in (payload, payload[:length]):
            with pytest.raises(ArtifactError, match="a residual record with"):
                decode(buffer, length, layout, draft)
    with pytest.raises(ArtifactError, match="where the last block ends"):
        decode(torch.cat((payload, torch.zeros(16, dtype=torch.uint8))), payload.numel() + 16, layout, draft)


@pytest.mark.parametrize("place", ["head", "table", "end"])
def test_gaps_that_hold_something_are_refused(place: str) -> None:
    layout, draft, payload = encoded()
    data = payload.numpy()
    first, second = (16 * int(start) for start in data[:8].view("<u4"))
    if place == "head":
        data[4 * 5] = 1  # behind the four starts of gate_up's blocks and their end
    elif place == "table":
        data[first + 2 * 2048 + 4 * 3] = 1
    else:
        for block, end in ((first, second), (second, 16 * int(data[8:12].view("<u4")[0]))):
            words, listed = (int(number) for number in data[block + 4096 + 8 : block + 4096 + 12].view("<u2"))
            if (4096 + 16 + 4 * words + 3 * listed) % 16:
                data[end - 1] = 1
    with pytest.raises(ArtifactError, match="zeros between"):
        decode(payload, payload.numel(), layout, draft)


@pytest.mark.parametrize("part", ["low", "nibbles", "places"])
def test_padding_that_holds_something_is_refused(part: str) -> None:
    facts, formats = case(40, 10, (4, 2), (8, 1))
    draft, layout = make_draft(facts, formats, 3, wild=False), target_layout(facts)
    payload = RESIDUAL.encode(make_weights(facts, draft, 4, 0.05), layout, draft)
    assert payload is not None
    data = payload.numpy()
    block = data[16 * int(data[:4].view("<u4")[0]) :]  # a unit of 2048, its table of 8 bytes and 8 zeros
    words, listed = (int(number) for number in block[2052:2056].view("<u2"))
    if part == "low":
        block[1024] = 1  # lane 0 of step 4: column 64 of 40
    elif part == "nibbles":
        block[2064 + 4 * words - 4] |= 1
    else:
        block[2064 + 4 * words :][2 * listed - 2 : 2 * listed].view("<u2")[0] = 2047
    with pytest.raises(ArtifactError, match="nothing behind the ends of gate_up"):
        decode(payload, payload.numel(), layout, draft)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_changed_bytes_give_an_error_or_other_weights_and_nothing_else(data: st.DataObject) -> None:
    layout, draft, payload = encoded()
    changed = payload.clone()
    head = st.integers(0, 200) | st.integers(0, payload.numel() - 1)
    for place in data.draw(st.lists(head, min_size=1, max_size=6)):
        changed[place] = data.draw(st.integers(0, 255))
    try:
        found = decode(changed, changed.numel(), layout, draft)
    except ArtifactError as error:
        assert "a residual record with" in str(error)
    else:
        assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
            field.name: field.shape for field in layout.fields
        }


def test_unit_order_holds_every_weight_once() -> None:
    for rows, columns in ((2, 1), (34, 130), (48, 256), (6, 1025)):
        for paired in (True, False):
            index = unit_index(rows, columns, paired)
            assert len(index) % 2048 == 0
            assert np.array_equal(np.sort(index[index < rows * columns]), np.arange(rows * columns))
