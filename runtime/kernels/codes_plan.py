"""What `moe_codes.cu` is compiled with for a layer and a GPU's shared memory; needs no GPU."""

from __future__ import annotations

from runtime.errors import ShapeError
from runtime.kernels.fused_plan import COLUMNS, MAX_PAIRS, MAX_TOKENS, FusedPlan, layer_values, list_bytes, max_active
from runtime.kernels.layout import SlotLayout
from runtime.kernels.shape import ExpertShape

SOURCE = "moe_codes.cu"
CAPABILITY = (9, 0)  # of the GPU, at least
TEAM = 8  # compute warps that share a tile
_UNIT_COLUMNS, _STAGE_UNITS = 128, 16
_COMPUTE = (16, 8)  # compute warps, best first
_FINISHERS = 2
_FIRST_CLAIM = 2  # tiles
_RED_BUFFERS = 2
_KEPT_UNITS = 2  # of a token's columns that a compute warp keeps in registers
_WORTHWHILE_TOKENS = 8
_FEWEST_STAGES, _MOST_STAGES = 2, 12  # of a team
BESIDE_SMEM_BYTES = 80 << 10  # of a block that leaves room for blocks of the next kernel
_BESIDE_COMPUTE = 8


def plan(
    layout: SlotLayout, max_tokens: int, experts_per_block: int, smem_limit_bytes: int, beside: bool = False
) -> FusedPlan:
    """Choose the constants of one variant.

    The order of sums depends on the layer alone: a row has the same bits in any batch.

    Args:
        layout: of the pool's slots, INT4 or INT8.
        max_tokens: wanted of one launch, 1 to 16; it may become fewer where shared memory is short or top_k large.
        experts_per_block: experts whose tiles alternate in the pool; 0 and 1 are the same.
        smem_limit_bytes: shared memory that a block may have.
        beside: leave room on each SM for the next kernel, where the layer can be computed in less; the bits are the
            same.

    Raises:
        ShapeError: a layer of another form, or one that does not fit into the GPU's shared memory.
    """
    shape, form = layout.shape, layout.form
    if not form.is_coded:
        raise ShapeError(
            expected="int4 or int8 experts for the kernel with roles", found=form.kind, mend="use moe_small.cu"
        )
    most = max(1, min(max_tokens, MAX_TOKENS, MAX_PAIRS // shape.top_k))
    if beside:
        stages = _stages(layout, _BESIDE_COMPUTE, most, min(smem_limit_bytes, BESIDE_SMEM_BYTES))
        if stages >= _FEWEST_STAGES:
            return _made(layout, _BESIDE_COMPUTE, most, stages, experts_per_block, beside)
    for tokens in range(most, 0, -1):
        for compute in _COMPUTE:
            stages = _stages(layout, compute, tokens, smem_limit_bytes)
            if stages >= _FEWEST_STAGES:
                return _made(layout, compute, tokens, stages, experts_per_block)
    raise ShapeError(
        expected=f"at most {smem_limit_bytes} bytes of shared memory for a block of the kernel with roles",
        found=f"{_smem_bytes(layout, TEAM, 1, _FEWEST_STAGES)} for one token",
        mend="fix block_dim in fused_kernel, which chooses the other kernel for few tokens",
    )


def fits(layout: SlotLayout, smem_limit_bytes: int) -> bool:
    """Whether a launch of this kernel can take 8 tokens of such a layer, or as many as its lists ever hold.

    With fewer, the other kernel, which needs less shared memory a token, reads the experts less often.
    """
    tokens = max(1, min(_WORTHWHILE_TOKENS, MAX_PAIRS // layout.shape.top_k))
    return layout.form.is_coded and _smem_bytes(layout, TEAM, tokens, _FEWEST_STAGES) <= smem_limit_bytes


def _stages(layout: SlotLayout, compute: int, tokens: int, smem_limit_bytes: int) -> int:
    """How many fit, at most; fewer than a team needs where the layer does not."""
    stages = _MOST_STAGES
    while stages >= _FEWEST_STAGES and _smem_bytes(layout, compute, tokens, stages) > smem_limit_bytes:
        stages -= 1
    return stages


def _made(
    layout: SlotLayout, compute: int, tokens: int, stages: int, experts_per_block: int, beside: bool = False
) -> FusedPlan:
    values = layer_values(layout, tokens, experts_per_block) | {
        "COMPUTE": compute,
        "TEAM": TEAM,
        "FINISHERS": _FINISHERS,
        "STAGES": stages,
        "BESIDE": int(beside),
    }
    return FusedPlan.of(
        SOURCE,
        layout,
        tokens,
        values,
        threads=32 * (compute + compute // TEAM + _FINISHERS),
        most_first_claim=_FIRST_CLAIM,
        smem_bytes=_smem_bytes(layout, compute, tokens, stages),
    )


def _units(columns: int) -> int:
    return -(-columns // _UNIT_COLUMNS)


def _token_bytes(shape: ExpertShape, tokens: int) -> int:
    """Shared memory for tokens that no register holds: more than 8, or wide ones."""
    units = _units(shape.hidden_size)
    if tokens <= COLUMNS and -(-units // TEAM) <= _KEPT_UNITS:
        return 0
    return tokens * (units * _UNIT_COLUMNS * 2 + 64)


def _smem_bytes(layout: SlotLayout, compute: int, tokens: int, stages: int) -> int:
    """SHARED_BYTES of the source, in the order of its offsets; the source asserts that it is."""
    shape, teams = layout.shape, compute // TEAM
    rings, sums = teams * stages, teams * _RED_BUFFERS
    return (
        rings * _STAGE_UNITS * layout.form.unit_bytes
        + _token_bytes(shape, tokens)
        + compute * _RED_BUFFERS * 512
        + min(_units(shape.moe_intermediate_size), TEAM) * tokens * shape.top_k * 64
        + (rings + sums) * 16
        + (rings + sums) * 8
        + max_active(shape, tokens * shape.top_k) * COLUMNS * 4
        + list_bytes(shape, tokens)
    )
