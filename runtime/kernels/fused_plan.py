"""What `moe_small.cu` is compiled with for a layer and a GPU's shared memory; needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from runtime.errors import ShapeError
from runtime.kernels.compile import Source
from runtime.kernels.fused_config import FusedConfig
from runtime.kernels.layout import SlotLayout
from runtime.kernels.shape import ExpertShape, Kind

SOURCE = "moe_small.cu"
FORMS: dict[Kind, int] = {"int4": 0, "int8": 1, "bf16": 2}
MAX_TOKENS = 16  # of one launch
COLUMNS = 8  # tokens of one MMA
MAX_PAIRS = 128  # of one launch, unless a single token has more
_WARPS = (16, 8, 4, 2)  # of a block, best first; fewer only where shared memory is short
_MAX_TEAMS = 15  # a team of several warps has a hardware barrier of its own, and the block has one of the 16
_QUEUE = 32  # claims that a team remembers
_CHUNK_UNITS = (2, 1)  # of a stage of a warp, at most; best first
_TEAM = 8
_SPLIT_COLUMNS = 128  # that no split parts
_MIN_STAGES, _MAX_STAGES = 2, 8  # without a word of the caller
_PLAIN_COLUMNS, _PLAIN_BYTES = 64, 2048  # a unit of BF16 rows, as the kernel copies them
_STAGE_NOTE_BYTES = 16


@dataclass(frozen=True, slots=True)
class FusedPlan:
    """One variant of the kernel.

    Attributes:
        source: the file with all its constants.
        max_tokens: of one launch; more are computed by several.
        max_pairs: max_tokens * top_k, the rows of either buffer of h.
        threads: of a block.
        most_first_claim: tiles that a block may take at once when it starts.
        tiles_per_token: such tiles of all experts of one token.
        smem_bytes: dynamic shared memory of a block.
    """

    source: Source
    max_tokens: int
    max_pairs: int
    threads: int
    most_first_claim: int
    tiles_per_token: int
    smem_bytes: int

    @classmethod
    def of(
        cls,
        source: str,
        layout: SlotLayout,
        tokens: int,
        values: dict[str, int | str],
        *,
        threads: int,
        most_first_claim: int,
        smem_bytes: int,
    ) -> FusedPlan:
        """A variant of a source by its macros, to which the shared memory that it must need is added."""
        shape = layout.shape
        return cls(
            Source(source, (*values.items(), ("EXPECTED_SHARED_BYTES", smem_bytes))),
            tokens,
            tokens * shape.top_k,
            threads,
            most_first_claim,
            shape.top_k * shape.moe_intermediate_size // 8,
            smem_bytes,
        )

    def first_claim(self, num_tokens: int, num_blocks: int) -> int:
        """Tiles that each block takes at once when it starts: as many as it may, or a fair share of fewer."""
        return min(self.most_first_claim, -(-num_tokens * self.tiles_per_token // num_blocks))


@dataclass(frozen=True, slots=True)
class _Split:
    """How a block's warps share the columns of tiles, and how many units they copy at once.

    All but the latter decides the order of sums. So it may not depend on the number of tokens: a row has the same bits
    in any batch.
    """

    warps: int
    team: int
    parts: int
    chunk: int

    @property
    def teams(self) -> int:
        return self.warps // self.team


def plan(layout: SlotLayout, max_tokens: int, config: FusedConfig, smem_limit_bytes: int) -> FusedPlan:
    """Choose the constants of one variant.

    Args:
        layout: of the pool's slots.
        max_tokens: wanted of one launch, 1 to 16; it may become fewer where shared memory is short or top_k large.
        config: what the caller fixes.
        smem_limit_bytes: shared memory that a block may have.

    Raises:
        ShapeError: no variant of this configuration fits into the GPU's shared memory.
    """
    shape, needed = layout.shape, config.stages or _MIN_STAGES
    most = max(1, min(MAX_TOKENS, MAX_PAIRS // shape.top_k))
    split = next(_fitting(layout, config, smem_limit_bytes, (most, 1)), None)
    if split is None:
        least = min(_smem_bytes(layout, split, 1, needed) for split in _splits(layout, config))
        raise ShapeError(
            expected=f"at most {smem_limit_bytes} bytes of shared memory for a block of the fused kernel",
            found=(
                f"{least} for one token of top_k {shape.top_k} among {shape.num_experts} experts in {needed} stages"
            ),
            mend="use a smaller block_dim, stages or k_split in fused_kernel, or leave them out",
        )
    wanted = min(max_tokens, most)
    tokens = next(n for n in range(wanted, 0, -1) if _room(layout, split, n, smem_limit_bytes) >= needed)
    stages = config.stages or min(_room(layout, split, tokens, smem_limit_bytes), _MAX_STAGES)
    values = layer_values(layout, tokens, config.experts_per_block) | {
        "WARPS": split.warps,
        "TEAM": split.team,
        "PARTS": split.parts,
        "CHUNK": split.chunk,
        "STAGES": stages,
    }
    return FusedPlan.of(
        SOURCE,
        layout,
        tokens,
        values,
        threads=split.warps * 32,
        most_first_claim=split.teams,
        smem_bytes=_smem_bytes(layout, split, tokens, stages),
    )


def _fitting(layout: SlotLayout, config: FusedConfig, limit_bytes: int, tokens: tuple[int, ...]) -> Iterator[_Split]:
    """Splits with room for the first of these numbers of tokens, best first; then those for the next number."""
    needed = config.stages or _MIN_STAGES
    for count in tokens:
        for split in _splits(layout, config):
            if _room(layout, split, count, limit_bytes) >= needed:
                yield split


def _splits(layout: SlotLayout, config: FusedConfig) -> list[_Split]:
    """By how many warps a block may have, and by how many units they copy at once."""
    counts = (config.block_dim // 32,) if config.block_dim else _WARPS
    return [_split(layout, config, warps, chunk) for warps in counts for chunk in _CHUNK_UNITS]


def _split(layout: SlotLayout, config: FusedConfig, warps: int, most: int) -> _Split:
    shape = layout.shape
    widths = (shape.hidden_size, shape.moe_intermediate_size)
    groups1, groups2 = (-(-columns // _SPLIT_COLUMNS) for columns in widths)
    team = min(config.team or _TEAM, warps, _power_below(groups1))
    if team > 1 and warps // team > _MAX_TEAMS:
        team = 1
    parts = min(config.k_split or (4 if shape.top_k > 2 else 8), warps, _power_below(groups2))
    units1, units2 = (-(-columns // _unit(layout)[0]) for columns in widths)
    chunk = max(_even_chunk(-(-units // shares), most) for units, shares in ((units1, team), (units2, parts)))
    return _Split(warps, team, parts, chunk)


def _unit(layout: SlotLayout) -> tuple[int, int]:
    """Columns and bytes of a unit of 16 rows."""
    return (128, layout.form.unit_bytes) if layout.form.is_coded else (_PLAIN_COLUMNS, _PLAIN_BYTES)


def _power_below(limit: int) -> int:
    """The largest power of two up to a limit."""
    return 1 << (max(1, limit).bit_length() - 1)


def _even_chunk(units: int, most: int) -> int:
    """Units of a chunk when `units` are cut into as few chunks of at most `most` as possible, of nearly one length."""
    return -(-units // -(-units // most))


def _room(layout: SlotLayout, split: _Split, tokens: int, limit_bytes: int) -> int:
    """Stages that fit."""
    fixed_bytes = _smem_bytes(layout, split, tokens, 0)
    return (limit_bytes - fixed_bytes) // (_smem_bytes(layout, split, tokens, 1) - fixed_bytes)


def _smem_bytes(layout: SlotLayout, split: _Split, tokens: int, stages: int) -> int:
    """SHARED_BYTES of the source, in the order of its offsets but for the ring; the source asserts that it is."""
    return (
        stages * split.warps * (split.chunk * _unit(layout)[1] + _STAGE_NOTE_BYTES)
        + (split.warps * 2 * 512 if split.team > 1 else 0)
        + split.parts * tokens * layout.shape.top_k * 64
        + split.teams * _QUEUE * (4 + 8)
        + list_bytes(layout.shape, tokens)
    )


def list_bytes(shape: ExpertShape, tokens: int) -> int:
    """What the list of active experts takes of shared memory, in the order of `expert_layer.cuh`."""
    pairs = tokens * shape.top_k
    active = max_active(shape, pairs)
    return (
        pairs * 8
        + (shape.num_experts + 1) // 2 * 16
        + active * 8
        + (_levels(tokens) * -(-shape.num_experts // 32) + 1) * 4
        + active * COLUMNS * 2
    )


def max_active(shape: ExpertShape, pairs: int) -> int:
    """Entries of the list of active experts, which hold up to 8 tokens of one expert each."""
    return min(pairs, shape.num_experts + pairs // COLUMNS)


def _levels(tokens: int) -> int:
    """Entries that one expert may have."""
    return -(-tokens // COLUMNS)


def layer_values(layout: SlotLayout, tokens: int, experts_per_block: int) -> dict[str, int | str]:
    """The macros of `expert_layer.cuh` for launches of so many tokens."""
    shape, form = layout.shape, layout.form
    return {
        "FORM": FORMS[form.kind],
        "SCALE_SETS": max(1, form.scale_sets),
        "HIDDEN": shape.hidden_size,
        "INTER": shape.moe_intermediate_size,
        "TOP_K": shape.top_k,
        "NUM_EXPERTS": shape.num_experts,
        "MAX_PAIRS": tokens * shape.top_k,
        "MAX_TOKENS": _levels(tokens) * COLUMNS,
        "ACTIVATION": shape.activation.code,
        "BIAS": int(shape.has_bias),
        "INTERLEAVE": max(1, experts_per_block) if form.is_coded else 1,
        "SLOT_BYTES": f"{layout.slot_bytes}ull",
        "DOWN_OFFSET": f"{layout.down.offset_bytes}ull",
        "BIAS_OFFSET": f"{layout.gate_up_bias.offset_bytes if layout.gate_up_bias else 0}ull",
        "DOWN_BIAS_OFFSET": f"{layout.down_bias.offset_bytes if layout.down_bias else 0}ull",
    }
