"""Make a token's result independent of how many tokens share the pass.

Libraries choose other kernels, and other orders of summing, for one row than for four; vectorised loops treat the last
elements of a block differently. So in *row mode* every module outside the routed experts sees one row at a time, in
exactly the shapes of plain one-token decoding, whatever the number of rows in the pass. Then the logits of a row are
bit-equal with and without speculation by construction, on any processor and for every family. The routed experts still
see all rows at once: they are what moves through memory, and they compute row by row themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from runtime.model.experts import find_experts
from runtime.model.kv import SharedKv
from runtime.model.loader import cache_argument, decoder_layers

MAX_ROWS = 7
"""Rows of one pass. A value a row between the wrapped modules (the sigmoid of a shared expert's gate) then never fills
a vectorised loop: the narrowest, two registers of four floats, begins at eight."""


class RowMode:
    """Whether passes run row by row (decoding) or as one block (prefill)."""

    def __init__(self) -> None:
        self.active = False


def install(model: Any, kv: Callable[[], SharedKv], mode: RowMode) -> None:
    """Wrap every module of a model from `loader.build` so that it obeys `mode`.

    Args:
        model: the causal language model.
        kv: gives the cache in use.
        mode: switched by the caller between passes.
    """
    _by_row(model.model.norm, mode)
    _by_row(model.lm_head, mode)
    rotary = getattr(model.model, "rotary_emb", None)
    if rotary is not None:
        _rotary_by_row(rotary, mode)
    for layer in decoder_layers(model):
        _wrap_children(layer, kv, mode)


def _wrap_children(module: nn.Module, kv: Callable[[], SharedKv], mode: RowMode) -> None:
    experts = find_experts(module)
    for child in module.children():
        if child is experts:
            continue
        if experts is not None and any(part is experts for part in child.modules()):
            _wrap_children(child, kv, mode)
        elif cache_argument(child) is not None:
            _attention_by_row(child, kv, mode)
        else:
            _by_row(child, mode)


def _by_row(module: nn.Module, mode: RowMode) -> None:
    inner = module.forward

    def forward(x: Tensor, *arguments: Any, **named: Any) -> Any:
        axis = 1 if x.dim() > 2 else 0
        if not mode.active or x.shape[axis] == 1:
            return inner(x, *arguments, **named)
        rows = [inner(x.narrow(axis, row, 1).clone(), *arguments, **named) for row in range(x.shape[axis])]
        if isinstance(rows[0], tuple):
            return tuple(_join(parts) for parts in zip(*rows, strict=True))
        return _join(rows)

    module.forward = forward


def _join(rows: Any) -> Tensor:
    return torch.cat(rows, dim=1 if rows[0].dim() > 2 else 0)


def _rotary_by_row(module: nn.Module, mode: RowMode) -> None:
    inner = module.forward

    def forward(x: Tensor, position_ids: Tensor, *arguments: Any, **named: Any) -> Any:
        if not mode.active or position_ids.shape[1] == 1:
            return inner(x, position_ids, *arguments, **named)
        places = range(position_ids.shape[1])
        rows = [inner(x[:, :1], position_ids.narrow(1, row, 1), *arguments, **named) for row in places]
        if isinstance(rows[0], tuple):
            return tuple(torch.cat(parts, dim=1) for parts in zip(*rows, strict=True))
        return torch.cat(rows, dim=1)

    module.forward = forward


def _attention_by_row(module: nn.Module, kv: Callable[[], SharedKv], mode: RowMode) -> None:
    inner = module.forward

    def forward(hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        if not mode.active:
            return inner(hidden_states, *arguments, **named)
        cache = kv()
        base, outputs = cache.position, []
        mask = named.pop("attention_mask", None)
        try:
            for row in range(hidden_states.shape[1]):
                cache.position = base + row
                one = {name: _row(value, row) for name, value in named.items()}
                states = hidden_states.narrow(1, row, 1).clone()
                outputs.append(inner(states, *arguments, attention_mask=_mask_row(mask, row, base), **one)[0])
        finally:
            cache.position = base
        return torch.cat(outputs, dim=1), None

    module.forward = forward


def _row(value: Any, row: int) -> Any:
    """The part of a per-token argument (positions, rotary tables) that belongs to one row."""
    if isinstance(value, tuple):
        return tuple(_row(item, row) for item in value)
    if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] > row:
        return value.narrow(1, row, 1).clone()
    return value


def _mask_row(mask: Tensor | None, row: int, base: int) -> Tensor | None:
    """One row of the library's mask, cut at the row's own key; None where nothing is hidden."""
    if mask is None:
        return None
    line = mask[:, :, row : row + 1, : base + row + 1].clone()
    hidden = ~line if line.dtype == torch.bool else line != 0
    return line if bool(hidden.any()) else None
