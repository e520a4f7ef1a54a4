"""Decoding on a GPU with experts that do not fit: ways of using one amount of memory, side by side on a built model."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moespeq_cli.bench.bound import check_reads
from moespeq_cli.bench.offload_kernels import PRODUCTS, TOKEN_ORDER, with_kernels
from runtime.config import RunSettings
from runtime.decode.loop import nothing
from runtime.decode.sampling import SamplingSettings
from runtime.engine import Request
from runtime.errors import InputError
from runtime.gpu.accelerator import DeviceMemory
from runtime.gpu.engine import GpuEngine
from runtime.gpu.geometry import expert_shape
from runtime.gpu.host_tier import Arena, HostCache
from runtime.gpu.model import DeviceModel
from runtime.gpu.parts import Parts, Toolkit
from runtime.gpu.plan import Beside, make_gpu_plan
from runtime.memory.clairvoyant import Trace
from runtime.memory.location import ExpertKey
from runtime.memory.plan import MemoryPlan
from runtime.memory.sizes import parse_size
from runtime.memory.store import RecordStore
from runtime.model.families import MoeSpec

PLAIN: dict[str, Any] = {"speculate": False, "prefetch": "none", "eviction": "lru"}
CLASSIC_WINDOWS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Mode:
    """One way of decoding.

    Attributes:
        name: in the tables.
        changes: of the settings.
        all_memory: whether the cache has all the memory for experts, or what the draft leaves.
        graphs: whether passes are recorded.
        encoding: of the records.
        kernels: what computes the exact experts, of `offload_kernels`; None is the usual.
        same_text: whether it must give the others' text; with other roundings it need not.
    """

    name: str
    changes: dict[str, Any]
    all_memory: bool = False
    graphs: bool = True
    encoding: str = "raw"
    kernels: str | None = None
    same_text: bool = True


def modes(encodings: Sequence[str] = ("raw",)) -> list[Mode]:
    """The ways that are compared; of the classic ones the best counts. The last one is this program's.

    Ways without residual records have raw ones, whatever is asked for: they are what the others are measured by.
    """
    classic = [
        Mode(
            f"classic, k = {k}",
            {"prefetch_window": k, "verify_window": k, "governor": "fixed", "eviction": "lru", "fetch_rows": None},
        )
        for k in CLASSIC_WINDOWS
    ]
    looking = [Mode("lookahead", {})] if "raw" in encodings else []
    if "residual" in encodings:
        looking += [
            Mode("residual, no speculation", PLAIN, encoding="residual"),
            Mode("lookahead, residual", {}, encoding="residual"),
        ]
    return [
        Mode("SM: no draft, LRU, all memory", PLAIN, all_memory=True),
        Mode("SC: no draft, LRU, what a draft leaves", PLAIN),
        Mode("history: no draft, prefetch of the last row's, all memory", PLAIN | {"prefetch": "history"}, True),
        *classic,
        *looking,
    ]


ABLATIONS = (
    Mode("lookahead, no prefetch", {"prefetch": "none"}),
    Mode("lookahead, LRU", {"eviction": "lru"}),
    Mode("lookahead, LFU", {"eviction": "lfu"}),
    Mode("lookahead, priority", {"eviction": "priority"}),
    Mode("lookahead, no graphs", {}, graphs=False),
    Mode("lookahead, verified in token order", {}, kernels=TOKEN_ORDER),
)
UNFUSED = Mode("lookahead, no fused kernel", {}, kernels=PRODUCTS, same_text=False)
"""Of the exact experts; on GPUs for which `can_multiply` holds."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a mode did.

    Attributes:
        figures: for the tables.
        tokens: of each prompt.
        rows: experts of every row that the target computed, in order.
        trace: every demand of the target.
    """

    figures: dict[str, Any]
    tokens: list[list[int]]
    rows: list[list[ExpertKey]]
    trace: Trace


class Sweep:
    """Runs of one built model.

    Args:
        parts: the model, with its draft.
        base: settings that all modes share.
        prompts: token ids, decoded one after another with one cache.
        max_new_tokens: of each.
        repeats: runs of each mode; times are medians.
        toolkit: makes what computes, with recorded passes or without.
        device_bytes: memory to plan with; None asks the GPU.
        residual: the same model with residual records.
        disk: all exact experts, where host memory has a part of them, as the settings' `host_cache_size` says.
    """

    def __init__(
        self,
        parts: Parts,
        base: RunSettings,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        repeats: int,
        toolkit: Callable[[bool], Toolkit] | None = None,
        device_bytes: int | None = None,
        residual: Parts | None = None,
        disk: RecordStore | None = None,
    ) -> None:
        self._parts, self._base, self._prompts = parts, base, prompts
        self._max_new_tokens, self._repeats = max_new_tokens, repeats
        self._toolkit = toolkit or (lambda graphs: Toolkit.cuda(base, graphs))
        self._toolkits = {graphs: self._toolkit(graphs) for graphs in (True, False)}
        self._device_bytes, self._disk = device_bytes, disk
        spec = parts.model.spec
        assert parts.bank is not None
        self._encodings = {"raw": parts} | ({} if residual is None else {"residual": residual})
        self.expert_bytes = spec.num_records * parts.store.max_record_bytes
        self.draft_bytes = parts.bank.num_bytes

    def plan(self, settings: RunSettings, encoding: str = "raw") -> MemoryPlan:
        """The plan of a run of this model; what of it is on the device already counts as free."""
        parts, free = self._encodings[encoding], self._device_bytes
        self._toolkits[True].accelerator.forget_peak()  # what torch keeps for later is free too
        if free is None:
            free = torch.cuda.mem_get_info()[0] + self._here(settings, encoding)
        return make_gpu_plan(
            self.spec,
            self.model.config.to_dict(),
            settings,
            dense_bytes=self.model.dense_bytes,
            draft_bytes=self.draft_bytes if self._leans(settings, encoding) else 0,
            slot_bytes=parts.store.max_record_bytes,
            beside=self._beside(encoding),
            device_bytes=free,
        )

    def _beside(self, encoding: str) -> Beside | None:
        parts = self._encodings[encoding]
        shape = expert_shape(self.spec, parts.activation)
        return None if parts.residual is None else Beside.of(shape, parts.residual)

    def _leans(self, settings: RunSettings, encoding: str) -> bool:
        """Whether a run needs the draft's experts, for speculation or for the records."""
        return settings.speculate or self._encodings[encoding].residual is not None

    @property
    def encodings(self) -> list[str]:
        """Of the records that there are."""
        return list(self._encodings)

    def least_record_bytes(self, encoding: str) -> int:
        """Of the smallest record."""
        return min(map(self._encodings[encoding].store.record_bytes, self.spec.expert_keys()))

    def records(self) -> dict[str, Any]:
        """What the residual records take, for the report; nothing where there are none."""
        parts, beside = self._encodings.get("residual"), self._beside(self.encodings[-1])
        if parts is None or parts.residual is None or beside is None:
            return {}
        lengths = parts.residual.payload_bytes.values()
        weights = expert_shape(self.spec, parts.activation).weights_per_expert
        return {
            "bits_per_weight": 8 * sum(lengths) / (weights * len(lengths)) if lengths else None,
            "raw_records": self.spec.num_records - len(lengths),
            "record_bytes": parts.store.max_record_bytes,
            "directory_bytes": beside.directory_bytes,
            "scratch_bytes": beside.scratch_bytes,
        }

    def of_prompt(self, prompt: list[int], max_new_tokens: int = 1) -> Sweep:
        """The same for the first tokens of one prompt, in single runs."""
        return self._with(self._base, [prompt], max_new_tokens, 1, None)

    def on_disk(self, store: RecordStore, host_cache_size: str) -> Sweep:
        """The same with so much of the exact experts in host memory, and the rest read from the disk.

        Args:
            store: of the records of the last encoding.
            host_cache_size: a size, or a share of their bytes.
        """
        base = dataclasses.replace(self._base, host_cache_size=host_cache_size)
        return self._with(base, self._prompts, self._max_new_tokens, self._repeats, store)

    def _with(
        self, base: RunSettings, prompts: Sequence[list[int]], new_tokens: int, repeats: int, disk: RecordStore | None
    ) -> Sweep:
        residual = self._encodings.get("residual")
        runs = (prompts, new_tokens, repeats, self._toolkit, self._device_bytes)
        return Sweep(self._parts, base, *runs, residual, disk)

    def made(self, encoding: str) -> Parts:
        """The model with the records of an encoding, all in host memory."""
        return self._encodings[encoding]

    @property
    def model(self) -> DeviceModel:
        """The dense part."""
        return self._parts.model

    @property
    def spec(self) -> MoeSpec:
        """What the model is."""
        return self.model.spec

    @property
    def ids(self) -> tuple[int, int]:
        """The lowest and the highest id of the prompts."""
        ids = [token for prompt in self._prompts for token in prompt]
        return min(ids), max(ids)

    def settings(self, mode: Mode, memory: str) -> RunSettings:
        """Of a mode that has so much device memory for all that experts take, draft and slots.

        Raises:
            InputError: it is less than the draft and one slot.
        """
        whole = parse_size(memory, self.expert_bytes)
        cache = whole if mode.all_memory else whole - self.draft_bytes
        beside = self._beside(mode.encoding)
        slot = self._encodings[mode.encoding].store.max_record_bytes + (0 if beside is None else beside.directory_bytes)
        if cache < slot:
            raise InputError(
                expected=f"--expert-memory above {self.draft_bytes / self.expert_bytes:.1%}, what the draft takes",
                found=memory,
                mend="name more memory",
            )
        return dataclasses.replace(self._base, expert_cache_size=str(cache), **mode.changes)

    def run(self, mode: Mode, memory: str, beside: Callable[[], list[Tensor]] = list) -> Outcome:
        """Decode all prompts, `repeats` times with a cache that starts empty.

        Args:
            mode: how.
            memory: for draft and slots.
            beside: makes what takes memory of the device during a run, and counts as the run's.

        Raises:
            InputError, PlanError: it does not fit.
        """
        settings, runs = self.settings(mode, memory), []
        for _ in range(self._repeats):
            runs.append(self._once(settings, mode, beside))
        middle = sorted(runs, key=lambda run: run.figures["ms_per_token"])[len(runs) // 2]
        times = [run.figures["ms_per_token"] for run in runs]
        spread = {"ms_per_token": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}
        way = {"mode": mode.name, "encoding": mode.encoding, "memory": memory, "changes": mode.changes}
        return dataclasses.replace(middle, figures=middle.figures | way | spread)

    def _once(self, settings: RunSettings, mode: Mode, beside: Callable[[], list[Tensor]]) -> Outcome:
        encoding, toolkit = mode.encoding, with_kernels(self._toolkits[mode.graphs], mode.kernels)
        plan = self.plan(settings, encoding)  # the peak is forgotten from here on
        before = toolkit.accelerator.memory()
        left_over_bytes = before.tensors - self._here(None, encoding)
        here, _kept = self._here(settings, encoding), beside()
        made = self._encodings[encoding]
        assert isinstance(made.tier, Arena)
        bank = made.bank if self._leans(settings, encoding) else None
        parts = dataclasses.replace(made, tier=made.tier.borrowed(), bank=bank)
        if self._disk is not None:
            tier = HostCache(self._disk, plan.host_slots, settings.max_parallel_transfers)
            parts = dataclasses.replace(parts, store=self._disk, tier=tier)
        rows: list[list[ExpertKey]] = []
        with GpuEngine(parts, settings, plan, toolkit, keep_trace=True) as engine:
            inner = engine.rows

            def kept(tokens: Sequence[int], position: int, begun: Callable[[], None] = nothing) -> Any:
                scores, routes = inner(tokens, position, begun)
                rows.extend(routes)
                return scores, routes

            engine.rows = kept  # type: ignore[method-assign]
            request = (self._max_new_tokens, frozenset[int](), SamplingSettings())
            tokens = [list(engine.generate(Request(prompt, *request))) for prompt in self._prompts]
            report, trace = engine.report(), engine.trace()
            everything = plan.num_slots >= engine.spec.num_records  # then all of it was read before the first text
            fewest = 0 if everything else check_reads(trace, plan.num_slots, engine.cache.stats)
            after = DeviceMemory(**report["device_memory"])
        figures = _figures(report, fewest * self.least_record_bytes(encoding), plan) | {
            "peak_bytes": here + after.most_tensors - before.tensors,
            "taken_bytes": here + after.most_taken - before.taken,
            "left_over_bytes": left_over_bytes,
        }
        return Outcome(figures, tokens, rows, trace)

    def _here(self, settings: RunSettings | None, encoding: str) -> int:
        """Bytes of a plan that are on the device before its run begins; without settings all that is there."""
        draft = self.draft_bytes if settings is None or self._leans(settings, encoding) else 0
        return self.model.dense_bytes + self.model.kv.allocated_bytes + draft


def _figures(report: dict[str, Any], own_bound_bytes: int, plan: MemoryPlan) -> dict[str, Any]:
    cache, seconds, tokens = report["expert_cache"], report["seconds"], report["new_tokens"]
    decode_s, host = seconds["total"] - seconds["prefill"], report["host_cache"]
    return {
        "ms_per_token": report["ms_per_token"],
        "bytes_per_token": report["bytes_per_token"],
        "total_bytes_per_token": cache["read_bytes"] / tokens,
        "own_bound_bytes_per_token": own_bound_bytes / tokens,
        "hit_rate": cache["hit_rate"],
        "accepted_per_round": report["accepted_per_round"],
        "tokens_per_round": report["tokens_per_round"],
        "acceptance": report["acceptance"],
        "routing_agreement": report["routing_agreement"],
        "draft_ms_per_token": 1e3 * seconds["draft"] / tokens,
        "verify_ms_per_token": 1e3 * seconds["verify"] / tokens,
        "wait_ms_per_token": 1e3 * seconds["waiting_for_experts"] / tokens,
        "link_utilisation": report["link_utilisation"],
        "link_utilisation_while_missing": report["link_utilisation_while_missing"],
        "link_gb_per_s": (report["link_bytes_per_s"] or 0) / 1e9,
        "prefill_s": seconds["prefill"],
        "prefill_read_bytes": report["prefill_read_bytes"],
        "decode_s": decode_s,
        "recording_s": report["recording_s"],
        "new_tokens": tokens,
        "num_slots": plan.num_slots,
        "planned_bytes": plan.total_bytes,
        "host_slots": plan.host_slots,
        "disk_bytes_per_token": 0 if host is None else host["read_bytes"] / tokens,
        "host_cache": host,
        "expert_cache": cache,
    }


def make_prompts(count: int, length: int, first_id: int, last_id: int, seed: int = 0) -> list[list[int]]:
    """Random ids of the built model's texts."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(first_id, last_id, (count, length), generator=generator).tolist()


def first_token(sweep: Sweep, memory: str, length: int) -> dict[str, Any]:
    """Time to the first token of a prompt, the cache empty; the second of two runs, as the first one compiles.

    Passes are recorded before, as for the first text of an engine: `recording_ms`, which `ms` does not hold.
    `link_ms` is what the bytes read take at the highest rate that the link showed in these runs.
    """
    (prompt,) = make_prompts(1, length, *sweep.ids, seed=length)
    one = sweep.of_prompt(prompt)
    runs = [one.run(modes(sweep.encodings)[-1], memory).figures for _ in range(2)]
    best_rate = max(run["link_gb_per_s"] for run in runs) * 1e9
    last = runs[-1]
    read = last["total_bytes_per_token"] * last["new_tokens"]
    return {
        "tokens": length,
        "ms": 1e3 * (last["prefill_s"] + last["decode_s"]),
        "prefill_ms": 1e3 * last["prefill_s"],
        "recording_ms": 1e3 * last["recording_s"],
        "read_bytes": read,
        "link_ms": 1e3 * read / best_rate if best_rate else None,
    }
