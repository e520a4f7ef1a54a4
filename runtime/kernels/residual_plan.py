"""What `moe_residual.cu` is compiled with for a layer and a GPU's shared memory; needs no GPU."""

from __future__ import annotations

import itertools

from runtime.errors import ShapeError
from runtime.kernels import fused_plan
from runtime.kernels.dequant import plain_layout
from runtime.kernels.fused_config import FusedConfig
from runtime.kernels.fused_plan import COLUMNS, MAX_PAIRS, MAX_TOKENS, FusedPlan, layer_values, list_bytes, max_active
from runtime.kernels.layout import SlotLayout

SOURCE = "moe_residual.cu"
CAPABILITY = (9, 0)  # of the GPU, at least
_COMPUTE, _FINISHERS, _MOST_PRODUCERS = 16, 2, 2  # warps
_BLOCK_UNITS, _DIRECTORY_BYTES, _LOW_BYTES, _MOST_NIBBLE_BYTES, _TABLE_BYTES = 8, 80, 2048, 1024, 64
_EXCEPTIONS_BYTES = 3 * 128  # of a unit, in the mean over a block
_CHOICE_BYTES, _CHOICE_COPIES = 4096, (8, 1)  # copies of the table: as many as there is room for
_FIRST_CLAIM = 3  # tiles
_GRANULE = 512  # bytes, of which a stage takes a multiple
_RED_BUFFERS = 2
_LEAST_DEPTH = 16  # places for stages of a producer
_FEWEST_OUT = 8  # stages that a producer may have under way
_MOST_STAGES = 16  # of a tile
_MOST_BATCH_STAGES = 32  # that a producer plans at once
_FEWEST_STAGES = 2  # of the largest size, in the ring


def plan(
    layout: SlotLayout, max_tokens: int, config: FusedConfig, smem_limit_bytes: int, short_scales: bool = False
) -> FusedPlan:
    """Choose the constants of one variant, with the order of sums of the BF16 kernel on the same GPU.

    Args:
        layout: of the bank's slots, int4.
        max_tokens: wanted of one launch, 1 to 16; it may become fewer where shared memory is short or top_k large.
        config: of the BF16 kernel.
        smem_limit_bytes: shared memory that a block may have.
        short_scales: whether all scales of the bank are values of BF16 too.

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
    if _tile_stages(layout) > _MOST_STAGES:
        raise ShapeError(
            expected=f"at most {_MOST_STAGES * _BLOCK_UNITS * 128} columns, for residual records",
            found=f"hidden size {shape.hidden_size}, expert size {shape.moe_intermediate_size}",
            mend="decode the records to BF16 instead",
        )
    most = max(1, min(max_tokens, MAX_TOKENS, MAX_PAIRS // shape.top_k))
    least = _FEWEST_STAGES * _most_stage_bytes(layout)
    for tokens, producers, copies in itertools.product(
        range(most, 0, -1), range(_MOST_PRODUCERS, 0, -1), _CHOICE_COPIES
    ):
        fixed = copies * _CHOICE_BYTES + _smem_bytes(layout, team, parts, tokens, producers)
        ring = (smem_limit_bytes - fixed) // producers // 128 * 128
        if ring >= least:
            values = layer_values(layout, tokens, 0)
            values |= {
                "TEAM": team,
                "PARTS": parts,
                "PRODUCERS": producers,
                "DEPTH": _depth(layout, team, parts, producers),
                "RING_BYTES": ring,
                "CHOICE_COPIES": copies,
                "SHORT_SCALES": int(short_scales),
            }
            del values["FORM"], values["INTERLEAVE"]
            return FusedPlan.of(
                SOURCE,
                layout,
                tokens,
                values,
                threads=32 * (_COMPUTE + producers + _FINISHERS),
                most_first_claim=min(_FIRST_CLAIM, producers * (_MOST_BATCH_STAGES // _stages(shape.hidden_size))),
                smem_bytes=producers * ring + fixed,
            )
    raise ShapeError(
        expected=f"at most {smem_limit_bytes} bytes of shared memory for a block of the kernel for residual records",
        found=f"{_smem_bytes(layout, team, parts, 1, producers=1) + _CHOICE_BYTES + least} for one token",
        mend="decode the records to BF16 instead",
    )


def _stages(columns: int) -> int:
    """Blocks of a record that a tile of so many columns has."""
    return -(-columns // (_BLOCK_UNITS * 128))


def _tile_stages(layout: SlotLayout) -> int:
    """Blocks of a record that the longest tile has."""
    return _stages(max(layout.shape.hidden_size, layout.shape.moe_intermediate_size))


def _groups(members: int) -> int:
    """Groups of compute warps when a tile's sums have so many members."""
    return _COMPUTE // (8 if members > 4 else 4)


def _depth(layout: SlotLayout, team: int, parts: int, producers: int) -> int:
    """Places for stages: as many as may be under way, and as many as a group may be ahead of what it had."""
    first = (_groups(team) // producers - 1) * _stages(layout.shape.hidden_size)
    second = _groups(parts) // producers - 1
    return max(_LEAST_DEPTH, 1 << (_FEWEST_OUT + first + second).bit_length())


def _most_stage_bytes(layout: SlotLayout) -> int:
    """A block of a record with its codes and directory, all codes zero."""
    unit_bytes = layout.form.unit_bytes + _DIRECTORY_BYTES + _LOW_BYTES + _MOST_NIBBLE_BYTES + _EXCEPTIONS_BYTES
    return -(-(_BLOCK_UNITS * unit_bytes + _TABLE_BYTES) // _GRANULE) * _GRANULE


def _smem_bytes(layout: SlotLayout, team: int, parts: int, tokens: int, producers: int) -> int:
    """SHARED_BYTES of the source but for rings and table, in the order of its offsets; which the source asserts."""
    shape, pairs = layout.shape, tokens * layout.shape.top_k
    slots, sums = producers * _depth(layout, team, parts, producers), _groups(team) * _RED_BUFFERS
    active = max_active(shape, pairs)
    lists = list_bytes(shape, tokens)
    return (
        sums * team * 512
        + parts * pairs * 64
        + slots * 16
        + (2 * slots + 2 * sums) * 8
        + sums * 8
        + active * COLUMNS * 4
        + -(-lists // 4) * 4
        + (shape.num_experts + active) * 4
    )
