"""Rows of token streams for training and evaluation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from runtime.errors import InputError

BOS_ID = 1


class TokenStream:
    """Random rows of one encoded stream, kept on the device.

    Aligned rows begin at the start of a document. The others begin anywhere, each stretch of the stream once an
    epoch, and get `<|bos|>` in front.
    """

    def __init__(self, ids: np.ndarray, device: str, aligned: bool, seed: int) -> None:
        self.ids = torch.from_numpy(ids.astype(np.int16)).to(device)  # the vocabulary is below 2**15
        self.device, self.aligned = device, aligned
        self.epochs = 0.0
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._starts = (self.ids == BOS_ID).nonzero().flatten()
        self._queue = self._starts[:0]
        self._queue_tokens = 0

    def rows(self, count: int, tokens: int) -> Tensor:
        """int64 [count, tokens + 1]: inputs and, one further, their targets."""
        self.epochs += count * tokens / len(self.ids)
        if self.aligned:
            usable = int(torch.searchsorted(self._starts, len(self.ids) - tokens))  # a row ends inside the stream
            self._require(usable >= 1, count, tokens)
            chosen = torch.randint(usable, (count,), device=self.device, generator=self._generator)
            return self._slices(self._starts[chosen], tokens + 1)
        rows = self._slices(self._next_stretches(count, tokens), tokens)
        return torch.cat((torch.full((count, 1), BOS_ID, device=self.device), rows), 1)

    def _next_stretches(self, count: int, tokens: int) -> Tensor:
        """Starts of stretches that do not overlap within an epoch; the grid shifts from one epoch to the next."""
        if self._queue_tokens != tokens or len(self._queue) < count:
            shift = torch.randint(tokens, (1,), device=self.device, generator=self._generator)
            stretches = (len(self.ids) - tokens) // tokens
            self._require(stretches >= count, count, tokens)
            order = torch.randperm(stretches, device=self.device, generator=self._generator)
            self._queue, self._queue_tokens = order * tokens + shift, tokens
        starts, self._queue = self._queue[:count], self._queue[count:]
        return starts

    def _require(self, enough: bool, count: int, tokens: int) -> None:
        if not enough:
            raise InputError(
                expected=f"a stream with {count} rows of {tokens} tokens",
                found=f"{len(self.ids)} tokens",
                mend="encode more documents, or train with fewer or shorter rows",
            )

    def _slices(self, starts: Tensor, length: int) -> Tensor:
        return self.ids[starts[:, None] + torch.arange(length, device=self.device)].long()


def read_tokens(folder: Path, part: str) -> np.ndarray:
    """The uint16 token ids of `PART.bin`."""
    return np.fromfile(folder / f"{part}.bin", dtype=np.uint16)


def documents_of(ids: np.ndarray) -> list[list[int]]:
    """The documents of an encoded stream, each from its `<|bos|>` to its `<|eos|>`."""
    return [document.tolist() for document in np.split(ids.astype(np.int64), np.flatnonzero(ids == BOS_ID)[1:])]


def even_rows(ids: np.ndarray, count: int, tokens: int) -> list[list[int]]:
    """`count` rows of `tokens` ids, evenly spread over a stream, each with `<|bos|>` in front."""
    step = max(1, (len(ids) - tokens) // count)
    starts = range(0, min(count * step, max(1, len(ids) - tokens)), step)
    return [[BOS_ID, *ids[start : start + tokens - 1].tolist()] for start in starts]
