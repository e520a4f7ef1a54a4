"""The exact experts from residual records in slots and the resident INT4 bank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from runtime.errors import ArtifactError
from runtime.gpu.accelerator import Accelerator
from runtime.gpu.admission import Admission, Arrived, Group, ListedAdmission, ResidualSlots
from runtime.gpu.bank import ResidentBank
from runtime.gpu.residual_facts import PLAIN, ResidualFacts, scratch_experts
from runtime.kernels.dispatch import Backend
from runtime.kernels.gate import FreshList
from runtime.kernels.layout import SlotLayout
from runtime.kernels.residual import ResidualPool
from runtime.kernels.residual_experts import RawSlots
from runtime.kernels.shape import WeightForm
from runtime.kernels.tuning import INVARIANT_TOKENS
from runtime.memory.location import ExpertKey
from runtime.memory.store import RecordFacts


class ResidualKernels(Protocol):
    """Few tokens from residual records; see `ResidualExperts.run`."""

    def run(
        self,
        pool: ResidualPool,
        slot_of: Tensor,
        bank_slot_of: Tensor,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        out: Tensor,
        *,
        raw: RawSlots | None = None,
        pairs: Tensor | None = None,
        resume: bool = False,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class ResidualTools:
    """What computes from residual records.

    Attributes:
        pool: the kind of pool.
        kernels: makes what computes few tokens of layers whose bank has a layout.
    """

    pool: type[ResidualPool]
    kernels: Callable[[SlotLayout], ResidualKernels]


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer of which some records are residual ones.

    Attributes:
        pool: its records and its part of the bank.
        kernels: compute few tokens from it.
        raw: bool [E] on the device, experts whose records are raw; None where there are none.
    """

    pool: ResidualPool
    kernels: ResidualKernels
    raw: Tensor | None


class RecordExperts:
    """See `SlotExperts`: residual records, and raw ones among them.

    Few tokens are computed from records, with the bits of the fused kernel in BF16. For more of them the experts of a
    call are decoded to BF16 first, some at a time, and computed as raw ones are. Raw records lie in slots of the same
    pool, which then are as large, and are computed by a launch of their own.

    A record is admitted when it is first used: its directory is made and checked on the device, behind the copy and
    before the kernels, and nothing waits for that. `settle` looks at what was found. A pass with gates admits those
    that its gates list.

    Args:
        slots: of the records.
        bank: all INT4 experts.
        facts: which records are residual ones.
        store: names records, for errors.
        tools: what computes from records.
        plain: makes what computes in BF16 from a pool of so many slots.
        accelerator: where.
        rows: of a pass with gates.
    """

    def __init__(
        self,
        slots: ResidualSlots,
        bank: ResidentBank,
        facts: ResidualFacts,
        store: RecordFacts,
        tools: ResidualTools,
        plain: Callable[[SlotLayout, int], Backend],
        accelerator: Accelerator,
        rows: int,
    ) -> None:
        self.pool, self._facts, self._store = slots, facts, store
        self._admission = Admission(accelerator, slots)
        device, spec = accelerator.device, facts.spec
        layout = SlotLayout(bank.layer(0)[0].shape, PLAIN)
        size = scratch_experts(layout.shape)
        self._scratch = layout.new_pool(size, device)
        self._decoded = plain(layout, size)
        self._raw = plain(layout, slots.num_slots)
        self._experts = torch.arange(spec.num_experts, dtype=torch.int32, device=device)
        self._num_decoded = torch.tensor([size], dtype=torch.int32, device=device)
        self._places = {layer_id: place for place, layer_id in enumerate(spec.moe_layers)}
        sizes = [[facts.payload_bytes.get((i, e), 0) for e in range(spec.num_experts)] for i in spec.moe_layers]
        payload_bytes = torch.tensor(sizes, device=device)
        self._listed = ListedAdmission(accelerator, slots, payload_bytes, min(rows * spec.top_k, spec.num_experts))
        self._layers = list(self._make(bank, tools))
        self._directory = next(layer for layer in self._layers if layer is not None).pool.directory

    def _make(self, bank: ResidentBank, tools: ResidualTools) -> Iterator[_Layer | None]:
        kernels: dict[WeightForm, ResidualKernels] = {}
        one: ResidualPool | None = None  # all layers share slots and directory
        for layer_id, place in self._places.items():
            residual, (layout, codes) = self._facts.layer(layer_id), bank.layer(place)
            if not any(residual):
                yield None
                continue
            one = one or tools.pool.of(layout, self.pool.whole, codes)
            if layout.form not in kernels:
                kernels[layout.form] = tools.kernels(layout)
            raw = None if all(residual) else ~torch.tensor(residual, device=codes.device)
            yield _Layer(one.beside(layout, codes), kernels[layout.form], raw)

    @property
    def num_bytes(self) -> int:
        """See `SlotExperts`."""
        return self.pool.whole.numel() + self._directory.numel()

    def release(self) -> None:
        """See `SlotExperts`."""
        self.pool.release()
        self._layers = []
        self._directory, self._scratch = self._directory[:0].clone(), self._scratch[:0].clone()

    def warm_up(self) -> None:
        """See `SlotExperts`."""
        nothing = self._experts[:0]
        for layer in filter(None, self._layers):
            layer.pool.admit(nothing, nothing, nothing.long(), nothing)
            list(self._decode(layer.pool, torch.full_like(self._experts, -1), 1))

    def admit(self, slots: Mapping[ExpertKey, int]) -> None:
        """See `SlotExperts`."""
        admitted, payload_bytes = self.pool.admitted, self._facts.payload_bytes
        new = [(key, slot) for key, slot in slots.items() if not admitted[slot] and key in payload_bytes]
        groups: list[Group] = []
        for layer_id, arrived in groupby(sorted(new), key=_layer_of):
            layer = self._layers[self._places[layer_id]]
            assert layer is not None
            group = layer.pool, list(arrived)
            if not self._admission.has_room([*groups, group]):
                if groups:
                    self._admission.queue(groups, payload_bytes)
                    groups = []
                self.settle()
            groups.append(group)
        if groups:
            self._admission.queue(groups, payload_bytes)

    def is_fresh(self, key: ExpertKey, slot: int) -> bool:
        """See `SlotExperts`."""
        return key in self._facts.payload_bytes and not self.pool.admitted[slot]

    def fresh_of(self, place: int) -> FreshList | None:
        """See `SlotExperts`."""
        return None if self._layers[place] is None else self._listed.of(place)

    def admit_listed(self, place: int) -> None:
        """See `SlotExperts`."""
        layer = self._layers[place]
        if layer is not None:
            self._listed.admit(place, layer.pool)

    def note_listed(self) -> None:
        """See `SlotExperts`."""
        self._listed.note()

    def forget_listed(self) -> None:
        """See `SlotExperts`."""
        self._listed.found()

    def admitted(self, slots: Mapping[ExpertKey, int]) -> None:
        """See `SlotExperts`."""
        for slot in slots.values():
            self.pool.admitted[slot] = True

    def run(
        self,
        place: int,
        slot_of: Tensor,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        out: Tensor,
        *,
        pairs: Tensor | None = None,
        resume: bool = False,
    ) -> None:
        """See `SlotExperts`."""
        layer, whole, tokens = self._layers[place], self.pool.whole, (x, top_k_index, top_k_weights, out)
        if layer is None:
            self._raw.run(whole, slot_of, *tokens, pairs=pairs, resume=resume)
            return
        raw_of = None
        if layer.raw is not None:
            raw_of, slot_of = slot_of.masked_fill(~layer.raw, -1), slot_of.masked_fill(layer.raw, -1)
        if len(x) <= INVARIANT_TOKENS:
            raw = None if raw_of is None else RawSlots(whole, raw_of)
            layer.kernels.run(layer.pool, slot_of, self._experts, *tokens, raw=raw, pairs=pairs, resume=resume)
            return
        size = len(self._scratch)
        most = min(len(slot_of), self.pool.num_slots, top_k_index.numel())  # that are here
        if pairs is None and (raw_of is not None or most > size):
            pairs = torch.empty(*top_k_index.shape, x.shape[1], dtype=torch.float32, device=x.device)
        if raw_of is not None:
            self._raw.run(whole, raw_of, *tokens, pairs=pairs, resume=resume)
            resume = True
        for scratch_of in self._decode(layer.pool, slot_of, most):
            self._decoded.run(self._scratch, scratch_of, *tokens, pairs=pairs, resume=resume)
            resume = pairs is not None

    def _decode(self, pool: ResidualPool, slot_of: Tensor, most: int) -> Iterator[Tensor]:
        """Write the experts that are here, at most `most`, to scratch slots, as many at a time as there are.

        Returns:
            Where each of them is until the next time: int32 [E], -1 for all others.
        """
        size, here = len(self._scratch), slot_of >= 0
        rank = here.cumsum(0, dtype=torch.int32) - 1
        order = torch.argsort(here.int(), descending=True, stable=True)
        for first in range(0, most, size):
            some = order[first : first + size]
            slots = torch.nn.functional.pad(slot_of[some], (0, size - len(some)), value=-1)
            codes = torch.nn.functional.pad(some.int(), (0, size - len(some)))
            pool.decode(slots, codes, self._experts[:size], self._num_decoded, self._scratch)
            now = here & (rank >= first) & (rank < first + size)
            yield torch.where(now, rank - first, -1)

    def settle(self) -> None:
        """See `SlotExperts`."""
        faulty = self._admission.settle()
        layers = self._facts.spec.moe_layers
        faulty += [((layers[place], expert_id), blocks) for place, expert_id, blocks in self._listed.found()]
        for key, blocks in faulty:
            raise ArtifactError(
                expected=f"a residual record that fits its draft in {self._store.describe(key)}",
                found=f"{blocks} blocks that do not",
                mend="make the pack again with `moespeq pack --force`",
            )


def _layer_of(arrived: Arrived) -> int:
    return arrived[0][0]
