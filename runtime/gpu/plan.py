"""What a run on a GPU takes of its memory and of the host's, before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
import math
from types import SimpleNamespace
from typing import Any

import torch

from runtime.artifacts.pack import Pack
from runtime.config import RunSettings
from runtime.errors import InputError, PlanError
from runtime.gpu.bank import bank_bytes, bank_form
from runtime.gpu.engine import BLOCK_TOKENS
from runtime.gpu.geometry import expert_shape
from runtime.gpu.parts import drafts, plan_activation
from runtime.gpu.residual_facts import ResidualFacts, directory_bytes, scratch_bytes
from runtime.gpu.target import ROWS
from runtime.kernels import residual_plan
from runtime.kernels.device import Gpu
from runtime.kernels.layout import SlotLayout
from runtime.kernels.shape import ExpertShape
from runtime.memory.machine import available_memory_bytes
from runtime.memory.plan import MemoryPlan, make_plan
from runtime.memory.sizes import format_size, parse_size
from runtime.model.families import MoeSpec
from runtime.model.host import context_limit
from runtime.model.kv import bytes_per_token

_SLOT_SHARE = 0.9  # of what the other parts leave, where no size is asked for
_HOST_SHARE = 0.8  # of the host's memory, likewise
_MASK_BYTES = 6  # of a key for a row: as a byte, twice, and as the BF16 numbers that are added, twice
_ROTARY_BYTES = 4  # cosine and sine, or a complex number for two, of a rotated dimension
_LIBRARY_BYTES = 400_000_000  # libraries' work space, recorded passes, fragments of the allocator; measured on an H200


def plan_gpu(
    pack: Pack, settings: RunSettings, device_bytes: int | None = None, host_bytes: int | None = None
) -> MemoryPlan:
    """What goes where.

    Args:
        pack: an opened pack.
        settings: of the run.
        device_bytes, host_bytes: memory to plan with; None asks the machine.

    Raises:
        PlanError: it does not fit; the message names what would.
        InputError, ShapeError: a model or a setting that a run on a GPU does not take.
    """
    shape, residual = refuse(pack, settings), ResidualFacts.of(pack)
    config = json.loads((pack.config_folder / "config.json").read_text(encoding="utf-8"))
    try:
        return make_gpu_plan(
            pack.spec,
            config,
            settings,
            dense_bytes=2 * sum(math.prod(pack.dense_info(name).shape) for name in pack.dense_names()),
            draft_bytes=bank_bytes(pack, shape) if drafts(settings) or residual is not None else 0,
            slot_bytes=pack.target_slot_bytes,
            beside=None if residual is None else Beside.of(shape, residual),
            device_bytes=device_bytes,
            host_bytes=host_bytes,
        )
    except PlanError as error:
        less = "--no-speculate takes less of it, " if drafts(settings) and residual is None else ""
        error.mend += f"; this is a run on a GPU: {less}--device cpu none"
        raise


def refuse(pack: Pack, settings: RunSettings, gpu: Gpu | None = None) -> ExpertShape:
    """Keep away from what a run on a GPU does not compute.

    Args:
        pack: an opened pack.
        settings: of the run.
        gpu: where it is to run; None leaves out what depends on that.

    Returns:
        The geometry of the layers of experts.

    Raises:
        InputError: weights that are not BF16, another arithmetic, residual records beside other drafts than INT4 or on
            an older GPU, kernels of another layout, or a model with another activation or attention than those of a
            run on a GPU.
        ShapeError: sizes that the kernels cannot compute.
    """
    residual = ResidualFacts.of(pack)
    checks = (
        (pack.spec.dtype == "BF16", "experts in BF16", f"{pack.spec.dtype} in {pack.folder}"),
        (settings.dtype in ("auto", "bfloat16"), "--dtype auto or bfloat16", settings.dtype),
        (
            residual is None or gpu is None or gpu.capability >= residual_plan.CAPABILITY,
            "raw records, or compute capability 9.0 or newer for residual ones,",
            f"residual records in {pack.folder}{'' if gpu is None else f', {gpu.name}'}",
        ),
        (
            settings.fused_kernel.experts_per_block <= 1,
            "a fused_kernel with experts_per_block of 0 or 1, as experts come and go one by one",
            str(settings.fused_kernel.experts_per_block),
        ),
    )
    for good, expected, found in checks:
        if not good:
            raise InputError(
                expected=f"{expected} for a run on a GPU", found=found, mend="change that, or run with --device cpu"
            )
    shape = expert_shape(pack.spec, plan_activation(pack))
    if residual is not None and gpu is not None:
        for layer_id in sorted({layer_id for layer_id, _ in residual.payload_bytes}):
            layout = SlotLayout(shape, bank_form(pack.draft_format(layer_id), pack.spec))
            residual_plan.plan(layout, ROWS, settings.fused_kernel, gpu.smem_per_block_bytes)
    return shape


@dataclasses.dataclass(frozen=True, slots=True)
class Beside:
    """What residual records take of the device beside their own bytes.

    Attributes:
        directory_bytes: for each slot.
        scratch_bytes: BF16 slots that a prompt's experts are decoded to.
        kernel_sets: kernels that keep sorted rows: another set where some records are raw.
    """

    directory_bytes: int
    scratch_bytes: int
    kernel_sets: int = 1

    @classmethod
    def of(cls, shape: ExpertShape, facts: ResidualFacts) -> Beside:
        """For layers of a geometry."""
        return cls(directory_bytes(shape), scratch_bytes(shape), 1 if facts.all_residual else 2)


def make_gpu_plan(
    spec: MoeSpec,
    config: dict[str, Any],
    settings: RunSettings,
    *,
    dense_bytes: int,
    draft_bytes: int,
    slot_bytes: int,
    beside: Beside | None = None,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
) -> MemoryPlan:
    """The plan of a model that is known by its sizes.

    Args:
        spec, config: of the model.
        settings: of the run.
        dense_bytes, draft_bytes: as in `MemoryPlan`.
        slot_bytes: the largest record.
        beside: what residual records take besides; None for raw ones.
        device_bytes, host_bytes: memory to plan with; None asks the machine.

    Raises:
        PlanError: it does not fit.
    """
    context = min(settings.context, context_limit(config))
    available = torch.cuda.mem_get_info()[0] if device_bytes is None else device_bytes
    directory = 0 if beside is None else beside.directory_bytes
    plan = make_plan(
        dense_bytes=dense_bytes,
        draft_bytes=draft_bytes,
        kv_bytes_per_token=bytes_per_token(SimpleNamespace(**config), torch.bfloat16),
        context_tokens=context,
        slot_bytes=slot_bytes + directory,
        num_experts_total=spec.num_records,
        top_k=spec.top_k,
        num_moe_layers=len(spec.moe_layers),
        cache_size=settings.expert_cache_size,
        max_parallel_transfers=settings.max_parallel_transfers,
        available_bytes=available,
        workspace_bytes=workspace_bytes(spec, config, context, beside),
        default_share=_SLOT_SHARE,
    )
    host = available_memory_bytes() if host_bytes is None else host_bytes
    slots = _host_slots(settings.host_cache_size, spec.num_records, slot_bytes, host)
    return dataclasses.replace(plan, host_slots=slots, host_available_bytes=host, directory_bytes=directory)


def workspace_bytes(spec: MoeSpec, config: dict[str, Any], context_tokens: int, beside: Beside | None = None) -> int:
    """Device memory beside weights, slots and KV: a prompt's sorted rows, activations, attention, logits, scratch."""
    block = min(BLOCK_TOKENS, context_tokens)
    pairs, hidden = block * spec.top_k, spec.hidden_size
    sorted_rows = pairs * (2 * hidden + 2 * spec.moe_intermediate_size + 4 * hidden)
    waves = pairs * 4 * hidden
    widest = max(int(config.get(name) or 0) for name in ("intermediate_size", "shared_expert_intermediate_size"))
    activations = 2 * block * (8 * hidden + 3 * widest)
    logits = ROWS * int(config["vocab_size"]) * 6
    if beside is not None:
        sorted_rows = sorted_rows * beside.kernel_sets + beside.scratch_bytes
    return sorted_rows + waves + activations + logits + _attention_bytes(config, block, context_tokens) + _LIBRARY_BYTES


def _attention_bytes(config: dict[str, Any], block: int, context_tokens: int) -> int:
    """Tables of rotary positions, and what a layer makes of the whole context for a later block of a prompt."""
    masks = block * context_tokens * _MASK_BYTES if context_tokens > block else 0
    heads = int(config["num_attention_heads"])
    if config.get("kv_lora_rank"):  # keys and values are kept compressed
        plain, rotated, value = (int(config[f"{name}_head_dim"]) for name in ("qk_nope", "qk_rope", "v"))
        tables = context_tokens * rotated * _ROTARY_BYTES
        return masks + tables + 2 * context_tokens * heads * (2 * plain + rotated + 2 * value)
    repeated = heads > int(config.get("num_key_value_heads") or heads)
    head_size = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    tables = context_tokens * head_size * _ROTARY_BYTES
    return masks + tables + (4 * context_tokens * heads * head_size if repeated else 0)


def _host_slots(size: str | None, num_records: int, slot_bytes: int, available_bytes: int) -> int:
    most = available_bytes // slot_bytes
    if size is None:
        slots = min(num_records, int(available_bytes * _HOST_SHARE) // slot_bytes)
    else:
        slots = min(num_records, parse_size(size, num_records * slot_bytes) // slot_bytes)
    if most < 1:
        raise PlanError(
            expected=f"host memory for a host cache of one expert, {format_size(slot_bytes)}",
            found=f"{format_size(available_bytes)} available",
            mend="free memory",
        )
    if slots < 1 or slots > most:
        raise PlanError(
            expected=f"a host cache of {format_size(slot_bytes)} to {format_size(most * slot_bytes)}",
            found=format_size(slots * slot_bytes),
            mend="pass another --host-cache, or free memory",
        )
    return slots
