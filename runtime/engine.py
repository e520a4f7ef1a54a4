"""A pack made ready to decode: plan, model, draft bank, expert cache, loop."""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from runtime.artifacts.heat import Heat, hottest
from runtime.artifacts.pack import Pack
from runtime.artifacts.residual_decoder import why_slow
from runtime.config import RunSettings
from runtime.decode.bank import DraftBank
from runtime.decode.draft_records import DraftRecords
from runtime.decode.governor import Measured, make_governor
from runtime.decode.loop import Draft, LoopSettings, Route, SpeculativeLoop, StepwiseDraft, nothing
from runtime.decode.sampling import Chooser, Logits, SamplingSettings
from runtime.decode.target import TargetExperts
from runtime.errors import InputError, PlanError
from runtime.memory.cache import ExpertCache
from runtime.memory.eviction import make_policy
from runtime.memory.location import ExpertKey
from runtime.memory.plan import MemoryPlan
from runtime.memory.predict import make_predictor
from runtime.memory.slots import SlotPool
from runtime.memory.store import RecordStore
from runtime.memory.window import rows_to_fetch
from runtime.model.families import MoeSpec
from runtime.model.host import Host
from runtime.model.rowwise import MAX_ROWS
from runtime.run_plan import compute_dtype
from runtime.stats import DecodeStats
from runtime.threads import set_threads

_CHECKED_AT_ONCE_BYTES = 4_000_000_000  # a few seconds of reading


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to continue."""

    prompt: Sequence[int]
    max_new_tokens: int
    stop_ids: frozenset[int]
    sampling: SamplingSettings


class BaseEngine(ABC):
    """Generates tokens from a pack, one text at a time, wherever model and experts are.

    Attributes:
        plan: what was planned to lie where.
        cache: the exact experts.
        stats: counts over all sequences so far.
        load_s: seconds that loading took.
    """

    max_rows: ClassVar[int] = MAX_ROWS  # of one pass of the target
    rows_at_once: ClassVar[int] = 1  # that a pass computes in the time of one

    cache: ExpertCache
    stats: DecodeStats
    load_s: float

    def __init__(self, spec: MoeSpec, settings: RunSettings, plan: MemoryPlan) -> None:
        self.spec, self.settings, self.plan = spec, settings, plan
        self._texts = 0
        self._warm_rows: list[list[ExpertKey]] = []  # while the cache is filled for the first time
        self._measured = Measured(self.rows_at_once)

    @property
    @abstractmethod
    def model_config(self) -> Any:
        """The library's configuration object."""

    @property
    @abstractmethod
    def model_context(self) -> int:
        """Positions that the model can be run for."""

    @abstractmethod
    def start(self, capacity: int) -> None:
        """Begin a sequence of at most so many tokens."""

    @abstractmethod
    def draft(self) -> Draft | None:
        """The draft, or None where none is loaded."""

    @abstractmethod
    def prefill(self, tokens: Sequence[int]) -> None:
        """The loop's target: write the KV of the prompt."""

    @abstractmethod
    def rows(
        self, tokens: Sequence[int], position: int, begun: Callable[[], None] = nothing
    ) -> tuple[Sequence[Logits], list[Route]]:
        """The loop's target: exact logits and routing of a few rows."""

    @abstractmethod
    def announce(
        self, upcoming: Sequence[Sequence[ExpertKey]], fetch_rows: int | None = None, *, pass_rows: int = 1
    ) -> None:
        """The loop's experts: say which ones the coming rows need; see `ExpertCache.announce`."""

    @abstractmethod
    def close(self) -> None:
        """Stop the readers and let go of files and memory."""

    @property
    def max_context(self) -> int:
        """Prompt and new tokens at most: the model's limit, or the one planned for."""
        return min(self.model_context, self.settings.context)

    def room(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """How many tokens may be generated: what was asked for, or what the context leaves.

        Raises:
            InputError: an empty prompt, or one that does not fit.
        """
        return context_room(prompt_tokens, max_new_tokens, self.max_context)

    def generate(self, request: Request) -> Iterator[int]:
        """Yield new token ids as the target decides them, the stop id included.

        Raises:
            InputError: the prompt is empty or does not fit, or an id is not in the vocabulary.
            ArtifactError, StorageError: a record cannot be read.
        """
        room = self._begin(request)
        settings, text, cache = self.settings, self._texts, self.cache
        draft = self.draft()
        loop = SpeculativeLoop(
            target=self,
            draft=draft,
            experts=self,
            chooser=Chooser(request.sampling),
            predictor=make_predictor(settings.prefetch),
            governor=make_governor(_governor(settings, request.sampling), settings.verify_window),
            stats=self.stats,
            measured=self._measured,
        )
        slots = self.plan.num_slots / len(self.spec.moe_layers)
        fetch_rows = rows_to_fetch(settings.fetch_rows, slots, self.spec.num_experts, self.spec.top_k)
        limits = LoopSettings(
            max_new_tokens=room,
            stop_ids=request.stop_ids,
            prefetch_window=settings.prefetch_window if draft is not None else 0,
            fetch_rows=0 if settings.prefetch == "none" else fetch_rows,
            max_rows=self.max_rows,
        )
        started = time.perf_counter()
        try:
            for token in loop.generate(request.prompt, limits):
                yield token
                self._check_current(text)
        finally:
            self.stats.total_s += time.perf_counter() - started
            cache.rest()

    def _begin(self, request: Request) -> int:
        """Check a request and start its KV cache; returns how many tokens may be generated."""
        room = self.room(len(request.prompt), request.max_new_tokens)
        vocab_size = int(self.model_config.vocab_size)
        if bad := [token for token in request.prompt if not 0 <= token < vocab_size]:
            raise InputError(
                expected=f"prompt ids below the vocabulary size {vocab_size}",
                found=str(bad[0]),
                mend="use the tokenizer that belongs to the model",
            )
        self.cache.recover()  # an earlier text may have been interrupted anywhere
        self.start(len(request.prompt) + room)
        self._texts += 1
        return room

    def _check_current(self, text: int) -> None:
        if text != self._texts:
            raise InputError(
                expected="one text at a time on an engine",
                found="another one begun before this one ended",
                mend="finish the first text, or open a second engine",
            )

    def announce_prompt(self, tokens: int) -> None:
        """Have layers fetched ahead where a prompt of so many tokens will meet most experts."""
        most = tokens * self.spec.top_k >= 2 * self.spec.num_experts
        if most:
            self.announce([self.spec.expert_keys()], 0 if self.settings.prefetch == "none" else None)
        else:
            self.announce(self._warm_rows)
        self._warm_rows = []

    def warm(self, heat: Heat | None) -> None:
        """Begin to read the experts that a profile used most into empty slots, where the settings ask for it."""
        if self.settings.warm and heat is not None:
            self._warm_rows = [[key] for key in hottest(heat, self.plan.num_slots)]
            self.announce(self._warm_rows)

    @property
    def complete(self) -> bool:
        """The loop's experts: whether all are resident."""
        return self.cache.num_resident == self.spec.num_records

    def missing_bytes(self, keys: Sequence[ExpertKey]) -> int:
        """The loop's experts: bytes of those that are not resident."""
        return self.cache.missing_bytes(keys)

    def trace(self) -> list[list[ExpertKey]]:
        """Every demand of the target, in order, where `keep_trace` was set."""
        return self.stats.trace

    def report(self) -> dict[str, Any]:
        """Everything `--stats` writes but the texts."""
        return {
            "model_type": self.spec.model_type,
            "settings": dataclasses.asdict(self.settings),
            "plan": dataclasses.asdict(self.plan),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "load_s": self.load_s,
            **self.stats.as_json(),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Engine(BaseEngine):
    """A run on the processor; close it, or use it in a `with`.

    Attributes:
        host: the model, for its configuration.
    """

    def __init__(self, pack: Pack, settings: RunSettings, plan: MemoryPlan, keep_trace: bool = False) -> None:
        """Load everything that stays in memory.

        Raises:
            ArtifactError: a file of the pack is damaged.
            InputError: transformers cannot build the model.
        """
        super().__init__(pack.spec, settings, plan)
        pack.check_dense()
        self.pack = pack
        dtype = compute_dtype(pack, settings)
        set_threads(settings.threads, pack.target_layout.padded_bytes)
        started = time.perf_counter()
        self.host = Host(pack.config_folder, pack.spec, dtype, pack.read_dense, pack.dense_names())
        drafting = settings.speculate and settings.prefetch_window > 0
        self._drafts = DraftRecords(pack, settings.direct_io) if pack.leans_on_draft else None
        self._bank = DraftBank(pack, dtype, settings.direct_io, self._drafts) if drafting else None
        self._store = RecordStore(pack.target_locations(), direct=settings.direct_io)
        try:
            pool = SlotPool(plan.num_slots, plan.slot_bytes)
            if checked_at_once(settings, plan):
                self._store.check_all(pool.buffer(0))
            policy = make_policy(
                settings.eviction, heat=pack.heat, alpha=settings.alpha, beta=settings.beta, gamma=settings.gamma
            )
            self.cache = ExpertCache(self._store, pool, policy, settings.max_parallel_transfers)
        except BaseException:
            self._store.close()
            raise
        self.stats = DecodeStats(self.cache.stats)
        self._experts = TargetExperts(pack, self.cache, dtype, self._drafts, self.stats.trace if keep_trace else None)
        self.warm(pack.heat)
        self.load_s = time.perf_counter() - started

    @property
    def model_config(self) -> Any:
        """The library's configuration object."""
        return self.host.config

    @property
    def model_context(self) -> int:
        """Positions that the model can be run for."""
        return self.host.max_context

    def start(self, capacity: int) -> None:
        """See `BaseEngine`."""
        self.host.start(capacity)

    def draft(self) -> Draft | None:
        """See `BaseEngine`."""
        return StepwiseDraft(self.step) if self._bank is not None else None

    def announce(
        self, upcoming: Sequence[Sequence[ExpertKey]], fetch_rows: int | None = None, *, pass_rows: int = 1
    ) -> None:
        """See `BaseEngine`."""
        self.cache.announce(upcoming, fetch_rows, pass_rows=pass_rows)

    def draft_alone(self, request: Request) -> Iterator[int]:
        """Yield what the quantised model would say without the target: a measure of the draft, not an answer.

        Raises:
            InputError: the prompt is empty or does not fit, or the settings load no draft.
        """
        if self._bank is None:
            raise InputError(
                expected="settings with a draft", found="none loaded", mend="set speculate and a prefetch window"
            )
        room = self._begin(request)
        text = self._texts
        self.host.prefill(request.prompt[:-1], self._bank)
        self._bank.routes.forget()
        chooser, token = Chooser(request.sampling), request.prompt[-1]
        for position in range(len(request.prompt) - 1, len(request.prompt) - 1 + room):
            token = chooser.draft(self.step(token, position)[0], position + 1).token
            yield token
            self._check_current(text)
            if token in request.stop_ids:
                return

    def prefill(self, tokens: Sequence[int]) -> None:
        """See `BaseEngine`."""
        self.announce_prompt(len(tokens))
        self.host.prefill(tokens, self._experts)
        self._experts.routes.forget()

    def rows(
        self, tokens: Sequence[int], position: int, begun: Callable[[], None] = nothing
    ) -> tuple[list[Logits], list[Route]]:
        """See `BaseEngine`."""
        begun()
        logits = self.host.rows(tokens, position, self._experts)
        return list(logits), self._experts.routes.take()

    def step(self, token: int, position: int) -> tuple[Tensor, Route]:
        """The loop's draft: logits after one token, and its routing."""
        assert self._bank is not None
        logits = self.host.rows([token], position, self._bank)
        return logits[0], self._bank.routes.take()[0]

    def report(self) -> dict[str, Any]:
        """Everything `--stats` writes but the texts."""
        return super().report() | {
            "pack": str(self.pack.folder),
            "measured_bytes": {
                "dense": self.host.dense_bytes,
                "draft": sum(part.num_bytes for part in (self._bank, self._drafts) if part is not None),
                "kv": self.host.kv.allocated_bytes,
            },
            "direct_io": self._store.direct,
            "decode_s": self._experts.decode_s,
            "slow_decode": why_slow() if self.pack.leans_on_draft else None,
        }

    def close(self) -> None:
        """See `BaseEngine`."""
        self.cache.close()
        self._store.close()


def checked_at_once(settings: RunSettings, plan: MemoryPlan) -> bool:
    """Whether all records are compared with their checksums before the first token."""
    small = plan.total_expert_bytes <= _CHECKED_AT_ONCE_BYTES
    return settings.check == "all" or (settings.check == "auto" and small)


def _governor(settings: RunSettings, sampling: SamplingSettings) -> str:
    """The governor's name: under rejection sampling one that no clock decides for, so that a seed gives one text."""
    return "fixed" if sampling.depends_on_proposals and settings.governor == "roofline" else settings.governor


def context_room(prompt_tokens: int, max_new_tokens: int, max_context: int) -> int:
    """How many tokens may follow a prompt.

    Raises:
        InputError: the prompt is empty, or a negative number is asked for.
        PlanError: the prompt does not fit, or leaves no room for a single token.
    """
    if prompt_tokens < 1:
        raise InputError(expected="a prompt of at least one token", found="an empty one", mend="pass some text")
    if max_new_tokens < 0:
        raise InputError(expected="0 or more new tokens", found=str(max_new_tokens), mend="correct --max-new-tokens")
    if prompt_tokens > max_context or (max_new_tokens and prompt_tokens == max_context):
        raise PlanError(
            expected=f"a prompt that leaves room in a context of {max_context} tokens",
            found=f"{prompt_tokens} tokens",
            mend="shorten the prompt, or raise --context where the model allows it",
        )
    return min(max_new_tokens, max_context - prompt_tokens)
