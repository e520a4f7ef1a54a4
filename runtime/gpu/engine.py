"""A run on a GPU: dense part, KV and draft resident, exact experts in slots that the host's memory fills."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import torch

from runtime.config import RunSettings
from runtime.decode.loop import Draft, Route, nothing
from runtime.decode.sampling import Logits
from runtime.engine import BaseEngine, Request
from runtime.gpu.accelerator import SMALLER, Accelerator
from runtime.gpu.admission import ResidualSlots
from runtime.gpu.blocks import BlockTarget
from runtime.gpu.board import SlotBoard
from runtime.gpu.draft import DeviceDraft
from runtime.gpu.experts import RawExperts, SlotExperts
from runtime.gpu.geometry import expert_shape
from runtime.gpu.host_tier import DISK_READS, Arena, ArenaCopies, HostCache, HostRecords
from runtime.gpu.parts import Parts, Toolkit, drafts
from runtime.gpu.residual import RecordExperts
from runtime.gpu.shortage import shortage
from runtime.gpu.slots import DevicePool
from runtime.gpu.target import ROWS, Exact, RowsTarget
from runtime.kernels.dispatch import Backend
from runtime.kernels.gate import MOST_NEEDED
from runtime.kernels.layout import SlotLayout
from runtime.kernels.rows import Routing, StepLog
from runtime.kernels.shape import ExpertShape, WeightForm
from runtime.memory.cache import ExpertCache
from runtime.memory.eviction import make_policy
from runtime.memory.location import ExpertKey
from runtime.memory.plan import MemoryPlan
from runtime.stats import DecodeStats

BLOCK_TOKENS = 4096
"""Prompt tokens of one block; the same whatever else is set, so that the KV of a prompt has the same bits."""


class GpuEngine(BaseEngine):
    """A run on a GPU; close it, or use it in a `with`.

    Args:
        parts: the model; the engine closes what it holds.
        settings: of the run.
        plan: what goes where.
        toolkit: what computes.
        keep_trace: whether to keep every demand of the target.

    Raises:
        PlanError: the device has not the memory that was planned for.
        ArtifactError, StorageError: a record cannot be read, where there are slots for all.
    """

    max_rows: ClassVar[int] = ROWS
    rows_at_once: ClassVar[int] = ROWS

    def __init__(
        self, parts: Parts, settings: RunSettings, plan: MemoryPlan, toolkit: Toolkit, keep_trace: bool = False
    ) -> None:
        super().__init__(parts.model.spec, settings, plan)
        started = time.perf_counter()
        if settings.threads:  # for what is left to the processor: drawing tokens
            torch.set_num_threads(settings.threads)
        self._parts, self._toolkit = parts, toolkit
        self._recording_s = 0.0
        accelerator, model, spec = toolkit.accelerator, parts.model, parts.model.spec
        shape = expert_shape(spec, parts.activation)
        with ExitStack() as closing:
            closing.callback(parts.close)
            closing.callback(parts.tier.close)
            closing.callback(model.let_go)
            with shortage("device memory for the KV cache and work space", SMALLER):
                self._experts = slot_experts(parts, plan, toolkit, max(ROWS, min(BLOCK_TOKENS, model.capacity)))
                closing.callback(self._experts.release)
                accelerator.catch_up()  # with the parts too, whoever made them
                self._warm_up(shape)
            policy = make_policy(
                settings.eviction, heat=parts.heat, alpha=settings.alpha, beta=settings.beta, gamma=settings.gamma
            )
            records = HostRecords(parts.store, parts.tier, accelerator)
            copies = None
            if isinstance(parts.tier, Arena) and (parts.tier.pinned or not accelerator.needs_pinned):
                copies = ArenaCopies(parts.tier, parts.store, accelerator)
            coming = self._coming()
            board = self._make_board(coming)
            self.cache = ExpertCache(records, self._experts.pool, policy, coming, copies, board)
            closing.callback(self._close_cache)
            accelerator.meanwhile = None if copies is None else self.cache.poll
            self.stats = DecodeStats(self.cache.stats)
            trace = self.stats.trace if keep_trace else None
            exact = Exact(accelerator, model, self.cache, self._experts, trace, toolkit.gates, board)
            closing.callback(accelerator.let_go)
            self._draft = None
            if parts.bank is not None and drafts(settings):
                self._draft = DeviceDraft(accelerator, model, parts.bank, settings.prefetch_window)
                closing.callback(self._draft.close)
            self._rows = RowsTarget(exact)
            closing.callback(self._rows.close)  # first of all: what frees the device's memory may wait for a pass
            self._blocks = BlockTarget(exact)
            accelerator.catch_up()
            self._host_stats = parts.tier.stats
            self._facts = {
                "pack": parts.name,
                "device": str(accelerator.device),
                "measured_bytes": {
                    "dense": model.dense_bytes,
                    "draft": 0 if parts.bank is None else parts.bank.num_bytes,
                    "kv": model.kv.allocated_bytes,
                    "expert_cache": self._experts.num_bytes,
                },
                "host_memory_pinned": parts.tier.pinned,
                "host_memory_numa": dataclasses.asdict(parts.tier.nearness()),
            }
            if plan.num_slots >= spec.num_records:
                self._load_all()
            else:
                self.warm(parts.heat)
            self._closing = closing.pop_all()
        self.load_s = time.perf_counter() - started

    def _coming(self) -> int:
        """Records that come to the device at a time, ahead of need or, where threads bring them, at all.

        Where each may stand for a read from disk there are enough to keep that busy, if a layer has room beside them.
        """
        coming = self.settings.max_parallel_transfers
        if not isinstance(self._parts.tier, HostCache):
            return coming
        return max(coming, min(DISK_READS, self._experts.pool.num_slots - self._most_of_layer()))

    def _most_of_layer(self) -> int:
        """Experts that one layer of a pass may need."""
        return min(ROWS * self.spec.top_k, self.spec.num_experts)

    def _make_board(self, coming: int) -> SlotBoard | None:
        """What passes with gates read, where there are gates, experts that come and go, and slots for a whole layer.

        And pinned memory to bring them from: a thread that made itself some while a gate waits for it might have to
        wait for the device.
        """
        spec, num_slots = self.spec, self._experts.pool.num_slots
        tier, accelerator = self._parts.tier, self._toolkit.accelerator
        if self._toolkit.gates is None or ROWS * spec.top_k > MOST_NEEDED:
            return None
        if accelerator.needs_pinned and not tier.pinned:
            return None
        if not self._most_of_layer() + coming <= num_slots < spec.num_records:
            return None
        return SlotBoard(accelerator, spec.moe_layers, spec.num_experts, ROWS, spec.top_k, self._experts.is_fresh)

    def _load_all(self) -> None:
        """Bring every expert to the device, so that no pass has to stop for one."""
        with self.cache.hold(self.spec.expert_keys()) as hold:
            hold.wait()
        self.cache.stats.forget()

    def _warm_up(self, shape: ExpertShape) -> None:
        """Run every kernel once with nothing to do and reserve the KV cache, so that recording only records."""
        accelerator, parts = self._toolkit.accelerator, self._parts
        device, places = accelerator.device, range(len(parts.model.spec.moe_layers))
        with accelerator.active():
            absent = torch.full((shape.num_experts,), -1, dtype=torch.int32, device=device)
            self._experts.warm_up()
            pairs = torch.zeros(ROWS, shape.top_k, shape.hidden_size, dtype=torch.float32, device=device)
            for told in (None, pairs):
                for place in places:
                    call = _idle_call(ROWS, shape, device)
                    self._experts.run(place, absent, *call, pairs=told, resume=told is not None)
            if parts.bank is not None and drafts(self.settings):
                for place in places:
                    parts.bank.run(place, *_idle_call(1, shape, device))
            for rows in (ROWS, 1):
                inputs = torch.zeros(rows, dtype=torch.int64, device=device)
                idle = _Idle(shape.top_k, device, ahead=rows == 1)
                logits = parts.model.rows(inputs, inputs, parts.model.length_for(1), idle)
            log = _idle_log(accelerator, len(places), shape.top_k)
            parts.model.ops.advance(logits.bfloat16(), log)
            accelerator.mark().wait()

    @property
    def model_config(self) -> Any:
        """The library's configuration object."""
        return self._parts.model.config

    @property
    def model_context(self) -> int:
        """Positions that the model can be run for."""
        return min(self._parts.model.max_context, self._parts.model.capacity)

    def _begin(self, request: Request) -> int:
        self._rows.end_pass()  # before anything waits for the device: only who opens its gates sees the end of it
        return super()._begin(request)

    def start(self, capacity: int) -> None:
        """See `BaseEngine`; the KV cache is reserved already. Passes for every length up to this one are recorded."""
        started, model = time.perf_counter(), self._parts.model
        lengths = [model.length_for(1)]
        while lengths[-1] < min(capacity, model.capacity):
            lengths.append(model.length_for(lengths[-1] + 1))
        for length in lengths:
            self._rows.prepare(length)
            if self._draft is not None:
                self._draft.prepare(length)
        self._recording_s += time.perf_counter() - started

    def draft(self) -> Draft | None:
        """See `BaseEngine`."""
        return self._draft

    def prefill(self, tokens: Sequence[int]) -> None:
        """See `BaseEngine`."""
        for start in range(0, len(tokens), BLOCK_TOKENS):
            part = tokens[start : start + BLOCK_TOKENS]
            self.announce_prompt(len(part))
            with shortage(f"device memory for {len(part)} tokens of a prompt", SMALLER):
                self._blocks.block(part, start)

    def rows(
        self, tokens: Sequence[int], position: int, begun: Callable[[], None] = nothing
    ) -> tuple[Sequence[Logits], list[Route]]:
        """See `BaseEngine`."""
        return self._rows.rows(tokens, position, begun)

    def announce(
        self, upcoming: Sequence[Sequence[ExpertKey]], fetch_rows: int | None = None, *, pass_rows: int = 1
    ) -> None:
        """See `BaseEngine`."""
        self.cache.announce(upcoming, fetch_rows, pass_rows=pass_rows)
        self._parts.tier.announce(upcoming, pass_rows, fetch=fetch_rows != 0)

    def report(self) -> dict[str, Any]:
        """Everything `--stats` writes but the texts."""
        host = self._host_stats
        return (
            super().report()
            | self._facts
            | {
                "recording_s": self._recording_s,
                "device_memory": dataclasses.asdict(self._toolkit.accelerator.memory()),
                "host_cache": None if host is None else host.snapshot(),
            }
        )

    def close(self) -> None:
        """See `BaseEngine`; afterwards there are the figures, and no memory."""
        self._closing.close()

    def _close_cache(self) -> None:
        self._toolkit.accelerator.meanwhile = None
        self.cache.close()


def slot_experts(parts: Parts, plan: MemoryPlan, toolkit: Toolkit, max_tokens: int) -> SlotExperts:
    """The slots of a run, and what computes from the records that come to them.

    Raises:
        PlanError: the device has not the memory that was planned for.
    """
    accelerator, record_bytes = toolkit.accelerator, plan.slot_bytes - plan.directory_bytes
    if parts.residual is None:
        pool = DevicePool(plan.num_slots, record_bytes, accelerator.device)
        layout = SlotLayout(expert_shape(parts.model.spec, parts.activation), WeightForm("bf16"))
        return RawExperts(pool, toolkit.kernels(layout, plan.num_slots, max_tokens), accelerator)
    assert parts.bank is not None
    slots = ResidualSlots(plan.num_slots, record_bytes, accelerator.device)

    def plain(layout: SlotLayout, num_slots: int) -> Backend:
        return toolkit.kernels(layout, num_slots, max_tokens)

    made = (parts.bank, parts.residual, parts.store, toolkit.residual, plain, accelerator, ROWS)
    with shortage(
        f"device memory for the directories of {plan.num_slots} slots and to decode a prompt's experts to",
        "make the expert cache smaller (--expert-cache), or free the GPU's memory",
    ):
        return RecordExperts(slots, *made)


class _Idle:
    """Stands in for the experts while a model is tried out."""

    def __init__(self, top_k: int, device: torch.device, ahead: bool) -> None:
        self._top_k, self._device, self.ahead = top_k, device, ahead

    def compute(self, place: int, hidden: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden)

    routed = compute

    def routing(self, place: int, rows: int) -> Routing:
        index = torch.zeros(rows, self._top_k, dtype=torch.int32, device=self._device)
        return Routing(index, torch.zeros(rows, self._top_k, device=self._device))


def _idle_log(accelerator: Accelerator, places: int, top_k: int) -> StepLog:
    """Room for what one step leaves behind."""
    state = torch.zeros(3, dtype=torch.int64, device=accelerator.device)
    chosen = torch.zeros(places, 1, top_k, dtype=torch.int32, device=accelerator.device)
    tokens, routes = accelerator.host((1,), torch.int64), accelerator.host((1, places, top_k), torch.int32)
    return StepLog(state, chosen, accelerator.seen(tokens), accelerator.seen(routes))


def _idle_call(tokens: int, shape: ExpertShape, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Tokens, chosen experts, weights and room for the result of a call whose result nobody reads."""
    hidden = torch.zeros(tokens, shape.hidden_size, dtype=torch.bfloat16, device=device)
    chosen = torch.arange(shape.top_k, dtype=torch.int32, device=device).repeat(tokens, 1)
    weights = torch.zeros(tokens, shape.top_k, dtype=torch.float32, device=device)
    return hidden, chosen, weights, torch.empty_like(hidden)
