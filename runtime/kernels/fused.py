"""The fused expert layer for a few tokens: one launch of `moe_small.cu`."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.errors import ShapeError
from runtime.kernels.compile import Source, load
from runtime.kernels.device import current_gpu
from runtime.kernels.launch import Kernel
from runtime.kernels.layout import SlotLayout

SOURCE = "moe_small.cu"
FORMS = {"int4": 0, "int8": 1, "bf16": 2}
COLUMNS = 8  # tokens of one MMA
MAX_TOKENS = 16  # of one launch
MAX_PAIRS = 128  # of one launch, unless a single token has more
QUEUE = 32  # as in the source
CHUNK_BYTES = 2200  # of a stage of a warp: long enough to copy well, short enough for three of them


@dataclass(frozen=True, slots=True)
class FusedConfig:
    """Shape of the kernel; 0 takes what measures fastest.

    Attributes:
        block_dim: threads of a block, a power of two from 64 to 1024.
        experts_per_block: experts whose tiles alternate in the pool (code forms); 1 keeps a slot contiguous.
        stages: units of 16 rows that each warp has in flight.
        k_split: parts that the down projection's input is split into.
        team: warps that share a gate/up tile.
    """

    block_dim: int = 0
    experts_per_block: int = 0
    stages: int = 0
    k_split: int = 0
    team: int = 0


@dataclass(frozen=True, slots=True)
class FusedPlan:
    """One compiled configuration: what the source is compiled with, and what a launch needs."""

    source: Source
    max_tokens: int
    max_pairs: int
    warps: int
    teams: int
    smem_bytes: int


def _power_of_two(limit: int) -> int:
    return 1 << (max(1, limit).bit_length() - 1)


def plan(layout: SlotLayout, max_tokens: int, config: FusedConfig, smem_limit_bytes: int) -> FusedPlan:
    """Choose the constants of one variant.

    Args:
        layout: of the pool's slots.
        max_tokens: of one launch, 8 or 16; fewer where that would be too many pairs.
        config: what is fixed by the caller.
        smem_limit_bytes: shared memory that a block may have.

    Raises:
        ShapeError: the configuration does not fit the layer or the GPU.
    """
    shape, form = layout.shape, layout.form
    unit_columns, unit_bytes = (128, form.unit_bytes) if form.is_coded else (64, 2048)
    units1, units2 = (-(-n // unit_columns) for n in (shape.hidden_size, shape.moe_intermediate_size))
    warps = (config.block_dim or 512) // 32
    most = max(1, CHUNK_BYTES // unit_bytes)
    team = config.team or min(16, max(4, 1 << (-(-units1 // most) - 1).bit_length()))
    team = min(team, warps, _power_of_two(units1))
    parts = min(config.k_split or (4 if shape.top_k > 2 else 8), warps, _power_of_two(units2))
    chunk = max(_even_chunk(-(-units1 // team), most), _even_chunk(-(-units2 // parts), most))
    levels = max_tokens // COLUMNS
    max_tokens = max(1, min(max_tokens, MAX_PAIRS // shape.top_k))
    max_pairs = max_tokens * shape.top_k
    max_active = min(max_pairs, shape.num_experts + max_pairs // COLUMNS)
    fixed_bytes = (
        (warps * 2 * 512 if team > 1 else 0)
        + parts * max_pairs * 64
        + warps // team * QUEUE * 8
        + max_pairs * 8
        + 8
        + (shape.num_experts + 1) // 2 * 16
        + max_active * 8
        + (levels * -(-shape.num_experts // 32) + 1) * 4
        + max_active * COLUMNS * 2
    )
    stage_bytes = warps * (chunk * unit_bytes + 8 + 16)
    room = (smem_limit_bytes - fixed_bytes) // stage_bytes
    stages = config.stages or min(room, 8)
    if not 2 <= stages <= room:
        raise ShapeError(
            expected=f"2 to {room} stages of {chunk} units of {unit_bytes} bytes for each of {warps} warps",
            found=f"{stages}",
            mend="use a smaller block_dim or fewer stages in fused_kernel",
        )
    defines: dict[str, int | str] = {
        "FORM": FORMS[form.kind],
        "SCALE_SETS": max(1, form.scale_sets),
        "HIDDEN": shape.hidden_size,
        "INTER": shape.moe_intermediate_size,
        "TOP_K": shape.top_k,
        "NUM_EXPERTS": shape.num_experts,
        "MAX_PAIRS": max_pairs,
        "MAX_TOKENS": levels * COLUMNS,
        "ACTIVATION": shape.activation.code,
        "BIAS": int(shape.has_bias),
        "WARPS": warps,
        "TEAM": team,
        "PARTS": parts,
        "CHUNK": chunk,
        "STAGES": stages,
        "INTERLEAVE": max(1, config.experts_per_block),
        "SLOT_BYTES": f"{layout.slot_bytes}ull",
        "DOWN_OFFSET": f"{layout.down.offset_bytes}ull",
        "BIAS_OFFSET": f"{layout.gate_up_bias.offset_bytes if layout.gate_up_bias else 0}ull",
        "DOWN_BIAS_OFFSET": f"{layout.down_bias.offset_bytes if layout.down_bias else 0}ull",
    }
    source = Source(SOURCE, tuple(defines.items()))
    return FusedPlan(source, max_tokens, max_pairs, warps, warps // team, fixed_bytes + stages * stage_bytes)


def _even_chunk(units: int, most: int) -> int:
    """Units of a chunk when `units` are cut into as few chunks of at most `most` as possible, of nearly one length."""
    return -(-units // -(-units // most))


class _Variant:
    """A compiled plan with the scratch that its calls share."""

    def __init__(self, chosen: FusedPlan, inner: int, device: torch.device) -> None:
        self.plan = chosen
        self.kernel = Kernel(load(chosen.source), "moe_small", chosen.warps * 32, chosen.smem_bytes)
        self.state = torch.zeros(2, dtype=torch.int32, device=device)
        self.h = torch.full((2, chosen.max_pairs, inner), -1, dtype=torch.int16, device=device)
        self.grid = self.kernel.gpu.num_sms


class FusedExperts:
    """The routed experts of layers of one geometry, for at most a few tens of tokens.

    One instance serves one stream: its scratch memory is used by one call at a time.
    """

    def __init__(self, layout: SlotLayout, config: FusedConfig | None = None) -> None:
        self.layout, self.config = layout, config or FusedConfig()
        self.device = torch.device("cuda", torch.cuda.current_device())

    @functools.cache  # noqa: B019 - one instance a layer geometry, kept for the life of a run
    def _variant(self, max_tokens: int) -> _Variant:
        limit = current_gpu().smem_per_block_bytes
        chosen = plan(self.layout, max_tokens, self.config, limit)
        return _Variant(chosen, self.layout.shape.moe_intermediate_size, self.device)

    def run(
        self,
        pool: Tensor,
        slot_of: Tensor,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        out: Tensor,
        *,
        pairs: Tensor | None = None,
        resume: bool = False,
    ) -> None:
        """Compute the layer into `out`; queued on torch's current stream, nothing is allocated after the first call.

        Args:
            pool: uint8 [S, slot_bytes].
            slot_of: int32 [E], -1 where an expert is not here: its pairs are left out.
            x, out: bfloat16 [M, H].
            top_k_index: int32 [M, k], distinct in a row.
            top_k_weights: float32 [M, k].
            pairs: float32 [M, k, H]: what each pair contributed is kept here, for a layer computed in several calls.
            resume: pairs that are not here count with what `pairs` holds.
        """
        tokens = len(x)
        variant = self._variant(COLUMNS if tokens <= COLUMNS else MAX_TOKENS)
        step = variant.plan.max_tokens
        tiles = self.layout.shape.top_k * self.layout.shape.moe_intermediate_size // 8
        for first in range(0, tokens, step):
            part = slice(first, first + step)
            variant.kernel.launch(
                variant.grid,
                (
                    x[part],
                    top_k_index[part],
                    top_k_weights[part],
                    slot_of,
                    pool,
                    variant.state,
                    variant.h,
                    out[part],
                    None if pairs is None else pairs[part],
                    rows := min(step, tokens - first),
                    int(resume),
                    min(variant.plan.teams, -(-rows * tiles // variant.grid)),
                ),
                programmatic=True,
            )
