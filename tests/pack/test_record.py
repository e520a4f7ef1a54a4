"""Records: their bytes, and the encodings behind one interface."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.artifacts.encodings import ENCODINGS, RAW, encode_target
from runtime.artifacts.quantized import KeptLinear, QuantizedLinear
from runtime.artifacts.record import (
    DraftFormat,
    DraftRecord,
    LinearFormat,
    RecordLayout,
    encode_draft,
    target_layout,
    target_tensors,
    unpack_codes,
)
from runtime.errors import ArtifactError, ShapeError
from runtime.model.families import ExpertWeights, MoeSpec


def spec(hidden: int = 4, inner: int = 2, dtype: str = "BF16", has_bias: bool = False) -> MoeSpec:
    return MoeSpec("mixtral", 1, (0,), 2, 1, hidden, inner, dtype, has_bias, 0)


def tiny_weights() -> ExpertWeights:
    gate = torch.tensor([[1.0, -2.0, 0.5, 0.0], [3.0, -0.0, 1.5, -1.0]]).bfloat16()
    up = torch.tensor([[4.0, 8.0, -4.0, 2.0], [0.25, 16.0, 1.0, 1.0]]).bfloat16()
    down = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]).bfloat16()
    return ExpertWeights(gate, up, down)


def test_raw_record_has_golden_bytes() -> None:
    layout = target_layout(spec())
    encoding, data = encode_target(RAW, tiny_weights(), layout, None)
    # 1, -2, 0.5, 0, 3, -0, 1.5, -1: the upper half of a float32, low byte first
    gate = "803f 00c0 003f 0000 4040 0080 c03f 80bf"
    up = "8040 0041 80c0 0040 803e 8041 803f 803f"
    down = "803f 0040 4040 8040 a040 c040 e040 0041"
    assert encoding == "raw"
    assert bytes(data.numpy()) == bytes.fromhex(gate + up) + bytes(32) + bytes.fromhex(down)
    assert (layout.payload_bytes, layout.padded_bytes) == (80, 4096)
    assert [(f.name, f.dtype, f.shape, f.offset_bytes) for f in layout.fields] == [
        ("gate_up", "BF16", (4, 4), 0),
        ("down", "BF16", (4, 2), 64),
    ]


def quantized(bits: int, codes: list[list[int]], group_size: int) -> QuantizedLinear:
    values = torch.tensor(codes, dtype=torch.uint8)
    shape = (len(codes), len(codes[0]) // group_size)
    scales = torch.arange(1, shape[0] * shape[1] + 1).reshape(shape).half()
    return QuantizedLinear(bits, group_size, values, scales, torch.full(shape, 1 << (bits - 1), dtype=torch.uint8))


def test_draft_record_has_golden_bytes() -> None:
    linears = {
        "gate_proj": quantized(4, [[1, 2, 3, 4], [5, 6, 7, 8]], 2),
        "up_proj": quantized(4, [[9, 10, 11, 12], [13, 14, 15, 0]], 2),
        "down_proj": quantized(8, [[1, 255], [2, 254], [3, 253], [4, 252]], 2),
    }
    layout = DraftFormat(LinearFormat(4, 2), LinearFormat(8, 2)).layout(spec())
    record = encode_draft(linears, tiny_weights(), layout, "layer 0, expert 0")
    data = bytes(record.data.numpy())
    fields = {f.name: data[f.offset_bytes : f.offset_bytes + f.size_bytes].hex() for f in layout.fields}
    assert fields == {
        "gate_up.codes": "21436587a9cbed0f",  # low nibble is the even input
        "gate_up.scales": "003c004000420044" * 2,  # 1, 2, 3, 4 in float16
        "gate_up.zeros": "08" * 8,
        "down.codes": "01ff02fe03fd04fc",
        "down.scales": "003c004000420044",
        "down.zeros": "80" * 4,
    }
    assert [f.offset_bytes for f in layout.fields] == [0, 64, 128, 192, 256, 320]
    padded = b"".join(bytes.fromhex(text).ljust(64, b"\0") for text in fields.values())
    assert data == padded[: layout.payload_bytes] and layout.payload_bytes == 324
    assert torch.equal(unpack_codes(record.views()["gate_up.codes"], 4)[2], torch.tensor([9, 10, 11, 12]).byte())


def test_kept_linears_and_biases_keep_their_bits() -> None:
    weights = tiny_weights()
    weights.gate_bias, weights.up_bias = torch.tensor([1.0, 2.0]).bfloat16(), torch.tensor([3.0, 4.0]).bfloat16()
    weights.down_bias = torch.tensor([5.0, 6.0, 7.0, 8.0]).bfloat16()
    linears = {name: KeptLinear(getattr(weights, name)) for name in ("gate_proj", "up_proj", "down_proj")}
    layout = DraftFormat(LinearFormat(0, 0), LinearFormat(0, 0)).layout(spec(has_bias=True))
    views = encode_draft(linears, weights, layout, "layer 0, expert 0").views()
    assert views["gate_up_bias"].tolist() == [1, 2, 3, 4]
    assert views["down_bias"].tolist() == [5, 6, 7, 8]
    assert torch.equal(views["gate_up.weight"], torch.cat((weights.gate_proj, weights.up_proj)))
    assert torch.equal(views["down.weight"], weights.down_proj)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), inner=st.integers(1, 9), hidden=st.integers(1, 9))
def test_raw_gives_back_every_bit_pattern(dtype: str, seed: int, inner: int, hidden: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    facts = spec(hidden, inner, dtype)
    kind = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]

    def any_bits(rows: int, columns: int) -> torch.Tensor:  # NaNs, infinities, subnormals and both zeros among them
        raw = torch.randint(0, 256, (rows, columns * kind.itemsize), dtype=torch.uint8, generator=generator)
        return raw.view(kind)

    weights = ExpertWeights(any_bits(inner, hidden), any_bits(inner, hidden), any_bits(hidden, inner))
    layout = target_layout(facts)
    _, data = encode_target(RAW, weights, layout, None)
    slot = torch.full((layout.padded_bytes,), 255, dtype=torch.uint8)
    slot[: data.numel()] = data
    decoded = RAW.decode(slot, data.numel(), layout, None)
    for name, tensor in target_tensors(weights).items():
        assert torch.equal(decoded[name].view(torch.uint8), tensor.view(torch.uint8))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), min_size=1, max_size=40))
def test_nibbles_unpack_to_the_codes(pairs: list[tuple[int, int]]) -> None:
    codes = torch.tensor([[code for pair in pairs for code in pair]], dtype=torch.uint8)
    assert torch.equal(unpack_codes(codes[:, 0::2] | codes[:, 1::2] << 4, codes.shape[1]), codes)


def test_views_copy_nothing() -> None:
    layout = target_layout(spec())
    buffer = torch.zeros(4096, dtype=torch.uint8)
    layout.views(buffer)["down"][0, 0] = 1.0
    assert buffer[64:66].tolist() == [0x80, 0x3F]


@pytest.mark.parametrize("buffer", [torch.zeros(79, dtype=torch.uint8), torch.zeros(80), torch.zeros(1, 80).byte()])
def test_views_refuse_other_buffers(buffer: torch.Tensor) -> None:
    with pytest.raises(ShapeError, match="80 bytes"):
        target_layout(spec()).views(buffer)


def test_fill_names_the_tensor_that_does_not_fit() -> None:
    weights = tiny_weights()
    weights.down_proj = weights.down_proj.float()
    with pytest.raises(ShapeError, match=r"down as BF16 \[4, 2\]; found F32"):
        encode_target(RAW, weights, target_layout(spec()), None)


def test_draft_of_another_format_is_refused_by_expert() -> None:
    linears = {
        "gate_proj": quantized(4, [[1, 2, 3, 4], [5, 6, 7, 8]], 4),
        "up_proj": quantized(4, [[9, 10, 11, 12], [13, 14, 15, 0]], 4),
        "down_proj": quantized(8, [[1, 255], [2, 254], [3, 253], [4, 252]], 2),
    }
    layout = DraftFormat(LinearFormat(4, 2), LinearFormat(8, 2)).layout(spec())
    with pytest.raises(ArtifactError, match="layer 7, expert 3"):
        encode_draft(linears, tiny_weights(), layout, "layer 7, expert 3")


def test_raw_record_of_another_length_is_refused() -> None:
    with pytest.raises(ArtifactError, match="80 bytes; found 81 bytes"):
        RAW.decode(torch.zeros(4096, dtype=torch.uint8), 81, target_layout(spec()), None)


class Shrinking:
    """An encoding for weights that are all the same, of other length than raw, to try the interface."""

    name = "constant"

    def max_bytes(self, layout: RecordLayout) -> int:
        return layout.payload_bytes

    def encode(self, weights: ExpertWeights, layout: RecordLayout, draft: DraftRecord | None) -> torch.Tensor | None:
        values = torch.cat([t.flatten() for t in target_tensors(weights).values()])
        return values[:1].view(torch.uint8).clone() if (values == values[0]).all() else None

    def decode(
        self, buffer: torch.Tensor, payload_bytes: int, layout: RecordLayout, draft: DraftRecord | None
    ) -> dict[str, torch.Tensor]:
        return {f.name: buffer[:payload_bytes].view(torch.bfloat16).expand(f.shape) for f in layout.fields}


def test_an_encoding_falls_back_to_raw_record_by_record() -> None:
    layout = target_layout(spec())
    same = ExpertWeights(torch.ones(2, 4).bfloat16(), torch.ones(2, 4).bfloat16(), torch.ones(4, 2).bfloat16())
    assert [encode_target(Shrinking(), w, layout, None)[0] for w in (tiny_weights(), same)] == ["raw", "constant"]
    assert encode_target(Shrinking(), same, layout, None)[1].numel() == 2


def test_raw_is_registered() -> None:
    assert ENCODINGS["raw"] is RAW
