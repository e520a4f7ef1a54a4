"""Attention whose result for a row depends on nothing but the keys before it.

Decoding passes have a fixed number of rows, each with its place in memory, and look at a fixed number of keys, most of
which a mask may hide. Of the library's kernels the memory-efficient one gives a row the same bits whatever the other
rows are and however many hidden keys follow: it walks along the keys in order, and a hidden key adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from runtime.errors import InputError
from runtime.model.loader import cache_argument

NAME = "moespeq"
_WINDOW_IN_MASKS = ("phimoe",)  # model types whose attention modules do not know the window of the library's masks
_LATENTS = 256  # the fewest keys that a pass looks at, where a context has as many
_ROWS = [SDPBackend.EFFICIENT_ATTENTION]
_BLOCK = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class AttentionPass:
    """Where the tokens of the pass at hand are; every attention module of a model shares one."""

    def __init__(self) -> None:
        self.positions: Tensor | None = None  # int64 [rows] on the device; None in a prompt's block
        self._start = self._tokens = self._length = 0
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def rows(self, positions: Tensor, length: int) -> None:
        """The coming pass decodes rows at these positions and looks at the first `length` keys."""
        self.positions, self._length = positions, length
        self._masks.clear()

    def block(self, start: int, tokens: int) -> None:
        """The coming pass is a block of a prompt from `start` on; the keys before it are looked at too."""
        self.positions, self._start, self._tokens = None, start, tokens
        self._length = start + tokens
        self._masks.clear()

    def mask(self, window: int | None, repeats: int, device: torch.device) -> Tensor | None:
        """Which keys each row may look at, bool [repeats * rows, keys], made once a pass; None is plain causal.

        Args:
            window: keys that a row looks back on, itself included; None means all.
            repeats: how often the rows come one after the other.
            device: of the mask.
        """
        if window is not None and window >= self._length:
            window = None
        if self.positions is None and self._start == 0 and window is None:
            return None
        key = window, repeats
        if key not in self._masks:
            rows = self.positions
            if rows is None:
                rows = torch.arange(self._start, self._start + self._tokens, device=device)
            keys = torch.arange(self._length, device=device)
            mask = keys <= rows[:, None]
            if window is not None:
                mask &= keys > rows[:, None] - window
            self._masks[key] = mask.repeat(repeats, 1)
        return self._masks[key]


def register() -> None:
    """Make `attn_implementation="moespeq"` known to transformers; calling it again changes nothing."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(NAME, attend)


def install(model: nn.Module) -> AttentionPass:
    """Give every attention module of a model one `AttentionPass`, and return it."""
    shared = AttentionPass()
    config: Any = model.config
    for module in model.modules():
        if cache_argument(module) is not None and not hasattr(module, "layers"):
            module.moespeq_pass = shared  # type: ignore[assignment]
            if config.model_type in _WINDOW_IN_MASKS:
                module.sliding_window = config.sliding_window
            expand = getattr(module, "kv_b_proj", None)
            if isinstance(expand, nn.Linear):
                expand.forward = _in_blocks(expand, shared)  # type: ignore[assignment]
    return shared


def _in_blocks(linear: nn.Linear, shared: AttentionPass) -> Callable[[Tensor], Tensor]:
    """What makes keys and values of latents, for decoding passes some at a time.

    A pass expands the latents of all keys that it looks at. In products of one shape a key has the same bits whether
    the pass looks at 256 or 4096 keys.
    """

    def forward(x: Tensor) -> Tensor:
        if shared.positions is None or x.shape[-2] <= _LATENTS:
            return F.linear(x, linear.weight, linear.bias)
        parts = torch.split(x, _LATENTS, -2)
        return torch.cat([F.linear(part, linear.weight, linear.bias) for part in parts], -2)

    return forward


def refuse(model: nn.Module) -> None:
    """Keep away from a model whose attention is not computed here; it may be on the meta device.

    Raises:
        InputError: it has sinks, or bounds its scores.
    """
    sinks = any("sinks" in module._parameters for module in model.modules())
    if sinks or getattr(model.config, "attn_logit_softcapping", None) is not None:
        raise _not_plain(sinks)


def _not_plain(sinks: bool) -> InputError:
    return InputError(
        expected="plain attention for a run on a GPU",
        found="attention with sinks" if sinks else "attention with bounded scores",
        mend="run this model with --device cpu",
    )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The library's attention function.

    Args:
        module: the attention module, which has an `AttentionPass`.
        query: [1, heads, rows, size].
        key, value: [1, key heads, keys, size].
        attention_mask: not used; the pass knows better.
        scaling: of the scores.
        sliding_window: keys that a row looks back on.
        softcap, s_aux: of families with bounded scores or sinks.

    Returns:
        [1, rows, heads, size], and no weights.

    Raises:
        InputError: softcap or sinks, which are not computed here.
    """
    if softcap is not None or s_aux is not None:
        raise _not_plain(sinks=s_aux is not None)
    here: AttentionPass = module.moespeq_pass  # type: ignore[assignment]
    window = sliding_window if sliding_window is not None else getattr(module, "sliding_window", None)
    heads, rows = query.shape[1:3]
    groups = heads // key.shape[1]
    if here.positions is not None:  # rows of heads that share keys are rows of one head: no key is copied
        query = query.reshape(1, key.shape[1], groups * rows, query.shape[-1])
        mask = here.mask(window, groups, query.device)
    else:
        mask = here.mask(window, 1, query.device)
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    kernels = sdpa_kernel(_ROWS if here.positions is not None else _BLOCK) if query.is_cuda else nullcontext()
    with kernels:
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, is_causal=mask is None)
    return y.reshape(1, heads, rows, y.shape[-1]).transpose(1, 2).contiguous(), None
