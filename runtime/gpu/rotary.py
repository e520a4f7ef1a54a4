"""Rotary positions as tables on the device, made once: a pass looks its rows up."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

_AT_ONCE = 4096  # positions; what is between frequencies and tables takes several times their memory

Tables = Tensor | tuple[Tensor, ...]


@torch.no_grad()
def install(model: Any, capacity: int, device: torch.device) -> None:
    """Let a model's rotary module answer from tables of its first positions.

    Its own code may make frequencies on the host at every call (Phi-3.5-MoE) or look at positions there, to change them
    beyond a context: neither can be recorded. A run ends at the context for which the first frequencies hold, see
    `context_limit`, so a position has one entry. A module that takes more than positions only loses that look.

    Args:
        model: the causal language model, its buffers on the device.
        capacity: positions.
        device: of the tables.
    """
    rotary = getattr(model.model, "rotary_emb", None)
    if rotary is None:
        return
    plain = inspect.unwrap(type(rotary).forward)
    if list(inspect.signature(plain).parameters)[1:] != ["x", "position_ids"]:
        rotary.forward = plain.__get__(rotary)
        return
    x = torch.empty(1, 1, model.config.hidden_size, dtype=model.dtype, device=device)
    places = torch.arange(capacity, device=device)[None]
    parts: list[Tables] = [plain(rotary, x, some) for some in torch.split(places, _AT_ONCE, dim=1)]
    single = isinstance(parts[0], Tensor)
    tables = [torch.cat(same, dim=1) for same in zip(*((part,) if single else part for part in parts), strict=True)]

    def forward(x: Tensor, position_ids: Tensor) -> Tables:
        """The library's call: entries [1, rows, ...] of `position_ids`, int64 [1, rows]."""
        found = tuple(table[:, position_ids[0]] for table in tables)
        return found[0] if single else found

    rotary.forward = forward
