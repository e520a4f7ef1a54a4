"""The GPTQ interchange format of one linear: codes, scales and zeros packed into 32-bit words."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.errors import ArtifactError, ShapeError

SUPPORTED_BITS = (4, 8)
MIN_QUANTIZED_IN_FEATURES = 64  # a narrower linear stays in its source dtype
WORD_BITS = 32


def symmetric_zero(bits: int) -> int:
    """The code that stands for 0.0, half-way up the range: 8 of 0..15, 128 of 0..255."""
    return 1 << (bits - 1)


def is_kept(in_features: int) -> bool:
    """Whether a linear is too narrow to be quantised and stays in its source dtype."""
    return in_features < MIN_QUANTIZED_IN_FEATURES


def effective_group_size(in_features: int, group_size: int, *, name: str = "a linear", bits: int = 4) -> int:
    """How many input channels share one scale, the one rule for every stage.

    Args:
        in_features: input channels of the linear.
        group_size: what the user asked for; -1, or anything not below `in_features`, means one group.
        name: the tensor, for the message.
        bits: width of a code; 32 / bits codes fill a word, and a group is made of whole words.

    Returns:
        A divisor of in_features that is a multiple of 32 / bits.

    Raises:
        ShapeError: the groups or the words would be ragged; the message names a size that fits.
    """
    step = WORD_BITS // bits
    if group_size != -1 and group_size < 1:
        raise ShapeError(
            expected="a group size of -1 (one group) or above 0",
            found=str(group_size),
            mend="pass another --group-size, 128 is usual",
        )
    if in_features % step:
        raise ShapeError(
            expected=f"{name} with input features in multiples of {step} ({step} codes of {bits} bits fill a word)",
            found=f"{in_features} input features",
            mend="keep this projection unquantised by adding its name to --skip-modules",
        )
    size = in_features if group_size == -1 or group_size >= in_features else group_size
    if in_features % size or size % step:
        fitting = [n for n in range(8, size, 8) if in_features % n == 0 and n % step == 0]
        raise ShapeError(
            expected=f"a group size that divides {name}'s {in_features} input features, in multiples of {step}",
            found=f"group size {size} ({in_features} = {in_features // size} x {size} + {in_features % size})",
            mend=f"pass --group-size {fitting[-1]}, the largest below {size} that fits this tensor"
            if fitting
            else "pass --group-size -1, one group a row",
        )
    return size


def check_linear(out_features: int, in_features: int, group_size: int, bits: int, name: str = "a linear") -> int:
    """The effective group size of a linear, once all of its dimensions are known to pack into whole words.

    Raises:
        ShapeError: naming the tensor and the dimension that does not fit.
    """
    step = WORD_BITS // bits
    if out_features % step:
        raise ShapeError(
            expected=f"{name} with output features in multiples of {step} (zeros of {step} rows fill a word)",
            found=f"{out_features} output features",
            mend="keep this projection unquantised by adding its name to --skip-modules",
        )
    return effective_group_size(in_features, group_size, name=name, bits=bits)


def pack_linear(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int, group_size: int) -> dict[str, Tensor]:
    """Pack one linear as auto-gptq 0.7.1's `QuantLinear.pack` does.

    Args:
        codes: uint8 [out_features, in_features], values 0 .. 2^bits - 1.
        scales: [out_features, groups], stored as float16.
        zeros: integers [out_features, groups]; stored one less, as the format wants.
        bits: 4 or 8.
        group_size: as asked for; `effective_group_size` applies.

    Returns:
        qweight int32 [in_features * bits / 32, out_features], channel i of a word in bits [i * bits, (i + 1) * bits);
        qzeros int32 [groups, out_features * bits / 32]; scales float16 [groups, out_features];
        g_idx int32 [in_features].

    Raises:
        ShapeError: shapes that do not belong together.
    """
    out_features, in_features = codes.shape
    size = check_linear(out_features, in_features, group_size, bits)
    groups = in_features // size
    for what, tensor in (("scales", scales), ("zeros", zeros)):
        if tuple(tensor.shape) != (out_features, groups):
            raise ShapeError(
                expected=f"{what} of shape {(out_features, groups)} (group size {size})",
                found=str(tuple(tensor.shape)),
                mend="make codes, scales and zeros with one group size",
            )
    mask = (1 << bits) - 1
    stored_zeros = (zeros.to(torch.int64) - 1) & mask
    return {
        "qweight": _words(codes.t(), bits),
        "qzeros": _words(stored_zeros, bits).t().contiguous(),
        "scales": scales.t().to(torch.float16).contiguous(),
        "g_idx": torch.arange(in_features, dtype=torch.int32) // size,
    }


def unpack_linear(
    tensors: dict[str, Tensor], bits: int, group_size: int, name: str = "a linear"
) -> tuple[Tensor, Tensor, Tensor]:
    """Undo `pack_linear`.

    Args:
        tensors: qweight, qzeros, scales and g_idx of one linear.
        bits: 4 or 8.
        group_size: as asked for; `effective_group_size` applies.
        name: the linear, for messages.

    Returns:
        codes uint8 [out_features, in_features], scales float16 and zeros uint8 [out_features, groups].

    Raises:
        ArtifactError: shapes or dtypes that are not this format's, or channels in activation order.
    """
    qweight, qzeros, scales, g_idx = (tensors[part] for part in ("qweight", "qzeros", "scales", "g_idx"))
    in_features, out_features = qweight.shape[0] * WORD_BITS // bits, qweight.shape[1]
    size = check_linear(out_features, in_features, group_size, bits, name)
    groups = in_features // size
    wanted = {
        "qweight": (qweight, torch.int32, (in_features * bits // WORD_BITS, out_features)),
        "qzeros": (qzeros, torch.int32, (groups, out_features * bits // WORD_BITS)),
        "scales": (scales, torch.float16, (groups, out_features)),
        "g_idx": (g_idx, torch.int32, (in_features,)),
    }
    for part, (tensor, dtype, shape) in wanted.items():
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ArtifactError(
                expected=f"{name}.{part} as {dtype} {shape} ({bits} bits, group size {size})",
                found=f"{tensor.dtype} {tuple(tensor.shape)}",
                mend="run `moespeq quantize` again",
            )
    if not torch.equal(g_idx, torch.arange(in_features, dtype=torch.int32, device=g_idx.device) // size):
        raise ArtifactError(
            expected=f"{name}.g_idx in channel order", found="another order", mend="quantise without desc_act"
        )
    mask = (1 << bits) - 1
    codes = _fields(qweight, bits).t().contiguous()
    zeros = ((_fields(qzeros.t(), bits).to(torch.int64) + 1) & mask).to(torch.uint8)
    return codes, scales.t().contiguous(), zeros.contiguous()


def dequantize(codes: Tensor, scales: Tensor, zeros: Tensor, group_size: int, dtype: torch.dtype) -> Tensor:
    """Weights that the codes stand for: (code - zero) * scale in float32, then rounded once to `dtype`.

    Args:
        codes: uint8 [..., out_features, in_features].
        scales: float16 [..., out_features, groups].
        zeros: uint8 [..., out_features, groups].
        group_size: as asked for; `effective_group_size` applies.
        dtype: of the result.

    Returns:
        [..., out_features, in_features].
    """
    in_features = codes.shape[-1]
    # bits only sets the word, which does not matter once the codes are unpacked: 8 is the weaker condition
    size = effective_group_size(in_features, group_size, bits=8)
    grouped = codes.reshape(*codes.shape[:-1], in_features // size, size).to(torch.float32)
    values = (grouped - zeros.unsqueeze(-1).to(torch.float32)) * scales.unsqueeze(-1).to(torch.float32)
    return values.flatten(-2).to(dtype)


def _words(values: Tensor, bits: int) -> Tensor:
    """[n, m] small integers to int32 words [n * bits / 32, m], lowest bits first."""
    step = WORD_BITS // bits
    grouped = values.reshape(values.shape[0] // step, step, values.shape[1])
    words = grouped[:, 0].to(torch.int32)
    for place in range(1, step):
        words |= grouped[:, place].to(torch.int32) << place * bits  # the last one's highest bit becomes the sign
    return words.contiguous()


def _fields(words: Tensor, bits: int) -> Tensor:
    """Undo `_words`: int32 [n, m] to uint8 [n * 32 / bits, m]."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device).view(1, -1, 1)
    return ((words.unsqueeze(1) >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(0, 1)
