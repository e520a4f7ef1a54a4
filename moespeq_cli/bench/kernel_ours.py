"""The project's own kernels as candidates."""

from __future__ import annotations

import torch
from torch import Tensor

from moespeq_cli.bench.kernel_bound import Rounding
from moespeq_cli.bench.kernel_candidate import MANY_TOKENS, Prepared, PreparedExperts
from runtime.errors import ShapeError
from runtime.kernels.fused import FusedConfig, FusedExperts
from runtime.kernels.gemm import CAPABILITY, GemmExperts
from runtime.kernels.layout import Part, SlotLayout
from runtime.kernels.shape import ExpertShape, WeightForm

FUSED_TOKENS = 128  # more is possible, a launch for each 16, and never fast
SEED_LAYOUT = FusedConfig(block_dim=256, experts_per_block=8)


class Fused:
    """The kernel for few tokens.

    Args:
        config: its shape.
        name: for tables.
    """

    row_invariant = True

    def __init__(self, config: FusedConfig | None = None, name: str = "fused") -> None:
        self.config, self.name = config or FusedConfig(), name

    def rounding(self, form: WeightForm) -> Rounding:
        return Rounding()

    def max_tokens(self, shape: ExpertShape, form: WeightForm) -> int:
        if self.config.experts_per_block > 1 and (shape.has_bias or not form.is_coded):
            return 0
        return FUSED_TOKENS

    def prepare(self, shape: ExpertShape, form: WeightForm, max_tokens: int) -> Prepared:
        return _PreparedFused(SlotLayout(shape, form), self.config)


class _PreparedFused(PreparedExperts):
    """With the pool as the configuration wants it, each made once."""

    def __init__(self, layout: SlotLayout, config: FusedConfig) -> None:
        experts = FusedExperts(layout, config)
        super().__init__(lambda pool: experts)
        self._layout, self._group = layout, max(1, config.experts_per_block)
        self._pools: dict[int, tuple[Tensor, Tensor]] = {}

    def pool(self, pool: Tensor) -> Tensor:
        if self._group == 1:
            return pool
        if pool.data_ptr() not in self._pools:
            self._pools[pool.data_ptr()] = pool, interleave(self._layout, pool, self._group)
        return self._pools[pool.data_ptr()][1]


class Gemm:
    """The grouped products for many tokens."""

    name, row_invariant = "gemm", True

    def rounding(self, form: WeightForm) -> Rounding:
        return Rounding(weights=form.is_coded)

    def max_tokens(self, shape: ExpertShape, form: WeightForm) -> int:
        return MANY_TOKENS if torch.cuda.get_device_capability() == CAPABILITY else 0

    def prepare(self, shape: ExpertShape, form: WeightForm, max_tokens: int) -> Prepared:
        experts = GemmExperts(SlotLayout(shape, form), max_tokens, "cuda")
        return PreparedExperts(lambda pool: experts)


def interleave(layout: SlotLayout, pool: Tensor, group: int) -> Tensor:
    """Coded slots with the tiles of `group` neighbours alternating, as `experts_per_block` of a FusedConfig expects.

    Args:
        layout: of the pool, int4 or int8, without biases.
        pool: uint8 [S, slot_bytes].
        group: neighbouring slots; a last group that is not full is filled up.

    Returns:
        uint8 [S rounded up to whole groups, slot_bytes].

    Raises:
        ShapeError: a form or a layer that has no such layout.
    """
    if not layout.form.is_coded or layout.shape.has_bias:
        raise ShapeError(
            expected="int4 or int8 experts without biases to interleave",
            found=f"{layout.form.kind}{' with biases' if layout.shape.has_bias else ''}",
            mend="use experts_per_block 0 in fused_kernel",
        )
    groups = -(-len(pool) // group)
    made = pool.new_zeros(groups * group, pool.shape[1])
    padded = torch.cat((pool, pool.new_zeros(groups * group - len(pool), pool.shape[1])))
    for part, tiles in ((layout.gate_up, layout.gate_up_grid.tiles), (layout.down, layout.down_grid.tiles)):
        _alternate(padded, part, tiles, made, group)
    return made


def _alternate(pool: Tensor, part: Part, tiles: int, made: Tensor, group: int) -> None:
    """Tile t of slot s of a group goes to place t * group + s of the group's part."""
    data = part.get(pool).view(-1, group, tiles, part.size_bytes // tiles).transpose(1, 2)
    begin = part.offset_bytes * group
    made.view(len(made) // group, -1)[:, begin : begin + group * part.size_bytes] = data.flatten(1)
