"""What `moe_bf16.cu` is compiled with for a layer and a GPU's shared memory; needs no GPU."""

from __future__ import annotations

from runtime.errors import ShapeError
from runtime.kernels import fused_plan
from runtime.kernels.fused_config import FusedConfig
from runtime.kernels.fused_plan import COLUMNS, MAX_PAIRS, FusedPlan, layer_values, list_bytes, max_active
from runtime.kernels.layout import SlotLayout

SOURCE = "moe_bf16.cu"
TEAM = 8  # compute warps that share a tile, and units of a stage
_TEAMS, _FINISHERS = 2, 2
_UNIT_COLUMNS = 128
_ROW_GAP_BYTES = 64  # between the rows of a stage: two neighbours fill all banks
_STAGE_BYTES = 16 * (TEAM * _UNIT_COLUMNS * 2 + _ROW_GAP_BYTES)
_FEWEST_UNITS, _MOST_UNITS = TEAM, 2 * TEAM  # of a tile: one for each warp, and no more than whose tokens it can keep
_MOST_STEPS = 3  # units of a warp in an entry's 16 rows of down, whose tokens it has under way
_FEWEST_STAGES, _MOST_STAGES = 2, 4  # of a team
_FIRST_CLAIM = _TEAMS  # tiles


def fits(layout: SlotLayout, max_tokens: int, config: FusedConfig, smem_limit_bytes: int) -> bool:
    """Whether this kernel can take so many tokens of such a layer in one launch, with the bits of `moe_small.cu`.

    Args:
        layout: of the pool's slots.
        max_tokens: wanted of one launch.
        config: what the caller fixes of `moe_small.cu`.
        smem_limit_bytes: shared memory that a block may have.

    Raises:
        ShapeError: `moe_small.cu`, whose order of sums decides, does not fit itself.
    """
    shape = layout.shape
    if layout.form.is_coded or max_tokens > COLUMNS or max_tokens * shape.top_k > MAX_PAIRS:
        return False
    if shape.hidden_size % _UNIT_COLUMNS or shape.moe_intermediate_size % _UNIT_COLUMNS:
        return False
    team, parts = _sums(layout, max_tokens, config, smem_limit_bytes)
    units, down_units = shape.hidden_size // _UNIT_COLUMNS, shape.moe_intermediate_size // _UNIT_COLUMNS
    return (
        team == TEAM
        and parts <= TEAM
        and _FEWEST_UNITS <= units <= _MOST_UNITS
        and -(-down_units // parts) <= _MOST_STEPS
        and _stages(layout, max_tokens, parts, smem_limit_bytes) >= _FEWEST_STAGES
    )


def plan(layout: SlotLayout, max_tokens: int, config: FusedConfig, smem_limit_bytes: int) -> FusedPlan:
    """Choose the constants of the variant; the arguments are those of `fits`.

    Raises:
        ShapeError: a layer that does not fit.
    """
    if not fits(layout, max_tokens, config, smem_limit_bytes):
        raise ShapeError(
            expected="BF16 experts of whole units of 128 columns for the kernel with roles, at most 8 tokens",
            found=f"{layout.form.kind}, hidden size {layout.shape.hidden_size}, "
            f"expert size {layout.shape.moe_intermediate_size}, {max_tokens} tokens",
            mend="use moe_small.cu",
        )
    _, parts = _sums(layout, max_tokens, config, smem_limit_bytes)
    stages = _stages(layout, max_tokens, parts, smem_limit_bytes)
    values = layer_values(layout, max_tokens, 0) | {
        "COMPUTE": _TEAMS * TEAM,
        "TEAM": TEAM,
        "PARTS": parts,
        "FINISHERS": _FINISHERS,
        "STAGES": stages,
    }
    return FusedPlan.of(
        SOURCE,
        layout,
        max_tokens,
        values,
        threads=32 * (_TEAMS * (TEAM + 1) + _FINISHERS),
        most_first_claim=_FIRST_CLAIM,
        smem_bytes=_smem_bytes(layout, max_tokens, parts, stages),
    )


def _sums(layout: SlotLayout, max_tokens: int, config: FusedConfig, smem_limit_bytes: int) -> tuple[int, int]:
    """TEAM and PARTS of `moe_small.cu` for the layer."""
    values = dict(fused_plan.plan(layout, max_tokens, config, smem_limit_bytes).source.defines)
    return int(values["TEAM"]), int(values["PARTS"])


def _stages(layout: SlotLayout, tokens: int, parts: int, smem_limit_bytes: int) -> int:
    """How many fit, at most; fewer than a team needs where the layer does not."""
    fixed_bytes = _smem_bytes(layout, tokens, parts, 0)
    one_bytes = _smem_bytes(layout, tokens, parts, 1) - fixed_bytes
    return min((smem_limit_bytes - fixed_bytes) // one_bytes, _MOST_STAGES)


def _smem_bytes(layout: SlotLayout, tokens: int, parts: int, stages: int) -> int:
    """SHARED_BYTES of the source, in the order of its offsets; the source asserts that it is."""
    shape, rings = layout.shape, _TEAMS * stages
    return (
        rings * _STAGE_BYTES
        + _TEAMS * TEAM * 512
        + parts * tokens * shape.top_k * 64
        + (rings + _TEAMS) * 16
        + (rings + _TEAMS) * 8
        + max_active(shape, tokens * shape.top_k) * COLUMNS * 4
        + list_bytes(shape, tokens)
    )
