"""Token-expert pairs sorted by expert, or by slot, on the device: what every kernel for many tokens starts from."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from runtime.errors import ShapeError
from runtime.kernels.compile import Source, load
from runtime.kernels.device import current_gpu
from runtime.kernels.launch import Kernel
from runtime.kernels.shape import MAX_EXPERTS

SOURCE = Source("route.cu")
THREADS = 1024
_MAX_PAIRS = 2**31 - 2**15


def items_per_thread(max_pairs: int) -> int:
    """Pairs of a thread: many small blocks, as an SM stores slowly; fewer where adding up their counts takes longer."""
    return 1 if max_pairs <= 64 * THREADS else 4


class Route:
    """The pairs of a layer call in the order of their experts, or of their experts' slots.

    Keys are experts, or slots if `num_slots` is given; pairs whose expert has no slot have no key. Everything is on the
    device and allocated once; the tensors below hold the result of the last `build` once the stream has come to it.

    Attributes:
        num_keys: num_experts or num_slots.
        num_active: int32 [1], keys that have pairs.
        active: int32 [num_keys], these keys ascending; what follows is undefined.
        first: int32 [num_keys + 1], where the pairs of active key i begin; first[num_active] is num_sorted.
        ends: int32 [num_keys], where the pairs of each key end, active or not.
        num_sorted: int32 [1], pairs that have a key; the last element of `ends`.
        pairs: int32 [capacity], t * top_k + j sorted by (key, t, j).
        position: int32 [capacity], the place of each pair in `pairs`, -1 without a key; undefined beyond num_tokens.
        capacity: max_tokens * top_k.

    Raises:
        ShapeError: more keys or pairs than the kernel counts.
    """

    def __init__(
        self, num_experts: int, top_k: int, max_tokens: int, device: torch.device | str, num_slots: int | None = None
    ) -> None:
        self.num_experts, self.top_k, self.max_tokens = num_experts, top_k, max_tokens
        self.by_slot = num_slots is not None
        self.num_keys = num_experts if num_slots is None else num_slots
        self.capacity = max_tokens * top_k
        if not (1 <= self.num_keys <= MAX_EXPERTS and 1 <= num_experts <= MAX_EXPERTS):
            raise ShapeError(
                expected=f"at most {MAX_EXPERTS} experts, or slots to sort by",
                found=f"{num_experts} experts, {self.num_keys} keys",
                mend="sort by expert where the pool has more slots",
            )
        if not 1 <= self.capacity <= _MAX_PAIRS:
            raise ShapeError(
                expected=f"1 to {_MAX_PAIRS} pairs of token and expert",
                found=f"{max_tokens} tokens of top_k {top_k}",
                mend="split the tokens over several calls",
            )

        def integers(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self.num_active, self.active, self.first = integers(1), integers(self.num_keys), integers(self.num_keys + 1)
        self.ends, self.pairs, self.position = integers(self.num_keys), integers(self.capacity), integers(self.capacity)
        self.num_sorted = self.ends[-1:]
        self._block_counts = integers(self.num_keys * self._most_blocks())

    def _most_blocks(self) -> int:
        """The largest grid of any `build`, which may be for fewer tokens than max_tokens."""
        return max(_blocks(self.capacity), _blocks(min(self.capacity, 64 * THREADS)))

    def build(self, top_k_index: Tensor, slot_of: Tensor, num_tokens: Tensor | None = None) -> None:
        """Queue the sorting: one launch up to 1024 pairs, else two; may be captured in a CUDA graph.

        Args:
            top_k_index: int32 [M <= max_tokens, top_k], contiguous; the experts of a token are distinct.
            slot_of: int32 [num_experts], a slot below num_slots, or -1 for an expert that is not here.
            num_tokens: int32 [1] on the device, to count only that many of the M tokens.

        Raises:
            ShapeError: a tensor that does not fit.
        """
        tokens = self._check(top_k_index, slot_of)
        max_pairs = tokens * self.top_k
        items, blocks = items_per_thread(max_pairs), _blocks(max_pairs)
        count, place = _kernels(current_gpu().index, items, self.num_keys, self.num_experts)
        sizes = (tokens, self.top_k, self.num_experts, self.num_keys, int(self.by_slot))
        common = (top_k_index, slot_of, num_tokens, *sizes, self._block_counts)
        if blocks > 1:
            count.launch(blocks, common)
        lists = (self.num_active, self.active, self.first, self.ends, self.pairs, self.position)
        place.launch(blocks, (*common, *lists), programmatic=blocks > 1)

    def _check(self, top_k_index: Tensor, slot_of: Tensor) -> int:
        tokens = len(top_k_index)
        fits = top_k_index.shape == (tokens, self.top_k) and top_k_index.is_contiguous() and tokens >= 1
        if top_k_index.dtype != torch.int32 or not fits or tokens > self.max_tokens:
            raise ShapeError(
                expected=f"top_k_index as contiguous int32 [1 to {self.max_tokens}, {self.top_k}]",
                found=f"{str(top_k_index.dtype).removeprefix('torch.')} {list(top_k_index.shape)}",
                mend="make the Route for as many tokens as a call may have",
            )
        if slot_of.dtype != torch.int32 or slot_of.shape != (self.num_experts,):
            raise ShapeError(
                expected=f"slot_of as int32 [{self.num_experts}]",
                found=f"{str(slot_of.dtype).removeprefix('torch.')} {list(slot_of.shape)}",
                mend="give every expert of the layer a slot or -1",
            )
        return tokens


def _blocks(max_pairs: int) -> int:
    return -(-max_pairs // (THREADS * items_per_thread(max_pairs)))


@cache
def _kernels(gpu_index: int, items: int, num_keys: int, num_experts: int) -> tuple[Kernel, Kernel]:
    """route_count and route_place on the current GPU; `gpu_index` only keeps those of different GPUs apart."""
    module = load(SOURCE)
    keys_bytes = -(-num_experts * 2 // 4) * 4
    count = Kernel(module, f"route_count_{items}", THREADS, num_keys * 4 + keys_bytes)
    smem_bytes = 6 * THREADS * items + num_keys * (8 + 2 * THREADS // 32) + keys_bytes
    return count, Kernel(module, f"route_place_{items}", THREADS, smem_bytes)
