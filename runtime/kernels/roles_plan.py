"""What `moe_codes.cu` is compiled with for a layer and a GPU's shared memory; needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.errors import ShapeError
from runtime.kernels.compile import Source
from runtime.kernels.fused_plan import COLUMNS, FusedPlan
from runtime.kernels.layout import SlotLayout

SOURCE = "moe_codes.cu"
CAPABILITY = (9, 0)  # of the GPU, at least
_UNIT_COLUMNS, _STAGE_UNITS = 128, 16
_MOST_PARTS = 12  # of the down projection's columns
_FIRST_CLAIM = 8  # tiles
_MAX_PAIRS, _MAX_TOKENS = 128, 16  # of one launch; a single token may have more pairs
_RED_BUFFERS = 2
_FEWEST_STAGES, _MOST_STAGES = 2, 12  # of a team


@dataclass(frozen=True, slots=True)
class _Roles:
    """Warps of a block: `compute` of them in teams of `team`, one producer, and finishers."""

    compute: int
    team: int

    @property
    def teams(self) -> int:
        return self.compute // self.team

    @property
    def finishers(self) -> int:
        return max(2, self.teams)

    @property
    def threads(self) -> int:
        return 32 * (self.compute + 1 + self.finishers)


def plan(layout: SlotLayout, max_tokens: int, smem_limit_bytes: int) -> FusedPlan:
    """Choose the constants of one variant.

    The team, which decides the order of sums, depends on the layer alone: a row has the same bits in any batch.

    Args:
        layout: of the pool's slots, INT4 or INT8.
        max_tokens: wanted of one launch, 1 to 16; it may become fewer where shared memory is short or top_k large.
        smem_limit_bytes: shared memory that a block may have.

    Raises:
        ShapeError: a layer of another form, or one that does not fit into the GPU's shared memory.
    """
    shape, form = layout.shape, layout.form
    if not form.is_coded:
        raise ShapeError(
            expected="int4 or int8 experts for the kernel with roles", found=form.kind, mend="use the backend fused"
        )
    units = -(-shape.hidden_size // _UNIT_COLUMNS)
    team = 8 if units <= _STAGE_UNITS else 16
    most = max(1, min(max_tokens, _MAX_TOKENS, _MAX_PAIRS // shape.top_k))
    for tokens in range(most, 0, -1):
        for roles, wanted in ((_Roles(3 * team, team), 3), (_Roles(2 * team, team), 2), (_Roles(team, team), 2)):
            if roles.compute > 24:
                continue
            fixed_bytes = _smem_bytes(layout, roles, tokens, 0)
            stage_bytes = _smem_bytes(layout, roles, tokens, 2) - fixed_bytes  # of two: notes and barriers are in pairs
            stages = 2 * ((smem_limit_bytes - fixed_bytes) // stage_bytes)
            if stages < _MOST_STAGES and _smem_bytes(layout, roles, tokens, stages + 1) <= smem_limit_bytes:
                stages += 1
            if stages >= wanted:
                return _made(layout, roles, tokens, min(stages, _MOST_STAGES))
    raise ShapeError(
        expected=f"at most {smem_limit_bytes} bytes of shared memory for a block of the kernel with roles",
        found=f"{_smem_bytes(layout, _Roles(team, team), 1, _FEWEST_STAGES)} for one token",
        mend="use the backend fused: take roles out of the profile's kernel_dispatch",
    )


def fits(layout: SlotLayout, smem_limit_bytes: int) -> bool:
    """Whether a block of this kernel can compute such a layer with so much shared memory."""
    try:
        plan(layout, 1, smem_limit_bytes)
    except ShapeError:
        return False
    return True


def _made(layout: SlotLayout, roles: _Roles, tokens: int, stages: int) -> FusedPlan:
    shape, form, smem_bytes = layout.shape, layout.form, _smem_bytes(layout, roles, tokens, stages)
    values: dict[str, int | str] = {
        "FORM": 0 if form.kind == "int4" else 1,
        "SCALE_SETS": form.scale_sets,
        "HIDDEN": shape.hidden_size,
        "INTER": shape.moe_intermediate_size,
        "TOP_K": shape.top_k,
        "NUM_EXPERTS": shape.num_experts,
        "MAX_TOKENS": -(-tokens // COLUMNS) * COLUMNS,
        "MAX_PAIRS": tokens * shape.top_k,
        "ACTIVATION": shape.activation.code,
        "BIAS": int(shape.has_bias),
        "COMPUTE": roles.compute,
        "TEAM": roles.team,
        "STAGES": stages,
        "SLOT_BYTES": f"{layout.slot_bytes}ull",
        "DOWN_OFFSET": f"{layout.down.offset_bytes}ull",
        "BIAS_OFFSET": f"{layout.gate_up_bias.offset_bytes if layout.gate_up_bias else 0}ull",
        "DOWN_BIAS_OFFSET": f"{layout.down_bias.offset_bytes if layout.down_bias else 0}ull",
        "EXPECTED_SHARED_BYTES": smem_bytes,
    }
    return FusedPlan(
        Source(SOURCE, tuple(values.items())),
        tokens,
        tokens * shape.top_k,
        roles.threads,
        roles.teams,
        _FIRST_CLAIM,
        shape.top_k * shape.moe_intermediate_size // 8,
        smem_bytes,
    )


def _parts(columns: int) -> int:
    """Parts of the down projection's columns, each of whole units."""
    units = -(-columns // _UNIT_COLUMNS)
    run = -(-units // _MOST_PARTS)
    return -(-units // run)


def _smem_bytes(layout: SlotLayout, roles: _Roles, tokens: int, stages: int) -> int:
    """SHARED_BYTES of the source, in the order of its offsets; the source asserts that it is."""
    shape, pairs = layout.shape, tokens * layout.shape.top_k
    active = min(pairs, shape.num_experts + pairs // COLUMNS)
    rings = roles.teams * stages
    barriers = 2 * rings + 2 * roles.teams * _RED_BUFFERS
    return (
        rings * _STAGE_UNITS * layout.form.unit_bytes
        + roles.compute * _RED_BUFFERS * 512
        + _parts(shape.moe_intermediate_size) * pairs * 64
        + (barriers + 1) // 2 * 16
        + rings * 8
        + roles.teams * _RED_BUFFERS * 8
        + pairs * 8
        + (shape.num_experts + 1) // 2 * 16
        + active * 8
        + (-(-tokens // COLUMNS) * -(-shape.num_experts // 32) + 1) * 4
        + active * COLUMNS * 2
    )
