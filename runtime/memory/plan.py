"""What goes where in memory, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.errors import PlanError
from runtime.memory.machine import available_memory_bytes
from runtime.memory.sizes import format_size, parse_size

__all__ = ["MemoryPlan", "format_size", "make_plan", "parse_size"]

_DEFAULT_SHARE = 0.6  # of what is left: activations, the allocator and the rest of the machine need some as well


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of each part of a run: all in one memory on a CPU; a GPU has its own, and the host's behind it.

    Attributes:
        dense_bytes: all that is not a routed expert.
        draft_bytes: the INT4 experts, 0 where neither speculation nor the target records need them.
        kv_bytes: the KV cache at its longest.
        cache_bytes: num_slots * slot_bytes.
        slot_bytes: one target expert, the largest record, and its directory.
        num_experts: routed experts of all layers.
        total_expert_bytes: slots for all of them.
        minimum_cache_bytes: one slot; correct and slow.
        recommended_cache_bytes: the experts of one token in all layers and those in flight.
        available_bytes: what the machine, or the GPU, could give when the plan was made.
        context_tokens: tokens that the KV cache is for.
        workspace_bytes: activations and the kernels' own memory, on a GPU; an estimate.
        host_slots: exact experts that the host keeps in memory for the GPU; 0 on a CPU.
        host_available_bytes: what the host could give.
        directory_bytes: of a slot, what a GPU keeps beside a residual record to find its parts.
    """

    dense_bytes: int
    draft_bytes: int
    kv_bytes: int
    cache_bytes: int
    num_slots: int
    slot_bytes: int
    num_experts: int
    total_expert_bytes: int
    minimum_cache_bytes: int
    recommended_cache_bytes: int
    available_bytes: int
    context_tokens: int = 0
    workspace_bytes: int = 0
    host_slots: int = 0
    host_available_bytes: int = 0
    directory_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Everything that the run keeps in memory, the GPU's where it computes there."""
        return self.dense_bytes + self.draft_bytes + self.kv_bytes + self.cache_bytes + self.workspace_bytes

    @property
    def host_bytes(self) -> int:
        """What the host keeps for the GPU."""
        return self.host_slots * (self.slot_bytes - self.directory_bytes)

    def lines(self) -> list[tuple[str, str]]:
        """(what, how much) for printing."""
        share = self.cache_bytes / self.total_expert_bytes
        gpu = bool(self.host_slots)
        host = [
            ("work space", format_size(self.workspace_bytes)),
            (
                "experts in host memory",
                f"{format_size(self.host_bytes)}: {self.host_slots} of {self.num_experts} experts, "
                f"of {format_size(self.host_available_bytes)} available",
            ),
        ]
        return [
            ("dense weights", format_size(self.dense_bytes)),
            ("draft experts", format_size(self.draft_bytes)),
            ("KV cache", format_size(self.kv_bytes)),
            (
                "expert cache",
                f"{format_size(self.cache_bytes)}: {self.num_slots} of {self.num_experts} experts, {share:.0%}",
            ),
            ("expert cache, minimum", format_size(self.minimum_cache_bytes)),
            ("expert cache, recommended", f"{format_size(self.recommended_cache_bytes)} or more"),
            *(host if gpu else []),
            (
                "all target experts, on disk",
                format_size(self.total_expert_bytes - self.num_experts * self.directory_bytes),
            ),
            (
                "total in GPU memory" if gpu else "total in memory",
                f"{format_size(self.total_bytes)} of {format_size(self.available_bytes)} available",
            ),
        ]


def make_plan(
    *,
    dense_bytes: int,
    draft_bytes: int,
    kv_bytes_per_token: int,
    context_tokens: int,
    slot_bytes: int,
    num_experts_total: int,
    top_k: int,
    num_moe_layers: int,
    cache_size: str | int | None = None,
    max_parallel_transfers: int = 4,
    available_bytes: int | None = None,
    workspace_bytes: int = 0,
    default_share: float = _DEFAULT_SHARE,
) -> MemoryPlan:
    """Place every part of a run, or refuse with the smallest change that would make it fit.

    Args:
        dense_bytes, draft_bytes: as in MemoryPlan.
        kv_bytes_per_token: keys and values of all layers for one token.
        context_tokens: prompt, new tokens and window at their longest.
        slot_bytes: the largest target record, padding included.
        num_experts_total: routed experts of all layers.
        top_k: experts of a token in one layer.
        num_moe_layers: layers with routed experts.
        cache_size: size of the expert cache, or its share of all expert bytes ("25%"); rounded down to whole slots
            and to the number of experts. None takes all experts, or what fits in 60 % of the memory left by the
            other parts, and never less than one slot.
        max_parallel_transfers: reads in flight, for the recommendation.
        available_bytes: memory to plan with; None asks the machine.
        workspace_bytes: as in MemoryPlan.
        default_share: of the memory left by the other parts, for experts where no cache_size says otherwise.

    Raises:
        InputError: cache_size is not a size.
        PlanError: it does not fit.
    """
    available = available_memory_bytes() if available_bytes is None else available_bytes
    kv_bytes = kv_bytes_per_token * context_tokens
    fixed_bytes = dense_bytes + draft_bytes + kv_bytes + workspace_bytes
    left_bytes = available - fixed_bytes
    if left_bytes < slot_bytes:
        raise _no_room(fixed_bytes, kv_bytes, kv_bytes_per_token, slot_bytes, available)
    if cache_size is None:
        num_slots = max(1, int(left_bytes * default_share) // slot_bytes)
    else:
        num_slots = parse_size(cache_size, num_experts_total * slot_bytes) // slot_bytes
        if num_slots < 1:
            raise PlanError(
                expected=f"an expert cache of at least one slot, {slot_bytes} bytes",
                found=str(cache_size),
                mend=f"pass --expert-cache {slot_bytes} or more",
            )
    num_slots = min(num_slots, num_experts_total)
    if num_slots * slot_bytes > left_bytes:
        largest = left_bytes // slot_bytes * slot_bytes
        raise PlanError(
            expected=f"an expert cache within {left_bytes} bytes, what {format_size(available)} of available memory "
            f"leave beside {format_size(fixed_bytes)} of dense weights, draft and KV cache",
            found=f"{num_slots * slot_bytes} bytes ({cache_size})",
            mend=f"pass --expert-cache {largest} or less ({slot_bytes} is the minimum)",
        )
    recommended = min(top_k * num_moe_layers + max_parallel_transfers, num_experts_total)
    return MemoryPlan(
        dense_bytes=dense_bytes,
        draft_bytes=draft_bytes,
        kv_bytes=kv_bytes,
        cache_bytes=num_slots * slot_bytes,
        num_slots=num_slots,
        slot_bytes=slot_bytes,
        num_experts=num_experts_total,
        total_expert_bytes=num_experts_total * slot_bytes,
        minimum_cache_bytes=slot_bytes,
        recommended_cache_bytes=recommended * slot_bytes,
        available_bytes=available,
        context_tokens=context_tokens,
        workspace_bytes=workspace_bytes,
    )


def _no_room(
    fixed_bytes: int, kv_bytes: int, kv_bytes_per_token: int, slot_bytes: int, available_bytes: int
) -> PlanError:
    """Not even one slot fits: name a shorter context where that is enough, else the memory that is needed."""
    needed = fixed_bytes + slot_bytes
    kv_room = available_bytes - (needed - kv_bytes)
    tokens = kv_room // kv_bytes_per_token if kv_bytes_per_token else 0
    mend = f"free memory or take a machine with at least {format_size(needed)} available"
    if tokens >= 1:
        mend = f"shorten the context to at most {tokens} tokens, or {mend}"
    return PlanError(
        expected=f"at least {needed} bytes of memory ({format_size(fixed_bytes)} for dense weights, draft and "
        f"KV cache, {format_size(slot_bytes)} for the smallest expert cache)",
        found=f"{available_bytes} bytes available",
        mend=mend,
    )
