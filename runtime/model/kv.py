"""One KV cache for draft and target, written at a position that the caller sets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class _Cursor:
    """Where the next forward writes, and how many tokens fit; shared by the layers.

    An object apart from the cache, so that no cycle keeps a sequence's buffers alive after it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.position = 0
        self.rows: Tensor | None = None
        self.length = 0


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, [1, heads, capacity, dim], with a write position shared by all layers."""

    is_sliding = False

    def __init__(self, cursor: _Cursor) -> None:
        super().__init__()
        self._cursor = cursor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocate the buffers on the first update, when the library's shapes are known."""
        assert value_states is not None
        shape = self._cursor.capacity
        self.keys = key_states.new_zeros(*key_states.shape[:2], shape, key_states.shape[3])
        self.values = value_states.new_zeros(*value_states.shape[:2], shape, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write at the shared position and return everything up to the end of what was written.

        Where rows have places of their own, each is written at its own, and the first `length` entries are returned.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if self._cursor.rows is not None:
            self.keys.index_copy_(2, self._cursor.rows, key_states)
            self.values.index_copy_(2, self._cursor.rows, value_states)
            return self.keys[:, :, : self._cursor.length], self.values[:, :, : self._cursor.length]
        start, end = self._cursor.position, self._cursor.position + key_states.shape[2]
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what attention sees."""
        return self._cursor.position + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens before the write position."""
        return self._cursor.position

    def get_max_length(self) -> int:
        """Capacity in tokens."""
        return self._cursor.capacity

    get_max_cache_shape = get_max_length


class SharedKv(Cache):  # type: ignore[misc]
    """The cache of a whole model.

    The draft reads the target's entries of the prefix and writes its own for the tokens it drafts; verification writes
    over them. Nothing is ever cropped: `position` says where the next forward writes, and what lies beyond is stale.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        self._cursor = _Cursor(capacity)
        super().__init__(layers=[_Layer(self._cursor) for _ in range(num_layers)])

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return self._cursor.capacity

    @property
    def position(self) -> int:
        """Where the next forward pass writes."""
        return self._cursor.position

    @position.setter
    def position(self, value: int) -> None:
        self._cursor.position = value

    def place_rows(self, positions: Tensor | None, length: int) -> None:
        """Let each row of the next forwards write at a place that is in memory, for passes that are recorded.

        Args:
            positions: int64 [rows] on the device; None goes back to one `position`.
            length: entries that attention gets, beyond every position.
        """
        self._cursor.rows, self._cursor.length = positions, length

    def heads(self, layer_id: int, key_heads: int, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [key_heads, capacity, size] each, on the device and in the type of `like`."""
        layer = self.layers[layer_id]
        if not layer.is_initialized:
            none = like.new_empty(1, key_heads, 0, size)
            layer.lazy_initialization(none, none)
        return layer.keys[0], layer.values[0]

    @property
    def allocated_bytes(self) -> int:
        """Memory of the buffers that exist."""
        tensors = [tensor for layer in self.layers for tensor in (layer.keys, layer.values) if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """KV bytes that one token takes in all layers, from the model's configuration; an estimate for the plan."""
    layers = int(config.num_hidden_layers)
    rank = getattr(config, "kv_lora_rank", None)
    if rank:
        return int(layers * (rank + config.qk_rope_head_dim) * dtype.itemsize)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(layers * 2 * heads * head_dim * dtype.itemsize)
