"""The board: which expert lies in which slot, as a pass on the GPU reads it while the host changes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from runtime.gpu.accelerator import Accelerator
from runtime.kernels.gate import FRESH
from runtime.memory.location import ExpertKey


class SlotBoard:
    """Slots of all experts, and what a pass under way has told of its routing; both in the host's memory.

    A pass that meets a layer tells the experts that it needs and looks where they lie. From then on until the next
    layer has told its own, none of them may leave. So an expert is taken off the board only if it belongs to a layer
    that the host knows the pass to have behind it, or the pass has not looked yet: the entry goes first, and comes back
    if the layer has told meanwhile (the pass tells first and looks then, so that one of them sees the other).

    Args:
        accelerator: whose passes read it.
        moe_layers: true numbers of the layers with experts.
        num_experts: of a layer.
        rows: of a pass.
        top_k: experts of a row.
        fresh: whether what lies in a slot is not admitted yet.

    Attributes:
        seen: int32 [places, num_experts], the board as the device reads it.
        told_seen: int32 [places, rows, top_k], where it writes what a layer needs.
        stop_seen: int32 [1], ends all waiting.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        moe_layers: tuple[int, ...],
        num_experts: int,
        rows: int,
        top_k: int,
        fresh: Callable[[ExpertKey, int], bool],
    ) -> None:
        self._places = {layer_id: place for place, layer_id in enumerate(moe_layers)}
        host, told = (
            accelerator.host(sizes, torch.int32).fill_(-1)
            for sizes in ((len(moe_layers), num_experts), (len(moe_layers), rows, top_k))
        )
        stop = accelerator.host((1,), torch.int32)
        self.seen, self.told_seen, self.stop_seen = (accelerator.seen(tensor) for tensor in (host, told, stop))
        self._kept: tuple[Tensor, ...] = (host, told, stop)
        self._entries, self._told, self._stop = host.numpy(), told.numpy(), stop.numpy()
        self._is_fresh = fresh
        self._fresh: dict[ExpertKey, int] = {}
        self._admitting: dict[ExpertKey, int] = {}
        self._met: int | None = None  # the last place whose experts are held, -1 before the first; None between passes
        self._fence = threading.Lock()

    # The cache's side.

    def put(self, key: ExpertKey, slot: int) -> None:
        """An expert is there."""
        if self._is_fresh(key, slot):
            self._fresh[key] = slot
            slot |= FRESH
        else:
            self._fresh.pop(key, None)
        self._entries[self._places[key[0]], key[1]] = slot

    def withdraw(self, key: ExpertKey) -> bool:
        """Take an expert that nobody holds off the board; False, and it stays, if the pass may be using it."""
        place, met = self._places[key[0]], self._met
        if key in self._admitting and not self.has_told(0):
            return False
        entry = int(self._entries[place, key[1]])
        self._entries[place, key[1]] = -1
        if met is not None and place > met:
            with self._fence:  # the store above is seen by the device before the load below is done
                pass
            if self._told[place, -1, -1] >= 0:
                self._entries[place, key[1]] = entry
                return False
        self._fresh.pop(key, None)
        return True

    # The pass's side.

    @property
    def under_way(self) -> bool:
        """Whether a pass is."""
        return self._met is not None

    def begin(self) -> None:
        """A pass is about to be queued; none is under way."""
        self._told.fill(-1)
        self._stop.fill(0)
        self._met = -1

    def admit(self) -> dict[ExpertKey, int]:
        """What is there and not admitted, with its slots: it stays until the pass has told what its first layer needs.

        For whoever queues its admission ahead of the pass; `refresh` it then.
        """
        self._admitting = dict(self._fresh)
        return self._admitting

    def fresh_among(self, slots: Mapping[ExpertKey, int]) -> dict[ExpertKey, int]:
        """Those of these that are not admitted as the board has it."""
        return {key: slot for key, slot in slots.items() if key in self._fresh} if self._fresh else {}

    def refresh(self, slots: Mapping[ExpertKey, int]) -> None:
        """Put these on the board again: they were admitted."""
        for key, slot in slots.items():
            self.put(key, slot)

    def has_told(self, place: int) -> bool:
        """Whether the pass has told what a layer needs."""
        return self._told[place, -1, -1] >= 0 and bool((self._told[place] >= 0).all())

    def told(self, place: int) -> list[int]:
        """The experts that a layer needs, each once."""
        return list(dict.fromkeys(self._told[place].ravel().tolist()))

    def routing(self, rows: int) -> list[list[list[int]]]:
        """The experts of so many first rows, by layer."""
        experts: list[list[list[int]]] = self._told[:, :rows].tolist()
        return experts

    def meet(self, place: int) -> None:
        """The experts that a layer needs are held, or on their way and asked for."""
        self._met = place
        self._admitting = {}

    def stop(self) -> None:
        """Let the pass under way run to its end whatever is missing; what it computes means nothing."""
        self._stop.fill(1)

    def end(self) -> None:
        """The pass is over."""
        self._met = None
        self._admitting = {}
