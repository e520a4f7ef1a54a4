"""The layer for many tokens on Hopper GPUs: sorted rows, two grouped products by `moe_gemm.cu`, and a sum."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from runtime.errors import KernelError, ShapeError
from runtime.kernels.arguments import Argument
from runtime.kernels.combine import combine_rows, gather_rows
from runtime.kernels.compile import Source, load
from runtime.kernels.dequant import dequantize_experts, plain_layout
from runtime.kernels.device import current_gpu
from runtime.kernels.launch import Kernel
from runtime.kernels.layout import SlotLayout
from runtime.kernels.route import Route
from runtime.kernels.shape import ExpertShape
from runtime.kernels.tensor_map import tensor_map, tensor_map_2d, tensor_map_3d

CAPABILITY = (9, 0)  # wgmma is an instruction of sm_90a alone
_THREADS, _UNIT, _STEP = 384, 16, 64  # THREADS, UNIT and K_STEP of the source
_ROW_BYTES: Literal[128] = 128  # of a stage: 2 * _STEP, the span of the swizzle
_MAX_MAPS = 1024  # a run has two for each layer and tile; those of pools that are gone are dropped with the rest


@dataclass(frozen=True, slots=True)
class GemmTile:
    """How `moe_gemm.cu` cuts its products.

    Attributes:
        sub: a tile has 128 * sub weight rows; 1 or 2.
        max_units: and up to 16 * max_units rows of one expert.
        stages: steps of 64 columns in flight.
        cluster: blocks that share the weights of a tile and have rows of their own; 1 or 2.

    Raises:
        ShapeError: the source is not made for it.
    """

    sub: int
    max_units: int
    stages: int
    cluster: int = 1

    def __post_init__(self) -> None:
        if self.sub not in (1, 2) or self.cluster not in (1, 2) or not 1 <= self.max_units <= min(16, 20 // self.sub):
            raise ShapeError(
                expected="sub and cluster of 1 or 2, max_units of 1 to 16, sub * max_units up to 20",
                found=str(self),
                mend="use one of gemm.TILES",
            )

    @property
    def smem_bytes(self) -> int:
        """The ring of stages, and two barriers for each."""
        return self.stages * (_ROW_BYTES * (128 * self.sub + _UNIT * self.max_units) + 16)


NARROW = GemmTile(1, 4, 9)
WIDE = GemmTile(2, 10, 4)
PAIRED = GemmTile(2, 10, 4, cluster=2)
TILES = (NARROW, WIDE, PAIRED)


def choose_tile(rows_per_expert: float) -> GemmTile:
    """What measured fastest on an H200 for an average of so many rows an expert (60 experts of 2048 x 1408).

    Up to 48 few experts have more than the 64 rows of a narrow tile; above 160 most have two wide tiles or more, which
    can share weights.
    """
    if rows_per_expert <= 48:
        return NARROW
    return WIDE if rows_per_expert <= 160 else PAIRED


def source(shape: ExpertShape, tile: GemmTile) -> Source:
    """cuda/moe_gemm.cu for a tile, and the activation and biases of a layer; any sizes of the layer will do."""
    values = {
        "SUB": tile.sub,
        "MAX_UNITS": tile.max_units,
        "STAGES": tile.stages,
        "CLUSTER": tile.cluster,
        "ACTIVATION": shape.activation.code,
        "BIAS": int(shape.has_bias),
    }
    return Source("moe_gemm.cu", tuple(values.items()), hopper=True)


class GemmExperts:
    """Layers of one geometry computed by grouped products of our own; only h passes through BF16 between the kernels.

    BF16 slots are used where they lie. INT4 and INT8 experts that have tokens are first expanded to BF16 slots of this
    object, one an expert. Nothing waits for the device and nothing is allocated after the first call with a pool and a
    tile, so later calls may be captured in a CUDA graph. One instance serves one stream: its memory is used by one
    call at a time.

    Args:
        layout: of the pools' slots.
        max_tokens: of any call; memory for its rows is allocated here.
        device: where the pools are.
        tile: for all calls; by default `choose_tile` of the call's tokens.

    Attributes:
        route: the rows of the last call, sorted by expert.
        xs: bfloat16 [route.capacity, H], tokens in the order of `route.pairs`.
        hs: bfloat16 [route.capacity, I], their activations.
        ps: float32 [route.capacity, H], what they contribute.

    Raises:
        KernelError: the current GPU is not of compute capability 9.0.
    """

    def __init__(
        self, layout: SlotLayout, max_tokens: int, device: torch.device | str, tile: GemmTile | None = None
    ) -> None:
        gpu = current_gpu()
        if gpu.capability != CAPABILITY:
            raise KernelError(
                expected="a GPU of compute capability 9.0 for the gemm backend",
                found=f"{gpu.name} of {gpu.capability[0]}.{gpu.capability[1]}",
                mend="use the grouped backend",
            )
        self.layout, self._tile = layout, tile
        self._plain = plain_layout(layout)
        shape = layout.shape
        self.scratch = self._plain.new_pool(shape.num_experts, device) if layout.form.is_coded else None
        self.route = Route(shape.num_experts, shape.top_k, max_tokens, device)
        rows, hidden, inner = self.route.capacity, shape.hidden_size, shape.moe_intermediate_size
        self.xs = torch.zeros(rows, hidden, dtype=torch.bfloat16, device=device)
        self.hs = torch.zeros(rows, inner, dtype=torch.bfloat16, device=device)
        self.ps = torch.zeros(rows, hidden, dtype=torch.float32, device=device)
        self._token_maps: dict[tuple[int, GemmTile], bytes] = {}
        self._weight_maps: dict[tuple[int, int, int, GemmTile], tuple[bytes, bytes]] = {}

    def run(
        self,
        pool: Tensor,
        slot_of: Tensor,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        out: Tensor,
        *,
        num_tokens: Tensor | None = None,
        pairs: Tensor | None = None,
        resume: bool = False,
    ) -> None:
        """Compute the layer into `out`, on torch's current stream.

        Args:
            pool: uint8 [S, slot_bytes], its rows at multiples of 16 bytes.
            slot_of: int32 [E], -1 where an expert is not here: its pairs are left out.
            x, out: bfloat16 [M, H].
            top_k_index: int32 [M, k], distinct in a row.
            top_k_weights: float32 [M, k].
            num_tokens: int32 [1] on the device, when only that many of the M tokens count; other rows are left alone.
            pairs: float32 [M, k, H]: what each pair contributed is kept here, for a layer computed in several calls.
            resume: pairs that are not here count with what `pairs` holds.

        Raises:
            ShapeError: tensors that do not fit, or resume without pairs.
        """
        route, shape = self.route, self.layout.shape
        tile = self._tile or choose_tile(len(x) * shape.top_k / shape.num_experts)
        route.build(top_k_index, slot_of, num_tokens)
        if self.scratch is not None:
            dequantize_experts(self.layout, pool, slot_of, route.active, route.num_active, self.scratch)
        gather_rows(x, route, self.xs, num_tokens)
        self.gate_up(pool, slot_of, tile)
        self.down(pool, slot_of, tile)
        combine_rows(self.ps, route, top_k_weights, None, out, num_tokens, pairs=pairs, resume=resume)

    def gate_up(self, pool: Tensor, slot_of: Tensor, tile: GemmTile) -> None:
        """Activations `hs` of the sorted rows `xs`; `pool` and `slot_of` as for `run`, codes expanded before."""
        self._launch(0, self.xs, self.hs, pool, slot_of, tile)

    def down(self, pool: Tensor, slot_of: Tensor, tile: GemmTile) -> None:
        """Contributions `ps` of the sorted rows from `hs`; to be queued right behind `gate_up`."""
        self._launch(1, self.hs, self.ps, pool, slot_of, tile)

    def _launch(self, which: int, rows: Tensor, out: Tensor, pool: Tensor, slot_of: Tensor, tile: GemmTile) -> None:
        """One of the two products, 0 or 1."""
        gpu, shape, route = current_gpu(), self.layout.shape, self.route
        bias = (self.layout.gate_up_bias, self.layout.down_bias)[which]
        biases: tuple[Argument, ...] = (None, None, 0, 0)
        if bias is not None:
            biases = (pool, slot_of, pool.stride(0), bias.offset_bytes)
        args = (
            self._maps_of_weights(pool, tile)[which],
            self._maps_of_rows(rows, tile),
            route.num_active,
            route.active,
            route.first,
            slot_of if self.scratch is None else None,
            *biases,
            out,
            shape.hidden_size,
            shape.moe_intermediate_size,
        )
        grid = gpu.num_sms // tile.cluster * tile.cluster
        _kernels(gpu.index, shape, tile)[which].launch(grid, args, programmatic=True)

    def _maps_of_weights(self, pool: Tensor, tile: GemmTile) -> tuple[bytes, bytes]:
        """gate_up with 8 * sub gate rows beside the up rows of the same numbers, and down; a block's share a copy."""
        slots = pool if self.scratch is None else self.scratch
        address, count, slot_bytes = slots.data_ptr(), len(slots), slots.stride(0)
        key = address, count, slot_bytes, tile
        if key not in self._weight_maps:
            if len(self._weight_maps) >= _MAX_MAPS:
                self._weight_maps.clear()
            hidden, inner, rows = self.layout.shape.hidden_size, self.layout.shape.moe_intermediate_size, 8 * tile.sub
            gate_up = tensor_map(
                address + self._plain.gate_up.offset_bytes,
                torch.bfloat16,
                (count, -(-inner // rows), 2, rows, hidden),
                (slot_bytes, 2 * rows * hidden, 2 * inner * hidden, 2 * hidden),
                (1, 8 // tile.cluster, 2, rows, _STEP),
                swizzle_bytes=_ROW_BYTES,
            )
            down = tensor_map_3d(
                address + self._plain.down.offset_bytes,
                torch.bfloat16,
                (count, hidden, inner),
                (slot_bytes, 2 * inner),
                (1, 16 * rows // tile.cluster, _STEP),
                swizzle_bytes=_ROW_BYTES,
            )
            self._weight_maps[key] = gate_up, down
        return self._weight_maps[key]

    def _maps_of_rows(self, rows: Tensor, tile: GemmTile) -> bytes:
        """One map for each width of a tile."""
        key = rows.data_ptr(), tile
        if key not in self._token_maps:
            count, columns = rows.shape
            self._token_maps[key] = b"".join(
                tensor_map_2d(
                    rows.data_ptr(),
                    rows.dtype,
                    (count, columns),
                    2 * columns,
                    (_UNIT * units, _STEP),
                    swizzle_bytes=_ROW_BYTES,
                )
                for units in range(1, tile.max_units + 1)
            )
        return self._token_maps[key]


@cache
def _kernels(gpu_index: int, shape: ExpertShape, tile: GemmTile) -> tuple[Kernel, Kernel]:
    """moe_gate_up and moe_down on the current GPU; `gpu_index` only keeps those of different GPUs apart."""
    module = load(source(shape, tile))
    return (
        Kernel(module, "moe_gate_up", _THREADS, tile.smem_bytes),
        Kernel(module, "moe_down", _THREADS, tile.smem_bytes),
    )
