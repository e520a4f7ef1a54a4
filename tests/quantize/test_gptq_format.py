"""The interchange format: words, groups, and agreement with auto-gptq's own packer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moespeq_cli.quantize.solver import auto_gptq_available, import_auto_gptq
from runtime.artifacts.gptq_format import (
    check_linear,
    dequantize,
    effective_group_size,
    is_kept,
    pack_linear,
    symmetric_zero,
    unpack_linear,
)
from runtime.errors import ArtifactError, ShapeError

needs_auto_gptq = pytest.mark.skipif(not auto_gptq_available(), reason="auto-gptq is not installed")


def random_linear(out_features: int, in_features: int, size: int, bits: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (out_features, in_features), generator=generator).to(torch.uint8)
    scales = (0.001 + torch.rand(out_features, in_features // size, generator=generator)).to(torch.float16)
    return codes, scales, torch.full(scales.shape, symmetric_zero(bits), dtype=torch.uint8)


@given(
    bits=st.sampled_from([4, 8]),
    size=st.sampled_from([8, 16, 64, 128]),
    groups=st.integers(1, 4),
    words=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_unpacking_gives_back_what_was_packed(bits: int, size: int, groups: int, words: int, seed: int) -> None:
    codes, scales, _ = random_linear(words * 8, size * groups, size, bits, seed)
    zeros = torch.randint(0, 1 << bits, scales.shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = pack_linear(codes, scales, zeros, bits, size)
    for expected, found in zip((codes, scales, zeros), unpack_linear(packed, bits, size), strict=True):
        assert torch.equal(expected, found) and expected.dtype == found.dtype


def test_words_hold_codes_lowest_bits_first() -> None:
    codes = torch.arange(64, dtype=torch.uint8).reshape(8, 8) % 16
    scales = torch.full((8, 1), 0.5, dtype=torch.float16)
    packed = pack_linear(codes, scales, torch.full((8, 1), 8), 4, -1)
    assert [word & 0xFFFFFFFF for word in packed["qweight"][0].tolist()] == [0x76543210, 0xFEDCBA98] * 4
    assert packed["qweight"].shape == (1, 8)
    assert packed["qzeros"].tolist() == [[0x77777777]]  # a symmetric zero of 8 is stored as 7
    assert packed["scales"].tolist() == [[0.5] * 8]
    assert packed["g_idx"].tolist() == [0] * 8
    assert [str(packed[name].dtype) for name in ("qweight", "qzeros", "scales", "g_idx")] == [
        "torch.int32", "torch.int32", "torch.float16", "torch.int32",
    ]  # fmt: skip


def test_eight_bit_words() -> None:
    codes = torch.tensor([[1, 2, 3, 255]] * 4, dtype=torch.uint8)
    packed = pack_linear(codes, torch.ones(4, 1), torch.full((4, 1), 128), 8, -1)
    assert [word & 0xFFFFFFFF for word in packed["qweight"].flatten().tolist()] == [0xFF030201] * 4
    assert packed["qzeros"].flatten().tolist() == [0x7F7F7F7F]


def test_dequantised_value_is_one_rounding_of_code_minus_zero_times_scale() -> None:
    codes, scales, zeros = random_linear(16, 64, 32, 4)
    exact = (codes.double() - 8) * scales.double().repeat_interleave(32, 1)
    assert torch.equal(dequantize(codes, scales, zeros, 32, torch.bfloat16), exact.float().to(torch.bfloat16))
    assert torch.equal(dequantize(codes[None], scales[None], zeros[None], 32, torch.float32)[0].double(), exact)


@pytest.mark.parametrize(
    ("in_features", "group_size", "expected"),
    [(64, 32, 32), (64, 64, 64), (64, 128, 64), (96, 128, 96), (96, -1, 96), (192, 64, 64), (192, 192, 192),
     (192, -1, 192), (96, 32, 32)],
)  # fmt: skip
def test_one_rule_for_groups(in_features: int, group_size: int, expected: int) -> None:
    assert effective_group_size(in_features, group_size) == expected


@pytest.mark.parametrize(
    ("in_features", "group_size", "fits"), [(192, 128, "96"), (96, 64, "48"), (320, 128, "80"), (96, 36, "32")]
)
def test_ragged_groups_are_refused_with_a_size_that_fits(in_features: int, group_size: int, fits: str) -> None:
    with pytest.raises(ShapeError) as caught:
        effective_group_size(in_features, group_size, name="model.layers.3.mlp.experts.0.down_proj")
    assert "layers.3.mlp.experts.0.down_proj" in str(caught.value) and str(in_features) in str(caught.value)
    assert f"--group-size {fits}," in caught.value.mend
    assert effective_group_size(in_features, int(fits)) == int(fits)


@pytest.mark.parametrize("group_size", [0, -2, -128])
def test_senseless_group_sizes_are_refused(group_size: int) -> None:
    with pytest.raises(ShapeError):
        effective_group_size(256, group_size)


def test_features_that_do_not_fill_words_are_refused() -> None:
    with pytest.raises(ShapeError, match="100 input features"):
        effective_group_size(100, -1)
    with pytest.raises(ShapeError, match="100 output features"):
        check_linear(100, 128, 128, 4, "x")


def test_narrow_linears_are_kept() -> None:
    assert is_kept(48) and is_kept(40) and is_kept(63) and not is_kept(64)


def test_another_channel_order_is_refused() -> None:
    codes, scales, zeros = random_linear(8, 64, 32, 4)
    packed = pack_linear(codes, scales, zeros, 4, 32)
    packed["g_idx"] = packed["g_idx"].flip(0)
    with pytest.raises(ArtifactError, match="g_idx"):
        unpack_linear(packed, 4, 32)


@pytest.mark.parametrize(("part", "bits", "size"), [("scales", 4, 64), ("qzeros", 4, 64), ("qweight", 8, 32)])
def test_tensors_of_another_group_or_width_are_refused(part: str, bits: int, size: int) -> None:
    codes, scales, zeros = random_linear(8, 128, 32, 4)
    with pytest.raises(ArtifactError):
        unpack_linear(pack_linear(codes, scales, zeros, 4, 32), bits, size)


@needs_auto_gptq
@pytest.mark.auto_gptq
@pytest.mark.parametrize(
    ("bits", "in_features", "group_size"), [(4, 128, 32), (4, 256, 128), (8, 128, 64), (8, 192, -1)]
)
def test_packs_bit_for_bit_as_auto_gptq(bits: int, in_features: int, group_size: int) -> None:
    out_features = 64
    size = effective_group_size(in_features, group_size)
    codes, scales, zeros = random_linear(out_features, in_features, size, bits)
    linear = torch.nn.Linear(in_features, out_features, bias=False, dtype=torch.float16)
    exact = (codes.float() - symmetric_zero(bits)) * scales.float().repeat_interleave(size, 1)
    linear.weight = torch.nn.Parameter(exact, requires_grad=False)  # its packer divides, so give it all digits
    theirs = import_auto_gptq("nn_modules.qlinear.qlinear_cuda").QuantLinear(
        bits, group_size, in_features, out_features, bias=False
    )
    theirs.pack(linear, scales.float(), zeros.float())
    ours = pack_linear(codes, scales, zeros, bits, group_size)
    for name in ("qweight", "qzeros", "g_idx"):
        assert torch.equal(ours[name], getattr(theirs, name)), name
    assert torch.equal(ours["scales"].float(), theirs.scales.float())
