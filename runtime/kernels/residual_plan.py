"""What `moe_residual.cu` is compiled with for a layer and a GPU's shared memory; needs no GPU."""

from __future__ import annotations

from runtime.errors import ShapeError
from runtime.kernels import fused_plan
from runtime.kernels.dequant import plain_layout
from runtime.kernels.fused_config import FusedConfig
from runtime.kernels.fused_plan import COLUMNS, MAX_PAIRS, MAX_TOKENS, FusedPlan, layer_values, list_bytes, max_active
from runtime.kernels.layout import SlotLayout

SOURCE = "moe_residual.cu"
CAPABILITY = (9, 0)  # of the GPU, at least
_COMPUTE, _FINISHERS, _QUADS = 16, 2, 4  # warps, warps, and fours of compute warps with a ring each
_STAGE_UNITS, _NIBBLE_BYTES = 4, 2112
_CHOICES_BYTES = 4096
_FIRST_CLAIM = 3  # tiles
_RED_BUFFERS = 2
_FEWEST_STAGES, _MOST_STAGES = 2, 4  # of a quad


def plan(layout: SlotLayout, max_tokens: int, config: FusedConfig, smem_limit_bytes: int) -> FusedPlan:
    """Choose the constants of one variant, with the order of sums of the BF16 kernel on the same GPU.

    Args:
        layout: of the bank's slots, int4.
        max_tokens: wanted of one launch, 1 to 16; it may become fewer where shared memory is short or top_k large.
        config: of the BF16 kernel.
        smem_limit_bytes: shared memory that a block may have.

    Raises:
        ShapeError: a bank of another form, sums that this kernel cannot follow, or too little shared memory.
    """
    shape = layout.shape
    plain = dict(fused_plan.plan(plain_layout(layout), max_tokens, config, smem_limit_bytes).source.defines)
    team, parts = int(plain["TEAM"]), int(plain["PARTS"])
    if layout.form.kind != "int4" or team > 8 or parts > 8:
        raise ShapeError(
            expected="a bank in int4, and BF16 sums of at most 8 warps and 8 parts, for residual records",
            found=f"{layout.form.kind}, team {team}, k_split {parts}",
            mend="leave team and k_split out of fused_kernel",
        )
    most = max(1, min(max_tokens, MAX_TOKENS, MAX_PAIRS // shape.top_k))
    for tokens in range(most, 0, -1):
        fixed = _smem_bytes(layout, team, parts, tokens, 0)
        each = _smem_bytes(layout, team, parts, tokens, 1) - fixed
        stages = min(_MOST_STAGES, (smem_limit_bytes - fixed) // each)
        if stages >= _FEWEST_STAGES:
            values = layer_values(layout, tokens, 0) | {"TEAM": team, "PARTS": parts, "STAGES": stages}
            del values["FORM"], values["INTERLEAVE"]
            return FusedPlan.of(
                SOURCE,
                layout,
                tokens,
                values,
                threads=32 * (_COMPUTE + 1 + _FINISHERS),
                most_first_claim=_FIRST_CLAIM,
                smem_bytes=_smem_bytes(layout, team, parts, tokens, stages),
            )
    raise ShapeError(
        expected=f"at most {smem_limit_bytes} bytes of shared memory for a block of the kernel for residual records",
        found=f"{_smem_bytes(layout, team, parts, 1, _FEWEST_STAGES)} for one token",
        mend="decode the records to BF16 instead",
    )


def _smem_bytes(layout: SlotLayout, team: int, parts: int, tokens: int, stages: int) -> int:
    """SHARED_BYTES of the source, in the order of its offsets; the source asserts that it is."""
    shape, pairs = layout.shape, tokens * layout.shape.top_k
    rings, sums = _QUADS * stages, (_QUADS // (2 if team > 4 else 1)) * _RED_BUFFERS
    active = max_active(shape, pairs)
    stage_bytes = _STAGE_UNITS * (layout.form.unit_bytes + 2048 + 80) + _NIBBLE_BYTES
    lists = list_bytes(shape, tokens)
    return (
        rings * stage_bytes
        + _CHOICES_BYTES
        + sums * team * 512
        + parts * pairs * 64
        + (2 * rings + 2 * sums) * 8
        + rings * 16
        + sums * 8
        + active * COLUMNS * 4
        + -(-lists // 4) * 4
        + (shape.num_experts + active) * 4
    )
